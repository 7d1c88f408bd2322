/* SPDX-License-Identifier: Apache-2.0
 *
 * The adder of a site in one launch: sums of a tile, from the projectors to the tokens' owners; squares of the tokens that
 * this block owns, from all blocks and back.
 */
#ifndef WEFT_CUDA_SINGLE_PASS_ADD_CUH
#define WEFT_CUDA_SINGLE_PASS_ADD_CUH

#include "cuda/common/reduce.cuh"
#include "cuda/norm/rmsnorm.cuh"
#include "cuda/site/fwd.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* A lane has four sums of a token, of four or of all tokens of a tile at a time. */
template <int N, site_kind KIND, int PAIRS> struct site_adder {
    typedef site_rooms<N, KIND, PAIRS> rooms;
    static constexpr int fours = site_shape<N, KIND>::fours,
                         each = fours * SITE_TILE > 32 ? SITE_TILE / 2 : SITE_TILE;
    static constexpr int times = SITE_TILE / each;
    int row, four;
    site_deal deal[times];
    rooms room;

    __device__ __forceinline__ site_adder(const site_args &p, const site_block &b)
        : row(b.lane / fours), four(b.lane % fours)
    {
#pragma unroll
        for (int k = 0; k < times; k++) deal[k].begin(p, k * each + row);
    }
    __device__ __forceinline__ uint32_t barrier(const site_block &b) const
    {
        return b.at.left_full + room.at * 8;
    }
    /* The next tile, whose sums are there. */
    __device__ __forceinline__ void add(const site_args &p, const site_block &b)
    {
        const float4 *const left =
            (const float4 *)(b.shared + p.at.sums) + room.at * (rooms::floats / 4) + (row < each ? b.lane : 0);
        const uint32_t received = shared_address(b.shared + p.at.received) + (b.rank * SITE_ROW + four * 4) * 4;
        float sum[times][4] = {};
#pragma unroll
        for (int k = 0; k < times; k++)
#pragma unroll
            for (int w = 0; w < site_cast<PAIRS>::projectors; w++) {
                const float4 v = left[w * (rooms::each / 4) + k * each * fours];
                sum[k][0] += v.x, sum[k][1] += v.y, sum[k][2] += v.z, sum[k][3] += v.w;
            }
        barrier_arrive(b.at.left_empty + room.at * 8);
#pragma unroll
        for (int k = 0; k < times; k++) {
            const uint32_t owner = deal[k].owner(p), slot = deal[k].slot;
            if (row < each)
                cluster_send(cluster_address(received + slot * p.cluster * (SITE_ROW * 4), owner), sum[k],
                             cluster_address(b.at.sums + slot * 8, owner));
            deal[k].next_tile(p);
        }
        room.next();
    }
};

/* The factor of the norm of a token that this block owns, to all blocks. */
static __device__ __forceinline__ void add_squares(const site_args &p, const site_block &b, const site_owned &at)
{
    const float *const from = (const float *)(b.shared + p.at.received) + at.slot * p.cluster * SITE_ROW;
    const uint32_t to = shared_address(b.shared + p.at.inverse) + (at.stage * SITE_TILE + at.row) * 4;
    const int boxes = p.cluster * p.boxes;
    float squares = 0.0f;
#pragma unroll 1
    for (int box = b.lane; box < boxes; box += 32) squares += from[box];
    squares = warp_sum(squares);
    const float inverse = inverse_rms(squares, p.channels, p.sub_eps);
    if (b.lane == 0) tma_expect(b.at.squares + at.slot * 8, (uint32_t)boxes * 4);
    __syncwarp();
    if (b.lane < p.cluster)
        cluster_send(cluster_address(to, b.lane), inverse, cluster_address(b.at.inverse + at.stage * 8, b.lane));
}

template <int N, site_kind KIND, int PAIRS>
static __device__ __forceinline__ void adder(const site_args &p, const site_block &b)
{
    site_adder<N, KIND, PAIRS> sums(p, b);
    site_owned norm(p, b);
    int added = 0;
    if (!p.norm) norm.tile = b.count;
#pragma unroll 1
    while (added < b.count || norm.tile < (uint32_t)b.count) {
        if (added < b.count && is_over(sums.barrier(b), sums.room.parity))
            sums.add(p, b), added++;
        else if (norm.tile < (uint32_t)b.count && is_over(b.at.squares + norm.slot * 8, norm.parity))
            add_squares(p, b, norm), norm.next(p);
        else
            __nanosleep(20);
    }
}

#endif
#endif
