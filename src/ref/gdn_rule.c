/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated delta rule, token after token [G5] and in chunks [G6]. One sequence and one value head at a time, in arrays of
 * double; both forms start every chunk from a state that is kept, so that backward need not keep one for each token. */
#include "ref/gdn.h"

/* Tokens between two states that are kept for backward, in the form without chunks. */
enum { KEPT = 32 };

/* One value head of one sequence: rows of key_dim or value_dim. */
typedef struct series {
    int64_t length, dk, dv, chunk; /* chunk 0: token after token */
    double scale;
    double *q, *k, *v, *beta, *g, *o;       /* o: or its gradient */
    double *d_q, *d_k, *d_v, *d_beta, *d_g; /* d_q and d_k are added to */
    double *m, *d_m;                        /* [dk][dv]: the state, and its gradient */
    double *kept;                           /* [chunks + 1][dk][dv] */
    double *inner;                          /* states within a chunk, or what a chunk needs */
} series;

static double dot(int64_t count, const double *a, const double *b)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* y (+)= s m^T x and y (+)= s m x */
static void apply_t(const series *r, double s, const double *m, const double *x, double *y)
{
    for (int64_t i = 0; i < r->dk; i++)
        for (int64_t j = 0; j < r->dv; j++) y[j] += s * m[i * r->dv + j] * x[i];
}

static void apply(const series *r, double s, const double *m, const double *x, double *y)
{
    for (int64_t i = 0; i < r->dk; i++) y[i] += s * dot(r->dv, m + i * r->dv, x);
}

/* m += s a b^T */
static void add_outer(const series *r, double s, const double *a, const double *b, double *m)
{
    for (int64_t i = 0; i < r->dk; i++)
        for (int64_t j = 0; j < r->dv; j++) m[i * r->dv + j] += s * a[i] * b[j];
}

static void scale_by(int64_t count, double s, double *x)
{
    for (int64_t i = 0; i < count; i++) x[i] *= s;
}

/* ---- token after token [G5] ------------------------------------------------------------------------------------------ */

/* delta[dv] = beta (v - m^T k), m being the decayed state. */
static void delta_of(const series *r, int64_t t, const double *m, double *delta)
{
    for (int64_t j = 0; j < r->dv; j++) delta[j] = r->v[t * r->dv + j];
    apply_t(r, -1, m, r->k + t * r->dk, delta);
    scale_by(r->dv, r->beta[t], delta);
}

static void step(const series *r, int64_t t, double *m, double *delta)
{
    scale_by(r->dk * r->dv, exp(r->g[t]), m);
    delta_of(r, t, m, delta);
    add_outer(r, 1, r->k + t * r->dk, delta, m);
}

static void tokens_forward(const series *r, int64_t t0, int64_t t1, bool outputs, double *delta)
{
    for (int64_t t = t0; t < t1; t++) {
        step(r, t, r->m, delta);
        if (!outputs) continue;
        clear(r->dv, r->o + t * r->dv);
        apply_t(r, r->scale, r->m, r->q + t * r->dk, r->o + t * r->dv);
    }
}

static void tokens_backward(const series *r, int64_t t0, int64_t t1, const double *start)
{
    int64_t size = r->dk * r->dv;
    double *state = r->inner, *p = state + (KEPT + 1) * size, *delta = p + size, *d_delta = delta + r->dv;
    memcpy(state, start, (size_t)size * sizeof *state);
    for (int64_t t = t0; t < t1; t++) {
        double *next = state + (t - t0 + 1) * size;
        memcpy(next, next - size, (size_t)size * sizeof *next);
        step(r, t, next, delta);
    }
    for (int64_t t = t1 - 1; t >= t0; t--) {
        const double *before = state + (t - t0) * size, *after = before + size, *k = r->k + t * r->dk;
        const double *d_o = r->o + t * r->dv;
        memcpy(p, before, (size_t)size * sizeof *p);
        scale_by(size, exp(r->g[t]), p);
        delta_of(r, t, p, delta);
        apply(r, r->scale, after, d_o, r->d_q + t * r->dk);
        add_outer(r, r->scale, r->q + t * r->dk, d_o, r->d_m);
        apply(r, 1, r->d_m, delta, r->d_k + t * r->dk);
        clear(r->dv, d_delta);
        apply_t(r, 1, r->d_m, k, d_delta);
        double d_beta = dot(r->dv, d_delta, r->v + t * r->dv);
        for (int64_t i = 0; i < r->dk; i++) d_beta -= k[i] * dot(r->dv, p + i * r->dv, d_delta);
        r->d_beta[t] = d_beta;
        for (int64_t j = 0; j < r->dv; j++) r->d_v[t * r->dv + j] = r->beta[t] * d_delta[j];
        apply(r, -r->beta[t], p, d_delta, r->d_k + t * r->dk);
        add_outer(r, -r->beta[t], k, d_delta, r->d_m);
        r->d_g[t] = dot(size, r->d_m, p);
        scale_by(size, exp(r->g[t]), r->d_m);
    }
}

/* ---- in chunks [G6] -------------------------------------------------------------------------------------------------- */

/* What a chunk of c tokens needs beside the rows themselves. Index 0 of `decay` is the chunk's beginning. */
typedef struct chunk {
    int64_t t0, c;
    double *decay; /* [c+1][c+1]: exp of the sum of g over tokens j .. i-1, for i >= j; tokens are 1-based here */
    double *solve; /* [c][c]: A, strictly below the diagonal */
    double *delta; /* [c][dv] */
    double *d_delta, *d_right, *d_solve, *d_exponent, *row;
} chunk;

static chunk chunk_open(const series *r, int64_t t0)
{
    int64_t c = r->length - t0 < r->chunk ? r->length - t0 : r->chunk;
    chunk k = {.t0 = t0, .c = c, .decay = r->inner};
    k.solve = k.decay + (c + 1) * (c + 1);
    k.d_solve = k.solve + c * c;
    k.delta = k.d_solve + c * c;
    k.d_delta = k.delta + c * r->dv;
    k.d_right = k.d_delta + c * r->dv;
    k.d_exponent = k.d_right + c * r->dv;
    k.row = k.d_exponent + c + 2;
    return k;
}

static int64_t chunk_room(int64_t c, int64_t dk, int64_t dv)
{
    return (c + 1) * (c + 1) + 2 * c * c + 3 * c * dv + c + 2 + (dk > dv ? dk : dv);
}

static double decay_at(const chunk *k, int64_t i, int64_t j)
{
    return k->decay[i * (k->c + 1) + j];
}

/* delta = (I + A)^-1 beta (v - exp(G) m^T k), by forward substitution. */
static void chunk_deltas(const series *r, const chunk *k)
{
    for (int64_t i = 0; i <= k->c; i++) {
        double sum = 0;
        for (int64_t j = i; j >= 0; j--) {
            if (j < i) sum += r->g[k->t0 + j];
            k->decay[i * (k->c + 1) + j] = exp(sum);
        }
    }
    for (int64_t i = 0; i < k->c; i++) {
        int64_t t = k->t0 + i;
        double *delta = k->delta + i * r->dv;
        memcpy(delta, r->v + t * r->dv, (size_t)r->dv * sizeof *delta);
        apply_t(r, -decay_at(k, i + 1, 0), r->m, r->k + t * r->dk, delta);
        scale_by(r->dv, r->beta[t], delta);
        for (int64_t j = 0; j < i; j++) {
            double a =
                r->beta[t] * dot(r->dk, r->k + t * r->dk, r->k + (k->t0 + j) * r->dk) * decay_at(k, i + 1, j + 1);
            k->solve[i * k->c + j] = a;
            for (int64_t d = 0; d < r->dv; d++) delta[d] -= a * k->delta[j * r->dv + d];
        }
    }
}

static void chunk_state(const series *r, const chunk *k)
{
    scale_by(r->dk * r->dv, decay_at(k, k->c, 0), r->m);
    for (int64_t j = 0; j < k->c; j++)
        add_outer(r, decay_at(k, k->c, j + 1), r->k + (k->t0 + j) * r->dk, k->delta + j * r->dv, r->m);
}

static void chunk_outputs(const series *r, const chunk *k)
{
    for (int64_t i = 0; i < k->c; i++) {
        const double *q = r->q + (k->t0 + i) * r->dk;
        double *o = r->o + (k->t0 + i) * r->dv;
        clear(r->dv, o);
        apply_t(r, r->scale * decay_at(k, i + 1, 0), r->m, q, o);
        for (int64_t j = 0; j <= i; j++) {
            double s = r->scale * dot(r->dk, q, r->k + (k->t0 + j) * r->dk) * decay_at(k, i + 1, j + 1);
            for (int64_t d = 0; d < r->dv; d++) o[d] += s * k->delta[j * r->dv + d];
        }
    }
}

/* An exponent is the sum of g over tokens j .. i-1: its gradient belongs to each of them. */
static void exponent_grad(const chunk *k, int64_t i, int64_t j, double d)
{
    k->d_exponent[j] += d;
    k->d_exponent[i] -= d;
}

/* d_delta, then through the substitution: d_right = (I + A)^-T d_delta, d_A = -d_right delta^T. */
static void chunk_solve_backward(const series *r, const chunk *k)
{
    for (int64_t j = 0; j < k->c; j++) {
        const double *key = r->k + (k->t0 + j) * r->dk;
        double *d = k->d_delta + j * r->dv;
        clear(r->dv, d);
        apply_t(r, decay_at(k, k->c, j + 1), r->d_m, key, d);
        for (int64_t i = j; i < k->c; i++) {
            double s = r->scale * dot(r->dk, r->q + (k->t0 + i) * r->dk, key) * decay_at(k, i + 1, j + 1);
            for (int64_t e = 0; e < r->dv; e++) d[e] += s * r->o[(k->t0 + i) * r->dv + e];
        }
    }
    for (int64_t i = k->c - 1; i >= 0; i--) {
        double *d = k->d_right + i * r->dv;
        memcpy(d, k->d_delta + i * r->dv, (size_t)r->dv * sizeof *d);
        for (int64_t l = i + 1; l < k->c; l++)
            for (int64_t e = 0; e < r->dv; e++) d[e] -= k->solve[l * k->c + i] * k->d_right[l * r->dv + e];
        for (int64_t j = 0; j < i; j++) k->d_solve[i * k->c + j] = -dot(r->dv, d, k->delta + j * r->dv);
    }
}

static void chunk_backward(const series *r, int64_t t0, const double *start)
{
    chunk k = chunk_open(r, t0);
    int64_t size = r->dk * r->dv;
    memcpy(r->m, start, (size_t)size * sizeof *start);
    chunk_deltas(r, &k);
    chunk_solve_backward(r, &k);
    clear(k.c + 1, k.d_exponent);
    for (int64_t i = 0; i < k.c; i++) {
        int64_t t = t0 + i;
        const double *q = r->q + t * r->dk, *key = r->k + t * r->dk, *d_o = r->o + t * r->dv;
        const double *d_right = k.d_right + i * r->dv;
        double from_start = decay_at(&k, i + 1, 0), d_beta = dot(r->dv, d_right, r->v + t * r->dv);
        /* through what is left of the state at the chunk's beginning */
        apply(r, r->scale * from_start, r->m, d_o, r->d_q + t * r->dk);
        clear(r->dk, k.row);
        apply(r, from_start, r->m, d_right, k.row);
        d_beta -= dot(r->dk, key, k.row);
        for (int64_t d = 0; d < r->dk; d++) r->d_k[t * r->dk + d] -= r->beta[t] * k.row[d];
        double d_start = -r->beta[t] * dot(r->dk, key, k.row);
        clear(r->dk, k.row);
        apply(r, r->scale * from_start, r->m, d_o, k.row);
        exponent_grad(&k, i + 1, 0, d_start + dot(r->dk, q, k.row));
        for (int64_t d = 0; d < r->dv; d++) r->d_v[t * r->dv + d] = r->beta[t] * d_right[d];
        /* through the tokens of the chunk up to this one */
        for (int64_t j = 0; j <= i; j++) {
            const double *kj = r->k + (t0 + j) * r->dk;
            double decay = decay_at(&k, i + 1, j + 1), kk = dot(r->dk, key, kj);
            double s = r->scale * decay * dot(r->dv, d_o, k.delta + j * r->dv);
            double a = j < i ? k.d_solve[i * k.c + j] : 0;
            d_beta += a * kk * decay;
            for (int64_t d = 0; d < r->dk; d++) {
                r->d_q[t * r->dk + d] += s * kj[d];
                r->d_k[t * r->dk + d] += a * r->beta[t] * decay * kj[d];
                r->d_k[(t0 + j) * r->dk + d] += s * q[d] + a * r->beta[t] * decay * key[d];
            }
            exponent_grad(&k, i + 1, j + 1, s * dot(r->dk, q, kj) + a * r->beta[t] * kk * decay);
        }
        r->d_beta[t] = d_beta;
        /* through the state at the chunk's end */
        double to_end = decay_at(&k, k.c, i + 1);
        clear(r->dk, k.row);
        apply(r, to_end, r->d_m, k.delta + i * r->dv, k.row);
        for (int64_t d = 0; d < r->dk; d++) r->d_k[t * r->dk + d] += k.row[d];
        exponent_grad(&k, k.c, i + 1, dot(r->dk, key, k.row));
    }
    exponent_grad(&k, k.c, 0, decay_at(&k, k.c, 0) * dot(size, r->m, r->d_m));
    double sum = 0;
    for (int64_t i = 0; i < k.c; i++) r->d_g[t0 + i] = sum += k.d_exponent[i];
    scale_by(size, decay_at(&k, k.c, 0), r->d_m);
    for (int64_t i = 0; i < k.c; i++) {
        int64_t t = t0 + i;
        double from_start = decay_at(&k, i + 1, 0);
        add_outer(r, r->scale * from_start, r->q + t * r->dk, r->o + t * r->dv, r->d_m);
        add_outer(r, -r->beta[t] * from_start, r->k + t * r->dk, k.d_right + i * r->dv, r->d_m);
    }
}

/* ---- a whole series ------------------------------------------------------------------------------------------------- */

static int64_t stride_of(int64_t c)
{
    return c ? c : KEPT;
}

/* From m at the beginning to m at the end. kept: also the states in front of all chunks. */
static void series_forward(const series *r, bool outputs, bool keep)
{
    int64_t size = r->dk * r->dv, stride = stride_of(r->chunk);
    for (int64_t t = 0, n = 0; t < r->length; t += stride, n++) {
        int64_t end = t + stride < r->length ? t + stride : r->length;
        if (keep) memcpy(r->kept + n * size, r->m, (size_t)size * sizeof *r->m);
        if (!r->chunk) {
            tokens_forward(r, t, end, outputs, r->inner);
            continue;
        }
        chunk k = chunk_open(r, t);
        chunk_deltas(r, &k);
        if (outputs) chunk_outputs(r, &k);
        chunk_state(r, &k);
    }
}

static void series_backward(const series *r)
{
    int64_t size = r->dk * r->dv, stride = stride_of(r->chunk);
    for (int64_t n = (r->length + stride - 1) / stride - 1; n >= 0; n--) {
        int64_t t = n * stride, end = t + stride < r->length ? t + stride : r->length;
        if (r->chunk)
            chunk_backward(r, t, r->kept + n * size);
        else
            tokens_backward(r, t, end, r->kept + n * size);
    }
}

static series series_open(const weft_call *call, int64_t c, double scale, bool backward, weft_arena *arena)
{
    int64_t steps = call->steps, dk = call->key_dim, dv = call->value_dim, stride = stride_of(c);
    series r = {.dk = dk, .dv = dv, .chunk = c, .scale = scale};
    r.q = take(arena, steps * dk);
    r.k = take(arena, steps * dk);
    r.v = take(arena, steps * dv);
    r.beta = take(arena, steps);
    r.g = take(arena, steps);
    r.o = take(arena, steps * dv);
    r.m = take(arena, dk * dv);
    r.inner = take(arena, c ? chunk_room(c, dk, dv) : (KEPT + 2) * dk * dv + 2 * dv);
    if (!backward) return r;
    r.d_q = take(arena, steps * dk);
    r.d_k = take(arena, steps * dk);
    r.d_v = take(arena, steps * dv);
    r.d_beta = take(arena, steps);
    r.d_g = take(arena, steps);
    r.d_m = take(arena, dk * dv);
    r.kept = take(arena, ((steps + stride - 1) / stride + 1) * dk * dv);
    return r;
}

/* Rows of one head of a sequence. */
static void rows_of(const weft_sequences *s, const weft_tensor *x, int64_t n, int64_t h, double *to)
{
    int64_t t0 = weft_sequence_start(s, n), t1 = weft_sequence_start(s, n + 1),
            dim = x->ndim == 4 ? x->shape[3] : 1;
    for (int64_t t = t0; t < t1; t++)
        for (int64_t d = 0; d < dim; d++) to[(t - t0) * dim + d] = get_head(s, x, t, h, d);
}

static void grads_of(const weft_sequences *s, const weft_grad *g, int64_t n, int64_t h, const double *from)
{
    int64_t t0 = weft_sequence_start(s, n), t1 = weft_sequence_start(s, n + 1);
    int64_t dim = g->to.ndim == 4 ? g->to.shape[3] : 1;
    for (int64_t t = t0; t < t1 && weft_has(&g->to); t++)
        for (int64_t d = 0; d < dim; d++) put_grad_head(s, g, t, h, d, from[(t - t0) * dim + d]);
}

static int64_t offset_of_state(const weft_tensor *x, int64_t n, int64_t h, int64_t i, int64_t j)
{
    return n * x->stride[0] + h * x->stride[1] + i * x->stride[2] + j * x->stride[3];
}

static void state_of(const weft_tensor *x, int64_t n, int64_t h, int64_t dk, int64_t dv, double *m)
{
    for (int64_t i = 0; i < dk; i++)
        for (int64_t j = 0; j < dv; j++)
            m[i * dv + j] = weft_has(x) ? load_at(x, offset_of_state(x, n, h, i, j)) : 0;
}

/* m NULL: zeros */
static void store_state(const weft_tensor *x, int64_t n, int64_t h, int64_t dk, int64_t dv, const double *m)
{
    for (int64_t i = 0; weft_has(x) && i < dk; i++)
        for (int64_t j = 0; j < dv; j++) store_at(x, offset_of_state(x, n, h, i, j), m ? m[i * dv + j] : 0);
}

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_gdn_rule_fwd_args *a = args;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    weft_sequences s = weft_sequences_of(call, &a->cu_seqlens);
    series r = series_open(call, a->chunk, a->scale, false, &arena);
    for (int64_t n = 0; n < s.count; n++)
        for (int64_t h = 0; h < call->value_heads; h++) {
            int64_t kh = key_head_of(a->head_map, h, call->value_heads, call->heads);
            int64_t start = weft_sequence_start(&s, n);
            r.length = weft_sequence_start(&s, n + 1) - start;
            rows_of(&s, &a->query, n, kh, r.q);
            rows_of(&s, &a->key, n, kh, r.k);
            rows_of(&s, &a->value, n, h, r.v);
            rows_of(&s, &a->beta, n, h, r.beta);
            rows_of(&s, &a->g, n, h, r.g);
            state_of(&a->state, n, h, r.dk, r.dv, r.m);
            series_forward(&r, true, false);
            for (int64_t t = 0; t < r.length; t++)
                for (int64_t d = 0; d < r.dv; d++) put_head(&s, &a->o, start + t, h, d, r.o[t * r.dv + d]);
            store_state(&a->final_state, n, h, r.dk, r.dv, r.m);
        }
    for (int64_t t = weft_sequence_start(&s, s.count); t < s.tokens; t++) put_zero_row(&s, &a->o, t);
    return WEFT_OK;
}

/* Sequence and place of token t in token_state. */
static void store_token_state(const weft_sequences *s, const weft_gdn_rule_step_args *a, int64_t t, int64_t h,
                              const double *m)
{
    const weft_tensor *x = &a->token_state;
    int64_t n = s->cu ? 0 : t / s->steps, step = s->cu ? t : t % s->steps;
    if (weft_has(x)) store_state(x, n, step * a->value.shape[2] + h, x->shape[2], x->shape[3], m);
}

/* Tokens of padding. */
static void step_zero(const weft_sequences *s, const weft_gdn_rule_step_args *a, int64_t t0, int64_t t1)
{
    for (int64_t t = t0; t < t1; t++) {
        put_zero_row(s, &a->o, t);
        for (int64_t h = 0; h < a->value.shape[2]; h++) store_token_state(s, a, t, h, NULL);
    }
}

static void step_request(const weft_sequences *s, const weft_gdn_rule_step_args *a, series *r, int64_t n,
                         int64_t row)
{
    int64_t start = weft_sequence_start(s, n);
    r->length = weft_sequence_start(s, n + 1) - start;
    for (int64_t h = 0; h < a->value.shape[2]; h++) {
        int64_t kh = key_head_of(a->head_map, h, a->value.shape[2], a->query.shape[2]);
        rows_of(s, &a->query, n, kh, r->q);
        rows_of(s, &a->key, n, kh, r->k);
        rows_of(s, &a->value, n, h, r->v);
        rows_of(s, &a->beta, n, h, r->beta);
        rows_of(s, &a->g, n, h, r->g);
        state_of(&a->state, row, h, r->dk, r->dv, r->m);
        for (int64_t t = 0; t < r->length; t++) {
            tokens_forward(r, t, t + 1, true, r->inner);
            for (int64_t d = 0; d < r->dv; d++) put_head(s, &a->o, start + t, h, d, r->o[t * r->dv + d]);
            store_token_state(s, a, start + t, h, r->m);
        }
        store_state(&a->new_state, row, h, r->dk, r->dv, r->m);
    }
}

static weft_status run_step(const weft_call *call, const void *args)
{
    const weft_gdn_rule_step_args *a = args;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    weft_sequences s = weft_sequences_of(call, &a->cu_seqlens);
    series r = series_open(call, 0, a->scale, false, &arena);
    for (int64_t n = 0; n < s.count; n++) {
        int64_t row = weft_has(&a->state_index) ? weft_index_at(&a->state_index, n) : n;
        if (row < 0)
            step_zero(&s, a, weft_sequence_start(&s, n), weft_sequence_start(&s, n + 1));
        else
            step_request(&s, a, &r, n, row);
    }
    step_zero(&s, a, weft_sequence_start(&s, s.count), s.tokens);
    return WEFT_OK;
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_gdn_rule_bwd_args *a = args;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    weft_sequences s = weft_sequences_of(call, &a->cu_seqlens);
    series r = series_open(call, a->chunk, a->scale, true, &arena);
    for (int64_t n = 0; n < s.count; n++)
        for (int64_t kh = 0; kh < call->heads; kh++) {
            r.length = weft_sequence_start(&s, n + 1) - weft_sequence_start(&s, n);
            rows_of(&s, &a->query, n, kh, r.q);
            rows_of(&s, &a->key, n, kh, r.k);
            clear(r.length * r.dk, r.d_q);
            clear(r.length * r.dk, r.d_k);
            for (int64_t h = 0; h < call->value_heads; h++) {
                if (key_head_of(a->head_map, h, call->value_heads, call->heads) != kh) continue;
                rows_of(&s, &a->value, n, h, r.v);
                rows_of(&s, &a->beta, n, h, r.beta);
                rows_of(&s, &a->g, n, h, r.g);
                rows_of(&s, &a->d_o, n, h, r.o);
                state_of(&a->state, n, h, r.dk, r.dv, r.m);
                series_forward(&r, false, true);
                state_of(&a->d_final_state, n, h, r.dk, r.dv, r.d_m);
                series_backward(&r);
                grads_of(&s, &a->d_value, n, h, r.d_v);
                grads_of(&s, &a->d_beta, n, h, r.d_beta);
                grads_of(&s, &a->d_g, n, h, r.d_g);
                for (int64_t i = 0; weft_has(&a->d_state.to) && i < r.dk; i++)
                    for (int64_t j = 0; j < r.dv; j++)
                        grad_at(&a->d_state, offset_of_state(&a->d_state.to, n, h, i, j), r.d_m[i * r.dv + j]);
            }
            grads_of(&s, &a->d_query, n, kh, r.d_q);
            grads_of(&s, &a->d_key, n, kh, r.d_k);
        }
    const weft_grad *const rows[] = {&a->d_query, &a->d_key, &a->d_value, &a->d_beta, &a->d_g};
    for (int64_t t = weft_sequence_start(&s, s.count); t < s.tokens; t++)
        for (int i = 0; i < 5; i++) put_grad_zero_row(&s, rows[i], t);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    series_open(call, ((const weft_gdn_rule_fwd_args *)args)->chunk, 1, false, &arena);
    return weft_arena_bytes(&arena);
}

static size_t step_workspace(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    (void)args;
    series_open(call, 0, 1, false, &arena);
    return weft_arena_bytes(&arena);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    series_open(call, ((const weft_gdn_rule_bwd_args *)args)->chunk, 1, true, &arena);
    return weft_arena_bytes(&arena);
}

const weft_kernel weft_ref_gdn_rule_fwd[] = {{.run = run_fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel weft_ref_gdn_rule_bwd[] = {{.run = run_bwd, .workspace = bwd_workspace}, {0}};
const weft_kernel weft_ref_gdn_rule_step[] = {{.run = run_step, .workspace = step_workspace}, {0}};
