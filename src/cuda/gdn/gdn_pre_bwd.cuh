/* SPDX-License-Identifier: Apache-2.0
 *
 * What a warp of gdn_pre's backward does with its piece of tokens: q, k and v; the gate; beta and g. */
#ifndef WEFT_CUDA_GDN_PRE_BWD_CUH
#define WEFT_CUDA_GDN_PRE_BWD_CUH

#include "cuda/gdn/gdn_pre.cuh"

enum {
    WARPS = WEFT_GDN_PIECES,
    RING = 4,        /* du of the last tokens */
    PAIR = 2,        /* rows that are computed side by side */
    GATE_TOKENS = 4, /* of beta and g under way */
    MAX_GROUPS = WEFT_GDN_MAX_DIM / (32 * GROUP),
    LONG_RING = WEFT_GDN_MAX_WIDTH
};
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
    int32_t first_unit[PARTS];
    int32_t gate_vec;      /* channels of z that a lane has */
    int32_t ring;          /* bytes of a warp's rings */
    int64_t piece, ranges; /* tokens of a warp; ranges of a block */
    int64_t gate_blocks;   /* the first so many blocks have the gates of a range each */
    /* [ranges][(W + 1) C + 2 Hv]: d_weight by taps, d_bias, d_a_log, d_dt_bias; or NULL */
    float *partial;
};

/* Numbers of a range, and how far the next range's are: on a boundary of 16 bytes. */
static __host__ __device__ __forceinline__ int64_t numbers_of(int64_t width, int64_t channels, int64_t heads)
{
    return (width + 1) * channels + 2 * heads;
}

static __host__ __device__ __forceinline__ int64_t partial_size(int64_t width, int64_t channels, int64_t heads)
{
    return (numbers_of(width, channels, heads) + 3) / 4 * 4;
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

/* ---- sums of the block's pieces ------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float *sums_of(char *shared, int warp, int count)
{
    return (float *)shared + (warp * count) * 32 + (threadIdx.x & 31);
}

/* The sum of what the block's warps have in place i of this lane, in order. */
static __device__ __forceinline__ float add_pieces(char *shared, int count, int i)
{
    double sum = 0.0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += (double)sums_of(shared, w, count)[i * 32];
    return (float)sum;
}

/* What the pieces have of d_weight, a tap after the other, and of d_bias. The rings are no longer needed. */
template <int N, int V>
static __device__ __forceinline__ void store_sums(const bwd_params &p, const float (&dw)[N][V], int channel,
                                                  bool active, char *shared, float *partial)
{
    float *mine = sums_of(shared, threadIdx.x >> 5, N * V);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < V; e++) mine[(j * V + e) * 32] = dw[j][e];
    __syncthreads();
    for (int j = threadIdx.x >> 5; active && j < N; j += WARPS) {
        float v[V];
#pragma unroll
        for (int e = 0; e < V; e++) v[e] = add_pieces(shared, N * V, j * V + e);
        store<float, V>(partial + (int64_t)j * p.channels + channel, v);
    }
}

/* The same for the gates, lanes being heads. */
static __device__ __forceinline__ void store_gate_sums(const bwd_params &p, float d_a_log, float d_dt, int head,
                                                       bool active, char *shared, float *partial)
{
    float *mine = sums_of(shared, threadIdx.x >> 5, 2), *own = partial + (int64_t)(p.conv.width + 1) * p.channels;
    __syncthreads();
    mine[0] = d_a_log, mine[32] = d_dt;
    __syncthreads();
    if (threadIdx.x < 32 && active)
        own[head] = add_pieces(shared, 2, 0), own[p.value_heads + head] = add_pieces(shared, 2, 1);
}

/* ---- q, k, v ------------------------------------------------------------------------------------------------------------- */

/* The sum of a head's d_out from its slots, which are `next` apart. */
template <class S, int V>
static __device__ __forceinline__ void read_upstream(float (&dn)[V], const char *from, int repeat, int next)
{
    auto add = [&] {
        float one[V];
        slot_of<S, V>::read(one, from += next);
#pragma unroll
        for (int e = 0; e < V; e++) dn[e] += one[e];
    };
    slot_of<S, V>::read(dn, from);
    if (repeat > 1) add();
#pragma unroll 1
    for (int i = 2; i < repeat; i++) add();
}

/* Gradient of row tau from du of the tokens tau, tau + 1, ..., which is in du[first], du[first + 1], ... */
template <int W, int V>
static __device__ __forceinline__ void input_gradient(float (&v)[V], const lane_head<W, V> &h,
                                                      const float (&du)[RING][V], int first)
{
#pragma unroll
    for (int e = 0; e < V; e++) {
        v[e] = h.weight[W - 1][e] * du[first & 3][e];
#pragma unroll
        for (int k = 1; k < W; k++) v[e] = fmaf(h.weight[W - 1 - k][e], du[(first + k) & 3][e], v[e]);
    }
}

/* From dn and u to du for a pair of rows, which do not wait for each other. dn is the gradient of the normed head, without
 * the scale of q. */
template <int V>
static __device__ __forceinline__ void through_norm(const bwd_params &p, int part, int lanes, float (&u)[PAIR][V],
                                                    float (&dn)[PAIR][V])
{
    float slope[PAIR][V];
#pragma unroll
    for (int q = 0; q < PAIR; q++)
#pragma unroll
        for (int e = 0; e < V; e++) {
            slope[q][e] = 1.0f;
            if (!p.conv.linear) slope[q][e] = silu_slope(u[q][e], &u[q][e]);
        }
    if (part < PART_V) {
        float scale[PAIR], dot[PAIR];
#pragma unroll
        for (int q = 0; q < PAIR; q++) scale[q] = 1.0f;
        if (p.l2norm) {
#pragma unroll
            for (int q = 0; q < PAIR; q++) scale[q] = lane_sum(u[q], u[q]), dot[q] = lane_sum(u[q], dn[q]);
            team_sums(scale, lanes);
            team_sums(dot, lanes);
#pragma unroll
            for (int q = 0; q < PAIR; q++) {
                scale[q] = reciprocal_root(scale[q] + p.l2_eps);
                const float down = scale[q] * (scale[q] * dot[q]);
#pragma unroll
                for (int e = 0; e < V; e++) dn[q][e] = fmaf(-u[q][e], down, dn[q][e]);
            }
        }
#pragma unroll
        for (int q = 0; q < PAIR; q++) {
            if (part == PART_Q) scale[q] *= p.q_scale;
#pragma unroll
            for (int e = 0; e < V; e++) dn[q][e] *= scale[q];
        }
    }
#pragma unroll
    for (int q = 0; q < PAIR; q++)
#pragma unroll
        for (int e = 0; e < V; e++) dn[q][e] *= slope[q][e];
}

template <class T, int W, int V>
static __device__ __forceinline__ void backward_heads(const bwd_params &p, int part, int unit, int64_t t0,
                                                      int64_t t1, char *shared, float *partial)
{
    const section &s = p.in[part];
    const rows &d_out = p.d_out[part], &d_in = p.d_in[part];
    const lane_place l = place_in<V>(s, unit);
    const bool active = l.count > 0, single = sizeof(T) == 4 || d_out.dtype == WEFT_F32;
    const int channel = s.first + l.head * s.dim + l.channel, repeat = p.repeat[part];
    const view to = {d_in.data, d_in.dtype, d_in.add, {0, 0, 0}};
    /* A ring of x, and one for each head of d_out. */
    using slot = slot_of<T, V>;
    using wide_slot = slot_of<float, V>;
    const int up_size = single ? wide_slot::size : slot::size, up_ring = SLOTS * up_size;
    const char *const ring = shared + (threadIdx.x >> 5) * p.ring + slot::lane(), *const ups =
                                                                                      shared +
                                                                                      (threadIdx.x >> 5) * p.ring +
                                                                                      SLOTS * slot::size +
                                                                                      (single ? wide_slot::lane()
                                                                                              : slot::lane());
    const uint32_t ring_at = shared_address(ring), ups_at = shared_address(ups);
    lane_head<W, V> h;
    float du[RING][V], dw[W + 1][V] = {};
    place where = {};
    if (t0 < t1) {
        where = place_of(p.seq, t0);
        read_taps<T>(h, p.conv, channel, l.count);
    }

    for (int64_t t = t0; t < t1;) { /* a sequence, or what the piece has of it */
        const int64_t d_at = l.head * d_in.head + l.channel + offset_in(d_in, p.seq, where, t);
        if (where.n >= p.seq.count) {
#pragma unroll 1
            for (int64_t i = 0; active && has(d_in) && i < t1 - t; i++) {
                float zeros[V] = {};
                put_wide<T, V>(to, d_at + i * d_in.step, zeros);
            }
            break;
        }
        /* Rows of the walk; rows of it that there are, behind which dn and so du is 0; how many of them are the piece's own; the first
         * whose gradient a final state takes part in. */
        const int walk = (int)((where.end < t1 ? where.end : t1) - t) + W - 1;
        const int count = where.end - t < walk ? (int)(where.end - t) : walk;
        const int own = (int)((where.end < t1 ? where.end : t1) - t);
        const int64_t final_at = has(p.d_final) ? where.end - p.conv.history - t : (int64_t)1 << 40;
        const int final_row = final_at < walk ? (int)(final_at < -W ? -W : final_at) : walk;
        const bool begins = t == where.start && has(p.d_state);

        const T *x = (const T *)s.x.data + offset_in(s.x, p.seq, where, t) + l.head * s.x.head + l.channel;
        const char *up = d_out.data + (offset_in(d_out, p.seq, where, t) +
                                       first_head(p, part, l.head) * d_out.head + l.channel) *
                                          (single ? 4 : (int)sizeof(T));
        const int64_t up_row = d_out.step * (single ? 4 : (int)sizeof(T)),
                      up_head = p.head_step[part] * d_out.head * (single ? 4 : (int)sizeof(T));
        const int mine = active ? count : 0;
        auto fetch = [&](int i, int k) { /* into the k-th slots */
                                         uint32_t at = ups_at + (uint32_t)(k * up_size);
                                         const char *from = up;
                                         auto one = [&] {
                                             if (single)
                                                 wide_slot::copy(at, (const float *)from, i < mine);
                                             else
                                                 slot::copy(at, (const T *)from, i < mine);
                                             at += (uint32_t)up_ring, from += up_head;
                                         };
                                         slot::copy(ring_at + (uint32_t)(k * slot::size), x, i < mine);
                                         if (repeat > 0) one();
                                         if (repeat > 1) one();
#pragma unroll 1
                                         for (int j = 2; j < repeat; j++) one();
                                         copy_commit();
                                         x += s.x.step, up += up_row;
        };
        /* Row i of the walk, or a slot of the state in front of it, has the gradient v but for what a final state adds. */
        auto emit = [&](int i, float(&v)[V]) {
            if (i >= final_row) {
                const int64_t at = where.n * p.d_final.stride[0] + channel * p.d_final.stride[1] +
                                   (i - final_at) * p.d_final.stride[2];
#pragma unroll
                for (int e = 0; e < V; e++) v[e] += get(p.d_final, at + e * p.d_final.stride[1]);
            }
            if (i >= 0) {
                if (has(d_in)) put_wide<T, V>(to, d_at + i * d_in.step, v);
                return;
            }
            const int64_t at = where.n * p.d_state.stride[0] + channel * p.d_state.stride[1] +
                               (p.conv.history + i) * p.d_state.stride[2];
#pragma unroll
            for (int e = 0; e < V; e++) put(p.d_state, at + e * p.d_state.stride[1], v[e]);
        };

#pragma unroll 1
        for (int i = 0; i < SLOTS; i++) fetch(i, i);
        rewind<T>(h, s, p.conv, p.seq, where, t, l);
#pragma unroll
        for (int r = 0; r < RING; r++)
#pragma unroll
            for (int e = 0; e < V; e++) du[r][e] = 0.0f;

        for (int base = 0; base < walk; base += RING) {
            const int slots = base & (SLOTS - 1);
#pragma unroll
            for (int r = 0; r < RING; r += PAIR) {
                const int i = base + r, k = slots + r;
                if (i >= walk) break;
                float x_new[PAIR][V], u[PAIR][V], dn[PAIR][V];
                copy_wait<SLOTS - PAIR>();
#pragma unroll
                for (int q = 0; q < PAIR; q++) {
                    slot::read(x_new[q], ring + (k + q) * slot::size);
                    if (repeat == 0) {
#pragma unroll
                        for (int e = 0; e < V; e++) dn[q][e] = 0.0f;
                    } else if (single) {
                        read_upstream<float, V>(dn[q], ups + (k + q) * up_size, repeat, up_ring);
                    } else {
                        read_upstream<T, V>(dn[q], ups + (k + q) * up_size, repeat, up_ring);
                    }
                }
#pragma unroll
                for (int e = 0; e < V; e++) h.past[r][e] = x_new[0][e]; /* the second one's place is still needed */
#pragma unroll
                for (int q = 0; q < PAIR; q++) convolve<false>(u[q], h, x_new[q], p.conv, channel, l.count, r + q);
                through_norm(p, part, s.lanes, u, dn);
#pragma unroll
                for (int q = 0; q < PAIR; q++) fetch(i + q + SLOTS, k + q); /* all of the slots has been used */
#pragma unroll
                for (int q = 0; q < PAIR; q++) {
#pragma unroll
                    for (int e = 0; e < V; e++) h.past[r + q][e] = x_new[q][e], du[r + q][e] = dn[q][e];
                    if (i + q < own) {
#pragma unroll
                        for (int e = 0; e < V; e++)
#pragma unroll
                            for (int j = 0; j < W; j++)
                                dw[j][e] = fmaf(dn[q][e], h.past[(r + q + 5 - W + j) & 3][e], dw[j][e]);
#pragma unroll
                        for (int e = 0; e < V; e++) dw[W][e] += dn[q][e];
                    }
                    if (active && i + q < walk && (i + q >= W - 1 || begins)) {
                        float v[V];
                        input_gradient(v, h, du, r + q - (W - 1));
                        emit(i + q - (W - 1), v);
                    }
                }
            }
        }
        copy_wait<0>();
        t += own;
        if (t < t1) next_sequence(p.seq, where, t);
    }

    if (partial) store_sums(p, dw, channel, active, shared, partial);
}

/* The same for anything else, a channel after the other; what a team remembers lies in local memory. */
template <class T>
static __device__ void backward_any(const bwd_params &p, int part, int unit, int64_t t0, int64_t t1, char *shared,
                                    float *partial)
{
    const section &s = p.in[part];
    const rows &d_out = p.d_out[part];
    const lane_place l = place_in<GROUP>(s, unit);
    const int groups = (s.dim + 32 * GROUP - 1) / (32 * GROUP), width = p.conv.width;
    const bool parity = p.decay.parity, norm = part < PART_V && p.l2norm;
    float du[LONG_RING][MAX_GROUPS][GROUP], dw[WEFT_GDN_MAX_WIDTH + 1][MAX_GROUPS][GROUP] = {};
    float u[MAX_GROUPS][GROUP], y[MAX_GROUPS][GROUP], dn[MAX_GROUPS][GROUP];
    auto each = [&](auto &&f) { /* of this lane's channels */
                                for (int k = 0; k < groups; k++)
                                    for (int e = 0; e < GROUP; e++)
                                        if (l.head < s.heads && l.channel + k * 32 * GROUP + e < s.dim)
                                            f(k, e, l.channel + k * 32 * GROUP + e);
    };
    place where = {};
    if (t0 < t1) where = place_of(p.seq, t0);
    token now = token_at(p.seq, t0);
    memset(du, 0, sizeof du);
    const int64_t stop = t0 < t1 ? (t1 + width - 1 < p.seq.tokens ? t1 + width - 1 : p.seq.tokens) : t0;
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
        const int64_t row = has(p.conv.state) ? where.n : -1;
        float squares[MAX_GROUPS] = {}, dots[MAX_GROUPS] = {};
        each([&](int k, int e, int c) {
            const float v = convolve_any<T>(s, p.conv, p.seq, where, row, t, l.head, c);
            float up = 0.0f;
            u[k][e] = parity ? rounded<T>(v) : v;
            y[k][e] = p.conv.linear ? v : silu(v);
            if (parity) y[k][e] = rounded<T>(y[k][e]);
            for (int i = 0; has(d_out) && i < p.repeat[part]; i++) {
                const float one =
                    get(d_out, offset_of(d_out, now) +
                                   (first_head(p, part, l.head) + i * p.head_step[part]) * d_out.head +
                                   c * d_out.channel);
                up = i ? up + one : one;
            }
            if (parity && part < PART_V) up = rounded<T>(up);
            dn[k][e] = up;
            squares[k] = fmaf(y[k][e], y[k][e], squares[k]), dots[k] = fmaf(y[k][e], up, dots[k]);
        });
        float scale = 1.0f, down = 0.0f;
        if (norm) {
            scale = reciprocal_root(groups_sum(squares, s.lanes) + p.l2_eps);
            down = scale * (scale * groups_sum(dots, s.lanes));
        }
        if (part == PART_Q) scale *= p.q_scale;
        const int slot = (int)((t - t0) % LONG_RING);
        each([&](int k, int e, int c) {
            float dy = norm ? fmaf(-y[k][e], down, dn[k][e]) : dn[k][e], unused;
            if (part < PART_V) dy *= scale;
            if (parity) dy = rounded<T>(dy);
            if (!p.conv.linear) dy *= parity ? silu_slope_of_rounded(u[k][e]) : silu_slope(u[k][e], &unused);
            du[slot][k][e] = dy;
            if (t >= t1) return;
            for (int j = 0; j < width; j++)
                dw[j][k][e] =
                    fmaf(du[slot][k][e], past_at<T>(s, p.conv, p.seq, where, row, t - (width - 1) + j, l.head, c),
                         dw[j][k][e]);
            dw[width][k][e] += du[slot][k][e];
        });
        for (int back = width - 1; back >= (t == where.end - 1 ? 0 : width - 1); back--) {
            const int64_t tau = t - back;
            if (tau >= t1 || (tau >= where.start ? tau < t0 : where.start < t0)) continue;
            each([&](int k, int e, int c) {
                const int own = s.first + l.head * s.dim + c;
                float v = 0.0f;
                for (int i = 0; i < width; i++) {
                    const float w = get(p.conv.weight,
                                        own * p.conv.weight.stride[0] + (width - 1 - i) * p.conv.weight.stride[1]);
                    const bool there = i <= back && tau + i >= where.start;
                    const float d = there ? du[(t - t0 - back + i + 2 * LONG_RING) % LONG_RING][k][e] : 0.0f;
                    v = i ? fmaf(w, d, v) : w * d;
                }
                emit_one<T>(p, part, where, tau, {now.b, now.s - back}, l.head, c, v);
            });
        }
    }
    if (!partial) return;
    enum { COUNT = MAX_GROUPS * GROUP };
    for (int j = 0; j <= width; j++) {
        float *mine = sums_of(shared, threadIdx.x >> 5, COUNT);
        __syncthreads();
        each([&](int k, int e, int) { mine[(k * GROUP + e) * 32] = dw[j][k][e]; });
        __syncthreads();
        if (threadIdx.x < 32)
            each([&](int k, int e, int c) {
                partial[(int64_t)j * p.channels + s.first + l.head * s.dim + c] =
                    add_pieces(shared, COUNT, k * GROUP + e);
            });
    }
}

/* ---- z ------------------------------------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void backward_gate(const bwd_params &p, int unit, int64_t t0, int64_t t1)
{
    const section &s = p.in[PART_Z];
    const rows &from = p.d_out[PART_Z], &to = p.d_in[PART_Z];
    const lane_place l = place_in<GROUP>(s, unit);
    const int64_t end = end_of(p.seq);
    token at = token_at(p.seq, t0);
    if (l.head >= s.heads) return;
    for (int64_t t = t0; t < t1; t++, advance(at, p.seq))
        for (int c = l.channel; c < s.dim; c += c % GROUP == GROUP - 1 ? 31 * GROUP + 1 : 1)
            put(to, offset_of(to, at) + l.head * to.head + c * to.channel,
                has(from) && t < end ? get(from, offset_of(from, at) + l.head * from.head + c * from.channel)
                                     : 0.0f);
}

template <class T, int V>
static __device__ __forceinline__ void backward_gate_wide(const bwd_params &p, int unit, int64_t t0, int64_t t1)
{
    const section &s = p.in[PART_Z];
    const rows &from = p.d_out[PART_Z], &to = p.d_in[PART_Z];
    const view a = {from.data, from.dtype, 0, {0, 0, 0}}, b = {to.data, to.dtype, to.add, {0, 0, 0}};
    const lane_place l = place_in<V>(s, unit);
    const int64_t end = end_of(p.seq);
    const bool plain = from.dtype == number<T>::dtype && to.dtype == number<T>::dtype && !to.add;
    token at = token_at(p.seq, t0);
    if (l.count <= 0) return;
    for (int64_t base = t0; base < t1; base += COPIES) {
        raw<T, V> v[COPIES] = {};
        token later = at;
        if (plain) {
#pragma unroll
            for (int r = 0; r < COPIES; r++) {
                if (base + r < t1 && base + r < end)
                    load_raw(v[r], (const T *)from.data + offset_of(from, later) + l.head * from.head + l.channel);
                advance(later, p.seq);
            }
        }
#pragma unroll
        for (int r = 0; r < COPIES; r++) {
            if (base + r >= t1) break;
            const int64_t into = offset_of(to, at) + l.head * to.head + l.channel;
            if (plain) {
                store_raw((T *)to.data + into, v[r]);
            } else {
                float one[V] = {};
                if (has(from) && base + r < end)
                    get_wide<T, V>(one, a, offset_of(from, at) + l.head * from.head + l.channel);
                put_wide<T, V>(b, into, one);
            }
            advance(at, p.seq);
        }
    }
}

/* ---- beta and g --------------------------------------------------------------------------------------------------------- */

/* Lanes are heads; a chunk's sums contain a token's g from there to the chunk's end, so the walk is backward. */
template <class T>
static __device__ __forceinline__ void backward_gates(const bwd_params &p, int64_t t0, int64_t t1, char *shared,
                                                      float *partial)
{
    const place last = t0 < t1 ? place_of(p.seq, t1 - 1) : place{};
    for (int first = 0; first < p.value_heads; first += 32) {
        const int h = first + (threadIdx.x & 31);
        const bool active = h < p.value_heads;
        const float half = active ? half_rate(p.decay, h) : 0.0f, bias = active ? gate_bias(p.decay, h) : 0.0f;
        const T *a = (const T *)p.decay.a.data + h * p.decay.a.head, *b = (const T *)p.b.data + h * p.b.head;
        const bool single = p.d_beta.dtype == WEFT_F32;
        const char *const to_beta = p.d_beta.data + h * p.d_beta.head * (single ? 4 : (int)sizeof(T));
        const float *const to_g = (const float *)p.d_g.data + h * p.d_g.head;
        auto upstream = [&](const token &at) {
            return has(p.d_g) && active ? to_g[offset_of(p.d_g, at)] * p.g_factor : 0.0f;
        };
        place w = last;
        float d_g = 0.0f, d_a_log = 0.0f, d_dt = 0.0f;
        if (t0 < t1 && p.g_chunk && w.n < p.seq.count) {
            int64_t end = t1 - 1 - (t1 - 1 - w.start) % p.g_chunk + p.g_chunk;
            if (end > w.end) end = w.end;
            for (int64_t t = end - 1; t >= t1; t--)
                d_g = t == end - 1 ? upstream(token_at(p.seq, t)) : d_g + upstream(token_at(p.seq, t));
        }
        token now = token_at(p.seq, t1 - 1), later = now;
        for (int64_t top = t1; top > t0; top -= GATE_TOKENS) { /* tokens top - 1, top - 2, ... */
            float xa[GATE_TOKENS], xb[GATE_TOKENS], up[GATE_TOKENS], up_beta[GATE_TOKENS];
#pragma unroll
            for (int r = 0; r < GATE_TOKENS; r++) {
                const bool there = active && top - 1 - r >= t0;
                xa[r] = there ? widen(a[offset_of(p.decay.a, later)]) : 0.0f;
                xb[r] = there ? widen(b[offset_of(p.b, later)]) : 0.0f;
                up[r] = there ? upstream(later) : 0.0f;
                up_beta[r] = there && single ? ((const float *)to_beta)[offset_of(p.d_beta, later)] : 0.0f;
                if (there && has(p.d_beta) && !single)
                    up_beta[r] = widen(((const T *)to_beta)[offset_of(p.d_beta, later)]);
                retreat(later, p.seq);
            }
#pragma unroll
            for (int r = 0; r < GATE_TOKENS; r++) {
                const int64_t t = top - 1 - r;
                if (t < t0) break;
                if (t < w.start) w = place_of(p.seq, t);
                float d_a = 0.0f, d_b = 0.0f;
                if (w.n < p.seq.count) {
                    const float x = xa[r] + bias;
                    d_g = p.g_chunk && t + 1 < w.end && (t + 1 - w.start) % p.g_chunk ? d_g + up[r] : up[r];
                    d_a = gm_decay_slope(x, half, -d_g);
                    d_a_log += gm_decay(x, half, -d_g);
                    d_dt += d_a;
                    if (has(p.d_beta)) d_b = up_beta[r] * gm_beta_slope(xb[r], p.beta_scale);
                }
                if (active && has(p.d_a)) put(p.d_a, offset_of(p.d_a, now) + h * p.d_a.head, d_a);
                if (active && has(p.d_b)) put(p.d_b, offset_of(p.d_b, now) + h * p.d_b.head, d_b);
                retreat(now, p.seq);
            }
        }
        if (partial) store_gate_sums(p, d_a_log, d_dt, h, active, shared, partial);
    }
}

/* The same where g is not summed within chunks: no token waits for another. */
template <class T>
static __device__ __forceinline__ void backward_each_gate(const bwd_params &p, int64_t t0, int64_t t1, char *shared,
                                                          float *partial)
{
    const int lane = (int)(threadIdx.x & 31);
    const int wide = gate_lanes(p.value_heads), side = 32 / wide;
    const int64_t end = end_of(p.seq);
    for (int first = 0; first < p.value_heads; first += 32) {
        const int h = first + lane % wide;
        const bool active = h < p.value_heads;
        const float half = active ? half_rate(p.decay, h) : 0.0f, bias = active ? gate_bias(p.decay, h) : 0.0f;
        float d_a_log = 0.0f, d_dt = 0.0f;
        run tokens;
        for (int64_t t = t0; t < t1; t += tokens.count) {
            tokens = run_at(p.seq, t, t1, end);
            auto at = [&](const rows &r, int i) { return offset_of(r, tokens.at) + i * r.step + h * r.head; };
            /* tokens of the piece by turns, wherever sequences end, so that dense and packed ones have the same sums */
            const int first_of_run = (lane / wide - (int)(t - t0)) & (side - 1);
#pragma unroll 1
            for (int base = first_of_run; active && base < tokens.count; base += side * GATE_TOKENS) {
                float a[GATE_TOKENS] = {}, b[GATE_TOKENS] = {}, d_g[GATE_TOKENS] = {}, d_beta[GATE_TOKENS] = {};
#pragma unroll
                for (int r = 0; r < GATE_TOKENS; r++) {
                    const int i = base + r * side;
                    if (i >= tokens.there) break;
                    a[r] = widen(((const T *)p.decay.a.data)[at(p.decay.a, i)]);
                    b[r] = widen(((const T *)p.b.data)[at(p.b, i)]);
                    if (has(p.d_g)) d_g[r] = ((const float *)p.d_g.data)[at(p.d_g, i)];
                    if (has(p.d_beta)) d_beta[r] = get(p.d_beta, at(p.d_beta, i));
                }
#pragma unroll
                for (int r = 0; r < GATE_TOKENS; r++) {
                    const int i = base + r * side;
                    if (i >= tokens.count) break;
                    float d_a = 0.0f, d_b = 0.0f;
                    if (i < tokens.there) {
                        const float x = a[r] + bias, down = -(d_g[r] * p.g_factor);
                        d_a = gm_decay_slope(x, half, down);
                        d_a_log += gm_decay(x, half, down);
                        d_dt += d_a;
                        if (has(p.d_beta)) d_b = d_beta[r] * gm_beta_slope(b[r], p.beta_scale);
                    }
                    if (has(p.d_a)) put(p.d_a, at(p.d_a, i), d_a);
                    if (has(p.d_b)) put(p.d_b, at(p.d_b, i), d_b);
                }
            }
        }
        for (int m = wide; m < 32; m *= 2)
            d_a_log += __shfl_xor_sync(0xffffffffu, d_a_log, m), d_dt += __shfl_xor_sync(0xffffffffu, d_dt, m);
        if (partial) store_gate_sums(p, d_a_log, d_dt, h, active && lane < wide, shared, partial);
    }
}

#endif
