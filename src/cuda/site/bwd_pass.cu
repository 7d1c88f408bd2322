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
#include "cuda/site/bwd_compute.cuh"
#include "cuda/site/bwd_load_store.cuh"

/* FULL: also bias, dropout, d_u beside d_v, and gradients of any dtype and layout. SHIFTED: also the gradient of pre_in.
 * NORM: the gradient passes through the sub-layer's norm. Without a post the kernel reads y and writes its gradient, and d_y is the
 * value that the gradient is added to. */
template <int N, bool FULL_, bool SHIFTED, bool NORM, site_kind KIND>
static __global__ void __launch_bounds__(THREADS, 1) fused_kernel(const __grid_constant__ fused_args p)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    typedef sizes<N, FULL_, KIND> S;
    extern __shared__ char raw_shared[];
    __shared__ weft_mask mask; /* in shared memory to save registers */
    char *const shared = raw_shared + (-shared_address(raw_shared) & (TMA_ALIGN - 1));
    const uint32_t barriers = shared_address(shared) + S::barriers;
    const tiles_of_block b = {
        shared, {barriers, barriers + S::stages * 8, barriers + S::stages * 16, barriers + S::stages * 24}};
    static_assert(S::stages < THREADS / 32, "a warp per tile's barriers and one for psi's");
    if (threadIdx.x % 32 == 0) {
        const int s = (int)(threadIdx.x / 32);
        if (s < S::stages) {
            barrier_init(b.barrier.full + s * 8, 1);
            barrier_init(b.barrier.done + s * 8, COMPUTE_WARPS * 32);
            barrier_init(b.barrier.free + s * 8, (LOAD_STORE_WARPS - 1) * 32);
        } else if (s == S::stages) {
            barrier_init(b.barrier.psi, COMPUTE_WARPS * 32);
        }
        tma_barriers_ready();
        if constexpr (FULL_ && KIND == SITE_BOUNDARY)
            if (s == 0) mask = weft_mask_open(&p.dropout, p.channels);
    }
    let_next_begin();
    __syncthreads();
    if (threadIdx.x >= COMPUTE_WARPS * 32) {
        set_registers<LOAD_STORE_REGISTERS, false>();
        const int warp = (int)(threadIdx.x >> 5) - COMPUTE_WARPS;
        if (warp < LOAD_STORE_WARPS - 1)
            store_tiles<N, FULL_, SHIFTED, KIND>(p, b, warp);
        else if ((threadIdx.x & 31) == 0)
            load_tiles<N, FULL_, KIND>(p, b);
    } else {
        set_registers<COMPUTE_REGISTERS, true>();
        ring_cursor ring;
        bool is_first = true;
#pragma unroll 1
        for (int slice = boundary_first_slice(&p.plan, blockIdx.x);
             slice <= boundary_last_slice(&p.plan, blockIdx.x); slice++) {
            const boundary_piece piece = boundary_piece_of(&p.plan, blockIdx.x, slice);
            if (piece.count == 0) continue;
            compute<N, FULL_, SHIFTED, NORM, KIND>(p, b, mask, slice, piece, is_first, ring);
            is_first = false;
        }
    }
#endif
}

/* ---- host --------------------------------------------------------------------------------------------------------------------- */

static weft_status map_of(const weft_call *call, tma_encode *encode, CUtensorMap *map, const weft_tensor *t)
{
    if (!weft_has(t)) return WEFT_OK;
    const bool streams = t->ndim == 3;
    const tma_tensor tensor = {t->data,        call->tokens, streams ? call->streams : 1,
                               call->channels, t->stride[0], streams ? t->stride[1] : 0};
    return tma_map(call, encode, map, &tensor, BOUNDARY_TILE);
}

/* TMA can store this gradient; with add only where `base` says that the kernel reads the old value. */
static bool is_stored(const weft_grad *g, bool base)
{
    return weft_has(&g->to) && (base || !g->add) && g->to.dtype == WEFT_BF16 && tma_fits(&g->to);
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
    p->tokens = call->tokens, p->channels = (int32_t)call->channels;
    p->plan = w->plan;
    p->store_d_x = is_stored(&a->d_x, !post), p->store_d_f = is_stored(&a->d_f, false);
    if (!p->store_d_x) p->d_x_any = view_of(&a->d_x);
    if (!p->store_d_f) p->d_f_any = view_of(&a->d_f);
    /* Without a post the value that is added to is loaded with the tiles. */
    const weft_tensor none = {}, *d_y = post ? &a->d_y : p->store_d_x && a->d_x.add ? &a->d_x.to : &none;
    p->has_d_y = weft_has(d_y), p->has_row = weft_has(row);
    WEFT_TRY(tma_open(call, &encode));
    WEFT_TRY(map_of(call, encode, &p->x, post ? &a->x : &a->y));
    WEFT_TRY(map_of(call, encode, &p->f, &a->f));
    WEFT_TRY(map_of(call, encode, &p->d_y, d_y));
    WEFT_TRY(map_of(call, encode, &p->row, row));
    if (p->store_d_x) WEFT_TRY(map_of(call, encode, &p->d_x, &a->d_x.to));
    if (p->store_d_f) WEFT_TRY(map_of(call, encode, &p->d_f, &a->d_f.to));
    p->psi = w->psi, p->psi_stride = call->streams * call->channels;
    if (weft_project_phi_is_psi(&a->phi, &a->norm_weight, LAYOUT_NC))
        p->psi = (const float *)a->phi.data, p->psi_stride = a->phi.stride[0];
    return WEFT_OK;
}

template <int N, site_kind KIND> static weft_status run(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const bool shifted = weft_has(&a->d_pre_in.to), norm = weft_has(&a->d_v);
    fused_args p;
    WEFT_TRY(args_of(call, w, &p));
    const bool plain =
        !has(p.d_x_any) && !has(p.d_f_any) && !has(p.bias) && !p.d_bias && !has(p.d_u) && !(a->dropout.p > 0);
    constexpr bool MORE = KIND != SITE_HEAD; /* a head is neither shifted nor does it have a norm */
    void (*const kernels[2][2][2])(fused_args) = {
        {{fused_kernel<N, false, false, false, KIND>, fused_kernel<N, false, false, MORE, KIND>},
         {fused_kernel<N, false, MORE, false, KIND>, fused_kernel<N, false, MORE, MORE, KIND>}},
        {{fused_kernel<N, true, false, false, KIND>, fused_kernel<N, true, false, MORE, KIND>},
         {fused_kernel<N, true, MORE, false, KIND>, fused_kernel<N, true, MORE, MORE, KIND>}}};
    static const char *const names[] = {
        [SITE_HEAD] = "head backward", [SITE_PRE] = "pre backward", [SITE_BOUNDARY] = "boundary backward"};
    return launch(call, names[KIND], kernels[!plain][shifted][norm],
                  {.grid = (unsigned)w->plan.blocks,
                   .block = THREADS,
                   .shared = (size_t)(plain ? sizes<N, false, KIND>::all : sizes<N, true, KIND>::all),
                   .order = OVERLAP},
                  p);
}

weft_status weft_cuda_boundary_bwd_pass(const weft_call *call, const boundary_work *w)
{
    return of_site(call, w, [&](auto n, auto kind) { return run<n.value, kind.value>(call, w); });
}
