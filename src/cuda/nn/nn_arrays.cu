/* SPDX-License-Identifier: Apache-2.0
 *
 * Whole arrays: the arithmetic of optimisers [T6], norms, and the search for values that are not finite. Each element is
 * read and written once; a sum is made of a fixed number of partial sums in double. */
#include "cuda/nn/nn.cuh"

enum { BLOCK = 256, PARTS = 512 };

/* Blocks for a loop over `count` items; the kernels step through what is left. */
static launch_shape over(int64_t count)
{
    return {dim3(grid_of(ceil_div(count > 0 ? count : 1, BLOCK))), BLOCK};
}

static __device__ __forceinline__ int64_t first_item()
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ __forceinline__ int64_t next_item()
{
    return (int64_t)gridDim.x * blockDim.x;
}

/* ---- narrow, copy, fill ----------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(BLOCK) narrow_kernel(bf16 *to, const float *from, int64_t count)
{
    const int64_t whole = count / 8;
    for (int64_t i = first_item(); i < whole; i += next_item()) {
        float v[8];
        load<float, 8>(v, from + 8 * i);
        store<bf16, 8>(to + 8 * i, v);
    }
    const int64_t last = whole * 8 + first_item();
    if (last < count) to[last] = narrow<bf16>(from[last]);
}

weft_status weft_cuda_nn_narrow(weft_nn *nn, void *to, const void *from, int64_t count)
{
    NN_ENTER(nn);
    return launch(&at.call, "narrow", narrow_kernel, over(ceil_div(count, 8)), (bf16 *)to, (const float *)from,
                  count);
}

weft_status weft_cuda_nn_copy(weft_nn *nn, void *to, const void *from, int64_t count)
{
    NN_ENTER(nn);
    CUDA_TRY(&at.call, "copy",
             cudaMemcpyAsync(to, from, (size_t)count * weft_dtype_size(nn->table->dtype), cudaMemcpyDeviceToDevice,
                             stream_of(&at.call)));
    return WEFT_OK;
}

static __global__ void __launch_bounds__(BLOCK) fill_kernel(float *to, float value, int64_t count)
{
    for (int64_t i = first_item(); i < count; i += next_item()) to[i] = value;
}

weft_status weft_cuda_nn_fill(weft_nn *nn, void *to, double value, int64_t count)
{
    NN_ENTER(nn);
    return launch(&at.call, "fill", fill_kernel, over(count), (float *)to, (float)value, count);
}

/* ---- blend, AdamW ------------------------------------------------------------------------------------------------------- */

/* NaN where nothing is to be done. */
static __device__ __forceinline__ double factor_of(const double *factor)
{
    return factor ? *factor : 1.0;
}

static __global__ void __launch_bounds__(BLOCK) blend_kernel(weft_blend s)
{
    const double factor = factor_of(s.factor);
    if (!isfinite(factor) || !isfinite(factor_of(s.guard))) return;
    float *to = (float *)s.to;
    const float a = (float)s.a, b = (float)(s.b * factor);
    for (int64_t i = first_item(); i < s.count; i += next_item()) {
        const float old = a == 0.0f ? 0.0f : to[i] * a; /* NaN times nothing is nothing */
        to[i] = __fmaf_rn(((const float *)s.from)[i], b, old);
    }
}

weft_status weft_cuda_nn_blend(weft_nn *nn, const weft_blend *a)
{
    NN_ENTER(nn);
    return launch(&at.call, "blend", blend_kernel, over(a->count), *a);
}

static __global__ void __launch_bounds__(BLOCK) adam_kernel(weft_adam a)
{
    const double factor = factor_of(a.factor);
    if (!isfinite(factor)) return;
    float *p = (float *)a.parameter, *m = (float *)a.first, *v = (float *)a.second;
    const float scale = (float)(a.scale * factor), b1 = (float)a.beta1, b2 = (float)a.beta2;
    const float rest1 = (float)(1 - a.beta1), rest2 = (float)(1 - a.beta2);
    const float shrink = (float)(1 - a.rate * a.decay), rate = (float)(a.rate * a.correct1);
    const float correct = (float)a.correct2, eps = (float)a.eps;
    for (int64_t i = first_item(); i < a.count; i += next_item()) {
        const float g = ((const float *)a.gradient)[i] * scale;
        const float first = __fmaf_rn(g, rest1, m[i] * b1), second = __fmaf_rn(g * g, rest2, v[i] * b2);
        m[i] = first;
        v[i] = second;
        p[i] = p[i] * shrink - first * rate / (sqrtf(second * correct) + eps);
    }
}

weft_status weft_cuda_nn_adam(weft_nn *nn, const weft_adam *a)
{
    NN_ENTER(nn);
    return launch(&at.call, "adam", adam_kernel, over(a->count), *a);
}

/* ---- sums ------------------------------------------------------------------------------------------------------------------ */

/* Over a block, in the order of lanes and warps; all threads get it. */
static __device__ double block_sum(double v)
{
    __shared__ double room[BLOCK / 32];
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
    __syncthreads();
    v = room[0];
    for (int w = 1; w < BLOCK / 32; w++) v += room[w];
    __syncthreads();
    return v;
}

static __device__ __forceinline__ double term(float v, bool squares)
{
    return squares ? (double)v * (double)v : (double)v;
}

/* Block b adds the elements from b * span on, four neighbours to a thread. */
static __global__ void __launch_bounds__(BLOCK)
    sum_kernel(const float *values, int64_t count, int64_t span, bool squares, double *parts)
{
    const int64_t begin = blockIdx.x * span, end = begin + span < count ? begin + span : count;
    const bool aligned = (uintptr_t)values % 16 == 0; /* of speed alone: the order is the same */
    double s = 0;
    for (int64_t i = begin + 4 * threadIdx.x; i < end; i += 4 * BLOCK) {
        float v[4] = {0, 0, 0, 0};
        if (aligned && i + 4 <= end)
            load<float, 4>(v, values + i);
        else
            for (int k = 0; k < 4 && i + k < end; k++) v[k] = values[i + k];
#pragma unroll
        for (int k = 0; k < 4; k++) s += term(v[k], squares);
    }
    s = block_sum(s);
    if (threadIdx.x == 0) parts[blockIdx.x] = s;
}

static __device__ double sum_of_parts(const double *parts)
{
    double s = 0;
    for (int i = threadIdx.x; i < PARTS; i += BLOCK) s += parts[i];
    return block_sum(s);
}

static __global__ void __launch_bounds__(BLOCK) sum_parts_kernel(const double *parts, double *sum)
{
    const double s = sum_of_parts(parts);
    if (threadIdx.x == 0) *sum = s;
}

static weft_status sum_to_parts(const weft_call *call, const void *values, int64_t count, bool squares,
                                double *parts)
{
    const int64_t span = ceil_div(ceil_div(count, PARTS), 4 * BLOCK) * 4 * BLOCK;
    return launch(call, "sum", sum_kernel, {dim3(PARTS), BLOCK}, (const float *)values, count, span, squares,
                  parts);
}

weft_status weft_cuda_nn_sum(weft_nn *nn, const void *values, int64_t count, int32_t squares, double *sum)
{
    double *parts = (double *)weft_nn_room(nn, PARTS * sizeof *parts);
    NN_ENTER(nn);
    WEFT_TRY(sum_to_parts(&at.call, values, count, squares != 0, parts));
    return launch(&at.call, "sum", sum_parts_kernel, {dim3(1), BLOCK}, parts, sum);
}

/* Every block adds the partial sums up by itself: there are few. */
static __global__ void __launch_bounds__(BLOCK)
    unit_kernel(float *to, const float *from, int64_t count, const double *parts)
{
    const float factor = (float)(1.0 / (sqrt(sum_of_parts(parts)) + 1e-7));
    for (int64_t i = first_item(); i < count; i += next_item()) to[i] = from[i] * factor;
}

weft_status weft_cuda_nn_unit(weft_nn *nn, void *to, const void *from, int64_t count)
{
    double *parts = (double *)weft_nn_room(nn, PARTS * sizeof *parts);
    NN_ENTER(nn);
    WEFT_TRY(sum_to_parts(&at.call, from, count, true, parts));
    return launch(&at.call, "unit", unit_kernel, {dim3(PARTS), BLOCK}, (float *)to, (const float *)from, count,
                  parts);
}

static __global__ void clip_kernel(weft_clip_task a)
{
    double sum = 0;
    for (int i = 0; i < a.count; i++) sum += a.sums[i];
    bool finite = isfinite(sum);
    for (int i = 0; i < a.num_others; i++) finite = finite && isfinite(a.others[i]);
    const double norm = sqrt(sum);
    *a.norm = norm;
    *a.factor = !finite ? nan("") : a.largest > 0 && norm > a.largest ? a.largest / norm : 1.0;
}

weft_status weft_cuda_nn_clip(weft_nn *nn, const weft_clip_task *a)
{
    NN_ENTER(nn);
    return launch(&at.call, "clip", clip_kernel, {dim3(1), 1}, *a);
}

/* ---- values that are not finite ------------------------------------------------------------------------------------------- */

template <class T>
static __global__ void __launch_bounds__(BLOCK)
    bad_kernel(const T *values, int64_t count, unsigned long long *first)
{
    for (int64_t i = first_item(); i < count; i += next_item())
        if (!isfinite(widen(values[i]))) atomicMin(first, (unsigned long long)i);
}

weft_status weft_cuda_nn_first_bad(weft_nn *nn, const void *values, weft_dtype dtype, int64_t count, int64_t *index)
{
    unsigned long long *first = (unsigned long long *)weft_nn_room(nn, sizeof *first);
    *index = -1;
    NN_ENTER(nn);
    if (count == 0) return WEFT_OK;
    CUDA_TRY(&at.call, "first bad", cudaMemsetAsync(first, 0xff, sizeof *first, stream_of(&at.call)));
    if (dtype == WEFT_BF16)
        WEFT_TRY(launch(&at.call, "first bad", bad_kernel<bf16>, over(count), (const bf16 *)values, count, first));
    else
        WEFT_TRY(
            launch(&at.call, "first bad", bad_kernel<float>, over(count), (const float *)values, count, first));
    return nn_read(&at.call, index, first, sizeof *index); /* all bits set: none */
}
