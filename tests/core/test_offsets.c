/* SPDX-License-Identifier: Apache-2.0
 *
 * Offsets beyond 2^31 elements: a few tokens that lie gigabytes apart in reserved address space, of which only the
 * pages of those tokens ever exist. A 32-bit product anywhere on the way to an address ends in the wrong token or
 * in a fault. And outputs so large that it matters to the CPU backend whether their pages exist. */
#define _DEFAULT_SOURCE 1
#include <sys/mman.h>

#include "support/suite.h"

enum { TOKENS = 3 };
static const int64_t APART = ((int64_t)1 << 31) + 4096 + 24; /* elements from one token to the next */

/* Moves an argument into its own sparse region. Returns its size, 0 where the system does not give so much. */
static size_t spread(arg *a, char **region)
{
    size_t size = (size_t)weft_dtype_size(a->view->dtype);
    size_t bytes = ((size_t)APART * (TOKENS - 1) + (size_t)(a->elements / TOKENS) * 4) * size + 4096;
    *region = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*region == MAP_FAILED) return 0;
    double *values = arg_values(a);
    a->view->data = *region;
    a->view->stride[0] = APART;
    arg_fill(a, values);
    free(values);
    return bytes;
}

static void far_apart(const char *op, weft_dtype act, layout order, weft_exec exec)
{
    spec s = {
        .op = op, .tokens = TOKENS, .streams = 4, .channels = 40, .act = act, .wide = act, .stream_layout = order};
    problem *p = problem_make(&s);
    problem_must_run(p, exec);
    pack want = problem_pack(p);
    problem_reset(p);
    for (int i = 0; i < p->num_args; i++) {
        arg *a = &p->arg[i];
        char *region;
        if (!a->guard.block || !arg_by_token(a)) continue;
        weft_tensor keep = *a->view;
        size_t bytes = spread(a, &region);
        if (!bytes) {
            fprintf(stderr, "  no address space for %s of %s: skipped\n", a->name, op);
            *a->view = keep;
            continue;
        }
        if (problem_call(p, exec) != WEFT_OK) {
            test_failed("%s: %s spread out: %s", op, a->name, weft_last_error());
        } else {
            pack got = problem_pack(p);
            pack_expect_same(p, &got, &want, a->name);
            pack_free(&got);
        }
        munmap(region, bytes);
        *a->view = keep;
        problem_reset(p);
    }
    pack_free(&want);
    problem_free(p);
}

static void tokens_far_apart(void **state)
{
    (void)state;
    weft_isa isas[4];
    int count = grid_isas(isas);
    static const char *const ops[] = {"mhc_aggregate_fwd", "mhc_aggregate_bwd", "mhc_post_fwd", "mhc_post_bwd",
                                      "mhc_project_fwd",   "mhc_project_bwd",   "mhc_pre_fwd",  "mhc_boundary_fwd",
                                      "mhc_expand_fwd",    "mhc_contract_bwd",  "mhc_coef_fwd", "mhc_sinkhorn_bwd",
                                      "rmsnorm_fwd",       "mhc_replay_fwd",    "gdn_pre_fwd",  "gdn_pre_bwd",
                                      "gdn_rule_fwd",      "gdn_rule_bwd"};
    for (size_t o = 0; o < sizeof ops / sizeof *ops; o++)
        for (int e = -1; e < count; e++)
            for (int v = 0; v < 2; v++)
                far_apart(ops[o], v ? WEFT_BF16 : WEFT_F32, (layout)v, e < 0 ? on_ref() : on_cpu(isas[e], 1));
    test_verdict();
}

/* x of mhc_expand_fwd, beginning `shift` bytes into a region. */
static void expand_into(char *region, size_t shift, const float *u, int64_t tokens, int threads)
{
    weft_exec exec = on_cpu(WEFT_ISA_BEST, threads);
    weft_tensor in = weft_dense2((float *)(uintptr_t)u, WEFT_F32, tokens, 96);
    weft_tensor out = weft_dense3(region + shift, WEFT_F32, tokens, 4, 96);
    if (weft_mhc_expand_fwd(&exec, WEFT_ARGS(weft_mhc_expand_fwd_args, .u = in, .x = out)) != WEFT_OK)
        test_failed("%s", weft_last_error());
}

/* 9 MiB may come in huge pages, 72 MiB are handed out by tiles. */
static void untouched(int64_t tokens)
{
    enum { ROW = 96 };
    const size_t bytes = (size_t)tokens * 4 * ROW * 4, room = bytes + (3 << 20);
    static const size_t shifts[] = {0, 64, 4096 + 4, (1 << 20) + 4032};
    float *u = malloc((size_t)tokens * ROW * 4);
    for (int64_t i = 0; i < tokens * ROW; i++) u[i] = (float)(i % 8191 + 1);
    for (int k = 0; k < 8; k++) {
        size_t shift = shifts[k / 2];
        char *region = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_true(region != MAP_FAILED);
        for (int round = 0; round < 2; round++) { /* untouched, then there */
            expand_into(region, shift, u, tokens, 1 + k % 2);
            for (size_t t = 0; t < (size_t)tokens * 4; t++)
                if (memcmp(region + shift + t * ROW * 4, u + t / 4 * ROW, ROW * 4) != 0)
                    test_failed("shift %zu, round %d: row %zu differs", shift, round, t);
            for (size_t i = 0; i < room; i++)
                if ((i < shift || i >= shift + bytes) && region[i] != 0)
                    test_failed("shift %zu, round %d: byte %zu beside the output was written", shift, round, i);
            memset(region + shift, 0x55, bytes);
        }
        munmap(region, room);
    }
    free(u);
}

static void untouched_pages(void **state)
{
    (void)state;
    untouched(6144);
    untouched(8 * 6144);
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(tokens_far_apart), cmocka_unit_test(untouched_pages)};
    return suite_run("offsets", tests);
}
