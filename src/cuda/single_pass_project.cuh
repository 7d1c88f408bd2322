/* SPDX-License-Identifier: Apache-2.0
 *
 * The projectors of a site in one launch: psi y and y^2 on tensor cores, and sums to the owners of the tokens.
 */
#ifndef WEFT_CUDA_SINGLE_PASS_PROJECT_CUH
#define WEFT_CUDA_SINGLE_PASS_PROJECT_CUH

#include "cuda/single_pass.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* ---- projectors: psi ---------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float2 take_two(uint32_t from)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}

/* psi for the 32 columns of a pair of steps, which are a box of 32 channels of one stream, as operands of the tensor cores.
 * from: rows of the stream in that box; first: the first one's number in the box. */
template <int ROWS, int TILES>
static __device__ __forceinline__ void take_psi(uint4 (&to)[2 * TILES], uint32_t from, int first, int lane)
{
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        uint2 hi[TILES], lo[TILES]; /* of eight rows; .x: columns 2t, 2t + 1; .y: eight behind these */
#pragma unroll
        for (int q = 0; q < TILES; q++) {
            float2 v[2] = {};
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int row = first + g + 8 * q;
                if (ROWS % 8 == 0 || g < ROWS)
                    v[k] = take_two(from + tma_piece(row, 4 * s + 2 * k + (t >> 1)) + (t & 1) * 8);
            }
            split2(hi[q].x, lo[q].x, v[0].x, v[0].y);
            split2(hi[q].y, lo[q].y, v[1].x, v[1].y);
        }
        uint4 *const out = to + s * TILES;
        if constexpr (TILES == 3) {
            out[0] = make_uint4(hi[0].x, hi[1].x, hi[0].y, hi[1].y);
            out[1] = make_uint4(lo[0].x, lo[1].x, lo[0].y, lo[1].y);
            out[2] = make_uint4(hi[2].x, lo[2].x, hi[2].y, lo[2].y);
        } else {
            out[0] = make_uint4(hi[0].x, lo[0].x, hi[0].y, lo[0].y);
        }
    }
}

/* ---- projectors --------------------------------------------------------------------------------------------------------- */

/* What a warp sums of a tile. */
template <int TILES> struct site_sums {
    float d[TILES == 3 ? 2 : 1][4] = {}, squares[4] = {};
};

template <int TILES>
static __device__ __forceinline__ void multiply(site_sums<TILES> &s, const uint4 *a, uint32_t b0, uint32_t b1)
{
    mma16(s.d[0], a[0].x, a[0].y, a[0].z, a[0].w, b0, b1);
    if constexpr (TILES == 3) {
        mma16(s.d[1], a[2].x, a[2].y, a[2].z, a[2].w, b0, b1);
        mma16(s.d[0], a[1].x, a[1].y, a[1].z, a[1].w, b0, b1);
    }
    mma16(s.squares, b0, 0, b1, 0, b0, b1); /* the operand is its own transpose: squares are the diagonal */
}

/* To [token][row]. D has row g (and g + 8) of tokens 2t, 2t + 1. */
template <int N, site_kind KIND>
static __device__ __forceinline__ void leave_sums(float *to, const site_sums<site_shape<N, KIND>::tiles> &s,
                                                  int lane)
{
    typedef site_shape<N, KIND> shape;
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float *const row = to + (2 * t + e) * shape::width;
        if constexpr (shape::tiles == 3) {
            row[g] = s.d[0][e];
            row[g + 8] = s.d[0][2 + e];
            row[g + 16] = s.d[1][e] + s.d[1][2 + e];
        } else {
            if (g < shape::rows) row[g] = s.d[0][e] + s.d[0][2 + e];
        }
    }
    if (t == g >> 1) to[g * shape::width + shape::rows] = g & 1 ? s.squares[1] : s.squares[0];
}

static __device__ __forceinline__ void projectors_sync()
{
    asm volatile("bar.sync 1, %0;" ::"n"(PROJECTORS * 32) : "memory");
}

/* psi of a warp: what it keeps in registers and what it reads from shared memory. */
template <int N, site_kind KIND, int PAIRS> struct site_psi {
    typedef site_shape<N, KIND> shape;
    static constexpr int T = shape::tiles, all = PAIRS * 2 * T, count = all < SITE_KEPT ? all : SITE_KEPT;
    uint4 kept[count];
    const uint4 *rest;

    /* Takes what the bringer brings, some boxes at a time. */
    __device__ __forceinline__ site_psi(const site_args &p, const site_block &b, int warp)
    {
        uint4 *const more = (uint4 *)(b.shared + p.at.psi) + warp * 32 + b.lane;
        const uint32_t from = shared_address(b.shared) + p.at.first_psi;
        uint32_t parity = 0;
        rest = more;
#pragma unroll
        for (int k = 0; k < count; k++) kept[k] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
        for (int first = 0; first < p.boxes; first += p.psi_boxes, parity ^= 1) {
            barrier_wait(b.at.psi_full, parity);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                const int pair = warp * p.pairs + j, box = (pair >> 1) / N, stream = (pair >> 1) % N;
                uint4 a[2 * T];
                if (PAIRS != SITE_FEW_PAIRS && j >= p.pairs) continue;
                if (box < first || box >= first + p.psi_boxes) continue;
                take_psi<shape::rows, T>(a, from + (2 * (box - first) + (pair & 1)) * shape::psi_place,
                                         stream * shape::rows, b.lane);
#pragma unroll
                for (int e = 0; e < 2 * T; e++) {
                    const int k = j * 2 * T + e;
                    if (k < count)
                        kept[k < count ? k : 0] = a[e];
                    else
                        more[(k - count) * (PROJECTORS * 32)] = a[e];
                }
            }
            barrier_arrive(b.at.psi_empty);
        }
    }
    /* Operands of step s. */
    __device__ __forceinline__ void step(uint4 (&a)[T], int s) const
    {
#pragma unroll
        for (int q = 0; q < T; q++) {
            const int k = s * T + q;
            a[q] = k < count ? kept[k < count ? k : 0] : rest[(k - count) * (PROJECTORS * 32)];
        }
    }
};

template <int N, site_kind KIND, int PAIRS>
static __device__ __forceinline__ void projector(const site_args &p, const site_block &b, int warp)
{
    typedef site_shape<N, KIND> shape;
    constexpr int T = shape::tiles, ROOM = SITE_TILE * shape::width;
    const site_psi<N, KIND, PAIRS> psi(p, b, warp);
    const int first = warp * p.pairs;
    const uint32_t tiles = shared_address(b.shared);
    const uint32_t received = shared_address(b.shared + p.at.received) + (b.rank * SITE_ROW + b.lane) * 4;
    /* Pair j of this warp is half (pair & 1) of a box of one stream, pair >> 1: bit 6 of where its pieces lie. */
    const uint32_t piece = (b.lane & 7) * TMA_ROW + (((b.lane >> 3) ^ (b.lane & 7)) << 4);
    float *const room = (float *)(b.shared + p.at.sums);
    site_deal deal(p, warp);
    site_cursor c;
    cluster_wait_for_all();
#pragma unroll 1
    for (int i = 0; i < b.count; i++, c.next(p.stages), deal.next_tile(p)) {
        site_sums<T> s;
        const uint32_t from = tiles + c.stage * p.at.stage + piece;
        barrier_wait((KIND == SITE_BOUNDARY ? b.at.mixed : b.at.full) + c.stage * 8, c.parity);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            uint32_t y[4];
            if (PAIRS > SITE_FEW_PAIRS && j >= p.pairs) break;
            ldmatrix4(y, (from + ((first + j) >> 1) * BOX_BYTES) ^ (((first + j) & 1) << 6));
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint4 a[T];
                psi.step(a, j * 2 + k);
                multiply<T>(s, a, y[2 * k], y[2 * k + 1]);
            }
        }
        /* Two rooms in turn, or one and another wait: others may still add what lies there. */
        float *const sums = room + (PAIRS == SITE_FEW_PAIRS && (i & 1) ? PROJECTORS * ROOM : 0);
        leave_sums<N, KIND>(sums + warp * ROOM, s, b.lane);
        projectors_sync();
        if (b.lane < shape::width) {
            const uint32_t owner = deal.owner(p);
            const float *const all = sums + warp * shape::width + b.lane;
            float v = 0.0f;
#pragma unroll
            for (int w = 0; w < PROJECTORS; w++) v += all[w * ROOM];
            cluster_send(cluster_address(received + deal.slot * p.cluster * (SITE_ROW * 4), owner), v,
                         cluster_address(b.at.sums + deal.slot * 8, owner));
        }
        if (PAIRS != SITE_FEW_PAIRS) projectors_sync();
    }
}

#endif
#endif
