/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated delta rule, token after token [G5]. Columns of the state do not know each other, so a block of them that fits
 * L1 takes the tokens of a tile one after the other, and then the next block does. Work is cut by sequence and head; a
 * thread keeps the states of one head, and backward those in front of every tile. It computes the states of one tile of
 * tokens again and walks it from its end.
 *
 * Sums over the key dimension run in four parts, i mod 4, for their latency; sums over columns in 16 lanes. */
#include "cpu/common/heads.h"
#include "cpu/common/math.h"

enum { RULE_TILE = 32, COLUMNS = 32, VECTORS = COLUMNS / LANES, PARTS = 4 };

typedef struct vector {
    vf v[VECTORS];
} vector;

INLINE vector columns_load(const float *p)
{
    vector x;
    for (int s = 0; s < VECTORS; s++) x.v[s] = vf_load(p + s * LANES);
    return x;
}

INLINE void columns_store(float *p, const vector *x)
{
    for (int s = 0; s < VECTORS; s++) vf_store(p + s * LANES, x->v[s]);
}

/* sum_j a_j b_j + c_j d_j over the block's columns. */
INLINE float columns_dot(const vector *a, const vector *b, const vector *c, const vector *d)
{
    vf acc[STEP];
    for (int s = 0; s < STEP; s++) {
        acc[s] = a->v[s] * b->v[s];
        if (c) acc[s] = vf_fma(c->v[s], d->v[s], acc[s]);
        for (int k = STEP; k < VECTORS; k += STEP) {
            acc[s] = vf_fma(a->v[k + s], b->v[k + s], acc[s]);
            if (c) acc[s] = vf_fma(c->v[k + s], d->v[k + s], acc[s]);
        }
    }
    return vf_sum16(acc);
}

typedef struct parts {
    vf v[PARTS][VECTORS];
} parts;

INLINE void parts_zero(parts *a)
{
    for (int r = 0; r < PARTS; r++)
        for (int s = 0; s < VECTORS; s++) a->v[r][s] = vf_set1(0);
}

INLINE vector parts_sum(const parts *a)
{
    vector x;
    for (int s = 0; s < VECTORS; s++) x.v[s] = (a->v[0][s] + a->v[1][s]) + (a->v[2][s] + a->v[3][s]);
    return x;
}

/* Rows i of a state in turn, r = i mod 4, which becomes a constant when the inner loop is unrolled. */
#define FOR_ROWS(dk)                                                                                               \
    for (int64_t first = 0; first < (dk); first += PARTS)                                                          \
        for (int64_t r = 0, i = first; r < PARTS && i < (dk); r++, i++)

/* ---- one token, one block of columns -------------------------------------------------------------------------------------- */

/* miss = v - (decay m)^T k;  m <- decay m + k (beta miss)^T into `to`;  o = m^T q, where it is requested. */
INLINE void token_forward(const float *m, float *to, int64_t dk, float decay, float beta, const float *k,
                          const float *q, const float *v, float *miss, float *o)
{
    parts a;
    vector w, d;
    parts_zero(&a);
    FOR_ROWS(dk)
    {
        vf x = vf_set1(k[i]);
        for (int s = 0; s < VECTORS; s++) a.v[r][s] = vf_fma(vf_load(m + i * COLUMNS + s * LANES), x, a.v[r][s]);
    }
    w = parts_sum(&a);
    for (int s = 0; s < VECTORS; s++) {
        w.v[s] = vf_load(v + s * LANES) - w.v[s] * decay;
        d.v[s] = w.v[s] * beta;
    }
    if (miss) columns_store(miss, &w);
    parts_zero(&a);
    FOR_ROWS(dk)
    {
        vf x = vf_set1(k[i]), y = vf_set1(o ? q[i] : 0);
        for (int s = 0; s < VECTORS; s++) {
            vf n = vf_fma(x, d.v[s], vf_load(m + i * COLUMNS + s * LANES) * decay);
            vf_store(to + i * COLUMNS + s * LANES, n);
            if (o) a.v[r][s] = vf_fma(n, y, a.v[r][s]);
        }
    }
    if (!o) return;
    w = parts_sum(&a);
    columns_store(o, &w);
}

/* From the gradient d of the state behind the token to that of the state in front of it. d_o is scaled. */
typedef struct token_back {
    const float *before, *after, *q, *k, *miss, *d_o;
    float decay, beta;
    float *d_q, *d_k, *d_v, *d_beta, *d_g; /* added to, but for d_v */
} token_back;

INLINE void token_backward(const token_back *t, int64_t dk, float *d)
{
    parts a;
    vector d_o = columns_load(t->d_o), miss = columns_load(t->miss), delta, back, dd;
    parts_zero(&a);
    FOR_ROWS(dk)
    {
        vf x = vf_set1(t->q[i]), y = vf_set1(t->k[i]);
        for (int s = 0; s < VECTORS; s++) {
            vf n = vf_fma(x, d_o.v[s], vf_load(d + i * COLUMNS + s * LANES));
            vf_store(d + i * COLUMNS + s * LANES, n);
            a.v[r][s] = vf_fma(n, y, a.v[r][s]);
        }
    }
    dd = parts_sum(&a);
    for (int s = 0; s < VECTORS; s++) {
        delta.v[s] = miss.v[s] * t->beta;
        back.v[s] = -(dd.v[s] * t->beta);
        vf_store(t->d_v + s * LANES, dd.v[s] * t->beta);
    }
    *t->d_beta += columns_dot(&dd, &miss, NULL, NULL);
    parts_zero(&a);
    FOR_ROWS(dk)
    {
        vector n = columns_load(d + i * COLUMNS), p = columns_load(t->before + i * COLUMNS);
        vector after = columns_load(t->after + i * COLUMNS);
        vf y = vf_set1(t->k[i]);
        for (int s = 0; s < VECTORS; s++) p.v[s] = p.v[s] * t->decay;
        t->d_q[i] += columns_dot(&after, &d_o, NULL, NULL);
        t->d_k[i] += columns_dot(&n, &delta, &p, &back);
        for (int s = 0; s < VECTORS; s++) {
            n.v[s] = vf_fma(y, back.v[s], n.v[s]);
            a.v[r][s] = vf_fma(n.v[s], p.v[s], a.v[r][s]);
            n.v[s] = n.v[s] * t->decay;
        }
        columns_store(d + i * COLUMNS, &n);
    }
    dd = parts_sum(&a);
    vf sum[STEP];
    for (int s = 0; s < STEP; s++) {
        sum[s] = dd.v[s];
        for (int k = STEP; k < VECTORS; k += STEP) sum[s] = sum[s] + dd.v[k + s];
    }
    *t->d_g += vf_sum16(sum);
}

/* ---- rows of a tile --------------------------------------------------------------------------------------------------------- */

typedef struct rule {
    const weft_call *call;
    const void *args;
    weft_sequences s;
    const weft_tensor *query, *key, *value, *beta, *g, *state;
    weft_gdn_head_map map;
    float scale;
    int64_t dk, dv, wide, blocks, size; /* wide: dv in whole blocks of columns; size: floats of a state */
    char *scratch;
    int64_t bytes; /* of scratch, per thread */
    bool backward;
} rule;

/* A thread's room. States lie block by block: [wide / COLUMNS][dk][COLUMNS]. */
typedef struct room {
    float *m, *q, *k, *v, *o, *decay, *beta;
    float *d, *kept, *inner, *miss, *d_q, *d_k, *d_v, *d_beta, *d_g;
} room;

static room room_take(const rule *j, weft_arena *arena)
{
    room r = {0};
    int64_t dk = pad16(j->dk), steps = j->call->steps;
#define TAKE(count) weft_arena_take(arena, (size_t)(count)*4)
    r.m = TAKE(j->size);
    r.q = TAKE(RULE_TILE * dk);
    r.k = TAKE(RULE_TILE * dk);
    r.v = TAKE(RULE_TILE * j->wide);
    r.o = TAKE(RULE_TILE * j->wide);
    r.decay = TAKE(RULE_TILE);
    r.beta = TAKE(RULE_TILE);
    if (!j->backward) return r;
    r.d = TAKE(j->size);
    r.kept = TAKE((steps + RULE_TILE - 1) / RULE_TILE * j->size);
    r.inner = TAKE((RULE_TILE + 1) * j->dk * COLUMNS);
    r.miss = TAKE(RULE_TILE * COLUMNS);
    r.d_q = TAKE(steps * dk);
    r.d_k = TAKE(steps * dk);
    r.d_v = TAKE(RULE_TILE * j->wide);
    r.d_beta = TAKE(RULE_TILE);
    r.d_g = TAKE(RULE_TILE);
#undef TAKE
    return r;
}

static void tile_rows(const rule *j, const weft_tensor *x, int64_t h, int64_t t0, int64_t t1, float *to, int64_t ld)
{
    int64_t dim = x->shape[3];
    for (int64_t t = t0; t < t1; t++, to += ld) {
        head_load(to, x, head_of(x, token_at(&j->s, x, t), h), dim);
        for (int64_t d = pad16(dim); d < ld; d++) to[d] = 0;
    }
}

static void gate_load(const rule *j, const weft_tensor *x, int64_t h, int64_t t0, int64_t t1, float *to)
{
    for (int64_t t = t0; t < t1; t++) to[t - t0] = get_f32(x->dtype, token_at(&j->s, x, t), h * x->stride[2]);
    for (int64_t t = t1; t < t0 + RULE_TILE; t++) to[t - t0] = 0;
}

static void tile_load(const rule *j, int64_t h, int64_t kh, int64_t t0, int64_t t1, const room *r)
{
    tile_rows(j, j->query, kh, t0, t1, r->q, pad16(j->dk));
    tile_rows(j, j->key, kh, t0, t1, r->k, pad16(j->dk));
    tile_rows(j, j->value, h, t0, t1, r->v, j->wide);
    gate_load(j, j->beta, h, t0, t1, r->beta);
    gate_load(j, j->g, h, t0, t1, r->decay);
    for (int64_t t = 0; t < RULE_TILE; t += LANES) vf_store(r->decay + t, vf_exp(vf_load(r->decay + t)));
}

/* Where row i of a head of a state [N, Hv, Dk, Dv] lies. */
INLINE char *state_row(const weft_tensor *x, int64_t n, int64_t h, int64_t i)
{
    return (char *)x->data + (n * x->stride[0] + h * x->stride[1] + i * x->stride[2]) * (int64_t)size_of(x->dtype);
}

/* Between a state and blocks of columns; absent: zero. */
static void state_load(const rule *j, const weft_tensor *x, int64_t n, int64_t h, float *m)
{
    memset(m, 0, (size_t)j->size * 4);
    for (int64_t i = 0; weft_has(x) && i < j->dk; i++) {
        const char *row = state_row(x, n, h, i);
        for (int64_t b = 0; b < j->blocks; b++) {
            float *to = m + (b * j->dk + i) * COLUMNS;
            int64_t c = b * COLUMNS, count = min64(COLUMNS, j->dv - c), step = x->stride[3];
            if (step == 1)
                run_load(x->dtype, to, row + c * (int64_t)size_of(x->dtype), count);
            else
                for (int64_t k = 0; k < count; k++) to[k] = get_f32(x->dtype, row, (c + k) * step);
        }
    }
}

static void state_store(const rule *j, const weft_tensor *x, bool add, int64_t n, int64_t h, const float *m)
{
    for (int64_t i = 0; weft_has(x) && i < j->dk; i++) {
        char *row = state_row(x, n, h, i);
        for (int64_t b = 0; b < j->blocks; b++) {
            const float *from = m + (b * j->dk + i) * COLUMNS;
            int64_t c = b * COLUMNS, count = min64(COLUMNS, j->dv - c), step = x->stride[3];
            if (step == 1) {
                run_store(x->dtype, row + c * (int64_t)size_of(x->dtype), from, count, add);
                continue;
            }
            for (int64_t k = 0; k < count; k++) {
                float old = add ? get_f32(x->dtype, row, (c + k) * step) : 0;
                put_f32(x->dtype, row, (c + k) * step, add ? old + from[k] : from[k]);
            }
        }
    }
}

static void zero_rows(const rule *j, const weft_tensor *x)
{
    if (!weft_has(x)) return;
    int64_t heads = x->ndim == 4 ? x->shape[2] : 1, dim = x->shape[x->ndim - 1], step = last_stride(x);
    for (int64_t t = weft_sequence_start(&j->s, j->s.count); t < j->s.tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t d = 0; d < dim; d++) put_f32(x->dtype, head_of(x, token_at(&j->s, x, t), h), d * step, 0);
}

/* ---- forward ------------------------------------------------------------------------------------------------------------------- */

/* All blocks of columns through the tokens of a tile. */
static void tile_forward(const rule *j, int64_t count, const room *r, bool outputs)
{
    int64_t ld = pad16(j->dk);
    for (int64_t b = 0; b < j->blocks; b++) {
        float *m = r->m + b * j->dk * COLUMNS;
        for (int64_t t = 0; t < count; t++)
            token_forward(m, m, j->dk, r->decay[t], r->beta[t], r->k + t * ld, r->q + t * ld,
                          r->v + t * j->wide + b * COLUMNS, NULL,
                          outputs ? r->o + t * j->wide + b * COLUMNS : NULL);
    }
}

static int64_t key_head(const rule *j, int64_t h)
{
    int64_t heads = j->call->heads;
    return j->map == WEFT_GDN_TILED ? h % heads : h / (j->call->value_heads / heads);
}

static room room_of(const rule *j, int thread)
{
    weft_arena arena = weft_arena_open(j->scratch + thread * j->bytes);
    return room_take(j, &arena);
}

static void forward_item(void *context, int64_t item, int thread)
{
    const rule *j = context;
    const weft_gdn_rule_fwd_args *a = j->args;
    int64_t n = item / j->call->value_heads, h = item % j->call->value_heads;
    int64_t end = weft_sequence_start(&j->s, n + 1);
    room r = room_of(j, thread);
    state_load(j, j->state, n, h, r.m);
    for (int64_t t = weft_sequence_start(&j->s, n); t < end; t += RULE_TILE) {
        int64_t count = min64(RULE_TILE, end - t);
        tile_load(j, h, key_head(j, h), t, t + count, &r);
        tile_forward(j, count, &r, true);
        for (int64_t i = 0; i < count; i++) {
            float *o = r.o + i * j->wide;
            for (int64_t c = 0; c < j->wide; c += LANES) vf_store(o + c, vf_load(o + c) * j->scale);
            head_store(&a->o, false, head_of(&a->o, token_at(&j->s, &a->o, t + i), h), o, j->dv);
        }
    }
    state_store(j, &a->final_state, false, n, h, r.m);
}

/* ---- decoding ------------------------------------------------------------------------------------------------------------------ */

/* The state after token t into token_state. */
static void keep_state(const rule *j, int64_t t, int64_t h, const float *m)
{
    const weft_gdn_rule_step_args *a = j->args;
    int64_t n = j->s.cu ? 0 : t / j->s.steps, step = j->s.cu ? t : t % j->s.steps;
    state_store(j, &a->token_state, false, n, step * j->call->value_heads + h, m);
}

/* A token of a tile by itself. */
INLINE room token_of(const rule *j, const room *tile, int64_t i)
{
    room r = *tile;
    r.q += i * pad16(j->dk), r.k += i * pad16(j->dk);
    r.v += i * j->wide, r.o += i * j->wide;
    r.decay += i, r.beta += i;
    return r;
}

static void step_tile(const rule *j, int64_t h, int64_t t, int64_t count, const room *r)
{
    const weft_gdn_rule_step_args *a = j->args;
    tile_load(j, h, key_head(j, h), t, t + count, r);
    if (!weft_has(&a->token_state)) tile_forward(j, count, r, true);
    for (int64_t i = 0; i < count; i++) {
        room one = token_of(j, r, i);
        if (weft_has(&a->token_state)) {
            tile_forward(j, 1, &one, true);
            keep_state(j, t + i, h, r->m);
        }
        for (int64_t c = 0; c < j->wide; c += LANES) vf_store(one.o + c, vf_load(one.o + c) * j->scale);
        head_store(&a->o, false, head_of(&a->o, token_at(&j->s, &a->o, t + i), h), one.o, j->dv);
    }
}

/* An item is a head of a request; items past the last request write zeros for tokens behind the last offset. */
static void step_item(void *context, int64_t item, int thread)
{
    const rule *j = context;
    const weft_gdn_rule_step_args *a = j->args;
    int64_t n = item / j->call->value_heads, h = item % j->call->value_heads;
    int64_t start = weft_sequence_start(&j->s, n);
    int64_t end = n < j->s.count ? weft_sequence_start(&j->s, n + 1) : j->s.tokens;
    int64_t row = n == j->s.count ? -1 : weft_has(&a->state_index) ? weft_index_at(&a->state_index, n) : n;
    room r = room_of(j, thread);
    if (row >= 0) {
        state_load(j, &a->state, row, h, r.m);
        for (int64_t t = start; t < end; t += RULE_TILE) step_tile(j, h, t, min64(RULE_TILE, end - t), &r);
        state_store(j, &a->new_state, false, row, h, r.m);
        return;
    }
    memset(r.m, 0, (size_t)j->size * 4);
    memset(r.o, 0, (size_t)j->wide * 4);
    for (int64_t t = start; t < end; t++) {
        head_store(&a->o, false, head_of(&a->o, token_at(&j->s, &a->o, t), h), r.o, j->dv);
        keep_state(j, t, h, r.m);
    }
}

/* ---- backward ------------------------------------------------------------------------------------------------------------------ */

static void tile_backward(const rule *j, int64_t count, const float *start, int64_t first, const room *r)
{
    int64_t ld = pad16(j->dk), block = j->dk * COLUMNS;
    for (int64_t t = 0; t < count; t++) r->d_beta[t] = r->d_g[t] = 0;
    for (int64_t b = 0; b < j->blocks; b++) {
        const float *m = start + b * block;
        for (int64_t t = 0; t < count; t++, m = r->inner + t * block)
            token_forward(m, r->inner + (t + 1) * block, j->dk, r->decay[t], r->beta[t], r->k + t * ld, NULL,
                          r->v + t * j->wide + b * COLUMNS, r->miss + t * COLUMNS, NULL);
        for (int64_t t = count - 1; t >= 0; t--) {
            token_back back = {.before = t ? r->inner + t * block : start + b * block,
                               .after = r->inner + (t + 1) * block,
                               .q = r->q + t * ld,
                               .k = r->k + t * ld,
                               .miss = r->miss + t * COLUMNS,
                               .d_o = r->o + t * j->wide + b * COLUMNS,
                               .decay = r->decay[t],
                               .beta = r->beta[t],
                               .d_q = r->d_q + (first + t) * ld,
                               .d_k = r->d_k + (first + t) * ld,
                               .d_v = r->d_v + t * j->wide + b * COLUMNS,
                               .d_beta = r->d_beta + t,
                               .d_g = r->d_g + t};
            token_backward(&back, j->dk, r->d + b * block);
        }
    }
}

static void grad_scalar(const rule *j, const weft_grad *g, int64_t t, int64_t h, float v)
{
    if (!weft_has(&g->to)) return;
    char *p = token_at(&j->s, &g->to, t);
    int64_t at = h * g->to.stride[2];
    put_f32(g->to.dtype, p, at, g->add ? get_f32(g->to.dtype, p, at) + v : v);
}

static void grad_row(const rule *j, const weft_grad *g, int64_t t, int64_t h, const float *row, int64_t dim)
{
    if (weft_has(&g->to)) head_store(&g->to, g->add, head_of(&g->to, token_at(&j->s, &g->to, t), h), row, dim);
}

static void head_backward(const rule *j, int64_t n, int64_t h, int64_t kh, const room *r)
{
    const weft_gdn_rule_bwd_args *a = j->args;
    int64_t first = weft_sequence_start(&j->s, n), length = weft_sequence_start(&j->s, n + 1) - first;
    int64_t tiles = (length + RULE_TILE - 1) / RULE_TILE;
    state_load(j, j->state, n, h, r->m);
    for (int64_t i = 0; i < tiles; i++) {
        int64_t t = first + i * RULE_TILE, count = min64(RULE_TILE, first + length - t);
        memcpy(r->kept + i * j->size, r->m, (size_t)j->size * 4);
        if (i + 1 == tiles) break; /* the last state is not needed */
        tile_load(j, h, kh, t, t + count, r);
        tile_forward(j, count, r, false);
    }
    state_load(j, &a->d_final_state, n, h, r->d);
    for (int64_t i = tiles - 1; i >= 0; i--) {
        int64_t at = i * RULE_TILE, t = first + at, count = min64(RULE_TILE, length - at);
        tile_load(j, h, kh, t, t + count, r);
        tile_rows(j, &a->d_o, h, t, t + count, r->o, j->wide);
        for (int64_t c = 0; c < count * j->wide; c += LANES) vf_store(r->o + c, vf_load(r->o + c) * j->scale);
        tile_backward(j, count, r->kept + i * j->size, at, r);
        for (int64_t s = 0; s < count; s++) {
            grad_row(j, &a->d_value, t + s, h, r->d_v + s * j->wide, j->dv);
            grad_scalar(j, &a->d_beta, t + s, h, r->d_beta[s]);
            grad_scalar(j, &a->d_g, t + s, h, r->d_g[s]);
        }
    }
    state_store(j, &a->d_state.to, a->d_state.add, n, h, r->d);
}

/* A sequence and a head of query and key, with all value heads that read it: their gradients are summed in order. */
static void backward_item(void *context, int64_t item, int thread)
{
    const rule *j = context;
    const weft_gdn_rule_bwd_args *a = j->args;
    int64_t n = item / j->call->heads, kh = item % j->call->heads, ld = pad16(j->dk);
    int64_t first = weft_sequence_start(&j->s, n), length = weft_sequence_start(&j->s, n + 1) - first;
    room r = room_of(j, thread);
    memset(r.d_q, 0, (size_t)(length * ld) * 4);
    memset(r.d_k, 0, (size_t)(length * ld) * 4);
    for (int64_t h = 0; h < j->call->value_heads; h++)
        if (key_head(j, h) == kh) head_backward(j, n, h, kh, &r);
    for (int64_t t = 0; t < length; t++) {
        grad_row(j, &a->d_query, first + t, kh, r.d_q + t * ld, j->dk);
        grad_row(j, &a->d_key, first + t, kh, r.d_k + t * ld, j->dk);
    }
}

/* ---- operators ------------------------------------------------------------------------------------------------------------------- */

static weft_arena lay_out(rule *j, const weft_call *call, bool backward)
{
    weft_arena arena = cpu_arena(call), one = weft_arena_open(NULL);
    j->call = call;
    j->backward = backward;
    j->dk = call->key_dim;
    j->dv = call->value_dim;
    j->blocks = (j->dv + COLUMNS - 1) / COLUMNS;
    j->wide = j->blocks * COLUMNS;
    j->size = j->dk * j->wide;
    room_take(j, &one);
    j->bytes = (int64_t)((one.used + 127) / 64 * 64);
    j->scratch = weft_arena_take(&arena, cpu_rooms(call, j->bytes));
    return arena;
}

/* The args of forward and of backward call their inputs by the same names. */
#define RULE_OF(call, a)                                                                                           \
    {                                                                                                              \
        .args = (a), .s = weft_sequences_of(call, &(a)->cu_seqlens), .query = &(a)->query, .key = &(a)->key,       \
        .value = &(a)->value, .beta = &(a)->beta, .g = &(a)->g, .state = &(a)->state, .map = (a)->head_map,        \
        .scale = (float)(a)->scale                                                                                 \
    }

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_gdn_rule_fwd_args *a = args;
    rule j = RULE_OF(call, a);
    lay_out(&j, call, false);
    cpu_parallel(call, j.s.count * call->value_heads, j.s.tokens * call->value_heads * j.size, forward_item, &j);
    zero_rows(&j, &a->o);
    return WEFT_OK;
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_gdn_rule_bwd_args *a = args;
    rule j = RULE_OF(call, a);
    lay_out(&j, call, true);
    cpu_parallel(call, j.s.count * call->heads, j.s.tokens * call->value_heads * j.size, backward_item, &j);
    const weft_grad *const rows[] = {&a->d_query, &a->d_key, &a->d_value, &a->d_beta, &a->d_g};
    for (int i = 0; i < 5; i++)
        if (!rows[i]->add) zero_rows(&j, &rows[i]->to);
    return WEFT_OK;
}

static weft_status step(const weft_call *call, const void *args)
{
    const weft_gdn_rule_step_args *a = args;
    rule j = RULE_OF(call, a);
    lay_out(&j, call, false);
    int64_t requests = j.s.count + (j.s.cu != NULL);
    cpu_parallel(call, requests * call->value_heads, j.s.tokens * call->value_heads * j.size, step_item, &j);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    rule j = {.args = args};
    weft_arena arena = lay_out(&j, call, false);
    return weft_arena_bytes(&arena);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    rule j = {.args = args};
    weft_arena arena = lay_out(&j, call, true);
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(gdn_rule_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel CPU(gdn_rule_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
const weft_kernel CPU(gdn_rule_step)[] = {{.run = step, .workspace = fwd_workspace}, {0}};
