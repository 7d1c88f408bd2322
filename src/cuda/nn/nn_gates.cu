/* SPDX-License-Identifier: Apache-2.0
 *
 * The gates of the unconstrained connection [T5], and what residual maps do together: small matrices, token by token. */
#include "cuda/common/reduce.cuh"
#include "cuda/nn/nn.cuh"

enum { BLOCK = 256, CHUNKS = 32 };

/* ---- gates -------------------------------------------------------------------------------------------------------------------- */

/* Where entry k of stream j's row of h goes: group (0 pre, 1 post, 2 res), its place in beta, and in the group. */
struct hc_place {
    int group, place, inside;
};

static __device__ __forceinline__ hc_place place_at(int n, int j, int k)
{
    if (k < 2) return {k, k * n + j, j};
    return {2, 2 * n + j * n + k - 2, j * n + k - 2};
}

static __device__ __forceinline__ int64_t width_of(int group, int n)
{
    return group < 2 ? n : n * n;
}

/* A choice, not an array: that would lie in local memory. */
static __device__ __forceinline__ const float *of_group(int group, const void *pre, const void *post,
                                                        const void *res)
{
    return (const float *)(group == 0 ? pre : group == 1 ? post : res);
}

/* A thread per token and stream. */
template <bool BACK> static __global__ void __launch_bounds__(BLOCK) gates_kernel(weft_hc_gates a)
{
    const int n = (int)a.streams;
    const int64_t rows = a.tokens * n;
    for (int64_t r = (int64_t)blockIdx.x * BLOCK + threadIdx.x; r < rows; r += (int64_t)gridDim.x * BLOCK) {
        const int64_t t = r / n;
        const float inv = 1.0f / sqrtf(((const float *)a.ms)[r] + (float)a.eps);
        float d_inv = 0.0f;
        for (int k = 0; k < n + 2; k++) {
            const hc_place p = place_at(n, (int)(r - t * n), k);
            const int64_t e = t * width_of(p.group, n) + p.inside;
            const float h = ((const float *)a.h)[r * (n + 2) + k], alpha = ((const float *)a.alpha)[p.group];
            const float th = tanhf(h * inv);
            if constexpr (BACK) {
                const float dz = of_group(p.group, a.d_pre, a.d_post, a.d_res)[e] * alpha * (1.0f - th * th);
                ((float *)a.d_h)[r * (n + 2) + k] = dz * inv;
                d_inv = __fmaf_rn(dz, h, d_inv);
            } else
                ((float *)of_group(p.group, a.pre, a.post, a.res))[e] =
                    __fmaf_rn(alpha, th, ((const float *)a.beta)[p.place]);
        }
        if constexpr (BACK) ((float *)a.d_ms)[r] = -0.5f * inv * inv * inv * d_inv;
    }
}

/* A block per gate and chunk of tokens: the sums of g and of g tanh. */
static __global__ void __launch_bounds__(BLOCK) gate_sums_kernel(weft_hc_gates a, int64_t chunk, float *parts)
{
    __shared__ float room[BLOCK / 32 * 2];
    const int n = (int)a.streams, gates = n * (n + 2), j = (int)blockIdx.x / (n + 2), k = (int)blockIdx.x % (n + 2);
    const hc_place p = place_at(n, j, k);
    const int64_t begin = blockIdx.y * chunk, end = begin + chunk < a.tokens ? begin + chunk : a.tokens;
    const float *const from = of_group(p.group, a.d_pre, a.d_post, a.d_res);
    float sums[2] = {0.0f, 0.0f};
    for (int64_t t = begin + threadIdx.x; t < end; t += BLOCK) {
        const float inv = 1.0f / sqrtf(((const float *)a.ms)[t * n + j] + (float)a.eps);
        const float g = from[t * width_of(p.group, n) + p.inside];
        sums[0] += g;
        sums[1] = __fmaf_rn(g, tanhf(((const float *)a.h)[(t * n + j) * (n + 2) + k] * inv), sums[1]);
    }
    block_sums<2>(sums, room, BLOCK / 32);
    if (threadIdx.x < 2) parts[(blockIdx.y * gates + p.place) * 2 + threadIdx.x] = room[threadIdx.x];
}

/* One block: gates in order, chunks in order. */
static __global__ void __launch_bounds__(BLOCK) gate_fold_kernel(weft_hc_gates a, const float *parts)
{
    __shared__ float with_tanh[WEFT_MAX_STREAMS * (WEFT_MAX_STREAMS + 2)];
    const int n = (int)a.streams, gates = n * (n + 2);
    for (int p = threadIdx.x; p < gates; p += BLOCK) {
        float beta = 0.0f, alpha = 0.0f;
        for (int c = 0; c < CHUNKS; c++) {
            beta += parts[(c * gates + p) * 2];
            alpha += parts[(c * gates + p) * 2 + 1];
        }
        ((float *)a.d_beta)[p] += beta;
        with_tanh[p] = alpha;
    }
    __syncthreads();
    if (threadIdx.x >= 3) return;
    const int group = (int)threadIdx.x, begin = group * n, end = group < 2 ? begin + n : gates;
    float s = 0.0f;
    for (int p = begin; p < end; p++) s += with_tanh[p];
    ((float *)a.d_alpha)[group] += s;
}

static launch_shape over(int64_t items)
{
    return {dim3(grid_of(ceil_div(items > 0 ? items : 1, BLOCK))), BLOCK};
}

weft_status weft_cuda_nn_hc_gates_fwd(weft_nn *nn, const weft_hc_gates *a)
{
    NN_ENTER(nn);
    return launch(&at.call, "gates", gates_kernel<false>, over(a->tokens * a->streams), *a);
}

weft_status weft_cuda_nn_hc_gates_bwd(weft_nn *nn, const weft_hc_gates *a)
{
    const int64_t gates = a->streams * (a->streams + 2);
    float *parts = (float *)weft_nn_room(nn, (size_t)(CHUNKS * gates * 2) * sizeof(float));
    NN_ENTER(nn);
    WEFT_TRY(launch(&at.call, "gates", gates_kernel<true>, over(a->tokens * a->streams), *a));
    WEFT_TRY(launch(&at.call, "gates", gate_sums_kernel, {dim3((unsigned)gates, CHUNKS), BLOCK}, *a,
                    ceil_div(a->tokens, CHUNKS), parts));
    return launch(&at.call, "gates", gate_fold_kernel, {dim3(1), BLOCK}, *a, parts);
}

/* ---- residual maps ------------------------------------------------------------------------------------------------------------- */

/* A thread per token and column, which the map replaces by itself times the column. */
static __global__ void __launch_bounds__(BLOCK) compose_kernel(weft_compose a)
{
    __shared__ float room[BLOCK][WEFT_MAX_STREAMS + 1];
    const int n = (int)a.streams;
    const int64_t columns = a.tokens * n;
    for (int64_t e = (int64_t)blockIdx.x * BLOCK + threadIdx.x; e < columns; e += (int64_t)gridDim.x * BLOCK) {
        const int64_t t = e / n;
        const int c = (int)(e - t * n);
        const float *w = (const float *)a.res + t * n * n;
        float *to = (float *)a.to + t * n * n, *column = room[threadIdx.x];
        for (int i = 0; i < n; i++) column[i] = a.first ? (i == c ? 1.0f : 0.0f) : to[i * n + c];
        for (int o = 0; o < n; o++) {
            float s = 0.0f;
            for (int i = 0; i < n; i++) s = __fmaf_rn(a.in_out ? w[i * n + o] : w[o * n + i], column[i], s);
            to[o * n + c] = s;
        }
    }
}

weft_status weft_cuda_nn_compose(weft_nn *nn, const weft_compose *a)
{
    NN_ENTER(nn);
    return launch(&at.call, "compose", compose_kernel, over(a->tokens * a->streams), *a);
}

static __device__ __forceinline__ double larger(double a, double b)
{
    return b > a || isnan(b) ? b : a;
}

/* One block: mean and largest of the largest absolute row sums, then of the column sums. */
static __global__ void __launch_bounds__(BLOCK) gains_kernel(const float *maps, int64_t tokens, int n, double *to)
{
    __shared__ double sums[BLOCK], tops[BLOCK];
    for (int side = 0; side < 2; side++) {
        double sum = 0, top = 0;
        for (int64_t t = threadIdx.x; t < tokens; t += BLOCK) {
            const float *map = maps + t * n * n;
            double most = 0;
            for (int i = 0; i < n; i++) {
                double s = 0;
                for (int j = 0; j < n; j++) s += fabs((double)(side ? map[j * n + i] : map[i * n + j]));
                most = larger(most, s);
            }
            sum += most;
            top = larger(top, most);
        }
        sums[threadIdx.x] = sum;
        tops[threadIdx.x] = top;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < BLOCK; i++) sum += sums[i], top = larger(top, tops[i]);
            to[2 * side] = sum / (double)tokens;
            to[2 * side + 1] = top;
        }
        __syncthreads();
    }
}

weft_status weft_cuda_nn_gains(weft_nn *nn, const void *maps, int64_t tokens, int64_t streams, double gains[4])
{
    double *room = (double *)weft_nn_room(nn, 4 * sizeof *room);
    NN_ENTER(nn);
    WEFT_TRY(
        launch(&at.call, "gains", gains_kernel, {dim3(1), BLOCK}, (const float *)maps, tokens, (int)streams, room));
    return nn_read(&at.call, gains, room, 4 * sizeof *room);
}
