/* SPDX-License-Identifier: Apache-2.0
 *
 * What a transformer does row by row: SwiGLU [T3], embedding and loss [T4], biases. A block has a row, or a warp has one.
 * Sums over tokens are made of partial sums over chunks of tokens, which a second launch adds in order. */
#include "core/philox.h"
#include "cuda/common/reduce.cuh"
#include "cuda/nn/nn.cuh"

enum { BLOCK = 256, CHUNKS = 64 };

/* A block per row, as many as a grid may have. */
static launch_shape over_rows(int64_t rows)
{
    return {dim3(grid_of(rows > 0 ? rows : 1)), BLOCK};
}

/* ---- SwiGLU: 2F read and F written, backward 3F read and 3F written ------------------------------------------------------- */

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

template <class T, int W> static __global__ void __launch_bounds__(BLOCK) swiglu_kernel(weft_swiglu a)
{
    for (int64_t t = blockIdx.x; t < a.tokens; t += gridDim.x) {
        const T *gate = (const T *)a.gate_up + t * 2 * a.hidden, *up = gate + a.hidden;
        T *act = (T *)a.act + t * a.hidden, *d_gate = (T *)a.d_gate_up + t * 2 * a.hidden;
        for (int64_t i = (int64_t)threadIdx.x * W; i < a.hidden; i += BLOCK * W) {
            float g[W], u[W], d[W], to[W], dg[W], du[W];
            load<T, W>(g, gate + i);
            load<T, W>(u, up + i);
            if (a.d_act) load<T, W>(d, (const T *)a.d_act + t * a.hidden + i);
#pragma unroll
            for (int k = 0; k < W; k++) {
                const float s = sigmoid(g[k]), silu = g[k] * s;
                to[k] = silu * u[k];
                if (!a.d_act) continue;
                dg[k] = d[k] * u[k] * s * __fmaf_rn(g[k], 1.0f - s, 1.0f);
                du[k] = d[k] * silu;
            }
            store<T, W>(act + i, to);
            if (!a.d_act) continue;
            store<T, W>(d_gate + i, dg);
            store<T, W>(d_gate + a.hidden + i, du);
        }
    }
}

template <class T> static weft_status swiglu(const weft_call *call, const weft_swiglu *a)
{
    const bool wide = rows_are_vectors<T>(a->hidden, a->gate_up, a->act, a->d_act);
    return launch(call, "swiglu", wide ? swiglu_kernel<T, number<T>::per_vector> : swiglu_kernel<T, 1>,
                  over_rows(a->tokens), *a);
}

weft_status weft_cuda_nn_swiglu_fwd(weft_nn *nn, const weft_swiglu *a)
{
    weft_swiglu forward = *a;
    forward.d_act = NULL;
    NN_ENTER(nn);
    return NN_BY_DTYPE(nn, swiglu)(&at.call, &forward);
}

weft_status weft_cuda_nn_swiglu_bwd(weft_nn *nn, const weft_swiglu *a)
{
    NN_ENTER(nn);
    return NN_BY_DTYPE(nn, swiglu)(&at.call, a);
}

/* ---- sums over tokens ------------------------------------------------------------------------------------------------------- */

/* to[i] += the sum of parts[c][i] over the chunks c, in order. */
static __global__ void __launch_bounds__(BLOCK)
    fold_kernel(float *to, const float *parts, int chunks, int64_t count)
{
    for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < count; i += (int64_t)gridDim.x * BLOCK) {
        float s = 0.0f;
        for (int c = 0; c < chunks; c++) s += parts[c * count + i];
        to[i] += s;
    }
}

static weft_status fold(const weft_call *call, void *to, const float *parts, int chunks, int64_t count)
{
    return launch(call, "fold", fold_kernel, {dim3(grid_of(ceil_div(count, BLOCK))), BLOCK}, (float *)to, parts,
                  chunks, count);
}

/* ---- biases -------------------------------------------------------------------------------------------------------------------- */

template <class T>
static __global__ void __launch_bounds__(BLOCK)
    bias_kernel(T *rows, const float *bias, int64_t tokens, int64_t width)
{
    for (int64_t t = blockIdx.x; t < tokens; t += gridDim.x)
        for (int64_t i = threadIdx.x; i < width; i += BLOCK)
            rows[t * width + i] = narrow<T>(widen(rows[t * width + i]) + bias[i]);
}

template <class T>
static weft_status bias(const weft_call *call, void *rows, const void *from, int64_t tokens, int64_t width)
{
    return launch(call, "bias", bias_kernel<T>, over_rows(tokens), (T *)rows, (const float *)from, tokens, width);
}

weft_status weft_cuda_nn_bias_fwd(weft_nn *nn, void *rows, const void *from, int64_t tokens, int64_t width)
{
    NN_ENTER(nn);
    return NN_BY_DTYPE(nn, bias)(&at.call, rows, from, tokens, width);
}

/* Eight warps share a chunk of tokens and 32 columns. */
template <class T>
static __global__ void __launch_bounds__(BLOCK)
    columns_kernel(const T *rows, int64_t tokens, int64_t width, int64_t chunk, float *parts)
{
    __shared__ float room[BLOCK / 32][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t begin = blockIdx.y * chunk, end = begin + chunk < tokens ? begin + chunk : tokens;
    const int64_t i = (int64_t)blockIdx.x * 32 + lane;
    float s = 0.0f;
    if (i < width)
        for (int64_t t = begin + warp; t < end; t += BLOCK / 32) s += widen(rows[t * width + i]);
    room[warp][lane] = s;
    __syncthreads();
    if (warp || i >= width) return;
    for (int w = 1; w < BLOCK / 32; w++) s += room[w][lane];
    parts[blockIdx.y * width + i] = s;
}

template <class T>
static weft_status columns(const weft_call *call, const void *rows, int64_t tokens, int64_t width, float *parts)
{
    return launch(call, "bias", columns_kernel<T>, {dim3((unsigned)ceil_div(width, 32), CHUNKS), BLOCK},
                  (const T *)rows, tokens, width, ceil_div(tokens, CHUNKS), parts);
}

weft_status weft_cuda_nn_bias_bwd(weft_nn *nn, const void *rows, void *to, int64_t tokens, int64_t width)
{
    float *parts = (float *)weft_nn_room(nn, (size_t)(CHUNKS * width) * sizeof(float));
    NN_ENTER(nn);
    WEFT_TRY(NN_BY_DTYPE(nn, columns)(&at.call, rows, tokens, width, parts));
    return fold(&at.call, to, parts, CHUNKS, width);
}

/* ---- the plain residual: 2C read and C written, backward C and C ------------------------------------------------------------- */

/* The factors of four neighbouring channels. */
static __device__ __forceinline__ void factors_of(float (&d)[4], const weft_mask &mask, int64_t token, int64_t c)
{
    uint32_t draw[4];
    weft_mask_draw(draw, &mask, token, c / 4);
#pragma unroll
    for (int k = 0; k < 4; k++) d[k] = draw[k] >= mask.threshold ? (float)mask.scale : 0.0f;
}

template <class T, int W> static __global__ void __launch_bounds__(BLOCK) add_kernel(weft_add a)
{
    const weft_mask mask = weft_mask_open(&a.dropout, a.channels);
    const bool back = a.d_f != NULL;
    const T *const from = (const T *)(back ? a.d_y : a.f);
    T *const to = (T *)(back ? a.d_f : a.y);
    for (int64_t t = blockIdx.x; t < a.tokens; t += gridDim.x)
        for (int64_t c = (int64_t)threadIdx.x * W; c < a.channels; c += BLOCK * W) {
            float v[W], x[W];
            load<T, W>(v, from + t * a.channels + c);
            if (!back) load<T, W>(x, (const T *)a.x + t * a.channels + c);
#pragma unroll
            for (int k = 0; k < W; k++)
                if (!back && a.biased) v[k] = v[k] + ((const float *)a.bias)[c + k];
            if (mask.on) {
#pragma unroll
                for (int k = 0; k < W; k += 4) {
                    float d[4];
                    factors_of(d, mask, t, c + k);
                    if constexpr (W == 1)
                        v[0] = v[0] * d[c % 4];
                    else
#pragma unroll
                        for (int e = 0; e < 4; e++) v[k + e] = v[k + e] * d[e];
                }
            }
#pragma unroll
            for (int k = 0; k < W; k++)
                if (!back) v[k] = v[k] + x[k];
            store<T, W>(to + t * a.channels + c, v);
        }
}

template <class T> static weft_status add(const weft_call *call, const weft_add *a)
{
    const bool wide = a->d_f ? rows_are_vectors<T>(a->channels, a->d_y, a->d_f, NULL)
                             : rows_are_vectors<T>(a->channels, a->x, a->f, a->y);
    return launch(call, "residual", wide ? add_kernel<T, number<T>::per_vector> : add_kernel<T, 1>,
                  over_rows(a->tokens), *a);
}

weft_status weft_cuda_nn_add_fwd(weft_nn *nn, const weft_add *a)
{
    weft_add forward = *a;
    forward.d_f = NULL;
    NN_ENTER(nn);
    return NN_BY_DTYPE(nn, add)(&at.call, &forward);
}

weft_status weft_cuda_nn_add_bwd(weft_nn *nn, const weft_add *a)
{
    if (!nn->query) {
        const nn_scope at(nn);
        if (at.status != WEFT_OK) return at.status;
        WEFT_TRY(NN_BY_DTYPE(nn, add)(&at.call, a));
    }
    return a->biased ? weft_cuda_nn_bias_bwd(nn, a->d_f, a->d_bias, a->tokens, a->channels) : WEFT_OK;
}

/* ---- embedding ------------------------------------------------------------------------------------------------------------------ */

template <class T> static __global__ void __launch_bounds__(BLOCK) embed_kernel(weft_embed a)
{
    for (int64_t t = blockIdx.x; t < a.count; t += gridDim.x) {
        const float *from = (const float *)a.weight + a.tokens[t] * a.channels;
        for (int64_t c = threadIdx.x; c < a.channels; c += BLOCK)
            ((T *)a.rows)[t * a.channels + c] = narrow<T>(from[c]);
    }
}

template <class T> static weft_status embed(const weft_call *call, const weft_embed *a)
{
    return launch(call, "embedding", embed_kernel<T>, over_rows(a->count), *a);
}

weft_status weft_cuda_nn_embed_fwd(weft_nn *nn, const weft_embed *a)
{
    NN_ENTER(nn);
    return NN_BY_DTYPE(nn, embed)(&at.call, a);
}

/* The rows of one token of the vocabulary in one chunk: a block looks for them, 256 tokens at a time, and adds them in the
 * order of the tokens. No other block has this sum, so there are no atomics. */
template <class T>
static __global__ void __launch_bounds__(BLOCK)
    embed_bwd_kernel(weft_embed a, int64_t chunk, int64_t spans, float *parts)
{
    __shared__ int found[BLOCK], before[BLOCK / 32 + 1];
    const int64_t word = blockIdx.x / spans, c = blockIdx.x % spans * BLOCK + threadIdx.x;
    const int64_t begin = blockIdx.y * chunk, end = begin + chunk < a.count ? begin + chunk : a.count;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float s = 0.0f;
    for (int64_t t0 = begin; t0 < end; t0 += BLOCK) {
        const int64_t t = t0 + threadIdx.x;
        const bool mine = t < end && a.tokens[t] == word;
        const unsigned all = __ballot_sync(0xffffffffu, mine);
        if (lane == 0) before[warp + 1] = __popc(all);
        __syncthreads();
        if (threadIdx.x == 0) {
            before[0] = 0;
            for (int w = 0; w < BLOCK / 32; w++) before[w + 1] += before[w];
        }
        __syncthreads();
        if (mine) found[before[warp] + __popc(all & ((1u << lane) - 1))] = (int)threadIdx.x;
        __syncthreads();
        const int count = before[BLOCK / 32];
        if (c < a.channels) {
            const T *rows = (const T *)a.rows + t0 * a.channels + c;
#pragma unroll 4
            for (int k = 0; k < count; k++) s += widen(rows[found[k] * a.channels]);
        }
        __syncthreads();
    }
    if (c < a.channels) parts[(blockIdx.y * a.vocab + word) * a.channels + c] = s;
}

/* Chunks of tokens that run side by side: as many as there is reasonable room for. */
static int embed_chunks(const weft_embed *a)
{
    const int64_t room = ((int64_t)16 << 20) / (a->vocab * a->channels), most = CHUNKS;
    return (int)(room < 1 ? 1 : room > most ? most : room);
}

template <class T> static weft_status embed_bwd(const weft_call *call, const weft_embed *a, float *parts)
{
    const int64_t spans = ceil_div(a->channels, BLOCK);
    const int chunks = embed_chunks(a);
    return launch(call, "embedding", embed_bwd_kernel<T>,
                  {dim3((unsigned)(a->vocab * spans), (unsigned)chunks), BLOCK}, *a, ceil_div(a->count, chunks),
                  spans, parts);
}

weft_status weft_cuda_nn_embed_bwd(weft_nn *nn, const weft_embed *a)
{
    const int chunks = embed_chunks(a);
    float *parts = (float *)weft_nn_room(nn, (size_t)(chunks * a->vocab * a->channels) * sizeof(float));
    NN_ENTER(nn);
    WEFT_TRY(NN_BY_DTYPE(nn, embed_bwd)(&at.call, a, parts));
    return fold(&at.call, a->d_weight, parts, chunks, a->vocab * a->channels);
}

/* ---- loss: a warp per row ----------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float warp_max(float v)
{
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        const float other = __shfl_xor_sync(0xffffffffu, v, step);
        v = other > v || isnan(other) ? other : v;
    }
    return v;
}

template <class T> static __global__ void __launch_bounds__(BLOCK) loss_kernel(weft_loss a)
{
    const int lane = threadIdx.x % 32;
    const int64_t step = (int64_t)gridDim.x * (BLOCK / 32);
    for (int64_t t = (int64_t)blockIdx.x * (BLOCK / 32) + threadIdx.x / 32; t < a.tokens; t += step) {
        const float *row = (const float *)a.logits + t * a.vocab;
        const int32_t target = a.targets[t];
        float top = -INFINITY, sum = 0.0f;
        for (int64_t i = lane; i < a.vocab; i += 32) top = row[i] > top || isnan(row[i]) ? row[i] : top;
        top = warp_max(top);
        for (int64_t i = lane; i < a.vocab; i += 32) sum += expf(row[i] - top);
        sum = warp_sum(sum);
        if (a.losses) {
            if (lane == 0) ((float *)a.losses)[t] = target < 0 ? 0.0f : top + logf(sum) - row[target];
            continue;
        }
        const float scale = (float)a.scale, factor = scale / sum;
        T *to = (T *)a.d_logits + t * a.vocab;
        for (int64_t i = lane; i < a.vocab; i += 32) {
            const float p = expf(row[i] - top) * factor;
            to[i] = narrow<T>(target < 0 ? 0.0f : i == target ? p - scale : p);
        }
    }
}

template <class T> static weft_status loss(const weft_call *call, const weft_loss *a)
{
    return launch(call, "loss", loss_kernel<T>, {dim3(grid_of(ceil_div(a->tokens, BLOCK / 32))), BLOCK}, *a);
}

weft_status weft_cuda_nn_loss_fwd(weft_nn *nn, const weft_loss *a)
{
    NN_ENTER(nn);
    return loss<float>(&at.call, a);
}

weft_status weft_cuda_nn_loss_bwd(weft_nn *nn, const weft_loss *a)
{
    weft_loss backward = *a;
    backward.losses = NULL;
    NN_ENTER(nn);
    return NN_BY_DTYPE(nn, loss)(&at.call, &backward);
}
