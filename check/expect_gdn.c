/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule, forward, decoding and backward. First-order bounds along the equations of
 * docs/reference/math.md: each step passes on what its inputs may be off and adds its own roundings. */
#include "check/expect_gdn.h"

#include <string.h>

#include "check/element.h"

/* ---- tensors ------------------------------------------------------------------------------------------------------ */

static int find(const expect_call *call, const char *name)
{
    for (int i = 0; i < call->op->num_args; i++)
        if (!strcmp(call->op->args[i].name, name)) return i;
    return -1;
}

double *expect_values_of(const expect_call *call, const char *name)
{
    int i = find(call, name);
    return i < 0 ? NULL : call->q[i].val;
}

quantity expect_output(expect_call *call, const char *name, int64_t length)
{
    int i = find(call, name);
    if (i < 0 || !call->wanted[i]) return (quantity){0};
    call->q[i] = (quantity){expect_array(call->scope, length), expect_array(call->scope, length)};
    return call->q[i];
}

expect_sequences expect_sequences_of(expect_call *call, const weft_tensor *first, const char *cu_name)
{
    const double *cu = expect_values_of(call, cu_name);
    expect_sequences s = {.count = first->shape[0], .tokens = first->shape[0] * first->shape[1]};
    if (cu) s.count = expect_tensor(&call->op->args[find(call, cu_name)], call->args)->shape[0] - 1;
    s.start = expect_room(call->scope, (size_t)(s.count + 1) * sizeof *s.start);
    for (int64_t n = 0; n <= s.count; n++) s.start[n] = cu ? (int64_t)cu[n] : n * first->shape[1];
    return s;
}

/* ---- the call ------------------------------------------------------------------------------------------------------- */

/* Forward, decoding and backward have these in common. */
typedef struct layer {
    expect_call *call;
    double u;
    weft_gdn_options o;
    weft_dtype act, a_log_type;
    expect_sequences s;
    int64_t key_heads, key_dim, value_heads, value_dim, channels, width, history;
    const double *x[3], *weight, *bias, *a_log, *dt_bias, *b, *a, *z, *state, *index;
} layer;

static layer layer_of(expect_call *call)
{
    const weft_gdn_pre_fwd_args *f = call->args; /* q, k, v and options stand first in all three structs */
    layer l = {.call = call, .u = call->scope->unit, .o = f->options, .act = f->q.dtype};
    int weight = find(call, "weight");
    static const char *const states[] = {"state", "final_state", "d_final_state", "d_state", "new_state"};
    l.s = expect_sequences_of(call, &f->q, "cu_seqlens");
    l.key_heads = f->q.shape[2];
    l.key_dim = f->q.shape[3];
    l.value_heads = f->v.shape[2];
    l.value_dim = f->v.shape[3];
    l.channels = 2 * l.key_heads * l.key_dim + l.value_heads * l.value_dim;
    l.width = expect_tensor(&call->op->args[weight], call->args)->shape[1];
    l.a_log_type = expect_tensor(&call->op->args[find(call, "a_log")], call->args)->dtype;
    for (int i = 0; i < 5; i++) {
        int at = find(call, states[i]);
        const weft_tensor *t = at < 0 ? NULL : expect_tensor(&call->op->args[at], call->args);
        if (t && t->dtype != WEFT_NONE) l.history = t->shape[2];
    }
    l.x[0] = expect_values_of(call, "q");
    l.x[1] = expect_values_of(call, "k");
    l.x[2] = expect_values_of(call, "v");
    l.weight = expect_values_of(call, "weight");
    l.bias = expect_values_of(call, "bias");
    l.a_log = expect_values_of(call, "a_log");
    l.dt_bias = expect_values_of(call, "dt_bias");
    l.b = expect_values_of(call, "b");
    l.a = expect_values_of(call, "a");
    l.z = expect_values_of(call, "z");
    l.state = expect_values_of(call, "state");
    l.index = expect_values_of(call, "state_index");
    return l;
}

/* One head of q, k or v. */
typedef struct head {
    int part;
    int64_t h, heads, dim, channel;
} head;

static head head_at(const layer *l, int part, int64_t h)
{
    int64_t dim = part < 2 ? l->key_dim : l->value_dim;
    return (head){part, h, part < 2 ? l->key_heads : l->value_heads, dim,
                  part * l->key_heads * l->key_dim + h * dim};
}

static int64_t row_of(const layer *l, int64_t n)
{
    return l->index ? (int64_t)l->index[n] : n;
}

/* What the convolution reads i tokens behind the beginning of sequence n. */
static double input_at(const layer *l, const head *k, int64_t n, int64_t i, int64_t d)
{
    int64_t slot = l->history + i;
    if (i >= 0) return l->x[k->part][((l->s.start[n] + i) * k->heads + k->h) * k->dim + d];
    return l->state && slot >= 0 ? l->state[(row_of(l, n) * l->channels + k->channel + d) * l->history + slot] : 0;
}

static num convolution(const layer *l, const head *k, int64_t n, int64_t i, int64_t d)
{
    double v = l->bias ? l->bias[k->channel + d] : 0, size = fabs(v);
    for (int64_t j = 0; j < l->width; j++) {
        double term = l->weight[(k->channel + d) * l->width + j] * input_at(l, k, n, i - (l->width - 1) + j, d);
        v += term;
        size += fabs(term);
    }
    return (num){v, l->u * (double)(l->width + 1) * size};
}

/* Rounded to a dtype, where an error may tip it over to the neighbour. */
static num num_round(weft_dtype dtype, num x)
{
    double v = element_round(dtype, x.v);
    return (num){v, fmax(element_round(dtype, x.v + x.e) - v, v - element_round(dtype, x.v - x.e))};
}

static int is_parity(const layer *l)
{
    return l->o.rounding == WEFT_GDN_PARITY;
}

/* y of one head of a token; the factor of the norm. */
static num activate(const layer *l, const head *k, int64_t n, int64_t i, num *pre, num *y)
{
    double sum = 0, error = 0;
    for (int64_t d = 0; d < k->dim; d++) {
        pre[d] = convolution(l, k, n, i, d);
        y[d] = l->o.activation == WEFT_GDN_SILU ? num_silu(l->u, pre[d]) : pre[d];
        if (is_parity(l)) y[d] = num_round(l->act, y[d]);
        sum += y[d].v * y[d].v;
        error += (2 * fabs(y[d].v) + y[d].e) * y[d].e;
    }
    if (k->part == 2 || !l->o.l2norm) return num_of(1);
    double all = sum + l->o.l2_eps, r = 1 / sqrt(all);
    error += l->u * expect_chain(l->call->scope, k->dim) * sum;
    /* not first order where a row is all error */
    return (num){r, fmax(r * (error / (2 * all) + 4 * l->u), error < all ? 1 / sqrt(all - error) - r : INFINITY)};
}

/* exp(a_log) f(x): two factors exp(a_log / 2) at two units and two products, f at 4; x passes on its own error. */
static num decay(const layer *l, int64_t h, num x, int slope)
{
    double a = l->a_log[h], f = slope ? expect_sigmoid(x.v) : fmax(x.v, 0) + log1p(exp(-fabs(x.v)));
    double fixed = is_parity(l) ? element_round(l->a_log_type, exp(a)) : exp(a);
    double v = is_parity(l) ? fixed * f : x.v < -40 ? exp(a + x.v) : exp(a / 2) * f * exp(a / 2);
    double along = x.v < -40 ? v : exp(a / 2) * expect_sigmoid(x.v) * exp(a / 2); /* both slopes are at most this */
    num r = {v, along * x.e * (1 + x.e) + 16 * l->u * fabs(v)};
    /* exp of the backend may round exp(a_log) the other way */
    if (is_parity(l)) r.e += f * num_round(l->a_log_type, (num){exp(a), 4 * l->u * exp(a)}).e;
    return r;
}

static num gate_input(const layer *l, int64_t t, int64_t h)
{
    return num_add(l->u, num_of(l->a[t * l->value_heads + h]), num_of(l->dt_bias ? l->dt_bias[h] : 0));
}

/* ---- forward and decoding ------------------------------------------------------------------------------------------------- */

typedef struct results {
    quantity out[3], gate, beta, g;
    int64_t heads; /* of query and key */
} results;

static void forward_token(const layer *l, const results *r, int64_t n, int64_t i, num *pre, num *y)
{
    int64_t t = l->s.start[n] + i;
    for (int part = 0; part < 3; part++) {
        int64_t heads = part < 2 ? l->key_heads : l->value_heads, outs = part < 2 ? r->heads : l->value_heads;
        for (int64_t h = 0; h < heads; h++) {
            head k = head_at(l, part, h);
            num factor = activate(l, &k, n, i, pre, y);
            for (int64_t to = 0; to < outs; to++) {
                if (expect_key_head(part < 2 ? l->o.head_map : WEFT_GDN_INTERLEAVED, to, outs, heads) != h)
                    continue;
                for (int64_t d = 0; d < k.dim; d++) {
                    num x = part == 2 ? y[d] : num_mul(l->u, y[d], factor);
                    if (part == 0) x = num_mul(l->u, x, num_of(l->o.q_scale));
                    num_put(r->out[part], (t * outs + to) * k.dim + d, x);
                }
            }
        }
    }
}

static void forward_gates(const layer *l, const results *r, int64_t n)
{
    int64_t first = l->s.start[n], length = l->s.start[n + 1] - first;
    for (int64_t h = 0; h < l->value_heads; h++) {
        num sum = {0, 0};
        for (int64_t i = 0; i < length; i++) {
            int64_t at = (first + i) * l->value_heads + h;
            num g = decay(l, h, gate_input(l, first + i, h), 0);
            g.v = -g.v;
            sum = l->o.g_chunk && i % l->o.g_chunk ? num_add(l->u, sum, g) : g;
            num_put(r->g, at, l->o.g_log2 ? num_mul(2 * l->u, sum, num_of(1.4426950408889634)) : sum);
            num_put(r->beta, at, num_mul(l->u, num_sigmoid(l->u, num_of(l->b[at])), num_of(l->o.beta_scale)));
            for (int64_t d = 0; r->gate.val && d < l->value_dim; d++)
                num_put(r->gate, at * l->value_dim + d, num_of(l->z[at * l->value_dim + d]));
        }
    }
}

static void states(const layer *l, quantity to)
{
    for (int64_t n = 0; to.val && n < l->s.count; n++)
        for (int part = 0; part < 3 && row_of(l, n) >= 0; part++)
            for (int64_t h = 0; h < (part < 2 ? l->key_heads : l->value_heads); h++) {
                head k = head_at(l, part, h);
                int64_t length = l->s.start[n + 1] - l->s.start[n];
                for (int64_t d = 0; d < k.dim; d++)
                    for (int64_t slot = 0; slot < l->history; slot++)
                        num_put(to, (row_of(l, n) * l->channels + k.channel + d) * l->history + slot,
                                num_of(input_at(l, &k, n, length - l->history + slot, d)));
            }
}

static void forward(expect_call *call, const weft_tensor *query, quantity state)
{
    layer l = layer_of(call);
    int64_t M = l.s.tokens, wide = l.key_dim > l.value_dim ? l.key_dim : l.value_dim;
    num *pre = expect_room(call->scope, (size_t)(2 * wide) * sizeof *pre);
    results r = {.heads = query->shape[2]};
    r.out[0] = expect_output(call, "query", M * r.heads * l.key_dim);
    r.out[1] = expect_output(call, "key", M * r.heads * l.key_dim);
    r.out[2] = expect_output(call, "value", M * l.value_heads * l.value_dim);
    r.gate = expect_output(call, "gate", M * l.value_heads * l.value_dim);
    r.beta = expect_output(call, "beta", M * l.value_heads);
    r.g = expect_output(call, "g", M * l.value_heads);
    for (int64_t n = 0; n < l.s.count; n++) {
        if (row_of(&l, n) < 0) continue; /* what is not computed is zero */
        for (int64_t i = 0; i < l.s.start[n + 1] - l.s.start[n]; i++) forward_token(&l, &r, n, i, pre, pre + wide);
        forward_gates(&l, &r, n);
    }
    states(&l, state);
}

void expect_gdn_pre_fwd(expect_call *call)
{
    const weft_gdn_pre_fwd_args *f = call->args;
    int64_t count = f->final_state.dtype == WEFT_NONE ? 0 : tensor_count(&f->final_state);
    forward(call, &f->query, expect_output(call, "final_state", count));
}

/* Rows of the cache that no request names keep what they have. */
void expect_gdn_pre_step(expect_call *call)
{
    const weft_gdn_pre_step_args *f = call->args;
    int64_t count = tensor_count(&f->new_state);
    quantity to = expect_output(call, "new_state", count);
    if (to.val) memcpy(to.val, call->got[find(call, "new_state")], (size_t)count * sizeof *to.val);
    forward(call, &f->query, to);
}

/* ---- backward ---------------------------------------------------------------------------------------------------------------- */

typedef struct gradients {
    quantity x[3], z, b, a, weight, bias, a_log, dt_bias, state;
    const double *up[3], *d_gate, *d_beta, *d_g, *d_final;
    int64_t heads; /* of d_query and d_key */
    num *pre, *y, *dn, *du;
} gradients;

static int upstream(const layer *l, const gradients *g, const head *k, int64_t t)
{
    const double *up = g->up[k->part];
    int64_t outs = k->part < 2 ? g->heads : l->value_heads;
    for (int64_t d = 0; d < k->dim; d++) {
        double v = 0, size = 0;
        int64_t count = 0;
        for (int64_t from = 0; up && from < outs; from++) {
            if (expect_key_head(k->part < 2 ? l->o.head_map : WEFT_GDN_INTERLEAVED, from, outs, k->heads) != k->h)
                continue;
            v += up[(t * outs + from) * k->dim + d];
            size += fabs(up[(t * outs + from) * k->dim + d]);
            count++;
        }
        g->dn[d] = (num){v, l->u * (double)(count - 1) * size};
        if (!up) g->dn[d].e = 0;
        if (is_parity(l) && k->part < 2) g->dn[d] = num_round(l->act, g->dn[d]);
        if (k->part == 0 && l->o.q_scale != 1) g->dn[d] = num_mul(l->u, g->dn[d], num_of(l->o.q_scale));
    }
    return up != NULL;
}

/* du of all tokens of a sequence. */
static void head_gradient(const layer *l, const gradients *g, const head *k, int64_t n, int64_t length)
{
    for (int64_t i = 0; i < length; i++) {
        num r = activate(l, k, n, i, g->pre, g->y), dot = {0, 0}, factor;
        int norm = k->part < 2 && l->o.l2norm;
        double size = 0;
        if (!upstream(l, g, k, l->s.start[n] + i)) {
            memset(g->du + i * k->dim, 0, (size_t)k->dim * sizeof *g->du);
            continue;
        }
        for (int64_t d = 0; d < k->dim; d++) {
            num term = num_mul(0, g->y[d], g->dn[d]);
            dot.v += term.v;
            dot.e += term.e;
            size += fabs(term.v);
        }
        dot.e += l->u * (expect_chain(l->call->scope, k->dim) + 1) * size;
        factor = num_mul(l->u, r, num_mul(l->u, r, dot));
        for (int64_t d = 0; d < k->dim; d++) {
            num dy = g->dn[d], x = g->pre[d], part = num_mul(l->u, g->y[d], factor);
            part.v = -part.v;
            if (norm) dy = num_mul(l->u, r, num_add(l->u, dy, part));
            if (is_parity(l)) {
                dy = num_round(l->act, dy);
                x = num_round(l->act, x);
            }
            g->du[i * k->dim + d] =
                l->o.activation == WEFT_GDN_SILU ? num_mul(l->u, dy, num_silu_slope(l->u, x)) : dy;
        }
    }
}

static num input_gradient(const layer *l, const gradients *g, const head *k, int64_t n, int64_t length, int64_t i,
                          int64_t d)
{
    num sum = {0, 0};
    int64_t slot = i - (length - l->history);
    for (int64_t at = i; at < i + l->width; at++)
        if (at >= 0 && at < length)
            sum = num_add(l->u, sum,
                          num_mul(l->u, num_of(l->weight[(k->channel + d) * l->width + l->width - 1 - (at - i)]),
                                  g->du[at * k->dim + d]));
    if (g->d_final && slot >= 0 && slot < l->history)
        sum = num_add(l->u, sum, num_of(g->d_final[(n * l->channels + k->channel + d) * l->history + slot]));
    return sum;
}

/* A term of a sum over tokens: partial sums of up to 128 tokens in single, runs of them counted, then in double. */
static void add_term(const layer *l, quantity q, int64_t at, num x)
{
    if (!q.val) return;
    double terms = l->u < 0x1p-40 ? (double)l->s.tokens : fmin((double)l->s.tokens, 130) + 2;
    q.val[at] += x.v;
    q.err[at] += x.e + l->u * terms * fabs(x.v);
}

static void backward_part(const layer *l, const gradients *g, int part, int64_t n, int64_t length)
{
    for (int64_t h = 0; h < (part < 2 ? l->key_heads : l->value_heads); h++) {
        head k = head_at(l, part, h);
        head_gradient(l, g, &k, n, length);
        for (int64_t d = 0; d < k.dim; d++) {
            int64_t c = k.channel + d;
            for (int64_t i = 0; i < length; i++) {
                num du = g->du[i * k.dim + d];
                num_put(g->x[part], ((l->s.start[n] + i) * k.heads + h) * k.dim + d,
                        input_gradient(l, g, &k, n, length, i, d));
                for (int64_t j = 0; j < l->width; j++)
                    add_term(l, g->weight, c * l->width + j,
                             num_mul(l->u, du, num_of(input_at(l, &k, n, i - (l->width - 1) + j, d))));
                add_term(l, g->bias, c, du);
            }
            for (int64_t slot = 0; g->state.val && slot < l->history; slot++)
                num_put(g->state, (n * l->channels + c) * l->history + slot,
                        input_gradient(l, g, &k, n, length, slot - l->history, d));
        }
    }
}

static void backward_gates(const layer *l, const gradients *g, int64_t n, int64_t length)
{
    for (int64_t h = 0; h < l->value_heads; h++) {
        num d_g = {0, 0};
        for (int64_t i = length - 1; i >= 0; i--) {
            int64_t t = l->s.start[n] + i, at = t * l->value_heads + h;
            num x = gate_input(l, t, h), up = num_of(g->d_g ? g->d_g[at] : 0);
            if (l->o.g_log2) up = num_mul(2 * l->u, up, num_of(1.4426950408889634));
            d_g = l->o.g_chunk && i + 1 < length && (i + 1) % l->o.g_chunk ? num_add(l->u, d_g, up) : up;
            num d_a = num_mul(l->u, decay(l, h, x, 1), d_g), d_a_log = num_mul(l->u, decay(l, h, x, 0), d_g);
            d_a.v = -d_a.v;
            d_a_log.v = -d_a_log.v;
            num_put(g->a, at, d_a);
            add_term(l, g->dt_bias, h, d_a);
            add_term(l, g->a_log, h, d_a_log);
            /* s (1 - s): |slope'| <= slope, two sigmoids and three products */
            double s = expect_sigmoid(l->b[at]) * expect_sigmoid(-l->b[at]) * fabs(l->o.beta_scale),
                   d = g->d_beta ? g->d_beta[at] : 0;
            num_put(g->b, at,
                    (num){copysign(s, l->o.beta_scale) * d,
                          fabs(d) * (16 * l->u * s + fabs(l->o.beta_scale) * EXPECT_FLUSHED)});
            for (int64_t e = 0; g->z.val && e < l->value_dim; e++)
                num_put(g->z, at * l->value_dim + e, num_of(g->d_gate ? g->d_gate[at * l->value_dim + e] : 0));
        }
    }
}

void expect_gdn_pre_bwd(expect_call *call)
{
    const weft_gdn_pre_bwd_args *b = call->args;
    layer l = layer_of(call);
    int64_t M = l.s.tokens, wide = l.key_dim > l.value_dim ? l.key_dim : l.value_dim, longest = 0;
    for (int64_t n = 0; n < l.s.count; n++)
        if (l.s.start[n + 1] - l.s.start[n] > longest) longest = l.s.start[n + 1] - l.s.start[n];
    gradients g = {.heads = b->d_query.dtype != WEFT_NONE ? b->d_query.shape[2]
                            : b->d_key.dtype != WEFT_NONE ? b->d_key.shape[2]
                                                          : l.key_heads};
    g.up[0] = expect_values_of(call, "d_query");
    g.up[1] = expect_values_of(call, "d_key");
    g.up[2] = expect_values_of(call, "d_value");
    g.d_gate = expect_values_of(call, "d_gate");
    g.d_beta = expect_values_of(call, "d_beta");
    g.d_g = expect_values_of(call, "d_g");
    g.d_final = expect_values_of(call, "d_final_state");
    g.x[0] = expect_output(call, "d_q", M * l.key_heads * l.key_dim);
    g.x[1] = expect_output(call, "d_k", M * l.key_heads * l.key_dim);
    g.x[2] = expect_output(call, "d_v", M * l.value_heads * l.value_dim);
    g.z = expect_output(call, "d_z", M * l.value_heads * l.value_dim);
    g.b = expect_output(call, "d_b", M * l.value_heads);
    g.a = expect_output(call, "d_a", M * l.value_heads);
    g.weight = expect_output(call, "d_weight", l.channels * l.width);
    g.bias = expect_output(call, "d_bias", l.channels);
    g.a_log = expect_output(call, "d_a_log", l.value_heads);
    g.dt_bias = expect_output(call, "d_dt_bias", l.value_heads);
    g.state = expect_output(call, "d_state", l.s.count * l.channels * l.history);
    g.pre = expect_room(call->scope, (size_t)(wide * (3 + longest)) * sizeof *g.pre);
    g.y = g.pre + wide;
    g.dn = g.y + wide;
    g.du = g.dn + wide;
    for (int64_t n = 0; n < l.s.count; n++) {
        int64_t length = l.s.start[n + 1] - l.s.start[n];
        for (int part = 0; part < 3; part++) backward_part(&l, &g, part, n, length);
        backward_gates(&l, &g, n, length);
    }
}
