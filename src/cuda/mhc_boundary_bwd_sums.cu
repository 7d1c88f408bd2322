/* SPDX-License-Identifier: Apache-2.0
 *
 * The sums over a token that boundary's backward waits for [M11]. With y from memory or rebuilt, a = d_v weight and u as
 * forward rounded it:
 *     d_pre[i] = sum_c d_u y[i]                      where u has a gradient
 *     r, k     = of sum_c u^2 and sum_c a u [N1]     where v has one, and then du = r (a - k u), so
 *     d_pre[i] += r (sum_c a y[i] - k sum_c u y[i])
 * which needs one pass where a sum of du y[i] would need two. A team owns a token, as in mhc_aggregate.cu. */
#include "core/status.h"
#include "cuda/common/rows.cuh"
#include "cuda/mhc_boundary_bwd.cuh"

enum { BLOCK = 256, TILES = 2 };

struct sums_task {
    view x, f, bias, y, d_u, d_v, weight, d_pre_out, d_pre;
    const uint4 *records;
    float2 *norm;
    weft_dropout dropout;
    int64_t tokens, channels;
    float eps;
    weft_rows_team team;
};

/* W channels of a token as they lie in memory. */
template <int N> struct sums_tile {
    raw<bf16, 8> s[N], f, g; /* y, or x and f; d_v, or d_u where there is no norm */
};

template <int N, bool REBUILD, bool NORM>
static __global__ void __launch_bounds__(BLOCK, 2) sums_kernel(const __grid_constant__ sums_task a)
{
    /* As many tiles on their way as the registers hold. */
    constexpr int W = 8, K = REBUILD && NORM ? 1 : TILES, M = NORM ? 3 * N + 2 : N;
    typedef boundary_record<N> R;
    __shared__ float room[BLOCK / 32 * M];
    const place p = place_of(a.team);
    const int step = a.team.lanes * W;
    const int64_t stride = (int64_t)gridDim.x * a.team.per_block;
    const view &streams = REBUILD ? a.x : a.y, &gradient = NORM ? a.d_v : a.d_u;
    weft_mask mask = {};
    if constexpr (REBUILD) mask = weft_mask_open(&a.dropout, a.channels);
    const float scale = (float)mask.scale;
    for (int64_t base = (int64_t)blockIdx.x * a.team.per_block; base < a.tokens; base += stride) {
        const int64_t token = base + p.slot;
        const int end = token < a.tokens ? (int)a.channels : 0;
        float sum[M]; /* d_u or a with y; then u with y, u u, a u, d_u with y */
#pragma unroll
        for (int e = 0; e < M; e++) sum[e] = 0.0f;
        for (int c0 = p.lane * W; c0 < end; c0 += step * K) {
            sums_tile<N> tile[K];
#pragma unroll
            for (int b = 0; b < K; b++) {
                const int c = c0 + b * step;
                if (c >= end) continue;
#pragma unroll
                for (int i = 0; i < N; i++)
                    load_raw(tile[b].s[i],
                             (const bf16 *)streams.data + token * streams.stride[0] + i * streams.stride[1] + c);
                load_raw(tile[b].g, (const bf16 *)gradient.data + token * gradient.stride[0] + c);
                if constexpr (REBUILD) load_raw(tile[b].f, (const bf16 *)a.f.data + token * a.f.stride[0] + c);
            }
            token_coefs<N> k = {};
            if constexpr (REBUILD || NORM) get_record<N>(k, (const char *)(a.records + token * R::pieces));
#pragma unroll
            for (int b = 0; b < K; b++) {
                const int c = c0 + b * step;
                if (c >= end) continue;
                uint32_t keep[N] = {};
                if constexpr (REBUILD)
                    if (mask.on) keep_tile<N, W>(keep, mask, token, c);
#pragma unroll
                for (int q = 0; q < W; q += 2) {
                    float y[N][2], g[2], d_u[2];
#pragma unroll
                    for (int i = 0; i < N; i++) widen2(y[i][0], y[i][1], tile[b].s[i].word[q / 2], bf16());
                    widen2(g[0], g[1], tile[b].g.word[q / 2], bf16());
                    if constexpr (REBUILD) {
                        float fb[2], out[N][2];
                        widen2(fb[0], fb[1], tile[b].f.word[q / 2], bf16());
                        if (has(a.bias)) {
                            float bias[2];
                            get_param<2>(bias, a.bias, c + q);
                            fb[0] = fb[0] + bias[0], fb[1] = fb[1] + bias[1];
                        }
#pragma unroll
                        for (int o = 0; o < N; o++) {
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                out[o][e] = k.post[o] * fb[e];
                                if (mask.on) out[o][e] = out[o][e] * (keep[o] >> (q + e) & 1 ? scale : 0.0f);
#pragma unroll
                                for (int i = 0; i < N; i++) out[o][e] = fmaf(k.w[o][i], y[i][e], out[o][e]);
                            }
                        }
#pragma unroll
                        for (int o = 0; o < N; o++)
                            widen2(y[o][0], y[o][1], narrow2(out[o][0], out[o][1], bf16()), bf16());
                    }
                    if constexpr (NORM) {
                        float u[2], weight[2] = {1.0f, 1.0f};
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            u[e] = k.pre[0] * y[0][e];
#pragma unroll
                            for (int i = 1; i < N; i++) u[e] = fmaf(k.pre[i], y[i][e], u[e]);
                        }
                        widen2(u[0], u[1], narrow2(u[0], u[1], bf16()), bf16());
                        if (has(a.weight)) get_param<2>(weight, a.weight, c + q);
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            g[e] = g[e] * weight[e];
                            sum[2 * N] = fmaf(u[e], u[e], sum[2 * N]);
                            sum[2 * N + 1] = fmaf(g[e], u[e], sum[2 * N + 1]);
#pragma unroll
                            for (int i = 0; i < N; i++) sum[N + i] = fmaf(u[e], y[i][e], sum[N + i]);
                        }
                        if (has(a.d_u)) {
                            get_wide<bf16, 2>(d_u, a.d_u, token * a.d_u.stride[0] + c + q);
#pragma unroll
                            for (int e = 0; e < 2; e++)
#pragma unroll
                                for (int i = 0; i < N; i++)
                                    sum[2 * N + 2 + i] = fmaf(d_u[e], y[i][e], sum[2 * N + 2 + i]);
                        }
                    }
#pragma unroll
                    for (int e = 0; e < 2; e++)
#pragma unroll
                        for (int i = 0; i < N; i++) sum[i] = fmaf(g[e], y[i][e], sum[i]);
                }
            }
        }
        team_sums<M>(sum, a.team, room);
        if (!end) continue;
        if constexpr (NORM) {
            const float r = 1.0f / sqrtf(sum[2 * N] / (float)a.channels + a.eps);
            const float k = sum[2 * N + 1] / (float)a.channels * r * r;
            if (p.lane == 0) a.norm[token] = make_float2(r, k);
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] = fmaf(fmaf(sum[N + i], -k, sum[i]), r, sum[2 * N + 2 + i]);
        }
        if (!has(a.d_pre)) continue;
        float d_pre[N];
#pragma unroll
        for (int i = 0; i < N; i++) d_pre[i] = sum[i];
        if (has(a.d_pre_out)) {
            float before[N];
            get_coefs(before, a.d_pre_out, token);
#pragma unroll
            for (int i = 0; i < N; i++) d_pre[i] = before[i] + d_pre[i];
        }
        put_coefs<N>(a.d_pre, token, 0, N, d_pre, p.lane, a.team.lanes);
    }
}

template <int N> static weft_status run(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const bool norm = weft_has(&a->d_v);
    const weft_rows_sum plan = weft_rows_plan_sum(call->tokens, call->channels, 8, TILES, BLOCK);
    const sums_task task = {.x = view_of(&a->x),
                            .f = view_of(&a->f),
                            .bias = view_of(&a->bias),
                            .y = view_of(&a->y),
                            .d_u = view_of(&a->d_u),
                            .d_v = view_of(&a->d_v),
                            .weight = view_of(&a->sub_weight),
                            .d_pre_out = view_of(&a->d_pre_out),
                            .d_pre = view_of(&w->d_pre),
                            .records = w->records,
                            .norm = w->norm,
                            .dropout = a->dropout,
                            .tokens = call->tokens,
                            .channels = call->channels,
                            .eps = (float)a->sub_eps,
                            .team = plan.team};
    return launch(call, "sums over y",
                  norm ? (w->stored ? sums_kernel<N, false, true> : sums_kernel<N, true, true>)
                       : (w->stored ? sums_kernel<N, false, false> : sums_kernel<N, true, false>),
                  {dim3((unsigned)plan.grid), (unsigned)plan.block}, task);
}

weft_status weft_cuda_boundary_bwd_sums(const weft_call *call, const boundary_work *w)
{
    return call->streams == 2 ? run<2>(call, w) : run<4>(call, w);
}
