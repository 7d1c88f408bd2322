/* SPDX-License-Identifier: Apache-2.0
 *
 * What a warp does in front of the gated delta rule, forward: q, k and v; the gate; beta and g; states. */
#ifndef WEFT_CUDA_GDN_PRE_FWD_CUH
#define WEFT_CUDA_GDN_PRE_FWD_CUH

#include "cuda/gdn/gdn_pre.cuh"

enum {
    WARPS = 4,
    PAST = 4,        /* the last rows, in registers */
    GATE_TOKENS = 8, /* of a warp, or of each of its parts that have a token, */
    GATES_AHEAD = 4, /* so many at a time */
    MAX_GROUPS = WEFT_GDN_MAX_DIM / (32 * GROUP)
};
enum part { PART_Q, PART_K, PART_V, PART_Z, PART_GATES, PARTS };

struct fwd_params {
    sequences seq;
    convolution conv;
    section in[4];                   /* q, k, v, z */
    rows out[4];                     /* query, key, value, gate */
    int32_t repeat[4], head_step[4]; /* copies of a head, and how many heads apart they lie */
    rows b, beta, g;
    decays decay;
    float l2_eps, q_scale, beta_scale, g_factor;
    int32_t l2norm, g_chunk, parity, value_heads;
    int32_t first_unit[PARTS + 1]; /* units of warps: the parts one after the other */
    int64_t range;                 /* tokens of a warp */
    int32_t gate_tokens;           /* of a warp that has gates */
    int64_t apart;                 /* decoding: sequences of a warp */
    int32_t searched; /* decoding: indices that a warp compares with its own; 0: no row is named twice */
    view new_state;
    bool wide_new_state;
};

/* ---- q, k, v ------------------------------------------------------------------------------------------------------------- */

/* The heads of the result that a head goes to: `repeat` of them from here on, head_step apart. */
static __device__ __forceinline__ int64_t first_head(const fwd_params &p, int part, int head)
{
    return p.head_step[part] == 1 ? (int64_t)head * p.repeat[part] : head;
}

/* u becomes y. */
template <class T, bool PLAIN, int V>
static __device__ __forceinline__ void activate(const fwd_params &p, float (&u)[V])
{
    if (PLAIN || !p.conv.linear) {
#pragma unroll
        for (int e = 0; e < V; e++) u[e] = silu(u[e]);
    }
    if (!PLAIN && p.parity) {
#pragma unroll
        for (int e = 0; e < V; e++) u[e] = rounded<T>(u[e]);
    }
}

static __device__ __forceinline__ float scale_of(const fwd_params &p, int part, float squares)
{
    const float r = part < PART_V && p.l2norm ? reciprocal_root(squares + p.l2_eps) : 1.0f;
    return part == PART_Q ? r * p.q_scale : r;
}

/* One lane's part of a row of results, in all heads that get it. */
template <class T, int V>
static __device__ __forceinline__ void store_copies(T *to, const float (&y)[V], int repeat, int64_t step)
{
    raw<T, V> packed;
    pack(packed, y);
    store_raw(to, packed);
    if (repeat > 1) store_raw(to += step, packed);
#pragma unroll 1
    for (int i = 2; i < repeat; i++) store_raw(to += step, packed);
}

/* From the convolution's sum to what is stored. */
template <class T, bool PLAIN, int V>
static __device__ __forceinline__ void finish_row(const fwd_params &p, int part, int lanes, float (&u)[V])
{
    float squares[1] = {};
    activate<T, PLAIN>(p, u);
    if (part == PART_V) return;
    if (PLAIN || p.l2norm) {
        squares[0] = lane_sum(u, u);
        team_sums(squares, lanes);
    }
    const float scale = scale_of(p, part, squares[0]);
#pragma unroll
    for (int e = 0; e < V; e++) u[e] *= scale;
}

/* A lane's channels of a head and where they go. */
template <class T, int V> struct lane_rows {
    lane_place l;
    bool active;
    int channel;
    const T *from;
    T *to;
    int64_t copy_step;
};

template <class T, int V>
static __device__ __forceinline__ lane_rows<T, V> lane_rows_of(const fwd_params &p, int part, int unit)
{
    const section &s = p.in[part];
    const rows &out = p.out[part];
    lane_rows<T, V> r;
    r.l = place_in<V>(s, unit);
    r.active = r.l.count > 0;
    r.channel = s.first + r.l.head * s.dim + r.l.channel;
    r.from = (const T *)s.x.data + r.l.head * s.x.head + r.l.channel;
    r.to = (T *)out.data + first_head(p, part, r.l.head) * out.head + r.l.channel;
    r.copy_step = p.head_step[part] * out.head;
    return r;
}

template <class T, int V>
static __device__ __forceinline__ void zero_rows(const fwd_params &p, int part, const lane_rows<T, V> &r,
                                                 int64_t offset, int64_t count)
{
    const float zeros[V] = {};
    T *to = r.to + offset;
    if (!r.active) return;
#pragma unroll 1
    for (int64_t i = 0; i < count; i++, to += p.out[part].step)
        store_copies<T, V>(to, zeros, p.repeat[part], r.copy_step);
}

template <class T, int W, int V, bool PLAIN>
static __device__ __forceinline__ void forward_heads(const fwd_params &p, int part, int unit, int64_t t0,
                                                     int64_t t1, place where)
{
    const section &s = p.in[part];
    const rows &out = p.out[part];
    const lane_rows<T, V> lane = lane_rows_of<T, V>(p, part, unit);
    extern __shared__ __align__(16) char shared[];
    using slot = slot_of<T, V>;
    const char *const ring = shared + (threadIdx.x >> 5) * SLOTS * slot::size + slot::lane();
    const uint32_t ring_at = shared_address(ring);
    lane_head<W, V> h;
    read_taps<T>(h, p.conv, lane.channel, lane.l.count);
    for (int64_t t = t0; t < t1;) { /* a sequence, or what the range has of it */
        T *y = lane.to + offset_in(out, p.seq, where, t);
        if (where.n >= p.seq.count) {
            zero_rows(p, part, lane, t * out.step, t1 - t);
            return;
        }
        const T *x = lane.from + offset_in(s.x, p.seq, where, t);
        const int64_t end = where.end < t1 ? where.end : t1;
        const int count = (int)(end - t);
        const int mine = lane.active ? count : 0;
        auto fetch = [&](int i, int at) {
            slot::copy(ring_at + at, x, i < mine);
            copy_commit();
            x += s.x.step;
        };
#pragma unroll 1
        for (int i = 0; i < SLOTS; i++) fetch(i, i * slot::size);
        rewind<T>(h, s, p.conv, p.seq, where, t, lane.l);
        for (int base = 0; base < count; base += PAST) {
            const int first = (base & (SLOTS - 1)) * slot::size;
#pragma unroll
            for (int r = 0; r < PAST; r++) {
                const int i = base + r, at = first + r * slot::size;
                if (i >= count) break;
                float u[V];
                copy_wait<SLOTS - 1>();
                slot::read(h.past[r], ring + at);
                convolve<PLAIN>(u, h, h.past[r], p.conv, lane.channel, lane.l.count, r);
                finish_row<T, PLAIN>(p, part, s.lanes, u);
                fetch(i + SLOTS, at); /* the slot has been used */
                if (lane.active) store_copies<T, V>(y, u, p.repeat[part], lane.copy_step);
                y += out.step;
            }
        }
        copy_wait<0>();
        t = end;
        if (t < t1) next_sequence(p.seq, where, t);
    }
}

/* The same in the same order for anything else. */
template <class T>
static __device__ void forward_any(const fwd_params &p, int part, int unit, int64_t t0, int64_t t1, place where)
{
    const section &s = p.in[part];
    const rows &out = p.out[part];
    const lane_place l = place_in<GROUP>(s, unit);
    const int groups = (s.dim + 32 * GROUP - 1) / (32 * GROUP);
    token now = token_at(p.seq, t0);
    float y[MAX_GROUPS][GROUP];
    for (int64_t t = t0; t < t1; t++, advance(now, p.seq)) {
        if (t == where.end) next_sequence(p.seq, where, t);
        const int64_t row = where.n < p.seq.count && has(p.conv.state) ? state_row(p.conv.cache, where.n) : -1;
        const bool zero = where.n >= p.seq.count;
        float squares[MAX_GROUPS] = {};
        for (int k = 0; k < groups; k++)
            for (int e = 0; e < GROUP; e++) {
                const int c = l.channel + k * 32 * GROUP + e;
                y[k][e] = 0.0f;
                if (l.head >= s.heads || c >= s.dim || zero) continue;
                y[k][e] = convolve_any<T>(s, p.conv, p.seq, where, row, t, l.head, c);
                if (!p.conv.linear) y[k][e] = silu(y[k][e]);
                if (p.parity) y[k][e] = rounded<T>(y[k][e]);
                squares[k] = fmaf(y[k][e], y[k][e], squares[k]);
            }
        const float scale = scale_of(p, part, part < PART_V && p.l2norm ? groups_sum(squares, s.lanes) : 0.0f);
        for (int k = 0; k < groups; k++)
            for (int e = 0; e < GROUP; e++) {
                const int c = l.channel + k * 32 * GROUP + e;
                if (l.head >= s.heads || c >= s.dim) continue;
                int64_t at = offset_of(out, now) + first_head(p, part, l.head) * out.head + c * out.channel;
                for (int i = 0; i < p.repeat[part]; i++, at += p.head_step[part] * out.head)
                    ((T *)out.data)[at] = narrow<T>(zero ? 0.0f : y[k][e] * scale);
            }
    }
}

/* ---- z ------------------------------------------------------------------------------------------------------------------ */

/* Tokens from `end` on are zero. */
template <class T, int V>
static __device__ __forceinline__ void copy_heads(const fwd_params &p, int unit, int64_t t0, int64_t t1,
                                                  int64_t end)
{
    const section &s = p.in[PART_Z];
    const rows &out = p.out[PART_Z];
    const lane_place l = place_in<(V ? V : GROUP)>(s, unit);
    if constexpr (V != 0) {
        copy_rows<T, V>(s.x, out, p.seq, l, t0, t1, end);
    } else {
        if (l.count <= 0) return;
        const T *from = (const T *)s.x.data + l.head * s.x.head;
        T *to = (T *)out.data + l.head * out.head;
        token at = token_at(p.seq, t0);
        for (int64_t t = t0; t < t1; t++, advance(at, p.seq))
            for (int c = l.channel; c < s.dim; c += c % GROUP == GROUP - 1 ? 31 * GROUP + 1 : 1)
                to[offset_of(out, at) + c * out.channel] =
                    t < end ? from[offset_of(s.x, at) + c * s.x.channel] : narrow<T>(0.0f);
    }
}

/* ---- beta and g --------------------------------------------------------------------------------------------------------- */

/* Lanes are heads. Sums within a chunk begin anew at its first token, wherever the walk begins. */
template <class T>
static __device__ __forceinline__ void forward_gates(const fwd_params &p, int64_t t0, int64_t t1, place where)
{
    for (int h = threadIdx.x & 31; h < p.value_heads; h += 32) {
        const float half = half_rate(p.decay, h), bias = gate_bias(p.decay, h);
        const T *a = (const T *)p.decay.a.data + h * p.decay.a.head, *b = (const T *)p.b.data + h * p.b.head;
        auto decay = [&](float x) { return gm_decay(x + bias, half, -1.0f); };
        place w = where;
        float g = -0.0f; /* a sum of nothing but -0 stays one */
        if (p.g_chunk && w.n < p.seq.count)
            for (int64_t k = t0 - (t0 - w.start) % p.g_chunk; k < t0; k++)
                g += decay(widen(a[offset_of(p.decay.a, token_at(p.seq, k))]));
        token now = token_at(p.seq, t0), later = now;
        for (int64_t base = t0; base < t1; base += GATES_AHEAD) {
            float xa[GATES_AHEAD], xb[GATES_AHEAD];
#pragma unroll
            for (int r = 0; r < GATES_AHEAD; r++) {
                xa[r] = base + r < t1 ? widen(a[offset_of(p.decay.a, later)]) : 0.0f;
                xb[r] = base + r < t1 ? widen(b[offset_of(p.b, later)]) : 0.0f;
                advance(later, p.seq);
            }
#pragma unroll
            for (int r = 0; r < GATES_AHEAD; r++) {
                const int64_t t = base + r;
                if (t >= t1) break;
                if (t == w.end) next_sequence(p.seq, w, t);
                float beta = 0.0f, out = 0.0f;
                if (w.n < p.seq.count) {
                    const float one = decay(xa[r]);
                    g = p.g_chunk && (t - w.start) % p.g_chunk ? g + one : one;
                    out = g * p.g_factor;
                    beta = gm_beta(xb[r], p.beta_scale);
                }
                put(p.beta, offset_of(p.beta, now) + h * p.beta.head, beta);
                put(p.g, offset_of(p.g, now) + h * p.g.head, out);
                advance(now, p.seq);
            }
        }
    }
}

/* The same where g is not summed: no token waits for another. Tokens from `end` on are zero. */
template <class T>
static __device__ __forceinline__ void forward_each_gate(const fwd_params &p, int64_t t0, int64_t t1, int64_t end)
{
    const int lane = (int)(threadIdx.x & 31), wide = gate_lanes(p.value_heads), side = 32 / wide;
    for (int h = lane % wide; h < p.value_heads; h += 32) {
        const float half = half_rate(p.decay, h), bias = gate_bias(p.decay, h);
        run tokens;
        for (int64_t t = t0; t < t1; t += tokens.count) {
            tokens = run_at(p.seq, t, t1, end);
            auto at = [&](const rows &r, int i) { return offset_of(r, tokens.at) + i * r.step + h * r.head; };
#pragma unroll 1
            for (int base = lane / wide; base < tokens.count; base += side * GATES_AHEAD) {
                float a[GATES_AHEAD] = {}, b[GATES_AHEAD] = {};
#pragma unroll
                for (int r = 0; r < GATES_AHEAD; r++) {
                    const int i = base + r * side;
                    if (i >= tokens.there) break;
                    a[r] = widen(((const T *)p.decay.a.data)[at(p.decay.a, i)]);
                    b[r] = widen(((const T *)p.b.data)[at(p.b, i)]);
                }
#pragma unroll
                for (int r = 0; r < GATES_AHEAD; r++) {
                    const int i = base + r * side;
                    if (i >= tokens.count) break;
                    const bool there = i < tokens.there;
                    put(p.beta, at(p.beta, i), there ? gm_beta(b[r], p.beta_scale) : 0.0f);
                    put(p.g, at(p.g, i), there ? gm_decay(a[r] + bias, half, -1.0f) * p.g_factor : 0.0f);
                }
            }
        }
    }
}

/* ---- states --------------------------------------------------------------------------------------------------------------- */

/* One lane's channels of a state after its sequence. In place, a slot is read before it is written: slots move towards 0. */
template <class T, int V>
static __device__ __forceinline__ void store_state(const fwd_params &p, int part, int unit, const place &where,
                                                   int64_t row)
{
    const section &s = p.in[part];
    const lane_place l = place_in<(V ? V : GROUP)>(s, unit);
    if (l.head >= s.heads) return;
    for (int first = l.channel; first < s.dim; first += V ? s.dim : 32 * GROUP)
        for (int c = first; c < first + (V ? V : GROUP) && c < s.dim; c++) {
            const int64_t own =
                row * p.new_state.stride[0] + (s.first + l.head * s.dim + c) * p.new_state.stride[1];
            for (int slot = 0; slot < p.conv.history; slot++)
                put(p.new_state, own + slot * p.new_state.stride[2],
                    past_at<T>(s, p.conv, p.seq, where, has(p.conv.state) ? row : -1,
                               where.end - p.conv.history + slot, l.head, c));
        }
}

static __device__ __forceinline__ int part_of(const fwd_params &p, int &unit)
{
    int part = PART_Q;
    while (part < PART_GATES && unit >= p.first_unit[part + 1]) part++;
    unit -= p.first_unit[part];
    return part;
}

#endif
