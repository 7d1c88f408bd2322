/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan of gates and Sinkhorn on the GPU: sizes of histories, where they lie, and how sums over tokens are cut. Runs
 * without a GPU. */
#include "cuda/mhc/mhc_coef_plan.h"
#include "support/suite.h"

static const size_t shared_sizes[] = {44u << 10, 95u << 10, 159u << 10, 223u << 10};

static weft_mhc_numerics rule_of(int rule, int iters)
{
    return (weft_mhc_numerics){
        .sinkhorn = (weft_sinkhorn)rule, .sinkhorn_eps = 1e-6, .sinkhorn_iters = iters, .post_mult = 2};
}

/* Counted by hand from [M3]: what the start needs, then n divisors or two potentials a round; matrices for threshold. */
static void history_by_hand(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= WEFT_MAX_STREAMS; n++)
        for (int iters = 1; iters <= 10000; iters = iters * 7 + 13) {
            const int64_t want[5] = {n * n + iters * 2 * n, n * n + (2 * iters - 1) * n, n * n + 2 * iters * n,
                                     n * n + 2 * iters * n, 2 * iters * n * n};
            for (int rule = 0; rule < 5; rule++) {
                weft_mhc_numerics q = rule_of(rule, iters);
                assert_int_equal(weft_cuda_coef_history(n, &q), want[rule]);
            }
        }
}

/* Every chunk belongs to one slot, every token to one chunk; the cut follows from the tokens alone. */
static void chunks_and_slots(void **state)
{
    (void)state;
    static const int64_t tokens[] = {0,    1,     63,    64,     65,     127,       128,
                                     4096, 32768, 65536, 131072, 131073, 999999999, (int64_t)1 << 40};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        int64_t chunks, slots;
        weft_cuda_coef_cut(tokens[i], &chunks, &slots);
        assert_true(chunks * COEF_THREADS >= tokens[i] && (chunks - 1) * COEF_THREADS < tokens[i]);
        assert_true(slots <= chunks && slots <= COEF_MOST_SLOTS && (slots > 0 || tokens[i] == 0));
        assert_true(slots == chunks || slots == COEF_MOST_SLOTS || (slots == 1 && chunks <= COEF_GROUPS));
        for (int64_t n = 1; n <= WEFT_MAX_STREAMS; n++)
            for (size_t s = 0; s < 4; s++) {
                weft_mhc_numerics q = rule_of((int)(n % 5), 20);
                weft_cuda_coef_plan fwd = weft_cuda_coef_plan_fwd(tokens[i], n, &q);
                weft_cuda_coef_plan bwd = weft_cuda_coef_plan_bwd(tokens[i], n, &q, shared_sizes[s]);
                weft_cuda_coef_plan gates = weft_cuda_coef_plan_bwd(tokens[i], n, NULL, shared_sizes[s]);
                assert_true(fwd.chunks == chunks && bwd.chunks == chunks && gates.chunks == chunks);
                assert_true(fwd.slots == slots && bwd.slots == slots && gates.slots == slots);
            }
    }
}

/* What the usual case is about: four streams, 20 iterations, all rules but threshold in 48 KiB. */
static void usual_case_is_on_chip(void **state)
{
    (void)state;
    for (int rule = 0; rule < 4; rule++) {
        weft_mhc_numerics q = rule_of(rule, 20);
        weft_cuda_coef_plan p = weft_cuda_coef_plan_bwd(32768, 4, &q, 223u << 10);
        assert_true(p.in_registers && p.room == 0 && p.blocks == 512);
        assert_true(p.shared == (size_t)(p.history * 4 * COEF_THREADS) && p.shared <= 48u << 10);
        assert_int_equal(weft_cuda_coef_rooms(&p), 0);
        assert_int_equal(weft_cuda_coef_partials(&p, 27), 512 * 27);
        p = weft_cuda_coef_plan_bwd(32768, 8, &q, 223u << 10);
        assert_true(p.in_registers && 2 * p.shared <= 223u << 10);
    }
    weft_mhc_numerics q = rule_of(WEFT_SINKHORN_THRESHOLD, 20);
    assert_true(weft_cuda_coef_plan_bwd(32768, 4, &q, 223u << 10).in_registers);
    assert_true(weft_cuda_coef_plan_fwd(32768, 4, &q).in_registers);
}

/* Shared memory never exceeds what there is; what does not fit has room in a bounded workspace. */
static void limits(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= WEFT_MAX_STREAMS; n++)
        for (int rule = 0; rule < 5; rule++)
            for (int iters = 1; iters <= 10000; iters = iters * 5 + 15)
                for (size_t s = 0; s < 4; s++) {
                    weft_mhc_numerics q = rule_of(rule, iters);
                    weft_cuda_coef_plan p = weft_cuda_coef_plan_bwd((int64_t)1 << 40, n, &q, shared_sizes[s]);
                    assert_true(p.shared <= shared_sizes[s]);
                    if (p.in_registers) {
                        assert_true(weft_cuda_coef_small(n) && p.room == 0);
                        assert_true(p.shared == (size_t)(p.history * 4 * COEF_THREADS));
                        continue;
                    }
                    assert_true(p.shared == 0 && p.room == p.history + 2 * n * n);
                    assert_true(p.blocks >= 1 && p.blocks <= COEF_MOST_BLOCKS);
                    assert_true(p.blocks == 1 || weft_cuda_coef_rooms(&p) * 4 <= 64 << 20);
                    p = weft_cuda_coef_plan_fwd((int64_t)1 << 40, n, &q);
                    assert_true(p.in_registers ? p.room == 0 : p.room == n * n);
                    assert_true(weft_cuda_coef_rooms(&p) * 4 <= 64 << 20);
                }
    /* The gates alone keep nothing. */
    weft_cuda_coef_plan p = weft_cuda_coef_plan_bwd(1000, 7, NULL, shared_sizes[0]);
    assert_true(p.history == 0 && p.shared == 0 && p.room == 0 && p.blocks == 16);
    /* One slot needs no partial sums: its block writes the result. */
    p = weft_cuda_coef_plan_bwd(COEF_THREADS, 4, NULL, shared_sizes[0]);
    assert_int_equal(weft_cuda_coef_partials(&p, 27), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(history_by_hand),
        cmocka_unit_test(chunks_and_slots),
        cmocka_unit_test(usual_case_is_on_chip),
        cmocka_unit_test(limits),
    };
    return suite_run("cuda_plan_coef", tests);
}
