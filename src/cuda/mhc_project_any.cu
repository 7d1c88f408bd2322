/* SPDX-License-Identifier: Apache-2.0
 *
 * The projection [M1] in plain fp32, for everything that the tensor-core kernels do not take: f32 activations (fp32
 * accuracy throughout), sizes that are no multiple of eight, loose strides, more than 80 rows. Columns are taken in the
 * order stream, channel whatever the layout. */
#include "cuda/common/reduce.cuh"
#include "cuda/mhc_project.cuh"

enum { THREADS = 256, TOKENS = 8, ROWS = 8 };

/* ---- forward ------------------------------------------------------------------------------------------------------------ */

/* A block sums TOKENS x ROWS products over all columns: a register tile, so that a load serves eight products. The rows
 * of the first tile carry the squares with them. */
__global__ void __launch_bounds__(THREADS)
    any_fwd_kernel(view x, weights w, columns k, view h, view ms, int64_t tokens, float mean)
{
    wait_for_previous();
    __shared__ float room[THREADS / 32 * 32];
    const int tiles = (w.rows + ROWS - 1) / ROWS;
    const int64_t items = (tokens + TOKENS - 1) / TOKENS * tiles;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t token0 = item / tiles * TOKENS;
        const int row0 = (int)(item % tiles) * ROWS;
        float acc[TOKENS][ROWS] = {}, sq[TOKENS] = {};
        for (uint32_t column = threadIdx.x; column < k.count; column += THREADS) {
            uint32_t stream = column / k.channels, channel = column % k.channels;
            float psi[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) psi[r] = row0 + r < w.rows ? psi_at(w, row0 + r, stream, channel) : 0.0f;
#pragma unroll
            for (int m = 0; m < TOKENS; m++) {
                const int64_t token = token0 + m;
                if (token >= tokens) break;
                const float v = get(x, token * x.stride[0] + stream * x.stride[1] + channel * x.stride[2]);
                sq[m] = fmaf(v, v, sq[m]);
#pragma unroll
                for (int r = 0; r < ROWS; r++) acc[m][r] = fmaf(v, psi[r], acc[m][r]);
            }
        }
#pragma unroll
        for (int m = 0; m < TOKENS; m += 4) { /* 32 sums at a time */
            float part[32];
#pragma unroll
            for (int e = 0; e < 32; e++) part[e] = acc[m + e / ROWS][e % ROWS];
            block_sums<32>(part, room, THREADS / 32);
            if (threadIdx.x < 32) {
                const int64_t token = token0 + m + threadIdx.x / ROWS;
                const int row = row0 + threadIdx.x % ROWS;
                if (token < tokens && row < w.rows)
                    put(h, token * h.stride[0] + row * h.stride[1], room[threadIdx.x]);
            }
            __syncthreads();
        }
        if (row0 > 0 || !has(ms)) continue;
        block_sums<TOKENS>(sq, room, THREADS / 32);
        if (threadIdx.x < TOKENS && token0 + threadIdx.x < tokens)
            put(ms, (token0 + threadIdx.x) * ms.stride[0], room[threadIdx.x] * mean);
        __syncthreads();
    }
}

weft_status weft_cuda_project_any_fwd(const weft_call *call, const weft_mhc_project_fwd_args *a)
{
    const weights w = {view_of(&a->phi), view_of(&a->norm_weight), (int32_t)call->rows};
    const columns k = columns_of(call, LAYOUT_NC);
    const int64_t items = (call->tokens + TOKENS - 1) / TOKENS * ((call->rows + ROWS - 1) / ROWS);
    const launch_shape shape = {.grid = grid_of(items), .block = THREADS, .shared = 0, .order = OVERLAP};
    return launch(call, "projection", any_fwd_kernel, shape, view_of(&a->x), w, k, view_of(&a->h), view_of(&a->ms),
                  call->tokens, 1.0f / (float)k.count);
}

/* ---- backward ------------------------------------------------------------------------------------------------------------ */

struct any_args {
    view x, d_h, d_ms, d_x, base, pre, du;
    weights w;
    columns k;
    int64_t tokens, split_tokens;
    int32_t across;
    float scale; /* 2 / K */
};

/* A thread owns a column and TOKENS tokens; psi is read once for them. */
__global__ void __launch_bounds__(THREADS) any_dx_kernel(const any_args p)
{
    const int64_t tiles = (p.tokens + TOKENS - 1) / TOKENS;
    const uint32_t column = (uint32_t)(blockIdx.x % (unsigned)p.across) * THREADS + threadIdx.x;
    if (column >= p.k.count) return;
    const uint32_t stream = column / p.k.channels, channel = column % p.k.channels;
    for (int64_t tile = blockIdx.x / (unsigned)p.across; tile < tiles; tile += gridDim.x / (unsigned)p.across) {
        const int64_t token0 = tile * TOKENS;
        float acc[TOKENS] = {};
        for (int row = 0; row < p.w.rows && has(p.d_h); row++) {
            const float psi = psi_at(p.w, row, stream, channel);
#pragma unroll
            for (int m = 0; m < TOKENS; m++)
                if (token0 + m < p.tokens)
                    acc[m] = fmaf(get(p.d_h, (token0 + m) * p.d_h.stride[0] + row * p.d_h.stride[1]), psi, acc[m]);
        }
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            const int64_t token = token0 + m;
            if (token >= p.tokens) break;
            float v = acc[m];
            if (has(p.d_ms))
                v = fmaf(p.scale * get(p.d_ms, token * p.d_ms.stride[0]),
                         get(p.x, token * p.x.stride[0] + stream * p.x.stride[1] + channel * p.x.stride[2]), v);
            float sum = 0.0f;
            if (has(p.base))
                sum =
                    get(p.base, token * p.base.stride[0] + stream * p.base.stride[1] + channel * p.base.stride[2]);
            if (has(p.du)) {
                const float product = get(p.pre, token * p.pre.stride[0] + stream * p.pre.stride[1]) *
                                      get(p.du, token * p.du.stride[0] + channel * p.du.stride[1]);
                sum = has(p.base) ? sum + product : product;
            }
            if (has(p.base) || has(p.du)) v = sum + v;
            put(p.d_x, token * p.d_x.stride[0] + stream * p.d_x.stride[1] + channel * p.d_x.stride[2], v);
        }
    }
}

/* A thread owns a column and ROWS rows of dpsi, and goes through the tokens of its split. */
__global__ void __launch_bounds__(THREADS) any_dpsi_kernel(const any_args p, float *partial)
{
    const uint32_t column = (uint32_t)(blockIdx.x % (unsigned)p.across) * THREADS + threadIdx.x;
    const int64_t split = blockIdx.x / (unsigned)p.across;
    const int row0 = (int)blockIdx.y * ROWS;
    if (column >= p.k.count) return;
    const uint32_t stream = column / p.k.channels, channel = column % p.k.channels;
    const int64_t token0 = split * p.split_tokens;
    const int64_t token1 = token0 + p.split_tokens < p.tokens ? token0 + p.split_tokens : p.tokens;
    float acc[ROWS] = {};
    for (int64_t token = token0; token < token1 && has(p.d_h); token++) {
        const float v = get(p.x, token * p.x.stride[0] + stream * p.x.stride[1] + channel * p.x.stride[2]);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (row0 + r < p.w.rows)
                acc[r] = fmaf(get(p.d_h, token * p.d_h.stride[0] + (row0 + r) * p.d_h.stride[1]), v, acc[r]);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (row0 + r < p.w.rows) partial[(split * p.w.rows + row0 + r) * p.k.count + column] = acc[r];
}

weft_status weft_cuda_project_any_bwd(const weft_call *call, const weft_mhc_project_bwd_args *a,
                                      const project_extra *extra, float *partial, const weft_project_bwd_plan *plan)
{
    any_args p = {.x = view_of(&a->x),
                  .d_h = view_of(&a->d_h),
                  .d_ms = view_of(&a->d_ms),
                  .d_x = view_of(&a->d_x),
                  .base = {},
                  .pre = {},
                  .du = {},
                  .w = {view_of(&a->phi), view_of(&a->norm_weight), (int32_t)call->rows},
                  .k = columns_of(call, LAYOUT_NC),
                  .tokens = call->tokens,
                  .split_tokens = plan->split_tokens,
                  .across = 0,
                  .scale = 0.0f};
    p.scale = 2.0f / (float)p.k.count;
    p.across = (int32_t)((p.k.count + THREADS - 1) / THREADS);
    if (extra) {
        p.pre = view_of(&extra->pre), p.du = view_of(&extra->du), p.base = view_of(&extra->base);
        if (p.d_x.add) p.base = p.d_x;
        p.d_x.add = 0;
    }
    if (has(p.d_x) && call->tokens > 0) {
        const int64_t tiles = (call->tokens + TOKENS - 1) / TOKENS, most = ((int64_t)1 << 30) / p.across;
        const weft_status status =
            launch(call, "projection backward", any_dx_kernel,
                   {.grid = (unsigned)((tiles < most ? tiles : most) * p.across), .block = THREADS}, p);
        if (status != WEFT_OK) return status;
    }
    if (!partial) return WEFT_OK;
    dim3 grid((unsigned)(p.across * plan->splits), (unsigned)((call->rows + ROWS - 1) / ROWS));
    const weft_status status =
        launch(call, "projection backward", any_dpsi_kernel, {.grid = grid, .block = THREADS}, p, partial);
    if (status != WEFT_OK) return status;
    return weft_cuda_project_finish(call, a, partial, plan->splits, p.k);
}
