/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated norm behind the gated delta rule [G7]. A row is read as a whole before it is written, so y may be o. */
#include "ref/gdn.h"
#include "ref/norm.h"

typedef struct work {
    double *o, *z, *weight, *y;   /* [C]; y: or its gradient */
    double *d_o, *d_z, *d_weight; /* backward */
} work;

static work work_open(const weft_call *call, weft_arena *arena)
{
    work w;
    double **const rows[] = {&w.o, &w.z, &w.weight, &w.y, &w.d_o, &w.d_z, &w.d_weight};
    for (int i = 0; i < 7; i++) *rows[i] = take(arena, call->channels);
    return w;
}

static size_t workspace(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    (void)args;
    work_open(call, &arena);
    return weft_arena_bytes(&arena);
}

/* f(z) and f'(z) */
static double gate_of(weft_gdn_gate gate, double z, double *slope)
{
    double s = 1 / (1 + exp(-z)), rest = 1 / (1 + exp(z));
    *slope = gate == WEFT_GDN_GATE_SIGMOID ? s * rest : s * (1 + z * rest);
    return gate == WEFT_GDN_GATE_SIGMOID ? s : z * s;
}

static void load_head(const weft_sequences *s, const weft_tensor *x, int64_t t, int64_t h, double *to)
{
    for (int64_t c = 0; c < x->shape[3]; c++) to[c] = get_head(s, x, t, h, c);
}

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_gdn_norm_fwd_args *a = args;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    weft_sequences s = weft_sequences_of(call, &(weft_tensor){0});
    work w = work_open(call, &arena);
    double slope;
    load_param(&a->weight, call->channels, 1.0, w.weight);
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < call->value_heads; h++) {
            load_head(&s, &a->o, t, h, w.o);
            load_head(&s, &a->z, t, h, w.z);
            rmsnorm_forward(call->channels, a->eps, w.o, w.weight, w.y);
            for (int64_t c = 0; c < call->channels; c++)
                put_head(&s, &a->y, t, h, c, w.y[c] * gate_of(a->gate, w.z[c], &slope));
        }
    return WEFT_OK;
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_gdn_norm_bwd_args *a = args;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    weft_sequences s = weft_sequences_of(call, &(weft_tensor){0});
    work w = work_open(call, &arena);
    load_param(&a->weight, call->channels, 1.0, w.weight);
    clear(call->channels, w.d_weight);
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < call->value_heads; h++) {
            load_head(&s, &a->o, t, h, w.o);
            load_head(&s, &a->z, t, h, w.z);
            rmsnorm_forward(call->channels, a->eps, w.o, w.weight, w.y);
            for (int64_t c = 0; c < call->channels; c++) {
                double slope, d_y = get_head(&s, &a->d_y, t, h, c), f = gate_of(a->gate, w.z[c], &slope);
                w.d_z[c] = d_y * w.y[c] * slope;
                w.y[c] = d_y * f; /* the gradient in front of the gate */
            }
            clear(call->channels, w.d_o);
            rmsnorm_backward(call->channels, a->eps, w.o, w.weight, w.y, w.d_o, w.d_weight);
            for (int64_t c = 0; c < call->channels; c++) {
                put_grad_head(&s, &a->d_o, t, h, c, w.d_o[c]);
                put_grad_head(&s, &a->d_z, t, h, c, w.d_z[c]);
            }
        }
    grad_param(&a->d_weight, call->channels, w.d_weight);
    return WEFT_OK;
}

const weft_kernel weft_ref_gdn_norm_fwd[] = {{.run = run_fwd, .workspace = workspace}, {0}};
const weft_kernel weft_ref_gdn_norm_bwd[] = {{.run = run_bwd, .workspace = workspace}, {0}};
