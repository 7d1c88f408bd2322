/* SPDX-License-Identifier: Apache-2.0
 *
 * Sizes beyond what memory can hold: every one of them is rejected by name or counted right, and none wraps round. The queries
 * look at no data, so the largest calls can be asked about. */
#include <weft/model.h>
#include <weft/optim.h>

#include "support/gpt.h"
#include "support/refuse.h"

static const int64_t most = (int64_t)1 << 48; /* elements, span, stride */

/* ---- tensors --------------------------------------------------------------------------------------------------------- */

/* 2^38 x 32 x 2^21 is 2^64: no element at all to a product that wraps round. */
static void products_do_not_wrap(void **state)
{
    (void)state;
    float one = 1;
    size_t bytes;
    weft_exec exec = on_ref();
    weft_mhc_expand_fwd_args a = {.struct_size = sizeof a,
                                  .u = {&one, WEFT_F32, 2, {(int64_t)1 << 38, 1 << 21}, {0, 0}},
                                  .x = {NULL, WEFT_F32, 3, {(int64_t)1 << 38, 32, 1 << 21}, {0, 0, 0}}};
    for (int cpu = 0; cpu < 2; cpu++) {
        if (cpu) exec = on_cpu(WEFT_ISA_BEST, 1);
        assert_int_equal(weft_mhc_expand_fwd_workspace(&exec, &a, &bytes), WEFT_ERR_ARGUMENT);
        assert_int_equal(weft_mhc_expand_fwd(&exec, &a), WEFT_ERR_ARGUMENT);
        assert_non_null(strstr(weft_last_error(), "u: expected at most 2^48 elements"));
        /* the tensor of 2^64 elements is the first that is looked at */
        weft_mhc_contract_fwd_args c = {.struct_size = sizeof c, .x = a.x, .u = a.u};
        c.x.data = &one;
        assert_int_equal(weft_mhc_contract_fwd_workspace(&exec, &c, &bytes), WEFT_ERR_ARGUMENT);
        assert_int_equal(weft_mhc_contract_fwd(&exec, &c), WEFT_ERR_ARGUMENT);
        assert_non_null(strstr(weft_last_error(), "x: expected at most 2^48 elements"));
        weft_mhc_expand_fwd_args b = a; /* few enough, but all of them in one place */
        b.u.shape[0] = b.x.shape[0] = 2, b.u.shape[1] = b.x.shape[2] = 4, b.x.data = &one;
        assert_int_equal(weft_mhc_expand_fwd(&exec, &b), WEFT_ERR_ARGUMENT);
        assert_non_null(strstr(weft_last_error(), "x: expected strides that write each element once"));
    }
}

/* One tensor with one stride that no memory has, in dimensions of any size. */
static void far_one(bench *b, weft_exec exec)
{
    static const int64_t far[] = {((int64_t)1 << 48) + 1, (int64_t)1 << 58, (int64_t)1 << 61, INT64_MAX - 1,
                                  INT64_MAX};
    EACH_ARG(b, a)
    {
        for (int d = 0; d < a->info->ndim; d++)
            for (size_t k = 0; k < sizeof far / sizeof *far; k++) {
                a->view->stride[d] = far[k];
                refuses(b, WEFT_ERR_ARGUMENT, a->name, "an absurd stride");
                query_refuses(b, WEFT_ERR_ARGUMENT, "an absurd stride");
                restore(b, exec);
            }
    }
}
TEST(strides_are_bounded, far_one)

/* A stride that is allowed, in a dimension that steps through it: the first and the last element are too far apart. */
static void wide_one(bench *b, weft_exec exec)
{
    EACH_ARG(b, a)
    {
        for (int d = 0; d < a->info->ndim; d++) {
            if (a->view->shape[d] < 2) continue;
            a->view->stride[d] = most;
            query_refuses(b, WEFT_ERR_ARGUMENT, "a span beyond 2^48");
            refuses(b, WEFT_ERR_ARGUMENT, a->name, "a span beyond 2^48");
            restore(b, exec);
        }
    }
}
TEST(spans_are_bounded, wide_one)

/* A dimension of 1 is never stepped through, so a long stride there is as good as any; and so where there are no tokens. */
static void idle_strides(void **state)
{
    (void)state;
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 2)};
    for (int e = 0; e < 2; e++)
        for (int32_t i = 0; i < weft_op_count(); i++)
            for (int tokens = 0; tokens < 2; tokens++) {
                spec s = {.op = weft_op_at(i)->name, .tokens = tokens, .streams = 2, .channels = 4, .rows = 5};
                problem *p = problem_make(&s);
                problem_must_run(p, execs[e]);
                pack want = problem_pack(p);
                bool any = false;
                for (int k = 0; k < p->num_args; k++) {
                    weft_tensor *t = p->arg[k].view;
                    bool empty = false;
                    for (int d = 0; d < t->ndim; d++) empty = empty || t->shape[d] == 0;
                    for (int d = 0; d < t->ndim; d++)
                        if (t->shape[d] == 1 || empty) t->stride[d] = most, any = true;
                }
                if (any) {
                    problem_must_run(p, execs[e]);
                    pack got = problem_pack(p);
                    pack_expect_same(p, &got, &want, "long strides in dimensions of 1");
                    pack_free(&got);
                }
                pack_free(&want);
                problem_free(p);
            }
    test_verdict();
}

/* ---- workspaces ------------------------------------------------------------------------------------------------------- */

static int64_t size_of(const int64_t sizes[], int32_t dim)
{
    const int64_t *s = sizes - WEFT_DIM_TOKENS;
    switch (dim) {
    case WEFT_DIM_GATES: return 2 * s[WEFT_DIM_STREAMS] + s[WEFT_DIM_STREAMS] * s[WEFT_DIM_STREAMS];
    case WEFT_DIM_CONV:
        return 2 * s[WEFT_DIM_KEY_HEADS] * s[WEFT_DIM_KEY_DIM] + s[WEFT_DIM_VALUE_HEADS] * s[WEFT_DIM_VALUE_DIM];
    case WEFT_DIM_OFFSETS: return s[WEFT_DIM_SEQUENCES] + 1;
    case WEFT_DIM_STEP_HEADS: return s[WEFT_DIM_STEPS] * s[WEFT_DIM_VALUE_HEADS];
    case WEFT_DIM_SCALES: return 3;
    default: return dim < WEFT_DIM_TOKENS ? dim : s[dim];
    }
}

/* Every tensor of the call with these sizes, dense. */
static void resize(bench *b, const int64_t sizes[])
{
    EACH_ARG(b, a)
    {
        uint64_t step = 1;
        for (int d = a->info->ndim - 1; d >= 0; d--) {
            a->view->shape[d] = size_of(sizes, a->info->dim[d]);
            a->view->stride[d] = (int64_t)step;
            step *= (uint64_t)a->view->shape[d];
            if (step > (uint64_t)most) step = (uint64_t)most; /* the validator says so */
        }
    }
}

/* Doubles one size after the other, in a random order: what is asked for grows along until the call is rejected. */
static void growing_one(bench *b, weft_exec exec)
{
    enum { SIZES = WEFT_DIM_CACHE - WEFT_DIM_TOKENS + 1 };
    static const int32_t dims[] = {WEFT_DIM_TOKENS,  WEFT_DIM_STREAMS,   WEFT_DIM_CHANNELS, WEFT_DIM_ROWS,
                                   WEFT_DIM_STEPS,   WEFT_DIM_KEY_HEADS, WEFT_DIM_KEY_DIM,  WEFT_DIM_VALUE_DIM,
                                   WEFT_DIM_HISTORY, WEFT_DIM_SEQUENCES, WEFT_DIM_CACHE};
    static const int64_t highest[] = {
        (int64_t)1 << 40, 32, (int64_t)1 << 26, 4096, (int64_t)1 << 40, 4096, 1024, 1024, 64, (int64_t)1 << 40,
        (int64_t)1 << 40};
    rng r = {rng_name(3, b->p->op->name)};
    for (int walk = 0; walk < 40; walk++) {
        int64_t sizes[SIZES];
        size_t before = 0, bytes = 0;
        for (int i = 0; i < SIZES; i++) sizes[i] = 1;
        sizes[WEFT_DIM_WIDTH - WEFT_DIM_TOKENS] = 2;
        b->exec.threads = 4096;
        for (int step = 0; step < 400; step++) {
            size_t k = rng_next(&r) % (sizeof dims / sizeof *dims);
            int64_t *size = &sizes[dims[k] - WEFT_DIM_TOKENS];
            if (2 * *size > highest[k]) continue;
            *size *= 2;
            sizes[WEFT_DIM_VALUE_HEADS - WEFT_DIM_TOKENS] = sizes[WEFT_DIM_HEADS - WEFT_DIM_TOKENS] =
                sizes[WEFT_DIM_KEY_HEADS - WEFT_DIM_TOKENS];
            resize(b, sizes);
            weft_status status = b->p->workspace(&b->exec, b->p->args, &bytes);
            if (status == WEFT_ERR_ARGUMENT && strstr(weft_last_error(), "expected")) break;
            if (status != WEFT_OK || bytes > (size_t)1 << 62 || bytes < before / 4) {
                test_failed("%s on %s: %zu bytes after %zu, with a size doubled (%s)", b->p->op->name,
                            exec_name(b->exec), bytes, before, weft_last_error());
                break;
            }
            before = bytes;
        }
        restore(b, exec);
    }
}
TEST(workspaces_grow, growing_one)

/* ---- tokens ------------------------------------------------------------------------------------------------------------ */

static void token_bases(void **state)
{
    (void)state;
    static const int64_t far = (int64_t)1 << 62;
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 2)};
    int seen = 0;
    for (int32_t i = 0; i < weft_op_count(); i++) {
        spec s = {.op = weft_op_at(i)->name, .tokens = 70, .streams = 2, .channels = 8, .rows = 8};
        s.dropout = (weft_dropout){.p = 0.5, .seed = 3, .token_base = far};
        problem *p = problem_make(&s);
        if (fields_dropout(p)) {
            seen++;
            grid_compare_expectation(p, execs[0]);
            grid_compare_expectation(p, execs[1]);
            static const int64_t bad[] = {((int64_t)1 << 62) + 1, INT64_MAX - 69, INT64_MAX};
            for (int e = 0; e < 2; e++)
                for (int k = 0; k < 3; k++) {
                    fields_token_base(p, bad[k]);
                    if (problem_run(p, execs[e]) != WEFT_ERR_ARGUMENT || !strstr(weft_last_error(), "token_base"))
                        test_failed("%s: token_base %lld: %s", p->op->name, (long long)bad[k], weft_last_error());
                }
        }
        problem_free(p);
    }
    assert_true(seen >= 5);
    test_verdict();
}

/* ---- model, recompute, optimisers ----------------------------------------------------------------------------------------------- */

static void models(void **state)
{
    (void)state;
    weft_exec exec = on_cpu(WEFT_ISA_BEST, 4096);
    weft_model_bytes bytes, before = {0};
    weft_model_config c = gpt_config(WEFT_RESIDUAL_MHC, WEFT_F32);
    c.context = 1 << 24;
    struct {
        int64_t *value, highest;
    } sizes[] = {{&c.vocab, 1 << 24}, {&c.channels, 1 << 20}, {&c.hidden, 1 << 22}};
    rng r = {rng_name(5, "models")};
    int64_t sequences = 1, length = 1;
    bool counted = false, rejected = false;
    const weft_model_config first = c;
    for (int walk = 0; walk < 30; walk++) {
        c = first, sequences = length = 1, memset(&before, 0, sizeof before);
        for (int step = 0; step < 300; step++) {
            uint64_t k = rng_next(&r) % 6;
            if (k < 3 && 2 * *sizes[k].value <= sizes[k].highest) *sizes[k].value *= 2;
            if (k == 3 && sequences < 1 << 24) sequences *= 2;
            if (k == 4 && length < c.context) length *= 2;
            if (k == 5 && c.layers < WEFT_RECOMPUTE_MAX_LAYERS) c.layers *= 2;
            weft_status status = weft_model_query(&exec, &c, sequences, length, &bytes);
            if (status == WEFT_ERR_ARGUMENT) {
                assert_non_null(strstr(weft_last_error(), "expected"));
                rejected = true;
                break;
            }
            assert_int_equal(status, WEFT_OK);
            assert_true(bytes.total <= (size_t)1 << 62 && bytes.total >= before.total &&
                        bytes.kept >= before.kept && bytes.recompute.total >= before.recompute.total &&
                        bytes.scratch >= before.scratch);
            before = bytes, counted = true;
        }
    }
    assert_true(counted && rejected);
    /* the widest model that a configuration can name: 2^66 bytes of gates alone */
    c = first, c.channels = 4096, c.hidden = 1 << 22, c.layers = 256;
    assert_int_equal(weft_model_query(&exec, &c, 1 << 7, (1 << 24) - 1, &bytes), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "2^62 bytes"));
    assert_int_equal(weft_model_query(&exec, &c, 1 << 24, 1 << 24, &bytes), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "sequences * length"));
}

static void recomputes(void **state)
{
    (void)state;
    weft_recompute_desc d = {.struct_size = sizeof d,
                             .layers = 256,
                             .tokens = (int64_t)1 << 32,
                             .streams = 32,
                             .channels = 1 << 24,
                             .dtype = WEFT_F64};
    weft_recompute_bytes bytes;
    assert_int_equal(weft_recompute_query(&d, &bytes), WEFT_ERR_ARGUMENT); /* 2^61 elements of 8 bytes */
    assert_non_null(strstr(weft_last_error(), "tokens * streams * channels"));
    d.tokens = 1 << 19;
    assert_int_equal(weft_recompute_query(&d, &bytes), WEFT_OK);
    assert_true(bytes.total == ((size_t)1 << 48) * 8 * 513 + ((size_t)1 << 43) * 8 * 512);
    assert_int_equal(weft_recompute_group_of(NULL, 0), -1);
    assert_int_equal(weft_recompute_group_of(&(weft_recompute){0}, 0), -1);
    assert_int_equal(weft_recompute_ends_group(&(weft_recompute){0}, 0), 0);
    assert_int_equal(weft_recompute_output(NULL).dtype, WEFT_NONE);
    assert_int_equal(weft_model_logits(NULL).dtype, WEFT_NONE);
    assert_int_equal(weft_model_logits(&(weft_model){0}).dtype, WEFT_NONE);
}

static void optimisers(void **state)
{
    (void)state;
    static const int64_t bad[] = {-1,        0,        (int64_t)1 << 31, (int64_t)1 << 33, (int64_t)1 << 62,
                                  INT64_MAX, INT64_MIN};
    weft_exec exec = on_cpu(WEFT_ISA_BEST, 1);
    double sum;
    float x = 0;
    for (int ref = 0; ref < 2; ref++, exec = on_ref()) {
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
            for (size_t j = 0; j < sizeof bad / sizeof *bad; j++) {
                size_t bytes = 12345;
                weft_muon_args m = {.struct_size = sizeof m, .rows = bad[i], .columns = j ? bad[j] : 1};
                assert_int_equal(weft_muon_workspace(&exec, &m, &bytes), WEFT_ERR_ARGUMENT);
                assert_non_null(strstr(weft_last_error(), "rows, columns"));
                m.rows = m.columns, m.columns = bad[i];
                assert_int_equal(weft_muon_workspace(&exec, &m, &bytes), WEFT_ERR_ARGUMENT);
                assert_int_equal(bytes, 12345);
            }
        size_t bytes = 0;
        const int64_t side = 1 << 24;
        assert_int_equal(
            weft_muon_workspace(&exec, WEFT_ARGS(weft_muon_args, .rows = side, .columns = side), &bytes), WEFT_OK);
        assert_true(bytes >= (size_t)side * (size_t)side * 4 * (ref ? 8 : 4));
        assert_int_equal(
            weft_muon_workspace(&exec, WEFT_ARGS(weft_muon_args, .rows = side + 1, .columns = side), &bytes),
            WEFT_ERR_ARGUMENT);
        static const int64_t counts[] = {-1, INT64_MIN, ((int64_t)1 << 48) + 1, INT64_MAX};
        for (int i = 0; i < 4; i++) {
            assert_int_equal(weft_sum_squares_workspace(&exec, counts[i], &bytes), WEFT_ERR_ARGUMENT);
            assert_int_equal(weft_sum_squares(&exec, &x, counts[i], &sum), WEFT_ERR_ARGUMENT);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_do_not_wrap), cmocka_unit_test(strides_are_bounded),
        cmocka_unit_test(spans_are_bounded),    cmocka_unit_test(idle_strides),
        cmocka_unit_test(workspaces_grow),

        cmocka_unit_test(token_bases),          cmocka_unit_test(models),
        cmocka_unit_test(recomputes),           cmocka_unit_test(optimisers),
    };
    return suite_run("sizes", tests);
}
