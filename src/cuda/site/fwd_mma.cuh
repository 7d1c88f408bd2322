/* SPDX-License-Identifier: Apache-2.0
 *
 * The MMA warps of the fused site kernel: psi y and y^2 on tensor cores. */
#ifndef WEFT_CUDA_SITE_FWD_MMA_CUH
#define WEFT_CUDA_SITE_FWD_MMA_CUH

#include "cuda/site/fwd.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* ---- operands of psi ---------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float2 load_shared2(uint32_t from)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}

/* Two neighbouring columns of psi as operands. In front of an f16 kernel they have been split already (site/fwd_psi.cuh). */
static __device__ __forceinline__ void split_psi(uint32_t &hi, uint32_t &lo, const float2 &v, bf16)
{
    split2(hi, lo, v.x, v.y);
}
static __device__ __forceinline__ void split_psi(uint32_t &hi, uint32_t &lo, const float2 &v, f16)
{
    hi = __byte_perm(__float_as_uint(v.x), __float_as_uint(v.y), 0x5410);
    lo = __byte_perm(__float_as_uint(v.x), __float_as_uint(v.y), 0x7632);
}

/* psi of the 32 columns of a pair of steps, half a unit, as operands of the tensor cores. from: rows of pair 0. turn: 1 for the
 * second step first. */
template <class T, int ROWS, int TILES>
static __device__ __forceinline__ void load_operands(uint4 (&to)[2 * TILES], uint32_t from, int pair, int lane,
                                                     int turn)
{
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        uint2 hi[TILES], lo[TILES]; /* of eight rows; .x: columns 2t, 2t + 1; .y: columns 2t + 8, 2t + 9 */
#pragma unroll
        for (int q = 0; q < TILES; q++) {
            float2 v[2] = {};
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int row = pair * ROWS + g + 8 * q;
                if (ROWS % 8 == 0 || g < ROWS)
                    v[k] =
                        load_shared2(from + tma_piece(row, (4 * s + 2 * k + (t >> 1)) ^ turn << 2) + (t & 1) * 8);
            }
            split_psi(hi[q].x, lo[q].x, v[0], T());
            split_psi(hi[q].y, lo[q].y, v[1], T());
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

/* ---- MMA and partial sums ----------------------------------------------------------------------------------------------- */

/* Accumulators of a tile. APART: hi and lo of rows 0-15 have accumulators of their own, added at the end, so no product depends on
 * the previous one. Needed where an MMA warp is alone on its multiprocessor partition; otherwise there are no registers for it. */
template <int TILES, bool APART> struct site_sums {
    float d[TILES == 3 ? 2 + APART : 1][4] = {}, squares[4] = {}; /* APART: the third is lo of rows 0-15 */
};

static __device__ __forceinline__ void product(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint32_t b0, uint32_t b1, bf16)
{
    mma16(d, a0, a1, a2, a3, b0, b1);
}
static __device__ __forceinline__ void product(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint32_t b0, uint32_t b1, f16)
{
    mma16_f16(d, a0, a1, a2, a3, b0, b1);
}

/* A step: 16 columns. y holds its second half twice, so that it serves both as B and, in eight rows, as its own transpose: the
 * squares are the diagonal of the product. */
template <class T, int TILES, bool APART>
static __device__ __forceinline__ void multiply(site_sums<TILES, APART> &s, const uint4 *a, const uint32_t (&y)[4])
{
    product(s.d[0], a[0].x, a[0].y, a[0].z, a[0].w, y[0], y[1], T());
    if constexpr (TILES == 3) {
        product(s.d[1], a[2].x, a[2].y, a[2].z, a[2].w, y[0], y[1], T());
        product(s.d[2 * APART], a[1].x, a[1].y, a[1].z, a[1].w, y[0], y[1], T());
    }
    product(s.squares, y[0], y[1], y[2], y[3], y[0], y[1], T());
}

static __device__ __forceinline__ void store_shared1(uint32_t to, float v)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

/* Where a lane's partial sums go: [token][row]. D has row g (and g + 8) of tokens 2t, 2t + 1; a lane of the diagonal has a square, in
 * its first element or its second. The compiler must not compute these addresses for every tile, which waits for them at the end of
 * the products. */
template <int N, site_kind KIND> struct site_partial_place {
    typedef site_shape<N, KIND> shape;
    static constexpr int token = shape::fours * 16; /* bytes */
    uint32_t sums, square;                          /* square: 0 where there is none; bit 0: the second element */

    __device__ __forceinline__ site_partial_place(uint32_t to, int lane)
    {
        const int g = lane >> 2, t = lane & 3;
        sums = to + 2 * t * token + g * 4;
        square = t == g >> 1 ? (to + g * token + shape::rows * 4) | (g & 1) : 0;
        asm volatile("" : "+r"(sums), "+r"(square));
    }
    /* room: bytes to the buffer. */
    template <bool APART>
    __device__ __forceinline__ void store(const site_sums<shape::tiles, APART> &s, uint32_t room, int lane) const
    {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const uint32_t row = sums + room + e * token;
            if constexpr (shape::tiles == 3) {
                store_shared1(row, APART ? s.d[0][e] + s.d[2 * APART][e] : s.d[0][e]);
                store_shared1(row + 32, APART ? s.d[0][2 + e] + s.d[2 * APART][2 + e] : s.d[0][2 + e]);
                store_shared1(row + 64, s.d[1][e] + s.d[1][2 + e]);
            } else {
                if ((lane >> 2) < shape::rows) store_shared1(row, s.d[0][e] + s.d[0][2 + e]);
            }
        }
        if (square) store_shared1((square & ~1u) + room, square & 1 ? s.squares[1] : s.squares[0]);
    }
};

/* psi of an MMA warp, pairs warp, warp + P, ...: the operands in registers and those in shared memory. Where the number of pairs is
 * known, the two kinds alternate, so that a shared-memory read overlaps the tensor cores. */
template <class E, int N, site_kind KIND, int PAIRS> struct site_psi {
    typedef site_shape<N, KIND> shape;
    typedef site_roles<PAIRS> cast;
    static constexpr int P = cast::mma_warps, T = shape::tiles, most = site_most<PAIRS>(), all = most * 2 * T;
    static constexpr int count = all < cast::kept ? all : cast::kept, spare = all - count;
    uint4 kept[count];
    const uint4 *rest;

    /* Operands in shared memory before operand k. */
    static __host__ __device__ constexpr int before(int k)
    {
        return PAIRS ? k * spare / all : k > count ? k - count : 0;
    }
    static __host__ __device__ constexpr bool in_registers(int k)
    {
        return before(k + 1) == before(k);
    }
    static __host__ __device__ constexpr int place(int k) /* index within its kind */
    {
        return in_registers(k) ? k - before(k) : before(k);
    }

    /* Converts psi as it arrives. */
    __device__ __forceinline__ site_psi(const site_args &p, const site_block &b, int warp)
    {
        rest = (const uint4 *)(b.shared + p.offset.psi) + warp * 32 + b.lane;
        if constexpr (site_once<N, KIND, PAIRS>())
            load_at_once(p, b, warp);
        else
            load_in_parts(p, b, warp);
    }
    /* Converts pair k of the loaded ones in place. Neighbouring rows process the two steps in opposite order to avoid bank
     * conflicts. */
    __device__ __forceinline__ static void make(uint32_t from, int k, int lane)
    {
        uint4 a[2 * T];
        const int turn = lane >> 2 & 1;
        const uint32_t to = from + k * shape::psi_pair + lane * 16;
        load_operands<E, shape::rows, T>(a, from, k, lane, turn);
        __syncwarp();
#pragma unroll
        for (int e = 0; e < T; e++) store_shared4(to + (turn * T + e) * 512, a[e]);
#pragma unroll
        for (int e = 0; e < T; e++) store_shared4(to + ((turn ^ 1) * T + e) * 512, a[T + e]);
    }
    __device__ __forceinline__ static void together()
    {
        asm volatile("bar.sync 1, %0;" ::"n"(P * 32) : "memory");
    }
    /* Converts box after box as they arrive, in a rolled loop: unrolled it is a fifth of the kernel's instructions, which are fetched
     * from memory as well. Operands for shared memory are held back until all warps have read theirs: the buffers overlap. */
    __device__ __forceinline__ void load_at_once(const site_args &p, const site_block &b, int warp)
    {
        const uint32_t from = shared_address(b.shared) + p.offset.first_psi;
        const uint32_t mine = from + warp * shape::psi_pair + b.lane * 16;
        uint4 *const more = (uint4 *)rest, aside[spare > 0 ? spare : 1];
#pragma unroll 1
        for (int k = warp; k < PAIRS * P; k += P) {
            barrier_wait(b.barrier.psi_full + k / (2 * N) * 8, 0);
            make(from, k, b.lane);
        }
#pragma unroll
        for (int k = 0; k < all; k++) {
            const uint4 a = load_shared4(mine + k / (2 * T) * (P * shape::psi_pair) +
                                         k % (2 * T) * 512); /* as make() stored them */
            if (in_registers(k))
                kept[in_registers(k) ? place(k) : 0] = a;
            else
                aside[in_registers(k) ? 0 : place(k)] = a;
        }
        if constexpr (spare > 0) {
            together();
#pragma unroll
            for (int k = 0; k < spare; k++) more[k * (P * 32)] = aside[k];
        }
        barrier_arrive(b.barrier.psi_empty);
    }
    /* psi_boxes boxes at a time. */
    __device__ __forceinline__ void load_in_parts(const site_args &p, const site_block &b, int warp)
    {
        const uint32_t from = shared_address(b.shared) + p.offset.first_psi;
        const int pairs = PAIRS ? PAIRS : p.pairs, loaded = p.psi_boxes * 2 * N;
        uint4 *const more = (uint4 *)rest;
        uint32_t parity = 0;
#pragma unroll
        for (int k = 0; k < count; k++) kept[k] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
        for (int first = 0; first < p.boxes; first += p.psi_boxes, parity ^= 1) {
            const int mine = warp - first * 2 * N;
            barrier_wait(b.barrier.psi_full, parity);
            if constexpr (shape::in_place)
#pragma unroll 1
                for (int k = mine; k < mine + pairs * P; k += P)
                    if (k >= 0 && k < loaded) make(from, k, b.lane);
#pragma unroll
            for (int j = 0; j < most; j++) {
                uint4 a[2 * T];
                const int k0 = mine + j * P;
                if (!PAIRS && j >= pairs) continue;
                if (k0 < 0 || k0 >= loaded) continue;
                if constexpr (shape::in_place)
#pragma unroll
                    for (int e = 0; e < 2 * T; e++)
                        a[e] = load_shared4(from + k0 * shape::psi_pair + e * 512 + b.lane * 16);
                else
                    load_operands<E, shape::rows, T>(a, from, k0, b.lane, 0);
#pragma unroll
                for (int e = 0; e < 2 * T; e++) {
                    const int k = j * 2 * T + e;
                    if (in_registers(k))
                        kept[in_registers(k) ? place(k) : 0] = a[e];
                    else
                        more[place(k) * (P * 32)] = a[e];
                }
            }
            barrier_arrive(b.barrier.psi_empty);
        }
    }
    /* Operands of step s. */
    __device__ __forceinline__ void step(uint4 (&a)[T], int s) const
    {
#pragma unroll
        for (int q = 0; q < T; q++) {
            const int k = s * T + q;
            a[q] = in_registers(k) ? kept[in_registers(k) ? place(k) : 0] : rest[place(k) * (P * 32)];
        }
    }
};

template <class E, int N, site_kind KIND, int PAIRS>
static __device__ __forceinline__ void mma_warp(const site_args &p, const site_block &b, int warp)
{
    typedef site_partials<N, KIND, PAIRS> partials;
    constexpr int T = site_shape<N, KIND>::tiles, P = site_roles<PAIRS>::mma_warps;
    constexpr bool APART = site_roles<PAIRS>::wide;
    typedef site_boxes<N, PAIRS> boxes;
    const site_psi<E, N, KIND, PAIRS> psi(p, b, warp);
    const uint32_t tiles = shared_address(b.shared + p.offset.tiles);
    /* A pair is half (warp & 1) of a unit, pair >> 1; a step is two of its pieces, the second one three times. */
    const uint32_t piece =
        (warp >> 1) * BOX_BYTES + (b.lane & 7) * TMA_ROW + (((b.lane > 7) ^ (b.lane & 7) ^ (warp & 1) << 2) << 4);
    const site_partial_place<N, KIND> place(shared_address(b.shared + p.offset.sums) + warp * partials::each * 4,
                                            b.lane);
    partials partial;
    ring_cursor c;
    cluster_wait_for_all();
#pragma unroll 1
    for (int i = 0; i < b.count; i++, c.next(p.stages), partial.next()) {
        /* MMA */
        site_sums<T, APART> s;
        const uint32_t from = tiles + c.stage * p.offset.stage + piece;
        barrier_wait((KIND == SITE_BOUNDARY ? b.barrier.mixed : b.barrier.full) + c.stage * 8, c.parity);
#pragma unroll
        for (int j = 0; j < site_most<PAIRS>(); j++) {
            if (!PAIRS && j >= p.pairs) break;
            if (KIND == SITE_BOUNDARY && boxes::split && j == boxes::first_pairs)
                barrier_wait(b.barrier.mixed_remaining + c.stage * 8, c.parity);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t y[4];
                uint4 a[T];
                ldmatrix4(y, (from ^ k << 5) + j * (P / 2 * BOX_BYTES));
                psi.step(a, j * 2 + k);
                multiply<E, T, APART>(s, a, y);
            }
        }
        /* Epilogue: partial sums */
        barrier_wait(b.barrier.partial_empty + partial.buffer * 8, partial.parity ^ 1);
        place.store(s, partial.buffer * (partials::floats * 4), b.lane);
        barrier_arrive(b.barrier.partial_full + partial.buffer * 8);
    }
}

#endif
#endif
