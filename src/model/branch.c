/* SPDX-License-Identifier: Apache-2.0
 *
 * The sub-layers: attention [T2], gdn (gdn.c) and the SwiGLU MLP [T3], and the linear maps they are made of [T1]. The bias of
 * a sub-layer's last map is left to the merge. */
#include "model/model.h"

static int64_t row_of(const linear *l)
{
    return l->row ? l->row : l->to;
}

weft_status linear_forward(run *r, const linear *l, const void *x, void *y)
{
    RUN_NN(r, matmul,
           &(weft_matmul){.a = x,
                          .lda = l->from,
                          .b = param_weight(r, l->weight, l->layer),
                          .ldb = l->from,
                          .b_transposed = 1,
                          .c = y,
                          .c_full = l->to_full,
                          .ldc = row_of(l),
                          .m = r->tokens,
                          .n = l->to,
                          .k = l->from,
                          .scale = 1});
    if (l->bias < PARAM_COUNT && r->config->bias)
        RUN_NN(r, bias_fwd, y, param_data(r, l->bias, l->layer), r->tokens, l->to);
    return WEFT_OK;
}

weft_status linear_d_input(run *r, const linear *l, const void *d_y, void *d_x)
{
    RUN_NN(r, matmul,
           &(weft_matmul){.a = d_y,
                          .lda = row_of(l),
                          .b = param_weight(r, l->weight, l->layer),
                          .ldb = l->from,
                          .c = d_x,
                          .ldc = l->from,
                          .m = r->tokens,
                          .n = l->from,
                          .k = l->to,
                          .scale = 1});
    return WEFT_OK;
}

weft_status linear_d_weight(run *r, const linear *l, const void *x, const void *d_y)
{
    RUN_NN(r, matmul,
           &(weft_matmul){.a = d_y,
                          .lda = row_of(l),
                          .a_transposed = 1,
                          .b = x,
                          .ldb = l->from,
                          .c = param_grad_data(r, l->weight, l->layer),
                          .c_full = 1,
                          .ldc = l->from,
                          .m = l->to,
                          .n = l->from,
                          .k = r->tokens,
                          .add = 1,
                          .scale = 1});
    if (l->bias < PARAM_COUNT && r->config->bias)
        RUN_NN(r, bias_bwd, d_y, param_grad_data(r, l->bias, l->layer), r->tokens, l->to);
    return WEFT_OK;
}

static weft_attention attention_of(const run *r, const site_memory *s)
{
    const weft_model_config *c = r->config;
    return (weft_attention){.sequences = r->model->sequences,
                            .length = r->model->length,
                            .heads = c->heads,
                            .head_dim = c->channels / c->heads,
                            .qkv = s->qkv,
                            .o = s->o,
                            .lse = s->lse,
                            .table = r->whole.rope};
}

static weft_swiglu swiglu_of(const run *r, const site_memory *s)
{
    return (weft_swiglu){.tokens = r->tokens,
                         .hidden = r->config->hidden,
                         .gate_up = s->gate_up,
                         .act = r->scratch.act,
                         .d_act = r->scratch.d_act,
                         .d_gate_up = r->scratch.wide};
}

typedef struct maps {
    linear in, out;
} maps;

static bool is_gdn_site(const run *r, int32_t index)
{
    return index % SITES == 0 && is_gdn(r->config, index / SITES);
}

static maps maps_of(const run *r, int32_t index)
{
    const weft_model_config *c = r->config;
    int32_t layer = index / SITES;
    if (is_gdn_site(r, index))
        return (maps){{PROJ, PROJ_BIAS, layer, c->channels, gdn_sizes_of(c).proj, 0, mixer_row(c, layer)},
                      {OUT, PARAM_COUNT, layer, c->channels, c->channels, 0, 0}};
    if (index % SITES == 0)
        return (maps){{QKV, QKV_BIAS, layer, c->channels, 3 * c->channels, 0, 0},
                      {OUT, PARAM_COUNT, layer, c->channels, c->channels, 0, 0}};
    return (maps){{GATE_UP, GATE_UP_BIAS, layer, c->channels, 2 * c->hidden, 0, 0},
                  {DOWN, PARAM_COUNT, layer, c->hidden, c->channels, 0, 0}};
}

weft_status branch_forward(run *r, int32_t index, const void *v)
{
    maps m = maps_of(r, index);
    site_memory s = site_at(r, index);
    if (is_gdn_site(r, index)) return gdn_forward(r, index / SITES, &m.in, &m.out, &s, v);
    if (r->state && index % SITES == 0) return attention_step(r, index / SITES, &m.in, &m.out, &s, v);
    if (index % SITES == 0) {
        weft_attention a = attention_of(r, &s);
        WEFT_TRY(linear_forward(r, &m.in, v, s.qkv));
        RUN_NN(r, rope, &a, s.qkv, 0);
        RUN_NN(r, attention_fwd, &a);
        return linear_forward(r, &m.out, s.o, s.f);
    }
    weft_swiglu a = swiglu_of(r, &s);
    WEFT_TRY(linear_forward(r, &m.in, v, s.gate_up));
    RUN_NN(r, swiglu_fwd, &a);
    return linear_forward(r, &m.out, r->scratch.act, s.f);
}

weft_status branch_backward(run *r, int32_t index, const void *v)
{
    maps m = maps_of(r, index);
    site_memory s = site_at(r, index);
    scratch *w = &r->scratch;
    if (is_gdn_site(r, index)) {
        WEFT_TRY(gdn_backward(r, index / SITES, &m.out, &s));
    } else if (index % SITES == 0) {
        weft_attention a = attention_of(r, &s);
        a.d_o = w->row_c, a.d_qkv = w->wide;
        WEFT_TRY(linear_d_input(r, &m.out, w->row_a, w->row_c));
        WEFT_TRY(linear_d_weight(r, &m.out, s.o, w->row_a));
        RUN_NN(r, attention_bwd, &a);
        RUN_NN(r, rope, &a, w->wide, 1);
    } else {
        weft_swiglu a = swiglu_of(r, &s);
        WEFT_TRY(linear_d_input(r, &m.out, w->row_a, w->d_act));
        RUN_NN(r, swiglu_bwd, &a); /* makes act again, which the next line needs */
        WEFT_TRY(linear_d_weight(r, &m.out, w->act, w->row_a));
    }
    WEFT_TRY(linear_d_input(r, &m.in, w->wide, w->row_b));
    return linear_d_weight(r, &m.in, v, w->wide);
}
