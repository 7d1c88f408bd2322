/* SPDX-License-Identifier: Apache-2.0
 *
 * Expand-combine [M6]. Bytes per token, bf16: forward 4nC + 2C; backward 6nC + 4C.
 *
 * Forward and the element-wise half of backward read every stream of a channel before they write one, so y may lie over
 * x and d_x over d_y. Backward sums n*n + n products over the channels: up to four streams they live in registers beside
 * the element-wise work, beyond that they take passes of 4x4 over a chunk that is still in L1, before d_x is written.
 *
 * Without res (`mix`, a constant, is false) the operations are those of a mix that is the identity, less its products: the same
 * bits for finite streams. Backward then has no use for x. */
#include "cpu/common/mask.h"
#include "cpu/common/tiles.h"

/* Coefficients of a token: w[o * n + i] is the weight of stream i in output o, whatever the convention. */
typedef struct coefs {
    float post[WEFT_MAX_STREAMS], w[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
} coefs;

static void load_coefs(coefs *k, const weft_tensor *post, const weft_tensor *res, weft_apply apply, int64_t m)
{
    int n = (int)post->shape[1];
    coef_load(k->post, post, m);
    if (!weft_has(res)) return;
    coef_load(k->w, res, m);
    if (apply == WEFT_APPLY_OUT_IN) return;
    for (int a = 0; a < n; a++)
        for (int b = 0; b < a; b++) {
            float t = k->w[a * n + b];
            k->w[a * n + b] = k->w[b * n + a];
            k->w[b * n + a] = t;
        }
}

/* ---- forward ------------------------------------------------------------------------------------------------------- */

/* Rows of one token; strides in elements. bias and mask are fp32 rows or NULL. */
typedef struct fwd_rows {
    const char *x, *f;
    char *y;
    int64_t xs, ys;
    const float *bias, *mask;
    int64_t ms;
    int64_t next; /* bytes from a token's x to the next one's, 0: no prefetch */
} fwd_rows;

INLINE void fwd_line(const int n, const weft_dtype t, const bool mix, const fwd_rows *r, const vf *w,
                     const vf *post, int64_t c, bool stream)
{
    const int64_t size = (int64_t)size_of(t);
    vf x[WEFT_MAX_STREAMS][MAX_LINE], f[MAX_LINE], y[MAX_LINE];
    for (int i = 0; r->next && i < n; i++) line_ask(r->x, (i * r->xs + c) * size + r->next);
    line_get(t, r->f, c, f);
    if (r->bias)
        for (int h = 0; h < line_vectors(t); h++) f[h] = f[h] + vf_load(r->bias + c + h * LANES);
    for (int i = 0; i < n; i++) line_get(t, r->x + i * r->xs * size, c, x[i]);
    for (int o = 0; o < n; o++) {
        for (int h = 0; h < line_vectors(t); h++) y[h] = post[o] * f[h];
        if (r->mask)
            for (int h = 0; h < line_vectors(t); h++) y[h] = y[h] * vf_load(r->mask + o * r->ms + c + h * LANES);
        for (int h = 0; !mix && h < line_vectors(t); h++) y[h] = x[o][h] + y[h];
        for (int i = 0; mix && i < n; i++)
            for (int h = 0; h < line_vectors(t); h++) y[h] = vf_fma(w[o * n + i], x[i][h], y[h]);
        line_put(t, r->y + o * r->ys * size, c, y, stream);
    }
}

INLINE void fwd_span(const int n, const weft_dtype t, const bool mix, fwd_rows r, const coefs *k, int64_t count,
                     bool stream)
{
    vf w[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS], post[WEFT_MAX_STREAMS];
    for (int i = 0; mix && i < n * n; i++) w[i] = vf_set1(k->w[i]);
    for (int o = 0; o < n; o++) post[o] = vf_set1(k->post[o]);
    for (int64_t c = 0; c < count; c += line_channels(t)) fwd_line(n, t, mix, &r, w, post, c, stream);
}

INLINE void fwd_direct(const int n, const weft_dtype t, const bool mix, const weft_mhc_post_fwd_args *a,
                       const float *bias, const weft_mask *mask, int64_t t0, int64_t t1, bool stream)
{
    _Alignas(64) float drop[CHUNK];
    coefs k;
    int64_t channels = a->x.shape[2], size = (int64_t)size_of(t);
    int64_t width = mask->on ? chunk_width(n) : channels;
    stream = stream && aligned(a->y.data, a->y.stride[0] | a->y.stride[1], t) && a->y.data != a->x.data;
    for (int64_t m = t0; m < t1; m++) {
        load_coefs(&k, &a->post, &a->res, a->numerics.apply, m);
        for (int64_t c = 0; c < channels; c += width) {
            int64_t count = min64(width, channels - c);
            if (mask->on) mask_fill(drop, width, mask, m, n, c, count);
            fwd_rows r = {at(&a->x, m) + c * size, at(&a->f, m) + c * size, at(&a->y, m) + c * size, a->x.stride[1],
                          a->y.stride[1],          bias ? bias + c : NULL,  mask->on ? drop : NULL,  width,
                          a->x.stride[0] * size};
            fwd_span(n, t, mix, r, &k, count, stream);
        }
    }
}

INLINE void fwd_chunks(const bool mix, const weft_mhc_post_fwd_args *a, const float *bias, const weft_mask *mask,
                       int64_t t0, int64_t t1)
{
    _Alignas(64) float x[CHUNK], f[CHUNK], y[CHUNK], drop[CHUNK];
    coefs k;
    int n = (int)a->x.shape[1];
    int64_t channels = a->x.shape[2], width = chunk_width(n);
    for (int64_t m = t0; m < t1; m++) {
        load_coefs(&k, &a->post, &a->res, a->numerics.apply, m);
        for (int64_t c = 0; c < channels; c += width) {
            int64_t count = min64(width, channels - c);
            rows_load(x, width, &a->x, m, c, count);
            row_load(f, &a->f, m, c, count);
            if (mask->on) mask_fill(drop, width, mask, m, n, c, count);
            fwd_rows r = {
                (char *)x, (char *)f, (char *)y, width, width, bias ? bias + c : NULL, mask->on ? drop : NULL,
                width,     0};
            FOR_STREAMS(n, fwd_span(N, WEFT_F32, mix, r, &k, pad16(count), false))
            rows_store(&a->y, false, y, width, m, c, count);
        }
    }
}

INLINE void fwd_any(const bool mix, const weft_mhc_post_fwd_args *a, const float *bias, int64_t t0, int64_t t1,
                    bool stream)
{
    weft_dtype t = a->x.dtype;
    weft_mask mask = weft_mask_open(&a->dropout, a->x.shape[2]);
    if (row_direct(&a->x, t) && row_direct(&a->f, t) && row_direct(&a->y, t)) {
        FOR_DTYPE(t, FOR_STREAMS(a->x.shape[1], fwd_direct(N, T, mix, a, bias, &mask, t0, t1, stream)))
    } else {
        fwd_chunks(mix, a, bias, &mask, t0, t1);
    }
}

__attribute__((noinline)) static void fwd_unmixed(const weft_mhc_post_fwd_args *a, const float *bias, int64_t t0,
                                                  int64_t t1, bool stream)
{
    fwd_any(false, a, bias, t0, t1, stream);
}

void CPU(post_fwd_tile)(const weft_mhc_post_fwd_args *a, const float *bias, int64_t t0, int64_t t1, bool stream)
{
    if (weft_has(&a->res))
        fwd_any(true, a, bias, t0, t1, stream);
    else
        fwd_unmixed(a, bias, t0, t1, stream);
}

/* ---- backward ------------------------------------------------------------------------------------------------------ */

/* g is d_y; absent outputs are NULL. d_bias is an fp32 row that is added to. */
typedef struct bwd_rows {
    const char *x, *f, *g;
    char *dx, *df;
    int64_t xs, gs, dxs;
    bool add_dx, add_df;
    const float *bias, *mask;
    int64_t ms;
    float *d_bias;
    int64_t next_x, next_g; /* bytes to the next token's x and d_y, 0: no prefetch */
} bwd_rows;

/* Sums of a token in 16 lanes: w[o * n + i] of x[i] g[o], post[o] of D g[o] (f + bias). */
typedef struct bwd_sums {
    vf post[WEFT_MAX_STREAMS][STEP], w[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS][STEP];
} bwd_sums;

/* f + bias of a line. */
INLINE void get_f(const weft_dtype t, const bwd_rows *r, int64_t c, vf *f)
{
    line_get(t, r->f, c, f);
    if (r->bias)
        for (int h = 0; h < line_vectors(t); h++) f[h] = f[h] + vf_load(r->bias + c + h * LANES);
}

INLINE void get_g(const weft_dtype t, const bwd_rows *r, int o, int64_t c, vf *g)
{
    line_get(t, r->g + o * r->gs * (int64_t)size_of(t), c, g);
}

/* The part of d_y that dropout let through. */
INLINE vf masked(const bwd_rows *r, vf g, int o, int64_t c)
{
    return r->mask ? g * vf_load(r->mask + o * r->ms + c) : g;
}

/* d_x, d_f and d_bias of a line from g[n]. */
INLINE void bwd_elements(const int n, const weft_dtype t, const bool mix, const bwd_rows *r, const vf *w,
                         const vf *post, vf (*g)[MAX_LINE], int64_t c, bool stream)
{
    const int64_t size = (int64_t)size_of(t);
    vf v[MAX_LINE], old[MAX_LINE];
    if (r->df || r->d_bias) {
        for (int h = 0; h < line_vectors(t); h++) {
            int64_t e = c + h * LANES;
            v[h] = post[0] * masked(r, g[0][h], 0, e);
            for (int o = 1; o < n; o++) v[h] = vf_fma(post[o], masked(r, g[o][h], o, e), v[h]);
            if (r->d_bias) vf_store(r->d_bias + e, vf_load(r->d_bias + e) + v[h]);
        }
        if (r->df) {
            if (r->add_df) {
                line_get(t, r->df, c, old);
                for (int h = 0; h < line_vectors(t); h++) v[h] = old[h] + v[h];
            }
            line_put(t, r->df, c, v, stream);
        }
    }
    for (int i = 0; r->dx && i < n; i++) {
        char *row = r->dx + i * r->dxs * size;
        for (int h = 0; h < line_vectors(t); h++) {
            v[h] = mix ? w[i] * g[0][h] : g[i][h];
            for (int o = 1; mix && o < n; o++) v[h] = vf_fma(w[o * n + i], g[o][h], v[h]);
        }
        if (r->add_dx) {
            line_get(t, row, c, old);
            for (int h = 0; h < line_vectors(t); h++) v[h] = old[h] + v[h];
        }
        line_put(t, row, c, v, stream);
    }
}

/* Hides where a pointer points to, so that what it points to is read where it is used instead of being kept in registers:
 * the sums need those. */
#define OPAQUE(pointer) __asm__ volatile("" : "+r"(pointer))

enum { FEW = 4 }; /* streams whose sums fit the registers */

/* Sums and elements of a line in one go. */
INLINE void bwd_line(const int n, const weft_dtype t, const bool mix, const bwd_rows *r, const vf *w,
                     const vf *post, vf (*sw)[STEP], vf (*sp)[STEP], int64_t c, bool stream)
{
    const int64_t size = (int64_t)size_of(t);
    vf g[FEW][MAX_LINE], f[MAX_LINE], x[MAX_LINE];
    for (int i = 0; r->next_x && i < n; i++) {
        if (mix) line_ask(r->x, (i * r->xs + c) * size + r->next_x);
        line_ask(r->g, (i * r->gs + c) * size + r->next_g);
    }
    get_f(t, r, c, f);
    for (int o = 0; o < n; o++) {
        get_g(t, r, o, c, g[o]);
        for (int h = 0; h < line_vectors(t); h++)
            sp[o][h % STEP] = vf_fma(masked(r, g[o][h], o, c + h * LANES), f[h], sp[o][h % STEP]);
    }
    for (int i = 0; mix && i < n; i++) {
        line_get(t, r->x + i * r->xs * size, c, x);
        for (int o = 0; o < n; o++)
            for (int h = 0; h < line_vectors(t); h++)
                sw[o * n + i][h % STEP] = vf_fma(x[h], g[o][h], sw[o * n + i][h % STEP]);
    }
    bwd_elements(n, t, mix, r, w, post, g, c, stream);
}

INLINE void bwd_span(const int n, const weft_dtype t, const bool mix, const bwd_rows *r, const coefs *k,
                     bwd_sums *sums, int64_t count, bool stream)
{
    const int products = mix ? n * n : 0;
    vf w[FEW * FEW], post[FEW], sw[FEW * FEW][STEP], sp[FEW][STEP];
    for (int i = 0; i < products; i++) w[i] = vf_set1(k->w[i]);
    for (int i = 0; i < products; i++)
        for (int s = 0; s < STEP; s++) sw[i][s] = sums->w[i][s];
    for (int o = 0; o < n; o++) post[o] = vf_set1(k->post[o]);
    for (int o = 0; o < n; o++)
        for (int s = 0; s < STEP; s++) sp[o][s] = sums->post[o][s];
    for (int64_t c = 0; c < count; c += line_channels(t)) {
        const vf *from_w = w, *from_post = post;
        OPAQUE(from_w);
        OPAQUE(from_post);
        bwd_line(n, t, mix, r, from_w, from_post, sw, sp, c, stream);
    }
    for (int i = 0; i < products; i++)
        for (int s = 0; s < STEP; s++) sums->w[i][s] = sw[i][s];
    for (int o = 0; o < n; o++)
        for (int s = 0; s < STEP; s++) sums->post[o][s] = sp[o][s];
}

/* A block of at most 4x4 sums over a line. */
INLINE void bwd_sum_line(const int no, const int ni, const weft_dtype t, const bwd_rows *r, vf (*sw)[FEW][STEP],
                         int o0, int i0, int64_t c)
{
    const int64_t size = (int64_t)size_of(t);
    vf x[FEW][MAX_LINE], g[MAX_LINE];
    for (int i = 0; i < ni; i++) line_get(t, r->x + (i0 + i) * r->xs * size, c, x[i]);
    for (int o = 0; o < no; o++) {
        get_g(t, r, o0 + o, c, g);
        for (int i = 0; i < ni; i++)
            for (int h = 0; h < line_vectors(t); h++)
                sw[o][i][h % STEP] = vf_fma(x[i][h], g[h], sw[o][i][h % STEP]);
    }
}

INLINE void bwd_sum_block(const int no, const int ni, const int n, const weft_dtype t, const bwd_rows *r,
                          bwd_sums *sums, int o0, int i0, int64_t count)
{
    vf sw[FEW][FEW][STEP];
    for (int o = 0; o < no; o++)
        for (int i = 0; i < ni; i++)
            for (int s = 0; s < STEP; s++) sw[o][i][s] = sums->w[(o0 + o) * n + i0 + i][s];
    for (int64_t c = 0; c < count; c += line_channels(t)) bwd_sum_line(no, ni, t, r, sw, o0, i0, c);
    for (int o = 0; o < no; o++)
        for (int i = 0; i < ni; i++)
            for (int s = 0; s < STEP; s++) sums->w[(o0 + o) * n + i0 + i][s] = sw[o][i][s];
}

INLINE void bwd_rest_line(const int n, const weft_dtype t, const bool mix, const bwd_rows *r, const vf *w,
                          const vf *post, bwd_sums *sums, int64_t c, bool stream)
{
    vf g[WEFT_MAX_STREAMS][MAX_LINE], f[MAX_LINE];
    get_f(t, r, c, f);
    for (int o = 0; o < n; o++) {
        get_g(t, r, o, c, g[o]);
        for (int h = 0; h < line_vectors(t); h++)
            sums->post[o][h % STEP] = vf_fma(masked(r, g[o][h], o, c + h * LANES), f[h], sums->post[o][h % STEP]);
    }
    bwd_elements(n, t, mix, r, w, post, g, c, stream);
}

/* Any n: the n*n sums block by block, then the rest. */
INLINE void bwd_span_large(const int n, const weft_dtype t, const bool mix, const bwd_rows *r, const coefs *k,
                           bwd_sums *sums, int64_t count, bool stream)
{
    vf w[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS], post[WEFT_MAX_STREAMS];
    for (int o = 0; mix && o < n; o += FEW)
        for (int i = 0; i < n; i += FEW) {
            int no = n - o < FEW ? n - o : FEW, ni = n - i < FEW ? n - i : FEW;
            if (no == FEW && ni == FEW)
                bwd_sum_block(FEW, FEW, n, t, r, sums, o, i, count);
            else
                bwd_sum_block(no, ni, n, t, r, sums, o, i, count);
        }
    for (int i = 0; mix && i < n * n; i++) w[i] = vf_set1(k->w[i]);
    for (int o = 0; o < n; o++) post[o] = vf_set1(k->post[o]);
    for (int64_t c = 0; c < count; c += line_channels(t)) bwd_rest_line(n, t, mix, r, w, post, sums, c, stream);
}

static void store_sums(const weft_mhc_post_bwd_args *a, const bwd_sums *sums, int64_t m)
{
    float post[WEFT_MAX_STREAMS], w[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    int n = (int)a->x.shape[1];
    bool in_out = a->numerics.apply == WEFT_APPLY_IN_OUT;
    if (weft_has(&a->d_post.to)) {
        for (int o = 0; o < n; o++) post[o] = vf_sum16(sums->post[o]);
        coef_store(&a->d_post.to, a->d_post.add, post, m);
    }
    if (weft_has(&a->d_res.to)) {
        for (int o = 0; o < n; o++)
            for (int i = 0; i < n; i++) w[in_out ? i * n + o : o * n + i] = vf_sum16(sums->w[o * n + i]);
        coef_store(&a->d_res.to, a->d_res.add, w, m);
    }
}

INLINE void clear_sums(bwd_sums *sums, int n, bool mix)
{
    memset(sums->post, 0, sizeof(vf) * STEP * (size_t)n);
    if (mix) memset(sums->w, 0, sizeof(vf) * STEP * (size_t)(n * n));
}

INLINE void bwd_any(const int n, const weft_dtype t, const bool mix, const bwd_rows *r, const coefs *k,
                    bwd_sums *sums, int64_t count, bool stream)
{
    if (n <= FEW)
        bwd_span(n, t, mix, r, k, sums, count, stream);
    else
        bwd_span_large(n, t, mix, r, k, sums, count, stream);
}

/* Nothing optional: both gradients, neither of them added to, no bias, no dropout. */
static bool is_plain(const weft_mhc_post_bwd_args *a, const float *bias, const float *d_bias, const weft_mask *mask)
{
    return weft_has(&a->d_x.to) && weft_has(&a->d_f.to) && !a->d_x.add && !a->d_f.add && !bias && !d_bias &&
           !mask->on && a->x.stride[0] > 0;
}

/* `plain`: is_plain, as a constant. */
INLINE void bwd_direct(const int n, const weft_dtype t, const bool mix, const bool plain,
                       const weft_mhc_post_bwd_args *a, const float *bias, float *d_bias, const weft_mask *mask,
                       int64_t t0, int64_t t1, bool stream)
{
    _Alignas(64) float drop[CHUNK];
    coefs k;
    bwd_sums sums;
    int64_t channels = a->x.shape[2], size = (int64_t)size_of(t);
    int64_t width = (mask->on && !plain) || n > FEW ? chunk_width(n) : channels;
    const weft_tensor *dx = &a->d_x.to, *df = &a->d_f.to;
    bool has_dx = plain || weft_has(dx), has_df = plain || weft_has(df);
    stream = stream && !a->d_x.add && !a->d_f.add && dx->data != a->d_y.data &&
             (!has_dx || aligned(dx->data, dx->stride[0] | dx->stride[1], t)) &&
             (!has_df || aligned(df->data, df->stride[0], t));
    for (int64_t m = t0; m < t1; m++) {
        load_coefs(&k, &a->post, &a->res, a->numerics.apply, m);
        clear_sums(&sums, n, mix);
        for (int64_t c = 0; c < channels; c += width) {
            int64_t count = min64(width, channels - c);
            if (mask->on && !plain) mask_fill(drop, width, mask, m, n, c, count);
            bwd_rows r = {.x = at(&a->x, m) + c * size,
                          .f = at(&a->f, m) + c * size,
                          .g = at(&a->d_y, m) + c * size,
                          .dx = has_dx ? at(dx, m) + c * size : NULL,
                          .df = has_df ? at(df, m) + c * size : NULL,
                          .xs = a->x.stride[1],
                          .gs = a->d_y.stride[1],
                          .dxs = dx->stride[1],
                          .add_dx = !plain && a->d_x.add,
                          .add_df = !plain && a->d_f.add,
                          .bias = bias && !plain ? bias + c : NULL,
                          .mask = mask->on && !plain ? drop : NULL,
                          .ms = width,
                          .d_bias = d_bias && !plain ? d_bias + c : NULL,
                          .next_x = a->x.stride[0] * size,
                          .next_g = a->d_y.stride[0] * size};
            if (plain && (!r.dx || !r.df || !r.next_x)) __builtin_unreachable();
            if (plain && stream)
                bwd_any(n, t, mix, &r, &k, &sums, count, true);
            else
                bwd_any(n, t, mix, &r, &k, &sums, count, !plain && stream);
        }
        store_sums(a, &sums, m);
    }
}

/* The usual case apart from all others: among them gcc finds no registers for the sums. */
__attribute__((noinline)) static void bwd_four(const weft_mhc_post_bwd_args *a, int64_t t0, int64_t t1, bool stream)
{
    const weft_mask none = {0};
    bwd_direct(4, WEFT_BF16, true, true, a, NULL, NULL, &none, t0, t1, stream);
}

INLINE void bwd_chunks(const bool mix, const weft_mhc_post_bwd_args *a, const float *bias, float *d_bias,
                       const weft_mask *mask, int64_t t0, int64_t t1)
{
    _Alignas(64) float x[CHUNK], f[CHUNK], g[CHUNK], dx[CHUNK], df[CHUNK], drop[CHUNK];
    coefs k;
    bwd_sums sums;
    int n = (int)a->x.shape[1];
    int64_t channels = a->x.shape[2], width = chunk_width(n);
    bool has_dx = weft_has(&a->d_x.to), has_df = weft_has(&a->d_f.to);
    for (int64_t m = t0; m < t1; m++) {
        load_coefs(&k, &a->post, &a->res, a->numerics.apply, m);
        clear_sums(&sums, n, mix);
        for (int64_t c = 0; c < channels; c += width) {
            int64_t count = min64(width, channels - c);
            if (mix) rows_load(x, width, &a->x, m, c, count);
            rows_load(g, width, &a->d_y, m, c, count);
            row_load(f, &a->f, m, c, count);
            if (mask->on) mask_fill(drop, width, mask, m, n, c, count);
            bwd_rows r = {.x = (char *)x,
                          .f = (char *)f,
                          .g = (char *)g,
                          .dx = has_dx ? (char *)dx : NULL,
                          .df = has_df ? (char *)df : NULL,
                          .xs = width,
                          .gs = width,
                          .dxs = width,
                          .bias = bias ? bias + c : NULL,
                          .mask = mask->on ? drop : NULL,
                          .ms = width,
                          .d_bias = d_bias ? d_bias + c : NULL};
            FOR_STREAMS(n, bwd_any(N, WEFT_F32, mix, &r, &k, &sums, pad16(count), false))
            if (has_dx) rows_store(&a->d_x.to, a->d_x.add, dx, width, m, c, count);
            if (has_df) row_store(&a->d_f.to, a->d_f.add, df, m, c, count);
        }
        store_sums(a, &sums, m);
    }
}

/* `four`: the usual case has a function of its own. */
INLINE void bwd_all(const bool mix, const bool four, const weft_mhc_post_bwd_args *a, const float *bias,
                    float *d_bias, int64_t t0, int64_t t1, bool stream)
{
    weft_dtype t = a->x.dtype;
    weft_mask mask = weft_mask_open(&a->dropout, a->x.shape[2]);
    if (row_direct(&a->x, t) && row_direct(&a->f, t) && row_direct(&a->d_y, t) && row_direct(&a->d_x.to, t) &&
        row_direct(&a->d_f.to, t)) {
        if (four && t == WEFT_BF16 && a->x.shape[1] == 4 && is_plain(a, bias, d_bias, &mask))
            bwd_four(a, t0, t1, stream);
        else
            FOR_DTYPE(
                t, FOR_STREAMS(a->x.shape[1], bwd_direct(N, T, mix, false, a, bias, d_bias, &mask, t0, t1, stream)))
    } else {
        bwd_chunks(mix, a, bias, d_bias, &mask, t0, t1);
    }
}

__attribute__((noinline)) static void bwd_unmixed(const weft_mhc_post_bwd_args *a, const float *bias, float *d_bias,
                                                  int64_t t0, int64_t t1, bool stream)
{
    bwd_all(false, false, a, bias, d_bias, t0, t1, stream);
}

void CPU(post_bwd_tile)(const weft_mhc_post_bwd_args *a, const float *bias, float *d_bias, int64_t t0, int64_t t1,
                        bool stream)
{
    if (weft_has(&a->res))
        bwd_all(true, true, a, bias, d_bias, t0, t1, stream);
    else
        bwd_unmixed(a, bias, d_bias, t0, t1, stream);
}

/* ---- operators ----------------------------------------------------------------------------------------------------- */

typedef struct plan {
    const weft_call *call;
    const void *args;
    float *bias;
    cpu_sum sum;
    int64_t base; /* first token of the macro tile */
    bool stream, fill;
} plan;

static weft_arena lay_out(plan *p, const weft_call *call, const void *args, bool bias, bool sum)
{
    weft_arena arena = cpu_arena(call);
    *p = (plan){.call = call, .args = args};
    p->bias = bias ? weft_arena_take(&arena, (size_t)pad16(call->channels) * 4) : NULL;
    p->sum = sum_take(&arena, macro_tokens(call), call->channels, sum);
    return arena;
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_post_fwd_args *a = p->args;
    int64_t t0 = item * TILE, t1 = min64(t0 + TILE, p->call->tokens);
    (void)thread;
    if (p->fill) rows_fill(&a->y, t0, t1);
    CPU(post_fwd_tile)(a, p->bias, t0, t1, p->stream);
    stream_fence();
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_post_bwd_args *a = p->args;
    int64_t t0 = p->base + item * BLOCK, t1 = min64(t0 + BLOCK, p->call->tokens);
    float *sum = sum_block(&p->sum, item);
    (void)thread;
    sum_zero(sum, p->sum.width);
    if (p->fill) rows_fill(&a->d_x.to, t0, t1);
    CPU(post_bwd_tile)(a, p->bias, sum, t0, t1, p->stream);
    stream_fence();
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_post_fwd_args *a = args;
    plan p;
    lay_out(&p, call, args, weft_has(&a->bias), false);
    p.stream = stream_pays(call, &a->y, call->tokens * call->streams * call->channels);
    p.fill = fill_pays(call, &a->y, call->tokens * call->streams * call->channels);
    if (p.bias) vector_load(p.bias, &a->bias, call->channels, 0);
    cpu_parallel(call, (call->tokens + TILE - 1) / TILE, call->tokens * call->streams * call->channels, fwd_body,
                 &p);
    return WEFT_OK;
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_post_bwd_args *a = args;
    plan p;
    lay_out(&p, call, args, weft_has(&a->bias), weft_has(&a->d_bias.to));
    p.stream = stream_pays(call, &a->d_x.to, call->tokens * call->streams * call->channels);
    p.fill = fill_pays(call, &a->d_x.to, call->tokens * call->streams * call->channels);
    if (p.bias) vector_load(p.bias, &a->bias, call->channels, 0);
    sum_zero(p.sum.total, p.sum.width);
    /* Without a sum over tokens there is nothing to stop for. */
    int64_t macro = p.sum.total ? macro_tokens(call) : call->tokens;
    for (; p.base < call->tokens; p.base += macro) {
        int64_t tokens = min64(macro, call->tokens - p.base), blocks = (tokens + BLOCK - 1) / BLOCK;
        cpu_parallel(call, blocks, tokens * call->streams * call->channels, bwd_body, &p);
        sum_fold(&p.sum, blocks);
    }
    sum_store(&p.sum, 0, &a->d_bias);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args, weft_has(&((const weft_mhc_post_fwd_args *)args)->bias), false);
    return weft_arena_bytes(&arena);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    const weft_mhc_post_bwd_args *a = args;
    plan p;
    weft_arena arena = lay_out(&p, call, args, weft_has(&a->bias), weft_has(&a->d_bias.to));
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_post_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel CPU(mhc_post_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
