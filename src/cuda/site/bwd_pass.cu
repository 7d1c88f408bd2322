/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused backward of `boundary` [M11] from the gradients of the projection on: reads x, f, d_y, d_u (or d_v) and writes d_x,
 * d_f, 6nC + 6C bytes per token in bf16. y and its gradient stay on chip.
 *
 *     y[o]      = post (x, f), rounded, as forward made it                                             mhc_post.cuh
 *     du        = d_u + r (d_v weight - k u), u = sum_o pre[o] y[o], rounded
 *     g[o]      = d_y[o] + pre[o] du + sum_j d_h[j] psi[j,o] + (2 d_ms / K) y[o]                       fp32
 *     d_f, d_x  = sum_o post[o] g[o], sum_o W(i,o) g[o]
 *     d_post[o] = sum_c g[o] (f + bias);  d_W(i,o) = sum_c x[i] g[o];  d_pre_in[o] = sum_c du y[o]
 *     dpsi[j,o] = sum_t d_h[j] y[o];      d_sub_weight = sum_t d_v u r;  d_bias = sum_t d_f
 *
 * A block owns 128 channels of all streams and a range of tokens; a larger share continues with the last tokens of the next
 * channels. Eight compute warps own 16 channels each (site/bwd_compute.cuh), with psi and the sums over tokens of these in
 * registers. Four load/store warps (site/bwd_load_store.cuh) fill a ring of tiles of 16 tokens with TMA, store the gradients that
 * the compute warps wrote into a tile, and add their sums over channels. The matrix products in d_x and dpsi run on tensor
 * cores, fp32 factors as bf16 hi + lo, as in mhc_project_bwd.cu.
 *
 * site/bwd_fold.cu adds the slices of the channels and the ranges of tokens in order; both depend on the shape alone. */
#include "core/status.h"
#include "cuda/site/bwd_pass.cuh"

static weft_status map_of(const weft_call *call, tma_encode *encode, CUtensorMap *map, const weft_tensor *t)
{
    if (!weft_has(t)) return WEFT_OK;
    const bool streams = t->ndim == 3;
    const tma_tensor tensor = {t->data,        call->tokens, streams ? call->streams : 1,
                               call->channels, t->stride[0], streams ? t->stride[1] : 0};
    return tma_map(call, encode, map, &tensor, BOUNDARY_TILE);
}

/* The streams in the (C,n) layout: boxes of 64 columns, which are channels and streams in turn. */
static weft_status map_of_streams(const weft_call *call, tma_encode *encode, CUtensorMap *map, const weft_tensor *t,
                                  stream_layout layout, int boxes)
{
    if (!weft_has(t) || layout == LAYOUT_NC) return map_of(call, encode, map, t);
    const tma_tensor tensor = {t->data, call->tokens, 1, call->streams * call->channels, t->stride[0], 0};
    return tma_map_rows(call, encode, map, &tensor, BOUNDARY_TILE, boxes);
}

/* TMA can store this gradient; with add only where `base` says that the kernel reads the old value. */
static bool is_stored(const weft_call *call, const weft_grad *g, stream_layout layout, bool base)
{
    return weft_has(&g->to) && (base || !g->add) && g->to.dtype == call->dtype && streams_fit_tma(&g->to, layout);
}

bool weft_cuda_boundary_bwd_is_full(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const auto not_stored = [&](const weft_grad *g, stream_layout layout, bool base) {
        return weft_has(&g->to) && !is_stored(call, g, layout, base);
    };
    return not_stored(&a->d_x, w->layout, !weft_has(&a->x)) || not_stored(&a->d_f, LAYOUT_NC, false) ||
           weft_has(&a->bias) || w->d_bias || (weft_has(&a->d_v) && weft_has(&a->d_u)) || a->dropout.p > 0;
}

static weft_status args_of(const weft_call *call, const boundary_work *w, fused_args *p)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const bool post = weft_has(&a->x);
    const weft_tensor *row = weft_has(&a->d_v) ? &a->d_v : &a->d_u;
    tma_encode *encode = NULL;
    *p = fused_args{};
    p->records = w->records;
    p->dpsi = w->dpsi, p->sums = w->sums, p->d_bias = w->d_bias, p->d_weight = w->d_weight;
    p->weight = view_of(&a->sub_weight), p->bias = view_of(&a->bias);
    if (weft_has(&a->d_v)) p->d_u = view_of(&a->d_u);
    p->dropout = a->dropout;
    p->tokens = call->tokens, p->channels = (int32_t)call->channels, p->phi_rows = (int32_t)call->rows;
    p->plan = w->plan;
    p->store_d_x = is_stored(call, &a->d_x, w->layout, !post);
    p->store_d_f = is_stored(call, &a->d_f, LAYOUT_NC, false);
    if (!p->store_d_x) p->d_x_any = view_of(&a->d_x);
    const weft_tensor *d_x = &a->d_x.to;
    p->d_x_wide = has(p->d_x_any) && w->layout == LAYOUT_CN && streams_fit(d_x, LAYOUT_CN, 1) &&
                  (d_x->dtype == WEFT_F32 || d_x->dtype == call->dtype);
    if (!p->store_d_f) p->d_f_any = view_of(&a->d_f);
    /* Without a post the value that is added to is loaded with the tiles. */
    const weft_tensor none = {}, *d_y = post ? &a->d_y : p->store_d_x && a->d_x.add ? &a->d_x.to : &none;
    p->has_d_y = weft_has(d_y), p->has_row = weft_has(row), p->has_norm = weft_has(&a->d_v);
    const int64_t columns = call->streams * call->channels, boxes = columns % TMA_CHANNELS ? 1 : 2 * call->streams;
    p->boxes = (int32_t)boxes;
    WEFT_TRY(tma_open(call, &encode));
    WEFT_TRY(map_of_streams(call, encode, &p->x, post ? &a->x : &a->y, w->layout, boxes));
    WEFT_TRY(map_of(call, encode, &p->f, &a->f));
    WEFT_TRY(map_of_streams(call, encode, &p->d_y, d_y, w->layout, boxes));
    WEFT_TRY(map_of(call, encode, &p->row, row));
    if (p->store_d_x) WEFT_TRY(map_of_streams(call, encode, &p->d_x, &a->d_x.to, w->layout, boxes));
    if (p->store_d_f) WEFT_TRY(map_of(call, encode, &p->d_f, &a->d_f.to));
    p->psi = w->psi, p->psi_stride = columns;
    if (w->phi_is_psi) p->psi = (const float *)a->phi.data, p->psi_stride = a->phi.stride[0];
    return WEFT_OK;
}

weft_status weft_cuda_boundary_bwd_pass(const weft_call *call, const boundary_work *w)
{
    fused_args p;
    WEFT_TRY(args_of(call, w, &p));
    return of_memory(call, w, [&](auto type, auto layout) {
        return weft_cuda_boundary_bwd_fused<decltype(type), layout.value>(call, w, &p);
    });
}
