/* SPDX-License-Identifier: Apache-2.0
 *
 * The reduction warp of the fused site kernel: adds the partial sums of a tile and sends them to the tokens' owners; adds the
 * squares of the tokens that this block owns and returns the norm's factor to all blocks. */
#ifndef WEFT_CUDA_SITE_FWD_REDUCE_CUH
#define WEFT_CUDA_SITE_FWD_REDUCE_CUH

#include "cuda/common/reduce.cuh"
#include "cuda/norm/rmsnorm.cuh"
#include "cuda/site/fwd.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* A lane has four sums of a token, of four or of all tokens of a tile at a time. f16: rows of psi have factors (site/fwd_psi.cuh). */
template <class T, int N, site_kind KIND, int PAIRS> struct site_reduction {
    typedef site_partials<N, KIND, PAIRS> partials;
    static constexpr int fours = site_shape<N, KIND>::fours,
                         each = fours * SITE_TILE > 32 ? SITE_TILE / 2 : SITE_TILE;
    static constexpr int times = SITE_TILE / each;
    static constexpr bool scaled = number<T>::dtype == WEFT_F16;
    int row, four;
    float down[scaled ? 4 : 1];
    site_deal deal[times];
    partials partial;

    __device__ __forceinline__ site_reduction(const site_args &p, const site_block &b)
        : row(b.lane / fours), four(b.lane % fours)
    {
#pragma unroll
        for (int k = 0; k < times; k++) deal[k].begin(p, k * each + row);
        if constexpr (scaled) {
            const int rows = p.phi_rows;
            wait_for_previous();
#pragma unroll
            for (int e = 0; e < 4; e++) down[e] = four * 4 + e < rows ? p.down[b.rank * rows + four * 4 + e] : 1.0f;
        }
    }
    __device__ __forceinline__ uint32_t barrier(const site_block &b) const
    {
        return b.barrier.partial_full + partial.buffer * 8;
    }
    /* Adds the next tile; its partial sums must have arrived. */
    __device__ __forceinline__ void add(const site_args &p, const site_block &b)
    {
        const float4 *const partial_sums = (const float4 *)(b.shared + p.offset.sums) +
                                           partial.buffer * (partials::floats / 4) + (row < each ? b.lane : 0);
        const uint32_t received = shared_address(b.shared + p.offset.received) + (b.rank * SITE_ROW + four * 4) * 4;
        float sum[times][4] = {};
#pragma unroll
        for (int k = 0; k < times; k++)
#pragma unroll
            for (int w = 0; w < site_roles<PAIRS>::mma_warps; w++) {
                const float4 v = partial_sums[w * (partials::each / 4) + k * each * fours];
                sum[k][0] += v.x, sum[k][1] += v.y, sum[k][2] += v.z, sum[k][3] += v.w;
            }
        barrier_arrive(b.barrier.partial_empty + partial.buffer * 8);
        if constexpr (scaled)
#pragma unroll
            for (int k = 0; k < times; k++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[k][e] = sum[k][e] * down[e];
#pragma unroll
        for (int k = 0; k < times; k++) {
            const uint32_t owner = deal[k].owner(p), slot = deal[k].slot;
            if (row < each)
                cluster_send(cluster_address(received + slot * p.cluster * (SITE_ROW * 4), owner), sum[k],
                             cluster_address(b.barrier.sums + slot * 8, owner));
            deal[k].next_tile(p);
        }
        partial.next();
    }
};

/* Sends the norm's factors of tokens that this block owns to all blocks: as many at a time as have arrived and as the warp has room for
 * numbers. The order of a sum is that of warp_sum, whose first steps add zeros where there are few numbers. */
template <int LANES>
static __device__ __forceinline__ void add_squares(const site_args &p, const site_block &b, uint32_t all,
                                                   site_queue &queue)
{
    const int part = b.lane % LANES, ahead = b.lane / LANES, boxes = p.cluster * p.boxes;
    const int many = LANES == 32 ? 1 : queue.arrived<LANES>(p, b.barrier.squares, ahead, queue.k + ahead < all);
    const int slot = queue.slot_of(p, ahead < many ? ahead : 0);
    const float *const from = (const float *)(b.shared + p.offset.received) + slot * p.cluster * SITE_ROW;
    float squares = 0.0f;
    if constexpr (LANES == 32) {
#pragma unroll 1
        for (int box = part; box < boxes; box += 32) squares += from[box];
    } else if (part < boxes) {
        squares = from[part];
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, step);
    const float inverse = inverse_rms(squares, p.channels, p.sub_eps);
    if (part == 0 && ahead < many) tma_expect(b.barrier.squares + slot * 8, (uint32_t)boxes * 4);
    __syncwarp();
    const site_place at(p, b, queue.k + ahead);
    const uint32_t to = shared_address(b.shared + p.offset.inverse) + (at.stage * SITE_TILE + at.row) * 4;
    if (part < p.cluster && ahead < many)
        cluster_send(cluster_address(to, part), inverse, cluster_address(b.barrier.inverse + at.stage * 8, part));
    queue.next(p, many);
}

template <class T, int N, site_kind KIND, int PAIRS>
static __device__ __forceinline__ void reduction_warp(const site_args &p, const site_block &b)
{
    site_reduction<T, N, KIND, PAIRS> sums(p, b);
    site_queue norm;
    const uint32_t all = p.norm ? site_owned(p, b, (int64_t)b.count * SITE_TILE) : 0;
    int added = 0;
#pragma unroll 1
    while (added < b.count || norm.k < all) {
        if (added < b.count && is_over(sums.barrier(b), sums.partial.parity)) {
            sums.add(p, b), added++;
        } else if (norm.k < all && is_over(b.barrier.squares + norm.slot * 8, norm.parity)) {
            if (p.cluster * p.boxes <= 16)
                add_squares<16>(p, b, all, norm);
            else
                add_squares<32>(p, b, all, norm);
        } else {
            __nanosleep(20);
        }
    }
}

#endif
#endif
