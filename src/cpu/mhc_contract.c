/* SPDX-License-Identifier: Apache-2.0
 *
 * Contract n -> 1 [M8]: mean or sum. Bytes per token, bf16: 2nC + 2C, forward and backward. */
#include "cpu/common/tiles.h"

typedef struct job {
    const weft_call *call;
    const void *args;
    float factor;
    bool stream, fill;
} job;

INLINE void fwd_line(const int n, const weft_dtype t, const char *x, int64_t xs, char *u, float factor, int64_t c,
                     int64_t next, bool stream)
{
    vf v[MAX_LINE], s[MAX_LINE];
    for (int i = 0; i < n; i++) line_ask(x + i * xs, c * (int64_t)size_of(t) + next);
    line_get(t, x, c, s);
    for (int i = 1; i < n; i++) {
        line_get(t, x + i * xs, c, v);
        for (int h = 0; h < line_vectors(t); h++) s[h] = s[h] + v[h];
    }
    for (int h = 0; h < line_vectors(t); h++) s[h] = s[h] * factor;
    line_put(t, u, c, s, stream);
}

INLINE void fwd_direct(const int n, const weft_dtype t, const weft_mhc_contract_fwd_args *a, float factor,
                       int64_t m, bool stream)
{
    int64_t xs = a->x.stride[1] * (int64_t)size_of(t);
    const char *x = at(&a->x, m);
    char *u = at(&a->u, m);
    for (int64_t c = 0; c < a->u.shape[1]; c += line_channels(t))
        fwd_line(n, t, x, xs, u, factor, c, a->x.stride[0] * (int64_t)size_of(t), stream);
}

static void fwd_chunks(const weft_mhc_contract_fwd_args *a, float factor, int64_t m)
{
    _Alignas(64) float x[CHUNK];
    int64_t n = a->x.shape[1], channels = a->x.shape[2], width = chunk_width(n);
    for (int64_t c = 0; c < channels; c += width) {
        int64_t count = min64(width, channels - c);
        rows_load(x, width, &a->x, m, c, count);
        for (int64_t i = 1; i < n; i++)
            for (int64_t k = 0; k < count; k++) x[k] += x[i * width + k];
        for (int64_t k = 0; k < count; k++) x[k] *= factor;
        row_store(&a->u, false, x, m, c, count);
    }
}

INLINE void bwd_line(int64_t n, const weft_dtype t, const char *u, char *x, int64_t xs, float factor, bool add,
                     int64_t c, bool stream)
{
    vf g[MAX_LINE], v[MAX_LINE];
    line_get(t, u, c, g);
    for (int h = 0; h < line_vectors(t); h++) g[h] = g[h] * factor;
    for (int64_t i = 0; i < n; i++) {
        if (add) {
            line_get(t, x + i * xs, c, v);
            for (int h = 0; h < line_vectors(t); h++) v[h] = v[h] + g[h];
        }
        line_put(t, x + i * xs, c, add ? v : g, stream);
    }
}

INLINE void bwd_direct(const weft_dtype t, const weft_mhc_contract_bwd_args *a, float factor, int64_t m,
                       bool stream)
{
    const weft_tensor *dx = &a->d_x.to;
    int64_t n = dx->shape[1], xs = dx->stride[1] * (int64_t)size_of(t);
    const char *u = at(&a->d_u, m);
    char *x = at(dx, m);
    for (int64_t c = 0; c < dx->shape[2]; c += line_channels(t))
        bwd_line(n, t, u, x, xs, factor, a->d_x.add, c, stream);
}

static void bwd_chunks(const weft_mhc_contract_bwd_args *a, float factor, int64_t m)
{
    _Alignas(64) float x[CHUNK];
    int64_t n = a->d_x.to.shape[1], channels = a->d_x.to.shape[2], width = chunk_width(n);
    for (int64_t c = 0; c < channels; c += width) {
        int64_t count = min64(width, channels - c);
        row_load(x, &a->d_u, m, c, count);
        for (int64_t k = 0; k < count; k++) x[k] *= factor;
        for (int64_t i = 1; i < n; i++) memcpy(x + i * width, x, (size_t)count * 4);
        rows_store(&a->d_x.to, a->d_x.add, x, width, m, c, count);
    }
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const job *j = context;
    const weft_mhc_contract_fwd_args *a = j->args;
    weft_dtype t = a->x.dtype;
    (void)thread;
    bool direct = row_direct(&a->x, t) && row_direct(&a->u, t);
    bool stream = j->stream && aligned(a->u.data, a->u.stride[0], t);
    int64_t t0 = item * TILE, t1 = min64(t0 + TILE, j->call->tokens);
    if (j->fill) rows_fill(&a->u, t0, t1);
    for (int64_t m = t0; m < t1; m++)
        if (direct)
            FOR_DTYPE(t, FOR_STREAMS(a->x.shape[1], fwd_direct(N, T, a, j->factor, m, stream)))
        else
            fwd_chunks(a, j->factor, m);
    stream_fence();
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const job *j = context;
    const weft_mhc_contract_bwd_args *a = j->args;
    weft_dtype t = a->d_u.dtype;
    const weft_tensor *dx = &a->d_x.to;
    (void)thread;
    bool direct = row_direct(dx, t) && row_direct(&a->d_u, t);
    bool stream = j->stream && !a->d_x.add && aligned(dx->data, dx->stride[0] | dx->stride[1], t);
    int64_t t0 = item * TILE, t1 = min64(t0 + TILE, j->call->tokens);
    if (j->fill) rows_fill(dx, t0, t1);
    for (int64_t m = t0; m < t1; m++)
        if (direct)
            FOR_DTYPE(t, bwd_direct(T, a, j->factor, m, stream))
        else
            bwd_chunks(a, j->factor, m);
    stream_fence();
}

static weft_status run(const weft_call *call, const void *args, weft_contract kind, cpu_body *body,
                       const weft_tensor *out, int64_t elements)
{
    float factor = kind == WEFT_CONTRACT_MEAN ? (float)(1.0 / (double)call->streams) : 1.0f;
    job j = {call, args, factor, stream_pays(call, out, elements), fill_pays(call, out, elements)};
    cpu_parallel(call, (call->tokens + TILE - 1) / TILE, call->tokens * call->streams * call->channels, body, &j);
    return WEFT_OK;
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_contract_fwd_args *a = args;
    return run(call, args, a->kind, fwd_body, &a->u, call->tokens * call->channels);
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_contract_bwd_args *a = args;
    return run(call, args, a->kind, bwd_body, &a->d_x.to, call->tokens * call->streams * call->channels);
}

const weft_kernel CPU(mhc_contract_fwd)[] = {{.run = fwd}, {0}};
const weft_kernel CPU(mhc_contract_bwd)[] = {{.run = bwd}, {0}};
