/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule: convolution and activation [G1], heads [G2], gates [G3], states [G4]. Sequence by
 * sequence, head by head; backward keeps the gradient of one head's convolution output for one sequence. */
#include "core/gdn_parts.h"
#include "ref/gdn.h"

typedef struct pre {
    const weft_call *call;
    const weft_gdn_options *o;
    weft_sequences s;
    const weft_tensor *x[3]; /* q, k, v */
    const weft_tensor *weight, *bias, *a_log, *dt_bias, *state;
    const weft_tensor *index; /* rows of the states; NULL: sequence n has row n */
} pre;

/* One head of q, k or v. */
typedef struct head {
    int part; /* 0, 1, 2 */
    int64_t h, dim, channel;
} head;

static int64_t heads_of(const pre *p, int part)
{
    return part < 2 ? p->call->key_heads : p->call->value_heads;
}

static head head_at(const pre *p, int part, int64_t h)
{
    const weft_call *c = p->call;
    int64_t dim = part < 2 ? c->key_dim : c->value_dim;
    return (head){part, h, dim, part * c->key_heads * c->key_dim + h * dim};
}

/* Row of the state of sequence n, or -1. */
static int64_t state_row(const pre *p, int64_t n)
{
    return p->index ? weft_index_at(p->index, n) : n;
}

/* What the convolution reads at step i of sequence n, i < 0 being in front of it. */
static double input(const pre *p, const head *k, int64_t n, int64_t i, int64_t d)
{
    int64_t slot = p->call->history + i;
    if (i >= 0) return get_head(&p->s, p->x[k->part], weft_sequence_start(&p->s, n) + i, k->h, d);
    if (!p->state || !weft_has(p->state) || slot < 0) return 0;
    return get3(p->state, state_row(p, n), k->channel + d, slot);
}

static double convolution(const pre *p, const head *k, int64_t n, int64_t i, int64_t d)
{
    int64_t width = p->call->width;
    double u = weft_has(p->bias) ? load_at(p->bias, (k->channel + d) * p->bias->stride[0]) : 0;
    for (int64_t j = 0; j < width; j++)
        u += get2(p->weight, k->channel + d, j) * input(p, k, n, i - (width - 1) + j, d);
    return u;
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static double softplus(double x)
{
    return fmax(x, 0) + log1p(exp(-fabs(x)));
}

/* exp(a_log) f(x), where f is softplus or sigmoid: both are exp(x) far below zero, and the product may be a number where
 * one of the factors is not. */
static double decay(const pre *p, int64_t h, double x, double (*f)(double))
{
    double a = load_at(p->a_log, h * p->a_log->stride[0]);
    if (p->o->rounding == WEFT_GDN_PARITY) return rounded(p->a_log->dtype, exp(a)) * f(x);
    return x < -40 ? exp(a + x) : exp(a / 2) * f(x) * exp(a / 2);
}

static bool parity(const pre *p)
{
    return p->o->rounding == WEFT_GDN_PARITY;
}

/* y of one head, and the factor of the norm. */
static double activate(const pre *p, const head *k, int64_t n, int64_t i, double *u, double *y)
{
    double sum = 0;
    for (int64_t d = 0; d < k->dim; d++) {
        u[d] = convolution(p, k, n, i, d);
        y[d] = p->o->activation == WEFT_GDN_SILU ? u[d] / (1 + exp(-u[d])) : u[d];
        if (parity(p)) y[d] = rounded(p->call->dtype, y[d]);
        sum += y[d] * y[d];
    }
    return k->part < 2 && p->o->l2norm ? 1 / sqrt(sum + p->o->l2_eps) : 1;
}

/* ---- forward, step --------------------------------------------------------------------------------------------------- */

typedef struct results {
    const weft_tensor *z, *query, *key, *value, *gate, *beta, *g, *final_state;
} results;

static void forward_heads(const pre *p, const results *r, int64_t n, int64_t i, double *u, double *y)
{
    int64_t t = weft_sequence_start(&p->s, n) + i;
    for (int part = 0; part < 3; part++)
        for (int64_t h = 0; h < heads_of(p, part); h++) {
            head k = head_at(p, part, h);
            const weft_tensor *out = part == 0 ? r->query : part == 1 ? r->key : r->value;
            double scale = activate(p, &k, n, i, u, y) * (part == 0 ? p->o->q_scale : 1);
            for (int64_t to = 0; to < out->shape[2]; to++) {
                if (part == 2 ? to != h : key_head_of(p->o->head_map, to, out->shape[2], p->call->key_heads) != h)
                    continue;
                for (int64_t d = 0; d < k.dim; d++) put_head(&p->s, out, t, to, d, y[d] * scale);
            }
        }
}

static double gate_input(const pre *p, const weft_tensor *a, int64_t t, int64_t h)
{
    return get_head(&p->s, a, t, h, 0) +
           (weft_has(p->dt_bias) ? load_at(p->dt_bias, h * p->dt_bias->stride[0]) : 0);
}

static void forward_gates(const pre *p, const results *r, const weft_tensor *b, const weft_tensor *a, int64_t n,
                          int64_t length)
{
    int64_t start = weft_sequence_start(&p->s, n);
    for (int64_t h = 0; h < p->call->value_heads; h++) {
        double sum = 0;
        for (int64_t i = 0; i < length; i++) {
            int64_t t = start + i;
            double g = -decay(p, h, gate_input(p, a, t, h), softplus);
            sum = p->o->g_chunk && i % p->o->g_chunk ? sum + g : g;
            put_head(&p->s, r->g, t, h, 0, p->o->g_log2 ? sum * 1.4426950408889634 : sum);
            put_head(&p->s, r->beta, t, h, 0, p->o->beta_scale * sigmoid(get_head(&p->s, b, t, h, 0)));
            for (int64_t d = 0; weft_has(r->gate) && d < p->call->value_dim; d++)
                put_head(&p->s, r->gate, t, h, d, get_head(&p->s, r->z, t, h, d));
        }
    }
}

/* In place, a slot is read before it is written: slots move towards 0. */
static void final_states(const pre *p, const results *r, int64_t n, int64_t length)
{
    int64_t row = state_row(p, n);
    for (int part = 0; part < 3; part++)
        for (int64_t h = 0; h < heads_of(p, part); h++) {
            head k = head_at(p, part, h);
            for (int64_t d = 0; d < k.dim; d++)
                for (int64_t slot = 0; slot < p->call->history; slot++)
                    put3(r->final_state, row, k.channel + d, slot,
                         input(p, &k, n, length - p->call->history + slot, d));
        }
}

static void zero_results(const pre *p, const results *r, int64_t t)
{
    const weft_tensor *const all[] = {r->query, r->key, r->value, r->gate, r->beta, r->g};
    for (int i = 0; i < 6; i++) put_zero_row(&p->s, all[i], t);
}

static void forward(const pre *p, const results *r, const weft_tensor *b, const weft_tensor *a, double *u,
                    double *y)
{
    for (int64_t n = 0; n < p->s.count; n++) {
        int64_t start = weft_sequence_start(&p->s, n), length = weft_sequence_start(&p->s, n + 1) - start;
        if (state_row(p, n) < 0) {
            for (int64_t i = 0; i < length; i++) zero_results(p, r, start + i);
            continue;
        }
        for (int64_t i = 0; i < length; i++) forward_heads(p, r, n, i, u, y);
        forward_gates(p, r, b, a, n, length);
        if (weft_has(r->final_state)) final_states(p, r, n, length);
    }
    for (int64_t t = weft_sequence_start(&p->s, p->s.count); t < p->s.tokens; t++) zero_results(p, r, t);
}

static int64_t widest(const weft_call *call)
{
    return call->key_dim > call->value_dim ? call->key_dim : call->value_dim;
}

static weft_status run(const weft_call *call, const weft_gdn_pre_fwd_args *f, const weft_tensor *index)
{
    pre p = {call,
             &f->options,
             weft_sequences_of(call, &f->cu_seqlens),
             {&f->q, &f->k, &f->v},
             &f->weight,
             &f->bias,
             &f->a_log,
             &f->dt_bias,
             &f->state,
             index};
    results r = {&f->z, &f->query, &f->key, &f->value, &f->gate, &f->beta, &f->g, &f->final_state};
    weft_arena arena = weft_arena_open(call->exec->workspace);
    double *u = take(&arena, 2 * widest(call));
    forward(&p, &r, &f->b, &f->a, u, u + widest(call));
    return WEFT_OK;
}

static weft_status run_fwd(const weft_call *call, const void *args)
{
    return run(call, args, NULL);
}

static weft_status run_step(const weft_call *call, const void *args)
{
    const weft_gdn_pre_step_args *s = args;
    const weft_gdn_pre_fwd_args f = weft_gdn_step_as_fwd(s);
    return run(call, &f, weft_has(&s->state_index) ? &s->state_index : NULL);
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    (void)args;
    take(&arena, 2 * widest(call));
    return weft_arena_bytes(&arena);
}

/* ---- backward ---------------------------------------------------------------------------------------------------------- */

typedef struct work {
    double *u, *y, *dn;        /* one head of a token */
    double *du;                /* [longest sequence][dim] */
    double *d_weight, *d_bias; /* [C][W], [C] */
    double *d_a_log, *d_dt_bias;
} work;

static work bwd_work(const weft_call *call, weft_arena *arena)
{
    int64_t wide = widest(call);
    int64_t channels = 2 * call->key_heads * call->key_dim + call->value_heads * call->value_dim;
    work w;
    w.u = take(arena, wide);
    w.y = take(arena, wide);
    w.dn = take(arena, wide);
    w.du = take(arena, call->steps * wide);
    w.d_weight = take(arena, channels * call->width);
    w.d_bias = take(arena, channels);
    w.d_a_log = take(arena, call->value_heads);
    w.d_dt_bias = take(arena, call->value_heads);
    return w;
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    (void)args;
    bwd_work(call, &arena);
    return weft_arena_bytes(&arena);
}

/* Upstream gradient of a head's output, summed over the heads that repeat it. */
static void upstream(const pre *p, const head *k, const weft_tensor *d_out, int64_t t, double *dn)
{
    for (int64_t d = 0; d < k->dim; d++) dn[d] = 0;
    if (!weft_has(d_out)) return;
    for (int64_t from = 0; from < d_out->shape[2]; from++) {
        if (k->part == 2 ? from != k->h
                         : key_head_of(p->o->head_map, from, d_out->shape[2], p->call->key_heads) != k->h)
            continue;
        for (int64_t d = 0; d < k->dim; d++) dn[d] += get_head(&p->s, d_out, t, from, d);
    }
    for (int64_t d = 0; d < k->dim; d++) {
        if (parity(p) && k->part < 2) dn[d] = rounded(p->call->dtype, dn[d]);
        if (k->part == 0) dn[d] *= p->o->q_scale;
    }
}

/* The gradient of the convolution's output, all steps of a sequence. */
static void backward_head(const pre *p, const head *k, const weft_tensor *d_out, int64_t n, int64_t length,
                          const work *w)
{
    for (int64_t i = 0; i < length; i++) {
        double r = activate(p, k, n, i, w->u, w->y), dot = 0;
        upstream(p, k, d_out, weft_sequence_start(&p->s, n) + i, w->dn);
        bool norm = k->part < 2 && p->o->l2norm;
        for (int64_t d = 0; norm && d < k->dim; d++) dot += w->y[d] * r * w->dn[d];
        for (int64_t d = 0; d < k->dim; d++) {
            double dy = norm ? r * (w->dn[d] - w->y[d] * r * dot) : w->dn[d], u = w->u[d];
            if (parity(p)) {
                dy = rounded(p->call->dtype, dy);
                u = rounded(p->call->dtype, u);
            }
            w->du[i * k->dim + d] =
                p->o->activation == WEFT_GDN_SILU ? dy * sigmoid(u) * (1 + u * sigmoid(-u)) : dy;
        }
    }
}

/* The gradient of what the convolution read at step i, which may lie in front of the sequence. */
static double backward_input(const pre *p, const head *k, const weft_tensor *d_final, int64_t n, int64_t length,
                             int64_t i, int64_t d, const double *du)
{
    int64_t width = p->call->width, slot = i - (length - p->call->history);
    double sum = 0;
    for (int64_t j = width - 1; j >= 0; j--) {
        int64_t at = i + width - 1 - j;
        if (at >= 0 && at < length) sum += get2(p->weight, k->channel + d, j) * du[at * k->dim + d];
    }
    if (weft_has(d_final) && slot >= 0 && slot < p->call->history) sum += get3(d_final, n, k->channel + d, slot);
    return sum;
}

static void backward_part(const pre *p, const weft_gdn_pre_bwd_args *b, int part, int64_t n, int64_t length,
                          const work *w)
{
    const weft_tensor *d_out = part == 0 ? &b->d_query : part == 1 ? &b->d_key : &b->d_value;
    const weft_grad *d_x = part == 0 ? &b->d_q : part == 1 ? &b->d_k : &b->d_v;
    int64_t width = p->call->width, start = weft_sequence_start(&p->s, n);
    for (int64_t h = 0; h < heads_of(p, part); h++) {
        head k = head_at(p, part, h);
        backward_head(p, &k, d_out, n, length, w);
        for (int64_t d = 0; d < k.dim; d++) {
            int64_t c = k.channel + d;
            for (int64_t i = 0; i < length; i++) {
                put_grad_head(&p->s, d_x, start + i, h, d,
                              backward_input(p, &k, &b->d_final_state, n, length, i, d, w->du));
                for (int64_t j = 0; j < width; j++)
                    w->d_weight[c * width + j] += w->du[i * k.dim + d] * input(p, &k, n, i - (width - 1) + j, d);
                w->d_bias[c] += w->du[i * k.dim + d];
            }
            for (int64_t slot = 0; weft_has(&b->d_state.to) && slot < p->call->history; slot++)
                put_grad3(&b->d_state, n, c, slot,
                          backward_input(p, &k, &b->d_final_state, n, length, slot - p->call->history, d, w->du));
        }
    }
}

static void backward_gates(const pre *p, const weft_gdn_pre_bwd_args *b, int64_t n, int64_t length, const work *w)
{
    int64_t start = weft_sequence_start(&p->s, n);
    for (int64_t h = 0; h < p->call->value_heads; h++) {
        double d_g = 0;
        for (int64_t i = length - 1; i >= 0; i--) {
            int64_t t = start + i;
            double s = get_head(&p->s, &b->b, t, h, 0), x = gate_input(p, &b->a, t, h);
            double up = get_head(&p->s, &b->d_g, t, h, 0) * (p->o->g_log2 ? 1.4426950408889634 : 1);
            /* a chunk's sums contain this token's g from here to its end */
            d_g = p->o->g_chunk && i + 1 < length && (i + 1) % p->o->g_chunk ? d_g + up : up;
            double d_a = -decay(p, h, x, sigmoid) * d_g;
            put_grad_head(&p->s, &b->d_a, t, h, 0, d_a);
            put_grad_head(&p->s, &b->d_b, t, h, 0,
                          get_head(&p->s, &b->d_beta, t, h, 0) * p->o->beta_scale * sigmoid(s) * sigmoid(-s));
            w->d_a_log[h] -= d_g * decay(p, h, x, softplus);
            w->d_dt_bias[h] += d_a;
            for (int64_t d = 0; weft_has(&b->d_z.to) && d < p->call->value_dim; d++)
                put_grad_head(&p->s, &b->d_z, t, h, d, get_head(&p->s, &b->d_gate, t, h, d));
        }
    }
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_gdn_pre_bwd_args *b = args;
    pre p = {call,
             &b->options,
             weft_sequences_of(call, &b->cu_seqlens),
             {&b->q, &b->k, &b->v},
             &b->weight,
             &b->bias,
             &b->a_log,
             &b->dt_bias,
             &b->state,
             NULL};
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = bwd_work(call, &arena);
    int64_t channels = 2 * call->key_heads * call->key_dim + call->value_heads * call->value_dim;
    clear(channels * call->width, w.d_weight);
    clear(channels, w.d_bias);
    clear(call->value_heads, w.d_a_log);
    clear(call->value_heads, w.d_dt_bias);
    for (int64_t n = 0; n < p.s.count; n++) {
        int64_t length = weft_sequence_start(&p.s, n + 1) - weft_sequence_start(&p.s, n);
        for (int part = 0; part < 3; part++) backward_part(&p, b, part, n, length, &w);
        backward_gates(&p, b, n, length, &w);
    }
    const weft_grad *const rows[] = {&b->d_q, &b->d_k, &b->d_v, &b->d_z, &b->d_b, &b->d_a};
    for (int64_t t = weft_sequence_start(&p.s, p.s.count); t < p.s.tokens; t++)
        for (int i = 0; i < 6; i++) put_grad_zero_row(&p.s, rows[i], t);
    grad_param(&b->d_weight, channels * call->width, w.d_weight);
    grad_param(&b->d_bias, channels, w.d_bias);
    grad_param(&b->d_a_log, call->value_heads, w.d_a_log);
    grad_param(&b->d_dt_bias, call->value_heads, w.d_dt_bias);
    return WEFT_OK;
}

const weft_kernel weft_ref_gdn_pre_fwd[] = {{.run = run_fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel weft_ref_gdn_pre_step[] = {{.run = run_step, .workspace = fwd_workspace}, {0}};
const weft_kernel weft_ref_gdn_pre_bwd[] = {{.run = run_bwd, .workspace = bwd_workspace}, {0}};
