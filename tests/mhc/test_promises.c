/* SPDX-License-Identifier: Apache-2.0
 *
 * Promises that hold for every operator, bit by bit: results depend neither on threads, runs, workspace, memory
 * layout and instruction width, nor on the other tokens, the other outputs or the other callers. */
#include <pthread.h>

#include "support/suite.h"

static const weft_dtype acts[] = {WEFT_F32, WEFT_BF16, WEFT_F16};

/* More than 2^15 elements of every kind of tensor, or the CPU backend would not use its threads. */
static spec large(const char *op, int variant)
{
    spec s = {.op = op, .tokens = 1301, .streams = 4, .channels = 40, .act = acts[variant % 3], .rows = 24};
    if (variant == 1) s = (spec){.op = op, .tokens = 9, .streams = 4, .channels = 4224, .act = WEFT_BF16};
    if (variant == 2) s = (spec){.op = op, .tokens = 4001, .streams = 3, .channels = 9, .act = WEFT_F16};
    if (grid_uses(op, WEFT_DIM_STEPS)) { /* tokens are sequences of some steps here, channels the dim of a head */
        static const int64_t sizes[3][2] = {{131, 40}, {3, 200}, {301, 9}};
        s.tokens = sizes[variant][0];
        s.channels = sizes[variant][1];
    } else if (!grid_uses(op, WEFT_DIM_CHANNELS)) {
        s.tokens = 5003;
    }
    s.wide = variant == 2 ? s.act : WEFT_F32;
    s.dropout = (weft_dropout){.p = 0.2, .seed = 11, .site = 4};
    return s;
}

/* Sites and merges also without a residual mix. */
static bool has_two_forms(const char *op)
{
    const weft_op_info *info = weft_op_find(op), *layer = weft_mhc_replay_layer_info();
    const weft_op_info *of = strcmp(op, "mhc_replay_fwd") == 0 ? layer : info;
    for (int32_t i = 0; i < of->num_args; i++)
        if (of->args[i].optional && shape_is_mix(&of->args[i])) return true;
    return false;
}

static void for_each_op(void (*test)(const spec *s), spec (*make)(const char *op, int variant), int variants)
{
    for (int32_t i = 0; i < weft_op_count(); i++)
        for (int v = 0; v < variants; v++) {
            spec s = make(weft_op_at(i)->name, v);
            test(&s);
            s.independent = v == 0 && has_two_forms(s.op);
            if (s.independent) test(&s);
        }
    test_verdict();
}

static pack run(problem *p, weft_exec exec)
{
    problem_must_run(p, exec);
    return problem_pack(p);
}

static void expect_run(problem *p, weft_exec exec, const pack *want, const char *what)
{
    pack got = run(p, exec);
    pack_expect_same(p, &got, want, what);
    pack_free(&got);
}

/* ---- threads, runs, workspace -------------------------------------------------------------------------------- */

static void threads_one(const spec *s)
{
    static const int threads[] = {1, 2, 3, 7, 0};
    problem *p = problem_make(s);
    pack want = run(p, on_cpu(WEFT_ISA_BEST, 1));
    for (int i = 0; i < 5; i++)
        expect_run(p, on_cpu(WEFT_ISA_BEST, threads[i]), &want, "another number of threads");
    expect_run(p, on_cpu(WEFT_ISA_BEST, 1), &want, "a second run");
    pack_free(&want);
    if (test_on_cuda() && weft_op_has(p->op, WEFT_BACKEND_CUDA)) {
        /* multiprocessors to plan for: fewer and more than there are */
        static const int multiprocessors[] = {1, 7, 64, 132, 200};
        want = run(p, on_cuda(0));
        for (int i = 0; i < 5; i++)
            expect_run(p, on_cuda(multiprocessors[i]), &want, "another number of multiprocessors");
        expect_run(p, on_cuda(0), &want, "a second run on the GPU");
        pack_free(&want);
    }
    pack ref = run(p, on_ref());
    expect_run(p, on_ref(), &ref, "a second run of the reference");
    pack_free(&ref);
    problem_free(p);
}

static void threads_and_runs(void **state)
{
    (void)state;
    for_each_op(threads_one, large, test_quick() ? 1 : 3);
}

static void workspace_one(const spec *s)
{
    static const size_t offsets[] = {0, 1, 7, 63};
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 3)};
    problem *p = problem_make(s);
    for (int e = 0; e < 2; e++) {
        weft_exec exec = execs[e];
        size_t bytes = 0;
        pack want = run(p, exec);
        if (p->workspace(&exec, p->args, &bytes) != WEFT_OK) test_failed("%s", weft_last_error());
        char *memory = malloc(bytes + 128);
        for (int i = 0; i < 4; i++) {
            memset(memory, i & 1 ? 0xff : 0, bytes + 128);
            exec.workspace = memory + offsets[i];
            exec.workspace_bytes = bytes;
            problem_reset(p);
            if (p->call(&exec, p->args) != WEFT_OK) test_failed("%s", weft_last_error());
            pack got = problem_pack(p);
            pack_expect_same(p, &got, &want, "another workspace");
            pack_free(&got);
            for (size_t k = 0; k < bytes + 128; k++)
                if ((k < offsets[i] || k >= offsets[i] + bytes) && memory[k] != (char)(i & 1 ? 0xff : 0)) {
                    test_failed("%s: wrote outside of the workspace", problem_text(p));
                    break;
                }
        }
        /* the call through the description is the same call */
        problem_reset(p);
        if (weft_op_call(p->op, &exec, p->args) != WEFT_OK) test_failed("%s", weft_last_error());
        pack got = problem_pack(p);
        pack_expect_same(p, &got, &want, "weft_op_call");
        pack_free(&got);
        pack_free(&want);
        free(memory);
    }
    problem_free(p);
}

static spec medium(const char *op, int variant)
{
    spec s = {.op = op,
              .tokens = 37,
              .streams = variant == 2 ? 3 : 4,
              .channels = variant == 1 ? 64 : 50,
              .act = acts[variant % 3],
              .rows = 7};
    s.wide = variant & 1 ? s.act : WEFT_F32;
    return s;
}

static void workspaces(void **state)
{
    (void)state;
    for_each_op(workspace_one, medium, 3);
}

/* ---- other tokens -------------------------------------------------------------------------------------------- */

/* Makes p's arguments views of tokens [first, end). */
static void narrow_to(problem *p, int64_t first, int64_t end)
{
    for (int i = 0; i < p->num_args; i++) {
        arg *a = &p->arg[i];
        if (!a->guard.block || !arg_by_token(a)) continue;
        a->view->data =
            (char *)a->view->data + first * a->view->stride[0] * (int64_t)weft_dtype_size(a->view->dtype);
        a->view->shape[0] = end - first;
        a->elements = a->elements / p->spec.tokens * (end - first);
    }
    fields_token_base(p, p->spec.dropout.token_base + first);
}

static bool same_bits(const arg *a, int64_t i, const arg *b, int64_t j)
{
    double x = arg_get(a, i), y = arg_get(b, j);
    return memcmp(arg_at(a, i), arg_at(b, j), weft_dtype_size(a->view->dtype)) == 0 || (isnan(x) && isnan(y));
}

/* Token `at` of the small call must be token `token` of the large one. */
static void expect_token(const problem *small, int64_t at, const problem *whole, int64_t token, const char *what)
{
    char where[80];
    for (int i = 0; i < small->num_args; i++) {
        const arg *a = &small->arg[i], *b = &whole->arg[i];
        if (!a->guard.block || !arg_is_output(a) || !arg_by_token(a)) continue;
        int64_t row = b->elements / whole->spec.tokens;
        for (int64_t k = 0; k < row; k++)
            if (!same_bits(a, at * row + k, b, token * row + k)) {
                test_failed("%s: %s: %s%s: got %.9g, want %.9g", problem_text(whole), what, b->name,
                            arg_coordinate(b, token * row + k, where, sizeof where), arg_get(a, at * row + k),
                            arg_get(b, token * row + k));
                break;
            }
    }
}

static void call_plain(problem *p, weft_exec exec)
{
    if (problem_call(p, exec) != WEFT_OK) test_failed("%s", weft_last_error());
}

/* A copy of a problem has views into its own args struct. */
static void repoint(problem *copy)
{
    for (int i = 0; i < copy->num_args; i++) {
        arg *a = &copy->arg[i];
        char *base = a->layer < 0 ? copy->args : (char *)&copy->layers[a->layer];
        a->view = (weft_tensor *)(void *)(base + a->info->offset);
    }
    if (strcmp(copy->op->name, "mhc_replay_fwd") == 0)
        ((weft_mhc_replay_fwd_args *)copy->args)->layers = copy->layers;
}

static void batch_one(const spec *s)
{
    static const int64_t ranges[][2] = {{0, 1}, {17, 18}, {63, 130}, {1, 300}, {299, 300}, {120, 121}, {5, 22}};
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 2);
    for (int e = 0; e < count; e++) {
        weft_exec exec = execs[e];
        if (!weft_op_has(weft_op_find(s->op), exec.backend)) continue;
        problem *whole = problem_make(s);
        problem_must_run(whole, exec);
        for (size_t r = 0; r < sizeof ranges / sizeof *ranges; r++) {
            problem *part = problem_make(s);
            narrow_to(part, ranges[r][0], ranges[r][1]);
            call_plain(part, exec);
            for (int64_t t = ranges[r][0]; t < ranges[r][1]; t++)
                expect_token(part, t - ranges[r][0], whole, t, "in a smaller batch");
            problem_free(part);
        }
        /* the same tokens at other places of a batch of the same size */
        problem *turned = problem_make(s);
        for (int i = 0; i < turned->num_args; i++) {
            arg *a = &turned->arg[i];
            if (!a->guard.block || !arg_by_token(a) || (arg_is_output(a) && !arg_adds(a))) continue;
            int64_t row = a->elements / s->tokens;
            double *values = arg_values(&turned->arg[i]);
            for (int64_t t = 0; t < s->tokens; t++)
                for (int64_t k = 0; k < row; k++) arg_set(a, t * row + k, values[(s->tokens - 1 - t) * row + k]);
            free(values);
        }
        problem_seal(turned);
        if (s->dropout.p == 0) {
            problem_must_run(turned, exec);
            for (int64_t t = 0; t < s->tokens; t++)
                expect_token(turned, s->tokens - 1 - t, whole, t, "at another place of the batch");
        }
        problem_free(turned);
        problem_free(whole);
    }
}

static spec batch(const char *op, int variant)
{
    spec s = {.op = op,
              .tokens = 300,
              .streams = variant == 1 ? 3 : 4,
              .channels = variant == 1 ? 64 : 37,
              .act = acts[variant % 3],
              .rows = 9};
    s.wide = variant & 1 ? s.act : WEFT_F32;
    if (variant & 1) s.dropout = (weft_dropout){.p = 0.3, .seed = 5, .token_base = 1000};
    return s;
}

/* Few tokens may read phi as it lies, many a copy of it. */
static void batch_and_phi(const spec *s)
{
    const weft_op_info *op = weft_op_find(s->op);
    for (int i = 0; i < op->num_args; i++)
        if (!strcmp(op->args[i].name, "phi")) batch_one(s);
}

static spec plain_phi(const char *op, int variant)
{
    return (spec){.op = op,
                  .tokens = 300,
                  .streams = variant == 2 ? 2 : 4,
                  .channels = variant == 2 ? 272 : 64,
                  .rows = 24,
                  .act = acts[variant],
                  .param = acts[variant],
                  .absent = " norm_weight "};
}

static void batch_position(void **state)
{
    (void)state;
    for_each_op(batch_one, batch, test_quick() ? 1 : 3);
    for_each_op(batch_and_phi, plain_phi, test_quick() ? 1 : 3);
}

static void large_one(const spec *s, const int64_t ranges[3][2], weft_exec exec)
{
    problem *whole = problem_make(s), *part = problem_make(s);
    problem_must_run(whole, exec);
    for (int r = 0; r < 3; r++) {
        problem view = *part; /* shares the memory, has its own sizes */
        memcpy(view.args = malloc(part->op->args_size), part->args, part->op->args_size);
        repoint(&view);
        narrow_to(&view, ranges[r][0], ranges[r][1]);
        call_plain(&view, exec);
        for (int64_t t = ranges[r][0]; t < ranges[r][1]; t += 7)
            expect_token(&view, t - ranges[r][0], whole, t, "in a large batch");
        free(view.args);
    }
    problem_free(part);
    problem_free(whole);
}

/* Outputs of more than 8 MiB are written past the caches and long batches are cut into macro tiles: neither may
 * show. */
static void large_batch(void **state)
{
    (void)state;
    /* which output has to pass 8 MiB: [T, C] or [T, n, C] */
    static const struct {
        const char *op;
        bool streams;
    } ops[] = {{"mhc_aggregate_fwd", false}, {"mhc_post_fwd", true},     {"mhc_expand_fwd", true},
               {"mhc_contract_fwd", false},  {"rmsnorm_fwd", false},     {"mhc_aggregate_bwd", true},
               {"mhc_post_bwd", true},       {"mhc_expand_bwd", false},  {"mhc_contract_bwd", true},
               {"rmsnorm_bwd", false},       {"mhc_pre_fwd", false},     {"mhc_pre_bwd", true},
               {"mhc_boundary_fwd", true},   {"mhc_boundary_bwd", true}, {"mhc_replay_fwd", true}};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        for (int v = 0; v < 3; v++) {
            spec s = {.op = ops[i].op, .channels = v == 2 ? 1000 : 1024, .act = WEFT_BF16};
            s.tokens = ops[i].streams ? 1100 : 4400;
            s.streams = ops[i].streams ? 4 : 2;
            const int64_t ranges[][2] = {{0, 60}, {s.tokens / 2 - 20, s.tokens / 2 + 3}, {s.tokens - 1, s.tokens}};
            if (v > 0 && (test_quick() || i > 2)) continue;
            s.wide = WEFT_BF16;
            s.misalign = v == 1; /* what is written past the caches has to be aligned */
            s.pad = v == 2 ? 7 : 0;
            s.layers = 2;
            weft_exec exec = on_cpu(WEFT_ISA_BEST, 2);
            if (v > 0 && weft_cpu_isa() >= WEFT_ISA_AVX2) exec.isa = WEFT_ISA_AVX2;
            large_one(&s, ranges, exec);
            if (v > 0 || !test_on_cuda()) continue;
            large_one(&s, ranges, on_cuda(0));
            /* fused kernels tell the other type of 16 bits and the other layout apart */
            if (strncmp(ops[i].op, "mhc_pre", 7) && strncmp(ops[i].op, "mhc_boundary", 12)) continue;
            s.stream_layout = LAYOUT_CN;
            s.act = s.wide = WEFT_F16;
            large_one(&s, ranges, on_cuda(0));
        }
    test_verdict();
}

/* ---- layout, instruction width, other outputs ---------------------------------------------------------------- */

static void layout_one(const spec *base)
{
    problem *p = problem_make(base);
    weft_isa isas[4];
    int count = grid_isas(isas);
    for (int e = 0; e < count && isas[e] < WEFT_ISA_AMX; e++) { /* AMX tiles take rows of channels only */
        weft_exec exec = on_cpu(isas[e], 2);
        pack want = run(p, exec);
        for (int v = 1; v < 8; v++) {
            spec s = *base;
            s.stream_layout = (layout)(v % 3);
            s.param_layout = (layout)(v / 3);
            s.pad = v & 1 ? 3 : 0;
            s.misalign = v & 2 ? 1 : 0;
            problem *q = problem_make(&s);
            pack got = run(q, exec);
            pack_expect_same(q, &got, &want, "another layout");
            pack_free(&got);
            problem_free(q);
        }
        pack_free(&want);
    }
    problem_free(p);
}

static void layouts(void **state)
{
    (void)state;
    for_each_op(layout_one, medium, 3);
}

static void avx2_and_avx512(void **state)
{
    (void)state;
    char absent[512];
    if (weft_cpu_isa() < WEFT_ISA_AVX512) {
        fprintf(stderr, "  this machine has no AVX-512: skipped\n");
        skip();
    }
    for (int32_t i = 0; i < weft_op_count(); i++) {
        rng r = {rng_name(9, weft_op_at(i)->name)};
        for (int k = 0; k < (test_quick() ? 10 : 60); k++) {
            spec s = grid_draw(weft_op_at(i)->name, &r, absent, sizeof absent);
            s.tokens = 1 + rng_below(&r, 70);
            problem *p = problem_make(&s);
            pack want = run(p, on_cpu(WEFT_ISA_AVX2, 2));
            expect_run(p, on_cpu(WEFT_ISA_AVX512, 2), &want, "avx512 against avx2");
            pack_free(&want);
            problem_free(p);
        }
    }
    test_verdict();
}

/* An output that is not wanted does not change the others. */
static void outputs_on(const spec *s, weft_exec exec)
{
    char where[80];
    problem *all = problem_make(s);
    problem_must_run(all, exec);
    for (int i = 0; i < all->num_args; i++) {
        if (!all->arg[i].info->optional || !arg_is_output(&all->arg[i])) continue;
        problem *less = problem_make(s);
        arg_drop(&less->arg[i]);
        problem_settle(less);
        problem_must_run(less, exec);
        for (int k = 0; k < all->num_args; k++) {
            const arg *a = &less->arg[k], *b = &all->arg[k];
            if (!a->guard.block || !arg_is_output(a)) continue;
            for (int64_t m = 0; m < a->elements; m++)
                if (!same_bits(a, m, b, m)) {
                    test_failed("%s: without %s: %s%s: got %.9g, want %.9g", problem_text(all), all->arg[i].name,
                                a->name, arg_coordinate(a, m, where, sizeof where), arg_get(a, m), arg_get(b, m));
                    break;
                }
        }
        problem_free(less);
    }
    problem_free(all);
}

static void outputs_one(const spec *s)
{
    if (test_on_cpu()) outputs_on(s, on_cpu(WEFT_ISA_BEST, 2));
    if (test_on_cuda() && weft_op_has(weft_op_find(s->op), WEFT_BACKEND_CUDA)) outputs_on(s, on_cuda(0));
}

static void unwanted_outputs(void **state)
{
    (void)state;
    for_each_op(outputs_one, medium, 3);
}

/* ---- many callers -------------------------------------------------------------------------------------------- */

typedef struct caller {
    pthread_t thread;
    int number;
} caller;

enum { CALLERS = 6 };
static pack expected[64][2];

static void *call_all(void *arg_)
{
    const caller *c = arg_;
    for (int round = 0; round < 2; round++)
        for (int32_t k = 0; k < weft_op_count(); k++) {
            int32_t i = (k + c->number * 5) % weft_op_count();
            int v = (c->number + round) & 1;
            spec s = medium(weft_op_at(i)->name, v);
            problem *p = problem_make(&s);
            pack got = run(p, on_cpu(WEFT_ISA_BEST, 1 + c->number % 2));
            pack_expect_same(p, &got, &expected[i][v], "called from several threads");
            /* every thread has its own last error */
            weft_exec bad = WEFT_STRUCT(weft_exec, .backend = (weft_backend)77);
            if (p->call(&bad, p->args) != WEFT_ERR_ARGUMENT || !strstr(weft_last_error(), p->op->name))
                test_failed("%s: last error of this thread: %s", p->op->name, weft_last_error());
            pack_free(&got);
            problem_free(p);
        }
    return NULL;
}

static void many_callers(void **state)
{
    (void)state;
    caller callers[CALLERS];
    for (int32_t i = 0; i < weft_op_count(); i++)
        for (int v = 0; v < 2; v++) {
            spec s = medium(weft_op_at(i)->name, v);
            problem *p = problem_make(&s);
            expected[i][v] = run(p, on_cpu(WEFT_ISA_BEST, 1));
            problem_free(p);
        }
    for (int i = 0; i < CALLERS; i++) {
        callers[i].number = i;
        if (pthread_create(&callers[i].thread, NULL, call_all, &callers[i]) != 0) fail_msg("no thread");
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(callers[i].thread, NULL);
    for (int32_t i = 0; i < weft_op_count(); i++)
        for (int v = 0; v < 2; v++) pack_free(&expected[i][v]);
    test_verdict();
}

/* ---- nothing to do ------------------------------------------------------------------------------------------- */

/* "T = 0 succeeds: gradients that are overwritten become zero, gradients that are added to stay, nothing else is
 * touched" */
static void no_tokens(void **state)
{
    (void)state;
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 2), on_cuda(0)};
    for (int e = 0; e < (test_on_cuda() ? 3 : 2); e++)
        for (int32_t i = 0; i < weft_op_count(); i++)
            for (int add = 0; add < 2; add++) {
                spec s = {.op = weft_op_at(i)->name, .tokens = 0, .streams = 4, .channels = 20, .add = add};
                if (!weft_op_has(weft_op_at(i), execs[e].backend)) continue;
                problem *p = problem_make(&s);
                problem_must_run(p, execs[e]);
                if (add && !problem_untouched(p))
                    test_failed("%s: no tokens, yet something changed", problem_text(p));
                for (int k = 0; k < p->num_args && !add; k++) {
                    const arg *a = &p->arg[k];
                    if (!a->guard.block || a->info->kind != WEFT_ARG_GRAD) continue;
                    for (int64_t m = 0; m < a->elements; m++)
                        if (arg_get(a, m) != 0) {
                            test_failed("%s: %s is not zero without tokens", problem_text(p), a->name);
                            break;
                        }
                }
                problem_free(p);
            }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_and_runs), cmocka_unit_test(workspaces),      cmocka_unit_test(batch_position),
        cmocka_unit_test(layouts),          cmocka_unit_test(avx2_and_avx512), cmocka_unit_test(unwanted_outputs),
        cmocka_unit_test(many_callers),     cmocka_unit_test(large_batch),     cmocka_unit_test(no_tokens),
    };
    return suite_run("promises", tests);
}
