/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule, forward and decoding [G1] [G2] [G3] [G4], in one launch. Every warp has a part (heads of
 * q, k or v, heads of z to copy, or the gates) and a range of tokens, or in decoding a sequence. Reads and writes everything
 * once, but for the W - 1 rows in front of a range.
 *
 * V = 0 stands for any width, any head and any alignment: rows are read again for every token, element by element. */
#include "cuda/gdn_pre.cuh"

enum {
    WARPS = 4,
    PAST = 4,        /* the last rows, in registers */
    COPIES = 8,      /* the same for z, which needs no registers but these */
    GATE_TOKENS = 8, /* of a warp, */
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
    int64_t apart;                 /* decoding: sequences of a warp */
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
        const int64_t row = where.n < p.seq.count && has(p.conv.state) ? state_row(p.conv, where.n) : -1;
        const bool zero = where.n >= p.seq.count || (p.conv.index && row < 0);
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
    if (l.count <= 0) return;
    const T *from = (const T *)s.x.data + l.head * s.x.head;
    T *to = (T *)out.data + l.head * out.head;
    token at = token_at(p.seq, t0);
    if constexpr (V == 0) {
        for (int64_t t = t0; t < t1; t++, advance(at, p.seq))
            for (int c = l.channel; c < s.dim; c += c % GROUP == GROUP - 1 ? 31 * GROUP + 1 : 1)
                to[offset_of(out, at) + c * out.channel] =
                    t < end ? from[offset_of(s.x, at) + c * s.x.channel] : narrow<T>(0.0f);
    } else {
        for (int64_t base = t0; base < t1; base += COPIES) {
            raw<T, V> v[COPIES] = {};
            token later = at;
#pragma unroll
            for (int r = 0; r < COPIES; r++) {
                if (base + r < t1 && base + r < end) load_raw(v[r], from + offset_of(s.x, later) + l.channel);
                advance(later, p.seq);
            }
#pragma unroll
            for (int r = 0; r < COPIES; r++) {
                if (base + r >= t1) break;
                store_raw(to + offset_of(out, at) + l.channel, v[r]);
                advance(at, p.seq);
            }
        }
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
        float g = 0.0f;
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
                if (w.n < p.seq.count && !(p.conv.index && state_row(p.conv, w.n) < 0)) {
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

/* L slots of V channels, side by side. */
template <class S, int L, int V>
static __device__ __forceinline__ void put_slots(const fwd_params &p, int64_t at, const float (&past)[4][V])
{
    constexpr int per = 16 / sizeof(S);
#pragma unroll
    for (int k = 0; k < V * L / per; k++) {
        float piece[per];
#pragma unroll
        for (int e = 0; e < per; e++) piece[e] = past[4 - L + (k * per + e) % L][(k * per + e) / L];
        store<S, per>((S *)p.new_state.data + at + k * per, piece);
    }
}

template <class S, int V>
static __device__ __forceinline__ bool put_state_wide(const fwd_params &p, int64_t at, const float (&past)[4][V])
{
    if constexpr (V * sizeof(S) % 16 == 0) {
        switch (p.conv.history) {
        case 1: put_slots<S, 1>(p, at, past); return true;
        case 2: put_slots<S, 2>(p, at, past); return true;
        case 3: put_slots<S, 3>(p, at, past); return true;
        case 4: put_slots<S, 4>(p, at, past); return true;
        default: return false;
        }
    }
    return false;
}

/* Decoding: all tokens of a request, whose state is in registers all the while; the newest row is always past[3]. */
template <class T, int W, int V, bool PLAIN>
static __device__ __forceinline__ void step_heads(const fwd_params &p, int part, int unit, lane_head<W, V> &h,
                                                  const place &where, int64_t row)
{
    const section &s = p.in[part];
    const rows &out = p.out[part];
    const lane_rows<T, V> lane = lane_rows_of<T, V>(p, part, unit);
    const int64_t count = where.end - where.start;
    T *y = lane.to + offset_in(out, p.seq, where, where.start);
    if (row < 0) {
        zero_rows(p, part, lane, offset_in(out, p.seq, where, where.start), count);
        return;
    }
    const T *x = lane.from + offset_in(s.x, p.seq, where, where.start);
    raw<T, V> next = {};
    if (lane.active && count > 0) load_raw(next, x);
    read_state<T>(h.past, p.conv, lane.active ? row : -1, lane.channel);
    for (int64_t i = 0; i < count; i++, y += out.step) {
#pragma unroll
        for (int k = 0; k < 3; k++)
#pragma unroll
            for (int e = 0; e < V; e++) h.past[k][e] = h.past[k + 1][e];
        unpack(h.past[3], next);
        if (lane.active && i + 1 < count) load_raw(next, x += s.x.step);
        float u[V];
        convolve<PLAIN>(u, h, h.past[3], p.conv, lane.channel, lane.l.count, 3);
        finish_row<T, PLAIN>(p, part, s.lanes, u);
        if (lane.active) store_copies<T, V>(y, u, p.repeat[part], lane.copy_step);
    }
    if (!lane.active || p.conv.history == 0) return;
    const int64_t at = row * p.new_state.stride[0] + lane.channel * p.new_state.stride[1];
    if (p.wide_new_state && p.new_state.dtype == WEFT_F32 && put_state_wide<float>(p, at, h.past)) return;
    if (p.wide_new_state && p.new_state.dtype == number<T>::dtype && put_state_wide<T>(p, at, h.past)) return;
    store_state<T, V>(p, part, unit, where, row);
}

/* ---- launch --------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ int part_of(const fwd_params &p, int &unit)
{
    int part = PART_Q;
    while (part < PART_GATES && unit >= p.first_unit[part + 1]) part++;
    unit -= p.first_unit[part];
    return part;
}

template <class T, int W, int V, bool PLAIN>
__global__ void __launch_bounds__(WARPS * 32, 4) fwd_kernel(const fwd_params p)
{
    const int units = p.first_unit[PARTS], across = (units + WARPS - 1) / WARPS;
    int unit = (int)(blockIdx.x % (unsigned)across) * WARPS + (threadIdx.x >> 5);
    int64_t t0 = (int64_t)(blockIdx.x / (unsigned)across) * p.range, t1 = t0 + p.range;
    if (unit >= units) return;
    const int part = part_of(p, unit);
    if (part == PART_GATES) t0 += unit * GATE_TOKENS, t1 = t0 + GATE_TOKENS < t1 ? t0 + GATE_TOKENS : t1;
    if (t1 > p.seq.tokens) t1 = p.seq.tokens;
    if (t0 >= t1) return;
    if (part == PART_Z)
        copy_heads<T, V>(p, unit, t0, t1, p.seq.cu ? start_of(p.seq, p.seq.count) : p.seq.tokens);
    else if (part == PART_GATES)
        forward_gates<T>(p, t0, t1, place_of(p.seq, t0));
    else if constexpr (V == 0)
        forward_any<T>(p, part, unit, t0, t1, place_of(p.seq, t0));
    else
        forward_heads<T, W, V, PLAIN>(p, part, unit, t0, t1, place_of(p.seq, t0));
}

/* A warp has every `apart`-th sequence. Padding behind the last one belongs to one more. */
template <class T, int W, int V, bool PLAIN>
__global__ void __launch_bounds__(WARPS * 32, 4) step_kernel(const fwd_params p)
{
    const int units = p.first_unit[PARTS], across = (units + WARPS - 1) / WARPS;
    int unit = (int)(blockIdx.x % (unsigned)across) * WARPS + (threadIdx.x >> 5);
    if (unit >= units) return;
    const int part = part_of(p, unit);
    lane_head<W ? W : 1, V ? V : GROUP> h;
    wait_for_previous();
    if constexpr (V != 0)
        if (part < PART_Z) {
            const lane_rows<T, V> lane = lane_rows_of<T, V>(p, part, unit);
            read_taps<T>(h, p.conv, lane.channel, lane.l.count);
        }
#pragma unroll 1
    for (int64_t n = blockIdx.x / (unsigned)across; n < p.seq.count + (p.seq.cu != NULL); n += p.apart) {
        place where = {n, start_of(p.seq, n), n < p.seq.count ? start_of(p.seq, n + 1) : p.seq.tokens};
        if (where.end < where.start) where.end = where.start;
        const int64_t row = n < p.seq.count ? state_row(p.conv, n) : -1;
        if (part == PART_Z) {
            copy_heads<T, V>(p, unit, where.start, where.end, row < 0 ? where.start : where.end);
        } else if (part == PART_GATES) {
            forward_gates<T>(p, where.start, where.end, where);
        } else if constexpr (V == 0) {
            forward_any<T>(p, part, unit, where.start, where.end, where);
            if (row >= 0) store_state<T, 0>(p, part, unit, where, row);
        } else {
            step_heads<T, W, V, PLAIN>(p, part, unit, h, where, row);
        }
    }
}

/* The states after forward, when everybody has read those before it. */
template <class T> __global__ void final_kernel(const fwd_params p)
{
    const int units = p.first_unit[PART_Z], across = (units + WARPS - 1) / WARPS;
    int unit = (int)(blockIdx.x % (unsigned)across) * WARPS + (threadIdx.x >> 5);
    const int64_t n = blockIdx.x / (unsigned)across;
    if (unit >= units) return;
    const int part = part_of(p, unit);
    store_state<T, 0>(p, part, unit, {n, start_of(p.seq, n), start_of(p.seq, n + 1)}, n);
}

/* What forward and decoding have in common: their structs have the same fields. */
template <class Args> static fwd_params params_of(const weft_call *call, const Args *a, int vec)
{
    const weft_gdn_options &o = a->options;
    const weft_tensor *const in[4] = {&a->q, &a->k, &a->v, &a->z};
    const weft_tensor *const out[4] = {&a->query, &a->key, &a->value, &a->gate};
    const int64_t keys = call->key_heads * call->key_dim, first[4] = {0, keys, 2 * keys, 0};
    fwd_params p = {};
    p.seq = sequences_of(call, &a->cu_seqlens);
    p.conv = convolution_of(call, &a->weight, &a->bias, &a->state, &o);
    for (int i = 0; i < 4; i++) {
        const bool wanted = weft_has(out[i]) && weft_has(in[i]);
        if (!wanted) {
            p.first_unit[i + 1] = p.first_unit[i];
            continue;
        }
        p.in[i] = section_of(in[i], first[i], vec ? vec : GROUP);
        p.out[i] = rows_of(out[i]);
        p.repeat[i] = (int32_t)(out[i]->shape[2] / in[i]->shape[2]);
        p.head_step[i] = p.repeat[i] > 1 && o.head_map == WEFT_GDN_TILED ? p.in[i].heads : 1;
        p.first_unit[i + 1] = p.first_unit[i] + units_of(p.in[i]);
    }
    p.b = rows_of(&a->b), p.beta = rows_of(&a->beta), p.g = rows_of(&a->g);
    p.decay.a = rows_of(&a->a), p.decay.a_log = view_of(&a->a_log), p.decay.dt_bias = view_of(&a->dt_bias);
    p.decay.parity = o.rounding == WEFT_GDN_PARITY;
    p.l2_eps = (float)o.l2_eps, p.q_scale = (float)o.q_scale, p.beta_scale = (float)o.beta_scale;
    p.g_factor = o.g_log2 ? 1.4426950408889634f : 1.0f;
    p.l2norm = o.l2norm, p.g_chunk = o.g_chunk, p.parity = o.rounding == WEFT_GDN_PARITY;
    p.value_heads = (int32_t)call->value_heads;
    return p;
}

using fwd_function = void (*)(fwd_params);

template <class T, class Args> static int vec_of(const weft_call *call, const Args *a)
{
    const weft_tensor *const all[] = {&a->q, &a->k, &a->v, &a->z, &a->query, &a->key, &a->value, &a->gate};
    return widest<T>(call, all, 16 / (int)sizeof(T));
}

/* By channels of a lane and width; `widest` knows which there are. */
template <class T> static fwd_function fwd_of(int vec, int64_t width, bool plain)
{
    enum { FULL = 16 / sizeof(T) };
    static constexpr fwd_function all[] = {fwd_kernel<T, 2, FULL, true>, fwd_kernel<T, 3, FULL, true>,
                                           fwd_kernel<T, 4, FULL, true>};
    if (vec == FULL && plain) return all[width - 2];
    if (vec == FULL && width == 4) return fwd_kernel<T, 4, FULL, false>;
    return vec == 4 && width == 4 ? fwd_kernel<T, 4, 4, false> : fwd_kernel<T, 0, 0, false>;
}

template <class T> static fwd_function step_of(int vec, int64_t width, bool plain)
{
    enum { FULL = 16 / sizeof(T) };
    static constexpr fwd_function all[] = {step_kernel<T, 2, FULL, true>, step_kernel<T, 3, FULL, true>,
                                           step_kernel<T, 4, FULL, true>};
    if (vec == FULL && plain) return all[width - 2];
    if (vec == FULL && width == 4) return step_kernel<T, 4, FULL, false>;
    return vec == 4 && width == 4 ? step_kernel<T, 4, 4, false> : step_kernel<T, 0, 0, false>;
}

static unsigned blocks_of(int32_t units, int64_t times)
{
    return grid_of((units + WARPS - 1) / WARPS * times);
}

template <class T> static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_gdn_pre_fwd_args *a = (const weft_gdn_pre_fwd_args *)args;
    const bool plain = is_usual(&a->options, &a->bias);
    const int vec = plain || call->width == 4 ? vec_of<T>(call, a) : 0;
    fwd_params p = params_of(call, a, vec);
    WEFT_TRY(look_at_offsets(call, p.seq));
    if (p.seq.tokens > 0) {
        const weft_gdn_ranges r = weft_gdn_fwd_ranges(p.seq.tokens, p.first_unit[PART_GATES], call->sms);
        p.range = r.tokens;
        p.first_unit[PARTS] = p.first_unit[PART_GATES] + (int32_t)((r.tokens + GATE_TOKENS - 1) / GATE_TOKENS);
        WEFT_TRY(launch(call, "forward", fwd_of<T>(vec, call->width, plain),
                        {.grid = blocks_of(p.first_unit[PARTS], r.count),
                         .block = WARPS * 32,
                         .shared = (size_t)WARPS * SLOTS * 32 * (size_t)vec * sizeof(T)},
                        p));
    }
    if (!weft_has(&a->final_state) || p.seq.count == 0) return WEFT_OK;
    fwd_params f = params_of(call, a, 0);
    f.new_state = view_of(&a->final_state);
    return launch(call, "final states", final_kernel<T>,
                  {.grid = blocks_of(f.first_unit[PART_Z], f.seq.count), .block = WARPS * 32}, f);
}

template <class T> static weft_status step(const weft_call *call, const void *args)
{
    const weft_gdn_pre_step_args *a = (const weft_gdn_pre_step_args *)args;
    const bool plain = is_usual(&a->options, &a->bias);
    const int vec = plain || call->width == 4 ? vec_of<T>(call, a) : 0;
    fwd_params p = params_of(call, a, vec);
    if (p.seq.count == 0 && p.seq.tokens == 0) return WEFT_OK;
    WEFT_TRY(look_at_offsets(call, p.seq));
    if (weft_has(&a->state_index)) {
        p.conv.index = a->state_index.data, p.conv.wide_index = a->state_index.dtype == WEFT_I64;
        p.conv.index_stride = a->state_index.stride[0];
    }
    p.new_state = view_of(&a->new_state);
    p.wide_new_state = lies_side_by_side(&a->new_state, 1, p.conv.history);
    p.first_unit[PARTS] = p.first_unit[PART_GATES] + 1;
    p.apart = weft_gdn_step_groups(p.seq.count + (p.seq.cu != NULL), p.first_unit[PARTS], call->sms);
    return launch(call, "decoding", step_of<T>(vec, call->width, plain),
                  {.grid = blocks_of(p.first_unit[PARTS], p.apart), .block = WARPS * 32, .order = OVERLAP}, p);
}

const weft_kernel weft_cuda_gdn_pre_fwd[] = {
    {WEFT_BF16, 0, fwd<bf16>, NULL}, {WEFT_F16, 0, fwd<f16>, NULL}, {WEFT_F32, 0, fwd<float>, NULL}, {}};
const weft_kernel weft_cuda_gdn_pre_step[] = {
    {WEFT_BF16, 0, step<bf16>, NULL}, {WEFT_F16, 0, step<f16>, NULL}, {WEFT_F32, 0, step<float>, NULL}, {}};
