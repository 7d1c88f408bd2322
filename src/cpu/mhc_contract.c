/* SPDX-License-Identifier: Apache-2.0
 *
 * Contract n -> 1 [M8]: mean or sum. Bytes per token, bf16: 2nC + 2C, forward and backward. */
#include "cpu/common/tiles.h"

typedef struct job {
    const weft_call *call;
    const void *args;
    float factor;
    bool stream;
} job;

INLINE void fwd_direct(const int n, const weft_dtype t, const weft_mhc_contract_fwd_args *a, float factor, int64_t m,
                       bool stream)
{
    int64_t channels = a->u.shape[1], size = (int64_t)size_of(t), xs = a->x.stride[1] * size;
    const char *x = at(&a->x, m);
    char *u = at(&a->u, m);
    for (int64_t c = 0; c < channels; c += LANES) {
        int64_t left = channels - c;
        vf s = vf_get_n(t, x, c, left);
        for (int i = 1; i < n; i++) s = s + vf_get_n(t, x + i * xs, c, left);
        vf_put_n(t, u, c, s * factor, left, stream);
    }
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

INLINE void bwd_direct(const weft_dtype t, const weft_mhc_contract_bwd_args *a, float factor, int64_t m, bool stream)
{
    const weft_tensor *dx = &a->d_x.to;
    int64_t n = dx->shape[1], channels = dx->shape[2], size = (int64_t)size_of(t);
    const char *u = at(&a->d_u, m);
    char *x = at(dx, m);
    for (int64_t c = 0; c < channels; c += LANES) {
        int64_t left = channels - c;
        vf g = vf_get_n(t, u, c, left) * factor;
        for (int64_t i = 0; i < n; i++) {
            char *row = x + i * dx->stride[1] * size;
            vf_put_n(t, row, c, a->d_x.add ? vf_get_n(t, row, c, left) + g : g, left, stream);
        }
    }
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
    bool direct = streams_direct(&a->x, t) && row_direct(&a->u, t);
    bool stream = j->stream && aligned(a->u.data, a->u.stride[0], t);
    for (int64_t m = item * TILE; m < min64((item + 1) * TILE, j->call->tokens); m++)
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
    bool direct = streams_direct(dx, t) && row_direct(&a->d_u, t);
    bool stream = j->stream && !a->d_x.add && aligned(dx->data, dx->stride[0] | dx->stride[1], t);
    for (int64_t m = item * TILE; m < min64((item + 1) * TILE, j->call->tokens); m++)
        if (direct)
            FOR_DTYPE(t, bwd_direct(T, a, j->factor, m, stream))
        else
            bwd_chunks(a, j->factor, m);
    stream_fence();
}

static weft_status run(const weft_call *call, const void *args, weft_contract kind, cpu_body *body, int64_t written)
{
    float factor = kind == WEFT_CONTRACT_MEAN ? (float)(1.0 / (double)call->streams) : 1.0f;
    job j = {call, args, factor, written >= STREAM_BYTES};
    cpu_parallel(call, (call->tokens + TILE - 1) / TILE, call->tokens * call->streams * call->channels, body, &j);
    return WEFT_OK;
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_contract_fwd_args *a = args;
    return run(call, args, a->kind, fwd_body, call->tokens * call->channels * (int64_t)size_of(a->u.dtype));
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_contract_bwd_args *a = args;
    return run(call, args, a->kind, bwd_body,
               call->tokens * call->streams * call->channels * (int64_t)size_of(a->d_x.to.dtype));
}

const weft_kernel CPU(mhc_contract_fwd)[] = {{WEFT_NONE, 0, fwd, NULL}, {0}};
const weft_kernel CPU(mhc_contract_bwd)[] = {{WEFT_NONE, 0, bwd, NULL}, {0}};
