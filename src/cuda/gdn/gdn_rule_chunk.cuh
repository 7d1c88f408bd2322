/* SPDX-License-Identifier: Apache-2.0
 *
 * What a chunk of the gated delta rule needs of its own tokens alone [G6], for all chunks at once: a block has a
 * chunk and a key head, makes K K^T and Q K^T on tensor cores, and for each value head of it the decays, P, and
 * M = (I + L)^-1 by forward substitution in fp32, a thread for each column.
 *
 * Exponents are summed in double precision: differences of sums then have the error of the exponents that they
 * stand for, not of all that lie in front. */
#ifndef WEFT_CUDA_GDN_RULE_CHUNK_CUH
#define WEFT_CUDA_GDN_RULE_CHUNK_CUH

#include "cuda/gdn/gdn_rule.cuh"

enum { CHUNK_THREADS = 128, SOLVE_STEP = CHUNK + 4 };

/* exp of it is zero in fp32 whatever is added; differences stay numbers where -inf would make NaN. */
#define LEAST_EXPONENT (-1e6f)

struct chunk_params {
    rule r;
    chunks to;
    bool wide_query, wide_key;
};

/* Shared memory: the tiles of query and key, where later K K^T is kept, 32 numbers of a thread side by side with
 * those of the others, and the first of two systems; the second; G in double, beta. */
enum {
    KEPT_BYTES = CHUNK / 2 * CHUNK_THREADS * 4,
    SYSTEM_BYTES = CHUNK * SOLVE_STEP * 4,
    CHUNK_SUMS = KEPT_BYTES + 2 * SYSTEM_BYTES,
    CHUNK_SHARED = CHUNK_SUMS + 2 * CHUNK * (8 + 4)
};
static_assert(2 * tile_bytes(CHUNK, 128) <= CHUNK_SUMS, "the tiles fit");

/* G and beta of the head of this half of the block, and what the scan needs of them. Two warps, two tokens for a
 * lane. */
static __device__ __forceinline__ void chunk_gates(const rule &r, const chunk &c, int h, float *gates, double *sum,
                                                   float *beta)
{
    const int lane = threadIdx.x & 31;
    float g[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int i = 2 * lane + k;
        const bool there = i < c.count;
        const int64_t t = c.first + (there ? i : 0);
        const float v = there ? get(r.g, offset_in(r.g, r.seq, c.at, t) + h * r.g.head) : 0.0f;
        g[k] = v < LEAST_EXPONENT ? LEAST_EXPONENT : v; /* NaN stays */
        beta[i] = there ? get(r.beta, offset_in(r.beta, r.seq, c.at, t) + h * r.beta.head) : 0.0f;
    }
    double s = (double)g[0] + (double)g[1];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, s, d);
        if (lane >= d) s += other;
    }
    const double before = __shfl_up_sync(0xffffffffu, s, 1), all = __shfl_sync(0xffffffffu, s, 31);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int i = 2 * lane + k;
        const double at = (lane ? before : 0.0) + (double)g[0] + (k ? (double)g[1] : 0.0);
        sum[i] = at, ((double *)(gates + GATES))[i] = at;
        gates[i] = expf((float)at);
        gates[CHUNK + i] = i + 1 < CHUNK ? expf((float)(all - at)) : 1.0f;
        gates[2 * CHUNK + i] = beta[i];
    }
}

/* A column of (I + L)^-1, whose first FIRST rows are zero, by substitution. */
template <int FIRST>
static __device__ __forceinline__ void solve(const float *lower, int column, bf16 *hi, bf16 *lo)
{
    float x[CHUNK - FIRST];
#pragma unroll
    for (int i = 0; i < CHUNK - FIRST; i++) {
        float s[4] = {};
#pragma unroll
        for (int l = 0; l < i; l += 4) {
            const float4 v = *(const float4 *)(lower + (FIRST + i) * SOLVE_STEP + FIRST + l);
            s[0] = fmaf(v.x, x[l], s[0]);
            if (l + 1 < i) s[1] = fmaf(v.y, x[l + 1], s[1]);
            if (l + 2 < i) s[2] = fmaf(v.z, x[l + 2], s[2]);
            if (l + 3 < i) s[3] = fmaf(v.w, x[l + 3], s[3]);
        }
        x[i] = (FIRST + i == column ? 1.0f : 0.0f) - ((s[0] + s[1]) + (s[2] + s[3]));
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        const float v = i < FIRST ? 0.0f : x[i < FIRST ? 0 : i - FIRST];
        const bf16 h = narrow<bf16>(v);
        hi[i * CHUNK] = h;
        lo[i * CHUNK] = narrow<bf16>(rest_of(v, widen(h)));
    }
}

template <int DK> __global__ void __launch_bounds__(CHUNK_THREADS, 3) chunk_kernel(const chunk_params p)
{
    extern __shared__ __align__(128) unsigned char room[];
    const tile q = {0, tile_step(DK)}, k = {tile_bytes(CHUNK, DK), tile_step(DK)};
    const tile qa = {shared_address(room) + q.at, q.step}, ka = {shared_address(room) + k.at, k.step};
    float *const kept = (float *)room + threadIdx.x, *const system = (float *)(room + KEPT_BYTES);
    double *const sums = (double *)(room + CHUNK_SUMS);
    float *const betas = (float *)(sums + 2 * CHUNK);
    const int64_t slot = blockIdx.x / (unsigned)p.r.heads;
    const int kh = (int)(blockIdx.x % (unsigned)p.r.heads), warp = threadIdx.x >> 5, half = threadIdx.x >> 6;
    const chunk c = chunk_of(p.r.seq, slot);
    if (c.count == 0) return;
    fetch_rows<CHUNK_THREADS, DK>(room, q, p.r.query, p.wide_query, p.r.seq, c.at, c.first, c.count, kh, 0,
                                  threadIdx.x);
    fetch_rows<CHUNK_THREADS, DK>(room, k, p.r.key, p.wide_key, p.r.seq, c.at, c.first, c.count, kh, 0,
                                  threadIdx.x);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    float kk[4][2][4] = {}, qk[4][2][4] = {}; /* rows of a warp, columns up to the diagonal */
#pragma unroll
    for (int d = 0; d < DK; d += 16) {
        uint32_t a[4], e[4];
        left(a, ka, warp * 16, d);
        left(e, qa, warp * 16, d);
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (n <= warp) {
                uint32_t b[4];
                right_turned(b, ka, n * 16, d);
                multiply(kk[n], a, b);
                multiply(qk[n], e, b);
            }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) kept[i * CHUNK_THREADS] = kk[i / 8][i / 4 % 2][i % 4];
    const int members = p.r.value_heads / p.r.heads;
    for (int r = 0; r < members; r += 2) {
        __syncthreads();
        if (warp < 2 && r + warp < members) {
            const int h = value_head_of(p.r, kh, r + warp);
            chunk_gates(p.r, c, h, p.to.gates + (slot * p.r.value_heads + h) * SCALARS, sums + warp * CHUNK,
                        betas + warp * CHUNK);
        }
        __syncthreads();
#pragma unroll 1
        for (int s = 0; s < 2 && r + s < members; s++) {
            const int h = value_head_of(p.r, kh, r + s);
            bf16 *const pairs = p.to.pairs + (slot * p.r.value_heads + h) * SQUARE;
            const double *const sum = sums + s * CHUNK;
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int i = warp * 16 + pair_row(e & 1), j = n * 16 + pair_column(e >> 1);
                    float v[2] = {}, o[2] = {};
                    if (n <= warp) {
#pragma unroll
                        for (int x = 0; x < 2; x++) {
                            const int at = (e & 1) * 2 + x;
                            const float below = expf((float)(sum[i] - sum[j + x])),
                                        decay = j + x < i ? below : 1.0f;
                            const float product = kept[((n * 2 + (e >> 1)) * 4 + at) * CHUNK_THREADS];
                            v[x] = j + x < i ? betas[s * CHUNK + i] * (product * decay) : 0.0f;
                            o[x] = j + x <= i ? qk[n][e >> 1][at] * decay : 0.0f;
                        }
                        float *const to = system + (s * CHUNK + i) * SOLVE_STEP + j;
                        *(float2 *)to = make_float2(v[0], v[1]);
                    }
                    *(uint32_t *)(pairs + i * CHUNK + j) = narrow2(o[0], o[1], bf16());
                }
        }
        __syncthreads();
        if (r + half >= members) continue;
        const int h = value_head_of(p.r, kh, r + half), column = threadIdx.x % CHUNK;
        const int64_t to = (slot * p.r.value_heads + h) * SQUARE + column;
        const float *const lower = system + half * CHUNK * SOLVE_STEP;
        if (warp & 1)
            solve<CHUNK / 2>(lower, column, p.to.m_hi + to, p.to.m_lo + to);
        else
            solve<0>(lower, column, p.to.m_hi + to, p.to.m_lo + to);
    }
}

#endif
