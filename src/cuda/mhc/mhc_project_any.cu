/* SPDX-License-Identifier: Apache-2.0
 *
 * The projection [M1] in plain fp32, for everything that the tensor-core kernels do not take: f32 activations (fp32
 * accuracy throughout), sizes that are no multiple of eight, loose strides, more than 80 rows. Columns are taken in the
 * order stream, channel whatever the layout. */
#include "cuda/mhc/mhc_project_any.cuh"

enum { THREADS = ANY_THREADS, TOKENS = ANY_TOKENS, ROWS = ANY_ROWS };

/* ---- forward ------------------------------------------------------------------------------------------------------------ */

template <bool PAIRS>
static __global__ void __launch_bounds__(THREADS, 2)
    any_fwd_kernel(const any_operands p, view h, view ms, float mean)
{
    wait_for_previous();
    __shared__ float room[THREADS];
    const int tiles = (p.w.rows + ROWS - 1) / ROWS;
    const int64_t items = (p.tokens + TOKENS - 1) / TOKENS * tiles;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x)
        any_sums<PAIRS>(p, item / tiles * TOKENS, (int)(item % tiles) * ROWS, room,
                        [&](int64_t token, int row, float sum) {
                            if (row < p.w.rows)
                                put(h, token * h.stride[0] + row * h.stride[1], sum);
                            else if (has(ms))
                                put(ms, token * ms.stride[0], sum * mean);
                        });
}

weft_status weft_cuda_project_any_fwd(const weft_call *call, const weft_mhc_project_fwd_args *a)
{
    const any_operands p = {view_of(&a->x),
                            {view_of(&a->phi), view_of(&a->norm_weight), (int32_t)call->rows},
                            columns_of(call, LAYOUT_NC),
                            call->tokens};
    const int64_t items = (call->tokens + TOKENS - 1) / TOKENS * ((call->rows + ROWS - 1) / ROWS);
    const launch_shape shape = {.grid = grid_of(items), .block = THREADS, .shared = 0, .order = OVERLAP};
    const bool pairs = any_in_pairs(&a->x, &a->phi, &a->norm_weight);
    return launch(call, "projection", pairs ? any_fwd_kernel<true> : any_fwd_kernel<false>, shape, p,
                  view_of(&a->h), view_of(&a->ms), 1.0f / (float)p.k.count);
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
