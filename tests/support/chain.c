/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused operators spelt out. */
#include "support/chain.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

/* ---- scratch tensors ----------------------------------------------------------------------------------------- */

typedef struct chain {
    weft_exec exec;
    const spec *s;
    int64_t tokens, n, channels, rows;
    problem *own; /* the fused call, where the chain goes on from its h and ms; else NULL */
    void *memory[64];
    int used;
} chain;

static weft_tensor temp(chain *c, weft_dtype dtype, int ndim, int64_t d0, int64_t d1, int64_t d2)
{
    int64_t shape[3] = {d0, ndim > 1 ? d1 : 1, ndim > 2 ? d2 : 1};
    void *p = calloc((size_t)(shape[0] * shape[1] * shape[2]) + 1, 8);
    if (!p || c->used == 64) fail_msg("out of memory");
    c->memory[c->used++] = p;
    return weft_dense(p, dtype, ndim, shape);
}

static void chain_free(chain *c)
{
    while (c->used) free(c->memory[--c->used]);
}

static bool has(const weft_tensor *t)
{
    return t->dtype != WEFT_NONE;
}

/* The tensor itself, or a scratch one in its place where it is absent. */
static weft_tensor or_temp(chain *c, const weft_tensor *t, weft_dtype dtype, int ndim, int64_t d0, int64_t d1,
                           int64_t d2)
{
    return has(t) ? *t : temp(c, dtype, ndim, d0, d1, d2);
}

static char *element(const weft_tensor *t, int64_t index)
{
    return (char *)t->data + tensor_offset(t, index) * (int64_t)weft_dtype_size(t->dtype);
}

static weft_dtype full(const chain *c)
{
    return c->s->act == WEFT_F64 ? WEFT_F64 : WEFT_F32;
}

/* An fp32 copy (f64 stays f64): where the sum of several gradients is formed. */
static weft_tensor wide_copy(chain *c, const weft_tensor *t)
{
    weft_dtype dtype = t->dtype == WEFT_F64 ? WEFT_F64 : WEFT_F32;
    weft_tensor copy = temp(c, dtype, t->ndim, t->shape[0], t->shape[1], t->shape[2]);
    for (int64_t i = 0; i < tensor_count(t); i++)
        value_store(element(&copy, i), dtype, value_load(element(t, i), t->dtype));
    return copy;
}

/* Stores an fp32 gradient where the caller wants it. */
static void deliver(const weft_grad *to, const weft_tensor *from)
{
    if (!has(&to->to)) return;
    for (int64_t i = 0; i < tensor_count(from); i++) {
        double value = value_load(element(from, i), from->dtype);
        if (to->add) {
            double sum = value_load(element(&to->to, i), to->to.dtype) + value;
            value = from->dtype == WEFT_F64 ? sum : (double)(float)sum;
        }
        value_store(element(&to->to, i), to->to.dtype, value);
    }
}

/* The sum of several gradients begins with what is there, where they are to be added to it. */
static weft_tensor open_sum(chain *c, const weft_grad *to)
{
    return has(&to->to) && to->add ? wide_copy(c, &to->to) : temp(c, full(c), 3, c->tokens, c->n, c->channels);
}

static void close_sum(const weft_grad *to, const weft_tensor *sum)
{
    weft_grad written = {to->to, 0};
    deliver(&written, sum);
}

/* ---- projection ---------------------------------------------------------------------------------------------- */

static bool left_both(problem *own)
{
    return problem_arg(own, "h")->guard.block && problem_arg(own, "ms")->guard.block;
}

/* The fused kernel adds the products of a token in another order than the operator does. What follows must agree given equal
 * h and ms, so there the chain takes those of the fused call; bounds tell whether they are right. */
static void project(chain *c, const weft_tensor *x, const weft_tensor *phi, const weft_tensor *norm_weight,
                    const weft_tensor *h, const weft_tensor *ms)
{
    const weft_tensor *to[] = {h, ms};
    run_plain("mhc_project_fwd", c->exec,
              WEFT_ARGS(weft_mhc_project_fwd_args, .x = *x, .phi = *phi, .norm_weight = *norm_weight, .h = *h,
                        .ms = *ms));
    if (!c->own || !left_both(c->own)) return;
    for (int i = 0; i < 2; i++) {
        const weft_tensor *from = problem_arg(c->own, i ? "ms" : "h")->view;
        for (int64_t k = 0; k < tensor_count(from); k++)
            memcpy(element(to[i], k), element(from, k), weft_dtype_size(from->dtype));
    }
}

/* ---- pre, also as the second half of boundary ---------------------------------------------------------------- */

static void pre_fwd(chain *c, const weft_mhc_pre_fwd_args *a)
{
    int64_t tokens = c->tokens, n = c->n;
    weft_tensor h = or_temp(c, &a->h, full(c), 2, tokens, c->rows, 1);
    weft_tensor ms = or_temp(c, &a->ms, full(c), 1, tokens, 1, 1);
    weft_tensor pre = or_temp(c, &a->pre, full(c), 2, tokens, n, 1);
    weft_tensor u = or_temp(c, &a->u, c->s->act, 2, tokens, c->channels, 1);
    project(c, &a->x, &a->phi, &a->norm_weight, &h, &ms);
    run_plain("mhc_coef_fwd", c->exec,
              WEFT_ARGS(weft_mhc_coef_fwd_args, .numerics = a->numerics, .h = h, .ms = ms, .alpha = a->alpha,
                        .beta = a->beta, .pre = pre, .post = a->post, .res = a->res));
    run_plain("mhc_aggregate_fwd", c->exec,
              WEFT_ARGS(weft_mhc_aggregate_fwd_args, .x = a->x, .pre = has(&a->pre_in) ? a->pre_in : pre, .u = u));
    if (has(&a->v))
        run_plain("rmsnorm_fwd", c->exec,
                  WEFT_ARGS(weft_rmsnorm_fwd_args, .eps = a->sub_eps, .u = u, .weight = a->sub_weight, .v = a->v));
}

/* Adds the site's part to d_x, which holds what came before (or nothing, where first is set). */
static void pre_bwd_into(chain *c, const weft_mhc_pre_bwd_args *a, weft_tensor d_x, bool first)
{
    int64_t tokens = c->tokens, n = c->n;
    weft_tensor mix = a->pre_in, d_pre, du = a->d_u, absent = {0};
    weft_tensor d_h = temp(c, full(c), 2, tokens, c->rows, 1), d_ms = temp(c, full(c), 1, tokens, 1, 1);
    if (!has(&mix)) {
        mix = temp(c, full(c), 2, tokens, n, 1);
        run_plain("mhc_coef_fwd", c->exec,
                  WEFT_ARGS(weft_mhc_coef_fwd_args, .numerics = a->numerics, .h = a->h, .ms = a->ms,
                            .alpha = a->alpha, .beta = a->beta, .pre = mix));
    }
    if (has(&a->d_v)) {
        weft_tensor u = temp(c, c->s->act, 2, tokens, c->channels, 1);
        du = has(&a->d_u) ? wide_copy(c, &a->d_u) : temp(c, full(c), 2, tokens, c->channels, 1);
        run_plain("mhc_aggregate_fwd", c->exec,
                  WEFT_ARGS(weft_mhc_aggregate_fwd_args, .x = a->x, .pre = mix, .u = u));
        run_plain("rmsnorm_bwd", c->exec,
                  WEFT_ARGS(weft_rmsnorm_bwd_args, .eps = a->sub_eps, .u = u, .weight = a->sub_weight,
                            .d_v = a->d_v, .d_u = {du, has(&a->d_u)}, .d_weight = a->d_sub_weight));
    }
    d_pre = has(&a->d_pre) ? wide_copy(c, &a->d_pre) : absent;
    if (has(&du)) {
        weft_grad to = a->d_pre_in;
        if (!has(&a->pre_in)) {
            to = (weft_grad){has(&d_pre) ? d_pre : temp(c, full(c), 2, tokens, n, 1), has(&d_pre)};
            d_pre = to.to;
        }
        run_plain("mhc_aggregate_bwd", c->exec,
                  WEFT_ARGS(weft_mhc_aggregate_bwd_args, .x = a->x, .pre = mix, .d_u = du, .d_x = {d_x, !first},
                            .d_pre = to));
        first = false;
    } else if (has(&a->d_pre_in.to)) {
        /* nothing flows into u: the gradient is zero */
        weft_tensor zero = temp(c, full(c), 2, tokens, n, 1);
        deliver(&a->d_pre_in, &zero);
    }
    run_plain("mhc_coef_bwd", c->exec,
              WEFT_ARGS(weft_mhc_coef_bwd_args, .numerics = a->numerics, .h = a->h, .ms = a->ms, .alpha = a->alpha,
                        .beta = a->beta, .d_pre = d_pre, .d_post = a->d_post, .d_res = a->d_res, .d_h = {d_h, 0},
                        .d_ms = {d_ms, 0}, .d_alpha = a->d_alpha, .d_beta = a->d_beta));
    run_plain("mhc_project_bwd", c->exec,
              WEFT_ARGS(weft_mhc_project_bwd_args, .x = a->x, .phi = a->phi, .norm_weight = a->norm_weight,
                        .d_h = d_h, .d_ms = d_ms, .d_x = {d_x, !first}, .d_phi = a->d_phi,
                        .d_norm_weight = a->d_norm_weight));
}

static void pre_bwd(chain *c, const weft_mhc_pre_bwd_args *a)
{
    weft_tensor d_x = open_sum(c, &a->d_x);
    pre_bwd_into(c, a, d_x, !a->d_x.add);
    close_sum(&a->d_x, &d_x);
}

/* ---- head: the gates of the first group only, with the others held at zero ----------------------------------- */

typedef struct head_gates {
    weft_mhc_numerics numerics;
    weft_tensor h, alpha, beta; /* widened to 2n + n^2 rows */
} head_gates;

static head_gates widen(chain *c, double rms_eps, weft_eps_kind kind, double pre_eps, const weft_tensor *h,
                        const weft_tensor *alpha, const weft_tensor *beta)
{
    int64_t gates = 2 * c->n + c->n * c->n;
    head_gates g = {{.rms_eps = rms_eps,
                     .rms_eps_kind = kind,
                     .pre_eps = pre_eps,
                     .post_mult = 1,
                     .sinkhorn = WEFT_SINKHORN_LOG,
                     .sinkhorn_iters = 1,
                     .apply = WEFT_APPLY_IN_OUT},
                    temp(c, full(c), 2, c->tokens, gates, 1),
                    temp(c, full(c), 1, 3, 1, 1),
                    temp(c, full(c), 1, gates, 1, 1)};
    for (int64_t t = 0; t < c->tokens; t++)
        for (int64_t j = 0; j < c->n; j++)
            value_store(element(&g.h, t * gates + j), full(c), value_load(element(h, t * c->n + j), h->dtype));
    value_store(g.alpha.data, full(c), value_load(alpha->data, alpha->dtype));
    for (int64_t j = 0; j < c->n; j++)
        value_store(element(&g.beta, j), full(c), value_load(element(beta, j), beta->dtype));
    return g;
}

static weft_tensor head_mix(chain *c, const head_gates *g, const weft_tensor *ms)
{
    weft_tensor pre = temp(c, full(c), 2, c->tokens, c->n, 1);
    run_plain("mhc_scale_fwd", c->exec,
              WEFT_ARGS(weft_mhc_scale_fwd_args, .numerics = g->numerics, .h = g->h, .ms = *ms, .alpha = g->alpha,
                        .beta = g->beta, .pre = pre, .post = temp(c, full(c), 2, c->tokens, c->n, 1),
                        .logits = temp(c, full(c), 3, c->tokens, c->n, c->n)));
    return pre;
}

static void head_fwd(chain *c, const weft_mhc_head_fwd_args *a)
{
    weft_tensor h = or_temp(c, &a->h, full(c), 2, c->tokens, c->n, 1);
    weft_tensor ms = or_temp(c, &a->ms, full(c), 1, c->tokens, 1, 1);
    project(c, &a->x, &a->phi, &a->norm_weight, &h, &ms);
    head_gates g = widen(c, a->rms_eps, a->rms_eps_kind, a->pre_eps, &h, &a->alpha, &a->beta);
    run_plain("mhc_aggregate_fwd", c->exec,
              WEFT_ARGS(weft_mhc_aggregate_fwd_args, .x = a->x, .pre = head_mix(c, &g, &ms), .u = a->u));
}

static void head_bwd(chain *c, const weft_mhc_head_bwd_args *a)
{
    int64_t tokens = c->tokens, n = c->n, gates = 2 * n + n * n;
    head_gates g = widen(c, a->rms_eps, a->rms_eps_kind, a->pre_eps, &a->h, &a->alpha, &a->beta);
    weft_tensor mix = head_mix(c, &g, &a->ms), d_mix = temp(c, full(c), 2, tokens, n, 1);
    weft_tensor d_x = open_sum(c, &a->d_x), d_ms = temp(c, full(c), 1, tokens, 1, 1);
    weft_tensor d_h = temp(c, full(c), 2, tokens, gates, 1), d_alpha = temp(c, full(c), 1, 3, 1, 1);
    weft_tensor d_beta = temp(c, full(c), 1, gates, 1, 1);
    run_plain("mhc_aggregate_bwd", c->exec,
              WEFT_ARGS(weft_mhc_aggregate_bwd_args, .x = a->x, .pre = mix, .d_u = a->d_u, .d_x = {d_x, a->d_x.add},
                        .d_pre = {d_mix, 0}));
    run_plain("mhc_scale_bwd", c->exec,
              WEFT_ARGS(weft_mhc_scale_bwd_args, .numerics = g.numerics, .h = g.h, .ms = a->ms, .alpha = g.alpha,
                        .beta = g.beta, .d_pre = d_mix, .d_h = {d_h, 0}, .d_ms = {d_ms, 0}, .d_alpha = {d_alpha, 0},
                        .d_beta = {d_beta, 0}));
    d_h.shape[1] = n; /* a view of the first n columns */
    d_alpha.shape[0] = 1;
    d_beta.shape[0] = n;
    run_plain("mhc_project_bwd", c->exec,
              WEFT_ARGS(weft_mhc_project_bwd_args, .x = a->x, .phi = a->phi, .norm_weight = a->norm_weight,
                        .d_h = d_h, .d_ms = d_ms, .d_x = {d_x, 1}, .d_phi = a->d_phi,
                        .d_norm_weight = a->d_norm_weight));
    close_sum(&a->d_x, &d_x);
    deliver(&a->d_alpha, &d_alpha);
    deliver(&a->d_beta, &d_beta);
}

/* ---- boundary ------------------------------------------------------------------------------------------------ */

static void boundary_fwd(chain *c, const weft_mhc_boundary_fwd_args *a)
{
    run_plain("mhc_post_fwd", c->exec,
              WEFT_ARGS(weft_mhc_post_fwd_args, .numerics = a->numerics, .dropout = a->dropout, .x = a->x,
                        .f = a->f, .bias = a->bias, .post = a->post, .res = a->res, .y = a->y));
    pre_fwd(c, WEFT_ARGS(weft_mhc_pre_fwd_args, .numerics = a->numerics, .sub_eps = a->sub_eps, .x = a->y,
                         .phi = a->phi, .norm_weight = a->norm_weight, .alpha = a->alpha, .beta = a->beta,
                         .pre_in = a->pre_in, .sub_weight = a->sub_weight, .h = a->h, .ms = a->ms,
                         .pre = a->pre_out, .post = a->post_out, .res = a->res_out, .u = a->u, .v = a->v));
}

static void boundary_bwd(chain *c, const weft_mhc_boundary_bwd_args *a)
{
    weft_tensor y = a->y;
    bool upstream = has(&a->d_y);
    weft_tensor d_y = upstream ? wide_copy(c, &a->d_y) : temp(c, full(c), 3, c->tokens, c->n, c->channels);
    if (!has(&y)) {
        y = temp(c, c->s->act, 3, c->tokens, c->n, c->channels);
        run_plain("mhc_post_fwd", c->exec,
                  WEFT_ARGS(weft_mhc_post_fwd_args, .numerics = a->numerics, .dropout = a->dropout, .x = a->x,
                            .f = a->f, .bias = a->bias, .post = a->post, .res = a->res, .y = y));
    }
    pre_bwd_into(c,
                 WEFT_ARGS(weft_mhc_pre_bwd_args, .numerics = a->numerics, .sub_eps = a->sub_eps, .x = y,
                           .phi = a->phi, .norm_weight = a->norm_weight, .pre_in = a->pre_in,
                           .sub_weight = a->sub_weight, .alpha = a->alpha, .beta = a->beta, .h = a->h, .ms = a->ms,
                           .d_u = a->d_u, .d_v = a->d_v, .d_pre = a->d_pre_out, .d_post = a->d_post_out,
                           .d_res = a->d_res_out, .d_phi = a->d_phi, .d_norm_weight = a->d_norm_weight,
                           .d_alpha = a->d_alpha, .d_beta = a->d_beta, .d_pre_in = a->d_pre_in,
                           .d_sub_weight = a->d_sub_weight),
                 d_y, !upstream);
    run_plain("mhc_post_bwd", c->exec,
              WEFT_ARGS(weft_mhc_post_bwd_args, .numerics = a->numerics, .dropout = a->dropout, .x = a->x,
                        .f = a->f, .bias = a->bias, .post = a->post, .res = a->res, .d_y = d_y, .d_x = a->d_x,
                        .d_f = a->d_f, .d_bias = a->d_bias, .d_post = a->d_post, .d_res = a->d_res));
}

/* ---- replay -------------------------------------------------------------------------------------------------- */

static void replay_fwd(chain *c, const weft_mhc_replay_fwd_args *a)
{
    weft_tensor x = a->x;
    for (int32_t l = 0; l < a->num_layers; l++) {
        const weft_mhc_replay_layer *y = &a->layers[l];
        if (has(&y->u) || has(&y->v)) {
            weft_tensor u = or_temp(c, &y->u, c->s->act, 2, c->tokens, c->channels, 1);
            run_plain("mhc_aggregate_fwd", c->exec,
                      WEFT_ARGS(weft_mhc_aggregate_fwd_args, .x = x, .pre = y->pre, .u = u));
            if (has(&y->v))
                run_plain("rmsnorm_fwd", c->exec,
                          WEFT_ARGS(weft_rmsnorm_fwd_args, .eps = y->sub_eps, .u = u, .weight = y->sub_weight,
                                    .v = y->v));
        }
        if (!has(&y->f)) break;
        weft_tensor next = or_temp(c, &y->y, c->s->act, 3, c->tokens, c->n, c->channels);
        run_plain("mhc_post_fwd", c->exec,
                  WEFT_ARGS(weft_mhc_post_fwd_args, .numerics = a->numerics, .dropout = y->dropout, .x = x,
                            .f = y->f, .bias = y->bias, .post = y->post, .res = y->res, .y = next));
        x = next;
    }
}

/* ---- comparison ---------------------------------------------------------------------------------------------- */

/* The functions above take their operator's args struct; these take any, so that they fit one table. */
#define RUN(name)                                                                                                  \
    static void run_##name(chain *c, const void *args)                                                             \
    {                                                                                                              \
        name(c, args);                                                                                             \
    }
RUN(head_fwd)
RUN(head_bwd)
RUN(pre_fwd)
RUN(pre_bwd)
RUN(boundary_fwd)
RUN(boundary_bwd)
RUN(replay_fwd)

static const struct {
    const char *op;
    void (*run)(chain *c, const void *args);
} chains[] = {{"mhc_head_fwd", run_head_fwd},         {"mhc_head_bwd", run_head_bwd},
              {"mhc_pre_fwd", run_pre_fwd},           {"mhc_pre_bwd", run_pre_bwd},
              {"mhc_boundary_fwd", run_boundary_fwd}, {"mhc_boundary_bwd", run_boundary_bwd},
              {"mhc_replay_fwd", run_replay_fwd},     {NULL, NULL}};

bool chain_knows(const char *op)
{
    for (int i = 0; chains[i].op; i++)
        if (strcmp(chains[i].op, op) == 0) return true;
    return false;
}

/* Bits of the fused call that the chain's need not have: all that hangs on sums in another order. */
static void forgive(problem *copy, problem *own)
{
    static const struct {
        const char *name;
        bool follows_pre; /* and from nothing else that is summed in another order */
    } names[] = {{"h", false},   {"ms", false},      {"pre", false},      {"post", false},
                 {"res", false}, {"pre_out", false}, {"post_out", false}, {"res_out", false},
                 {"u", true},    {"v", true},        {NULL, false}};
    const arg *given = problem_arg(own, "pre_in");
    const bool shifted = given && given->guard.block;
    if (left_both(own)) return; /* the chain went on from these */
    for (int i = 0; names[i].name; i++) {
        arg *to = problem_arg(copy, names[i].name), *from = problem_arg(own, names[i].name);
        if (!to || !to->guard.block || !arg_is_output(to) || (shifted && names[i].follows_pre)) continue;
        double *values = arg_values(from);
        arg_fill(to, values);
        free(values);
    }
}

bool path_is_fused(const char *path)
{
    return strncmp(path, "fused: ", 7) == 0;
}

bool chain_sums_apart(const problem *p, weft_exec exec)
{
    const char *path = NULL;
    if (exec.backend != WEFT_BACKEND_CUDA) return false;
    if (weft_op_path(p->op, &exec, p->args, &path) != WEFT_OK) fail_msg("%s", weft_last_error());
    return path_is_fused(path);
}

void chain_compare(problem *p, weft_exec exec)
{
    const spec *s = &p->spec;
    problem_must_run(p, exec);
    pack fused = problem_pack(p);
    problem *copy = problem_make(s);
    /* the same call, so the same arguments: only what a test changed after making p has to follow */
    for (int i = 0; i < p->num_args; i++) {
        arg *to = &copy->arg[i];
        const arg *from = &p->arg[i];
        if (!from->guard.block && to->guard.block) arg_drop(to);
        if (!from->guard.block || arg_is_output(from)) continue;
        double *values = arg_values(from);
        arg_fill(to, values);
        free(values);
    }
    const bool apart = chain_sums_apart(p, exec);
    chain c = {.exec = exec,
               .own = apart ? p : NULL,
               .s = s,
               .tokens = s->tokens,
               .n = s->streams,
               .channels = s->channels,
               .rows = shape_gates(s->streams, s->independent ? 2 : 3)};
    for (int i = 0; chains[i].op; i++)
        if (strcmp(chains[i].op, s->op) == 0) chains[i].run(&c, copy->args);
    if (apart) forgive(copy, p);
    pack chained = problem_pack(copy);
    pack_expect_same(p, &fused, &chained, exec_name(exec));
    pack_free(&fused);
    pack_free(&chained);
    chain_free(&c);
    problem_free(copy);
}
