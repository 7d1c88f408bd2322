/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated delta rule. Each column of the state, that is each value dimension, evolves by itself, and an error in it is
 * carried along by I - beta k k^T and exp(g), as the column is. Bounds are therefore kept as 2-norms of columns, in which
 * that matrix does not let them grow; element by element they would. `chain` counts the roundings of a sum over Dk or Dv.
 *
 * In chunks on tensor cores a token's own error is another one (expect_rule_chunk.c), what carries it along is the same. */
#include <stdlib.h>
#include <string.h>

#include "check/expect_rule.h"

static double norm_of(int64_t count, int64_t stride, const double *x)
{
    return expect_rule_norm(count, stride, x);
}

static double product(int64_t count, const double *x, int64_t xs, const double *y, int64_t ys)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i * xs] * y[i * ys];
    return sum;
}

/* How much I - beta k k^T may stretch. */
static double stretch(double beta, double k)
{
    return fmax(1, fabs(1 - beta * k * k));
}

static void forward(const rule *r, const double *m0)
{
    int64_t size = r->dk * r->dv;
    double u = r->chunk ? 0 : r->u; /* of a token by itself; chunks have theirs in own and end */
    for (int64_t t = 0; t < r->length; t++) {
        const double *k = r->k + t * r->qs, *before = t ? r->m + (t - 1) * size : m0;
        double decay = exp(r->g[t * r->bs]), beta = r->beta[t * r->bs];
        double *p = r->p + t * size, *m = r->m + t * size;
        for (int64_t j = 0; j < r->dv; j++) {
            for (int64_t i = 0; i < r->dk; i++) p[i * r->dv + j] = decay * before[i * r->dv + j];
            double w = product(r->dk, p + j, r->dv, k, 1);
            r->delta[t * r->dv + j] = beta * (r->v[t * r->vs + j] - w);
            for (int64_t i = 0; i < r->dk; i++)
                m[i * r->dv + j] = p[i * r->dv + j] + k[i] * r->delta[t * r->dv + j];
        }
    }
    if (r->chunk) expect_chunks_forward(r, m0);
    for (int64_t t = 0; t < r->length; t++) {
        const double *k = r->k + t * r->qs, *p = r->p + t * size;
        double decay = exp(r->g[t * r->bs]), beta = r->beta[t * r->bs], kn = norm_of(r->dk, 1, k);
        for (int64_t j = 0; j < r->dv; j++) {
            int64_t at = t * r->dv + j;
            double pn = norm_of(r->dk, r->dv, p + j), w = product(r->dk, p + j, r->dv, k, 1),
                   v = r->v[t * r->vs + j];
            double old = t ? r->e_m[at - r->dv] : 0;
            r->e_p[at] = decay * old * (1 + 8 * u) + 5 * u * pn;
            /* what this token's own arithmetic adds */
            double own = fabs(beta) * u * ((r->chain_k + 2) * pn * kn + 2 * (fabs(v) + fabs(w)));
            if (r->chunk) own = r->own[at];
            r->e_delta[at] = fabs(beta) * kn * r->e_p[at] + own;
            r->e_m[at] = stretch(beta, kn) * r->e_p[at] + kn * own + 3 * u * (pn + kn * fabs(r->delta[at]));
            if (r->chunk) r->e_m[at] += r->end[at];
        }
    }
}

static num output(const rule *r, int64_t t, int64_t j)
{
    const double *q = r->q + t * r->qs, *m = r->m + t * r->dk * r->dv + j;
    double qn = norm_of(r->dk, 1, q), mn = norm_of(r->dk, r->dv, m), e = r->e_m[t * r->dv + j];
    if (r->chunk)
        return (num){r->scale * product(r->dk, m, r->dv, q, 1),
                     fabs(r->scale) * qn * (e - r->end[t * r->dv + j]) + r->e_o[t * r->dv + j]};
    return (num){r->scale * product(r->dk, m, r->dv, q, 1),
                 fabs(r->scale) * qn * (e + r->u * (r->chain_k + 3) * (mn + e))};
}

static double *room(expect_call *call, int64_t count)
{
    return expect_array(call->scope, count);
}

/* Shapes and rows that forward and backward share. */
typedef struct shape {
    expect_sequences s;
    int64_t heads, value_heads, dk, dv;
    const double *query, *key, *value, *beta, *g, *state, *d_o, *d_final;
} shape;

static shape shape_of(expect_call *call, const weft_tensor *query, const weft_tensor *value)
{
    shape z = {.s = expect_sequences_of(call, query, "cu_seqlens")};
    z.heads = query->shape[2];
    z.dk = query->shape[3];
    z.value_heads = value->shape[2];
    z.dv = value->shape[3];
    z.query = expect_values_of(call, "query");
    z.key = expect_values_of(call, "key");
    z.value = expect_values_of(call, "value");
    z.beta = expect_values_of(call, "beta");
    z.g = expect_values_of(call, "g");
    z.state = expect_values_of(call, "state");
    z.d_o = expect_values_of(call, "d_o");
    z.d_final = expect_values_of(call, "d_final_state");
    return z;
}

static rule rule_of(expect_call *call, const shape *z, double scale)
{
    int64_t longest = 1;
    for (int64_t n = 0; n < z->s.count; n++)
        if (z->s.start[n + 1] - z->s.start[n] > longest) longest = z->s.start[n + 1] - z->s.start[n];
    rule r = {.u = call->scope->unit, .scale = scale, .dk = z->dk, .dv = z->dv};
    /* over the key dimension in at least four parts */
    r.chain_k = call->scope->unit < 0x1p-40 ? (double)z->dk + 2 : ceil((double)z->dk / 4) + 8;
    r.chain_v = expect_chain(call->scope, z->dv);
    r.qs = z->heads * z->dk;
    r.vs = z->value_heads * z->dv;
    r.bs = z->value_heads;
    r.p = room(call, longest * z->dk * z->dv);
    r.m = room(call, longest * z->dk * z->dv);
    r.delta = room(call, longest * z->dv);
    r.e_p = room(call, longest * z->dv);
    r.e_m = room(call, longest * z->dv);
    r.e_delta = room(call, longest * z->dv);
    r.chunk = call->scope->chunk;
    if (!r.chunk) return r;
    r.split = call->scope->split;
    r.low = call->scope->low;
    r.tensor = call->scope->tensor;
    r.own = room(call, longest * z->dv);
    r.end = room(call, longest * z->dv);
    r.e_o = room(call, longest * z->dv);
    r.room = expect_chunk_room(call->scope, &r);
    return r;
}

static void series_of(rule *r, const shape *z, weft_gdn_head_map map, int64_t n, int64_t h)
{
    int64_t t = z->s.start[n], kh = expect_key_head(map, h, z->value_heads, z->heads);
    r->length = z->s.start[n + 1] - t;
    r->q = z->query + (t * z->heads + kh) * z->dk;
    r->k = z->key + (t * z->heads + kh) * z->dk;
    r->v = z->value + (t * z->value_heads + h) * z->dv;
    r->beta = z->beta + t * z->value_heads + h;
    r->g = z->g + t * z->value_heads + h;
    if (z->d_o) r->d_o = z->d_o + (t * z->value_heads + h) * z->dv;
}

void expect_gdn_rule_fwd(expect_call *call)
{
    const weft_gdn_rule_fwd_args *a = call->args;
    shape z = shape_of(call, &a->query, &a->value);
    rule r = rule_of(call, &z, a->scale);
    int64_t size = z.dk * z.dv;
    quantity o = expect_output(call, "o", z.s.tokens * z.value_heads * z.dv);
    quantity last = expect_output(call, "final_state", z.s.count * z.value_heads * size);
    double *zero = room(call, size);
    for (int64_t n = 0; n < z.s.count; n++)
        for (int64_t h = 0; h < z.value_heads; h++) {
            int64_t at = (n * z.value_heads + h) * size;
            const double *m0 = z.state ? z.state + at : zero;
            series_of(&r, &z, a->head_map, n, h);
            forward(&r, m0);
            for (int64_t t = 0; t < r.length; t++)
                for (int64_t j = 0; j < r.dv; j++)
                    num_put(o, ((z.s.start[n] + t) * z.value_heads + h) * r.dv + j, output(&r, t, j));
            for (int64_t i = 0; last.val && i < size; i++) {
                double e = r.length ? r.e_m[(r.length - 1) * r.dv + i % r.dv] : 0;
                num_put(last, at + i, (num){r.length ? r.m[(r.length - 1) * size + i] : m0[i], e});
            }
        }
}

/* As forward from a row of the cache. Results of padding are zero; rows of the cache that no request names
 * are unchanged. */
void expect_gdn_rule_step(expect_call *call)
{
    const weft_gdn_rule_step_args *a = call->args;
    const double *index = expect_values_of(call, "state_index");
    shape z = shape_of(call, &a->query, &a->value);
    rule r = rule_of(call, &z, a->scale);
    int64_t size = z.dk * z.dv, all = a->state.shape[0] * z.value_heads * size;
    quantity o = expect_output(call, "o", z.s.tokens * z.value_heads * z.dv),
             to = expect_output(call, "new_state", all);
    quantity each = expect_output(call, "token_state", z.s.tokens * z.value_heads * size);
    if (to.val) memcpy(to.val, call->got[expect_index(call, "new_state")], (size_t)all * sizeof *to.val);
    for (int64_t n = 0; n < z.s.count; n++)
        for (int64_t h = 0; h < z.value_heads; h++) {
            int64_t row = index ? (int64_t)index[n] : n, at = (row * z.value_heads + h) * size;
            if (row < 0) continue;
            series_of(&r, &z, a->head_map, n, h);
            forward(&r, z.state + at);
            for (int64_t t = 0; t < r.length; t++) {
                int64_t token = (z.s.start[n] + t) * z.value_heads + h;
                for (int64_t j = 0; j < r.dv; j++) num_put(o, token * r.dv + j, output(&r, t, j));
                for (int64_t i = 0; i < size; i++)
                    num_put(each, token * size + i, (num){r.m[t * size + i], r.e_m[t * r.dv + i % r.dv]});
            }
            for (int64_t i = 0; i < size; i++) {
                double e = r.length ? r.e_m[(r.length - 1) * r.dv + i % r.dv] : 0;
                num_put(to, at + i, (num){r.length ? r.m[(r.length - 1) * size + i] : z.state[at + i], e});
            }
        }
}

/* ---- backward ------------------------------------------------------------------------------------------------------- */

void expect_rule_gather(quantity q, int64_t at, double u, double v, double e)
{
    if (!q.val) return;
    q.val[at] += v;
    q.err[at] += e + u * (fabs(q.val[at]) + e);
}

/* A sum over columns j of x_ij y_j, y known to within e_y, and the columns of x to within e_x in norm. */
static void add_products(const rule *r, quantity to, int64_t at, double factor, const double *x, const double *e_x,
                         const double *y, const double *e_y)
{
    double u = r->chunk ? 0 : r->u;
    for (int64_t i = 0; to.val && i < r->dk; i++) {
        double v = 0, e = 0;
        for (int64_t j = 0; j < r->dv; j++) {
            double a = fabs(x[i * r->dv + j]), b = fabs(y[j]), ey = e_y ? e_y[j] : 0;
            v += x[i * r->dv + j] * y[j];
            e += a * ey + e_x[j] * (b + ey) + u * (r->chain_v + 4) * a * b;
        }
        expect_rule_gather(to, at + i, r->u, factor * v, fabs(factor) * e);
    }
}

static void backward_token(const rule *r, const back *b, const double *m0, int64_t t)
{
    int64_t size = r->dk * r->dv;
    double u = r->chunk ? 0 : r->u;
    if (r->chunk && (t + 1 == r->length || (t + 1) % r->chunk == 0))
        expect_chunk_backward(r, b, m0, t / r->chunk * r->chunk);
    const double *q = r->q + t * r->qs, *k = r->k + t * r->qs, *d_o = r->d_o + t * r->vs;
    const double *p = r->p + t * size, *m = r->m + t * size, *delta = r->delta + t * r->dv;
    double beta = r->beta[t * r->bs], decay = exp(r->g[t * r->bs]), kn = norm_of(r->dk, 1, k),
           qn = norm_of(r->dk, 1, q);
    add_products(r, b->query, b->q_at + t * r->qs, r->scale, m, r->e_m + t * r->dv, d_o, NULL);
    num d_beta = {0, 0}, d_g = {0, 0};
    for (int64_t j = 0; j < r->dv; j++) {
        for (int64_t i = 0; i < r->dk; i++) b->d[i * r->dv + j] += r->scale * q[i] * d_o[j];
        double dn = norm_of(r->dk, r->dv, b->d + j);
        b->e_d[j] += u * (3 * fabs(r->scale) * qn * fabs(d_o[j]) + 2 * dn);
        b->dd[j] = product(r->dk, b->d + j, r->dv, k, 1);
        double added = r->chunk ? r->own[t * r->dv + j] : 0;
        b->e_dd[j] = kn * (b->e_d[j] + u * (r->chain_k + 2) * (dn + b->e_d[j])) + added;
    }
    add_products(r, b->key, b->q_at + t * r->qs, 1, b->d, b->e_d, delta, r->e_delta + t * r->dv);
    add_products(r, b->key, b->q_at + t * r->qs, -beta, p, r->e_p + t * r->dv, b->dd, b->e_dd);
    for (int64_t j = 0; j < r->dv; j++) {
        double dd = b->dd[j], e_dd = b->e_dd[j], w = product(r->dk, p + j, r->dv, k, 1), v = r->v[t * r->vs + j];
        double pn = norm_of(r->dk, r->dv, p + j), e_p = r->e_p[t * r->dv + j];
        double e_w = kn * (e_p + u * (r->chain_k + 2) * (pn + e_p)) + u * (fabs(v) + fabs(w));
        d_beta.v += dd * (v - w);
        d_beta.e += (fabs(v - w) + e_w) * e_dd + fabs(dd) * e_w + u * (r->chain_v + 2) * fabs(dd * (v - w));
        num_put(b->value, b->v_at + t * r->vs + j,
                (num){beta * dd, fabs(beta) * (e_dd + r->u * (fabs(dd) + e_dd))});
        /* through delta to the decayed state; an error passes the same matrix */
        double own = fabs(beta) * kn * u * ((r->chain_k + 4) * (norm_of(r->dk, r->dv, b->d + j) * kn));
        if (r->chunk) own = fabs(beta) * kn * r->own[t * r->dv + j];
        for (int64_t i = 0; i < r->dk; i++) b->d[i * r->dv + j] -= beta * k[i] * dd;
        double dn = norm_of(r->dk, r->dv, b->d + j),
               e = stretch(beta, kn) * b->e_d[j] + own + 2 * u * (dn + fabs(beta * dd) * kn);
        double dot = 0, terms = 0;
        for (int64_t i = 0; i < r->dk; i++) {
            dot += b->d[i * r->dv + j] * p[i * r->dv + j];
            terms += fabs(b->d[i * r->dv + j] * p[i * r->dv + j]);
        }
        d_g.v += dot;
        d_g.e += e * (pn + e_p) + dn * e_p + u * (r->chain_k + r->chain_v + 4) * terms;
        b->e_d[j] = decay * e * (1 + 8 * r->u) + 5 * u * decay * dn;
        for (int64_t i = 0; i < r->dk; i++) b->d[i * r->dv + j] *= decay;
    }
    if (r->chunk) d_beta.e += r->e_beta[t % r->chunk], d_g.e += r->e_g[t % r->chunk];
    num_put(b->beta, b->b_at + t * r->bs, d_beta);
    num_put(b->g, b->b_at + t * r->bs, d_g);
}

void expect_gdn_rule_bwd(expect_call *call)
{
    const weft_gdn_rule_bwd_args *a = call->args;
    shape z = shape_of(call, &a->query, &a->value);
    rule r = rule_of(call, &z, a->scale);
    int64_t size = z.dk * z.dv, M = z.s.tokens;
    back b = {.query = expect_output(call, "d_query", M * z.heads * z.dk),
              .key = expect_output(call, "d_key", M * z.heads * z.dk),
              .value = expect_output(call, "d_value", M * z.value_heads * z.dv),
              .beta = expect_output(call, "d_beta", M * z.value_heads),
              .g = expect_output(call, "d_g", M * z.value_heads),
              .state = expect_output(call, "d_state", z.s.count * z.value_heads * size),
              .d = room(call, size),
              .e_d = room(call, z.dv),
              .dd = room(call, z.dv),
              .e_dd = room(call, z.dv)};
    double *zero = room(call, size);
    for (int64_t n = 0; n < z.s.count; n++)
        for (int64_t h = 0; h < z.value_heads; h++) {
            int64_t first = z.s.start[n], at = (n * z.value_heads + h) * size;
            series_of(&r, &z, a->head_map, n, h);
            forward(&r, z.state ? z.state + at : zero);
            b.q_at = (first * z.heads + expect_key_head(a->head_map, h, z.value_heads, z.heads)) * z.dk;
            b.v_at = (first * z.value_heads + h) * z.dv;
            b.b_at = first * z.value_heads + h;
            for (int64_t i = 0; i < size; i++) b.d[i] = z.d_final ? z.d_final[at + i] : 0;
            memset(b.e_d, 0, (size_t)z.dv * sizeof *b.e_d);
            for (int64_t t = r.length - 1; t >= 0; t--) backward_token(&r, &b, z.state ? z.state + at : zero, t);
            for (int64_t i = 0; b.state.val && i < size; i++)
                num_put(b.state, at + i, (num){b.d[i], b.e_d[i % z.dv]});
        }
}
