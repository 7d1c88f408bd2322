/* SPDX-License-Identifier: Apache-2.0
 *
 * What a warp of the projection's forward multiplies and sums [M1]: steps of 16 columns on tensor cores, leaves, the tree
 * above them, and where a token's sums go. Its kernels differ in how x and psi come to this. */
#ifndef WEFT_CUDA_MHC_PROJECT_SUMS_CUH
#define WEFT_CUDA_MHC_PROJECT_SUMS_CUH

#include "cuda/mhc/mhc_project.cuh"

struct project_args {
    const void *x;
    const float *psi;    /* [rows], psi_stride apart */
    const uint4 *packed; /* the same split, or NULL */
    float *partial;      /* [splits][tokens][rows + 1], or NULL: straight to h and ms */
    view h, ms;
    int64_t tokens, x_stride, psi_stride, columns;
    int64_t units; /* of a tile of tokens and a split */
    int32_t rows, splits;
    bool psi_is_ready; /* by the time this kernel may begin */
    float mean;        /* 1 / K */
};

/* Squares on tensor cores: a fragment of x is also its own transpose, so x x^T costs two products and no arithmetic; its
 * diagonal holds the squares. Token g has it in d[0] or d[1] of lane (g, g / 2), token g + 8 in d[2] or d[3]. */
template <class T>
static __device__ __forceinline__ void squares(float (&low)[4], float (&high)[4], const uint32_t (&a)[4])
{
    if constexpr (number<T>::dtype == WEFT_F16) {
        mma16_f16(low, a[0], a[1], a[2], a[3], a[0], a[2]);
        mma16_f16(high, a[0], a[1], a[2], a[3], a[1], a[3]);
    } else {
        mma16(low, a[0], a[1], a[2], a[3], a[0], a[2]);
        mma16(high, a[0], a[1], a[2], a[3], a[1], a[3]);
    }
}

/* What a warp has summed of MT * 16 tokens: leaf, four leaves, and of the squares four levels. The two levels above that of
 * the fours are the kernel's, which knows where it has room: high(level, m, q, e). */
template <int NT, int MT> struct low_sums {
    float leaf[MT][NT][4] = {}, four[MT][NT][4] = {};
    float leaf_sq[MT][2][4] = {}, sq[3][MT][2] = {};
};

/* What a step of 16 columns multiplies: x of the warp, psi. */
template <int NT, int MT> struct fragments {
    uint32_t a[MT][4];
    uint4 b[NT];
};

template <int NT, int MT>
static __device__ __forceinline__ void load_x(fragments<NT, MT> &f, uint32_t x, int step, int lane)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
        ldmatrix4(f.a[m], x + m * 2048 + (lane & 15) * 128 + (((step * 2 + (lane >> 4)) ^ (lane & 7)) << 4));
}

template <int NT, int MT>
static __device__ __forceinline__ void load_psi(fragments<NT, MT> &f, const uint4 *psi, int step, int lane)
{
#pragma unroll
    for (int q = 0; q < NT; q++) f.b[q] = psi[(step * NT + q) * 32 + lane];
}

template <class T, int NT, int MT>
static __device__ __forceinline__ void multiply(low_sums<NT, MT> &s, const fragments<NT, MT> &f)
{
    uint32_t hi[MT][4], lo[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) {
        squares<T>(s.leaf_sq[m][0], s.leaf_sq[m][1], f.a[m]);
#pragma unroll
        for (int e = 0; e < 4; e++) split_pair(hi[m][e], lo[m][e], f.a[m][e], T());
    }
#pragma unroll
    for (int q = 0; q < NT; q++) {
#pragma unroll
        for (int m = 0; m < MT; m++)
            mma16(s.leaf[m][q], hi[m][0], hi[m][1], hi[m][2], hi[m][3], f.b[q].x, f.b[q].y);
#pragma unroll
        for (int m = 0; m < MT; m++)
            mma16(s.leaf[m][q], hi[m][0], hi[m][1], hi[m][2], hi[m][3], f.b[q].z, f.b[q].w);
        if constexpr (number<T>::dtype == WEFT_F16) {
#pragma unroll
            for (int m = 0; m < MT; m++)
                mma16(s.leaf[m][q], lo[m][0], lo[m][1], lo[m][2], lo[m][3], f.b[q].x, f.b[q].y);
        }
    }
}

/* The leaf before leaf `index` is complete. */
template <int NT, int MT, class High>
static __device__ __forceinline__ void end_leaf(low_sums<NT, MT> &s, int index, int lane, const High &high)
{
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const bool odd = (lane >> 2) & 1;
        s.sq[0][m][0] += odd ? s.leaf_sq[m][0][1] : s.leaf_sq[m][0][0];
        s.sq[0][m][1] += odd ? s.leaf_sq[m][1][3] : s.leaf_sq[m][1][2];
#pragma unroll
        for (int e = 0; e < 4; e++) s.leaf_sq[m][0][e] = s.leaf_sq[m][1][e] = 0.0f;
#pragma unroll
        for (int q = 0; q < NT; q++)
#pragma unroll
            for (int e = 0; e < 4; e++) s.four[m][q][e] += s.leaf[m][q][e], s.leaf[m][q][e] = 0.0f;
    }
    if (index % PROJECT_FAN) return;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int e = 0; e < 2; e++) s.sq[1][m][e] += s.sq[0][m][e], s.sq[0][m][e] = 0.0f;
#pragma unroll
        for (int q = 0; q < NT; q++)
#pragma unroll
            for (int e = 0; e < 4; e++) high(0, m, q, e) += s.four[m][q][e], s.four[m][q][e] = 0.0f;
    }
    if (index % (PROJECT_FAN * PROJECT_FAN)) return;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int e = 0; e < 2; e++) s.sq[2][m][e] += s.sq[1][m][e], s.sq[1][m][e] = 0.0f;
#pragma unroll
        for (int q = 0; q < NT; q++)
#pragma unroll
            for (int e = 0; e < 4; e++) high(1, m, q, e) += high(0, m, q, e), high(0, m, q, e) = 0.0f;
    }
}

/* A split holds its subtree at the level it is cut at; the other levels are empty. The sums go through shared memory, room
 * for MT * 16 * (rows + 1) numbers, so that there is one piece of code that stores: unrolled over the registers it is
 * kilobytes of instructions whose fetch takes longer than the stores. */
template <int NT, int MT, class High>
static __device__ __forceinline__ void store_sums(const project_args &p, const low_sums<NT, MT> &s, float *room,
                                                  int64_t token0, int split, int lane, const High &high)
{
    const int width = p.rows + 1;
    float v[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int q = 0; q < NT; q++)
#pragma unroll
            for (int e = 0; e < 4; e++) v[m][q][e] = high(1, m, q, e) + (high(0, m, q, e) + s.four[m][q][e]);
    __syncwarp(); /* `high` may lie in the same room */
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *const out = room + (m * 16 + half * 8 + (lane >> 2)) * width;
#pragma unroll
            for (int q = 0; q < NT; q++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int row = q * 8 + (lane & 3) * 2 + e;
                    if (row < p.rows) out[row] = v[m][q][half * 2 + e];
                }
            if ((lane & 3) == lane >> 3) /* the lane of the diagonal */
                out[p.rows] = s.sq[2][m][half] + (s.sq[1][m][half] + s.sq[0][m][half]);
        }
    __syncwarp();
    const int mine = (int)(p.tokens - token0 < MT * 16 ? p.tokens - token0 : MT * 16);
    if (p.partial) {
        float *const out = p.partial + (split * p.tokens + token0) * width;
#pragma unroll 4
        for (int i = lane; i < mine * width; i += 32) out[i] = room[i];
        return;
    }
    for (int row = lane; row < width; row += 32) {
        const view to = row < p.rows ? p.h : p.ms;
        const int64_t at = row < p.rows ? row * p.h.stride[1] : 0;
        const float scale = row < p.rows ? 1.0f : p.mean;
        if (!has(to)) continue;
#pragma unroll 2
        for (int i = 0; i < mine; i++) put(to, (token0 + i) * to.stride[0] + at, room[i * width + row] * scale);
    }
}

/* The columns of a split, in stages. */
struct split_range {
    int64_t first;
    int count, leaf, leaves; /* first leaf, how many */
};

static __device__ __forceinline__ split_range range_of(int64_t stages, int splits, int split)
{
    split_range r;
    r.leaves = PROJECT_LEAVES / splits;
    r.leaf = r.leaves * split;
    r.first = weft_project_leaf(stages, r.leaf);
    r.count = (int)(weft_project_leaf(stages, r.leaf + r.leaves) - r.first);
    return r;
}

/* End of the first leaf from `index` on that is not empty, in stages of the split; index becomes that leaf. */
static __device__ __forceinline__ int first_leaf_end(int64_t stages, const split_range &r, int &index)
{
    int end = (int)(weft_project_leaf(stages, index + 1) - r.first);
    while (end == 0 && index < r.leaf + r.leaves) end = (int)(weft_project_leaf(stages, ++index + 1) - r.first);
    return end;
}

#endif
