/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated delta rule token after token [G5], in fp32, for any dtype, head size, layout and alignment. A block
 * has a sequence, a value head and a number of columns of the state, eight lanes to a column; lane l has the
 * rows l, l + 8, ... of it. The number of columns follows from Dk alone, so that sums over columns do too.
 *
 * Backward keeps the states in front of every 16 tokens, makes those in between again, and goes back over them;
 * gradients of query and key are gathered in the workspace, block of columns after block, and summed over the
 * heads of a group at the end. */
#ifndef WEFT_CUDA_GDN_RULE_ANY_CUH
#define WEFT_CUDA_GDN_RULE_ANY_CUH

#include "cuda/gdn/gdn_rule.cuh"

enum { ANY_LANES = 8, ANY_TILE = 16, ANY_PARTS = 8, ANY_BLOCKS = 264 };

static __host__ __device__ __forceinline__ int any_columns(int dk)
{
    return dk <= 512 ? 32 : 16;
}

/* Floats from one column to the next in shared memory: 8 more than a multiple of the 32 banks. */
static __host__ __device__ __forceinline__ int any_step(int dk)
{
    return (dk + 31) / 32 * 32 + 8;
}

struct any_params {
    rule r;
    rows o, d_o;
    states state, last, d_last, d_state;
    rows d_value;
    float *kept, *inner;     /* columns of states, [column][Dk] */
    float *d_keys, *d_gates; /* [T][Hv][2][Dk]: of query and key; [T][Hv][2]: of beta and g */
    int64_t items;           /* blocks' worth of work */
};

static __device__ __forceinline__ float lanes_sum(float v)
{
#pragma unroll
    for (int m = 1; m < ANY_LANES; m *= 2) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}

static __device__ __forceinline__ void any_load(float *to, const rule &r, const rows &from, const place &at,
                                                int64_t t, int head)
{
    const int64_t offset = offset_in(from, r.seq, at, t) + head * from.head;
    for (int i = threadIdx.x; i < r.key_dim; i += blockDim.x) to[i] = get(from, offset + i * from.channel);
}

static __device__ __forceinline__ float any_value(const rule &r, const rows &from, const place &at, int64_t t,
                                                  int h, int j)
{
    return j < r.value_dim ? get(from, offset_in(from, r.seq, at, t) + h * from.head + j * from.channel) : 0.0f;
}

static __device__ __forceinline__ float any_gate(const rule &r, const rows &from, const place &at, int64_t t, int h)
{
    return get(from, offset_in(from, r.seq, at, t) + h * from.head);
}

/* A token of a column: returns v - P^T k, P being the decayed state. `to` may be m. */
static __device__ __forceinline__ float any_token(const float *m, float *to, const float *k, int dk, float decay,
                                                  float beta, float v)
{
    const int lane = threadIdx.x % ANY_LANES;
    float w = 0;
    for (int i = lane; i < dk; i += ANY_LANES) w = fmaf(m[i], k[i], w);
    const float miss = v - lanes_sum(w) * decay, d = beta * miss;
    for (int i = lane; i < dk; i += ANY_LANES) to[i] = fmaf(k[i], d, m[i] * decay);
    return miss;
}

static __global__ void any_forward_kernel(const any_params p)
{
    extern __shared__ __align__(128) unsigned char room[];
    const int dk = p.r.key_dim, columns = any_columns(dk), across = (p.r.value_dim + columns - 1) / columns;
    const int lane = threadIdx.x % ANY_LANES, column = threadIdx.x / ANY_LANES;
    float *const q = (float *)room, *const k = q + dk, *const m = k + dk + column * any_step(dk);
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        const int j = (int)(item % across) * columns + column;
        const int h = (int)(item / across % p.r.value_heads), kh = key_head_of(p.r, h);
        const int64_t n = item / across / p.r.value_heads;
        const place at = sequence_at(p.r.seq, n);
        const bool live = j < p.r.value_dim;
        for (int i = lane; i < dk; i += ANY_LANES) m[i] = live ? state_get(p.state, n, h, i, j) : 0.0f;
        for (int64_t t = at.start; t < at.end; t++) {
            __syncthreads();
            any_load(q, p.r, p.r.query, at, t, kh);
            any_load(k, p.r, p.r.key, at, t, kh);
            __syncthreads();
            any_token(m, m, k, dk, expf(any_gate(p.r, p.r.g, at, t, h)), any_gate(p.r, p.r.beta, at, t, h),
                      any_value(p.r, p.r.value, at, t, h, j));
            float o = 0;
            for (int i = lane; i < dk; i += ANY_LANES) o = fmaf(m[i], q[i], o);
            o = lanes_sum(o);
            if (lane == 0 && live)
                put(p.o, offset_in(p.o, p.r.seq, at, t) + h * p.o.head + j * p.o.channel, p.r.scale * o);
        }
        for (int i = lane; i < dk && live; i += ANY_LANES) state_put(p.last, n, h, i, j, m[i]);
    }
}

/* The sum of a number of each column, in warp 0. */
static __device__ __forceinline__ float columns_sum(const float *v, int columns)
{
    const int lane = threadIdx.x & 31;
    float sum = lane < columns ? v[lane] : 0.0f;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    return sum;
}

static __device__ __forceinline__ void add_or_set(float *to, float v, bool add)
{
    *to = add ? *to + v : v;
}

static __global__ void any_backward_kernel(const any_params p)
{
    extern __shared__ __align__(128) unsigned char room[];
    const int dk = p.r.key_dim, columns = any_columns(dk), across = (p.r.value_dim + columns - 1) / columns;
    const int lane = threadIdx.x % ANY_LANES, column = threadIdx.x / ANY_LANES;
    const int64_t state = (int64_t)columns * dk;
    float *const q = (float *)room, *const k = q + dk, *const grads = k + dk,
                 *const d = grads + column * any_step(dk);
    float *const of_columns = grads + columns * any_step(dk); /* [5][columns] */
    float *const d_outs = of_columns, *const deltas = d_outs + columns, *const backs = deltas + columns;
    float *const betas = backs + columns, *const decays = betas + columns, *const misses = decays + columns;
    float *const inner = p.inner + blockIdx.x * (ANY_TILE + 1) * state;
    const int64_t own = (int64_t)column * dk;
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        const int h = (int)(item % p.r.value_heads), kh = key_head_of(p.r, h);
        const int64_t n = item / p.r.value_heads;
        const place at = sequence_at(p.r.seq, n);
        const int64_t first = at.start / ANY_TILE + n, tiles = (at.end - at.start + ANY_TILE - 1) / ANY_TILE;
        for (int block = 0; block < across; block++) {
            const int j = block * columns + column;
            const bool live = j < p.r.value_dim;
            /* states in front of the tiles */
            for (int64_t i = 0; i < tiles; i++) {
                const int64_t t0 = at.start + i * ANY_TILE;
                float *const to = p.kept + ((first + i) * p.r.value_heads + h) * state + own;
                const float *const last = p.kept + ((first + i - 1) * p.r.value_heads + h) * state + own;
                for (int r = lane; r < dk; r += ANY_LANES)
                    to[r] = i ? last[r] : live ? state_get(p.state, n, h, r, j) : 0.0f;
                for (int64_t t = t0 - ANY_TILE; i && t < t0; t++) {
                    __syncthreads();
                    any_load(k, p.r, p.r.key, at, t, kh);
                    __syncthreads();
                    any_token(to, to, k, dk, expf(any_gate(p.r, p.r.g, at, t, h)),
                              any_gate(p.r, p.r.beta, at, t, h), any_value(p.r, p.r.value, at, t, h, j));
                }
            }
            for (int r = lane; r < dk; r += ANY_LANES) d[r] = live ? state_get(p.d_last, n, h, r, j) : 0.0f;
            for (int64_t i = tiles - 1; i >= 0; i--) {
                const int64_t t0 = at.start + i * ANY_TILE, t1 = t0 + ANY_TILE < at.end ? t0 + ANY_TILE : at.end;
                const float *const start = p.kept + ((first + i) * p.r.value_heads + h) * state + own;
                for (int r = lane; r < dk; r += ANY_LANES) inner[own + r] = start[r];
                for (int64_t t = t0; t < t1; t++) {
                    float *const m = inner + (t - t0) * state + own;
                    __syncthreads();
                    any_load(k, p.r, p.r.key, at, t, kh);
                    __syncthreads();
                    const float miss =
                        any_token(m, m + state, k, dk, expf(any_gate(p.r, p.r.g, at, t, h)),
                                  any_gate(p.r, p.r.beta, at, t, h), any_value(p.r, p.r.value, at, t, h, j));
                    if (lane == 0) misses[(t - t0) * columns + column] = miss;
                }
                for (int64_t t = t1 - 1; t >= t0; t--) {
                    const float decay = expf(any_gate(p.r, p.r.g, at, t, h)),
                                beta = any_gate(p.r, p.r.beta, at, t, h);
                    const float d_o = p.r.scale * any_value(p.r, p.d_o, at, t, h, j);
                    const float *const before = inner + (t - t0) * state, *const after = before + state;
                    float *const d_keys = p.d_keys + (t * p.r.value_heads + h) * 2 * dk;
                    float *const d_gates = p.d_gates + (t * p.r.value_heads + h) * 2;
                    __syncthreads();
                    any_load(q, p.r, p.r.query, at, t, kh);
                    any_load(k, p.r, p.r.key, at, t, kh);
                    __syncthreads();
                    float dd = 0;
                    for (int r = lane; r < dk; r += ANY_LANES) {
                        d[r] = fmaf(q[r], d_o, d[r]);
                        dd = fmaf(d[r], k[r], dd);
                    }
                    dd = lanes_sum(dd);
                    const float miss = misses[(t - t0) * columns + column], back = -(beta * dd);
                    if (lane == 0) {
                        d_outs[column] = d_o, deltas[column] = beta * miss, backs[column] = back;
                        betas[column] = dd * miss;
                        if (live && has(p.d_value))
                            put(p.d_value,
                                offset_in(p.d_value, p.r.seq, at, t) + h * p.d_value.head + j * p.d_value.channel,
                                beta * dd);
                    }
                    __syncthreads();
                    for (int r = threadIdx.x; r < dk; r += blockDim.x) {
                        float dq[ANY_PARTS] = {}, dkey[ANY_PARTS] = {};
                        for (int c = 0; c < columns; c += ANY_PARTS)
#pragma unroll
                            for (int e = 0; e < ANY_PARTS; e++) {
                                dq[e] = fmaf(after[(int64_t)(c + e) * dk + r], d_outs[c + e], dq[e]);
                                dkey[e] = fmaf(grads[(c + e) * any_step(dk) + r], deltas[c + e], dkey[e]);
                                dkey[e] = fmaf(before[(int64_t)(c + e) * dk + r] * decay, backs[c + e], dkey[e]);
                            }
#pragma unroll
                        for (int w = 1; w < ANY_PARTS; w *= 2)
#pragma unroll
                            for (int e = 0; e + w < ANY_PARTS; e += 2 * w)
                                dq[e] += dq[e + w], dkey[e] += dkey[e + w];
                        add_or_set(d_keys + r, dq[0], block > 0);
                        add_or_set(d_keys + dk + r, dkey[0], block > 0);
                    }
                    __syncthreads();
                    float dg = 0;
                    for (int r = lane; r < dk; r += ANY_LANES) {
                        const float v = fmaf(k[r], back, d[r]);
                        dg = fmaf(v, before[own + r] * decay, dg);
                        d[r] = v * decay;
                    }
                    dg = lanes_sum(dg);
                    if (lane == 0) decays[column] = dg;
                    __syncthreads();
                    if (threadIdx.x < 32) {
                        const float db = columns_sum(betas, columns), sum = columns_sum(decays, columns);
                        if (threadIdx.x == 0) {
                            add_or_set(d_gates, db, block > 0);
                            add_or_set(d_gates + 1, sum, block > 0);
                        }
                    }
                }
            }
            for (int r = lane; r < dk && live; r += ANY_LANES) state_put(p.d_state, n, h, r, j, d[r]);
            __syncthreads();
        }
    }
}

struct gather_params {
    rule r;
    const float *d_keys, *d_gates;
    rows d_query, d_key, d_beta, d_g;
};

/* Gradients of query and key, summed over the heads of a group in order; those of beta and g. A block has a
 * token and a key head. */
static __global__ void any_gather_kernel(const gather_params p)
{
    const int dk = p.r.key_dim, members = p.r.value_heads / p.r.heads;
    const int64_t items = end_of(p.r.seq) * p.r.heads;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t t = item / p.r.heads;
        const int kh = (int)(item % p.r.heads);
        const token at = token_at(p.r.seq, t);
        for (int i = threadIdx.x; i < 2 * dk; i += blockDim.x) {
            const rows &to = i < dk ? p.d_query : p.d_key;
            float sum = 0;
            for (int r = 0; r < members; r++)
                sum += p.d_keys[(t * p.r.value_heads + value_head_of(p.r, kh, r)) * 2 * dk + i];
            if (has(to)) put(to, offset_of(to, at) + kh * to.head + (i < dk ? i : i - dk) * to.channel, sum);
        }
        for (int i = threadIdx.x; i < 2 * members; i += blockDim.x) {
            const rows &to = i < members ? p.d_beta : p.d_g;
            const int h = value_head_of(p.r, kh, i % members);
            if (has(to))
                put(to, offset_of(to, at) + h * to.head,
                    p.d_gates[(t * p.r.value_heads + h) * 2 + (i < members ? 0 : 1)]);
        }
    }
}

/* Rows behind the last sequence. */
static __global__ void zero_rows_kernel(const rows to, int heads, int dim, const sequences seq)
{
    for (int64_t t = end_of(seq) + blockIdx.x; t < seq.tokens; t += gridDim.x)
        for (int i = threadIdx.x; i < heads * dim; i += blockDim.x)
            put(to, t * to.step + i / dim * to.head + i % dim * to.channel, 0.0f);
}

#endif
