/* SPDX-License-Identifier: Apache-2.0
 *
 * Bad input, generated from the operators' own descriptions: every rule of weft/mhc.h is broken at every argument
 * of every operator, one at a time. The answer must be the right status and a sentence with the operator, the
 * argument, what was expected and what came, and no byte may have been written. */
#include "support/suite.h"

/* ---- one refused call ---------------------------------------------------------------------------------------- */

typedef struct bench {
    problem *p;
    weft_exec exec;
    char *work, *args, layers[MAX_LAYERS * sizeof(weft_mhc_replay_layer)];
    size_t bytes;
} bench;

static spec small(const char *op)
{
    return (spec){.op = op, .tokens = 3, .streams = 2, .channels = 4, .rows = 5};
}

static bench bench_open(const spec *s, weft_exec exec)
{
    bench b = {.p = problem_make(s), .exec = exec};
    weft_status status = b.p->workspace(&exec, b.p->args, &b.bytes);
    if (status != WEFT_OK) fail_msg("%s: %s", s->op, weft_last_error());
    b.work = malloc(b.bytes + 1);
    memset(b.work, 0x5a, b.bytes + 1);
    b.exec.workspace = b.work;
    b.exec.workspace_bytes = b.bytes;
    b.args = malloc(b.p->op->args_size);
    memcpy(b.args, b.p->args, b.p->op->args_size);
    memcpy(b.layers, b.p->layers, sizeof b.layers);
    return b;
}

/* Undoes what a mutation did to the args struct and to the exec. */
static void restore(bench *b, weft_exec exec)
{
    memcpy(b->p->args, b->args, b->p->op->args_size);
    memcpy(b->p->layers, b->layers, sizeof b->layers);
    b->exec = exec;
    b->exec.workspace = b->work;
    b->exec.workspace_bytes = b->bytes;
}

static void bench_close(bench *b)
{
    restore(b, b->exec);
    free(b->work);
    free(b->args);
    problem_free(b->p);
}

/* `name` must stand in the message as a word of its own: not the x inside "expected". */
static bool mentions(const char *text, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = strstr(text, name); at; at = strstr(at + 1, name)) {
        bool before = at == text || !strchr("abcdefghijklmnopqrstuvwxyz_", at[-1]);
        bool after = !at[length] || !strchr("abcdefghijklmnopqrstuvwxyz_0123456789", at[length]);
        if (before && after) return true;
    }
    return false;
}

/* name NULL: any argument may be the one that is named (a size that disagrees has two sides). */
static void refuses(bench *b, weft_status want, const char *name, const char *what)
{
    weft_status got = b->p->call(&b->exec, b->p->args);
    const char *text = weft_last_error();
    const char *op = b->p->op->name;
    if (got != want)
        test_failed("%s: %s: %s: got \"%s\" (%s), want \"%s\"", op, name ? name : "", what, weft_status_name(got),
                    text, weft_status_name(want));
    if (got == WEFT_OK) {
        problem_reset(b->p);
        memset(b->work, 0x5a, b->bytes + 1);
        return;
    }
    if (!mentions(text, op) || !strstr(text, "expected") || !strstr(text, "got") || (name && !mentions(text, name)))
        test_failed("%s: %s: the message should name the operator, \"%s\", what was expected and got: \"%s\"", op,
                    what, name ? name : "an argument", text);
    if (!problem_untouched(b->p)) test_failed("%s: %s: refused, but something was written", op, what);
    for (size_t i = 0; i < b->bytes + 1; i++)
        if (b->work[i] != 0x5a) {
            test_failed("%s: %s: refused, but the workspace was written", op, what);
            break;
        }
}

/* The workspace query must not accept what the call refuses, unless it is about data or overlap. */
static void query_refuses(bench *b, weft_status want, const char *what)
{
    size_t bytes = 12345;
    weft_status got = b->p->workspace(&b->exec, b->p->args, &bytes);
    if (got != want)
        test_failed("%s: %s: the workspace query says \"%s\", want \"%s\"", b->p->op->name, what,
                    weft_status_name(got), weft_status_name(want));
    if (got != WEFT_OK && bytes != 12345)
        test_failed("%s: %s: a failed query wrote its result", b->p->op->name, what);
}

static void for_each_op(void (*test)(bench *b, weft_exec exec))
{
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 1)};
    for (int e = 0; e < 2; e++)
        for (int32_t i = 0; i < weft_op_count(); i++) {
            spec s = small(weft_op_at(i)->name);
            bench b = bench_open(&s, execs[e]);
            test(&b, execs[e]);
            restore(&b, execs[e]);
            bench_close(&b);
        }
    test_verdict();
}

#define EACH_ARG(b, a) for (arg *a = (b)->p->arg; a < (b)->p->arg + (b)->p->num_args; a++)

/* ---- arguments ----------------------------------------------------------------------------------------------- */

static void absent_one(bench *b, weft_exec exec)
{
    EACH_ARG(b, a)
    {
        if (a->info->optional) continue;
        a->view->dtype = WEFT_NONE;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "required argument absent");
        query_refuses(b, WEFT_ERR_ARGUMENT, "required argument absent");
        restore(b, exec);
    }
}

static void rank_one(bench *b, weft_exec exec)
{
    static const int32_t wrong[] = {-1, 0, 5, 1000, INT32_MIN, INT32_MAX};
    EACH_ARG(b, a)
    {
        for (int k = 0; k < 8; k++) {
            a->view->ndim = k < 6 ? wrong[k] : k == 6 ? a->info->ndim - 1 : a->info->ndim + 1;
            refuses(b, WEFT_ERR_ARGUMENT, a->name, "wrong rank");
            query_refuses(b, WEFT_ERR_ARGUMENT, "wrong rank");
            restore(b, exec);
        }
    }
}

/* A size that a single tensor shows can disagree with nothing: the streams of an expanded tensor. */
static bool alone(const problem *p, int32_t dim)
{
    int seen = 0;
    bool streams = dim == WEFT_DIM_STREAMS || dim == WEFT_DIM_GATES;
    for (int i = 0; i < p->num_args; i++)
        for (int d = 0; d < p->arg[i].info->ndim; d++) {
            int32_t other = p->arg[i].info->dim[d];
            seen += streams ? other == WEFT_DIM_STREAMS || other == WEFT_DIM_GATES : other == dim;
        }
    return seen == 1;
}

static void dims_one(bench *b, weft_exec exec)
{
    static const int64_t absurd[] = {-1, INT64_MIN, (int64_t)1 << 62, INT64_MAX, ((int64_t)1 << 40) + 1};
    EACH_ARG(b, a)
    {
        for (int d = 0; d < a->info->ndim; d++) {
            for (int64_t step = -1; step <= 1 && !alone(b->p, a->info->dim[d]); step += 2) {
                a->view->shape[d] += step;
                refuses(b, WEFT_ERR_ARGUMENT, NULL, "a dimension off by one");
                query_refuses(b, WEFT_ERR_ARGUMENT, "a dimension off by one");
                restore(b, exec);
            }
            for (size_t k = 0; k < sizeof absurd / sizeof *absurd; k++) {
                a->view->shape[d] = absurd[k];
                refuses(b, WEFT_ERR_ARGUMENT, a->name, "an absurd dimension");
                query_refuses(b, WEFT_ERR_ARGUMENT, "an absurd dimension");
                restore(b, exec);
            }
        }
    }
}

/* One size absurd in all tensors at once, so that nothing disagrees. */
static void whole_size(bench *b, weft_exec exec, int32_t dim, int64_t size, weft_status want, const char *what)
{
    bool any = false;
    EACH_ARG(b, a)
    {
        for (int d = 0; d < a->info->ndim && a->block; d++) {
            int64_t gates = dim == WEFT_DIM_STREAMS && a->info->dim[d] == WEFT_DIM_GATES;
            if (a->info->dim[d] != dim && !gates) continue;
            a->view->shape[d] = gates ? 2 * size + size * size : size;
            any = true;
        }
    }
    if (any && want != WEFT_OK) refuses(b, want, NULL, what);
    if (any) query_refuses(b, want, what);
    restore(b, exec);
}

static void sizes_one(bench *b, weft_exec exec)
{
    whole_size(b, exec, WEFT_DIM_STREAMS, 0, WEFT_ERR_ARGUMENT, "0 streams");
    whole_size(b, exec, WEFT_DIM_STREAMS, WEFT_MAX_STREAMS + 1, WEFT_ERR_ARGUMENT, "33 streams");
    whole_size(b, exec, WEFT_DIM_CHANNELS, 0, WEFT_ERR_ARGUMENT, "0 channels");
    whole_size(b, exec, WEFT_DIM_CHANNELS, (int64_t)1 << 62, WEFT_ERR_ARGUMENT, "2^62 channels");
    whole_size(b, exec, WEFT_DIM_ROWS, 0, WEFT_ERR_ARGUMENT, "0 rows");
    whole_size(b, exec, WEFT_DIM_ROWS, 4097, WEFT_ERR_ARGUMENT, "4097 rows");
    whole_size(b, exec, WEFT_DIM_TOKENS, -1, WEFT_ERR_ARGUMENT, "-1 tokens");
    whole_size(b, exec, WEFT_DIM_TOKENS, ((int64_t)1 << 40) + 1, WEFT_ERR_ARGUMENT, "2^40 + 1 tokens");
    /* the query does not touch data, so the largest allowed call can be asked about */
    whole_size(b, exec, WEFT_DIM_TOKENS, (int64_t)1 << 40, WEFT_OK, "2^40 tokens");
}

static void dtypes_one(bench *b, weft_exec exec)
{
    static const weft_dtype narrow[] = {WEFT_BF16, WEFT_F16};
    EACH_ARG(b, a)
    {
        static const int bad[] = {5, 77, -1};
        for (int k = 0; k < 3; k++) {
            a->view->dtype = (weft_dtype)bad[k];
            refuses(b, WEFT_ERR_ARGUMENT, a->name, "no dtype at all");
            query_refuses(b, WEFT_ERR_ARGUMENT, "no dtype at all");
            restore(b, exec);
        }
        /* one f64 among f32 (the first tensor decides, so the others may be the ones that are named) */
        a->view->dtype = WEFT_F64;
        if (b->p->num_args > 1) refuses(b, WEFT_ERR_ARGUMENT, NULL, "float64 among others");
        restore(b, exec);
        for (int k = 0; k < 2; k++) {
            a->view->dtype = narrow[k];
            if (a->info->type == WEFT_TYPE_FULL)
                refuses(b, WEFT_ERR_ARGUMENT, a->name, "16 bits where f32 is needed");
            restore(b, exec);
        }
    }
}

/* The activation type is one: bf16 next to f16 is refused, for activations and stream gradients alike. */
static void mixed_activations(bench *b, weft_exec exec)
{
    int acts = 0, wides = 0;
    EACH_ARG(b, a)
    {
        acts += a->info->type == WEFT_TYPE_ACT;
        wides += a->info->type == WEFT_TYPE_WIDE;
        if (a->info->type == WEFT_TYPE_ACT || a->info->type == WEFT_TYPE_WIDE) a->view->dtype = WEFT_BF16;
    }
    query_refuses(b, WEFT_OK, "all activations bf16");
    EACH_ARG(b, a)
    {
        bool is_stream = a->info->type == WEFT_TYPE_ACT || a->info->type == WEFT_TYPE_WIDE;
        if (!is_stream || acts + wides < 2) continue;
        a->view->dtype = WEFT_F16;
        query_refuses(b, WEFT_ERR_ARGUMENT, "one f16 tensor among bf16 activations");
        a->view->dtype = WEFT_F32;
        /* f32 next to a 16-bit activation type is for gradients only */
        query_refuses(b, a->info->type == WEFT_TYPE_WIDE ? WEFT_OK : WEFT_ERR_ARGUMENT,
                      "one f32 tensor among bf16 ones");
        a->view->dtype = WEFT_BF16;
    }
    restore(b, exec);
}

static void pointers_one(bench *b, weft_exec exec)
{
    EACH_ARG(b, a)
    {
        if (!a->block) continue;
        a->view->data = NULL;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "NULL data");
        query_refuses(b, WEFT_OK, "NULL data"); /* "Tensor data is not looked at" */
        restore(b, exec);
        a->view->data = (char *)a->view->data + 1;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "data off its element by one byte");
        restore(b, exec);
        a->view->data = (char *)a->view->data + weft_dtype_size(a->view->dtype) / 2;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "data off its element by half of it");
        restore(b, exec);
    }
}

static void strides_one(bench *b, weft_exec exec)
{
    static const int64_t bad[] = {-1, INT64_MIN, (int64_t)1 << 61, INT64_MAX};
    EACH_ARG(b, a)
    {
        for (int d = 0; d < a->info->ndim && a->block; d++) {
            if (a->view->shape[d] < 2) continue;
            for (int k = 0; k < 4; k++) {
                a->view->stride[d] = bad[k];
                refuses(b, WEFT_ERR_ARGUMENT, a->name, "negative or absurd stride");
                query_refuses(b, WEFT_ERR_ARGUMENT, "negative or absurd stride");
                restore(b, exec);
            }
            if (!arg_is_output(a)) continue;
            a->view->stride[d] = 0;
            refuses(b, WEFT_ERR_ARGUMENT, a->name, "output with stride 0");
            restore(b, exec);
            for (int e = 0; e < a->info->ndim; e++) {
                if (e == d || a->view->shape[e] < 2) continue;
                a->view->stride[d] = a->view->stride[e];
                refuses(b, WEFT_ERR_ARGUMENT, a->name, "output with two equal strides");
                restore(b, exec);
            }
        }
        if (a->info->kind != WEFT_ARG_GRAD) continue;
        for (int add = -1; add <= 2; add += 3) {
            ((weft_grad *)(void *)a->view)->add = add;
            refuses(b, WEFT_ERR_ARGUMENT, a->name, "add neither 0 nor 1");
            restore(b, exec);
        }
    }
}

/* An optional tensor that is there without the one it belongs to. */
static void orphans_one(bench *b, weft_exec exec)
{
    EACH_ARG(b, a)
    {
        if (a->info->kind != WEFT_ARG_GRAD) continue;
        arg *of = problem_arg(b->p, a->name + 2);
        if (!of || !of->info->optional) continue;
        of->view->dtype = WEFT_NONE;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "a gradient of an absent tensor");
        restore(b, exec);
    }
    arg *weight = problem_arg(b->p, "sub_weight");
    arg *norm = problem_arg(b->p, problem_arg(b->p, "d_sub_weight") ? "d_v" : "v");
    if (weight && norm) {
        norm->view->dtype = WEFT_NONE;
        refuses(b, WEFT_ERR_ARGUMENT, "sub_weight", "a norm's weight without the norm");
        restore(b, exec);
    }
}

/* ---- exec, args struct, scalars ------------------------------------------------------------------------------ */

static void exec_one(bench *b, weft_exec exec)
{
    problem *p = b->p;
    const char *op = p->op->name;
    struct {
        weft_exec exec;
        weft_status want;
        const char *name, *what;
    } cases[16];
    int count = 0;
#define CASE(status, field, value, text)                                                                           \
    do {                                                                                                           \
        cases[count].exec = b->exec;                                                                               \
        cases[count].exec.field = value;                                                                           \
        cases[count].want = status;                                                                                \
        cases[count].name = #field;                                                                                \
        cases[count++].what = text;                                                                                \
    } while (0)
    CASE(WEFT_ERR_ARGUMENT, backend, (weft_backend)0, "backend 0");
    CASE(WEFT_ERR_ARGUMENT, backend, (weft_backend)99, "backend 99");
    CASE(WEFT_ERR_ARGUMENT, backend, (weft_backend)-1, "backend -1");
    if (!weft_backend_available(WEFT_BACKEND_CUDA))
        CASE(WEFT_ERR_UNSUPPORTED, backend, WEFT_BACKEND_CUDA, "no CUDA here");
    CASE(WEFT_ERR_ARGUMENT, device, 1, "device 1 on the CPU");
    CASE(WEFT_ERR_ARGUMENT, device, -1, "device -1");
    CASE(WEFT_ERR_ARGUMENT, threads, -1, "-1 threads");
    CASE(WEFT_ERR_ARGUMENT, threads, INT32_MIN, "very few threads");
    CASE(WEFT_ERR_ARGUMENT, isa, (weft_isa)17, "isa 17");
    CASE(WEFT_ERR_ARGUMENT, isa, (weft_isa)-1, "isa -1");
    if (exec.backend == WEFT_BACKEND_CPU && weft_cpu_isa() < WEFT_ISA_AMX)
        CASE(WEFT_ERR_UNSUPPORTED, isa, WEFT_ISA_AMX, "an isa this machine lacks");
    for (int i = 0; i < count; i++) {
        b->exec = cases[i].exec;
        refuses(b, cases[i].want, cases[i].name, cases[i].what);
        query_refuses(b, cases[i].want, cases[i].what);
        restore(b, exec);
    }
    if (b->bytes > 0) {
        b->exec.workspace = NULL;
        refuses(b, WEFT_ERR_WORKSPACE, "workspace", "no workspace");
        restore(b, exec);
        b->exec.workspace_bytes = b->bytes - 1;
        refuses(b, WEFT_ERR_WORKSPACE, "workspace", "one byte too few");
        restore(b, exec);
        b->exec.workspace_bytes = 0;
        refuses(b, WEFT_ERR_WORKSPACE, "workspace", "a workspace of 0 bytes");
        restore(b, exec);
    }
    /* null pointers */
    if (p->call(NULL, p->args) != WEFT_ERR_ARGUMENT || !mentions(weft_last_error(), "exec"))
        test_failed("%s: exec NULL: %s", op, weft_last_error());
    if (p->call(&b->exec, NULL) != WEFT_ERR_ARGUMENT || !mentions(weft_last_error(), "args"))
        test_failed("%s: args NULL: %s", op, weft_last_error());
    if (p->workspace(NULL, p->args, &b->bytes) != WEFT_ERR_ARGUMENT) test_failed("%s: query, exec NULL", op);
    if (p->workspace(&b->exec, NULL, &b->bytes) != WEFT_ERR_ARGUMENT) test_failed("%s: query, args NULL", op);
    if (p->workspace(&b->exec, p->args, NULL) != WEFT_ERR_ARGUMENT) test_failed("%s: query, bytes NULL", op);
    if (!problem_untouched(p)) test_failed("%s: a NULL was refused, but something was written", op);
}

static void struct_size_one(bench *b, weft_exec exec)
{
    size_t size = b->p->op->args_size;
    static const long delta[] = {-1, -8};
    size_t *field = b->p->args;
    *field = 0;
    refuses(b, WEFT_ERR_ARGUMENT, "struct_size", "struct_size 0");
    restore(b, exec);
    for (int i = 0; i < 2; i++) {
        *field = (size_t)((long)size + delta[i]);
        refuses(b, WEFT_ERR_ARGUMENT, "struct_size", "struct_size too small");
        restore(b, exec);
    }
    *field = SIZE_MAX;
    refuses(b, WEFT_ERR_ARGUMENT, "struct_size", "struct_size absurd");
    restore(b, exec);
    /* a caller compiled against a later header: fine while the fields this version does not know are zero */
    char *longer = calloc(1, size + 64);
    void *keep = b->p->args;
    memcpy(longer, keep, size);
    *(size_t *)(void *)longer = size + 64;
    query_refuses(b, WEFT_OK, "plain struct");
    b->p->args = longer;
    query_refuses(b, WEFT_OK, "longer struct, zero tail");
    longer[size + 63] = 1;
    refuses(b, WEFT_ERR_UNSUPPORTED, "struct_size", "longer struct with a field set");
    b->p->args = keep;
    free(longer);
}

static bool listed(const char *names, const char *op)
{
    char key[48];
    snprintf(key, sizeof key, " %s ", op);
    return strstr(names, key) != NULL;
}

static void eps_one(bench *b, weft_exec exec, double *field, const char *name)
{
    static const double bad[] = {-1e-6, (double)NAN, (double)INFINITY, -(double)INFINITY};
    size_t offset = (size_t)((char *)field - (char *)b->p->args);
    bool inside = (char *)field >= (char *)b->p->args && offset < b->p->op->args_size;
    for (int i = 0; i < 4; i++) {
        double *now = inside ? (double *)(void *)((char *)b->p->args + offset) : field;
        *now = bad[i];
        refuses(b, WEFT_ERR_ARGUMENT, name, "bad eps");
        query_refuses(b, WEFT_ERR_ARGUMENT, "bad eps");
        restore(b, exec);
    }
    *field = 0; /* zero is fine */
    query_refuses(b, WEFT_OK, "eps 0");
    restore(b, exec);
}

#define BAD_ENUM(b, exec, field, name)                                                                             \
    for (int bad_ = -1; bad_ < 100; bad_ += 50) {                                                                  \
        if (bad_ == 49 || bad_ == -1 || bad_ == 99) memcpy(&(field), &bad_, sizeof bad_);                          \
        refuses(b, WEFT_ERR_ARGUMENT, name, "enum out of range");                                                  \
        restore(b, exec);                                                                                          \
    }

static void dropout_one(bench *b, weft_exec exec, weft_dropout *d, const char *prefix)
{
    static const double bad[] = {-0.1, 1.0, 1.5, (double)NAN, (double)INFINITY};
    char name[48];
    snprintf(name, sizeof name, "%sdropout.p", prefix);
    for (int i = 0; i < 5; i++) {
        d->p = bad[i];
        refuses(b, WEFT_ERR_ARGUMENT, name, "dropout outside [0, 1)");
        query_refuses(b, WEFT_ERR_ARGUMENT, "dropout outside [0, 1)");
        restore(b, exec);
    }
    d->p = 0.5;
    d->token_base = -1;
    snprintf(name, sizeof name, "%sdropout.token_base", prefix);
    refuses(b, WEFT_ERR_ARGUMENT, name, "negative token_base");
    restore(b, exec);
    d->p = 0.5;
    d->shared = 2;
    snprintf(name, sizeof name, "%sdropout.shared", prefix);
    refuses(b, WEFT_ERR_ARGUMENT, name, "shared neither 0 nor 1");
    restore(b, exec);
    d->p = 0.5;
    d->step = (const uint64_t *)(const void *)((char *)&b->p->step + 1);
    snprintf(name, sizeof name, "%sdropout.step", prefix);
    refuses(b, WEFT_ERR_ARGUMENT, name, "misaligned step");
    restore(b, exec);
}

static void scalars_one(bench *b, weft_exec exec)
{
    problem *p = b->p;
    const char *op = p->op->name;
    weft_mhc_numerics *q = fields_numerics(p);
    weft_dropout *d = fields_dropout(p);
    bool gates = listed(" mhc_scale_fwd mhc_scale_bwd mhc_coef_fwd mhc_coef_bwd mhc_pre_fwd mhc_pre_bwd "
                        "mhc_boundary_fwd mhc_boundary_bwd ",
                        op);
    bool sinkhorn = listed(" mhc_sinkhorn_fwd mhc_sinkhorn_bwd mhc_coef_fwd mhc_coef_bwd mhc_pre_fwd mhc_pre_bwd "
                           "mhc_boundary_fwd mhc_boundary_bwd ",
                           op);
    bool apply = listed(" mhc_post_fwd mhc_post_bwd mhc_boundary_fwd mhc_boundary_bwd mhc_replay_fwd ", op);
    if (gates) {
        eps_one(b, exec, &q->rms_eps, "numerics.rms_eps");
        eps_one(b, exec, &q->pre_eps, "numerics.pre_eps");
        BAD_ENUM(b, exec, q->rms_eps_kind, "numerics.rms_eps_kind")
        q->post_mult = (double)NAN;
        refuses(b, WEFT_ERR_ARGUMENT, "numerics.post_mult", "NaN post_mult");
        restore(b, exec);
    }
    if (sinkhorn) {
        eps_one(b, exec, &q->sinkhorn_eps, "numerics.sinkhorn_eps");
        BAD_ENUM(b, exec, q->sinkhorn, "numerics.sinkhorn")
        for (int32_t iters = -1; iters <= 0; iters++) {
            q->sinkhorn_iters = iters;
            refuses(b, WEFT_ERR_ARGUMENT, "numerics.sinkhorn_iters", "no iterations");
            query_refuses(b, WEFT_ERR_ARGUMENT, "no iterations");
            restore(b, exec);
        }
        q->sinkhorn_iters = INT32_MAX; /* would need more memory than there is, or run for a year */
        refuses(b, WEFT_ERR_ARGUMENT, "numerics.sinkhorn_iters", "2^31 iterations");
        restore(b, exec);
    }
    if (apply) BAD_ENUM(b, exec, q->apply, "numerics.apply")
    if (q && !gates && !sinkhorn) {
        /* an operator looks only at the fields it says it uses: the rest may be zero */
        weft_apply keep = q->apply;
        memset(q, 0, sizeof *q);
        q->apply = keep;
        query_refuses(b, WEFT_OK, "unused numerics left at zero");
        restore(b, exec);
    }
    if (d) dropout_one(b, exec, d, listed(" mhc_replay_fwd ", op) ? "layers[0]." : "");
#define EPS(name, field)                                                                                           \
    if (strcmp(op, #name) == 0) eps_one(b, exec, &((weft_##name##_args *)p->args)->field, #field);
    EPS(mhc_pre_fwd, sub_eps)
    EPS(mhc_pre_bwd, sub_eps)
    EPS(mhc_boundary_fwd, sub_eps)
    EPS(mhc_boundary_bwd, sub_eps)
    EPS(rmsnorm_fwd, eps)
    EPS(rmsnorm_bwd, eps)
    EPS(mhc_head_fwd, rms_eps)
    EPS(mhc_head_bwd, rms_eps)
    EPS(mhc_head_fwd, pre_eps)
    EPS(mhc_head_bwd, pre_eps)
#undef EPS
#define ENUM(name, field)                                                                                          \
    if (strcmp(op, #name) == 0) {                                                                                  \
        weft_##name##_args *args = p->args;                                                                        \
        BAD_ENUM(b, exec, args->field, #field)                                                                     \
    }
    ENUM(mhc_head_fwd, rms_eps_kind)
    ENUM(mhc_head_bwd, rms_eps_kind)
    ENUM(mhc_contract_fwd, kind)
    ENUM(mhc_contract_bwd, kind)
#undef ENUM
}

static void replay_one(bench *b, weft_exec exec)
{
    if (strcmp(b->p->op->name, "mhc_replay_fwd") != 0) return;
    weft_mhc_replay_fwd_args *args = b->p->args;
    weft_mhc_replay_layer *layers = b->p->layers;
    static const int32_t counts[] = {0, -1, 4097, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        args->num_layers = counts[i];
        refuses(b, WEFT_ERR_ARGUMENT, "num_layers", "bad number of layers");
        query_refuses(b, WEFT_ERR_ARGUMENT, "bad number of layers");
        restore(b, exec);
    }
    args->layers = NULL;
    refuses(b, WEFT_ERR_ARGUMENT, "layers", "layers NULL");
    query_refuses(b, WEFT_ERR_ARGUMENT, "layers NULL");
    restore(b, exec);
#define MISSING(l, field, named, what)                                                                             \
    layers[l].field.dtype = WEFT_NONE;                                                                             \
    refuses(b, WEFT_ERR_ARGUMENT, named, what);                                                                    \
    restore(b, exec);
    MISSING(0, f, "layers[0].f", "the first layer without f")
    MISSING(1, f, "layers[1].f", "a middle layer without f")
    MISSING(1, post, "layers[1].post", "a middle layer without post")
    MISSING(1, res, "layers[1].res", "a middle layer without res")
    MISSING(2, f, "layers[2].f", "the last layer with post and res, but without f")
    MISSING(2, res, "layers[2].res", "the last layer with f, but without res")
    MISSING(1, pre, "layers[1].pre", "u without pre")
    MISSING(1, v, "layers[1].v", "sub_weight without v")
#undef MISSING
    eps_one(b, exec, &layers[1].sub_eps, "layers[1].sub_eps");
    dropout_one(b, exec, &layers[2].dropout, "layers[2].");
    layers[1].y.data = layers[0].y.data;
    refuses(b, WEFT_ERR_OVERLAP, "layers[1].y", "two layers' y in one memory");
    restore(b, exec);
    layers[0].y.data = args->x.data;
    refuses(b, WEFT_ERR_OVERLAP, "layers[0].y", "y over x");
    restore(b, exec);
    layers[2].u.data = layers[0].f.data;
    refuses(b, WEFT_ERR_OVERLAP, "layers[2].u", "u over an earlier layer's f");
    restore(b, exec);
    layers[0].u.data = layers[2].f.data;
    refuses(b, WEFT_ERR_OVERLAP, NULL, "u over a later layer's f");
    restore(b, exec);
}

static void f64_on_cpu(void **state)
{
    (void)state;
    for (int32_t i = 0; i < weft_op_count(); i++) {
        spec s = small(weft_op_at(i)->name);
        s.act = WEFT_F64;
        bench b = bench_open(&s, on_ref());
        b.exec.backend = WEFT_BACKEND_CPU;
        refuses(&b, WEFT_ERR_UNSUPPORTED, NULL, "float64 on the CPU backend");
        bench_close(&b);
    }
    test_verdict();
}

#define TEST(name, one)                                                                                            \
    static void name(void **state)                                                                                 \
    {                                                                                                              \
        (void)state;                                                                                               \
        for_each_op(one);                                                                                          \
    }
TEST(required_arguments, absent_one)
TEST(ranks, rank_one)
TEST(dimensions, dims_one)
TEST(sizes, sizes_one)
TEST(dtypes, dtypes_one)
TEST(one_activation_type, mixed_activations)
TEST(pointers, pointers_one)
TEST(strides, strides_one)
TEST(orphans, orphans_one)
TEST(exec_fields, exec_one)
TEST(struct_sizes, struct_size_one)
TEST(scalars, scalars_one)
TEST(replay_layers, replay_one)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(required_arguments),
        cmocka_unit_test(ranks),
        cmocka_unit_test(dimensions),
        cmocka_unit_test(sizes),
        cmocka_unit_test(dtypes),
        cmocka_unit_test(one_activation_type),
        cmocka_unit_test(pointers),
        cmocka_unit_test(strides),
        cmocka_unit_test(orphans),
        cmocka_unit_test(exec_fields),
        cmocka_unit_test(struct_sizes),
        cmocka_unit_test(scalars),
        cmocka_unit_test(replay_layers),
        cmocka_unit_test(f64_on_cpu),
    };
    return suite_run("validate", tests);
}
