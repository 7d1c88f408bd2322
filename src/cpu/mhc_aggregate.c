/* SPDX-License-Identifier: Apache-2.0
 *
 * Aggregate n -> 1 [M5]. Bytes per token, bf16: forward 2nC + 2C; backward 4nC + 2C. */
#include "cpu/common/tiles.h"

/* u = sum_i pre[i] x[i] for one line. */
INLINE void fwd_line(const int n, const weft_dtype t, const char *x, int64_t xs, const vf *w, char *u, int64_t c,
                     int64_t next, bool stream)
{
    for (int i = 0; next && i < n; i++) line_ask(x, (i * xs + c) * (int64_t)size_of(t) + next);
    vf v[MAX_LINE], s[MAX_LINE];
    line_get(t, x, c, v);
    for (int h = 0; h < line_vectors(t); h++) s[h] = w[0] * v[h];
    for (int i = 1; i < n; i++) {
        line_get(t, x + i * xs * (int64_t)size_of(t), c, v);
        for (int h = 0; h < line_vectors(t); h++) s[h] = vf_fma(w[i], v[h], s[h]);
    }
    line_put(t, u, c, s, stream);
}

INLINE void fwd_span(const int n, const weft_dtype t, const char *x, int64_t xs, const float *pre, char *u,
                     int64_t count, int64_t next, bool stream)
{
    vf w[WEFT_MAX_STREAMS];
    for (int i = 0; i < n; i++) w[i] = vf_set1(pre[i]);
    for (int64_t c = 0; c < count; c += line_channels(t)) fwd_line(n, t, x, xs, w, u, c, next, stream);
}

INLINE void fwd_direct(const int n, const weft_dtype t, const weft_mhc_aggregate_fwd_args *a, int64_t t0,
                       int64_t t1, bool stream)
{
    float pre[WEFT_MAX_STREAMS];
    stream = stream && aligned(a->u.data, a->u.stride[0], t);
    for (int64_t m = t0; m < t1; m++) {
        coef_load(pre, &a->pre, m);
        fwd_span(n, t, at(&a->x, m), a->x.stride[1], pre, at(&a->u, m), a->x.shape[2],
                 a->x.stride[0] * (int64_t)size_of(t), stream);
    }
}

static void fwd_chunks(const weft_mhc_aggregate_fwd_args *a, int64_t t0, int64_t t1)
{
    _Alignas(64) float x[CHUNK], u[CHUNK], pre[WEFT_MAX_STREAMS];
    int64_t n = a->x.shape[1], channels = a->x.shape[2], width = chunk_width(n);
    for (int64_t m = t0; m < t1; m++) {
        coef_load(pre, &a->pre, m);
        for (int64_t c = 0; c < channels; c += width) {
            int64_t count = min64(width, channels - c);
            rows_load(x, width, &a->x, m, c, count);
            fwd_span((int)n, WEFT_F32, (char *)x, width, pre, (char *)u, pad16(count), 0, false);
            row_store(&a->u, false, u, m, c, count);
        }
    }
}

void CPU(aggregate_fwd_tile)(const weft_mhc_aggregate_fwd_args *a, int64_t t0, int64_t t1, bool stream)
{
    if (row_direct(&a->x, a->x.dtype) && row_direct(&a->u, a->x.dtype)) {
        FOR_DTYPE(a->x.dtype, FOR_STREAMS(a->x.shape[1], fwd_direct(N, T, a, t0, t1, stream)))
    } else {
        fwd_chunks(a, t0, t1);
    }
}

/* ---- backward ------------------------------------------------------------------------------------------------------ */

/* dx[i] = (old +) pre[i] du;  sum[i] += du x[i] in 16 lanes. */
INLINE void bwd_line(const int n, const weft_dtype t, const char *x, int64_t xs, const char *du, const vf *w,
                     char *dx, int64_t dxs, bool add, vf (*sum)[STEP], int64_t c, int64_t next, bool stream)
{
    const int64_t size = (int64_t)size_of(t);
    for (int i = 0; next && i < n; i++) line_ask(x, (i * xs + c) * size + next);
    vf g[MAX_LINE], v[MAX_LINE];
    line_get(t, du, c, g);
    for (int i = 0; i < n; i++) {
        line_get(t, x + i * xs * size, c, v);
        for (int h = 0; h < line_vectors(t); h++) sum[i][h % STEP] = vf_fma(g[h], v[h], sum[i][h % STEP]);
    }
    for (int i = 0; dx && i < n; i++) {
        char *row = dx + i * dxs * size;
        if (add)
            line_get(t, row, c, v);
        else
            for (int h = 0; h < line_vectors(t); h++) v[h] = vf_set1(0);
        for (int h = 0; h < line_vectors(t); h++) v[h] = vf_fma(w[i], g[h], v[h]);
        line_put(t, row, c, v, stream);
    }
}

INLINE void bwd_span(const int n, const weft_dtype t, const char *x, int64_t xs, const char *du, const float *pre,
                     char *dx, int64_t dxs, bool add, vf (*acc)[STEP], int64_t count, int64_t next, bool stream)
{
    vf w[WEFT_MAX_STREAMS], sum[WEFT_MAX_STREAMS][STEP];
    for (int i = 0; i < n; i++) {
        w[i] = vf_set1(pre[i]);
        for (int s = 0; s < STEP; s++) sum[i][s] = acc[i][s];
    }
    for (int64_t c = 0; c < count; c += line_channels(t))
        bwd_line(n, t, x, xs, du, w, dx, dxs, add, sum, c, next, stream);
    for (int i = 0; i < n; i++)
        for (int s = 0; s < STEP; s++) acc[i][s] = sum[i][s];
}

INLINE void store_d_pre(const weft_mhc_aggregate_bwd_args *a, int64_t m, vf (*acc)[STEP])
{
    float d[WEFT_MAX_STREAMS];
    if (!weft_has(&a->d_pre.to)) return;
    for (int i = 0; i < (int)a->x.shape[1]; i++) d[i] = vf_sum16(acc[i]);
    coef_store(&a->d_pre.to, a->d_pre.add, d, m);
}

INLINE void bwd_direct(const int n, const weft_dtype t, const weft_mhc_aggregate_bwd_args *a, int64_t t0,
                       int64_t t1, bool stream)
{
    float pre[WEFT_MAX_STREAMS];
    vf acc[WEFT_MAX_STREAMS][STEP];
    const weft_tensor *dx = &a->d_x.to;
    bool has = weft_has(dx);
    stream = stream && has && aligned(dx->data, dx->stride[0] | dx->stride[1], t);
    for (int64_t m = t0; m < t1; m++) {
        coef_load(pre, &a->pre, m);
        memset(acc, 0, sizeof(vf) * STEP * (size_t)n);
        bwd_span(n, t, at(&a->x, m), a->x.stride[1], at(&a->d_u, m), pre, has ? at(dx, m) : NULL, dx->stride[1],
                 a->d_x.add, acc, a->x.shape[2], a->x.stride[0] * (int64_t)size_of(t), stream);
        store_d_pre(a, m, acc);
    }
}

static void bwd_chunks(const weft_mhc_aggregate_bwd_args *a, int64_t t0, int64_t t1)
{
    _Alignas(64) float x[CHUNK], du[CHUNK], dx[CHUNK], pre[WEFT_MAX_STREAMS];
    vf acc[WEFT_MAX_STREAMS][STEP];
    int64_t n = a->x.shape[1], channels = a->x.shape[2], width = chunk_width(n);
    bool has = weft_has(&a->d_x.to);
    for (int64_t m = t0; m < t1; m++) {
        coef_load(pre, &a->pre, m);
        memset(acc, 0, sizeof acc);
        for (int64_t c = 0; c < channels; c += width) {
            int64_t count = min64(width, channels - c);
            rows_load(x, width, &a->x, m, c, count);
            row_load(du, &a->d_u, m, c, count);
            if (has && a->d_x.add) rows_load(dx, width, &a->d_x.to, m, c, count);
            bwd_span((int)n, WEFT_F32, (char *)x, width, (char *)du, pre, has ? (char *)dx : NULL, width,
                     a->d_x.add, acc, pad16(count), 0, false);
            if (has) rows_store(&a->d_x.to, false, dx, width, m, c, count);
        }
        store_d_pre(a, m, acc);
    }
}

void CPU(aggregate_bwd_tile)(const weft_mhc_aggregate_bwd_args *a, int64_t t0, int64_t t1, bool stream)
{
    weft_dtype t = a->x.dtype;
    if (row_direct(&a->x, t) && row_direct(&a->d_u, t) && row_direct(&a->d_x.to, t)) {
        FOR_DTYPE(t, FOR_STREAMS(a->x.shape[1], bwd_direct(N, T, a, t0, t1, stream)))
    } else {
        bwd_chunks(a, t0, t1);
    }
}

/* ---- operators ----------------------------------------------------------------------------------------------------- */

typedef struct job {
    const weft_call *call;
    const void *args;
    bool stream, fill;
} job;

static void fwd_body(void *context, int64_t item, int thread)
{
    const job *j = context;
    (void)thread;
    const weft_mhc_aggregate_fwd_args *a = j->args;
    int64_t t0 = item * TILE, t1 = min64(t0 + TILE, j->call->tokens);
    if (j->fill) rows_fill(&a->u, t0, t1);
    CPU(aggregate_fwd_tile)(a, t0, t1, j->stream);
    stream_fence();
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const job *j = context;
    (void)thread;
    const weft_mhc_aggregate_bwd_args *a = j->args;
    int64_t t0 = item * TILE, t1 = min64(t0 + TILE, j->call->tokens);
    if (j->fill) rows_fill(&a->d_x.to, t0, t1);
    CPU(aggregate_bwd_tile)(a, t0, t1, j->stream);
    stream_fence();
}

static weft_status run(const weft_call *call, const void *args, cpu_body *body, const weft_tensor *out,
                       int64_t elements)
{
    int64_t work = call->tokens * call->streams * call->channels;
    job j = {call, args, stream_pays(call, out, elements), fill_pays(call, out, elements)};
    cpu_parallel(call, (call->tokens + TILE - 1) / TILE, work, body, &j);
    return WEFT_OK;
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_aggregate_fwd_args *a = args;
    return run(call, args, fwd_body, &a->u, call->tokens * call->channels);
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_aggregate_bwd_args *a = args;
    return run(call, args, bwd_body, &a->d_x.to, call->tokens * call->streams * call->channels);
}

const weft_kernel CPU(mhc_aggregate_fwd)[] = {{.run = fwd}, {0}};
const weft_kernel CPU(mhc_aggregate_bwd)[] = {{.run = bwd}, {0}};
