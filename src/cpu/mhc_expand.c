/* SPDX-License-Identifier: Apache-2.0
 *
 * Expand 1 -> n [M7]. Bytes per token, bf16: 2C + 2nC, forward and backward. */
#include "cpu/common/tiles.h"

/* x[i] = u for all i: bits, whatever they mean. */
INLINE void fwd_direct(weft_dtype t, const weft_mhc_expand_fwd_args *a, int64_t m, bool stream)
{
    int64_t n = a->x.shape[1], channels = a->x.shape[2], size = (int64_t)size_of(t), c = 0;
    const char *u = at(&a->u, m);
    char *x = at(&a->x, m);
#if WEFT_CPU_LEVEL == 2
    /* Raw 64-byte lines: widening and rounding back would be wasted work. */
    int64_t line = 64 / size;
    stream = stream && (((uintptr_t)x | (uintptr_t)(a->x.stride[1] * size)) % 64) == 0;
    for (; c + line <= channels; c += line) {
        __m512i v = _mm512_loadu_si512(u + c * size);
        for (int64_t i = 0; i < n; i++) {
            __m512i *to = (__m512i *)(void *)(x + (i * a->x.stride[1] + c) * size);
            if (stream)
                _mm512_stream_si512(to, v);
            else
                _mm512_storeu_si512(to, v);
        }
    }
#endif
    (void)stream;
    for (int64_t i = 0; i < n; i++)
        memcpy(x + (i * a->x.stride[1] + c) * size, u + c * size, (size_t)((channels - c) * size));
}

static void fwd_chunks(const weft_mhc_expand_fwd_args *a, int64_t m)
{
    _Alignas(64) float x[CHUNK];
    int64_t n = a->x.shape[1], channels = a->x.shape[2], width = chunk_width(n);
    for (int64_t c = 0; c < channels; c += width) {
        int64_t count = min64(width, channels - c);
        row_load(x, &a->u, m, c, count);
        for (int64_t i = 1; i < n; i++) memcpy(x + i * width, x, (size_t)count * 4);
        rows_store(&a->x, false, x, width, m, c, count);
    }
}

/* du = sum_i dx[i] for one line. */
INLINE void bwd_line(const int n, const weft_dtype t, const char *x, int64_t xs, char *u, bool add, int64_t c,
                     int64_t next, bool stream)
{
    vf v[MAX_LINE], s[MAX_LINE];
    for (int i = 0; i < n; i++) line_ask(x + i * xs, c * (int64_t)size_of(t) + next);
    line_get(t, x, c, s);
    for (int i = 1; i < n; i++) {
        line_get(t, x + i * xs, c, v);
        for (int h = 0; h < line_vectors(t); h++) s[h] = s[h] + v[h];
    }
    if (add) {
        line_get(t, u, c, v);
        for (int h = 0; h < line_vectors(t); h++) s[h] = v[h] + s[h];
    }
    line_put(t, u, c, s, stream);
}

INLINE void bwd_direct(const int n, const weft_dtype t, const weft_mhc_expand_bwd_args *a, int64_t m, bool stream)
{
    const weft_tensor *du = &a->d_u.to;
    int64_t xs = a->d_x.stride[1] * (int64_t)size_of(t);
    const char *x = at(&a->d_x, m);
    char *u = at(du, m);
    for (int64_t c = 0; c < du->shape[1]; c += line_channels(t))
        bwd_line(n, t, x, xs, u, a->d_u.add, c, a->d_x.stride[0] * (int64_t)size_of(t), stream);
}

static void bwd_chunks(const weft_mhc_expand_bwd_args *a, int64_t m)
{
    _Alignas(64) float x[CHUNK];
    int64_t n = a->d_x.shape[1], channels = a->d_x.shape[2], width = chunk_width(n);
    for (int64_t c = 0; c < channels; c += width) {
        int64_t count = min64(width, channels - c);
        rows_load(x, width, &a->d_x, m, c, count);
        for (int64_t i = 1; i < n; i++)
            for (int64_t k = 0; k < count; k++) x[k] += x[i * width + k];
        row_store(&a->d_u.to, a->d_u.add, x, m, c, count);
    }
}

typedef struct job {
    const weft_call *call;
    const void *args;
    bool stream, fill;
} job;

static void fwd_body(void *context, int64_t item, int thread)
{
    const job *j = context;
    const weft_mhc_expand_fwd_args *a = j->args;
    (void)thread;
    bool direct = a->x.stride[2] == 1 && a->u.stride[1] == 1;
    int64_t t0 = item * TILE, t1 = min64(t0 + TILE, j->call->tokens);
    if (j->fill) rows_fill(&a->x, t0, t1);
    for (int64_t m = t0; m < t1; m++)
        if (direct)
            fwd_direct(a->u.dtype, a, m, j->stream);
        else
            fwd_chunks(a, m);
    stream_fence();
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const job *j = context;
    const weft_mhc_expand_bwd_args *a = j->args;
    weft_dtype t = a->d_x.dtype;
    (void)thread;
    bool direct = row_direct(&a->d_x, t) && row_direct(&a->d_u.to, t);
    bool stream = j->stream && !a->d_u.add && aligned(a->d_u.to.data, a->d_u.to.stride[0], t);
    int64_t t0 = item * TILE, t1 = min64(t0 + TILE, j->call->tokens);
    if (j->fill) rows_fill(&a->d_u.to, t0, t1);
    for (int64_t m = t0; m < t1; m++)
        if (direct)
            FOR_DTYPE(t, FOR_STREAMS(a->d_x.shape[1], bwd_direct(N, T, a, m, stream)))
        else
            bwd_chunks(a, m);
    stream_fence();
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_expand_fwd_args *a = args;
    int64_t work = call->tokens * call->streams * call->channels;
    job j = {call, args, stream_pays(call, &a->x, work), fill_pays(call, &a->x, work)};
    cpu_parallel(call, (call->tokens + TILE - 1) / TILE, work, fwd_body, &j);
    return WEFT_OK;
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_expand_bwd_args *a = args;
    int64_t work = call->tokens * call->streams * call->channels;
    int64_t out = call->tokens * call->channels;
    job j = {call, args, stream_pays(call, &a->d_u.to, out), fill_pays(call, &a->d_u.to, out)};
    cpu_parallel(call, (call->tokens + TILE - 1) / TILE, work, bwd_body, &j);
    return WEFT_OK;
}

const weft_kernel CPU(mhc_expand_fwd)[] = {{.run = fwd}, {0}};
const weft_kernel CPU(mhc_expand_bwd)[] = {{.run = bwd}, {0}};
