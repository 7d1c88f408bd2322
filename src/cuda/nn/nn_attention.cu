/* SPDX-License-Identifier: Apache-2.0
 *
 * Causal attention with rotary positions [T2]. Heads of 64 and 128 channels in bf16 take the kernels of nn_attention_mma.cu;
 * here is everything else: a warp has a query (backward: or a key) of a head and walks the keys (or queries) 32 at a time. Its
 * lanes first have a key each, for the scores, then channels, for what the scores weigh. Scores are never stored; backward
 * makes them again from the logarithm of their divisor. */
#include "cuda/common/reduce.cuh"
#include "cuda/nn/nn.cuh"

enum { BLOCK = 128, MOST_DIM = 256 };

/* ---- rotation ---------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(BLOCK)
    table_kernel(float *table, int64_t length, int64_t half, double base)
{
    const int64_t count = length * half, step = (int64_t)gridDim.x * BLOCK;
    for (int64_t e = (int64_t)blockIdx.x * BLOCK + threadIdx.x; e < count; e += step) {
        const int64_t position = e / half, i = e - position * half;
        const double angle = (double)position * pow(base, -(double)i / (double)half);
        double sine, cosine;
        sincospi(angle * 0.31830988618379067154, &sine, &cosine); /* needs no local memory, as sincos does */
        table[position * 2 * half + i] = (float)cosine;
        table[position * 2 * half + half + i] = (float)sine;
    }
}

weft_status weft_cuda_nn_rope_table(weft_nn *nn, void *table, int64_t length, int64_t head_dim, double base)
{
    NN_ENTER(nn);
    return launch(&at.call, "rope", table_kernel, {dim3(grid_of(ceil_div(length * head_dim / 2, BLOCK))), BLOCK},
                  (float *)table, length, head_dim / 2, base);
}

/* A block per row; q and k lie side by side, so heads count through both. */
template <class T, int W>
static __global__ void __launch_bounds__(BLOCK) rope_kernel(weft_attention a, T *qkv, bool back)
{
    const int64_t rows = a.sequences * a.length, width = a.heads * a.head_dim;
    const int half = (int)a.head_dim / 2, pieces = (int)(width / W); /* of half the channels of q and k */
    for (int64_t t = blockIdx.x; t < rows; t += gridDim.x) {
        const float *turn = (const float *)a.table + t % a.length * a.head_dim;
        for (int e = threadIdx.x; e < pieces; e += BLOCK) {
            const int head = e * W / half, i = e * W - head * half;
            T *p = qkv + t * 3 * width + (int64_t)head * a.head_dim + i;
            float x[W], y[W], cosine[W], sine[W], u[W], v[W];
            load_shared<T, W>(x, p);
            load_shared<T, W>(y, p + half);
            load<float, W>(cosine, turn + i);
            load<float, W>(sine, turn + half + i);
#pragma unroll
            for (int k = 0; k < W; k++) {
                const float s = back ? -sine[k] : sine[k];
                u[k] = x[k] * cosine[k] - y[k] * s;
                v[k] = y[k] * cosine[k] + x[k] * s;
            }
            store<T, W>(p, u);
            store<T, W>(p + half, v);
        }
    }
}

template <class T> static weft_status rope(const weft_call *call, const weft_attention *a, void *qkv, int32_t back)
{
    const bool wide = rows_are_vectors<T>(a->head_dim / 2, qkv, a->table, NULL);
    return launch(call, "rope", wide ? rope_kernel<T, number<T>::per_vector> : rope_kernel<T, 1>,
                  {dim3(grid_of(a->sequences * a->length)), BLOCK}, *a, (T *)qkv, back != 0);
}

weft_status weft_cuda_nn_rope(weft_nn *nn, const weft_attention *a, void *qkv, int32_t back)
{
    NN_ENTER(nn);
    return NN_BY_DTYPE(nn, rope)(&at.call, a, qkv, back);
}

/* ---- any head ------------------------------------------------------------------------------------------------------------------ */

/* What a warp works on: row `row` of head `head`; base: the first row of its sequence. */
struct warp_task {
    int64_t row, base;
    int head, dim;
    bool valid;
};

static __device__ __forceinline__ warp_task task_of(const weft_attention &a)
{
    const int64_t item = (int64_t)blockIdx.x * (BLOCK / 32) + threadIdx.x / 32, rows = a.sequences * a.length;
    warp_task w;
    w.head = (int)(item / rows);
    w.row = item - w.head * rows;
    w.base = w.row / a.length * a.length;
    w.dim = (int)a.head_dim;
    w.valid = w.head < a.heads;
    return w;
}

/* part: 0 q, 1 k, 2 v */
template <class T>
static __device__ __forceinline__ const T *qkv_at(const weft_attention &a, int64_t row, int part, int head)
{
    const int64_t width = a.heads * a.head_dim;
    return (const T *)a.qkv + row * 3 * width + part * width + head * a.head_dim;
}

template <class T>
static __device__ __forceinline__ const T *row_at(const weft_attention &a, const void *rows, int64_t row, int head)
{
    return (const T *)rows + row * a.heads * a.head_dim + head * a.head_dim;
}

/* A row times one in shared memory. */
template <class T> static __device__ __forceinline__ float dot(const float *x, const T *y, int dim)
{
    float s = 0.0f;
    for (int c = 0; c < dim; c++) s = __fmaf_rn(x[c], widen(y[c]), s);
    return s;
}

/* sum[c] += sum over j of weight_j row_j[c]; lane j has weight_j, lanes have channels. */
template <class T>
static __device__ __forceinline__ void gather(float (&sum)[MOST_DIM / 32], float weight, const T *rows,
                                              int64_t step, int count, int dim)
{
    const int lane = threadIdx.x % 32;
    for (int j = 0; j < count; j++) {
        const float w = __shfl_sync(0xffffffffu, weight, j);
#pragma unroll
        for (int k = 0; k < MOST_DIM / 32; k++)
            if (lane + 32 * k < dim) sum[k] = __fmaf_rn(w, widen(rows[j * step + lane + 32 * k]), sum[k]);
    }
}

template <class T>
static __device__ __forceinline__ void put_row(T *to, const float (&sum)[MOST_DIM / 32], float factor, int dim)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < MOST_DIM / 32; k++)
        if (lane + 32 * k < dim) to[lane + 32 * k] = narrow<T>(sum[k] * factor);
}

template <class T> static __device__ __forceinline__ void keep_row(float *to, const T *from, int dim)
{
    for (int c = threadIdx.x % 32; c < dim; c += 32) to[c] = widen(from[c]);
    __syncwarp();
}

static __device__ __forceinline__ float warp_max(float v)
{
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

template <class T> static __global__ void __launch_bounds__(BLOCK) fwd_kernel(weft_attention a)
{
    __shared__ float room[BLOCK / 32][MOST_DIM];
    const warp_task w = task_of(a);
    const int lane = threadIdx.x % 32;
    const int64_t step = 3 * a.heads * a.head_dim;
    const float scale = 1.0f / sqrtf((float)w.dim);
    float *q = room[threadIdx.x / 32], o[MOST_DIM / 32] = {}, top = -INFINITY, sum = 0.0f;
    if (!w.valid) return;
    keep_row(q, qkv_at<T>(a, w.row, 0, w.head), w.dim);
    for (int64_t first = w.base; first <= w.row; first += 32) {
        const int count = (int)(w.row + 1 - first < 32 ? w.row + 1 - first : 32);
        float s = -INFINITY;
        if (lane < count) s = scale * dot(q, qkv_at<T>(a, first + lane, 1, w.head), w.dim);
        const float now = fmaxf(top, warp_max(s)), shrink = expf(top - now), p = expf(s - now);
#pragma unroll
        for (int k = 0; k < MOST_DIM / 32; k++) o[k] *= shrink;
        sum = sum * shrink + warp_sum(p);
        top = now;
        gather(o, p, qkv_at<T>(a, first, 2, w.head), step, count, w.dim);
    }
    put_row((T *)row_at<T>(a, a.o, w.row, w.head), o, 1.0f / sum, w.dim);
    if (lane == 0) ((float *)a.lse)[w.row * a.heads + w.head] = top + logf(sum);
}

/* delta = sum over the channels of d_o o */
template <class T> static __global__ void __launch_bounds__(BLOCK) delta_kernel(weft_attention a, float *delta)
{
    const warp_task w = task_of(a);
    float s = 0.0f;
    if (!w.valid) return;
    const T *o = row_at<T>(a, a.o, w.row, w.head), *d_o = row_at<T>(a, a.d_o, w.row, w.head);
    for (int c = threadIdx.x % 32; c < w.dim; c += 32) s = __fmaf_rn(widen(o[c]), widen(d_o[c]), s);
    s = warp_sum(s);
    if (threadIdx.x % 32 == 0) delta[w.row * a.heads + w.head] = s;
}

/* A query's gradient, from the keys up to it. */
template <class T>
static __global__ void __launch_bounds__(BLOCK) d_query_kernel(weft_attention a, const float *delta)
{
    __shared__ float room[BLOCK / 32][2][MOST_DIM];
    const warp_task w = task_of(a);
    const int lane = threadIdx.x % 32;
    const int64_t step = 3 * a.heads * a.head_dim;
    const float scale = 1.0f / sqrtf((float)w.dim);
    float *q = room[threadIdx.x / 32][0], *g = room[threadIdx.x / 32][1], d_q[MOST_DIM / 32] = {};
    if (!w.valid) return;
    const float lse = ((const float *)a.lse)[w.row * a.heads + w.head], all = delta[w.row * a.heads + w.head];
    keep_row(q, qkv_at<T>(a, w.row, 0, w.head), w.dim);
    keep_row(g, row_at<T>(a, a.d_o, w.row, w.head), w.dim);
    for (int64_t first = w.base; first <= w.row; first += 32) {
        const int count = (int)(w.row + 1 - first < 32 ? w.row + 1 - first : 32);
        float ds = 0.0f;
        if (lane < count) {
            const float s = scale * dot(q, qkv_at<T>(a, first + lane, 1, w.head), w.dim);
            ds = expf(s - lse) * (dot(g, qkv_at<T>(a, first + lane, 2, w.head), w.dim) - all);
        }
        gather(d_q, ds, qkv_at<T>(a, first, 1, w.head), step, count, w.dim);
    }
    put_row((T *)a.d_qkv + w.row * step + w.head * w.dim, d_q, scale, w.dim);
}

/* A key's and its value's, from the queries that see it. */
template <class T>
static __global__ void __launch_bounds__(BLOCK) d_key_kernel(weft_attention a, const float *delta)
{
    __shared__ float room[BLOCK / 32][2][MOST_DIM];
    const warp_task w = task_of(a);
    const int lane = threadIdx.x % 32;
    const int64_t width = a.heads * a.head_dim, end = w.base + a.length;
    const float scale = 1.0f / sqrtf((float)w.dim);
    float *k = room[threadIdx.x / 32][0], *v = room[threadIdx.x / 32][1];
    float d_k[MOST_DIM / 32] = {}, d_v[MOST_DIM / 32] = {};
    if (!w.valid) return;
    keep_row(k, qkv_at<T>(a, w.row, 1, w.head), w.dim);
    keep_row(v, qkv_at<T>(a, w.row, 2, w.head), w.dim);
    for (int64_t first = w.row; first < end; first += 32) {
        const int count = (int)(end - first < 32 ? end - first : 32);
        float p = 0.0f, ds = 0.0f;
        if (lane < count) {
            const int64_t at = (first + lane) * a.heads + w.head;
            const float s = scale * dot(k, qkv_at<T>(a, first + lane, 0, w.head), w.dim);
            p = expf(s - ((const float *)a.lse)[at]);
            ds = p * (dot(v, row_at<T>(a, a.d_o, first + lane, w.head), w.dim) - delta[at]);
        }
        gather(d_v, p, row_at<T>(a, a.d_o, first, w.head), width, count, w.dim);
        gather(d_k, ds, qkv_at<T>(a, first, 0, w.head), 3 * width, count, w.dim);
    }
    T *to = (T *)a.d_qkv + w.row * 3 * width + w.head * w.dim;
    put_row(to + width, d_k, scale, w.dim);
    put_row(to + 2 * width, d_v, 1.0f, w.dim);
}

/* ---- parts ---------------------------------------------------------------------------------------------------------------------- */

static launch_shape over_warps(const weft_attention *a)
{
    return {dim3((unsigned)ceil_div(a->sequences * a->length * a->heads, BLOCK / 32)), BLOCK};
}

/* The same answer forward and backward. */
static bool takes_mma(const weft_call *call, const weft_nn *nn, const weft_attention *a)
{
    return nn->table->dtype == WEFT_BF16 && (a->head_dim == 64 || a->head_dim == 128) &&
           weft_cuda_attention_mma_shared(a->head_dim) <= most_shared(call);
}

static weft_status check_size(const weft_attention *a)
{
    if (a->head_dim > MOST_DIM)
        return weft_fail(WEFT_ERR_UNSUPPORTED,
                         "model: heads: expected at most %d channels a head on cuda, got %lld", MOST_DIM,
                         (long long)a->head_dim);
    if (a->sequences * a->length * a->heads > (int64_t)1 << 31)
        return weft_fail(WEFT_ERR_UNSUPPORTED,
                         "model: expected at most 2^31 tokens times heads in a batch on cuda, got %lld",
                         (long long)(a->sequences * a->length * a->heads));
    return WEFT_OK;
}

weft_status weft_cuda_nn_attention_fwd(weft_nn *nn, const weft_attention *a)
{
    WEFT_TRY(check_size(a));
    NN_ENTER(nn);
    if (takes_mma(&at.call, nn, a)) return weft_cuda_attention_mma_fwd(&at.call, a);
    return launch(&at.call, "attention", NN_BY_DTYPE(nn, fwd_kernel), over_warps(a), *a);
}

weft_status weft_cuda_nn_attention_bwd(weft_nn *nn, const weft_attention *a)
{
    float *delta = (float *)weft_nn_room(nn, (size_t)(a->sequences * a->length * a->heads) * sizeof(float));
    NN_ENTER(nn);
    WEFT_TRY(launch(&at.call, "attention", NN_BY_DTYPE(nn, delta_kernel), over_warps(a), *a, delta));
    if (takes_mma(&at.call, nn, a)) return weft_cuda_attention_mma_bwd(&at.call, a, delta);
    WEFT_TRY(launch(&at.call, "attention", NN_BY_DTYPE(nn, d_query_kernel), over_warps(a), *a, delta));
    return launch(&at.call, "attention", NN_BY_DTYPE(nn, d_key_kernel), over_warps(a), *a, delta);
}
