/* SPDX-License-Identifier: Apache-2.0
 *
 * Bad input beside the tensors, on every operator: exec, the size of the args struct, scalars, the layers of replay, types
 * that a backend does not take. What must come of it is said in test_validate.c. */
#include "support/refuse.h"

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
    CASE(WEFT_ERR_ARGUMENT, trust_pointers, 2, "trust_pointers 2");
    CASE(WEFT_ERR_ARGUMENT, trust_pointers, -1, "trust_pointers -1");
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
    const char *path = NULL;
    if (weft_op_path(p->op, &b->exec, p->args, &path) != WEFT_OK ||
        strcmp(path, "the only path of this backend") != 0)
        test_failed("%s: path: %s", op, path ? path : weft_last_error());
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
    for (int i = 0; i < 4; i++) {
        *field = bad[i];
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
        memcpy(&(field), &bad_, sizeof bad_);                                                                      \
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
        eps_one(b, exec, &q->post_eps, "numerics.post_eps");
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
    MISSING(2, f, "layers[2].f", "the last layer with post and res, but without f")
    MISSING(2, post, "layers[2].post", "the last layer with f and res, but without post")
    MISSING(1, pre, "layers[1].pre", "u without pre")
    MISSING(1, v, "layers[1].v", "sub_weight without v")
#undef MISSING
    layers[1].res.dtype = layers[2].res.dtype = WEFT_NONE;
    query_refuses(b, WEFT_OK, "layers without res");
    restore(b, exec);
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

static void number_of_scales(bench *b, int64_t scales)
{
    static const char *const names[] = {"alpha", "d_alpha"};
    for (int i = 0; i < 2; i++)
        if (problem_arg(b->p, names[i])) problem_arg(b->p, names[i])->view->shape[0] = scales;
}

/* The form with a residual mix and the one without, mixed up in every way. */
static void forms_one(bench *b, weft_exec exec)
{
    problem *p = b->p;
    if (!problem_arg(p, "alpha") || problem_arg(p, "alpha")->info->dim[0] != WEFT_DIM_SCALES) return;
    /* of two streams: 8 rows, which are those of four without a mix */
    number_of_scales(b, 2);
    refuses(b, WEFT_ERR_ARGUMENT, NULL, "2n + n^2 rows with two scales");
    query_refuses(b, WEFT_ERR_ARGUMENT, "2n + n^2 rows with two scales");
    restore(b, exec);
    EACH_ARG(b, a)
    {
        for (int d = 0; d < a->info->ndim; d++)
            if (a->info->dim[d] == WEFT_DIM_GATES) a->view->shape[d] = 4;
    }
    refuses(b, WEFT_ERR_ARGUMENT, NULL, "2n rows with three scales");
    query_refuses(b, WEFT_ERR_ARGUMENT, "2n rows with three scales");
    number_of_scales(b, 2);
    for (int i = 0; i < p->num_args; i++) { /* each n x n tensor of the site alone */
        arg *a = &p->arg[i];
        const bool merge = strstr(p->op->name, "boundary") && !strstr(a->name, "res_out");
        if (!shape_is_mix(a->info) || merge) continue;
        const weft_dtype own = a->view->dtype;
        EACH_ARG(b, other)
        {
            if (shape_is_mix(other->info)) other->view->dtype = WEFT_NONE;
        }
        query_refuses(b, WEFT_OK, "two scales");
        a->view->dtype = own;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "a residual mix with two scales");
        query_refuses(b, WEFT_ERR_ARGUMENT, "a residual mix with two scales");
    }
    restore(b, exec);
    static const int64_t wrong[] = {0, 1, 4, -1, INT64_MAX};
    for (int k = 0; k < 5; k++) {
        number_of_scales(b, wrong[k]);
        refuses(b, WEFT_ERR_ARGUMENT, "alpha", "a number of scales that no form has");
        restore(b, exec);
    }
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

TEST(exec_fields, exec_one)
TEST(struct_sizes, struct_size_one)
TEST(scalars, scalars_one)
TEST(replay_layers, replay_one)
TEST(forms, forms_one)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exec_fields),   cmocka_unit_test(struct_sizes), cmocka_unit_test(scalars),
        cmocka_unit_test(replay_layers), cmocka_unit_test(forms),        cmocka_unit_test(f64_on_cpu),
    };
    return suite_run("validate_call", tests);
}
