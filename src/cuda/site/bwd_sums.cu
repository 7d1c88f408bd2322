/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums over a token that the gates of pre and the norm's gradient depend on, in the backward of `boundary` [M11]. With y from
 * memory or rebuilt, a = d_v weight and u as forward rounded it:
 *     d_pre[i] = sum_c d_u y[i]                      where u has a gradient
 *     r, k     = of sum_c u^2 and sum_c a u [N1]     where v has one; then du = r (a - k u), so
 *     d_pre[i] += r (sum_c a y[i] - k sum_c u y[i])
 * which takes one read of the streams; sum_c du y[i] would take two. A team owns a token, as in mhc_aggregate.cu, and writes the
 * results into the token's record: words that the gates kernel, which runs concurrently, does not write. */
#include "core/status.h"
#include "cuda/common/rows.cuh"
#include "cuda/mhc/token_math.cuh"
#include "cuda/norm/rmsnorm.cuh"
#include "cuda/site/bwd.cuh"

enum { BLOCK = 256, TILES = 2 };

/* The gates of pre: `on` where d_pre depends on the sums. */
struct late_gates {
    view h, d_pre_out, ms, alpha, beta;
    gate_numbers numbers;
    float scale; /* 2 / K */
    float *dz;   /* [N + 1][apart]: a token's d_beta of pre and d_alpha[0], or NULL */
    int64_t apart;
    bool on;
};

struct sums_task {
    view x, f, bias, y, d_u, d_v, weight;
    late_gates late;
    uint4 *records;
    weft_dropout dropout;
    int64_t tokens, channels;
    float eps;
    weft_rows_team team;
};

/* One gate of a token: its inputs, and the factors that do not depend on the sums: dz = slope d_pre, and dz times the other factors is
 * its row of d_h and its part of d_alpha and of 2 d_ms / K. They are computed while the loads of the streams are in flight, which
 * shortens the tail of a block after the sums. */
struct late_input {
    float h, d_pre, ms;
};

struct late_factors {
    float slope, d_pre, d_h, d_alpha, d_ms;
};

static __device__ __forceinline__ void get_late(late_input &t, const late_gates &a, int token, int gate)
{
    t.h = get(a.h, token * a.h.stride[0] + gate * a.h.stride[1]);
    t.d_pre =
        has(a.d_pre_out) ? get(a.d_pre_out, token * a.d_pre_out.stride[0] + gate * a.d_pre_out.stride[1]) : 0.0f;
    t.ms = get(a.ms, token * a.ms.stride[0]);
}

static __device__ __forceinline__ late_factors factors_of(const late_input &t, const late_gates &a, int gate)
{
    const float alpha = get(a.alpha, 0), beta = get(a.beta, gate * a.beta.stride[0]);
    const float inv = mm_inv_rms(t.ms, a.numbers.rms_eps, a.numbers.rms_eps_kind);
    const float d_inv = mm_d_inv_rms(t.ms, inv, a.numbers.rms_eps, a.numbers.rms_eps_kind);
    float s, r;
    mm_sigmoid(mm_gate_logit(t.h, inv, alpha, beta), &s, &r);
    return {s * r, t.d_pre, alpha * inv, t.h * inv, alpha * t.h * (a.scale * d_inv)};
}

/* Writes the rows of d_h of pre; the gates kernel writes the others. Returns their part of 2 d_ms / K. */
template <int N, site_kind KIND>
static __device__ __forceinline__ float put_late(uint4 *record, const late_factors *f, const late_gates &a,
                                                 int token, const float *sum)
{
    float dz[N + 1], d_h[N], d_ms = 0.0f;
    dz[N] = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        dz[i] = (f[i].d_pre + sum[i]) * f[i].slope;
        d_h[i] = dz[i] * f[i].d_h;
        dz[N] = fmaf(dz[i], f[i].d_alpha, dz[N]);
        d_ms = fmaf(dz[i], f[i].d_ms, d_ms);
    }
#pragma unroll
    for (int i = 0; i < N; i += 2)
        split2(((uint32_t *)record)[i / 2], ((uint32_t *)(record + boundary_record<N, KIND>::row_tiles))[i / 2],
               d_h[i], d_h[i + 1]);
    if (a.dz)
#pragma unroll
        for (int i = 0; i <= N; i++) a.dz[i * a.apart + token] = dz[i];
    return d_ms;
}

/* Channels of a token that a thread works on at a time: 16 bytes of each stream, or in (C,n) of all of them. */
template <class T, int N, stream_layout L> struct sums_tile {
    static constexpr int width = stream_tile<T, N, L>::width;
    uint32_t s[N * width / 2]; /* y, or x and f; d_v, or d_u where there is no norm */
    raw<T, width> f, g;
};

template <class T, int N, stream_layout L>
static __device__ __forceinline__ void load_tile(sums_tile<T, N, L> &tile, const T *token, int64_t stream, int c)
{
    if constexpr (L == LAYOUT_CN) {
        raw<T, 8> r;
        load_raw(r, token + (int64_t)c * N);
#pragma unroll
        for (int k = 0; k < 4; k++) tile.s[k] = r.word[k];
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            raw<T, 8> r;
            load_raw(r, token + i * stream + c);
#pragma unroll
            for (int k = 0; k < 4; k++) tile.s[4 * i + k] = r.word[k];
        }
    }
}

/* Tiles for each thread: as many bytes in either layout. */
template <class T, int N, stream_layout L>
static constexpr int sums_tiles = TILES *stream_tile<T, N, LAYOUT_NC>::width / stream_tile<T, N, L>::width;

/* At most four blocks per multiprocessor; beside a block of the gates kernel three. */
template <class T, int N, stream_layout L, site_kind KIND, bool REBUILD, bool NORM>
static __global__ void __launch_bounds__(BLOCK, REBUILD || NORM ? 2 : 4)
    sums_kernel(const __grid_constant__ sums_task a)
{
    /* K tiles in flight: as many as the registers hold. */
    constexpr int W = sums_tile<T, N, L>::width, K = sums_tiles<T, N, L> / (REBUILD && NORM ? 2 : 1),
                  M = NORM ? 3 * N + 2 : N;
    typedef boundary_record<N, KIND> R;
    __shared__ float room[BLOCK / 32 * M];
    extern __shared__ late_factors factors[]; /* of the gates of the block's tokens */
    const place p = place_of(a.team);
    const int step = a.team.lanes * W;
    const int tokens = (int)a.tokens;
    const view &streams = REBUILD ? a.x : a.y, &gradient = NORM ? a.d_v : a.d_u;
    weft_mask mask = {};
    if constexpr (REBUILD) mask = weft_mask_open(&a.dropout, a.channels);
    const float scale = (float)mask.scale;
    let_next_begin();
    if constexpr (REBUILD || NORM) wait_for_previous();  /* the records hold the floats of the gates kernel */
    const int base = (int)blockIdx.x * a.team.per_block; /* the grid covers all tokens */
    const int token = base + p.slot, end = token < tokens ? (int)a.channels : 0;
    /* Loads of gates by the last threads first, then the streams by all, then the gates' factors. */
    const int gates = a.late.on ? min(a.team.per_block, tokens - base) * N : 0;
    int gate = (int)(blockDim.x - 1 - threadIdx.x);
    late_input late;
    if (gate < gates) get_late(late, a.late, base + gate / N, gate % N);
    sums_tile<T, N, L> tile[K];
    auto load = [&](int c0) {
#pragma unroll
        for (int b = 0; b < K; b++) {
            const int c = c0 + b * step;
            if (c >= end) continue;
            load_tile(tile[b], (const T *)streams.data + token * streams.stride[0], streams.stride[1], c);
            load_raw(tile[b].g, (const T *)gradient.data + token * gradient.stride[0] + c);
            if constexpr (REBUILD) load_raw(tile[b].f, (const T *)a.f.data + token * a.f.stride[0] + c);
        }
    };
    load(p.lane * W);
    while (gate < gates) {
        factors[gate] = factors_of(late, a.late, gate % N);
        gate += (int)blockDim.x;
        if (gate < gates) get_late(late, a.late, base + gate / N, gate % N);
    }
    float sum[M]; /* d_u or a with y; then u with y, u u, a u, d_u with y */
#pragma unroll
    for (int e = 0; e < M; e++) sum[e] = 0.0f;
    for (int c0 = p.lane * W; c0 < end; c0 += step * K) {
        if (c0 > p.lane * W) load(c0);
        token_coefs<N, KIND> k = {};
        if constexpr (REBUILD || NORM) get_record(k, (const char *)(a.records + (int64_t)token * R::pieces));
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
                get_pair<T, N, W, L>(y, tile[b].s, q);
                widen2(g[0], g[1], tile[b].g.word[q / 2], T());
                if constexpr (REBUILD) {
                    float fb[2], out[N][2];
                    widen2(fb[0], fb[1], tile[b].f.word[q / 2], T());
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
                    for (int o = 0; o < N; o++) widen2(y[o][0], y[o][1], narrow2(out[o][0], out[o][1], T()), T());
                }
                if constexpr (NORM) {
                    float u[2], weight[2] = {1.0f, 1.0f};
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        u[e] = k.pre[0] * y[0][e];
#pragma unroll
                        for (int i = 1; i < N; i++) u[e] = fmaf(k.pre[i], y[i][e], u[e]);
                    }
                    widen2(u[0], u[1], narrow2(u[0], u[1], T()), T());
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
                        get_wide<T, 2>(d_u, a.d_u, token * a.d_u.stride[0] + c + q);
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
    if (a.team.lanes <= 32) __syncthreads(); /* otherwise team_sums synchronises the block */
    team_sums<M>(sum, a.team, room);
    if (end && p.lane == 0) {
        float r = 0.0f, k = 0.0f;
        if constexpr (NORM) {
            r = inverse_rms(sum[2 * N], a.channels, a.eps);
            k = sum[2 * N + 1] / (float)a.channels * r * r;
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] = fmaf(fmaf(sum[N + i], -k, sum[i]), r, sum[2 * N + 2 + i]);
        }
        uint4 *const record = a.records + (int64_t)token * R::pieces;
        float *const rest = (float *)(record + R::rest_at);
        const float part = a.late.on ? put_late<N, KIND>(record, factors + p.slot * N, a.late, token, sum) : 0.0f;
        rest[1] = r, *(float2 *)(rest + 2) = make_float2(k, part);
    }
    /* This kernel runs beside the previous one; its last block waits for it, so that a kernel that waits for this one waits for both. */
    if (blockIdx.x == gridDim.x - 1) wait_for_previous();
}

template <class T, int N, stream_layout L, site_kind KIND>
static weft_status run(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const bool norm = weft_has(&a->d_v);
    const weft_rows_sum plan =
        weft_rows_plan_sum(call->tokens, call->channels, sums_tile<T, N, L>::width, sums_tiles<T, N, L>, BLOCK);
    const sums_task task = {.x = view_of(&a->x),
                            .f = view_of(&a->f),
                            .bias = view_of(&a->bias),
                            .y = view_of(&a->y),
                            .d_u = view_of(&a->d_u),
                            .d_v = view_of(&a->d_v),
                            .weight = view_of(&a->sub_weight),
                            .late = {.h = view_of(&a->h),
                                     .d_pre_out = view_of(&a->d_pre_out),
                                     .ms = view_of(&a->ms),
                                     .alpha = view_of(&a->alpha),
                                     .beta = view_of(&a->beta),
                                     .numbers = numbers_of(&a->numerics),
                                     .scale = 2.0f / (float)(call->streams * call->channels),
                                     .dz = w->late,
                                     .apart = w->plan.tiles * BOUNDARY_TILE,
                                     .on = w->late_pre},
                            .records = w->records,
                            .dropout = a->dropout,
                            .tokens = call->tokens,
                            .channels = call->channels,
                            .eps = (float)a->sub_eps,
                            .team = plan.team};
    void (*kernel)(sums_task) = sums_kernel<T, N, L, KIND, false, false>;
    if constexpr (KIND != SITE_HEAD)
        if (norm) kernel = sums_kernel<T, N, L, KIND, false, true>;
    if constexpr (KIND == SITE_BOUNDARY)
        if (!w->stored)
            kernel = norm ? sums_kernel<T, N, L, KIND, true, true> : sums_kernel<T, N, L, KIND, true, false>;
    return launch(call, "sums over y", kernel,
                  {.grid = dim3((unsigned)plan.grid),
                   .block = (unsigned)plan.block,
                   .shared = sizeof(late_factors) * (size_t)(plan.team.per_block * N),
                   .order = OVERLAP},
                  task);
}

weft_status weft_cuda_boundary_bwd_sums(const weft_call *call, const boundary_work *w)
{
    return of_memory(call, w, [&](auto type, auto layout) {
        return of_site(call, w, [&](auto n, auto kind) {
            return run<decltype(type), n.value, layout.value, kind.value>(call, w);
        });
    });
}
