/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused backward kernel [M11], site/bwd_pass.cu, and its launch, for a type and layout of the streams: each pair of these has a
 * source file of its own, since together they take minutes to compile. */
#ifndef WEFT_CUDA_SITE_BWD_KERNEL_CUH
#define WEFT_CUDA_SITE_BWD_KERNEL_CUH

#include "cuda/site/bwd_compute.cuh"
#include "cuda/site/bwd_load_store.cuh"

/* FULL: also bias, dropout, d_u beside d_v, and gradients of any dtype and layout. SHIFTED: also the gradient of pre_in.
 * NORM: the gradient passes through the sub-layer's norm. Without a post the kernel reads y and writes its gradient, and d_y is the
 * value that the gradient is added to. */
template <class T, int N, stream_layout L, bool FULL_, bool SHIFTED, bool NORM, site_kind KIND>
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
            barrier_init(b.barrier.free + s * 8, LOAD_STORE_WARPS - 1);
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
            store_tiles<N, L, FULL_, SHIFTED, KIND>(p, b, warp);
        else if ((threadIdx.x & 31) == 0)
            load_tiles<N, L, FULL_, KIND>(p, b);
    } else {
        set_registers<COMPUTE_REGISTERS, true>();
        ring_cursor ring;
        bool is_first = true;
#pragma unroll 1
        for (int slice = boundary_first_slice(&p.plan, blockIdx.x);
             slice <= boundary_last_slice(&p.plan, blockIdx.x); slice++) {
            const boundary_piece piece = boundary_piece_of(&p.plan, blockIdx.x, slice);
            if (piece.count == 0) continue;
            compute<T, N, L, FULL_, SHIFTED, NORM, KIND>(p, b, mask, slice, piece, is_first, ring);
            is_first = false;
        }
    }
#endif
}

/* ---- host --------------------------------------------------------------------------------------------------------------------- */

template <class T, int N, stream_layout L, site_kind KIND>
static weft_status run(const weft_call *call, const boundary_work *w, const fused_args *p)
{
    constexpr bool MORE = KIND != SITE_HEAD; /* a head is neither shifted nor does it have a norm */
    /* Bias, dropout and what else makes a call `full` have one kernel, which sums d_pre_in in any case and finds out at run time
     * whether there is a norm: four would be 0.9 MB more for each type and layout. */
    void (*const full)(fused_args) = fused_kernel<T, N, L, true, MORE, MORE, KIND>;
    void (*const kernels[2][2][2])(fused_args) = {
        {{fused_kernel<T, N, L, false, false, false, KIND>, fused_kernel<T, N, L, false, false, MORE, KIND>},
         {fused_kernel<T, N, L, false, MORE, false, KIND>, fused_kernel<T, N, L, false, MORE, MORE, KIND>}},
        {{full, full}, {full, full}}};
    static const char *const names[] = {
        [SITE_HEAD] = "head backward", [SITE_PRE] = "pre backward", [SITE_BOUNDARY] = "boundary backward"};
    return launch(call, names[KIND], kernels[w->full][w->pre_sums][p->has_norm],
                  {.grid = (unsigned)w->plan.blocks,
                   .block = THREADS,
                   .shared = (size_t)(w->full ? sizes<N, true, KIND>::all : sizes<N, false, KIND>::all),
                   .order = OVERLAP},
                  *p);
}

template <class T, stream_layout L>
weft_status weft_cuda_boundary_bwd_fused(const weft_call *call, const boundary_work *w, const fused_args *p)
{
    return of_site(call, w, [&](auto n, auto kind) { return run<T, n.value, L, kind.value>(call, w, p); });
}

#endif
