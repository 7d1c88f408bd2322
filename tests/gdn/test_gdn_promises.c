/* SPDX-License-Identifier: Apache-2.0
 *
 * What weft/gdn.h promises bit by bit, beyond what test_promises.c shows of every operator: dense and packed agree,
 * parameter gradients included; both memory orders; sequences in pieces; decoding; one fused row or six tensors; rows that
 * are only 8-byte aligned; what follows the last sequence; outputs that are not wanted. On the reference, the CPU and the GPU. And bad
 * sequences are rejected on the host. */
#include "support/suite.h"

static const weft_dtype acts[] = {WEFT_F32, WEFT_BF16, WEFT_F16};

/* The reference, every instruction set of the CPU, and the GPU where there is one; returns how many. */
enum { EXECS = GRID_EXECS + 1 };
static int all_execs(weft_exec execs[EXECS])
{
    int count = 0;
    if (test_on_cpu()) execs[count++] = on_ref();
    return count + grid_execs(execs + count, 2);
}

static bool is_ref(weft_exec exec)
{
    return exec.backend == WEFT_BACKEND_REF;
}

static bool serves(weft_exec exec, const char *op)
{
    return weft_op_has(weft_op_find(op), exec.backend);
}

/* What a GPU has kernels of its own for, unless a test says more: no bias, no states but those of decoding, gradients of the
 * activations' type. */
static void make_usual(spec *s)
{
    s->absent = " bias state final_state d_state d_final_state ";
    s->wide = s->act;
    s->width = 4;
    s->history = 3;
}

/* Elements of two arguments, as many as there are, in logical order. */
static void expect_same(const arg *got, const arg *want, int64_t got_at, int64_t want_at, int64_t count,
                        const char *what)
{
    size_t size = weft_dtype_size(got->view->dtype);
    char where[80];
    for (int64_t i = 0; i < count; i++)
        if (memcmp(arg_at(got, got_at + i), arg_at(want, want_at + i), size) != 0) {
            test_failed("%s: %s%s: got %.9g, want the bits of %.9g", what, got->name,
                        arg_coordinate(got, got_at + i, where, sizeof where), arg_get(got, got_at + i),
                        arg_get(want, want_at + i));
            return;
        }
}

static void copy_values(arg *to, const arg *from)
{
    if (!to->guard.block || !from->guard.block || to->elements != from->elements || arg_is_index(to)) return;
    double *values = arg_values(from);
    arg_fill(to, values);
    free(values);
}

/* A problem with the inputs of another one of the same size. */
static problem *like(const spec *s, const problem *from)
{
    problem *p = problem_make(s);
    for (int i = 0; i < p->num_args; i++)
        if (!arg_is_output(&p->arg[i]) || arg_adds(&p->arg[i])) copy_values(&p->arg[i], &from->arg[i]);
    problem_seal(p);
    return p;
}

static void expect_all(const problem *got, const problem *want, weft_exec exec, const char *what)
{
    char text[800];
    snprintf(text, sizeof text, "%s on %s: %s", problem_text(got), exec_name(exec), what);
    for (int i = 0; i < got->num_args; i++)
        if (arg_is_output(&got->arg[i]) && got->arg[i].guard.block)
            expect_same(&got->arg[i], &want->arg[i], 0, 0, got->arg[i].elements, text);
}

static const char *const ops[] = {"gdn_pre_fwd",  "gdn_pre_bwd",  "gdn_pre_step",
                                  "gdn_rule_fwd", "gdn_rule_bwd", "gdn_rule_step"};
enum { OPS = 6 };

/* ---- dense and packed, memory orders ------------------------------------------------------------------------------- */

/* Lengths across tiles (64), runs (16), blocks (128) and the tiles of the rule (32). */
static const int64_t steps[] = {1, 2, 3, 5, 15, 16, 17, 33, 64, 65, 129, 200};
enum { STEPS = sizeof steps / sizeof *steps };

static void dense_and_packed_agree(void **state)
{
    (void)state;
    weft_exec execs[EXECS];
    int count = all_execs(execs);
    for (int o = 0; o < OPS; o++)
        for (int k = 0; k < 2 * STEPS; k++) {
            int v = k % STEPS;
            if (test_quick() && v % 3) continue;
            int64_t lengths[3] = {steps[v], steps[v], steps[v]};
            spec s = {.op = ops[o], .tokens = 3, .streams = 4, .channels = v % 2 ? 32 : 17, .act = acts[v % 3]};
            s.steps = steps[v];
            s.width = 1 + v % 5;
            s.history = s.width + v % 2;
            if (k >= STEPS) {
                make_usual(&s);
                s.channels =
                    strncmp(ops[o], "gdn_rule", 8) ? 32 : 64; /* of the rule those that a GPU takes in chunks */
                s.width -= v / 2 % 3;
            }
            s.gdn = weft_gdn_defaults();
            s.gdn.g_chunk = v % 2 ? 7 : 0;
            spec packed = s;
            packed.packed = true;
            packed.lengths = lengths;
            packed.padding = -1;
            problem *dense = problem_make(&s), *other = like(&packed, dense);
            for (int e = 0; e < count; e++) {
                if (!serves(execs[e], ops[o]) || (is_ref(execs[e]) && v > 5))
                    continue; /* the reference has no tiles */
                problem_must_run(dense, execs[e]);
                problem_must_run(other, execs[e]);
                expect_all(other, dense, execs[e], "packed against dense");
            }
            problem_free(dense);
            problem_free(other);
        }
    test_verdict();
}

static void both_memory_orders_agree(void **state)
{
    (void)state;
    weft_exec execs[EXECS];
    int count = all_execs(execs);
    for (int o = 0; o < OPS; o++)
        for (int v = 0; v < STEPS; v += 2) {
            spec s = {.op = ops[o], .tokens = 3, .streams = 4, .channels = v % 4 ? 32 : 64, .act = acts[v % 3]};
            s.steps = steps[v];
            s.wide = s.act;
            if (v % 4) make_usual(&s);
            spec turned = s;
            turned.stream_layout = LAYOUT_CN;
            problem *a = problem_make(&s), *b = like(&turned, a);
            for (int e = 0; e < count; e++) {
                if (!serves(execs[e], ops[o]) || is_ref(execs[e])) continue;
                problem_must_run(a, execs[e]);
                problem_must_run(b, execs[e]);
                expect_all(b, a, execs[e], "(S, B) against (B, S)");
            }
            problem_free(a);
            problem_free(b);
        }
    test_verdict();
}

/* ---- one fused row ---------------------------------------------------------------------------------------------------- */

static const char *const section_names[] = {"q", "k", "v", "z", "b", "a"};

static weft_tensor *section_at(weft_gdn_sections *s, int i)
{
    weft_tensor *const all[] = {&s->q, &s->k, &s->v, &s->z, &s->b, &s->a};
    return all[i];
}

/* The sections (or their gradients) as views of rows of one buffer, `columns` wide; values are copied in. */
static char *fuse(problem *p, const char *prefix, int64_t columns, bool sequence_first, int64_t offset)
{
    const spec *s = &p->spec;
    char name[16];
    size_t size = 0;
    for (int i = 0; i < 6; i++) {
        snprintf(name, sizeof name, "%s%s", prefix, section_names[i]);
        if (problem_arg(p, name)) size = weft_dtype_size(problem_arg(p, name)->view->dtype);
    }
    int64_t bytes = (s->tokens * s->steps * columns + offset + 8) * (int64_t)size;
    char *memory = malloc((size_t)bytes);
    memset(memory, 0x5a, (size_t)bytes);
    weft_tensor proj = weft_dense3(memory + offset * (int64_t)size, problem_arg(p, "q")->view->dtype, s->tokens,
                                   s->steps, columns);
    if (sequence_first) {
        proj.stride[0] = columns;
        proj.stride[1] = s->tokens * columns;
    }
    weft_gdn_sections views = weft_gdn_split(&proj, s->key_heads, s->key_dim, s->streams, s->value_dim);
    for (int i = 0; i < 6; i++) {
        snprintf(name, sizeof name, "%s%s", prefix, section_names[i]);
        arg *a = problem_arg(p, name);
        if (!a) continue;
        double *values = arg_values(a);
        *a->view = *section_at(&views, i);
        if (!arg_is_output(a)) arg_fill(a, values);
        free(values);
    }
    return memory;
}

/* Widths of rows: as wide as the sections, padded to something odd, and beginning off every boundary. */
static void fused_rows(void **state)
{
    (void)state;
    weft_exec execs[EXECS];
    int count = all_execs(execs);
    for (int v = 0; v < 36; v++)
        for (int backward = 0; backward < 2; backward++) {
            spec s = {.op = backward ? "gdn_pre_bwd" : "gdn_pre_fwd", .tokens = 2, .streams = 6, .channels = 32};
            s.act = s.wide = acts[v % 3];
            s.steps = 21;
            s.key_heads = 2;
            if (v >= 18) make_usual(&s);
            int64_t columns = 4 * 32 + 12 * 32 + 12 + v / 3 % 3 * 3, offset = v / 9 % 2 * 3;
            problem *p = problem_make(&s);
            for (int e = 0; e < count; e++) {
                problem_must_run(p, execs[e]);
                pack want = problem_pack(p);
                problem_reset(p);
                problem *q = problem_make(&s);
                char *rows = fuse(q, "", columns, v & 1, offset);
                char *grads = backward ? fuse(q, "d_", columns, v & 1, offset) : NULL;
                if (problem_call(q, execs[e]) != WEFT_OK) {
                    test_failed("%s: one row: %s", problem_text(q), weft_last_error());
                } else {
                    pack got = problem_pack(q);
                    pack_expect_same(q, &got, &want, "sections of one row");
                    pack_free(&got);
                }
                free(rows), free(grads);
                problem_free(q);
                pack_free(&want);
            }
            problem_free(p);
        }
    test_verdict();
}

/* ---- pieces and tokens ------------------------------------------------------------------------------------------------- */

/* A view of tokens [from, to) of every sequence. */
static void narrow(problem *p, int64_t from, int64_t to)
{
    for (int i = 0; i < p->num_args; i++) {
        arg *a = &p->arg[i];
        if (!a->guard.block || a->info->ndim < 2 || a->info->dim[1] != WEFT_DIM_STEPS) continue;
        a->view->data =
            (char *)a->view->data + from * a->view->stride[1] * (int64_t)weft_dtype_size(a->view->dtype);
        a->elements = a->elements / a->view->shape[1] * (to - from);
        a->view->shape[1] = to - from;
    }
}

/* Compares tokens [from, to) of a narrowed problem with the whole. */
static void expect_piece(const problem *piece, const problem *whole, int64_t from, int64_t to, const char *what)
{
    for (int i = 0; i < piece->num_args; i++) {
        const arg *a = &piece->arg[i];
        if (!a->guard.block || !arg_is_output(a) || a->info->ndim < 2 || a->info->dim[1] != WEFT_DIM_STEPS)
            continue;
        const arg *b = problem_arg((problem *)(uintptr_t)whole, a->name);
        int64_t row = b->elements / b->view->shape[0] / b->view->shape[1];
        for (int64_t n = 0; n < b->view->shape[0]; n++)
            expect_same(a, b, n * (to - from) * row, (n * b->view->shape[1] + from) * row, (to - from) * row, what);
    }
}

/* Prefill in four pieces, the state handed from one to the next. */
static void expect_pieces(const spec *s, const int64_t cuts[4], weft_exec exec)
{
    problem *whole = problem_make(s), *last = NULL;
    problem_must_run(whole, exec);
    int64_t from = 0;
    arg *carried = NULL;
    for (int c = 0; c < 4; c++) {
        int64_t to = cuts[c];
        problem *piece = problem_make(s);
        if (carried) copy_values(problem_arg(piece, "state"), carried);
        problem_free(last);
        narrow(piece, from, to);
        if (problem_call(piece, exec) != WEFT_OK) test_failed("%s", weft_last_error());
        expect_piece(piece, whole, from, to, "a piece of a sequence");
        carried = problem_arg(piece, "final_state");
        last = piece;
        from = to;
    }
    const arg *want = problem_arg(whole, "final_state");
    expect_same(carried, want, 0, 0, want->elements, "the state behind the last piece");
    problem_free(last);
    problem_free(whole);
}

static void pieces_agree_with_the_whole(void **state)
{
    (void)state;
    static const int64_t cuts[][4] = {{1, 2, 3, 40}, {7, 8, 30, 40}, {16, 17, 32, 40}, {2, 4, 6, 40}};
    weft_exec execs[EXECS];
    int count = all_execs(execs);
    for (int rule = 0; rule < 2; rule++)
        for (int v = 0; v < 12; v++)
            for (int e = 0; e < count; e++) {
                spec s = {.op = rule ? "gdn_rule_fwd" : "gdn_pre_fwd", .tokens = 2, .streams = 4, .channels = 33};
                s.act = acts[v % 3];
                s.steps = 40;
                s.width = 2 + v % 4;
                s.history = s.width - 1 + v % 3;
                if (v % 2) s.absent = " bias ", s.channels = 32;
                if (!serves(execs[e], s.op)) continue;
                if (rule && is_ref(execs[e])) continue; /* it hands on in single what it keeps in double */
                expect_pieces(&s, cuts[v % 4], execs[e]);
            }
    test_verdict();
}

/* Heads that a GPU takes in chunks: cut where chunks end. */
static void pieces_of_whole_chunks_agree(void **state)
{
    (void)state;
    static const int64_t cuts[][4] = {{64, 128, 192, 200}, {64, 192, 192, 193}};
    weft_exec execs[EXECS];
    int count = all_execs(execs);
    for (int v = 0; v < 4; v++)
        for (int e = 0; e < count; e++) {
            spec s = {.op = "gdn_rule_fwd", .tokens = 2, .streams = 2, .channels = 64, .act = WEFT_BF16};
            s.steps = cuts[v % 2][3];
            s.heads = 1;
            if (v / 2) s.key_dim = 128;
            if (is_ref(execs[e]) || !serves(execs[e], s.op)) continue;
            expect_pieces(&s, cuts[v % 2], execs[e]);
        }
    test_verdict();
}

/* Token by token, and several tokens at a time, through rows of a cache in another order, beside padding. */
static void decoding_agrees_with_the_whole(void **state)
{
    (void)state;
    weft_exec execs[EXECS];
    int count = all_execs(execs);
    for (int v = 0; v < 18; v++)
        for (int e = 0; e < count; e++) {
            spec s = {.op = "gdn_pre_fwd", .tokens = 6, .streams = 4, .channels = 20, .act = acts[v % 3]};
            s.steps = 9;
            s.width = 1 + v % 6;
            s.history = s.width + v % 3;
            s.absent = " state ";
            spec d = s;
            d.op = "gdn_pre_step";
            d.absent = NULL;
            if (v >= 12) {
                make_usual(&s);
                s.channels = 64;
                s.history += v % 2;
                s.wide = s.act;
                d = s;
                d.op = "gdn_pre_step";
            }
            int64_t at_once = v % 2 ? 1 : 3;
            problem *whole = problem_make(&s), *p = problem_make(&d);
            problem_must_run(whole, execs[e]);
            for (int i = 0; i < p->num_args; i++) { /* the same inputs, an empty cache, new_state over state */
                const arg *same = problem_arg(whole, p->arg[i].name);
                if (same && !arg_is_output(&p->arg[i])) copy_values(&p->arg[i], same);
            }
            arg *cache = problem_arg(p, "state"), *index = problem_arg(p, "state_index");
            for (int64_t k = 0; k < cache->elements; k++) arg_set(cache, k, 0);
            *problem_arg(p, "new_state")->view = *cache->view;
            for (int64_t from = 0; from < s.steps; from += at_once) {
                weft_tensor keep[MAX_ARGS];
                int64_t elements[MAX_ARGS];
                for (int i = 0; i < p->num_args; i++) keep[i] = *p->arg[i].view, elements[i] = p->arg[i].elements;
                narrow(p, from, from + at_once);
                if (problem_call(p, execs[e]) != WEFT_OK) test_failed("%s", weft_last_error());
                for (int i = 0; i < p->num_args; i++) *p->arg[i].view = keep[i], p->arg[i].elements = elements[i];
            }
            for (int i = 0; i < p->num_args; i++) {
                const arg *a = &p->arg[i], *b = problem_arg(whole, a->name);
                if (!a->guard.block || !arg_is_output(a) || !b) continue;
                int64_t row = a->elements / s.tokens;
                for (int64_t n = 0; n < s.tokens; n++) {
                    bool padding = arg_get(index, n) < 0;
                    if (!padding) expect_same(a, b, n * row, n * row, row, "decoded");
                    for (int64_t k = 0; padding && k < row; k++)
                        if (arg_get(a, n * row + k) != 0) test_failed("%s: padding is not zero", a->name);
                }
            }
            const arg *final = problem_arg(whole, "final_state");
            int64_t row = final->elements / s.tokens, untouched = 0;
            for (int64_t n = 0; n < s.tokens; n++)
                if (arg_get(index, n) >= 0)
                    expect_same(cache, final, (int64_t)arg_get(index, n) * row, n * row, row, "decoded state");
            for (int64_t k = 0; k < 2 * row; k++) untouched += arg_get(cache, k) == 0; /* rows 0 and 1: nobody's */
            if (untouched != 2 * row) test_failed("rows of the cache that no request names were written");
            problem_free(p);
            problem_free(whole);
        }
    test_verdict();
}

/* The new tokens [from, to) of a call of gdn_rule_step, the cache in place. */
static void rule_step(problem *p, weft_exec exec, int64_t from, int64_t to)
{
    weft_tensor keep[MAX_ARGS];
    int64_t elements[MAX_ARGS];
    for (int i = 0; i < p->num_args; i++) keep[i] = *p->arg[i].view, elements[i] = p->arg[i].elements;
    narrow(p, from, to);
    if (problem_call(p, exec) != WEFT_OK) test_failed("%s", weft_last_error());
    for (int i = 0; i < p->num_args; i++) *p->arg[i].view = keep[i], p->arg[i].elements = elements[i];
}

/* The memory of a cache as [rows, Hv, Dv, Dk], its values where they belong. */
static void turn_states(arg *a)
{
    double *values = arg_values(a);
    weft_tensor *t = a->view;
    t->stride[3] = t->shape[2];
    t->stride[2] = 1;
    arg_fill(a, values);
    free(values);
}

/* gdn_rule_step token by token, several at a time and all at once, with states in both memory orders: one and the same, and on the
 * CPU that of gdn_rule on the whole. The reference hands on in single what it keeps in double. Head sizes with kernels of their own
 * on a GPU, and others. */
static void rule_steps_agree(void **state)
{
    (void)state;
    static const int64_t dims[] = {64, 128, 20, 256, 33, 160};
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 2);
    for (int v = 0; v < 12; v++)
        for (int e = 0; e < count; e++) {
            spec s = {
                .op = "gdn_rule_step", .tokens = 6, .streams = 4, .channels = dims[v % 6], .act = acts[v % 3]};
            s.value_dim = v % 4 == 1 ? 32 : dims[v % 6];
            s.steps = 8;
            s.wide = WEFT_F32;
            s.key_heads = s.heads = v % 2 ? 2 : 4;
            problem *whole = problem_make(&s);
            problem_must_run(whole, execs[e]);
            for (int way = 0; way < 3; way++) {
                problem *p = problem_make(&s);
                arg_drop(problem_arg(p, "token_state"));
                arg *cache = problem_arg(p, "state");
                if (way == 1) turn_states(cache);
                *problem_arg(p, "new_state")->view = *cache->view;
                for (int64_t from = 0, each = way == 2 ? 4 : 1; from < s.steps; from += each)
                    rule_step(p, execs[e], from, from + each);
                const arg *o = problem_arg(p, "o"), *index = problem_arg(p, "state_index");
                expect_same(o, problem_arg(whole, "o"), 0, 0, o->elements, "rule by steps");
                int64_t row = cache->elements / cache->view->shape[0];
                for (int64_t n = 0; n < s.tokens; n++) {
                    const int64_t at = (int64_t)arg_get(index, n);
                    if (at < 0) continue;
                    expect_same(cache, problem_arg(whole, "new_state"), at * row, at * row, row, "state by steps");
                    expect_same(problem_arg(whole, "token_state"), cache, ((n + 1) * s.steps - 1) * row, at * row,
                                row, "state after the last token");
                }
                problem_free(p);
            }
            if (execs[e].backend == WEFT_BACKEND_CPU) {
                spec f = s;
                f.op = "gdn_rule_fwd";
                problem *fwd = problem_make(&f);
                const arg *cache = problem_arg(whole, "state"), *index = problem_arg(whole, "state_index");
                arg *first = problem_arg(fwd, "state");
                int64_t row = cache->elements / cache->view->shape[0];
                for (int i = 0; i < fwd->num_args; i++) {
                    const arg *same = problem_arg(whole, fwd->arg[i].name);
                    if (same && !arg_is_output(same) && same != cache) copy_values(&fwd->arg[i], same);
                }
                for (int64_t k = 0; k < first->elements; k++) {
                    const int64_t at = (int64_t)arg_get(index, k / row);
                    arg_set(first, k, at < 0 ? 0 : arg_get(cache, at * row + k % row));
                }
                problem_call(fwd, execs[e]);
                int64_t tokens = problem_arg(fwd, "o")->elements / s.tokens;
                for (int64_t n = 0; n < s.tokens; n++)
                    if (arg_get(index, n) >= 0)
                        expect_same(problem_arg(whole, "o"), problem_arg(fwd, "o"), n * tokens, n * tokens, tokens,
                                    "steps against the rule");
                problem_free(fwd);
            }
            problem_free(whole);
        }
    test_verdict();
}

/* ---- neighbours -------------------------------------------------------------------------------------------------------- */

/* A packed sequence does not know its neighbours: the same rows with the others poisoned, empty ones in between. */
static void neighbours_do_not_matter(void **state)
{
    (void)state;
    static const int64_t lengths[] = {0, 5, 1, 0, 20, 3, 70, 0, 2, 0};
    enum { COUNT = sizeof lengths / sizeof *lengths };
    weft_exec execs[EXECS];
    int count = all_execs(execs);
    for (int o = 0; o < OPS; o++)
        for (int v = 0; v < 4; v++)
            for (int e = 0; e < count; e++) {
                spec s = {.op = ops[o], .tokens = COUNT, .streams = 4, .channels = 16, .act = acts[v % 3]};
                s.packed = true;
                s.lengths = lengths;
                if (!serves(execs[e], ops[o])) continue;
                if (v % 2) make_usual(&s);
                s.width = 4 + v / 2;
                s.history = s.width - 1;
                s.seed = (uint64_t)v;
                if (v == 1 && strncmp(ops[o], "gdn_rule", 8) == 0) s.channels = 64; /* in chunks on a GPU */
                problem *clean = problem_make(&s);
                problem_must_run(clean, execs[e]);
                int64_t start = 0;
                for (int64_t n = 0; n < COUNT; start += lengths[n++]) {
                    if (lengths[n] == 0) continue;
                    problem *bad = problem_make(&s);
                    for (int i = 0; i < bad->num_args; i++) {
                        arg *a = &bad->arg[i];
                        if (!a->guard.block || arg_is_output(a) || a->info->ndim < 2 ||
                            a->info->dim[1] != WEFT_DIM_STEPS)
                            continue;
                        int64_t row = a->elements / a->view->shape[1];
                        for (int64_t k = 0; k < a->elements; k++)
                            if (k / row < start || k / row >= start + lengths[n]) arg_set(a, k, (double)NAN);
                    }
                    problem_seal(bad);
                    problem_must_run(bad, execs[e]);
                    for (int i = 0; i < bad->num_args; i++) {
                        const arg *a = &bad->arg[i];
                        if (!a->guard.block || !arg_is_output(a) || a->info->ndim < 2 ||
                            a->info->dim[1] != WEFT_DIM_STEPS)
                            continue;
                        int64_t row = a->elements / a->view->shape[1];
                        expect_same(a, &clean->arg[i], start * row, start * row, lengths[n] * row,
                                    "a sequence among poisoned ones");
                        /* padding behind the last sequence is zero whatever lies there */
                        for (int64_t k = (a->view->shape[1] - 3) * row; k < a->elements; k++)
                            if (arg_get(a, k) != 0) test_failed("%s: %s: padding is not zero", s.op, a->name);
                    }
                    problem_free(bad);
                }
                problem_free(clean);
            }
    test_verdict();
}

/* NaN at one token reaches W - 1 tokens further, in its channels, and no token in front of it. */
static void causal_window(void **state)
{
    (void)state;
    weft_exec execs[EXECS];
    int count = all_execs(execs);
    for (int v = 0; v < 8; v++)
        for (int e = 0; e < count; e++) {
            spec s = {.op = "gdn_pre_fwd", .tokens = 1, .streams = 2, .channels = 16, .act = acts[v % 3]};
            s.steps = 40;
            s.width = 1 + v;
            if (v % 2) s.absent = " bias ";
            problem *clean = problem_make(&s), *bad = problem_make(&s);
            int64_t t = 11 + v;
            arg *x = problem_arg(bad, "v");
            arg_set(x, (t * s.streams + 1) * s.channels + 5, v % 2 ? (double)NAN : (double)INFINITY);
            problem_seal(bad);
            problem_must_run(clean, execs[e]);
            problem_must_run(bad, execs[e]);
            const arg *a = problem_arg(bad, "value"), *b = problem_arg(clean, "value");
            for (int64_t k = 0; k < a->elements; k++) {
                int64_t token = k / (s.streams * s.channels), channel = k % (s.streams * s.channels);
                bool inside = token >= t && token < t + s.width && channel == s.channels + 5;
                if (inside && isfinite(arg_get(a, k)) && v % 2)
                    test_failed("value: a NaN became %g", arg_get(a, k));
                if (!inside) expect_same(a, b, k, k, 1, "outside of the causal window");
            }
            problem_free(clean);
            problem_free(bad);
        }
    test_verdict();
}

/* ---- other outputs ------------------------------------------------------------------------------------------------------ */

/* An output that is not wanted does not change the others: which kernel serves a call may depend on what it has to write. */
static void unwanted_outputs_do_not_matter(void **state)
{
    (void)state;
    weft_exec execs[EXECS];
    int count = all_execs(execs);
    for (int o = 0; o < OPS; o++)
        for (int v = 0; v < 3; v++) {
            spec s = {.op = ops[o], .tokens = 3, .streams = 4, .channels = 32, .act = acts[v], .steps = 50};
            make_usual(&s);
            s.width -= v;
            problem *all = problem_make(&s);
            for (int e = 0; e < count; e++) {
                if (!serves(execs[e], ops[o])) continue;
                problem_must_run(all, execs[e]);
                for (int i = 0; i < all->num_args; i++) {
                    const arg *out = &all->arg[i];
                    if (!out->guard.block || !out->info->optional || !arg_is_output(out)) continue;
                    problem *less = problem_make(&s);
                    char what[120];
                    arg_drop(&less->arg[i]);
                    problem_settle(less);
                    problem_must_run(less, execs[e]);
                    snprintf(what, sizeof what, "without %s", out->name);
                    expect_all(less, all, execs[e], what);
                    problem_free(less);
                }
            }
            problem_free(all);
        }
    test_verdict();
}

/* ---- bad sequences ------------------------------------------------------------------------------------------------------ */

static void expect_refusal(problem *p, weft_exec exec, const char *name, const char *what)
{
    problem_seal(p);
    weft_status status = problem_run(p, exec);
    const char *text = weft_last_error();
    if (status != WEFT_ERR_ARGUMENT || !strstr(text, name) || !strstr(text, "expected") || !strstr(text, "got") ||
        !strstr(text, p->op->name))
        test_failed("%s on %s: %s: got %s, \"%s\"", p->op->name, exec_name(exec), what, weft_status_name(status),
                    text);
    if (!problem_untouched(p)) test_failed("%s: %s: refused, but something was written", p->op->name, what);
}

static void bad_sequences_are_refused(void **state)
{
    (void)state;
    static const int64_t lengths[] = {3, 4, 2};
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 2)};
    for (int e = 0; e < 2; e++)
        for (int o = 0; o < OPS; o++)
            for (int k = 0; k < 5; k++) {
                static const double bad[5][2] = {{1, 8}, {2, 2}, {3, 99}, {0, 1}, {3, -1}};
                spec s = {
                    .op = ops[o], .tokens = 3, .streams = 2, .channels = 4, .packed = true, .lengths = lengths};
                s.seed = (uint64_t)k; /* both widths of offsets */
                problem *p = problem_make(&s);
                arg_set(problem_arg(p, "cu_seqlens"), (int64_t)bad[k][0], bad[k][1]);
                expect_refusal(p, execs[e], "cu_seqlens", "offsets that do not fit");
                problem_free(p);
                /* a batch beside offsets */
                s.packed = false;
                p = problem_make(&s);
                int32_t offsets[] = {0, 1, 2, 3};
                for (int32_t i = 0; i < p->op->num_args; i++)
                    if (p->op->args[i].dim[0] == WEFT_DIM_OFFSETS)
                        *p->arg[i].view = weft_dense1(offsets, WEFT_I32, 4);
                expect_refusal(p, execs[e], "cu_seqlens", "offsets beside a batch");
                problem_free(p);
            }
    test_verdict();
}

static void bad_sizes_are_refused(void **state)
{
    (void)state;
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 2)};
    for (int e = 0; e < 2; e++)
        for (int o = 0; o < OPS; o++) {
            spec s = {.op = ops[o], .tokens = 2, .streams = 4, .channels = 4, .key_heads = 3, .heads = 4};
            bool rule = strncmp(ops[o], "gdn_rule", 8) == 0;
            if (rule) s.heads = 3;
            problem *p = problem_make(&s);
            expect_refusal(p, execs[e], "heads", "value heads that key heads do not divide");
            problem_free(p);
            if (rule) continue;
            s.key_heads = 1;
            s.heads = 2;
            p = problem_make(&s);
            expect_refusal(p, execs[e], "heads", "query heads that are neither");
            problem_free(p);
            s.heads = 4;
            s.width = WEFT_GDN_MAX_WIDTH + 1;
            p = problem_make(&s);
            expect_refusal(p, execs[e], "width", "too many taps");
            problem_free(p);
            s.width = 4;
            s.history = 2;
            p = problem_make(&s);
            expect_refusal(p, execs[e], "slots", "a state too short for the taps");
            problem_free(p);
            s.history = 3;
            for (int k = 0; k < 8; k++) {
                s.gdn = weft_gdn_defaults();
                p = problem_make(&s);
                weft_gdn_options *f = &((weft_gdn_pre_fwd_args *)p->args)->options; /* first in all of them */
                if (k == 0) f->q_scale = 0;
                if (k == 1) f->beta_scale = (double)NAN;
                if (k == 2) f->l2_eps = -1;
                if (k == 3) f->activation = (weft_gdn_activation)2;
                if (k == 4) f->l2norm = 2;
                if (k == 5) f->g_chunk = -1;
                if (k == 6) f->head_map = (weft_gdn_head_map)-1;
                if (k == 7) f->g_chunk = WEFT_GDN_MAX_CHUNK + 1;
                expect_refusal(p, execs[e], "options", "an option that is none");
                problem_free(p);
            }
            if (strcmp(ops[o], "gdn_pre_step") != 0) continue;
            p = problem_make(&s);
            arg_set(problem_arg(p, "state_index"), 1, 4);
            expect_refusal(p, execs[e], "state_index", "a row that the cache does not have");
            arg_set(problem_arg(p, "state_index"), 1, -2);
            expect_refusal(p, execs[e], "state_index", "a row below -1");
            problem_free(p);
        }
    test_verdict();
}

/* A row of the cache belongs to one request of a call. Caches of one window of the check and of several (src/core/sequences.c); padding
 * may repeat. */
static void rows_named_twice_are_rejected(void **state)
{
    (void)state;
    static const struct {
        int64_t requests, pairs[3][2];
    } cases[] = {{2, {{0, 1}, {0, 1}, {0, 1}}},
                 {70, {{0, 69}, {3, 5}, {67, 68}}},
                 {140003, {{0, 140002}, {5, 131075}, {140000, 140002}}}};
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 2)};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int wide = 0; wide < 2; wide++) {
            spec s = {.op = "gdn_pre_step", .tokens = cases[c].requests, .streams = 1, .channels = 1};
            s.steps = 1;
            s.width = 2;
            s.history = 1;
            s.seed = (uint64_t)wide; /* i32, i64 */
            problem *p = problem_make(&s);
            arg *index = problem_arg(p, "state_index");
            for (int e = 0; e < 2; e++) problem_must_run(p, execs[e]);
            for (int k = 0; k < 3; k++) {
                const int64_t *pair = cases[c].pairs[k];
                const double was[2] = {arg_get(index, pair[0]), arg_get(index, pair[1])};
                char first[40], second[40];
                snprintf(first, sizeof first, "state_index[%lld]", (long long)pair[0]);
                snprintf(second, sizeof second, "state_index[%lld]", (long long)pair[1]);
                const double row = was[0] < 0 ? was[1] : was[0];
                arg_set(index, pair[0], row);
                arg_set(index, pair[1], row);
                for (int e = 0; e < 2; e++) {
                    expect_refusal(p, execs[e], first, "a row named twice");
                    expect_refusal(p, execs[e], second, "a row named twice");
                }
                arg_set(index, pair[0], -1);
                arg_set(index, pair[1], -1);
                problem_seal(p);
                for (int e = 0; e < 2; e++) problem_must_run(p, execs[e]);
                arg_set(index, pair[0], was[0]);
                arg_set(index, pair[1], was[1]);
                problem_seal(p);
            }
            problem_free(p);
        }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_and_packed_agree),
        cmocka_unit_test(both_memory_orders_agree),
        cmocka_unit_test(fused_rows),
        cmocka_unit_test(pieces_agree_with_the_whole),
        cmocka_unit_test(pieces_of_whole_chunks_agree),
        cmocka_unit_test(decoding_agrees_with_the_whole),
        cmocka_unit_test(rule_steps_agree),
        cmocka_unit_test(neighbours_do_not_matter),
        cmocka_unit_test(causal_window),
        cmocka_unit_test(unwanted_outputs_do_not_matter),
        cmocka_unit_test(bad_sequences_are_refused),
        cmocka_unit_test(bad_sizes_are_refused),
        cmocka_unit_test(rows_named_twice_are_rejected),
    };
    return suite_run("gdn_promises", tests);
}
