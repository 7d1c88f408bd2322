/* SPDX-License-Identifier: Apache-2.0
 *
 * The load/store warps of the fused backward kernel [M11]: one producer warp loads tiles, three store warps write the gradients
 * and add the sums over channels of the compute warps, site/bwd_compute.cuh. */
#ifndef WEFT_CUDA_SITE_BWD_LOAD_STORE_CUH
#define WEFT_CUDA_SITE_BWD_LOAD_STORE_CUH

#include "cuda/site/bwd_pass.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Where boxes of a tensor of streams begin, (C,n): boxes of 64 columns are a dimension of its map, or, where the last one would not
 * be whole, columns are. */
struct stream_boxes {
    int column, box;
    __device__ __forceinline__ stream_boxes(const fused_args &p, int first)
        : column(p.boxes > 1 ? 0 : first * TMA_CHANNELS), box(p.boxes > 1 ? first : 0)
    {
    }
};

/* Producer: one thread loads the tiles. */
template <int N, stream_layout L, bool FULL_, site_kind KIND>
static __device__ __forceinline__ void load_tiles(const fused_args &p, const tiles_of_block &b)
{
    typedef sizes<N, FULL_, KIND> S;
    constexpr bool POST = KIND == SITE_BOUNDARY;
    const uint32_t tiles = shared_address(b.shared), records = tiles + S::records;
    auto load_record = [&](const tile_walk &i) {
        tma_load_bytes(records + i.ring.stage * S::record,
                       p.records + (int64_t)i.tile * (BOUNDARY_TILE * boundary_record<N, KIND>::pieces), S::record,
                       b.barrier.full + i.ring.stage * 8);
    };
    auto load_tile = [&](const tile_walk &i) {
        const uint32_t barrier = b.barrier.full + i.ring.stage * 8;
        const int token = i.tile * BOUNDARY_TILE;
        tma_expect(barrier, S::record + 2 * S::box + (POST ? 2 * S::row_box : 0) + (p.has_d_y ? 2 * S::box : 0) +
                                (p.has_row ? 2 * S::row_box : 0));
#pragma unroll 1
        for (int k = 0; k < 2; k++) {
            const uint32_t to = tiles + i.ring.stage * S::tile + k * S::row_box;
            const int c = i.slice * BOUNDARY_SLICE + k * TMA_CHANNELS;
            if (L == LAYOUT_NC) tma_load(to + S::x + k * (S::box - S::row_box), &p.x, c, token, barrier);
            if (POST) tma_load(to + S::f, &p.f, c, token, barrier);
            if (L == LAYOUT_NC && p.has_d_y)
                tma_load(to + S::d_y + k * (S::box - S::row_box), &p.d_y, c, token, barrier);
            if (p.has_row) tma_load(to + S::row, &p.row, c, token, barrier);
        }
        if (L == LAYOUT_CN) {
#pragma unroll 1
            for (int k = 0; k < 2 * N; k += p.boxes) {
                const uint32_t to = tiles + i.ring.stage * S::tile + k * S::row_box;
                const stream_boxes at(p, i.slice * (2 * N) + k);
                tma_load4(to + S::x, &p.x, at.column, token, 0, at.box, barrier);
                if (p.has_d_y) tma_load4(to + S::d_y, &p.d_y, at.column, token, 0, at.box, barrier);
            }
        }
    };
    /* Prefetches psi of the next slice into the L2, where it is aligned. */
    const bool whole = p.psi_stride % 4 == 0 && (uintptr_t)p.psi % 16 == 0;
    auto prefetch_psi = [&](int slice) {
        const int c = slice * BOUNDARY_SLICE, bytes = min(p.channels - c, (int)BOUNDARY_SLICE) * 4;
#pragma unroll 1 /* unrolled this is 1400 instructions, executed once and fetched from memory */
        for (int k = 0; whole && k < p.phi_rows * N; k++)
            if (L == LAYOUT_CN)
                tma_prefetch_bytes(p.psi + k / N * p.psi_stride + c * N + k % N * (bytes / 4), bytes);
            else
                tma_prefetch_bytes(p.psi + k / N * p.psi_stride + k % N * p.channels + c, bytes);
    };
    /* Start-up order: one tile, the record of it, another tile, then nothing before psi has arrived. Loads complete roughly in issue
     * order, and no tile can be processed without psi. */
    int begun = 0;
#pragma unroll 1
    for (tile_walk i(p.plan); i.remaining > 0; i.next<S::stages>()) {
        barrier_wait(b.barrier.free + i.ring.stage * 8, i.ring.parity ^ 1);
        if (begun == 2) barrier_wait(b.barrier.psi, 0);
        load_tile(i);
        if (begun == 0) wait_for_previous();
        if (begun < 3) begun++;
        load_record(i);
        if (i.remaining == 1 && !i.is_last()) prefetch_psi(i.slice + 1);
    }
}

/* Store warps, `warp` from 0: store the gradients of a tile and add the sums of the compute warps in warp order. */
template <int N, stream_layout L, bool FULL_, bool SHIFTED, site_kind KIND>
static __device__ __forceinline__ void store_tiles(const fused_args &p, const tiles_of_block &b, int warp)
{
    typedef sizes<N, FULL_, KIND> S;
    typedef sum_room<N, L, SHIFTED, KIND> room;
    typedef lane_place<N, L> P;
    constexpr bool POST = KIND == SITE_BOUNDARY;
    /* A lane adds four of a token's sums. */
    constexpr int EACH = room::half ? (room::half + 3) / 4 : 1, PIECES = BOUNDARY_TILE * 2 * EACH,
                  ITEMS = BOUNDARY_TILE * room::count / 2;
    static_assert(PIECES <= (LOAD_STORE_WARPS - 1) * 32, "a piece for each lane");
    const int lane = threadIdx.x & 31, piece = warp * 32 + lane;
    const int token = piece / (2 * EACH), part = piece / EACH & 1, k = piece % EACH * 4;
    const bool stores = warp == 0 && lane == 0 && (p.store_d_x || p.store_d_f);
    float2 *const all_sums = (float2 *)p.sums + (token * room::count + part * room::half + k) / 2;
    for (tile_walk i(p.plan); i.remaining > 0; i.next<S::stages>()) {
        char *const tile = b.shared + i.ring.stage * S::tile;
        barrier_wait(b.barrier.done + i.ring.stage * 8, i.ring.parity);
        if (stores) {
            const uint32_t from = shared_address(tile);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int c = i.slice * BOUNDARY_SLICE + h * TMA_CHANNELS, first = i.tile * BOUNDARY_TILE;
                if (L == LAYOUT_NC && p.store_d_x) tma_store(&p.d_x, from + S::d_y + h * S::box, c, first);
                if (POST && p.store_d_f) tma_store(&p.d_f, from + S::f + h * S::row_box, c, first);
            }
            if (L == LAYOUT_CN && p.store_d_x) {
#pragma unroll 1
                for (int box = 0; box < 2 * N; box += p.boxes) {
                    const stream_boxes at(p, i.slice * (2 * N) + box);
                    tma_store4(&p.d_x, from + S::d_y + box * S::row_box, at.column, i.tile * BOUNDARY_TILE, 0,
                               at.box);
                }
            }
            tma_commit();
        }
        __syncwarp();
        if (room::count && p.sums && piece < PIECES) {
            const uint32_t from = S::x + P::piece(0, k >> 2, token, part);
            float4 total = *(const float4 *)(tile + from);
#pragma unroll
            for (int w = 1; w < COMPUTE_WARPS; w++) {
                const float4 v = *(const float4 *)(tile + P::of_warp(from, w));
                total.x = total.x + v.x, total.y = total.y + v.y, total.z = total.z + v.z, total.w = total.w + v.w;
            }
            if (token & 8) total = make_float4(total.z, total.w, total.x, total.y);
            float2 *const sums = all_sums + (i.slice * p.plan.tiles + i.tile) * ITEMS;
            sums[0] = make_float2(total.x, total.y);
            if (k + 2 < room::half) sums[1] = make_float2(total.z, total.w);
        }
        if (stores) tma_wait<false>();
        __syncwarp();
        if (lane == 0) barrier_arrive(b.barrier.free + i.ring.stage * 8);
    }
    if (stores) tma_wait<true>();
}

#endif

#endif
