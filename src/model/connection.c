/* SPDX-License-Identifier: Apache-2.0
 *
 * The hyper-connection of a site, and the exit of the stack. A kind of connection is a row of `kinds`: how coefficients and
 * the sub-layer's input come from the streams, and how gradients go back. The merge and the replay are the same for all. */
#include "model/model.h"

typedef weft_status pass(run *r, int32_t index, const weft_recompute_site *at);

static param connection_param(int32_t index, param of_mixer)
{
    return (param)(of_mixer + (index % SITES ? MLP_PHI - MIXER_PHI : 0));
}

static param norm_param(int32_t index)
{
    return index % SITES ? MLP_NORM : MIXER_NORM;
}

static weft_tensor connection_tensor(const run *r, int32_t index, param of_mixer)
{
    return param_tensor(r, connection_param(index, of_mixer), index / SITES);
}

static weft_grad connection_grad(const run *r, int32_t index, param of_mixer)
{
    return param_grad(r, connection_param(index, of_mixer), index / SITES);
}

/* A matrix [rows, a * b] seen as [rows, a, b]. */
static weft_tensor split(weft_tensor t, int64_t a)
{
    return t.dtype == WEFT_NONE ? t : weft_dense3(t.data, t.dtype, t.shape[0], a, t.shape[1] / a);
}

static weft_grad split_grad(weft_grad g, int64_t a)
{
    g.to = split(g.to, a);
    return g;
}

/* Coefficients and what they come from are full. */
static weft_dtype full_of(const run *r)
{
    return weft_nn_full(r->config->dtype);
}

static weft_tensor per_token(const run *r, void *data, int64_t count)
{
    return weft_dense2(data, full_of(r), r->tokens, count);
}

/* Absent where there is no residual mix. */
static weft_tensor mix_of(const run *r, void *data)
{
    if (is_independent(r->config)) return (weft_tensor){0};
    return weft_dense3(data, full_of(r), r->tokens, r->config->streams, r->config->streams);
}

static weft_tensor streams_of(const run *r, void *data)
{
    return weft_dense3(data, r->config->dtype, r->tokens, r->config->streams, r->config->channels);
}

/* The same values for every token. */
static weft_tensor broadcast(weft_tensor t)
{
    t.stride[0] = 0;
    return t;
}

weft_mhc_numerics connection_numerics(const weft_model_config *c)
{
    weft_mhc_numerics numerics = c->numerics;
    if (c->residual == WEFT_RESIDUAL_HC || c->residual == WEFT_RESIDUAL_PLAIN) numerics.apply = WEFT_APPLY_IN_OUT;
    return numerics;
}

/* ---- plain: v = norm(x) ------------------------------------------------------------------------------------------------- */

static weft_status plain_forward(run *r, int32_t index, const weft_recompute_site *at)
{
    RUN_OP(r, rmsnorm_fwd, .eps = r->config->norm_eps, .u = rows_of(r, at->x.data), .v = at->v,
           .weight = param_tensor(r, norm_param(index), index / SITES));
    return WEFT_OK;
}

static weft_status plain_backward(run *r, int32_t index, const weft_recompute_site *at)
{
    RUN_OP(r, rmsnorm_bwd, .eps = r->config->norm_eps, .u = rows_of(r, at->x.data),
           .d_v = rows_of(r, r->scratch.row_b), .weight = param_tensor(r, norm_param(index), index / SITES),
           .d_u = {rows_of(r, r->scratch.d_x), 1}, .d_weight = param_grad(r, norm_param(index), index / SITES));
    return WEFT_OK;
}

/* ---- hc: each stream predicts its own coefficients [T5] ------------------------------------------------------------------ */

static weft_tensor hc_streams(const run *r, void *data)
{
    return weft_dense3(data, r->config->dtype, r->tokens * r->config->streams, 1, r->config->channels);
}

static weft_status hc_forward(run *r, int32_t index, const weft_recompute_site *at)
{
    const weft_model_config *c = r->config;
    int64_t n = c->streams;
    site_memory s = site_at(r, index);
    weft_tensor u = rows_of(r, r->scratch.row_a);
    RUN_OP(r, mhc_project_fwd, .x = hc_streams(r, at->x.data),
           .phi = split(connection_tensor(r, index, MIXER_PHI), 1),
           .h = weft_dense2(s.h, full_of(r), r->tokens * n, n + 2),
           .ms = weft_dense1(s.ms, full_of(r), r->tokens * n));
    RUN_NN(r, hc_gates_fwd,
           &(weft_hc_gates){.tokens = r->tokens,
                            .streams = n,
                            .eps = c->numerics.rms_eps,
                            .h = s.h,
                            .ms = s.ms,
                            .alpha = connection_tensor(r, index, MIXER_ALPHA).data,
                            .beta = connection_tensor(r, index, MIXER_BETA).data,
                            .pre = s.pre,
                            .post = s.post,
                            .res = s.res});
    RUN_OP(r, mhc_aggregate_fwd, .x = at->x, .pre = per_token(r, s.pre, n), .u = u);
    RUN_OP(r, rmsnorm_fwd, .eps = c->norm_eps, .u = u, .v = at->v,
           .weight = param_tensor(r, norm_param(index), index / SITES));
    return WEFT_OK;
}

static weft_status hc_backward(run *r, int32_t index, const weft_recompute_site *at)
{
    const weft_model_config *c = r->config;
    int64_t n = c->streams;
    site_memory s = site_at(r, index);
    scratch *w = &r->scratch;
    weft_tensor u = rows_of(r, w->row_a), pre = per_token(r, s.pre, n), d_u = rows_of(r, w->row_c);
    RUN_OP(r, mhc_aggregate_fwd, .x = at->x, .pre = pre, .u = u);
    RUN_OP(r, rmsnorm_bwd, .eps = c->norm_eps, .u = u, .d_v = rows_of(r, w->row_b), .d_u = {d_u, 0},
           .weight = param_tensor(r, norm_param(index), index / SITES),
           .d_weight = param_grad(r, norm_param(index), index / SITES));
    RUN_OP(r, mhc_aggregate_bwd, .x = at->x, .pre = pre, .d_u = d_u, .d_x = {streams_of(r, w->d_x), 1},
           .d_pre = {per_token(r, w->d_pre[0], n), 0});
    RUN_NN(r, hc_gates_bwd,
           &(weft_hc_gates){.tokens = r->tokens,
                            .streams = n,
                            .eps = c->numerics.rms_eps,
                            .h = s.h,
                            .ms = s.ms,
                            .alpha = connection_tensor(r, index, MIXER_ALPHA).data,
                            .beta = connection_tensor(r, index, MIXER_BETA).data,
                            .d_pre = w->d_pre[0],
                            .d_post = w->d_post[0],
                            .d_res = w->d_res[0],
                            .d_h = w->d_h,
                            .d_ms = w->d_ms,
                            .d_alpha = connection_grad(r, index, MIXER_ALPHA).to.data,
                            .d_beta = connection_grad(r, index, MIXER_BETA).to.data});
    RUN_OP(r, mhc_project_bwd, .x = hc_streams(r, at->x.data),
           .phi = split(connection_tensor(r, index, MIXER_PHI), 1),
           .d_h = weft_dense2(w->d_h, full_of(r), r->tokens * n, n + 2),
           .d_ms = weft_dense1(w->d_ms, full_of(r), r->tokens * n), .d_x = {hc_streams(r, w->d_x), 1},
           .d_phi = split_grad(connection_grad(r, index, MIXER_PHI), 1));
    return WEFT_OK;
}

/* ---- mhc, classic and shifted, and independent ---------------------------------------------------------------------------- */

static bool shifted(const run *r)
{
    return is_shifted(r->config);
}

/* The coefficients that a site is fed by: its own, those of the site before it, in this stage or the one before, or stream 0. */
static weft_tensor pre_of(const run *r, int32_t index)
{
    int64_t n = r->config->streams;
    if (!shifted(r)) return per_token(r, site_at(r, index).pre, n);
    if (index > 0) return per_token(r, site_at(r, index - 1).pre, n);
    if (hops_in(r->config)) return per_token(r, r->whole.mix_in, n);
    return broadcast(per_token(r, r->whole.one_hot, n));
}

/* The gradient of what a site predicts for the next one, and of what it is fed by. */
static weft_tensor d_pre_out(const run *r, int32_t index)
{
    if (!shifted(r)) return (weft_tensor){0};
    return per_token(r, r->scratch.d_pre[index % 2], r->config->streams);
}

static weft_tensor d_pre_in(const run *r, int32_t index)
{
    if (!shifted(r)) return (weft_tensor){0};
    if (index > 0) return per_token(r, r->scratch.d_pre[(index - 1) % 2], r->config->streams);
    if (hops_in(r->config)) return per_token(r, r->args->d_mix_in, r->config->streams);
    return (weft_tensor){0};
}

static weft_tensor d_post_of(const run *r, int32_t index)
{
    return per_token(r, r->scratch.d_post[index % 2], r->config->streams);
}

static weft_tensor d_res_of(const run *r, int32_t index)
{
    return mix_of(r, r->scratch.d_res[index % 2]);
}

static weft_status mhc_forward(run *r, int32_t index, const weft_recompute_site *at)
{
    const weft_model_config *c = r->config;
    int64_t n = c->streams;
    site_memory s = site_at(r, index);
    RUN_OP(r, mhc_pre_fwd, .numerics = c->numerics, .sub_eps = c->norm_eps, .x = at->x,
           .phi = split(connection_tensor(r, index, MIXER_PHI), n),
           .alpha = connection_tensor(r, index, MIXER_ALPHA), .beta = connection_tensor(r, index, MIXER_BETA),
           .pre_in = shifted(r) ? pre_of(r, index) : (weft_tensor){0},
           .sub_weight = param_tensor(r, norm_param(index), index / SITES), .h = per_token(r, s.h, gates_of(c)),
           .ms = weft_dense1(s.ms, full_of(r), r->tokens), .pre = per_token(r, s.pre, n),
           .post = per_token(r, s.post, n), .res = mix_of(r, s.res), .v = at->v);
    return WEFT_OK;
}

static weft_status mhc_backward(run *r, int32_t index, const weft_recompute_site *at)
{
    const weft_model_config *c = r->config;
    int64_t n = c->streams;
    site_memory s = site_at(r, index);
    scratch *w = &r->scratch;
    RUN_OP(r, mhc_pre_bwd, .numerics = c->numerics, .sub_eps = c->norm_eps, .x = at->x,
           .phi = split(connection_tensor(r, index, MIXER_PHI), n),
           .alpha = connection_tensor(r, index, MIXER_ALPHA), .beta = connection_tensor(r, index, MIXER_BETA),
           .pre_in = shifted(r) ? pre_of(r, index) : (weft_tensor){0},
           .sub_weight = param_tensor(r, norm_param(index), index / SITES), .h = per_token(r, s.h, gates_of(c)),
           .ms = weft_dense1(s.ms, full_of(r), r->tokens), .d_v = rows_of(r, w->row_b),
           .d_pre = d_pre_out(r, index), .d_post = d_post_of(r, index), .d_res = d_res_of(r, index),
           .d_x = {streams_of(r, w->d_x), 1}, .d_phi = split_grad(connection_grad(r, index, MIXER_PHI), n),
           .d_alpha = connection_grad(r, index, MIXER_ALPHA), .d_beta = connection_grad(r, index, MIXER_BETA),
           .d_pre_in = {d_pre_in(r, index), 0}, .d_sub_weight = param_grad(r, norm_param(index), index / SITES));
    return WEFT_OK;
}

/* ---- all kinds ------------------------------------------------------------------------------------------------------------- */

static const struct {
    pass *forward, *backward;
} kinds[WEFT_RESIDUAL_COUNT] = {
    [WEFT_RESIDUAL_PLAIN] = {plain_forward, plain_backward},
    [WEFT_RESIDUAL_HC] = {hc_forward, hc_backward},
    [WEFT_RESIDUAL_MHC] = {mhc_forward, mhc_backward},
    [WEFT_RESIDUAL_MHC_SINGLE_PASS] = {mhc_forward, mhc_backward},
    [WEFT_RESIDUAL_INDEPENDENT] = {mhc_forward, mhc_backward},
};

weft_status connection_forward(run *r, int32_t index, const weft_recompute_site *at)
{
    return kinds[r->config->residual].forward(r, index, at);
}

weft_status connection_backward(run *r, int32_t index, const weft_recompute_site *at)
{
    return kinds[r->config->residual].backward(r, index, at);
}

static weft_dropout dropout_of(const run *r, int32_t index)
{
    if (!r->args->training) return (weft_dropout){0};
    return (weft_dropout){.p = r->config->dropout,
                          .seed = r->config->dropout_seed,
                          .site = (uint64_t)(index + SITES * r->config->first_layer),
                          .step = r->args->step,
                          .token_base = r->args->token_base};
}

static param bias_param(int32_t index)
{
    return index % SITES ? DOWN_BIAS : OUT_BIAS;
}

static weft_tensor post_of(const run *r, int32_t index)
{
    if (r->config->residual == WEFT_RESIDUAL_PLAIN) return broadcast(per_token(r, r->whole.ones, 1));
    return per_token(r, site_at(r, index).post, r->config->streams);
}

static weft_tensor res_of(const run *r, int32_t index)
{
    if (r->config->residual == WEFT_RESIDUAL_PLAIN) return broadcast(mix_of(r, r->whole.ones));
    return mix_of(r, site_at(r, index).res);
}

/* One stream and coefficients of 1: a backend may have something simpler than mhc_post for it. */
static bool plainly_added(const run *r)
{
    return r->config->residual == WEFT_RESIDUAL_PLAIN && r->nn.table->add_fwd;
}

static weft_add addition_of(const run *r, int32_t index)
{
    param bias = bias_param(index);
    return (weft_add){.tokens = r->tokens,
                      .channels = r->config->channels,
                      .dropout = dropout_of(r, index),
                      .f = site_at(r, index).f,
                      .biased = r->config->bias,
                      .bias = param_data(r, bias, index / SITES),
                      .d_bias = param_grad_data(r, bias, index / SITES)};
}

weft_status connection_merge(run *r, int32_t index, const weft_recompute_site *at)
{
    if (plainly_added(r)) {
        weft_add add = addition_of(r, index);
        add.x = at->x.data, add.y = at->y.data;
        RUN_NN(r, add_fwd, &add);
        return WEFT_OK;
    }
    RUN_OP(r, mhc_post_fwd, .numerics = connection_numerics(r->config), .dropout = dropout_of(r, index), .x = at->x,
           .f = rows_of(r, site_at(r, index).f), .bias = param_tensor(r, bias_param(index), index / SITES),
           .post = post_of(r, index), .res = res_of(r, index), .y = at->y);
    return WEFT_OK;
}

weft_status connection_merge_bwd(run *r, int32_t index, const weft_recompute_site *at)
{
    const weft_model_config *c = r->config;
    scratch *w = &r->scratch;
    bool plain = c->residual == WEFT_RESIDUAL_PLAIN;
    weft_tensor d_x = streams_of(r, w->d_x), none = {0};
    if (plainly_added(r)) { /* what reaches x is what reaches y */
        weft_add add = addition_of(r, index);
        add.d_y = w->d_x, add.d_f = w->row_a;
        RUN_NN(r, add_bwd, &add);
        return WEFT_OK;
    }
    RUN_OP(r, mhc_post_bwd, .numerics = connection_numerics(c), .dropout = dropout_of(r, index), .x = at->x,
           .f = rows_of(r, site_at(r, index).f), .bias = param_tensor(r, bias_param(index), index / SITES),
           .post = post_of(r, index), .res = res_of(r, index), .d_y = d_x, .d_x = {d_x, 0},
           .d_f = {rows_of(r, w->row_a), 0}, .d_bias = param_grad(r, bias_param(index), index / SITES),
           .d_post = {plain ? none : d_post_of(r, index), 0}, .d_res = {plain ? none : d_res_of(r, index), 0});
    return WEFT_OK;
}

/* ---- joined: a merge and the forward of the site behind it ---------------------------------------------------------------- */

/* What goes into the streams in front of a site: x and f of the site before it, or at the entry the input, which goes to each
 * stream as it is: post = 1, and streams of zeros that nothing is taken from, whatever the kind of connection. */
typedef struct merged {
    weft_tensor x, f, bias, post, res;
    weft_dropout dropout;
} merged;

static merged merged_by(const run *r, int32_t index, const weft_tensor *x)
{
    return (merged){*x,
                    rows_of(r, site_at(r, index).f),
                    param_tensor(r, bias_param(index), index / SITES),
                    post_of(r, index),
                    res_of(r, index),
                    dropout_of(r, index)};
}

static merged merged_by_entry(const run *r, const weft_tensor *rows)
{
    const int64_t n = r->config->streams;
    merged m = {.x = streams_of(r, r->whole.no_streams),
                .f = *rows,
                .post = broadcast(per_token(r, r->whole.ones, n)),
                .res = broadcast(weft_dense3(r->whole.no_mix, full_of(r), r->tokens, n, n))};
    m.x.stride[0] = n * NO_STREAMS_UNIT;
    m.x.stride[1] = NO_STREAMS_UNIT;
    return m;
}

/* m, and what stands in front of site `next`: y are its streams. */
static weft_status join_fwd(run *r, const merged *m, int32_t next, const weft_tensor *y, const weft_tensor *v)
{
    const weft_model_config *c = r->config;
    int64_t n = c->streams;
    site_memory s = site_at(r, next);
    RUN_OP(
        r, mhc_boundary_fwd, .numerics = c->numerics, .dropout = m->dropout, .sub_eps = c->norm_eps, .x = m->x,
        .f = m->f, .bias = m->bias, .post = m->post, .res = m->res,
        .phi = split(connection_tensor(r, next, MIXER_PHI), n), .alpha = connection_tensor(r, next, MIXER_ALPHA),
        .beta = connection_tensor(r, next, MIXER_BETA), .pre_in = shifted(r) ? pre_of(r, next) : (weft_tensor){0},
        .sub_weight = param_tensor(r, norm_param(next), next / SITES), .y = *y, .h = per_token(r, s.h, gates_of(c)),
        .ms = weft_dense1(s.ms, full_of(r), r->tokens), .pre_out = per_token(r, s.pre, n),
        .post_out = per_token(r, s.post, n), .res_out = mix_of(r, s.res), .v = *v);
    return WEFT_OK;
}

/* Where gradients of m go; absent: nowhere. */
typedef struct merged_grads {
    weft_grad d_x, d_f, d_bias, d_post, d_res;
} merged_grads;

static weft_status join_bwd(run *r, const merged *m, const merged_grads *d, int32_t next, const weft_tensor *y)
{
    const weft_model_config *c = r->config;
    int64_t n = c->streams;
    site_memory s = site_at(r, next);
    RUN_OP(r, mhc_boundary_bwd, .numerics = c->numerics, .dropout = m->dropout, .sub_eps = c->norm_eps, .x = m->x,
           .f = m->f, .bias = m->bias, .post = m->post, .res = m->res, .y = *y,
           .phi = split(connection_tensor(r, next, MIXER_PHI), n),
           .pre_in = shifted(r) ? pre_of(r, next) : (weft_tensor){0},
           .sub_weight = param_tensor(r, norm_param(next), next / SITES),
           .alpha = connection_tensor(r, next, MIXER_ALPHA), .beta = connection_tensor(r, next, MIXER_BETA),
           .h = per_token(r, s.h, gates_of(c)), .ms = weft_dense1(s.ms, full_of(r), r->tokens),
           .d_y = streams_of(r, r->scratch.d_x), .d_v = rows_of(r, r->scratch.row_b),
           .d_pre_out = d_pre_out(r, next), .d_post_out = d_post_of(r, next), .d_res_out = d_res_of(r, next),
           .d_x = d->d_x, .d_f = d->d_f, .d_bias = d->d_bias, .d_post = d->d_post, .d_res = d->d_res,
           .d_phi = split_grad(connection_grad(r, next, MIXER_PHI), n),
           .d_alpha = connection_grad(r, next, MIXER_ALPHA), .d_beta = connection_grad(r, next, MIXER_BETA),
           .d_pre_in = {d_pre_in(r, next), 0}, .d_sub_weight = param_grad(r, norm_param(next), next / SITES));
    return WEFT_OK;
}

weft_status connection_join(run *r, int32_t index, const weft_recompute_site *at, const weft_tensor *next_v)
{
    merged m = merged_by(r, index, &at->x);
    return join_fwd(r, &m, index + 1, &at->y, next_v);
}

weft_status connection_join_bwd(run *r, int32_t index, const weft_recompute_site *at)
{
    scratch *w = &r->scratch;
    merged m = merged_by(r, index, &at->x);
    merged_grads d = {{streams_of(r, w->d_y), 0},
                      {rows_of(r, w->row_a), 0},
                      param_grad(r, bias_param(index), index / SITES),
                      {d_post_of(r, index), 0},
                      {d_res_of(r, index), 0}};
    WEFT_TRY(join_bwd(r, &m, &d, index + 1, &at->y));
    void *d_x = w->d_y;
    w->d_y = w->d_x, w->d_x = d_x;
    return WEFT_OK;
}

weft_status connection_join_entry(run *r, const weft_tensor *rows, const weft_recompute_site *at)
{
    merged m = merged_by_entry(r, rows);
    return join_fwd(r, &m, 0, &at->x, &at->v);
}

weft_status connection_join_entry_bwd(run *r, const weft_recompute_site *at, const weft_tensor *d_rows)
{
    /* Each of the first streams is a copy of the rows, which themselves are not kept. */
    weft_tensor rows = rows_of(r, at->x.data);
    rows.stride[0] = at->x.stride[0];
    merged m = merged_by_entry(r, &rows);
    merged_grads d = {.d_f = {*d_rows, 0}};
    return join_bwd(r, &m, &d, 0, &at->x);
}

weft_status connection_replay(run *r, int32_t group)
{
    const weft_model_config *c = r->config;
    weft_recompute *recompute = &r->model->recompute;
    weft_mhc_replay_layer layers[SITES * WEFT_RECOMPUTE_MAX_LAYERS];
    int32_t first = group * recompute->layers_per_group, count = 0;
    for (int32_t layer = first; layer < c->layers && layer < first + recompute->layers_per_group; layer++)
        for (int32_t index = SITES * layer; index < SITES * (layer + 1); index++)
            layers[count++] = (weft_mhc_replay_layer){.struct_size = sizeof *layers,
                                                      .dropout = dropout_of(r, index),
                                                      .sub_eps = c->norm_eps,
                                                      .pre = c->residual == WEFT_RESIDUAL_PLAIN ? post_of(r, index)
                                                                                                : pre_of(r, index),
                                                      .f = rows_of(r, site_at(r, index).f),
                                                      .bias = param_tensor(r, bias_param(index), layer),
                                                      .post = post_of(r, index),
                                                      .res = res_of(r, index),
                                                      .sub_weight = param_tensor(r, norm_param(index), layer)};
    const weft_recompute_replay_args *args =
        WEFT_ARGS(weft_recompute_replay_args, .group = group, .numerics = connection_numerics(c), .layers = layers,
                  .num_layers = count);
    if (!r->nn.query) return weft_recompute_replay(recompute, &r->exec, args);
    size_t bytes;
    WEFT_TRY(weft_recompute_replay_workspace(recompute, &r->exec, args, &bytes));
    if (bytes > r->need) r->need = bytes;
    return WEFT_OK;
}

/* ---- exit -------------------------------------------------------------------------------------------------------------------- */

weft_status exit_forward(run *r, const weft_tensor *x)
{
    const weft_model_config *c = r->config;
    int64_t n = c->streams;
    weft_tensor u = rows_of(r, r->whole.z);
    switch (c->exit) {
    case WEFT_EXIT_LEARNED:
        RUN_OP(r, mhc_head_fwd, .rms_eps = c->norm_eps, .pre_eps = c->norm_eps, .x = *x,
               .phi = split(param_tensor(r, EXIT_PHI, 0), n), .alpha = param_tensor(r, EXIT_ALPHA, 0),
               .beta = param_tensor(r, EXIT_BETA, 0), .u = u, .h = per_token(r, r->whole.exit_h, n),
               .ms = weft_dense1(r->whole.exit_ms, full_of(r), r->tokens));
        break;
    case WEFT_EXIT_MIX:
        RUN_OP(r, mhc_aggregate_fwd, .x = *x, .pre = per_token(r, site_at(r, SITES * c->layers - 1).pre, n),
               .u = u);
        break;
    default: RUN_OP(r, mhc_contract_fwd, .kind = WEFT_CONTRACT_MEAN, .x = *x, .u = u);
    }
    return WEFT_OK;
}

weft_status exit_backward(run *r, const weft_tensor *x)
{
    const weft_model_config *c = r->config;
    int64_t n = c->streams;
    int32_t last = SITES * c->layers - 1;
    weft_tensor d_u = rows_of(r, r->scratch.row_a);
    weft_grad d_x = {streams_of(r, r->scratch.d_x), 0};
    switch (c->exit) {
    case WEFT_EXIT_LEARNED:
        RUN_OP(r, mhc_head_bwd, .rms_eps = c->norm_eps, .pre_eps = c->norm_eps, .x = *x,
               .phi = split(param_tensor(r, EXIT_PHI, 0), n), .alpha = param_tensor(r, EXIT_ALPHA, 0),
               .beta = param_tensor(r, EXIT_BETA, 0), .h = per_token(r, r->whole.exit_h, n),
               .ms = weft_dense1(r->whole.exit_ms, full_of(r), r->tokens), .d_u = d_u, .d_x = d_x,
               .d_phi = split_grad(param_grad(r, EXIT_PHI, 0), n), .d_alpha = param_grad(r, EXIT_ALPHA, 0),
               .d_beta = param_grad(r, EXIT_BETA, 0));
        break;
    case WEFT_EXIT_MIX:
        RUN_OP(r, mhc_aggregate_bwd, .x = *x, .pre = per_token(r, site_at(r, last).pre, n), .d_u = d_u, .d_x = d_x,
               .d_pre = {per_token(r, r->scratch.d_pre[last % 2], n), 0});
        break;
    default: RUN_OP(r, mhc_contract_bwd, .kind = WEFT_CONTRACT_MEAN, .d_u = d_u, .d_x = d_x);
    }
    return WEFT_OK;
}
