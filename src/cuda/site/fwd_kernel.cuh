/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused kernel of an mHC site (site/fwd.cuh), its roles put together, and the choice of an instance. */
#ifndef WEFT_CUDA_SITE_FWD_KERNEL_CUH
#define WEFT_CUDA_SITE_FWD_KERNEL_CUH

#include "cuda/site/fwd_mix.cuh"
#include "cuda/site/fwd_mma.cuh"
#include "cuda/site/fwd_owner.cuh"
#include "cuda/site/fwd_producer.cuh"
#include "cuda/site/fwd_reduce.cuh"

/* ---- the kernel --------------------------------------------------------------------------------------------------------- */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Arrivals that complete barrier i, in the order of site_barriers. Every lane of a warp arrives by itself, after its own accesses.
 * Barriers that count bytes have one arrival. */
template <int N, site_kind KIND, int PAIRS>
static __device__ __forceinline__ int arrivals(const site_args &p, int i)
{
    constexpr int mix_threads = MIX_WARPS * 32, mma_threads = site_roles<PAIRS>::mma_warps * 32;
    const int s = p.stages,
              remaining = p.boxes % 4 * (SITE_TILE / 4) * 32; /* a warp has four rows of a remaining box */
    const int rest = i - 6 * s - 2 * p.slots;
    if (i < s) return KIND == SITE_BOUNDARY || has(p.pre_in) ? 33 : 1; /* full: 32 lanes copy coefficients */
    if (i < 2 * s) return mix_threads;                                 /* mixed */
    if (i < 3 * s) return remaining > 0 ? remaining : 1;               /* mixed_remaining */
    if (i < 4 * s) return mix_threads;                                 /* empty */
    if (rest < 0) return 1;
    if (rest < SITE_PSI_EMPTY) return 32;
    if (rest < SITE_PARTIAL_EMPTY) return mma_threads; /* and psi_empty */
    if (rest < SITE_F_FULL) return 32;
    return rest == SITE_F_EMPTY ? mix_threads : 1;
}

/* Initialises the barriers: one lane of each warp but the producer, one barrier at a time. Those for sums and squares are armed as
 * well. */
template <int N, site_kind KIND, int PAIRS>
static __device__ __forceinline__ void make_barriers(const site_args &p, const site_barriers &b, int warp)
{
    typedef site_roles<PAIRS> cast;
    const int sums = 6 * p.stages, squares = sums + p.slots, rest = squares + p.slots;
    const int count = rest + SITE_PSI_FULL + (site_once<N, KIND, PAIRS>() ? p.psi_boxes : 1);
#pragma unroll 1
    for (int i = warp < cast::producer ? warp : warp - 1; i < count; i += cast::warps - 1) {
        const uint32_t barrier = b.full + i * 8;
        barrier_init(barrier, arrivals<N, KIND, PAIRS>(p, i));
        if (i >= sums && i < rest)
            tma_expect(barrier,
                       (uint32_t)p.cluster * (i < squares ? site_shape<N, KIND>::fours * 16 : p.boxes * 4));
    }
    tma_barriers_ready();
}

template <class T, stream_layout L, int N, site_kind KIND, post_mode MODE, site_apply APPLY, int PAIRS>
static __device__ __forceinline__ void site(const site_args &p)
{
    typedef site_roles<PAIRS> cast;
    extern __shared__ __align__(1024) char shared[];
    /* The shuffle makes the compiler keep the warp index in a register; the lane index is cheaper to read again than to spill. */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = (int)threadIdx.x & 31;
    const uint32_t at = shared_address(shared + p.offset.barriers), s = p.stages * 8, sums = at + 6 * s,
                   rest = sums + 16 * p.slots;
    site_block b = {shared,
                    {at, at + s, at + 2 * s, at + 3 * s, at + 4 * s, at + 5 * s, sums, sums + 8 * p.slots,
                     rest + SITE_LOGITS_FULL * 8, rest + SITE_LOGITS_EMPTY * 8, rest + SITE_PSI_EMPTY * 8,
                     rest + SITE_PARTIAL_FULL * 8, rest + SITE_PARTIAL_EMPTY * 8, rest + SITE_F_FULL * 8,
                     rest + SITE_F_EMPTY * 8, rest + SITE_PSI_FULL * 8}};
    b.rank = cluster_rank(), b.cluster = cluster_index(), b.lane = lane;
    b.count = (p.tiles - (int)b.cluster + p.clusters - 1) / p.clusters;
    b.first_channel = (int)b.rank * p.boxes * SITE_BOX;
    if (warp == cast::producer) {
        if (lane < (KIND == SITE_BOUNDARY ? 3 : 2)) tma_prefetch(lane == 0 ? &p.x : lane == 1 ? &p.psi : &p.f);
    } else if (lane == 0) {
        make_barriers<N, KIND, PAIRS>(p, b.barrier, warp);
    }
    __syncthreads();
    cluster_arrive(); /* barriers exist; a warp waits for this before it sends to another block */
    let_next_begin(); /* producer, Sinkhorn warp and owner wait for the previous launch before they touch memory */

    if (warp < cast::first_mix) { /* MMA */
        set_registers<cast::mma_registers, true>();
        mma_warp<T, N, KIND, PAIRS>(p, b, warp);
    } else if (warp < cast::producer) { /* post, and the epilogue: aggregate and norm */
        set_registers<cast::mix_registers, false>();
        mix_warp<T, L, N, KIND, MODE, APPLY, PAIRS>(p, b, warp - cast::first_mix);
    } else {
        set_registers<cast::other_registers, false>();
        if (warp == cast::producer) { /* Producer */
            producer_warp<L, N, KIND, PAIRS>(p, b);
        } else {
            /* psi is on the critical path, and the Sinkhorn warp is idle at the start: it issues the loads before the producer could. */
            if (warp == cast::sinkhorn) {
                wait_for_previous();
                if (lane == 0) load_psi<L, N, KIND, site_once<N, KIND, PAIRS>()>(p, b, 0);
                __syncwarp();
            }
            cluster_wait_for_all();
            if (warp == cast::owner) owner_warp<N, KIND, cast::batches, cast::batch>(p, b);
            if (warp == cast::reduction) reduction_warp<T, N, KIND, PAIRS>(p, b);
            if constexpr (KIND != SITE_HEAD)
                if (warp == cast::sinkhorn && has(p.res_out)) sinkhorn_warp<N, cast::batches, cast::batch>(p, b);
        }
    }
}

#endif

template <class T, stream_layout L, int N, site_kind KIND, post_mode MODE, site_apply APPLY, int PAIRS>
static __global__ void __launch_bounds__(site_roles<PAIRS>::warps * 32, 1)
    site_kernel(const __grid_constant__ site_args p)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    site<T, L, N, KIND, MODE, APPLY, PAIRS>(p);
#endif
}

/* ---- instances ------------------------------------------------------------------------------------------------------------ */

struct site_instance {
    kernel_of<site_args> kernel;
    unsigned block;
};

/* What chooses one beside dtype and layout. */
struct site_choice {
    int streams;
    site_kind kind;
    post_mode mode; /* of post, which has no kernel for a bias alone */
    bool in_out;
    int pairs;
};

template <class T, stream_layout L, int N, site_kind KIND, post_mode MODE, site_apply APPLY, int PAIRS>
static site_instance instance()
{
    return {site_kernel<T, L, N, KIND, MODE, APPLY, PAIRS>, site_roles<PAIRS>::warps * 32};
}

template <class T, stream_layout L, int N, site_kind KIND, post_mode MODE, site_apply APPLY>
static site_instance by_pairs(int pairs)
{
    if (pairs == SITE_FEW_PAIRS) return instance<T, L, N, KIND, MODE, APPLY, SITE_FEW_PAIRS>();
    if constexpr (N == 4) { /* 320 and 448 channels a block: C = 2560, 5120 and 7168 */
        if (pairs == 5) return instance<T, L, N, KIND, MODE, APPLY, 5>();
        if (pairs == SITE_WIDE_PAIRS) return instance<T, L, N, KIND, MODE, APPLY, SITE_WIDE_PAIRS>();
    }
    return instance<T, L, N, KIND, MODE, APPLY, 0>();
}

/* bf16 in (n, C) has a kernel for each convention, where there is neither bias nor dropout; the others know it at run time, for half
 * the machine code. */
template <class T, stream_layout L, int N, post_mode MODE> static site_instance by_apply(const site_choice &c)
{
    if constexpr (number<T>::dtype != WEFT_BF16 || L != LAYOUT_NC || MODE != PLAIN)
        return by_pairs<T, L, N, SITE_BOUNDARY, MODE, SITE_EITHER>(c.pairs);
    else
        return c.in_out ? by_pairs<T, L, N, SITE_BOUNDARY, MODE, SITE_IN_OUT>(c.pairs)
                        : by_pairs<T, L, N, SITE_BOUNDARY, MODE, SITE_OUT_IN>(c.pairs);
}

template <class T, stream_layout L, int N> static site_instance by_kind(const site_choice &c)
{
    if constexpr (N != 2) /* of two streams pre's: its eight rows are one operand as well */
        if (c.kind == SITE_HEAD) return by_pairs<T, L, N, SITE_HEAD, PLAIN, SITE_OUT_IN>(c.pairs);
    if (c.kind != SITE_BOUNDARY) return by_pairs<T, L, N, SITE_PRE, PLAIN, SITE_OUT_IN>(c.pairs);
    return c.mode == PLAIN ? by_apply<T, L, N, PLAIN>(c) : by_apply<T, L, N, FULL>(c);
}

template <class T, stream_layout L> static site_instance instance_of(const site_choice &c)
{
    return c.streams == 2 ? by_kind<T, L, 2>(c) : by_kind<T, L, 4>(c);
}

/* Those of each dtype and layout are compiled in a file of their own. */
site_instance weft_cuda_site_bf16_nc(const site_choice &c);
site_instance weft_cuda_site_bf16_cn(const site_choice &c);
site_instance weft_cuda_site_f16_nc(const site_choice &c);
site_instance weft_cuda_site_f16_cn(const site_choice &c);

#endif
