/* SPDX-License-Identifier: Apache-2.0
 *
 * RMSNorm of a row [N1]. Bytes per token, bf16: forward 4C; backward 6C. Two passes over a row, the second from L1: one for
 * the sums over channels, one for the elements. Rows that a kernel cannot use where they are go through fp32 scratch. */
#include "cpu/common/tiles.h"

/* *uu = sum u^2 and, with g, *gu = sum (g w) u, each in four times 16 lanes so that the sums need not wait for one
 * another. channels is a multiple of 16. */
INLINE void dots(const weft_dtype t, const char *u, const char *g, const float *w, int64_t channels, float *uu,
                 float *gu)
{
    vf q[4][STEP] = {{{0}}}, p[4][STEP] = {{{0}}};
    for (int64_t c = 0; c < channels; c += 4 * WIDE) {
        int64_t left = channels - c;
        for (int k = 0; k < 4; k++)
            for (int s = 0; s < STEP; s++) {
                int64_t e = c + k * WIDE + s * LANES;
                if (k > 0 && k * WIDE >= left) continue;
                vf a = vf_get(t, u, e);
                q[k][s] = vf_fma(a, a, q[k][s]);
                if (!g) continue;
                vf b = vf_get(t, g, e);
                if (w) b = b * vf_load(w + e);
                p[k][s] = vf_fma(a, b, p[k][s]);
            }
    }
    for (int s = 0; s < STEP; s++) {
        q[0][s] = (q[0][s] + q[1][s]) + (q[2][s] + q[3][s]);
        p[0][s] = (p[0][s] + p[1][s]) + (p[2][s] + p[3][s]);
    }
    *uu = vf_sum16(q[0]);
    if (g) *gu = vf_sum16(p[0]);
}

INLINE float inverse_rms(float uu, int64_t channels, double eps)
{
    return 1.0f / sqrtf(uu / (float)channels + (float)eps);
}

/* v = u r w; `channels` counts the row, `padded` what is there of it. */
INLINE void fwd_row(const weft_dtype t, const char *u, const float *w, char *v, int64_t channels, int64_t padded,
                    double eps, bool stream)
{
    float uu = 0;
    dots(t, u, NULL, NULL, padded, &uu, NULL);
    float r = inverse_rms(uu, channels, eps);
    for (int64_t c = 0; c < padded; c += line_channels(t)) {
        vf a[MAX_LINE];
        line_get(t, u, c, a);
        for (int h = 0; h < line_vectors(t); h++) {
            a[h] = a[h] * r;
            if (w) a[h] = a[h] * vf_load(w + c + h * LANES);
        }
        line_put(t, v, c, a, stream);
    }
}

void CPU(rmsnorm_fwd_tile)(const weft_rmsnorm_fwd_args *a, const float *weight, float *scratch, int64_t t0,
                           int64_t t1, bool stream)
{
    int64_t channels = a->u.shape[1], ld = pad16(channels);
    weft_dtype t = a->v.dtype;
    float *u = scratch, *v = scratch + ld;
    bool direct = row_direct(&a->u, t) && row_direct(&a->v, t);
    stream = stream && aligned(a->v.data, a->v.stride[0], t);
    for (int64_t m = t0; m < t1; m++) {
        if (direct) {
            FOR_DTYPE(t, fwd_row(T, at(&a->u, m), weight, at(&a->v, m), channels, channels, a->eps, stream))
        } else {
            row_load(u, &a->u, m, 0, channels);
            fwd_row(WEFT_F32, (char *)u, weight, (char *)v, channels, ld, a->eps, false);
            row_store(&a->v, false, v, m, 0, channels);
        }
    }
}

/* du = (old +) r (g w - k u) with k = r^2 mean(g w u);  d_weight += g u r. */
INLINE void bwd_row(const weft_dtype t, const char *u, const char *g, const float *w, char *du, bool add,
                    float *d_weight, int64_t channels, int64_t padded, double eps, bool stream)
{
    float uu = 0, gu = 0;
    dots(t, u, g, w, padded, &uu, &gu);
    float r = inverse_rms(uu, channels, eps), k = gu / (float)channels * r * r;
    for (int64_t c = 0; c < padded; c += line_channels(t)) {
        vf a[MAX_LINE], b[MAX_LINE], old[MAX_LINE];
        line_get(t, u, c, a);
        line_get(t, g, c, b);
        for (int h = 0; h < line_vectors(t); h++) {
            int64_t e = c + h * LANES;
            if (d_weight) vf_store(d_weight + e, vf_fma(b[h], a[h] * r, vf_load(d_weight + e)));
            if (w) b[h] = b[h] * vf_load(w + e);
            b[h] = vf_fma(a[h], vf_set1(-k), b[h]) * r;
        }
        if (!du) continue;
        if (add) {
            line_get(t, du, c, old);
            for (int h = 0; h < line_vectors(t); h++) b[h] = old[h] + b[h];
        }
        line_put(t, du, c, b, stream);
    }
}

void CPU(rmsnorm_bwd_tile)(const weft_rmsnorm_bwd_args *a, const float *weight, float *d_weight, float *scratch,
                           int64_t t0, int64_t t1, bool stream)
{
    int64_t channels = a->u.shape[1], ld = pad16(channels);
    const weft_tensor *to = &a->d_u.to;
    weft_dtype t = a->u.dtype;
    float *u = scratch, *g = scratch + ld, *du = scratch + 2 * ld;
    bool wanted = weft_has(to);
    bool direct = row_direct(&a->u, t) && row_direct(&a->d_v, t) && row_direct(to, t);
    stream = stream && wanted && !a->d_u.add && aligned(to->data, to->stride[0], t);
    for (int64_t m = t0; m < t1; m++) {
        if (direct) {
            FOR_DTYPE(t, bwd_row(T, at(&a->u, m), at(&a->d_v, m), weight, wanted ? at(to, m) : NULL, a->d_u.add,
                                 d_weight, channels, channels, a->eps, stream))
        } else {
            row_load(u, &a->u, m, 0, channels);
            row_load(g, &a->d_v, m, 0, channels);
            bwd_row(WEFT_F32, (char *)u, (char *)g, weight, wanted ? (char *)du : NULL, false, d_weight, channels,
                    ld, a->eps, false);
            if (wanted) row_store(to, a->d_u.add, du, m, 0, channels);
        }
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
    p->scratch = weft_arena_take(&arena, cpu_rooms(call, p->scratch_floats * 4));
    p->sum = sum_take(&arena, macro_tokens(call), call->channels, sum);
    return arena;
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    CPU(rmsnorm_fwd_tile)
    (p->args, p->weight, p->scratch + thread * p->scratch_floats, item * TILE,
     min64((item + 1) * TILE, p->call->tokens), p->stream);
    stream_fence();
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    int64_t t0 = p->base + item * BLOCK;
    float *sum = sum_block(&p->sum, item);
    sum_zero(sum, p->sum.width);
    CPU(rmsnorm_bwd_tile)
    (p->args, p->weight, sum, p->scratch + thread * p->scratch_floats, t0, min64(t0 + BLOCK, p->call->tokens),
     p->stream);
    stream_fence();
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_rmsnorm_fwd_args *a = args;
    plan p;
    lay_out(&p, call, args, weft_has(&a->weight), false);
    if (p.weight) vector_load(p.weight, &a->weight, call->channels, 1);
    p.stream = a->v.data != a->u.data && stream_pays(call, &a->v, call->tokens * call->channels);
    cpu_parallel(call, (call->tokens + TILE - 1) / TILE, call->tokens * call->channels, fwd_body, &p);
    return WEFT_OK;
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_rmsnorm_bwd_args *a = args;
    plan p;
    lay_out(&p, call, args, weft_has(&a->weight), weft_has(&a->d_weight.to));
    if (p.weight) vector_load(p.weight, &a->weight, call->channels, 1);
    p.stream = stream_pays(call, &a->d_u.to, call->tokens * call->channels);
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

const weft_kernel CPU(rmsnorm_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel CPU(rmsnorm_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
