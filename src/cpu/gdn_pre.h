/* SPDX-License-Identifier: Apache-2.0
 *
 * What forward and backward in front of the gated delta rule [G1] share: heads as rows of fp32 scratch, taps packed beside each
 * other, and the walk over runs of tokens that belong to one sequence.
 *
 * Tokens are counted through all sequences (core/sequences.h), and everything that depends on where they are cut depends on
 * that count alone, so dense and packed calls do the same operations in the same order. */
#ifndef WEFT_CPU_GDN_PRE_H
#define WEFT_CPU_GDN_PRE_H

#include "cpu/common/gdn_math.h"
#include "cpu/common/heads.h"

/* Tokens that a head's rows are in scratch for: small enough for L1 with everything else, large beside the W - 1 rows
 * that come in addition. */
enum { GDN_RUN = 16 };

/* The heads of q, k or v. */
typedef struct gdn_part {
    const weft_tensor *x; /* [B, S, heads, dim] */
    int64_t heads, dim, ld, channel;
    bool direct; /* rows can be read in place, in whole lines */
    float *taps; /* [heads][W + 1][ld]: taps, the oldest first, then the bias; zeros behind dim */
} gdn_part;

typedef struct gdn_pre {
    const weft_call *call;
    const weft_gdn_options *o;
    weft_sequences s;
    gdn_part part[3];
    const weft_tensor *state, *index; /* index NULL: sequence n has row n of the state */
    float *half, *dt;                 /* [value heads, padded]: exp(a_log / 2), dt_bias */
    weft_dtype round;                 /* parity: what to round to; else WEFT_NONE */
    int64_t gates;                    /* value heads, padded */
    int width;
} gdn_pre;

/* Tokens t0 .. t1 of sequence n, which has tokens first .. end. n is s.count for what follows the last sequence. */
typedef struct gdn_run {
    int64_t n, first, end, t0, t1;
} gdn_run;

/* The next run behind r->t1 that ends at `limit` at the latest. */
INLINE bool gdn_next(const weft_sequences *s, gdn_run *r, int64_t limit)
{
    int64_t t = r->t1;
    if (t >= limit) return false;
    r->n = weft_sequence_of(s, t);
    r->first = r->n < s->count ? weft_sequence_start(s, r->n) : t;
    r->end = r->n < s->count ? weft_sequence_start(s, r->n + 1) : s->tokens;
    r->t0 = t;
    r->t1 = min64(limit, r->end);
    return true;
}

INLINE int64_t gdn_state_row(const gdn_pre *p, int64_t n)
{
    return p->index ? weft_index_at(p->index, n) : n;
}

INLINE char *gdn_token(const gdn_pre *p, const weft_tensor *x, int64_t t)
{
    return token_at(&p->s, x, t);
}

/* Can heads be written in place, a line at a time? And past the caches? */
INLINE bool head_direct(const weft_tensor *x)
{
    return weft_has(x) && x->dtype != WEFT_F16 && last_stride(x) == 1 && x->shape[3] % line_channels(x->dtype) == 0;
}

INLINE bool head_streams(const gdn_pre *p, const weft_tensor *x)
{
    int64_t elements = 1, size = (int64_t)size_of(x->dtype);
    if (!weft_has(x) || !head_direct(x)) return false;
    for (int d = 0; d < x->ndim; d++) elements *= x->shape[d];
    uintptr_t bits = (uintptr_t)x->data;
    for (int d = 0; d < 3; d++) bits |= (uintptr_t)(x->stride[d] * size);
    return line_streams(x->dtype) && bits % 64 == 0 && stream_pays(p->call, x, elements);
}

INLINE vf vf_round(weft_dtype t, vf v)
{
    uint16_t h[LANES];
    if (t == WEFT_F32 || t == WEFT_NONE) return v;
    vf_put(t, h, 0, v, false);
    return vf_get(t, h, 0);
}

/* One slot of a state, channels channel .. channel + dim. */
static inline void slot_load(float *dst, const weft_tensor *state, int64_t row, int64_t channel, int64_t slot,
                             int64_t dim)
{
    const char *at = (const char *)state->data;
    int64_t offset = row * state->stride[0] + channel * state->stride[1] + slot * state->stride[2];
    for (int64_t d = 0; d < dim; d++) dst[d] = get_f32(state->dtype, at, offset + d * state->stride[1]);
    for (int64_t d = dim; d % WIDE; d++) dst[d] = 0;
}

/* Slots of a state whose channels lie side by side with all their slots are moved as one run, and sorted in scratch. */
enum { SORTED_SLOTS = 8 };

INLINE bool slots_sorted(const weft_tensor *state)
{
    return state->stride[2] == 1 && state->stride[1] == state->shape[2] && state->shape[2] <= SORTED_SLOTS;
}

/* Slots slot .. slot + count of a head, one row of dst each. */
static inline void slots_load(float *dst, int64_t ld, const weft_tensor *state, int64_t row, int64_t channel,
                              int64_t slot, int64_t count, int64_t dim)
{
    int64_t all = state->shape[2];
    if (!slots_sorted(state)) {
        for (int64_t i = 0; i < count; i++) slot_load(dst + i * ld, state, row, channel, slot + i, dim);
        return;
    }
    float block[SORTED_SLOTS * WEFT_GDN_MAX_DIM];
    int64_t at = row * state->stride[0] + channel * all;
    run_load(state->dtype, block, (const char *)state->data + at * (int64_t)size_of(state->dtype), dim * all);
    for (int64_t i = 0; i < count; i++) {
        for (int64_t d = 0; d < dim; d++) dst[i * ld + d] = block[d * all + slot + i];
        for (int64_t d = dim; d < ld; d++) dst[i * ld + d] = 0;
    }
}

/* Inputs of the convolution for tokens from .. to of a head, to at most the end of the sequence; in front of it its state,
 * or zero. */
static inline void inputs_load(const gdn_pre *p, const gdn_part *g, int64_t h, const gdn_run *r, int64_t from,
                               int64_t to, float *dst)
{
    const weft_tensor *x = g->x;
    int64_t before = min64(r->first, to) - from, slot = p->call->history - (r->first - from);
    if (before > 0) {
        int64_t older = !weft_has(p->state) ? before : slot < 0 ? min64(-slot, before) : 0; /* than what is known */
        memset(dst, 0, (size_t)(older * g->ld) * 4);
        if (before > older)
            slots_load(dst + older * g->ld, g->ld, p->state, gdn_state_row(p, r->n), g->channel + h * g->dim,
                       slot + older, before - older, g->dim);
        from += before;
        dst += before * g->ld;
    }
    if (from >= to) return;
    const char *head = head_of(x, gdn_token(p, x, from), h);
    for (; from < to; from++, dst += g->ld, head += x->stride[1] * (int64_t)size_of(x->dtype))
        head_load(dst, x, head, g->dim);
}

/* Which heads of an output or upstream gradient belong to head h: first, first + step ... */
typedef struct gdn_group {
    int64_t first, step, count;
} gdn_group;

INLINE gdn_group gdn_group_of(const gdn_pre *p, int part, int64_t h, int64_t heads)
{
    int64_t key_heads = p->call->key_heads, repeat = heads / key_heads;
    if (part == 2) return (gdn_group){h, 1, 1};
    if (p->o->head_map == WEFT_GDN_TILED) return (gdn_group){h, key_heads, repeat};
    return (gdn_group){h * repeat, 1, repeat};
}

/* Constant widths where they pay. */
#if WEFT_CPU_LEVEL == 0
#define FOR_WIDTH(w, BODY)                                                                                         \
    do {                                                                                                           \
        const int W = (w);                                                                                         \
        BODY;                                                                                                      \
    } while (0);
#else
#define FOR_WIDTH(w, BODY)                                                                                         \
    switch (w) {                                                                                                   \
    case 2: {                                                                                                      \
        const int W = 2;                                                                                           \
        BODY;                                                                                                      \
    } break;                                                                                                       \
    case 3: {                                                                                                      \
        const int W = 3;                                                                                           \
        BODY;                                                                                                      \
    } break;                                                                                                       \
    case 4: {                                                                                                      \
        const int W = 4;                                                                                           \
        BODY;                                                                                                      \
    } break;                                                                                                       \
    default: {                                                                                                     \
        const int W = (w);                                                                                         \
        BODY;                                                                                                      \
    }                                                                                                              \
    }
#endif

/* u of a vector of channels: from the bias, the oldest tap first. */
INLINE vf convolve(const int W, const float *x, const float *taps, int64_t ld, int64_t e)
{
    vf u = vf_load(taps + W * ld + e);
    for (int j = 0; j < W; j++) u = vf_fma(vf_load(taps + j * ld + e), vf_load(x + j * ld + e), u);
    return u;
}

/* 1/sqrt(sum + eps). A sum that overflows makes it 0. */
INLINE float norm_factor(const gdn_pre *p, float sum)
{
    return 1.0f / sqrtf(sum + (float)p->o->l2_eps);
}

INLINE float *taps_of(const gdn_pre *p, const gdn_part *g, int64_t h)
{
    return g->taps + h * (p->width + 1) * g->ld;
}

/* Floats of the taps of all heads: also what their gradients take. */
INLINE int64_t taps_floats(const gdn_pre *p)
{
    int64_t floats = 0;
    for (int i = 0; i < 3; i++) floats += p->part[i].heads * p->part[i].ld * (p->width + 1);
    return floats;
}

/* Sizes and room; gdn_pre_load fills the room. */
static inline void gdn_pre_open(gdn_pre *p, const weft_call *call, const weft_gdn_options *o,
                                const weft_tensor *cu_seqlens, const weft_tensor *const x[3],
                                const weft_tensor *state, const weft_tensor *index, weft_arena *arena)
{
    *p = (gdn_pre){.call = call, .o = o, .s = weft_sequences_of(call, cu_seqlens), .state = state, .index = index};
    int64_t channel = 0;
    p->width = (int)call->width;
    p->round = o->rounding == WEFT_GDN_PARITY ? call->dtype : WEFT_NONE;
    p->gates = pad16(call->value_heads);
    for (int i = 0; i < 3; i++) {
        gdn_part *g = &p->part[i];
        g->x = x[i];
        g->heads = i < 2 ? call->key_heads : call->value_heads;
        g->dim = i < 2 ? call->key_dim : call->value_dim;
        g->ld = pad16(g->dim);
        g->channel = channel;
        g->direct = head_direct(g->x);
        g->taps = weft_arena_take(arena, (size_t)(g->heads * (p->width + 1) * g->ld) * 4);
        channel += g->heads * g->dim;
    }
    p->half = weft_arena_take(arena, (size_t)p->gates * 4);
    p->dt = weft_arena_take(arena, (size_t)p->gates * 4);
}

static inline void gdn_pre_load(const gdn_pre *p, const weft_tensor *weight, const weft_tensor *bias,
                                const weft_tensor *a_log, const weft_tensor *dt_bias)
{
    for (int i = 0; i < 3; i++) {
        const gdn_part *g = &p->part[i];
        for (int64_t h = 0; h < g->heads; h++) {
            float *taps = taps_of(p, g, h);
            memset(taps, 0, (size_t)((p->width + 1) * g->ld) * 4);
            for (int64_t d = 0; d < g->dim; d++) {
                int64_t c = g->channel + h * g->dim + d;
                for (int j = 0; j < p->width; j++)
                    taps[j * g->ld + d] =
                        get_f32(weight->dtype, weight->data, c * weight->stride[0] + j * weight->stride[1]);
                if (weft_has(bias))
                    taps[p->width * g->ld + d] = get_f32(bias->dtype, bias->data, c * bias->stride[0]);
            }
        }
    }
    vector_load(p->dt, dt_bias, p->call->value_heads, 0);
    vector_load(p->half, a_log, p->call->value_heads, 0);
    for (int64_t h = 0; h < p->gates; h += LANES) {
        vf a = vf_load(p->half + h);
        if (p->o->rounding == WEFT_GDN_PARITY)
            vf_store(p->half + h, vf_sqrt(vf_round(a_log->dtype, vf_exp(a))));
        else
            vf_store(p->half + h, vf_exp(a * 0.5f));
    }
}

#endif
