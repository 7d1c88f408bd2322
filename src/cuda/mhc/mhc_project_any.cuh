/* SPDX-License-Identifier: Apache-2.0
 *
 * A block's sums of the projection in plain fp32 [M1]: eight tokens times eight rows over all columns. The order of a sum
 * depends on the number of columns alone, so every kernel that calls this has the same bits. */
#ifndef WEFT_CUDA_MHC_PROJECT_ANY_CUH
#define WEFT_CUDA_MHC_PROJECT_ANY_CUH

#include "cuda/common/reduce.cuh"
#include "cuda/mhc/mhc_project.cuh"

enum { ANY_THREADS = 256, ANY_TOKENS = 8, ANY_ROWS = 8 };

/* What is multiplied: x of any dtype and strides, psi. */
struct any_operands {
    view x;
    weights w;
    columns k;
    int64_t tokens;
};

/* x, phi and the norm weight are fp32 and can be read in pairs of channels. */
static inline bool any_in_pairs(const weft_tensor *x, const weft_tensor *phi, const weft_tensor *norm_weight)
{
    const weft_tensor *const all[] = {x, phi, norm_weight};
    for (int k = 0; k < 3; k++) {
        const weft_tensor *t = all[k];
        const int last = t->ndim - 1;
        if (!weft_has(t)) continue;
        if (t->dtype != WEFT_F32 || t->stride[last] != 1 || t->shape[last] % 2 || (uintptr_t)t->data % 8)
            return false;
        for (int i = 0; i < last; i++)
            if (t->stride[i] % 2) return false;
    }
    return true;
}

static __device__ __forceinline__ void load_pair(float &a, float &b, const float *from, bool wanted)
{
    float2 v = make_float2(0.0f, 0.0f);
    if (wanted) v = __ldg((const float2 *)from);
    a = v.x, b = v.y;
}

/* What a block sums: `mine` tokens from token0 on times `rows` rows from row0 on. */
struct any_tile {
    int64_t token0;
    int mine, row0, rows;
};

/* x and psi in two columns; zeros after the last token and row. */
static __device__ __forceinline__ void any_load(float (&x)[2][ANY_TOKENS], float (&psi)[2][ANY_ROWS],
                                                const any_operands &p, const any_tile &t, uint32_t column)
{
    const view &phi = p.w.phi, &norm = p.w.norm;
    const uint32_t stream = column / p.k.channels, channel = column % p.k.channels;
    const float *const weight = (const float *)phi.data + t.row0 * phi.stride[0] + stream * phi.stride[1] + channel;
    const float *const from = (const float *)p.x.data + t.token0 * p.x.stride[0] + stream * p.x.stride[1] + channel;
#pragma unroll
    for (int r = 0; r < ANY_ROWS; r++) load_pair(psi[0][r], psi[1][r], weight + r * phi.stride[0], r < t.rows);
#pragma unroll
    for (int m = 0; m < ANY_TOKENS; m++) load_pair(x[0][m], x[1][m], from + m * p.x.stride[0], m < t.mine);
    if (!has(norm)) return;
    float scale[2];
    load_pair(scale[0], scale[1], (const float *)norm.data + stream * norm.stride[0] + channel, true);
#pragma unroll
    for (int r = 0; r < ANY_ROWS; r++) psi[0][r] = psi[0][r] * scale[0], psi[1][r] = psi[1][r] * scale[1];
}

/* The same of one column, any dtype and strides. */
static __device__ __forceinline__ void any_load(float (&x)[ANY_TOKENS], float (&psi)[ANY_ROWS],
                                                const any_operands &p, const any_tile &t, uint32_t column)
{
    const uint32_t stream = column / p.k.channels, channel = column % p.k.channels;
    const int64_t at = t.token0 * p.x.stride[0] + stream * p.x.stride[1] + channel * p.x.stride[2];
#pragma unroll
    for (int r = 0; r < ANY_ROWS; r++) psi[r] = r < t.rows ? psi_at(p.w, t.row0 + r, stream, channel) : 0.0f;
#pragma unroll
    for (int m = 0; m < ANY_TOKENS; m++) x[m] = m < t.mine ? get(p.x, at + m * p.x.stride[0]) : 0.0f;
}

struct any_totals {
    float acc[ANY_TOKENS][ANY_ROWS] = {}, sq[ANY_TOKENS] = {};
    __device__ __forceinline__ void add(const float (&x)[ANY_TOKENS], const float (&psi)[ANY_ROWS])
    {
#pragma unroll
        for (int m = 0; m < ANY_TOKENS; m++) {
            sq[m] = fmaf(x[m], x[m], sq[m]);
#pragma unroll
            for (int r = 0; r < ANY_ROWS; r++) acc[m][r] = fmaf(x[m], psi[r], acc[m][r]);
        }
    }
};

/* A register tile, so that a load serves eight products. A thread takes two neighbouring columns at a time, with those of the
 * other threads between them and its next ones. In PAIRS all their loads are in flight at once; a dtype known at run time
 * is a branch in front of every load, which serialises the loads. The rows of the first tile carry the squares with
 * them.
 *
 * room: ANY_THREADS floats of shared memory. give(token, row, sum) on one thread each, with row == w.rows for the squares; all
 * threads come back behind a barrier. */
template <bool PAIRS, class Give>
static __device__ __forceinline__ void any_sums(const any_operands &p, int64_t token0, int row0, float *room,
                                                const Give &give)
{
    const any_tile tile = {token0, (int)(p.tokens - token0 < ANY_TOKENS ? p.tokens - token0 : ANY_TOKENS), row0,
                           p.w.rows - row0 < ANY_ROWS ? p.w.rows - row0 : ANY_ROWS};
    any_totals total;
#pragma unroll 1
    for (uint32_t first = 2 * threadIdx.x; first < p.k.count; first += 2 * ANY_THREADS) {
        if constexpr (PAIRS) {
            float x[2][ANY_TOKENS], psi[2][ANY_ROWS];
            any_load(x, psi, p, tile, first);
            total.add(x[0], psi[0]);
            total.add(x[1], psi[1]);
        } else {
#pragma unroll 1
            for (uint32_t column = first; column < first + 2 && column < p.k.count; column++) {
                float x[ANY_TOKENS], psi[ANY_ROWS];
                any_load(x, psi, p, tile, column);
                total.add(x, psi);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < ANY_TOKENS; m += 4) { /* 32 sums at a time */
        float part[32];
#pragma unroll
        for (int e = 0; e < 32; e++) part[e] = total.acc[m + e / ANY_ROWS][e % ANY_ROWS];
        block_sums<32>(part, room, ANY_THREADS / 32);
        if (threadIdx.x < 32) {
            const int64_t token = token0 + m + threadIdx.x / ANY_ROWS;
            const int row = row0 + threadIdx.x % ANY_ROWS;
            if (token < p.tokens && row < p.w.rows) give(token, row, room[threadIdx.x]);
        }
        __syncthreads();
    }
    if (row0 > 0) return;
    block_sums<ANY_TOKENS>(total.sq, room, ANY_THREADS / 32);
    if (threadIdx.x < ANY_TOKENS && token0 + threadIdx.x < p.tokens)
        give(token0 + threadIdx.x, p.w.rows, room[threadIdx.x]);
    __syncthreads();
}

#endif
