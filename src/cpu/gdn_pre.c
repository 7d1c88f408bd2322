/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule, forward and decoding: convolution and activation [G1], heads [G2], gates [G3],
 * states [G4]. Bytes per token, bf16: 2 (2 Hk Dk + 2 H Dk + 4 Hv Dv) and the gates. A run of tokens goes head by head
 * through L1, first convolved, then activated, then written: each pass by itself has registers enough. The rows of a head
 * are widened once, and every output line is written once. */
#include "cpu/gdn_pre.h"

#include "core/gdn_parts.h"

/* Heads by which rows are prefetched. */
enum { AHEAD = 2 };

typedef struct outputs {
    const weft_tensor *out[3]; /* query, key, value */
    const weft_tensor *z, *gate, *b, *a, *beta, *g, *final_state;
    bool direct[3], stream[3], gate_stream;
} outputs;

/* Rows of a head as the convolution finds them: W - 1 of history as fp32, then the run's own, widened or not. */
typedef struct source {
    const float *history; /* [W - 1][ld] */
    const char *rows;
    int64_t step; /* bytes from one to the next */
} source;

/* u of all tokens of a run, a line of channels after the other: taps and what they meet stay in registers. */
INLINE void convolve_run(const int W, const weft_dtype t, source x, const float *taps, int64_t ld, int64_t length,
                         float *u)
{
    for (int64_t c = 0; c < ld; c += line_channels(t)) {
        vf tap[WEFT_GDN_MAX_WIDTH][MAX_LINE], old[WEFT_GDN_MAX_WIDTH][MAX_LINE], bias[MAX_LINE];
        for (int h = 0; h < line_vectors(t); h++) {
            int64_t e = c + h * LANES;
            bias[h] = vf_load(taps + W * ld + e);
            for (int j = 0; j < W; j++) tap[j][h] = vf_load(taps + j * ld + e);
            for (int j = 0; j + 1 < W; j++) old[j][h] = vf_load(x.history + j * ld + e);
        }
        const char *row = x.rows;
        for (float *to = u + c; to < u + length * ld; to += ld, row += x.step) {
            vf now[MAX_LINE];
            line_get(t, row, c, now);
            for (int h = 0; h < line_vectors(t); h++) {
                vf v = bias[h];
                for (int j = 0; j + 1 < W; j++) v = vf_fma(tap[j][h], old[j][h], v);
                vf_store(to + h * LANES, vf_fma(tap[W - 1][h], now[h], v));
                for (int j = 0; j + 2 < W; j++) old[j][h] = old[j + 1][h];
                if (W > 1) old[W - 2][h] = now[h];
            }
        }
    }
}

/* Rows of a head to come. They are prefetched row by row while another head is activated: the hardware does not predict the
 * next rows, and a burst of requests stalls. */
typedef struct ahead {
    const char *rows;
    int64_t step, bytes; /* from one to the next, of each */
} ahead;

INLINE ahead ahead_of(const gdn_pre *p, const weft_tensor *x, int64_t h, int64_t t)
{
    int64_t size = (int64_t)size_of(x->dtype);
    return (ahead){head_of(x, gdn_token(p, x, t), h), x->stride[1] * size, x->shape[3] * size};
}

/* The n-th head of all: q, k and v, then those of the next run, which begins at token t1. With a head of v comes its gate. */
static void look_ahead(const gdn_pre *p, const outputs *o, int64_t n, int64_t t0, int64_t t1, ahead to_come[2])
{
    int part = 0;
    for (; part < 3 && n >= p->part[part].heads; part++) n -= p->part[part].heads;
    int64_t t = part < 3 ? t0 : t1;
    part %= 3;
    to_come[0] = to_come[1] = (ahead){0};
    if (t >= p->s.tokens || n >= p->part[part].heads) return;
    to_come[0] = ahead_of(p, p->part[part].x, n, t);
    if (part == 2 && weft_has(o->gate)) to_come[1] = ahead_of(p, o->z, n, t);
}

INLINE void ask_row(const ahead to_come[2], int64_t i)
{
    for (const ahead *a = to_come; a < to_come + 2; a++)
        for (int64_t at = 0; at < a->bytes; at += 64) line_ask(a->rows + i * a->step, at);
}

/* Vectors whose activations are computed together, one step of the exponential after the other. */
enum { TOGETHER = 4 };

INLINE void activate(const int n, const gdn_pre *p, const float *u, vf *y)
{
    for (int k = 0; k < n; k++) y[k] = vf_load(u + k * LANES);
    if (p->o->activation == WEFT_GDN_SILU) gm_silus(y, n);
    for (int k = 0; k < n && p->round != WEFT_NONE; k++) y[k] = vf_round(p->round, y[k]);
}

INLINE void activate_here(const int n, const gdn_pre *p, float *u)
{
    vf y[TOGETHER];
    activate(n, p, u, y);
    for (int k = 0; k < n; k++) vf_store(u + k * LANES, y[k]);
}

/* u of a run becomes y where it is. */
INLINE void activate_run(const gdn_pre *p, float *u, int64_t ld, int64_t length, const ahead to_come[2])
{
    const float *end = u + length * ld, *row = u;
    for (int64_t i = 0; i < length; i++) {
        row += ld;
        for (; u < row && u + TOGETHER * LANES <= end; u += TOGETHER * LANES) activate_here(TOGETHER, p, u);
        for (; u < row; u += LANES) activate_here(1, p, u);
        ask_row(to_come, i);
    }
}

INLINE float squares(const float *y, int64_t ld)
{
    vf acc[STEP] = {{0}};
    for (int64_t c = 0; c < ld; c += WIDE)
        for (int s = 0; s < STEP; s++) {
            vf v = vf_load(y + c + s * LANES);
            acc[s] = vf_fma(v, v, acc[s]);
        }
    return vf_sum16(acc);
}

/* What each row is multiplied by; roots and quotients of a run side by side. */
INLINE void factors(const gdn_pre *p, int part, const float *y, int64_t ld, int64_t length, float *factor)
{
    float scale = part == 0 ? (float)p->o->q_scale : 1;
    bool norm = part < 2 && p->o->l2norm;
    for (int64_t i = 0; i < GDN_RUN; i++) factor[i] = norm && i < length ? squares(y + i * ld, ld) : 0;
    for (int64_t i = 0; i < GDN_RUN; i += LANES) {
        vf r = norm ? 1.0f / vf_sqrt(vf_load(factor + i) + (float)p->o->l2_eps) : vf_set1(1);
        vf_store(factor + i, r * scale);
    }
}

/* Where the rows of a head go, and to how many heads that repeat it. */
typedef struct target {
    const weft_tensor *out;
    gdn_group to;
    char *row; /* the first one's first head */
    int64_t row_step, head_step;
    bool direct, stream;
} target;

INLINE void put_activated(const int n, const weft_dtype t, const gdn_pre *p, const float *u, char *row, int64_t c,
                          bool stream)
{
    vf y[TOGETHER];
    activate(n, p, u + c, y);
    for (int k = 0; k < n; k += line_vectors(t)) line_put(t, row, c + k * LANES, y + k, stream);
}

/* u of a run becomes y where it goes: what needs no factor does not go through scratch. */
INLINE void activate_out(const weft_dtype t, const gdn_pre *p, const float *u, int64_t ld, int64_t length,
                         const ahead to_come[2], const target *d)
{
    char *row = d->row;
    for (int64_t i = 0; i < length; i++, u += ld, row += d->row_step) {
        int64_t c = 0;
        for (; c + TOGETHER * LANES <= ld; c += TOGETHER * LANES)
            put_activated(TOGETHER, t, p, u, row, c, d->stream);
        for (; c < ld; c += line_channels(t)) put_activated(line_vectors(t), t, p, u, row, c, d->stream);
        ask_row(to_come, i);
    }
}

/* Rows, each times its factor. Not while others are activated: stores past the caches hold up the stores to scratch that
 * follow them. */
INLINE void put_lines(const weft_dtype t, const target *d, const float *y, int64_t ld, int64_t length,
                      const float *factor)
{
    char *row = d->row;
    for (int64_t i = 0; i < length; i++, y += ld, row += d->row_step)
        for (int64_t c = 0; c < ld; c += line_channels(t)) {
            vf v[MAX_LINE];
            for (int h = 0; h < line_vectors(t); h++) v[h] = vf_load(y + c + h * LANES) * factor[i];
            for (int64_t k = 0; k < d->to.count; k++) line_put(t, row + k * d->head_step, c, v, d->stream);
        }
}

static void put_run(const target *d, float *y, int64_t ld, int64_t length, const float *factor)
{
    if (d->direct) {
        FOR_DTYPE(d->out->dtype, put_lines(T, d, y, ld, length, factor))
        return;
    }
    char *row = d->row;
    for (int64_t i = 0; i < length; i++, y += ld, row += d->row_step) {
        for (int64_t c = 0; c < ld; c += LANES) vf_store(y + c, vf_load(y + c) * factor[i]);
        for (int64_t k = 0; k < d->to.count; k++)
            head_store(d->out, false, row + k * d->head_step, y, d->out->shape[3]);
    }
}

/* Heads that lie as whole lines are read where they are; all others are widened to scratch first. */
INLINE void head_run(const int W, const gdn_pre *p, const outputs *o, int part, int64_t h, const gdn_run *r,
                     int64_t t0, int64_t t1, const ahead to_come[2], float *scratch)
{
    const gdn_part *g = &p->part[part];
    const weft_tensor *out = o->out[part];
    const float *taps = taps_of(p, g, h);
    float *y = scratch, *x = scratch + GDN_RUN * g->ld, factor[GDN_RUN];
    int64_t length = t1 - t0, size = (int64_t)size_of(out->dtype);
    gdn_group to = gdn_group_of(p, part, h, out->shape[2]);
    target d = {out,
                to,
                head_of(out, gdn_token(p, out, t0), to.first),
                out->stride[1] * size,
                to.step * out->stride[2] * size,
                o->direct[part],
                o->stream[part]};
    inputs_load(p, g, h, r, t0 - (W - 1), g->direct ? t0 : t1, x);
    if (g->direct) {
        source from = {x, head_of(g->x, gdn_token(p, g->x, t0), h),
                       g->x->stride[1] * (int64_t)size_of(g->x->dtype)};
        FOR_DTYPE(g->x->dtype, convolve_run(W, T, from, taps, g->ld, length, y))
    } else {
        source from = {x, (const char *)(x + (W - 1) * g->ld), g->ld * 4};
        convolve_run(W, WEFT_F32, from, taps, g->ld, length, y);
    }
    if (part == 2 && d.direct) {
        FOR_DTYPE(out->dtype, activate_out(T, p, y, g->ld, length, to_come, &d))
        return;
    }
    activate_run(p, y, g->ld, length, to_come);
    factors(p, part, y, g->ld, length, factor);
    put_run(&d, y, g->ld, length, factor);
}

/* ---- gates ---------------------------------------------------------------------------------------------------------- */

/* beta and g of a run. The sum of a chunk begins with the chunk, which may lie in front of the run. */
static void gates_run(const gdn_pre *p, const outputs *o, const gdn_run *r, float *scratch)
{
    int64_t heads = p->call->value_heads, chunk = p->o->g_chunk, wide = p->gates;
    int64_t from = chunk ? r->first + (r->t0 - r->first) / chunk * chunk : r->t0;
    float *in = scratch, *sum = scratch + wide, *out = scratch + 2 * wide, beta = (float)p->o->beta_scale;
    for (int64_t t = from; t < r->t1; t++) {
        bool begins = !chunk || (t - r->first) % chunk == 0;
        head_load(in, o->a, gdn_token(p, o->a, t), heads);
        for (int64_t h = 0; h < wide; h += LANES) {
            vf g = gm_decay(vf_load(in + h) + vf_load(p->dt + h), vf_load(p->half + h), vf_set1(-1));
            if (!begins) g = vf_load(sum + h) + g;
            vf_store(sum + h, g);
            vf_store(out + h, p->o->g_log2 ? g * 1.44269504f : g);
        }
        if (t < r->t0) continue;
        head_store(o->g, false, gdn_token(p, o->g, t), out, heads);
        head_load(in, o->b, gdn_token(p, o->b, t), heads);
        for (int64_t h = 0; h < wide; h += LANES) vf_store(out + h, gm_beta(vf_load(in + h), beta));
        head_store(o->beta, false, gdn_token(p, o->beta, t), out, heads);
    }
}

/* Bits as they are; past the caches where both ends begin on cache lines. */
static void copy_bytes(char *to, const char *from, int64_t bytes, bool stream)
{
#if WEFT_CPU_LEVEL > 0
    for (; stream && bytes >= 64; bytes -= 64, to += 64, from += 64) {
#if WEFT_CPU_LEVEL == 2
        _mm512_stream_si512((__m512i *)(void *)to, _mm512_loadu_si512((const void *)from));
#else
        _mm256_stream_si256((__m256i *)(void *)to, _mm256_loadu_si256((const __m256i *)(const void *)from));
        _mm256_stream_si256((__m256i *)(void *)(to + 32),
                            _mm256_loadu_si256((const __m256i *)(const void *)(from + 32)));
#endif
    }
#else
    (void)stream;
#endif
    memcpy(to, from, (size_t)bytes);
}

static void gate_run(const gdn_pre *p, const outputs *o, const gdn_run *r)
{
    const weft_tensor *z = o->z, *out = o->gate;
    int64_t size = (int64_t)size_of(out->dtype), heads = out->shape[2], dim = out->shape[3];
    bool rows = z->stride[3] == 1 && out->stride[3] == 1;
    bool whole = rows && z->stride[2] == dim && out->stride[2] == dim;
    for (int64_t t = r->t0; t < r->t1; t++) {
        const char *from = gdn_token(p, z, t);
        char *to = gdn_token(p, out, t);
        for (int64_t h = 0; h < (whole ? 1 : heads); h++) {
            const char *f = from + h * z->stride[2] * size;
            char *w = to + h * out->stride[2] * size;
            if (rows) {
                copy_bytes(w, f, (whole ? heads * dim : dim) * size, o->gate_stream);
                continue;
            }
            for (int64_t d = 0; d < dim; d++)
                memcpy(w + d * out->stride[3] * size, f + d * z->stride[3] * size, (size_t)size);
        }
    }
}

static void zero_run(const gdn_pre *p, const outputs *o, const gdn_run *r, float *scratch)
{
    const weft_tensor *const all[] = {o->out[0], o->out[1], o->out[2], o->gate, o->beta, o->g};
    for (int i = 0; i < 6; i++) {
        const weft_tensor *x = all[i];
        if (!weft_has(x)) continue;
        int64_t heads = x->ndim == 4 ? x->shape[2] : 1, dim = x->shape[x->ndim - 1];
        memset(scratch, 0, (size_t)pad16(dim) * 4);
        for (int64_t t = r->t0; t < r->t1; t++)
            for (int64_t h = 0; h < heads; h++)
                head_store(x, false, head_of(x, gdn_token(p, x, t), h), scratch, dim);
    }
}

/* ---- tiles ---------------------------------------------------------------------------------------------------------- */

typedef struct job {
    gdn_pre p;
    outputs o;
    float *scratch;
    int64_t floats; /* of scratch, per thread */
} job;

static void tile(void *context, int64_t item, int thread)
{
    const job *j = context;
    const gdn_pre *p = &j->p;
    float *scratch = j->scratch + thread * j->floats;
    gdn_run r = {.t1 = item * TILE};
    while (gdn_next(&p->s, &r, min64((item + 1) * TILE, p->s.tokens))) {
        if (r.n == p->s.count || gdn_state_row(p, r.n) < 0) {
            zero_run(p, &j->o, &r, scratch);
            continue;
        }
        gates_run(p, &j->o, &r, scratch);
        for (int64_t t0 = r.t0; t0 < r.t1; t0 += GDN_RUN) {
            gdn_run part_of = r;
            int64_t n = 0;
            part_of.t0 = t0;
            part_of.t1 = min64(t0 + GDN_RUN, r.t1);
            for (int part = 0; part < 3; part++)
                for (int64_t h = 0; h < p->part[part].heads; h++, n++) {
                    ahead to_come[2];
                    look_ahead(p, &j->o, n + AHEAD, t0, part_of.t1, to_come);
                    FOR_WIDTH(p->width, head_run(W, p, &j->o, part, h, &r, t0, part_of.t1, to_come, scratch))
                }
            if (weft_has(j->o.gate)) gate_run(p, &j->o, &part_of);
        }
    }
    stream_fence();
}

/* All slots of a head are read before the first is written: the new state may lie over the old one. */
static void final_state(void *context, int64_t n, int thread)
{
    const job *j = context;
    const gdn_pre *p = &j->p;
    const weft_tensor *to = j->o.final_state;
    float *rows = j->scratch + thread * j->floats;
    int64_t history = p->call->history, row = gdn_state_row(p, n);
    gdn_run r = {.n = n, .first = weft_sequence_start(&p->s, n), .end = weft_sequence_start(&p->s, n + 1)};
    for (int part = 0; part < 3 && row >= 0; part++) {
        const gdn_part *g = &p->part[part];
        for (int64_t h = 0; h < g->heads; h++) {
            int64_t at = row * to->stride[0] + (g->channel + h * g->dim) * to->stride[1];
            inputs_load(p, g, h, &r, r.end - history, r.end, rows);
            if (slots_sorted(to)) {
                float block[SORTED_SLOTS * WEFT_GDN_MAX_DIM];
                for (int64_t i = 0; i < history; i++)
                    for (int64_t d = 0; d < g->dim; d++) block[d * history + i] = rows[i * g->ld + d];
                run_store(to->dtype, (char *)to->data + at * (int64_t)size_of(to->dtype), block, g->dim * history,
                          false);
                continue;
            }
            for (int64_t i = 0; i < history; i++)
                for (int64_t d = 0; d < g->dim; d++)
                    put_f32(to->dtype, to->data, at + d * to->stride[1] + i * to->stride[2], rows[i * g->ld + d]);
        }
    }
}

static weft_arena lay_out(job *j, const weft_call *call, const weft_gdn_pre_fwd_args *f, const weft_tensor *index)
{
    weft_arena arena = cpu_arena(call);
    const weft_tensor *const x[3] = {&f->q, &f->k, &f->v};
    memset(j, 0, sizeof *j);
    gdn_pre_open(&j->p, call, &f->options, &f->cu_seqlens, x, &f->state, index, &arena);
    int64_t ld = j->p.part[0].ld > j->p.part[2].ld ? j->p.part[0].ld : j->p.part[2].ld;
    int64_t rows = (2 * GDN_RUN + j->p.width) * ld, states = call->history * ld;
    if (rows < states) rows = states;
    j->floats = rows > 3 * j->p.gates ? rows : 3 * j->p.gates;
    j->scratch = weft_arena_take(&arena, cpu_rooms(call, j->floats * 4));
    return arena;
}

static weft_status run(const weft_call *call, const weft_gdn_pre_fwd_args *f, const weft_tensor *index)
{
    job j;
    lay_out(&j, call, f, index);
    gdn_pre_load(&j.p, &f->weight, &f->bias, &f->a_log, &f->dt_bias);
    j.o = (outputs){.out = {&f->query, &f->key, &f->value},
                    .z = &f->z,
                    .gate = &f->gate,
                    .b = &f->b,
                    .a = &f->a,
                    .beta = &f->beta,
                    .g = &f->g,
                    .final_state = &f->final_state};
    for (int i = 0; i < 3; i++) {
        j.o.direct[i] = head_direct(j.o.out[i]);
        j.o.stream[i] = head_streams(&j.p, j.o.out[i]);
    }
    j.o.gate_stream = head_streams(&j.p, &f->gate);
    int64_t channels = 2 * call->key_heads * call->key_dim + 2 * call->value_heads * call->value_dim;
    cpu_parallel(call, (j.p.s.tokens + TILE - 1) / TILE, j.p.s.tokens * channels, tile, &j);
    if (weft_has(&f->final_state) && call->history)
        cpu_parallel(call, j.p.s.count, j.p.s.count * channels, final_state, &j);
    return WEFT_OK;
}

static weft_status fwd(const weft_call *call, const void *args)
{
    return run(call, args, NULL);
}

static weft_status step(const weft_call *call, const void *args)
{
    const weft_gdn_pre_step_args *s = args;
    weft_gdn_pre_fwd_args f = weft_gdn_step_as_fwd(s);
    return run(call, &f, weft_has(&s->state_index) ? &s->state_index : NULL);
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    job j;
    weft_arena arena = lay_out(&j, call, args, NULL);
    return weft_arena_bytes(&arena);
}

static size_t step_workspace(const weft_call *call, const void *args)
{
    weft_gdn_pre_fwd_args f = weft_gdn_step_as_fwd(args);
    return fwd_workspace(call, &f);
}

const weft_kernel CPU(gdn_pre_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel CPU(gdn_pre_step)[] = {{.run = step, .workspace = step_workspace}, {0}};
