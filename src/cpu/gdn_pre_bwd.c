/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule, backward [G1] [G2] [G3] [G4]. Bytes per token, bf16: 2 (4 Hk Dk + 2 H Dk + 5 Hv Dv)
 * and the gates. One pass over the activations, then one ordered sum over blocks.
 *
 * A block of tokens belongs to one thread, which walks its runs from the last to the first: d_x of a token needs du of the
 * W - 1 tokens behind it, and so they are at hand. Only those behind the block's own end are computed once more. Sums over
 * tokens: within a run token after token, runs of a block in the order of the walk, blocks in order, in double. */
#include "cpu/gdn_pre.h"

enum { GDN_BLOCK = 128 }; /* tokens of a partial sum: large beside W - 1, and its row small beside the tokens */
enum { GDN_FOLD_BLOCKS = 64 }; /* blocks between two folds: bounds the workspace, changes no result */

typedef double vd __attribute__((vector_size(8 * LANES)));

typedef struct plan {
    gdn_pre p;
    const weft_gdn_pre_bwd_args *a;
    const weft_tensor *up[3]; /* d_query, d_key, d_value */
    const weft_grad *down[3]; /* d_q, d_k, d_v */
    bool direct[3], stream[3], z_stream, sums;
    float *scratch, *blocks; /* blocks: [GDN_FOLD_BLOCKS][width]; rows as the taps, then d_a_log and d_dt_bias */
    double *total;
    int64_t floats, width, first; /* scratch per thread; of a block's sums; first block of this fold */
    int64_t carried;              /* offset of the carried rows in the scratch */
} plan;

/* Scratch of one head: inputs, du, and single rows. */
typedef struct rows {
    float *x, *du, *dn, *y, *slope;
} rows;

static rows rows_of(const plan *q, float *scratch, int64_t ld)
{
    rows w;
    w.x = scratch;
    w.du = w.x + (GDN_RUN + 2 * (q->p.width - 1)) * ld;
    w.dn = w.du + (GDN_RUN + q->p.width - 1) * ld;
    w.y = w.dn + ld;
    w.slope = w.y + ld;
    return w;
}

/* ---- one row: from the gradient of a head's output to that of its convolution ------------------------------------------ */

/* dn = the upstream gradient, summed over the heads that repeat this one; false where there is none. */
static bool upstream_load(const plan *q, int part, int64_t h, int64_t t, float *dn, float *other)
{
    const gdn_pre *p = &q->p;
    const weft_tensor *up = q->up[part];
    const gdn_part *g = &p->part[part];
    if (!weft_has(up)) return false;
    gdn_group from = gdn_group_of(p, part, h, up->shape[2]);
    char *token = gdn_token(p, up, t);
    head_load(dn, up, head_of(up, token, from.first), g->dim);
    for (int64_t i = 1; i < from.count; i++) {
        head_load(other, up, head_of(up, token, from.first + i * from.step), g->dim);
        for (int64_t e = 0; e < g->ld; e += LANES) vf_store(dn + e, vf_load(dn + e) + vf_load(other + e));
    }
    bool round = part < 2 && p->round != WEFT_NONE, scale = part == 0 && p->o->q_scale != 1;
    for (int64_t e = 0; (round || scale) && e < g->ld; e += LANES) {
        vf v = vf_load(dn + e);
        if (round) v = vf_round(p->round, v);
        vf_store(dn + e, scale ? v * (float)p->o->q_scale : v);
    }
    return true;
}

/* Vectors of a row that are computed together. */
enum { TOGETHER = STEP > 4 ? STEP : 4 };

/* y, silu' and the two sums that the norm's gradient needs, for n vectors from channel c on. */
INLINE void recompute_some(const int W, const int n, const gdn_pre *p, const float *x, const float *taps,
                           int64_t ld, int64_t c, const rows *w, vf *q, vf *d)
{
    vf u[TOGETHER], y[TOGETHER], slope[TOGETHER];
    bool silu = p->o->activation == WEFT_GDN_SILU;
    for (int k = 0; k < n; k++) {
        y[k] = u[k] = convolve(W, x, taps, ld, c + k * LANES);
        slope[k] = vf_set1(1);
    }
    if (silu) gm_silu_slopes(y, slope, n);
    if (p->round != WEFT_NONE) {
        for (int k = 0; k < n; k++) {
            u[k] = vf_round(p->round, u[k]);
            y[k] = vf_round(p->round, y[k]);
        }
        if (silu) gm_silu_slopes(u, slope, n);
    }
    for (int k = 0; k < n; k++) {
        int64_t e = c + k * LANES;
        vf_store(w->y + e, y[k]);
        vf_store(w->slope + e, slope[k]);
        q[k % STEP] = vf_fma(y[k], y[k], q[k % STEP]);
        d[k % STEP] = vf_fma(y[k], vf_load(w->dn + e), d[k % STEP]);
    }
}

INLINE void recompute(const int W, const gdn_pre *p, const float *x, const float *taps, int64_t ld, const rows *w,
                      float *squares, float *dot)
{
    vf q[STEP] = {{0}}, d[STEP] = {{0}};
    int64_t c = 0;
    for (; c + TOGETHER * LANES <= ld; c += TOGETHER * LANES)
        recompute_some(W, TOGETHER, p, x, taps, ld, c, w, q, d);
    for (; c < ld; c += WIDE) recompute_some(W, STEP, p, x, taps, ld, c, w, q, d);
    *squares = vf_sum16(q);
    *dot = vf_sum16(d);
}

/* Asked where the sum of squares is infinite: was it the sum, or one of its terms? */
static bool row_finite(const float *y, int64_t ld)
{
    for (int64_t e = 0; e < ld; e++)
        if (!isfinite(y[e])) return false;
    return true;
}

/* dy = r (dn - n (n . dn)) with n = y r. A sum of squares that overflows makes r and all of this 0. */
INLINE void du_row(const int W, const gdn_pre *p, int part, const float *x, const float *taps, int64_t ld,
                   const rows *w, float *du)
{
    float squares, dot, r, k = 0;
    bool norm = part < 2 && p->o->l2norm;
    recompute(W, p, x, taps, ld, w, &squares, &dot);
    r = norm ? norm_factor(p, squares) : 1;
    if (norm) k = r != 0 || !row_finite(w->y, ld) ? r * (r * dot) : 0;
    for (int64_t e = 0; e < ld; e += LANES) {
        vf dy = vf_load(w->dn + e);
        if (norm) dy = vf_fma(vf_load(w->y + e), vf_set1(-k), dy) * r;
        if (p->round != WEFT_NONE) dy = vf_round(p->round, dy);
        vf_store(du + e, dy * vf_load(w->slope + e));
    }
}

/* du of tokens from .. to, x being the inputs from W - 1 tokens in front of them on. */
INLINE void du_rows(const int W, const plan *q, int part, int64_t h, int64_t from, int64_t to, const float *x,
                    const rows *w, float *du)
{
    const gdn_part *g = &q->p.part[part];
    const float *taps = taps_of(&q->p, g, h);
    for (int64_t t = from; t < to; t++, x += g->ld, du += g->ld)
        if (upstream_load(q, part, h, t, w->dn, w->y))
            du_row(W, &q->p, part, x, taps, g->ld, w, du);
        else
            memset(du, 0, (size_t)g->ld * 4);
}

/* ---- one head of a run ------------------------------------------------------------------------------------------------- */

/* The gradient of an input from du of its own token and of those behind it. */
INLINE vf gather(const int W, const float *du, const float *taps, int64_t ld, int64_t e)
{
    vf v = vf_load(taps + (W - 1) * ld + e) * vf_load(du + e);
    for (int k = 1; k < W; k++) v = vf_fma(vf_load(taps + (W - 1 - k) * ld + e), vf_load(du + k * ld + e), v);
    return v;
}

INLINE void dx_lines(const int W, const weft_dtype t, char *head, const float *du, const float *taps, int64_t ld,
                     int64_t dim, bool stream)
{
    for (int64_t c = 0; c < dim; c += line_channels(t)) {
        vf v[MAX_LINE];
        for (int h = 0; h < line_vectors(t); h++) v[h] = gather(W, du, taps, ld, c + h * LANES);
        line_put(t, head, c, v, stream);
    }
}

INLINE void dx_rows(const int W, const plan *q, int part, int64_t h, const gdn_run *r, const rows *w)
{
    const gdn_pre *p = &q->p;
    const gdn_part *g = &p->part[part];
    const weft_grad *down = q->down[part];
    const weft_tensor *to = &down->to, *d_final = &q->a->d_final_state;
    const float *taps = taps_of(p, g, h), *du = w->du;
    if (!weft_has(to)) return;
    for (int64_t t = r->t0; t < r->t1; t++, du += g->ld) {
        int64_t slot = t - (r->end - p->call->history);
        char *head = head_of(to, gdn_token(p, to, t), h);
        bool last = weft_has(d_final) && slot >= 0;
        if (q->direct[part] && !last && !down->add) {
            FOR_DTYPE(to->dtype, dx_lines(W, T, head, du, taps, g->ld, g->dim, q->stream[part]))
            continue;
        }
        if (last) slot_load(w->y, d_final, r->n, g->channel + h * g->dim, slot, g->dim);
        for (int64_t e = 0; e < g->ld; e += LANES) {
            vf v = gather(W, du, taps, g->ld, e);
            vf_store(w->dn + e, last ? v + vf_load(w->y + e) : v);
        }
        head_store(to, down->add, head, w->dn, g->dim);
    }
}

/* sum[j] += du x of the run's tokens, one after the other, then once to the block's sum. */
INLINE void tap_sums(const int W, const rows *w, int64_t length, int64_t ld, float *sum)
{
    for (int64_t e = 0; e < ld; e += LANES) {
        vf acc[WEFT_GDN_MAX_WIDTH], bias = vf_set1(0);
        for (int j = 0; j < W; j++) acc[j] = vf_set1(0);
        for (int64_t i = 0; i < length; i++) {
            vf du = vf_load(w->du + i * ld + e);
            for (int j = 0; j < W; j++) acc[j] = vf_fma(du, vf_load(w->x + (i + j) * ld + e), acc[j]);
            bias = bias + du;
        }
        for (int j = 0; j < W; j++) vf_store(sum + j * ld + e, vf_load(sum + j * ld + e) + acc[j]);
        vf_store(sum + W * ld + e, vf_load(sum + W * ld + e) + bias);
    }
}

/* carry: du of the W - 1 tokens behind the run, unless the run ends its sequence or its block. Left there: du of the
 * run's first W - 1 tokens. */
INLINE void head_run(const int W, const plan *q, int part, int64_t h, const gdn_run *r, bool block_ends,
                     float *scratch, float *carry, float *sum)
{
    const gdn_part *g = &q->p.part[part];
    const int64_t ld = g->ld, length = r->t1 - r->t0, behind = block_ends ? min64(r->end, r->t1 + W - 1) : r->t1;
    rows w = rows_of(q, scratch, ld);
    float *tail = w.du + length * ld;
    inputs_load(&q->p, g, h, r, r->t0 - (W - 1), behind, w.x);
    if (r->t1 == r->end || block_ends)
        memset(tail, 0, (size_t)((W - 1) * ld) * 4);
    else
        memcpy(tail, carry, (size_t)((W - 1) * ld) * 4);
    du_rows(W, q, part, h, r->t0, behind, w.x, &w, w.du);
    dx_rows(W, q, part, h, r, &w);
    if (sum) tap_sums(W, &w, length, ld, sum);
    memcpy(carry, w.du, (size_t)((W - 1) * ld) * 4);
}

/* ---- gates --------------------------------------------------------------------------------------------------------------- */

/* d_b, d_a and their sums for a run, from the last token to the first. The gradient of a chunk's sums runs backward from
 * the end of the chunk, which may lie behind the run. */
static void gates_run(const plan *q, const gdn_run *r, float *scratch, float *sums)
{
    const gdn_pre *p = &q->p;
    const weft_gdn_pre_bwd_args *a = q->a;
    int64_t heads = p->call->value_heads, wide = p->gates, chunk = p->o->g_chunk, to = r->t1;
    float *in = scratch, *up = in + wide, *sum = up + wide, *out = sum + wide,
          unit = p->o->g_log2 ? 1.44269504f : 1;
    if (chunk) to = min64(r->end, r->first + (r->t1 - 1 - r->first) / chunk * chunk + chunk);
    for (int64_t t = to - 1; t >= r->t0; t--) {
        if (weft_has(&a->d_g))
            head_load(up, &a->d_g, gdn_token(p, &a->d_g, t), heads);
        else
            memset(up, 0, (size_t)wide * 4);
        bool ends = !chunk || t + 1 == r->end || (t + 1 - r->first) % chunk == 0;
        for (int64_t h = 0; h < wide; h += LANES) {
            vf d = vf_load(up + h) * unit;
            vf_store(sum + h, ends ? d : vf_load(sum + h) + d);
        }
        if (t >= r->t1) continue;
        head_load(in, &a->a, gdn_token(p, &a->a, t), heads);
        for (int64_t h = 0; h < wide; h += LANES) {
            vf x = vf_load(in + h) + vf_load(p->dt + h), half = vf_load(p->half + h), d = vf_load(sum + h);
            vf d_a = gm_decay_slope(x, half, -d);
            vf_store(out + h, d_a);
            if (!sums) continue;
            vf_store(sums + h, vf_load(sums + h) + gm_decay(x, half, -d));
            vf_store(sums + wide + h, vf_load(sums + wide + h) + d_a);
        }
        if (weft_has(&a->d_a.to)) head_store(&a->d_a.to, a->d_a.add, gdn_token(p, &a->d_a.to, t), out, heads);
        if (!weft_has(&a->d_b.to)) continue;
        memset(up, 0, (size_t)wide * 4);
        if (weft_has(&a->d_beta)) head_load(up, &a->d_beta, gdn_token(p, &a->d_beta, t), heads);
        head_load(in, &a->b, gdn_token(p, &a->b, t), heads);
        for (int64_t h = 0; h < wide; h += LANES)
            vf_store(out + h, vf_load(up + h) * gm_beta_slope(vf_load(in + h), (float)p->o->beta_scale));
        head_store(&a->d_b.to, a->d_b.add, gdn_token(p, &a->d_b.to, t), out, heads);
    }
}

static void z_run(const plan *q, const gdn_run *r, float *scratch)
{
    const gdn_pre *p = &q->p;
    const weft_tensor *from = &q->a->d_gate, *to = &q->a->d_z.to;
    int64_t dim = p->call->value_dim;
    if (!weft_has(to)) return;
    memset(scratch, 0, (size_t)pad16(dim) * 4);
    for (int64_t t = r->t0; t < r->t1; t++)
        for (int64_t h = 0; h < p->call->value_heads; h++) {
            char *head = head_of(to, gdn_token(p, to, t), h);
            if (weft_has(from)) head_load(scratch, from, head_of(from, gdn_token(p, from, t), h), dim);
            if (q->z_stream && !q->a->d_z.add)
                run_stream(to->dtype, head, scratch, dim);
            else
                head_store(to, q->a->d_z.add, head, scratch, dim);
        }
}

/* Behind the last sequence nothing depends on anything. */
static void zero_run(const plan *q, const gdn_run *r, float *scratch)
{
    const weft_gdn_pre_bwd_args *a = q->a;
    const weft_grad *const all[] = {&a->d_q, &a->d_k, &a->d_v, &a->d_z, &a->d_b, &a->d_a};
    for (int i = 0; i < 6; i++) {
        const weft_tensor *x = &all[i]->to;
        if (!weft_has(x) || all[i]->add) continue;
        int64_t heads = x->ndim == 4 ? x->shape[2] : 1, dim = x->shape[x->ndim - 1];
        memset(scratch, 0, (size_t)pad16(dim) * 4);
        for (int64_t t = r->t0; t < r->t1; t++)
            for (int64_t h = 0; h < heads; h++)
                head_store(x, false, head_of(x, gdn_token(&q->p, x, t), h), scratch, dim);
    }
}

/* ---- blocks -------------------------------------------------------------------------------------------------------------- */

static void heads_run(const plan *q, const gdn_run *r, bool block_ends, float *scratch, float *sums)
{
    const gdn_pre *p = &q->p;
    float *carry = scratch + q->carried;
    for (int part = 0; part < 3; part++) {
        const gdn_part *g = &p->part[part];
        if (!sums && !weft_has(&q->down[part]->to)) continue;
        for (int64_t h = 0; h < g->heads; h++) {
            int64_t taps = (p->width + 1) * g->ld;
            FOR_WIDTH(p->width, head_run(W, q, part, h, r, block_ends, scratch, carry, sums))
            carry += (p->width - 1) * g->ld;
            if (sums) sums += taps;
        }
    }
}

static void block(void *context, int64_t item, int thread)
{
    const plan *q = context;
    const gdn_pre *p = &q->p;
    float *scratch = q->scratch + thread * q->floats, *sums = q->sums ? q->blocks + item * q->width : NULL;
    int64_t t0 = (q->first + item) * GDN_BLOCK, t1 = min64(t0 + GDN_BLOCK, p->s.tokens);
    if (sums) memset(sums, 0, (size_t)q->width * 4);
    /* Runs are cut at multiples of GDN_RUN of the count through all sequences, and where a sequence ends. */
    gdn_run runs[GDN_RUN];
    for (int64_t s0 = t0 + (t1 - t0 - 1) / GDN_RUN * GDN_RUN; s0 >= t0; s0 -= GDN_RUN) {
        int64_t s1 = min64(s0 + GDN_RUN, t1);
        int count = 0;
        gdn_run r = {.t1 = s0};
        while (gdn_next(&p->s, &r, s1)) runs[count++] = r;
        while (count-- > 0) {
            r = runs[count];
            if (r.n == p->s.count) {
                zero_run(q, &r, scratch);
                continue;
            }
            heads_run(q, &r, r.t1 == t1 && r.t1 < r.end, scratch, sums);
            gates_run(q, &r, scratch, sums ? sums + q->width - 2 * p->gates : NULL);
            z_run(q, &r, scratch);
        }
    }
    stream_fence();
}

/* Columns of all blocks' sums, in double. */
enum { FOLD_COLUMNS = 1024 };

typedef struct fold {
    const plan *q;
    int64_t blocks;
} fold;

static void fold_columns(void *context, int64_t item, int thread)
{
    const fold *f = context;
    const plan *q = f->q;
    (void)thread;
    for (int64_t c = item * FOLD_COLUMNS; c < min64((item + 1) * FOLD_COLUMNS, q->width); c += LANES) {
        vd sum;
        memcpy(&sum, q->total + c, sizeof sum);
        for (int64_t b = 0; b < f->blocks; b++)
            sum += __builtin_convertvector(vf_load(q->blocks + b * q->width + c), vd);
        memcpy(q->total + c, &sum, sizeof sum);
    }
}

static void sum_put(const weft_grad *g, int64_t at, double sum)
{
    float value = (float)sum;
    if (g->add) value = (float)((double)get_f32(g->to.dtype, g->to.data, at) + sum);
    put_f32(g->to.dtype, g->to.data, at, value);
}

static void sums_store(const plan *q)
{
    const gdn_pre *p = &q->p;
    const weft_gdn_pre_bwd_args *a = q->a;
    const double *sum = q->total;
    for (int part = 0; part < 3; part++) {
        const gdn_part *g = &p->part[part];
        for (int64_t h = 0; h < g->heads; h++, sum += (p->width + 1) * g->ld)
            for (int64_t d = 0; d < g->dim; d++) {
                int64_t c = g->channel + h * g->dim + d;
                const weft_tensor *w = &a->d_weight.to;
                for (int j = 0; weft_has(w) && j < p->width; j++)
                    sum_put(&a->d_weight, c * w->stride[0] + j * w->stride[1], sum[j * g->ld + d]);
                if (weft_has(&a->d_bias.to))
                    sum_put(&a->d_bias, c * a->d_bias.to.stride[0], sum[p->width * g->ld + d]);
            }
    }
    for (int64_t h = 0; h < p->call->value_heads; h++) {
        if (weft_has(&a->d_a_log.to)) sum_put(&a->d_a_log, h * a->d_a_log.to.stride[0], sum[h]);
        if (weft_has(&a->d_dt_bias.to)) sum_put(&a->d_dt_bias, h * a->d_dt_bias.to.stride[0], sum[p->gates + h]);
    }
}

/* ---- the gradient of the state in front of a sequence ---------------------------------------------------------------------- */

INLINE void state_head(const int W, const plan *q, int part, int64_t h, const gdn_run *r, float *scratch)
{
    const gdn_part *g = &q->p.part[part];
    const weft_tensor *to = &q->a->d_state.to, *d_final = &q->a->d_final_state;
    int64_t history = q->p.call->history, length = r->end - r->first, behind = min64(r->end, r->first + W - 1);
    const float *taps = taps_of(&q->p, g, h);
    rows w = rows_of(q, scratch, g->ld);
    memset(w.du, 0, (size_t)((W - 1) * g->ld) * 4);
    inputs_load(&q->p, g, h, r, r->first - (W - 1), behind, w.x);
    du_rows(W, q, part, h, r->first, behind, w.x, &w, w.du);
    for (int64_t slot = 0; slot < history; slot++) {
        int64_t channel = g->channel + h * g->dim, ahead = history - slot; /* of the first token */
        bool slides = weft_has(d_final) && slot >= length;
        if (slides) slot_load(w.y, d_final, r->n, channel, slot - length, g->dim);
        for (int64_t e = 0; e < g->ld; e += LANES) {
            vf v = vf_set1(0);
            for (int64_t j = W - 1 - ahead; j >= 0; j--)
                v = vf_fma(vf_load(taps + j * g->ld + e), vf_load(w.du + (W - 1 - ahead - j) * g->ld + e), v);
            vf_store(w.dn + e, slides ? v + vf_load(w.y + e) : v);
        }
        int64_t at = r->n * to->stride[0] + channel * to->stride[1] + slot * to->stride[2];
        for (int64_t d = 0; d < g->dim; d++, at += to->stride[1]) {
            float old = q->a->d_state.add ? get_f32(to->dtype, to->data, at) : 0;
            put_f32(to->dtype, to->data, at, q->a->d_state.add ? old + w.dn[d] : w.dn[d]);
        }
    }
}

static void state_grad(void *context, int64_t n, int thread)
{
    const plan *q = context;
    const gdn_pre *p = &q->p;
    gdn_run r = {.n = n, .first = weft_sequence_start(&p->s, n), .end = weft_sequence_start(&p->s, n + 1)};
    for (int part = 0; part < 3; part++)
        for (int64_t h = 0; h < p->part[part].heads; h++)
            FOR_WIDTH(p->width, state_head(W, q, part, h, &r, q->scratch + thread * q->floats))
}

/* ---- operator -------------------------------------------------------------------------------------------------------------- */

static weft_arena lay_out(plan *q, const weft_call *call, const weft_gdn_pre_bwd_args *a)
{
    weft_arena arena = cpu_arena(call);
    const weft_tensor *const x[3] = {&a->q, &a->k, &a->v};
    *q = (plan){.a = a,
                .up = {&a->d_query, &a->d_key, &a->d_value},
                .down = {&a->d_q, &a->d_k, &a->d_v},
                .sums = weft_has(&a->d_weight.to) || weft_has(&a->d_bias.to) || weft_has(&a->d_a_log.to) ||
                        weft_has(&a->d_dt_bias.to)};
    gdn_pre *p = &q->p;
    gdn_pre_open(p, call, &a->options, &a->cu_seqlens, x, &a->state, NULL, &arena);
    int64_t ld = p->part[0].ld > p->part[2].ld ? p->part[0].ld : p->part[2].ld, taps = taps_floats(p);
    q->carried = (2 * GDN_RUN + 3 * (p->width - 1) + 3) * ld;
    if (q->carried < 4 * p->gates) q->carried = 4 * p->gates;
    q->floats = q->carried + taps / (p->width + 1) * (p->width - 1);
    q->scratch = weft_arena_take(&arena, cpu_rooms(call, q->floats * 4));
    if (!q->sums) return arena;
    q->width = taps + 2 * p->gates;
    int64_t blocks = min64((p->s.tokens + GDN_BLOCK - 1) / GDN_BLOCK, GDN_FOLD_BLOCKS);
    q->blocks = weft_arena_take(&arena, (size_t)(blocks * q->width) * 4);
    q->total = weft_arena_take(&arena, (size_t)q->width * 8);
    return arena;
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_gdn_pre_bwd_args *a = args;
    plan q;
    lay_out(&q, call, a);
    gdn_pre_load(&q.p, &a->weight, &a->bias, &a->a_log, &a->dt_bias);
    for (int i = 0; i < 3; i++) {
        q.direct[i] = head_direct(&q.down[i]->to);
        q.stream[i] = head_streams(&q.p, &q.down[i]->to);
    }
    q.z_stream = head_streams(&q.p, &a->d_z.to) && call->value_dim % line_channels(WEFT_BF16) == 0;
    if (q.sums) memset(q.total, 0, (size_t)q.width * 8);
    int64_t blocks = (q.p.s.tokens + GDN_BLOCK - 1) / GDN_BLOCK;
    int64_t channels = 2 * call->key_heads * call->key_dim + 2 * call->value_heads * call->value_dim;
    for (; q.first < blocks; q.first += GDN_FOLD_BLOCKS) {
        fold f = {&q, min64(GDN_FOLD_BLOCKS, blocks - q.first)};
        cpu_parallel(call, f.blocks, f.blocks * GDN_BLOCK * channels, block, &q);
        if (q.sums)
            cpu_parallel(call, (q.width + FOLD_COLUMNS - 1) / FOLD_COLUMNS, f.blocks * q.width, fold_columns, &f);
    }
    if (q.sums) sums_store(&q);
    if (weft_has(&a->d_state.to)) cpu_parallel(call, q.p.s.count, q.p.s.count * channels, state_grad, &q);
    return WEFT_OK;
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    plan q;
    weft_arena arena = lay_out(&q, call, args);
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(gdn_pre_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
