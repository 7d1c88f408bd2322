/* SPDX-License-Identifier: Apache-2.0
 *
 * What a chunk of the gated delta rule needs of its own tokens alone [G6], for all chunks at once: a block has a
 * chunk and a key head, makes K K^T and Q K^T on tensor cores, and for each value head of it the decays, P, and
 * M = (I + L)^-1.
 *
 * Exponents are summed in double precision: differences of sums then have the error of the exponents that they
 * stand for, not of all that lie in front. */
#ifndef WEFT_CUDA_GDN_RULE_CHUNK_CUH
#define WEFT_CUDA_GDN_RULE_CHUNK_CUH

#include "cuda/common/wgmma.cuh"
#include "cuda/gdn/gdn_rule.cuh"

enum { CHUNK_THREADS = 128, SOLVE_STEP = CHUNK + 4 };
#ifdef WEFT_WGMMA
enum { CHUNK_BLOCKS = 4 }; /* resident; more elsewhere would keep registers in memory */
#else
enum { CHUNK_BLOCKS = 3 };
#endif

/* exp of it is zero in fp32 whatever is added; differences stay numbers where -inf would make NaN. */
#define LEAST_EXPONENT (-1e6f)

struct chunk_params {
    rule r;
    chunks to;
    bool whole; /* zeros above the diagonal too; groups of warps do not read there */
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

/* Four numbers of each of four neighbouring lanes, so that lane t has the t-th of all four. */
static __device__ __forceinline__ void turn_four(uint32_t (&a)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    auto trade = [](uint32_t &x, uint32_t &y, bool second,
                    int with) { /* y for the other's x */
                                const uint32_t got = __shfl_xor_sync(0xffffffffu, second ? x : y, with);
                                (second ? x : y) = got;
    };
    trade(a[0], a[1], odd, 1), trade(a[2], a[3], odd, 1);
    trade(a[0], a[2], high, 2), trade(a[1], a[3], high, 2);
}

/* ---- M = (I + L)^-1 ------------------------------------------------------------------------------------------------
 *
 * In blocks of 16 x 16: those of the diagonal by substitution in fp32, a thread for each column; a block below it from those
 * above it in its column, M_ij = -M_ii (L_ij M_jj + ... + L_i,i-1 M_i-1,j), on tensor cores with both factors as hi + lo. A warp
 * has columns of blocks, turned, so that a result is the left factor of the next product as it lies in registers. */

/* Inverts a block of the diagonal in place; 16 neighbouring lanes have its columns. */
static __device__ __forceinline__ void invert_diagonal(float *system, int block, int column)
{
    float *const at = system + block * 16 * (SOLVE_STEP + 1);
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float s[2] = {};
#pragma unroll
        for (int l = 0; l < i; l += 4) {
            const float4 v = *(const float4 *)(at + i * SOLVE_STEP + l);
            s[0] = fmaf(v.x, x[l], s[0]);
            if (l + 1 < i) s[1] = fmaf(v.y, x[l + 1], s[1]);
            if (l + 2 < i) s[0] = fmaf(v.z, x[l + 2], s[0]);
            if (l + 3 < i) s[1] = fmaf(v.w, x[l + 3], s[1]);
        }
        x[i] = (i == column ? 1.0f : 0.0f) - (s[0] + s[1]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i++) at[i * SOLVE_STEP + column] = x[i];
}

/* d += A B, B turned being 16 x 16 numbers of a system from `block` on; both factors as hi + lo. */
static __device__ __forceinline__ void multiply_block(float (&d)[2][4], const uint32_t (&hi)[4],
                                                      const uint32_t (&lo)[4], const float *block)
{
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        uint32_t b_hi[2], b_lo[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float2 v = *(const float2 *)(block + (n * 8 + g) * SOLVE_STEP + k * 8 + 2 * t);
            split2(b_hi[k], b_lo[k], v.x, v.y);
        }
        mma16(d[n], lo[0], lo[1], lo[2], lo[3], b_hi[0], b_hi[1]);
        mma16(d[n], hi[0], hi[1], hi[2], hi[3], b_lo[0], b_lo[1]);
        mma16(d[n], hi[0], hi[1], hi[2], hi[3], b_hi[0], b_hi[1]);
    }
}

/* A block of M that lies turned in registers. */
static __device__ __forceinline__ void put_block(bf16 *to, const uint32_t (&a)[4])
{
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    uint32_t row[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(row[e]) : "r"(a[e]));
    turn_four(row);
    store_vector(to + ((t >> 1) * 8 + g) * CHUNK + (t & 1) * 8, row[0], row[1], row[2], row[3]);
}

/* Blocks J to 3 of column J. */
template <int J>
static __device__ __forceinline__ void solve_column(const float *system, bool whole, bf16 *m_hi, bf16 *m_lo)
{
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    uint32_t hi[4 - J][4], lo[4 - J][4];
    const float *const own = system + J * 16 * (SOLVE_STEP + 1);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float *const at = own + ((e >> 1) * 8 + 2 * t) * SOLVE_STEP + (e & 1) * 8 + g;
        split2(hi[0][e], lo[0][e], at[0], at[SOLVE_STEP]);
    }
#pragma unroll
    for (int i = J; i < 4; i++) {
        uint32_t(&h)[4] = hi[i - J], (&l)[4] = lo[i - J];
        if (i > J) {
            float sum[2][4] = {}, d[2][4] = {};
            uint32_t s_hi[4], s_lo[4];
#pragma unroll
            for (int b = J; b < i; b++)
                multiply_block(sum, hi[b - J], lo[b - J], system + i * 16 * SOLVE_STEP + b * 16);
#pragma unroll
            for (int e = 0; e < 4; e++)
                split2(s_hi[e], s_lo[e], -sum[e >> 1][2 * (e & 1)], -sum[e >> 1][2 * (e & 1) + 1]);
            multiply_block(d, s_hi, s_lo, system + i * 16 * (SOLVE_STEP + 1));
#pragma unroll
            for (int e = 0; e < 4; e++) split2(h[e], l[e], d[e >> 1][2 * (e & 1)], d[e >> 1][2 * (e & 1) + 1]);
        }
        put_block(m_hi + i * 16 * CHUNK + J * 16, h);
        put_block(m_lo + i * 16 * CHUNK + J * 16, l);
    }
    if (!whole) return;
    const uint32_t zero[4] = {};
#pragma unroll
    for (int i = 0; i < J; i++) {
        put_block(m_hi + i * 16 * CHUNK + J * 16, zero);
        put_block(m_lo + i * 16 * CHUNK + J * 16, zero);
    }
}

static __device__ __forceinline__ void solve_column(int column, const float *system, bool whole, bf16 *m_hi,
                                                    bf16 *m_lo)
{
    if (column == 0)
        solve_column<0>(system, whole, m_hi, m_lo);
    else if (column == 1)
        solve_column<1>(system, whole, m_hi, m_lo);
    else if (column == 2)
        solve_column<2>(system, whole, m_hi, m_lo);
    else
        solve_column<3>(system, whole, m_hi, m_lo);
}

template <int DK> __global__ void __launch_bounds__(CHUNK_THREADS, CHUNK_BLOCKS) chunk_kernel(const chunk_params p)
{
    extern __shared__ __align__(128) unsigned char room[];
    const tile q = {0, tile_step(DK)}, k = {tile_bytes(CHUNK, DK), tile_step(DK)};
    const tile qa = {shared_address(room) + q.at, q.step}, ka = {shared_address(room) + k.at, k.step};
    float *const kept = (float *)room + threadIdx.x, *const system = (float *)(room + KEPT_BYTES);
    double *const sums = (double *)(room + CHUNK_SUMS);
    float *const betas = (float *)(sums + 2 * CHUNK);
    const int64_t slot = blockIdx.x / (unsigned)p.r.heads;
    const int kh = (int)(blockIdx.x % (unsigned)p.r.heads), warp = threadIdx.x >> 5, half = threadIdx.x >> 6,
              lane = threadIdx.x & 31;
    const chunk c = chunk_of(p.r.seq, slot);
    if (c.count == 0) return;
    fetch_rows<CHUNK_THREADS, DK>(room, q, p.r.query, p.wide_query, p.r.seq, c.at, c.first, c.count, kh, 0,
                                  threadIdx.x);
    fetch_rows<CHUNK_THREADS, DK>(room, k, p.r.key, p.wide_key, p.r.seq, c.at, c.first, c.count, kh, 0,
                                  threadIdx.x);
    copy_commit();
    const int members = p.r.value_heads / p.r.heads;
    auto weigh = [&](int r) { /* gates of the pair of heads from the r-th on */
                              if (warp >= 2 || r + warp >= members) return;
                              const int h = value_head_of(p.r, kh, r + warp);
                              chunk_gates(p.r, c, h, p.to.gates + (slot * p.r.value_heads + h) * SCALARS,
                                          sums + warp * CHUNK, betas + warp * CHUNK);
    };
    weigh(0); /* while tiles are on their way */
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
    for (int r = 0; r < members; r += 2) {
        __syncthreads();
        if (r > 0) {
            weigh(r);
            __syncthreads();
        }
#pragma unroll 1
        for (int s = 0; s < 2 && r + s < members; s++) {
            const int h = value_head_of(p.r, kh, r + s);
            bf16 *const pairs = p.to.pairs + (slot * p.r.value_heads + h) * SQUARE;
            const double *const sum = sums + s * CHUNK;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                uint32_t out[4];
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
                    out[e] = narrow2(o[0], o[1], bf16());
                }
                if (n > warp && !p.whole) continue;
                turn_four(out);
                store_vector(pairs + (warp * 16 + pair_row(lane & 1)) * CHUNK + n * 16 + (lane >> 1 & 1) * 8,
                             out[0], out[1], out[2], out[3]);
            }
        }
        __syncthreads();
        if (r + half < members)
            invert_diagonal(system + half * CHUNK * SOLVE_STEP, threadIdx.x % CHUNK / 16, threadIdx.x % 16);
        __syncthreads();
#pragma unroll 1
        for (int s = 0; s < 2 && r + s < members;
             s++) { /* two columns together have as much to do as the other two */
            const int64_t to = (slot * p.r.value_heads + value_head_of(p.r, kh, r + s)) * SQUARE;
            solve_column(s ? 3 - warp : warp, system + s * CHUNK * SOLVE_STEP, p.whole, p.to.m_hi + to,
                         p.to.m_lo + to);
        }
    }
}

#endif
