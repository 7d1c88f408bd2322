/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule, backward [G1] [G2] [G3] [G4]: one pass over the activations, then a small sum.
 *
 * `backward` recomputes a token's head from the projection, takes the gradient back through norm and activation to du, and
 * W - 1 tokens later has all of a row's d_x, which it writes once. A range of tokens ends W - 1 tokens behind its last row,
 * within its sequence. `finish` adds the ranges' parameter gradients in order. How tokens are cut into ranges depends on the
 * shapes alone. W = 0 stands for any width, head, alignment and rounding. */
#include "cuda/gdn_pre.cuh"

enum { WARPS = 4, BATCH = 4, MAX_GROUPS = WEFT_GDN_MAX_DIM / (32 * VEC), RING = WEFT_GDN_MAX_WIDTH };
enum part { PART_Q, PART_K, PART_V, PART_Z, PART_GATES, PARTS };

struct bwd_params {
    sequences seq;
    convolution conv;
    section in[4];                   /* q, k, v; of z only the shape */
    rows d_out[4];                   /* d_query, d_key, d_value, d_gate */
    rows d_in[4];                    /* d_q, d_k, d_v, d_z */
    int32_t repeat[4], head_step[4]; /* heads of d_out that come back to one, and how many heads apart they lie */
    view d_final, d_state;
    rows b, d_beta, d_g, d_b, d_a;
    decays decay;
    float l2_eps, q_scale, beta_scale, g_factor;
    int32_t l2norm, g_chunk, value_heads, channels;
    int32_t first_unit[PARTS + 1];
    int64_t range;
    float
        *partial; /* [ranges][(W + 1) C + 2 Hv]: d_weight by taps, d_bias, d_a_log, d_dt_bias; NULL: nobody asks */
};

static __host__ __device__ __forceinline__ int64_t partial_size(int64_t width, int64_t channels, int64_t heads)
{
    return (width + 1) * channels + 2 * heads;
}

static __device__ __forceinline__ int64_t first_head(const bwd_params &p, int part, int head)
{
    return p.head_step[part] == 1 ? (int64_t)head * p.repeat[part] : head;
}

/* Adds what a final state says of row tau, and stores the gradient of that row, or of a slot of the state in front of the
 * sequence. */
template <class T>
static __device__ __forceinline__ void emit_one(const bwd_params &p, int part, const place &where, int64_t tau,
                                                const token &at, int head, int channel, float v)
{
    const section &s = p.in[part];
    const int own = s.first + head * s.dim + channel;
    const int64_t slot = tau - (where.end - p.conv.history);
    if (has(p.d_final) && slot >= 0)
        v += get(p.d_final, where.n * p.d_final.stride[0] + own * p.d_final.stride[1] + slot * p.d_final.stride[2]);
    if (tau >= where.start) {
        if (has(p.d_in[part]))
            put(p.d_in[part],
                offset_of(p.d_in[part], at) + head * p.d_in[part].head + channel * p.d_in[part].channel, v);
    } else if (has(p.d_state)) {
        const int64_t into = p.conv.history + (tau - where.start);
        put(p.d_state, where.n * p.d_state.stride[0] + own * p.d_state.stride[1] + into * p.d_state.stride[2], v);
    }
}

/* ---- q, k, v ------------------------------------------------------------------------------------------------------------- */

template <class T, int W>
static __device__ __forceinline__ void backward_heads(const bwd_params &p, int part, int unit, int64_t t0,
                                                      int64_t t1, float *partial)
{
    const section &s = p.in[part];
    const rows &d_out = p.d_out[part], &d_in = p.d_in[part];
    const lane_place l = place_in(s, unit);
    const bool active = l.count > 0;
    const int channel = s.first + l.head * s.dim + l.channel;
    const T *from = (const T *)s.x.data + l.head * s.x.head + l.channel;
    const int64_t up = first_head(p, part, l.head) * d_out.head + l.channel,
                  up_step = p.head_step[part] * d_out.head;
    lane_head<W> h;
    float du[4][VEC] = {}, dw[W][VEC] = {}, db[VEC] = {};
    read_taps(h, p.conv, channel, l.count);

    place where = place_of(p.seq, t0);
    bool zero = where.n >= p.seq.count;
    auto rewind = [&](int slot, int64_t t) {
#pragma unroll
        for (int j = 1; j < W; j++) {
#pragma unroll
            for (int e = 0; e < VEC; e++) h.past[(slot - j) & 3][e] = du[(slot - j) & 3][e] = 0.0f;
            if (active && !zero) read_past<T>(h.past[(slot - j) & 3], s, p.conv, p.seq, where, t - j, l);
        }
    };
    /* Row tau = t - back, whose last known du is that of token t in `slot`. */
    auto emit = [&](int slot, int64_t t, int back, const token &now) {
        const int64_t tau = t - back;
        if (tau >= t1 || (tau >= where.start ? tau < t0 : where.start < t0 || tau < where.start - (W - 1))) return;
        float v[VEC];
#pragma unroll
        for (int e = 0; e < VEC; e++) {
            v[e] = h.weight[W - 1][e] * du[(slot - back) & 3][e];
#pragma unroll
            for (int k = 1; k < W; k++)
                if (k <= back) v[e] = fmaf(h.weight[W - 1 - k][e], du[(slot - back + k) & 3][e], v[e]);
        }
        const token at = {now.b, now.s - back};
        if (tau >= where.start && !(has(p.d_final) && tau >= where.end - p.conv.history)) {
            if (has(d_in))
                put_wide<T, VEC>(view{d_in.data, d_in.dtype, d_in.add, {0, 0, 0}},
                                 offset_of(d_in, at) + l.head * d_in.head + l.channel, v);
            return;
        }
#pragma unroll
        for (int e = 0; e < VEC; e++) emit_one<T>(p, part, where, tau, at, l.head, l.channel + e, v[e]);
    };

    rewind(0, t0);
    token now = token_at(p.seq, t0);
    int64_t stop = t1 + W - 1 < p.seq.tokens ? t1 + W - 1 : p.seq.tokens;
    for (int64_t base = t0; base < stop; base += BATCH) {
        raw<T, VEC> x[BATCH] = {};
        float dn[BATCH][VEC] = {};
        token later = now;
#pragma unroll
        for (int r = 0; r < BATCH; r++) {
            if (active && base + r < stop) {
                load_raw(x[r], from + offset_of(s.x, later));
                if (has(d_out)) {
                    const int64_t at = offset_of(d_out, later) + up;
                    for (int i = 0; i < p.repeat[part]; i++) {
                        float one[VEC];
                        if (sizeof(T) == 4 || d_out.dtype == WEFT_F32)
                            load<float, VEC>(one, (const float *)d_out.data + at + i * up_step);
                        else
                            load<T, VEC>(one, (const T *)d_out.data + at + i * up_step);
#pragma unroll
                        for (int e = 0; e < VEC; e++) dn[r][e] += one[e];
                    }
                }
            }
            advance(later, p.seq);
        }
#pragma unroll
        for (int r = 0; r < BATCH; r++) {
            const int64_t t = base + r;
            if (t >= stop) break;
            if (t == where.end) {
                if (t >= t1) { /* the rows behind the range belong to another sequence */
                    stop = t;
                    break;
                }
                next_sequence(p.seq, where, t);
                zero = where.n >= p.seq.count;
                rewind(r, t);
            }
            unpack(h.past[r], x[r]);
            float u[VEC], y[VEC], slope[VEC], squares = 0.0f, dot = 0.0f;
            convolve(u, h, r);
#pragma unroll
            for (int e = 0; e < VEC; e++) {
                slope[e] = 1.0f, y[e] = u[e];
                if (!p.conv.linear) slope[e] = silu_slope(u[e], &y[e]);
                if (part == PART_Q) dn[r][e] *= p.q_scale;
                squares = fmaf(y[e], y[e], squares), dot = fmaf(y[e], dn[r][e], dot);
            }
            if (part < PART_V && p.l2norm) {
                squares = team_sum(active ? squares : 0.0f, s.lanes);
                dot = team_sum(active ? dot : 0.0f, s.lanes);
                const float scale = 1.0f / sqrtf(squares + p.l2_eps), down = scale * dot;
#pragma unroll
                for (int e = 0; e < VEC; e++) dn[r][e] = scale * (dn[r][e] - y[e] * scale * down);
            }
#pragma unroll
            for (int e = 0; e < VEC; e++) {
                du[r][e] = zero ? 0.0f : dn[r][e] * slope[e];
                if (t >= t1 || zero) continue;
                db[e] += du[r][e];
#pragma unroll
                for (int j = 0; j < W; j++) dw[j][e] = fmaf(du[r][e], h.past[(r + 5 - W + j) & 3][e], dw[j][e]);
            }
            if (active) {
                if (zero) {
                    float v[VEC] = {};
                    if (has(d_in) && t < t1)
                        put_wide<T, VEC>(view{d_in.data, d_in.dtype, d_in.add, {0, 0, 0}},
                                         offset_of(d_in, now) + l.head * d_in.head + l.channel, v);
                } else {
                    emit(r, t, W - 1, now);
                    if (t == where.end - 1) {
#pragma unroll
                        for (int back = W - 2; back >= 0; back--) emit(r, t, back, now);
                    }
                }
            }
            advance(now, p.seq);
        }
    }
    if (!partial || !active) return;
#pragma unroll
    for (int j = 0; j < W; j++) store<float, VEC>(partial + (int64_t)j * p.channels + channel, dw[j]);
    store<float, VEC>(partial + (int64_t)W * p.channels + channel, db);
}

/* The same for anything else, a channel after the other; what a team remembers lies in local memory. */
template <class T>
static __device__ void backward_any(const bwd_params &p, int part, int unit, int64_t t0, int64_t t1, float *partial)
{
    const section &s = p.in[part];
    const rows &d_out = p.d_out[part];
    const lane_place l = place_in(s, unit);
    const int groups = (s.dim + 32 * VEC - 1) / (32 * VEC), width = p.conv.width;
    const bool parity = p.decay.parity, norm = part < PART_V && p.l2norm;
    float du[RING][MAX_GROUPS][VEC], dw[WEFT_GDN_MAX_WIDTH + 1][MAX_GROUPS][VEC] = {};
    float u[MAX_GROUPS][VEC], y[MAX_GROUPS][VEC], dn[MAX_GROUPS][VEC];
    auto each = [&](auto &&f) { /* of this lane's channels */
                                for (int k = 0; k < groups; k++)
                                    for (int e = 0; e < VEC; e++)
                                        if (l.head < s.heads && l.channel + k * 32 * VEC + e < s.dim)
                                            f(k, e, l.channel + k * 32 * VEC + e);
    };
    place where = place_of(p.seq, t0);
    token now = token_at(p.seq, t0);
    memset(du, 0, sizeof du);
    const int64_t stop = t1 + width - 1 < p.seq.tokens ? t1 + width - 1 : p.seq.tokens;
    for (int64_t t = t0; t < stop; t++, advance(now, p.seq)) {
        if (t == where.end) {
            if (t >= t1) break;
            next_sequence(p.seq, where, t);
            memset(du, 0, sizeof du);
        }
        if (where.n >= p.seq.count) {
            each([&](int, int, int c) {
                const rows &to = p.d_in[part];
                if (has(to) && t < t1) put(to, offset_of(to, now) + l.head * to.head + c * to.channel, 0.0f);
            });
            continue;
        }
        float squares = 0.0f, dot = 0.0f;
        each([&](int k, int e, int c) {
            const float v = convolve_any<T>(s, p.conv, p.seq, where, t, l.head, c);
            float up = 0.0f;
            u[k][e] = parity ? rounded<T>(v) : v;
            y[k][e] = p.conv.linear ? v : silu(v);
            if (parity) y[k][e] = rounded<T>(y[k][e]);
            for (int i = 0; has(d_out) && i < p.repeat[part]; i++)
                up += get(d_out, offset_of(d_out, now) +
                                     (first_head(p, part, l.head) + i * p.head_step[part]) * d_out.head +
                                     c * d_out.channel);
            if (parity && part < PART_V) up = rounded<T>(up);
            dn[k][e] = part == PART_Q ? up * p.q_scale : up;
            squares = fmaf(y[k][e], y[k][e], squares), dot = fmaf(y[k][e], dn[k][e], dot);
        });
        float scale = 1.0f, down = 0.0f;
        if (norm) {
            squares = team_sum(squares, s.lanes), dot = team_sum(dot, s.lanes);
            scale = 1.0f / sqrtf(squares + p.l2_eps), down = scale * dot;
        }
        const int slot = (int)((t - t0) % RING);
        each([&](int k, int e, int c) {
            float dy = norm ? scale * (dn[k][e] - y[k][e] * scale * down) : dn[k][e], unused;
            if (parity) dy = rounded<T>(dy);
            du[slot][k][e] = p.conv.linear ? dy : dy * silu_slope(u[k][e], &unused);
            if (t >= t1) return;
            for (int j = 0; j < width; j++)
                dw[j][k][e] =
                    fmaf(du[slot][k][e], past_at<T>(s, p.conv, p.seq, where, t - (width - 1) + j, l.head, c),
                         dw[j][k][e]);
            dw[width][k][e] += du[slot][k][e];
        });
        for (int back = width - 1; back >= (t == where.end - 1 ? 0 : width - 1); back--) {
            const int64_t tau = t - back;
            if (tau >= t1 || (tau >= where.start ? tau < t0 : where.start < t0)) continue;
            each([&](int k, int e, int c) {
                const int own = s.first + l.head * s.dim + c;
                float v = 0.0f;
                for (int i = 0; i <= back; i++) {
                    const float w = get(p.conv.weight,
                                        own * p.conv.weight.stride[0] + (width - 1 - i) * p.conv.weight.stride[1]);
                    const float d = tau + i < where.start ? 0.0f : du[(t - t0 - back + i + 2 * RING) % RING][k][e];
                    v = i ? fmaf(w, d, v) : w * d;
                }
                emit_one<T>(p, part, where, tau, {now.b, now.s - back}, l.head, c, v);
            });
        }
    }
    if (!partial) return;
    each([&](int k, int e, int c) {
        for (int j = 0; j <= width; j++)
            partial[(int64_t)j * p.channels + s.first + l.head * s.dim + c] = dw[j][k][e];
    });
}

/* ---- z ------------------------------------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void backward_gate(const bwd_params &p, int unit, int64_t t0, int64_t t1)
{
    const section &s = p.in[PART_Z];
    const rows &from = p.d_out[PART_Z], &to = p.d_in[PART_Z];
    const lane_place l = place_in(s, unit);
    const int64_t end = p.seq.cu ? start_of(p.seq, p.seq.count) : p.seq.tokens;
    token at = token_at(p.seq, t0);
    if (l.head >= s.heads) return;
    for (int64_t t = t0; t < t1; t++, advance(at, p.seq))
        for (int c = l.channel; c < s.dim; c += c % VEC == VEC - 1 ? 31 * VEC + 1 : 1)
            put(to, offset_of(to, at) + l.head * to.head + c * to.channel,
                has(from) && t < end ? get(from, offset_of(from, at) + l.head * from.head + c * from.channel)
                                     : 0.0f);
}

template <class T>
static __device__ __forceinline__ void backward_gate_wide(const bwd_params &p, int unit, int64_t t0, int64_t t1)
{
    const section &s = p.in[PART_Z];
    const rows &from = p.d_out[PART_Z], &to = p.d_in[PART_Z];
    const view a = {from.data, from.dtype, 0, {0, 0, 0}}, b = {to.data, to.dtype, to.add, {0, 0, 0}};
    const lane_place l = place_in(s, unit);
    const int64_t end = p.seq.cu ? start_of(p.seq, p.seq.count) : p.seq.tokens;
    token at = token_at(p.seq, t0);
    if (l.count <= 0) return;
    for (int64_t base = t0; base < t1; base += BATCH) {
        float v[BATCH][VEC] = {};
        token later = at;
#pragma unroll
        for (int r = 0; r < BATCH; r++) {
            if (has(from) && base + r < t1 && base + r < end)
                get_wide<T, VEC>(v[r], a, offset_of(from, later) + l.head * from.head + l.channel);
            advance(later, p.seq);
        }
#pragma unroll
        for (int r = 0; r < BATCH; r++) {
            if (base + r >= t1) break;
            put_wide<T, VEC>(b, offset_of(to, at) + l.head * to.head + l.channel, v[r]);
            advance(at, p.seq);
        }
    }
}

/* ---- beta and g --------------------------------------------------------------------------------------------------------- */

/* Lanes are heads; a chunk's sums contain a token's g from there to the chunk's end, so the walk is backward. */
static __device__ __forceinline__ void backward_gates(const bwd_params &p, int64_t t0, int64_t t1, float *partial)
{
    const place last = place_of(p.seq, t1 - 1);
    for (int first = 0; first < p.value_heads; first += 32) {
        const int h = first + (threadIdx.x & 31);
        const bool active = h < p.value_heads;
        const float half = active ? half_rate(p.decay, h) : 0.0f;
        auto upstream = [&](const token &at) {
            return has(p.d_g) && active ? get(p.d_g, offset_of(p.d_g, at) + h * p.d_g.head) * p.g_factor : 0.0f;
        };
        place w = last;
        float d_g = 0.0f, d_a_log = 0.0f, d_dt = 0.0f;
        if (p.g_chunk && w.n < p.seq.count) {
            int64_t end = t1 - 1 - (t1 - 1 - w.start) % p.g_chunk + p.g_chunk;
            if (end > w.end) end = w.end;
            for (int64_t t = end - 1; t >= t1; t--)
                d_g = t == end - 1 ? upstream(token_at(p.seq, t)) : d_g + upstream(token_at(p.seq, t));
        }
        for (int64_t t = t1 - 1; t >= t0; t--) {
            if (t < w.start) w = place_of(p.seq, t);
            const token at = token_at(p.seq, t);
            float d_a = 0.0f, d_b = 0.0f;
            if (w.n < p.seq.count && active) {
                const float x = gate_input(p.decay, offset_of(p.decay.a, at), h), up = upstream(at);
                d_g = p.g_chunk && t + 1 < w.end && (t + 1 - w.start) % p.g_chunk ? d_g + up : up;
                d_a = gm_decay_slope(x, half, -d_g);
                d_a_log += gm_decay(x, half, -d_g);
                d_dt += d_a;
                if (has(p.d_beta))
                    d_b = get(p.d_beta, offset_of(p.d_beta, at) + h * p.d_beta.head) *
                          gm_beta_slope(get(p.b, offset_of(p.b, at) + h * p.b.head), p.beta_scale);
            }
            if (!active) continue;
            if (has(p.d_a)) put(p.d_a, offset_of(p.d_a, at) + h * p.d_a.head, d_a);
            if (has(p.d_b)) put(p.d_b, offset_of(p.d_b, at) + h * p.d_b.head, d_b);
        }
        if (!partial || !active) continue;
        float *own = partial + (int64_t)(p.conv.width + 1) * p.channels;
        own[h] = d_a_log, own[p.value_heads + h] = d_dt;
    }
}

/* ---- kernels -------------------------------------------------------------------------------------------------------------- */

template <class T, int W>
__global__ void __launch_bounds__(WARPS * 32, W == 0 ? 2 : 3) bwd_kernel(const bwd_params p)
{
    const int units = p.first_unit[PARTS], across = (units + WARPS - 1) / WARPS;
    int unit = (int)(blockIdx.x % (unsigned)across) * WARPS + (threadIdx.x >> 5), part = PART_Q;
    const int64_t range = blockIdx.x / (unsigned)across, t0 = range * p.range;
    const int64_t t1 = t0 + p.range < p.seq.tokens ? t0 + p.range : p.seq.tokens;
    if (unit >= units) return;
    while (part < PART_GATES && unit >= p.first_unit[part + 1]) part++;
    unit -= p.first_unit[part];
    float *partial = p.partial ? p.partial + range * partial_size(p.conv.width, p.channels, p.value_heads) : NULL;
    if (part == PART_GATES) {
        backward_gates(p, t0, t1, partial);
    } else if constexpr (W == 0) {
        if (part == PART_Z)
            backward_gate(p, unit, t0, t1);
        else
            backward_any<T>(p, part, unit, t0, t1, partial);
    } else {
        if (part == PART_Z)
            backward_gate_wide<T>(p, unit, t0, t1);
        else
            backward_heads<T, W>(p, part, unit, t0, t1, partial);
    }
}

/* Slots of d_state that no token's convolution has read: they were handed through, or nobody came. */
__global__ void state_kernel(const bwd_params p)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / p.channels;
    const int c = (int)(i - n * p.channels), history = p.conv.history;
    if (n >= p.seq.count) return;
    const int64_t length = start_of(p.seq, n + 1) - start_of(p.seq, n);
    const int end = length > 0 ? history - (p.conv.width - 1) : history;
    for (int slot = 0; slot < end; slot++) {
        const int64_t from = slot - (length > 0 ? length : 0);
        const float v =
            has(p.d_final) && from >= 0
                ? get(p.d_final, n * p.d_final.stride[0] + c * p.d_final.stride[1] + from * p.d_final.stride[2])
                : 0.0f;
        put(p.d_state, n * p.d_state.stride[0] + c * p.d_state.stride[1] + slot * p.d_state.stride[2], v);
    }
}

struct finish_params {
    const float *partial;
    int64_t ranges;
    int32_t width, channels, heads;
    view d_weight, d_bias, d_a_log, d_dt_bias;
};

/* A thread a number; ranges in order, in double precision. */
__global__ void finish_kernel(const finish_params p)
{
    const int64_t size = partial_size(p.width, p.channels, p.heads);
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, taps = (int64_t)p.width * p.channels;
    if (i >= size) return;
    double sum = 0.0;
#pragma unroll 8
    for (int64_t r = 0; r < p.ranges; r++) sum += (double)p.partial[r * size + i];
    const float v = (float)sum;
    if (i < taps) {
        const int64_t j = i / p.channels, c = i - j * p.channels;
        if (has(p.d_weight)) put(p.d_weight, c * p.d_weight.stride[0] + j * p.d_weight.stride[1], v);
    } else if (i < taps + p.channels) {
        if (has(p.d_bias)) put(p.d_bias, (i - taps) * p.d_bias.stride[0], v);
    } else if (i < taps + p.channels + p.heads) {
        if (has(p.d_a_log)) put(p.d_a_log, (i - taps - p.channels) * p.d_a_log.stride[0], v);
    } else if (has(p.d_dt_bias)) {
        put(p.d_dt_bias, (i - taps - p.channels - p.heads) * p.d_dt_bias.stride[0], v);
    }
}

/* ---- launch --------------------------------------------------------------------------------------------------------------- */

using bwd_function = void (*)(bwd_params);

template <class T> static bwd_function bwd_of(int64_t width)
{
    static constexpr bwd_function all[] = {bwd_kernel<T, 0>, bwd_kernel<T, 1>, bwd_kernel<T, 2>, bwd_kernel<T, 3>,
                                           bwd_kernel<T, 4>};
    return all[width];
}

static int64_t kernel_width(const weft_call *call, const weft_gdn_pre_bwd_args *a)
{
    const weft_tensor *const all[] = {&a->q,      &a->k,      &a->v,      &a->d_query, &a->d_key, &a->d_value,
                                      &a->d_gate, &a->d_q.to, &a->d_k.to, &a->d_v.to,  &a->d_z.to};
    bool wide = call->width <= 4 && call->key_dim <= 32 * VEC && call->value_dim <= 32 * VEC &&
                a->options.rounding == WEFT_GDN_THROUGH;
    for (const weft_tensor *t : all) wide = wide && (!weft_has(t) || reads_wide(t, VEC));
    return wide ? call->width : 0;
}

static bool wants_sums(const weft_gdn_pre_bwd_args *a)
{
    return weft_has(&a->d_weight.to) || weft_has(&a->d_bias.to) || weft_has(&a->d_a_log.to) ||
           weft_has(&a->d_dt_bias.to);
}

static int32_t channels_of(const weft_call *call)
{
    return (int32_t)(2 * call->key_heads * call->key_dim + call->value_heads * call->value_dim);
}

/* Warps side by side do not depend on what is asked for: the cut into ranges, and with it sums, must not either. */
static weft_gdn_ranges ranges_of(const weft_call *call)
{
    const int64_t lanes_k = weft_gdn_team(call->key_dim, VEC), lanes_v = weft_gdn_team(call->value_dim, VEC);
    const int64_t warps = 2 * (call->key_heads * (lanes_k ? lanes_k : 32) + 31) / 32 +
                          (call->value_heads * (lanes_v ? lanes_v : 32) + 31) / 32;
    return weft_gdn_bwd_ranges(call->batch * call->steps, warps);
}

static float *lay_out(weft_arena *arena, const weft_call *call, const weft_gdn_pre_bwd_args *a)
{
    if (!wants_sums(a)) return NULL;
    const int64_t size = partial_size(call->width, channels_of(call), call->value_heads);
    return (float *)weft_arena_take(arena, (size_t)(ranges_of(call).count * size) * 4);
}

template <class T> static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_gdn_pre_bwd_args *a = (const weft_gdn_pre_bwd_args *)args;
    const weft_gdn_options &o = a->options;
    const weft_tensor *const in[4] = {&a->q, &a->k, &a->v, &a->v};
    const weft_tensor *const d_out[4] = {&a->d_query, &a->d_key, &a->d_value, &a->d_gate};
    const weft_grad *const d_in[4] = {&a->d_q, &a->d_k, &a->d_v, &a->d_z};
    const int64_t keys = call->key_heads * call->key_dim, first[4] = {0, keys, 2 * keys, 0};
    const weft_gdn_ranges r = ranges_of(call);
    weft_arena arena = cuda_arena(call);
    bwd_params p = {};
    p.seq = sequences_of(call, &a->cu_seqlens);
    p.conv.weight = view_of(&a->weight), p.conv.bias = view_of(&a->bias), p.conv.state = view_of(&a->state);
    p.conv.width = (int32_t)call->width, p.conv.history = (int32_t)(call->history < 0 ? 0 : call->history);
    p.conv.linear = o.activation == WEFT_GDN_LINEAR;
    p.partial = lay_out(&arena, call, a);
    for (int i = 0; i < 4; i++) {
        p.in[i] = section_of(in[i], first[i]);
        p.d_out[i] = rows_of(d_out[i]), p.d_in[i] = rows_of(d_in[i]);
        p.repeat[i] = weft_has(d_out[i]) ? (int32_t)(d_out[i]->shape[2] / in[i]->shape[2]) : 1;
        p.head_step[i] = p.repeat[i] > 1 && o.head_map == WEFT_GDN_TILED ? p.in[i].heads : 1;
        const bool wanted = weft_has(&d_in[i]->to) || (i < 3 && (p.partial || weft_has(&a->d_state.to)));
        p.first_unit[i + 1] = p.first_unit[i] + (wanted ? units_of(p.in[i]) : 0);
    }
    p.first_unit[PARTS] = p.first_unit[PART_GATES] + 1;
    p.d_final = view_of(&a->d_final_state), p.d_state = view_of(&a->d_state);
    p.b = rows_of(&a->b), p.d_beta = rows_of(&a->d_beta), p.d_g = rows_of(&a->d_g);
    p.d_b = rows_of(&a->d_b), p.d_a = rows_of(&a->d_a);
    p.decay.a = rows_of(&a->a), p.decay.a_log = view_of(&a->a_log), p.decay.dt_bias = view_of(&a->dt_bias);
    p.decay.parity = o.rounding == WEFT_GDN_PARITY;
    p.l2_eps = (float)o.l2_eps, p.q_scale = (float)o.q_scale, p.beta_scale = (float)o.beta_scale;
    p.g_factor = o.g_log2 ? 1.4426950408889634f : 1.0f;
    p.l2norm = o.l2norm, p.g_chunk = o.g_chunk;
    p.value_heads = (int32_t)call->value_heads, p.channels = channels_of(call);
    p.range = r.tokens;

    if (r.count > 0)
        WEFT_TRY(launch(call, "backward", bwd_of<T>(kernel_width(call, a)),
                        {.grid = grid_of((p.first_unit[PARTS] + WARPS - 1) / WARPS * r.count), .block = WARPS * 32},
                        p));
    if (weft_has(&a->d_state.to) && p.seq.count > 0)
        WEFT_TRY(launch(call, "states", state_kernel,
                        {.grid = grid_of((p.seq.count * p.channels + 127) / 128), .block = 128}, p));
    if (!wants_sums(a)) return WEFT_OK;
    const finish_params f = {p.partial,
                             r.count,
                             p.conv.width,
                             p.channels,
                             p.value_heads,
                             view_of(&a->d_weight),
                             view_of(&a->d_bias),
                             view_of(&a->d_a_log),
                             view_of(&a->d_dt_bias)};
    return launch(call, "sums", finish_kernel,
                  {.grid = grid_of((partial_size(f.width, f.channels, f.heads) + 127) / 128), .block = 128}, f);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    weft_call query = *call;
    query.query = true;
    weft_arena arena = cuda_arena(&query);
    lay_out(&arena, call, (const weft_gdn_pre_bwd_args *)args);
    return weft_arena_bytes(&arena);
}

const weft_kernel weft_cuda_gdn_pre_bwd[] = {{WEFT_BF16, 0, bwd<bf16>, bwd_workspace},
                                             {WEFT_F16, 0, bwd<f16>, bwd_workspace},
                                             {WEFT_F32, 0, bwd<float>, bwd_workspace},
                                             {}};
