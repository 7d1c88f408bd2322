/* SPDX-License-Identifier: Apache-2.0
 *
 * The mixer of a gdn layer: projection, gdn_pre, gdn_rule, gdn_norm, and the map out. Forward leaves the projection and the
 * rule's output; backward makes everything between them again. */
#include <math.h>

#include "model/model.h"

/* A mixer's arrays as the operators take them. */
typedef struct mixer {
    weft_gdn_options options;
    double scale;
    weft_gdn_sections in, d_in; /* of the projection, and of its gradient */
    weft_tensor taps, a_log, dt_bias, norm;
    weft_tensor query, key, value, beta, g, o, y;
} mixer;

static weft_tensor of_heads(const run *r, void *data, int64_t heads)
{
    const int64_t shape[] = {r->model->sequences, r->model->length, heads, gdn_sizes_of(r->config).dim};
    return weft_dense(data, r->config->dtype, 4, shape);
}

/* A number per head, full. */
static weft_tensor of_gates(const run *r, void *data)
{
    return weft_dense3(data, weft_nn_full(r->config->dtype), r->model->sequences, r->model->length,
                       r->config->heads);
}

static weft_gdn_sections split(const run *r, void *rows)
{
    const gdn_sizes z = gdn_sizes_of(r->config);
    weft_tensor proj =
        weft_dense3(rows ? rows : r->model, r->config->dtype, r->model->sequences, r->model->length, z.proj);
    proj.stride[1] = z.row, proj.stride[0] = z.row * r->model->length;
    weft_gdn_sections s = weft_gdn_split(&proj, z.key_heads, z.dim, z.heads, z.dim);
    weft_tensor *const sections[] = {&s.q, &s.k, &s.v, &s.z, &s.b, &s.a};
    for (int i = 0; i < 6 && !rows; i++) sections[i]->data = NULL; /* a query */
    return s;
}

static mixer mixer_of(const run *r, int32_t layer, const site_memory *s)
{
    const scratch *w = &r->scratch;
    const gdn_sizes z = gdn_sizes_of(r->config);
    return (mixer){.options = weft_gdn_defaults(),
                   .scale = 1 / sqrt((double)z.dim),
                   .in = split(r, s->qkv),
                   .d_in = split(r, w->wide),
                   .taps = param_tensor(r, TAPS, layer),
                   .a_log = param_tensor(r, DECAY, layer),
                   .dt_bias = param_tensor(r, STEP, layer),
                   .norm = param_tensor(r, GATED_NORM, layer),
                   .query = of_heads(r, w->query, z.key_heads),
                   .key = of_heads(r, w->key, z.key_heads),
                   .value = of_heads(r, w->value, z.heads),
                   .beta = of_gates(r, w->beta),
                   .g = of_gates(r, w->g),
                   .o = of_heads(r, s->o, z.heads),
                   .y = of_heads(r, w->row_b, z.heads)};
}

/* What the rule reads, from the projection. */
static weft_status run_front(run *r, const mixer *m)
{
    RUN_OP(r, gdn_pre_fwd, .options = m->options, .q = m->in.q, .k = m->in.k, .v = m->in.v, .b = m->in.b,
           .a = m->in.a, .weight = m->taps, .a_log = m->a_log, .dt_bias = m->dt_bias, .query = m->query,
           .key = m->key, .value = m->value, .beta = m->beta, .g = m->g);
    return WEFT_OK;
}

static weft_status run_norm(run *r, const mixer *m)
{
    RUN_OP(r, gdn_norm_fwd, .eps = r->config->norm_eps, .o = m->o, .z = m->in.z, .weight = m->norm, .y = m->y);
    return WEFT_OK;
}

/* Front and rule of the next tokens, from the state and back into it. */
static weft_status run_step(run *r, const mixer *m, int32_t layer)
{
    const gdn_sizes z = gdn_sizes_of(r->config);
    const state_memory s = state_at(r, layer);
    const int64_t shape[] = {1, z.heads, z.dim, z.dim};
    const weft_tensor rows = weft_dense3(s.taps, r->config->dtype, 1, z.conv, z.history);
    const weft_tensor rule = weft_dense(s.rule, weft_nn_full(r->config->dtype), 4, shape);
    RUN_OP(r, gdn_pre_step, .options = m->options, .q = m->in.q, .k = m->in.k, .v = m->in.v, .b = m->in.b,
           .a = m->in.a, .weight = m->taps, .a_log = m->a_log, .dt_bias = m->dt_bias, .state = rows,
           .query = m->query, .key = m->key, .value = m->value, .beta = m->beta, .g = m->g, .new_state = rows);
    RUN_OP(r, gdn_rule_step, .scale = m->scale, .query = m->query, .key = m->key, .value = m->value,
           .beta = m->beta, .g = m->g, .state = rule, .o = m->o, .new_state = rule);
    return WEFT_OK;
}

weft_status gdn_forward(run *r, int32_t layer, const linear *in, const linear *out, const site_memory *s,
                        const void *v)
{
    const mixer m = mixer_of(r, layer, s);
    WEFT_TRY(linear_forward(r, in, v, s->qkv));
    if (r->state)
        WEFT_TRY(run_step(r, &m, layer));
    else {
        WEFT_TRY(run_front(r, &m));
        RUN_OP(r, gdn_rule_fwd, .scale = m.scale, .query = m.query, .key = m.key, .value = m.value, .beta = m.beta,
               .g = m.g, .o = m.o);
    }
    WEFT_TRY(run_norm(r, &m));
    return linear_forward(r, out, m.y.data, s->f);
}

weft_status gdn_backward(run *r, int32_t layer, const linear *out, const site_memory *s)
{
    const scratch *w = &r->scratch;
    const gdn_sizes z = gdn_sizes_of(r->config);
    const mixer m = mixer_of(r, layer, s);
    const weft_tensor d_o = of_heads(r, w->d_o, z.heads), d_query = of_heads(r, w->d_query, z.key_heads);
    const weft_tensor d_key = of_heads(r, w->d_key, z.key_heads), d_value = of_heads(r, w->d_value, z.heads);
    const weft_tensor d_beta = of_gates(r, w->d_beta), d_g = of_gates(r, w->d_g);
    WEFT_TRY(run_front(r, &m));
    WEFT_TRY(run_norm(r, &m));
    WEFT_TRY(linear_d_input(r, out, w->row_a, w->row_c));
    WEFT_TRY(linear_d_weight(r, out, m.y.data, w->row_a));
    RUN_OP(r, gdn_norm_bwd, .eps = r->config->norm_eps, .o = m.o, .z = m.in.z, .weight = m.norm,
           .d_y = of_heads(r, w->row_c, z.heads), .d_o = {d_o, 0}, .d_z = {m.d_in.z, 0},
           .d_weight = param_grad(r, GATED_NORM, layer));
    RUN_OP(r, gdn_rule_bwd, .scale = m.scale, .query = m.query, .key = m.key, .value = m.value, .beta = m.beta,
           .g = m.g, .d_o = d_o, .d_query = {d_query, 0}, .d_key = {d_key, 0}, .d_value = {d_value, 0},
           .d_beta = {d_beta, 0}, .d_g = {d_g, 0});
    RUN_OP(r, gdn_pre_bwd, .options = m.options, .q = m.in.q, .k = m.in.k, .v = m.in.v, .b = m.in.b, .a = m.in.a,
           .weight = m.taps, .a_log = m.a_log, .dt_bias = m.dt_bias, .d_query = d_query, .d_key = d_key,
           .d_value = d_value, .d_beta = d_beta, .d_g = d_g, .d_q = {m.d_in.q, 0}, .d_k = {m.d_in.k, 0},
           .d_v = {m.d_in.v, 0}, .d_b = {m.d_in.b, 0}, .d_a = {m.d_in.a, 0}, .d_weight = param_grad(r, TAPS, layer),
           .d_a_log = param_grad(r, DECAY, layer), .d_dt_bias = param_grad(r, STEP, layer));
    return WEFT_OK;
}
