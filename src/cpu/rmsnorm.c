/* SPDX-License-Identifier: Apache-2.0
 *
 * RMSNorm of a row [N1]. Bytes per token, bf16: forward 4C; backward 6C. A row is widened to fp32 scratch once; both
 * passes over it then run from L1 or L2. */
#include "cpu/common/tiles.h"

/* sum_c a[c] b[c] in four times 16 lanes, so that the sums need not wait for one another; rows are padded with zeros. */
INLINE float dot(const float *a, const float *b, int64_t channels)
{
    vf q[4][STEP] = {{{0}}};
    int64_t c = 0;
    for (; c + 4 * WIDE <= channels; c += 4 * WIDE)
        for (int k = 0; k < 4; k++)
            for (int s = 0; s < STEP; s++) {
                int64_t e = c + k * WIDE + s * LANES;
                q[k][s] = vf_fma(vf_load(a + e), vf_load(b + e), q[k][s]);
            }
    for (int k = 0; c < channels; c += WIDE, k++)
        for (int s = 0; s < STEP; s++) {
            int64_t e = c + s * LANES;
            q[k][s] = vf_fma(vf_load(a + e), vf_load(b + e), q[k][s]);
        }
    for (int s = 0; s < STEP; s++) q[0][s] = (q[0][s] + q[1][s]) + (q[2][s] + q[3][s]);
    return vf_sum16(q[0]);
}

INLINE float inverse_rms(const float *u, int64_t channels, double eps)
{
    return 1.0f / sqrtf(dot(u, u, channels) / (float)channels + (float)eps);
}

/* A padded scratch row of fp32 to a contiguous row of dtype t. */
INLINE void put_row(const weft_dtype t, char *dst, const float *src, int64_t channels, bool stream)
{
    for (int64_t c = 0; c < channels; c += line_channels(t)) {
        vf v[MAX_LINE];
        line_get(WEFT_F32, src, c, v);
        if (line_vectors(t) > line_vectors(WEFT_F32)) v[MAX_LINE - 1] = vf_load(src + c + LANES);
        line_put(t, dst, c, v, stream);
    }
}

void CPU(rmsnorm_fwd_tile)(const weft_rmsnorm_fwd_args *a, const float *weight, float *scratch, int64_t t0, int64_t t1,
                           bool stream)
{
    int64_t channels = a->u.shape[1], ld = pad16(channels);
    weft_dtype t = a->v.dtype;
    float *u = scratch, *v = scratch + ld;
    bool direct = row_direct(&a->v, t);
    stream = stream && aligned(a->v.data, a->v.stride[0], t);
    for (int64_t m = t0; m < t1; m++) {
        row_load(u, &a->u, m, 0, channels);
        float r = inverse_rms(u, channels, a->eps);
        for (int64_t c = 0; c < channels; c += LANES) {
            vf s = vf_load(u + c) * r;
            vf_store(v + c, weight ? s * vf_load(weight + c) : s);
        }
        if (direct)
            FOR_DTYPE(t, put_row(T, at(&a->v, m), v, channels, stream))
        else
            row_store(&a->v, false, v, m, 0, channels);
    }
}

void CPU(rmsnorm_bwd_tile)(const weft_rmsnorm_bwd_args *a, const float *weight, float *d_weight, float *scratch,
                           int64_t t0, int64_t t1)
{
    int64_t channels = a->u.shape[1], ld = pad16(channels);
    float *u = scratch, *g = scratch + ld, *du = scratch + 2 * ld;
    for (int64_t m = t0; m < t1; m++) {
        row_load(u, &a->u, m, 0, channels);
        row_load(g, &a->d_v, m, 0, channels);
        float r = inverse_rms(u, channels, a->eps);
        if (d_weight)
            for (int64_t c = 0; c < channels; c += LANES)
                vf_store(d_weight + c, vf_fma(vf_load(g + c), vf_load(u + c) * r, vf_load(d_weight + c)));
        if (!weft_has(&a->d_u.to)) continue;
        if (weight)
            for (int64_t c = 0; c < channels; c += LANES) vf_store(g + c, vf_load(g + c) * vf_load(weight + c));
        float k = dot(g, u, channels) / (float)channels * r * r;
        for (int64_t c = 0; c < channels; c += LANES)
            vf_store(du + c, vf_fma(vf_load(u + c), vf_set1(-k), vf_load(g + c)) * r);
        row_store(&a->d_u.to, a->d_u.add, du, m, 0, channels);
    }
}

/* ---- operators ----------------------------------------------------------------------------------------------------- */

typedef struct plan {
    const weft_call *call;
    const void *args;
    float *weight, *scratch;
    int64_t scratch_floats, base; /* per thread; first token of the macro tile */
    cpu_sum sum;
    bool stream;
} plan;

static weft_arena lay_out(plan *p, const weft_call *call, const void *args, bool weight, bool sum)
{
    weft_arena arena = cpu_arena(call);
    int64_t ld = pad16(call->channels);
    *p = (plan){.call = call, .args = args, .scratch_floats = 3 * ld};
    p->weight = weight ? weft_arena_take(&arena, (size_t)ld * 4) : NULL;
    p->scratch = weft_arena_take(&arena, (size_t)(cpu_threads(call) * p->scratch_floats) * 4);
    p->sum = sum_take(&arena, macro_tokens(call), call->channels, sum);
    return arena;
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    CPU(rmsnorm_fwd_tile)(p->args, p->weight, p->scratch + thread * p->scratch_floats, item * TILE,
                          min64((item + 1) * TILE, p->call->tokens), p->stream);
    stream_fence();
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    int64_t t0 = p->base + item * BLOCK;
    float *sum = sum_block(&p->sum, item);
    sum_zero(sum, p->sum.width);
    CPU(rmsnorm_bwd_tile)(p->args, p->weight, sum, p->scratch + thread * p->scratch_floats, t0,
                          min64(t0 + BLOCK, p->call->tokens));
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_rmsnorm_fwd_args *a = args;
    plan p;
    lay_out(&p, call, args, weft_has(&a->weight), false);
    if (p.weight) vector_load(p.weight, &a->weight, call->channels, 1);
    p.stream = a->v.data != a->u.data && call->tokens * call->channels * (int64_t)size_of(call->dtype) >= STREAM_BYTES;
    cpu_parallel(call, (call->tokens + TILE - 1) / TILE, call->tokens * call->channels, fwd_body, &p);
    return WEFT_OK;
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_rmsnorm_bwd_args *a = args;
    plan p;
    lay_out(&p, call, args, weft_has(&a->weight), weft_has(&a->d_weight.to));
    if (p.weight) vector_load(p.weight, &a->weight, call->channels, 1);
    sum_zero(p.sum.total, p.sum.width);
    for (; p.base < call->tokens; p.base += macro_tokens(call)) {
        int64_t tokens = min64(macro_tokens(call), call->tokens - p.base), blocks = (tokens + BLOCK - 1) / BLOCK;
        cpu_parallel(call, blocks, tokens * call->channels, bwd_body, &p);
        sum_fold(&p.sum, blocks);
    }
    sum_store(&p.sum, 0, &a->d_weight);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args, weft_has(&((const weft_rmsnorm_fwd_args *)args)->weight), false);
    return weft_arena_bytes(&arena);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    const weft_rmsnorm_bwd_args *a = args;
    plan p;
    weft_arena arena = lay_out(&p, call, args, weft_has(&a->weight), weft_has(&a->d_weight.to));
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(rmsnorm_fwd)[] = {{WEFT_NONE, 0, fwd, fwd_workspace}, {0}};
const weft_kernel CPU(rmsnorm_bwd)[] = {{WEFT_NONE, 0, bwd, bwd_workspace}, {0}};
