/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared memory: every output of every operator laid over every other argument. Refused, except for the exact
 * in-place uses that the description names and for views that interleave without touching. */
#include "support/suite.h"

static spec small(const char *op)
{
    return (spec){.op = op, .tokens = 4, .streams = 2, .channels = 6, .rows = 3};
}

static int64_t span_bytes(const weft_tensor *t)
{
    int64_t last = 1;
    for (int d = 0; d < t->ndim; d++) last += (t->shape[d] - 1) * t->stride[d];
    return last * (int64_t)weft_dtype_size(t->dtype);
}

static bool same_shape(const weft_tensor *a, const weft_tensor *b)
{
    if (a->ndim != b->ndim || a->dtype != b->dtype) return false;
    for (int d = 0; d < a->ndim; d++)
        if (a->shape[d] != b->shape[d]) return false;
    return true;
}

/* The reference, the CPU and, where there is one, the GPU. */
static int backends(weft_exec execs[3])
{
    execs[0] = on_ref();
    execs[1] = on_cpu(WEFT_ISA_BEST, 1);
    execs[2] = on_cuda(0);
    return test_on_cuda() ? 3 : 2;
}

/* Puts `in` into a fresh region with room for `out` on both sides, and `out` `shift` bytes from it. */
static void overlap_case(problem *p, weft_exec exec, arg *out, arg *in, int64_t shift, const char *what)
{
    weft_tensor keep_out = *out->view, keep_in = *in->view;
    size_t room = (size_t)span_bytes(out->view), size = 2 * room + (size_t)span_bytes(in->view) + 128;
    char *region = calloc(1, size), *copy = malloc(size);
    char *middle = region + (room + 63) / 64 * 64;
    memcpy(middle, in->view->data, (size_t)span_bytes(in->view));
    memcpy(copy, region, size);
    in->view->data = middle;
    out->view->data = middle + shift;
    weft_status status = problem_call(p, exec);
    const char *text = weft_last_error();
    if (status != WEFT_ERR_OVERLAP)
        test_failed("%s: %s %s %s: got \"%s\", want \"%s\"", p->op->name, out->name, what, in->name,
                    weft_status_name(status), weft_status_name(WEFT_ERR_OVERLAP));
    else if (!strstr(text, p->op->name) || !strstr(text, out->name) || !strstr(text, in->name) ||
             !strstr(text, "got"))
        test_failed("%s: %s %s %s: message \"%s\"", p->op->name, out->name, what, in->name, text);
    if (status != WEFT_OK && (memcmp(region, copy, size) != 0 || !problem_untouched(p)))
        test_failed("%s: %s %s %s: refused, but something was written", p->op->name, out->name, what, in->name);
    *out->view = keep_out;
    *in->view = keep_in;
    problem_reset(p);
    free(region);
    free(copy);
}

static void overlaps_are_refused(void **state)
{
    (void)state;
    weft_exec execs[3];
    int count = backends(execs);
    for (int e = 0; e < count; e++)
        for (int32_t k = 0; k < 2 * weft_op_count(); k++) {
            const weft_op_info *op = weft_op_at(k / 2);
            spec s = small(op->name);
            s.packed = true;                       /* every argument is there */
            if (k % 2) s.act = s.wide = WEFT_BF16; /* two bytes are the least that two tensors can share */
            if (!weft_op_has(op, execs[e].backend)) continue;
            problem *p = problem_make(&s);
            for (int i = 0; i < p->num_args; i++)
                for (int j = 0; j < p->num_args; j++) {
                    arg *out = &p->arg[i], *in = &p->arg[j];
                    if (i == j || !arg_is_output(out)) continue;
                    int64_t one = (int64_t)weft_dtype_size(out->view->dtype);
                    bool exact = out->info->in_place && strcmp(out->info->in_place, in->name) == 0;
                    if (!exact) overlap_case(p, execs[e], out, in, 0, "at the start of");
                    overlap_case(p, execs[e], out, in, span_bytes(in->view) - one, "at the last element of");
                    overlap_case(p, execs[e], out, in, one - span_bytes(out->view),
                                 "ending in the first element of");
                    if (span_bytes(out->view) > one || span_bytes(in->view) > one)
                        overlap_case(p, execs[e], out, in, span_bytes(in->view) > one ? one : -one,
                                     "one element off");
                }
            problem_free(p);
        }
    test_verdict();
}

/* The same memory in another order is not in place. */
static void transposed_views_are_not_in_place(void **state)
{
    int seen = 0;
    (void)state;
    for (int32_t k = 0; k < weft_op_count(); k++) {
        spec s = small(weft_op_at(k)->name);
        s.channels = s.streams;
        problem *p = problem_make(&s);
        for (int i = 0; i < p->num_args; i++) {
            arg *out = &p->arg[i], *in = out->info->in_place ? problem_arg(p, out->info->in_place) : NULL;
            if (!in || out->view->ndim < 3 || out->view->shape[1] != out->view->shape[2]) continue;
            weft_tensor keep = *out->view;
            seen++;
            *out->view = *in->view;
            out->view->stride[1] = in->view->stride[2];
            out->view->stride[2] = in->view->stride[1];
            weft_status status = problem_call(p, on_ref());
            if (status != WEFT_ERR_OVERLAP)
                test_failed("%s: %s transposed over %s: got \"%s\"", p->op->name, out->name, in->name,
                            weft_status_name(status));
            *out->view = keep;
        }
        problem_free(p);
    }
    if (seen == 0) test_failed("no operator has a square in-place use");
    test_verdict();
}

/* in_place names an argument: with exactly its memory the result is the same, bit by bit. */
static void in_place_gives_the_same_bits(void **state)
{
    (void)state;
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 2), seen = 0;
    static const weft_dtype acts[] = {WEFT_F32, WEFT_BF16, WEFT_F16};
    static const int64_t channels[] = {5, 16, 50, 300};
    for (int32_t k = 0; k < weft_op_count(); k++)
        for (int v = 0; v < 36; v++) {
            spec s = {.op = weft_op_at(k)->name,
                      .tokens = 5,
                      .streams = v % 3 == 0 ? 4 : 1 + v % 9,
                      .channels = channels[v % 4],
                      .act = acts[v % 3],
                      .stream_layout = (layout)(v / 12)};
            s.wide = v & 1 ? s.act : WEFT_F32;
            s.coef = acts[v / 3 % 3];
            s.param_layout = s.stream_layout;
            problem *p = problem_make(&s);
            for (int i = 0; i < p->num_args; i++) {
                arg *out = &p->arg[i], *in = out->info->in_place ? problem_arg(p, out->info->in_place) : NULL;
                if (!in || !same_shape(out->view, in->view)) continue;
                if (out->info->dim[0] == WEFT_DIM_CACHE) { /* rows that no request names keep what they have */
                    double *values = arg_values(in);
                    arg_fill(out, values);
                    problem_seal(p);
                    free(values);
                }
                for (int e = -1; e < count; e++) {
                    weft_exec exec = e < 0 ? on_ref() : execs[e];
                    if (!weft_op_has(p->op, exec.backend)) continue;
                    seen++;
                    problem_must_run(p, exec);
                    pack apart = problem_pack(p);
                    problem_reset(p);
                    weft_tensor keep = *out->view;
                    *out->view = *in->view;
                    weft_status status = problem_call(p, exec);
                    if (status != WEFT_OK) {
                        test_failed("%s: in place over %s: %s", problem_text(p), in->name, weft_last_error());
                    } else {
                        pack same = problem_pack(p);
                        pack_expect_same(p, &same, &apart, "in place");
                        pack_free(&same);
                    }
                    *out->view = keep;
                    pack_free(&apart);
                    problem_reset(p);
                }
            }
            problem_free(p);
        }
    if (seen == 0) test_failed("no operator has an in-place use: the list in weft/ops.h lost them");
    test_verdict();
}

/* Two tensors as alternating slices of one padded buffer share no element and must be taken. */
static void interleaved_slices_are_taken(void **state)
{
    (void)state;
    weft_exec execs[3];
    int count = backends(execs);
    for (int e = 0; e < count; e++)
        for (int32_t k = 0; k < weft_op_count(); k++) {
            spec s = small(weft_op_at(k)->name);
            if (!weft_op_has(weft_op_at(k), execs[e].backend)) continue;
            problem *p = problem_make(&s);
            problem_must_run(p, execs[e]);
            pack apart = problem_pack(p);
            for (int i = 0; i < p->num_args; i++)
                for (int j = 0; j < p->num_args; j++) {
                    arg *out = &p->arg[i], *in = &p->arg[j];
                    if (i == j || !arg_is_output(out) || !arg_by_token(out) || !arg_by_token(in)) continue;
                    if (!in->guard.block || arg_is_index(in)) continue;
                    problem_reset(p);
                    weft_tensor keep_out = *out->view, keep_in = *in->view;
                    double *values = arg_values(in), *before = arg_values(out);
                    int64_t row_in = in->view->stride[0], row_out = out->view->stride[0]; /* dense f32 */
                    float *region = calloc((size_t)(s.tokens * (row_in + row_out)), sizeof *region);
                    in->view->data = region;
                    out->view->data = region + row_in;
                    in->view->stride[0] = out->view->stride[0] = row_in + row_out;
                    arg_fill(in, values);
                    arg_fill(out, before);
                    weft_status status = problem_call(p, execs[e]);
                    if (status != WEFT_OK) {
                        test_failed("%s: %s and %s interleaved: %s", p->op->name, out->name, in->name,
                                    weft_last_error());
                    } else {
                        pack together = problem_pack(p);
                        pack_expect_same(p, &together, &apart, "interleaved slices");
                        pack_free(&together);
                    }
                    *out->view = keep_out;
                    *in->view = keep_in;
                    free(region), free(values), free(before);
                }
            pack_free(&apart);
            problem_free(p);
        }
    test_verdict();
}

/* Inputs may share memory, and may repeat elements. */
static void inputs_may_repeat(void **state)
{
    (void)state;
    weft_exec execs[3];
    int count = backends(execs);
    for (int32_t k = 0; k < weft_op_count(); k++) {
        spec s = small(weft_op_at(k)->name);
        s.packed = true;
        problem *p = problem_make(&s);
        for (int i = 0; i < p->num_args; i++) {
            arg *a = &p->arg[i];
            if (arg_is_output(a)) continue;
            weft_tensor keep = *a->view;
            for (int d = 0; d < a->view->ndim; d++) a->view->stride[d] = 0;
            if (!strcmp(a->name, "state_index")) arg_set(a, 0, -1); /* a row may not repeat, padding may */
            for (int e = 0; e < count; e++)
                if (weft_op_has(p->op, execs[e].backend) && problem_call(p, execs[e]) != WEFT_OK)
                    test_failed("%s: %s with all strides 0: %s", p->op->name, a->name, weft_last_error());
            *a->view = keep;
            problem_reset(p);
        }
        problem_free(p);
    }
    test_verdict();
}

/* ---- the workspace --------------------------------------------------------------------------------------------- */

/* A tensor in the middle of a region with room for the workspace on both sides. */
typedef struct beside {
    char *region, *copy, *tensor;
    size_t size, span, bytes;
    weft_tensor keep;
} beside;

static beside beside_open(arg *a, size_t bytes)
{
    beside b = {.span = (size_t)span_bytes(a->view), .bytes = bytes, .keep = *a->view};
    b.size = b.span + 2 * (bytes + 64);
    b.region = calloc(1, b.size);
    b.copy = malloc(b.size);
    b.tensor = b.region + (bytes + 63) / 64 * 64;
    memcpy(b.tensor, a->view->data, b.span);
    memcpy(b.copy, b.region, b.size);
    a->view->data = b.tensor;
    return b;
}

static void beside_close(beside *b, problem *p, arg *a)
{
    *a->view = b->keep;
    problem_reset(p);
    free(b->region);
    free(b->copy);
}

/* The workspace at `at`: refused, or taken with the same bits where `want` is given. */
static void workspace_case(problem *p, weft_exec exec, arg *a, beside *b, char *at, size_t bytes, const pack *want,
                           const char *what)
{
    exec.workspace = at, exec.workspace_bytes = bytes;
    weft_status status = p->call(&exec, p->args), expected = want ? WEFT_OK : WEFT_ERR_OVERLAP;
    if (status != expected)
        test_failed("%s on %s: workspace %s %s: got \"%s\" (%s), want \"%s\"", p->op->name, exec_name(exec), what,
                    a->name, weft_status_name(status), weft_last_error(), weft_status_name(expected));
    else if (want) {
        pack got = problem_pack(p);
        pack_expect_same(p, &got, want, what);
        pack_free(&got);
    } else if (!strstr(weft_last_error(), p->op->name) || !strstr(weft_last_error(), "exec.workspace") ||
               !strstr(weft_last_error(), a->name))
        test_failed("%s: workspace %s %s: message \"%s\"", p->op->name, what, a->name, weft_last_error());
    if (status != WEFT_OK && (memcmp(b->region, b->copy, b->size) != 0 || !problem_untouched(p)))
        test_failed("%s: workspace %s %s: refused, but something was written", p->op->name, what, a->name);
    problem_reset(p);
    memcpy(b->region, b->copy, b->size);
}

static void workspace_beside(problem *p, weft_exec exec)
{
    size_t bytes = 0;
    if (p->workspace(&exec, p->args, &bytes) != WEFT_OK) fail_msg("%s: %s", p->op->name, weft_last_error());
    if (bytes == 0) return;
    problem_must_run(p, exec);
    pack want = problem_pack(p);
    problem_reset(p);
    for (int i = 0; i < p->num_args; i++) {
        arg *a = &p->arg[i];
        beside b = beside_open(a, bytes);
        char *end = b.tensor + b.span;
        workspace_case(p, exec, a, &b, b.tensor, bytes, NULL, "at the start of");
        workspace_case(p, exec, a, &b, end - 1, bytes, NULL, "at the last byte of");
        workspace_case(p, exec, a, &b, b.tensor - bytes + 1, bytes, NULL, "ending in the first byte of");
        workspace_case(p, exec, a, &b, end, bytes, &want, "behind");
        workspace_case(p, exec, a, &b, b.tensor - bytes, bytes + b.span, &want, "with more than is needed before");
        beside_close(&b, p, a);
    }
    pack_free(&want);
}

static void workspaces_are_apart(void **state)
{
    (void)state;
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 2)};
    for (int e = 0; e < 2; e++)
        for (int32_t k = 0; k < 2 * weft_op_count(); k++) {
            spec s = small(weft_op_at(k / 2)->name);
            s.packed = true;
            if (k % 2) s.act = s.wide = WEFT_BF16;
            problem *p = problem_make(&s);
            workspace_beside(p, execs[e]);
            problem_free(p);
        }
    test_verdict();
}

/* A workspace between the rows of a padded tensor touches none of them. */
static void workspace_in_the_padding(void **state)
{
    (void)state;
    enum { T = 3, C = 8 };
    weft_exec exec = on_ref();
    size_t bytes;
    float u[T * C], v[T * C];
    weft_rmsnorm_fwd_args args = {.struct_size = sizeof args,
                                  .eps = 1,
                                  .u = weft_dense2(u, WEFT_F32, T, C),
                                  .v = weft_dense2(v, WEFT_F32, T, C)};
    for (int i = 0; i < T * C; i++) u[i] = (float)i;
    assert_int_equal(weft_rmsnorm_fwd_workspace(&exec, &args, &bytes), WEFT_OK);
    assert_true(bytes > 0);
    const size_t gap = (bytes + 3) / 4, row = C + gap;
    float *padded = calloc(T * row, sizeof *padded);
    for (int t = 0; t < T; t++) memcpy(padded + (size_t)t * row, u + t * C, C * sizeof *u);
    args.u.data = padded, args.u.stride[0] = (int64_t)row;
    for (int shift = -1; shift <= 1; shift++) {
        exec.workspace = (char *)(padded + row + C) + shift, exec.workspace_bytes = bytes;
        bool apart = shift == 0 || (shift > 0 && bytes % 4); /* the gap is a whole number of elements */
        assert_int_equal(weft_rmsnorm_fwd(&exec, &args), apart ? WEFT_OK : WEFT_ERR_OVERLAP);
    }
    free(padded);
}

/* The step of dropout is read while the operator runs. */
static void the_step_is_an_input(void **state)
{
    (void)state;
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 2)};
    int seen = 0;
    for (int e = 0; e < 2; e++)
        for (int32_t k = 0; k < weft_op_count(); k++) {
            spec s = small(weft_op_at(k)->name);
            s.dropout = (weft_dropout){.p = 0.25, .seed = 3};
            problem *p = problem_make(&s);
            weft_dropout *d = fields_dropout(p);
            weft_exec exec = execs[e];
            size_t bytes = 0;
            if (!d) {
                problem_free(p);
                continue;
            }
            assert_int_equal(p->workspace(&exec, p->args, &bytes), WEFT_OK);
            uint64_t *work = calloc(1, bytes + 8);
            exec.workspace = work, exec.workspace_bytes = bytes;
            if (bytes) {
                d->step = work;
                assert_int_equal(p->call(&exec, p->args), WEFT_ERR_OVERLAP);
                assert_non_null(strstr(weft_last_error(), "dropout.step"));
                seen++;
            }
            for (int i = 0; i < p->num_args; i++) {
                arg *a = &p->arg[i];
                if (!arg_is_output(a) || span_bytes(a->view) < 8 || (uintptr_t)a->view->data % 8) continue;
                d->step = a->view->data;
                seen++;
                if (p->call(&exec, p->args) != WEFT_ERR_OVERLAP || !strstr(weft_last_error(), "dropout.step"))
                    test_failed("%s: the step inside of %s: %s", p->op->name, a->name, weft_last_error());
                if (!problem_untouched(p)) test_failed("%s: refused, but %s was written", p->op->name, a->name);
            }
            free(work);
            problem_free(p);
        }
    assert_true(seen > 10);
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(overlaps_are_refused),
        cmocka_unit_test(transposed_views_are_not_in_place),
        cmocka_unit_test(in_place_gives_the_same_bits),
        cmocka_unit_test(interleaved_slices_are_taken),
        cmocka_unit_test(inputs_may_repeat),
        cmocka_unit_test(workspaces_are_apart),
        cmocka_unit_test(workspace_in_the_padding),
        cmocka_unit_test(the_step_is_an_input),
    };
    return suite_run("overlap", tests);
}
