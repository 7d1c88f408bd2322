/* SPDX-License-Identifier: Apache-2.0
 *
 * What a warp of gdn_pre's backward does in the usual case, which is_plain tells: silu, the norm, no bias, no gradients of
 * states, and gradients of the activations' type, none of them missing or added to. Backward is bound by instructions, so what
 * does not change with the row is known when this is compiled or is computed before the walk: whether there is a norm, how many
 * heads come back to one, and that rows of the middle of a walk need not be asked where they are. */
#ifndef WEFT_CUDA_GDN_PRE_BWD_PLAIN_CUH
#define WEFT_CUDA_GDN_PRE_BWD_PLAIN_CUH

#include "cuda/gdn/gdn_pre_bwd.cuh"

/* ---- q, k, v ------------------------------------------------------------------------------------------------------------- */

enum { FEWEST_LANES = 4 }; /* of a team, for root_and_dot */

/* Sums over a team for a pair of rows: 1 / sqrt(squares + eps) and the dots, the same in all of its lanes. Two lanes of four halve
 * the four numbers between them twice, so that each goes on with one of them; the order of additions is that of team_sums. */
static __device__ __forceinline__ void root_and_dot(float (&squares)[PAIR], float (&dots)[PAIR], float eps,
                                                    int lanes)
{
    const int lane = (int)(threadIdx.x & 31);
    const bool odd = lane & 1, second = lane & 2;
    float a = odd ? dots[0] : squares[0], b = odd ? dots[1] : squares[1];
    a += __shfl_xor_sync(0xffffffffu, odd ? squares[0] : dots[0], 1);
    b += __shfl_xor_sync(0xffffffffu, odd ? squares[1] : dots[1], 1);
    const float other = __shfl_xor_sync(0xffffffffu, second ? a : b, 2);
    a = (second ? b : a) + other;
#pragma unroll
    for (int m = FEWEST_LANES; m < 32; m *= 2) {
        const float more = __shfl_xor_sync(0xffffffffu, a, m);
        if (m < lanes) a += more;
    }
    const float root = reciprocal_root(a + eps), mine = odd ? a : root;
#pragma unroll
    for (int q = 0; q < PAIR; q++) {
        squares[q] = __shfl_sync(0xffffffffu, mine, (lane & ~3) | 2 * q);
        dots[q] = __shfl_sync(0xffffffffu, mine, (lane & ~3) | 2 * q | 1);
    }
}

/* A lane's walk over its channels of a head. R heads of d_out come back to this one; 0: as many as `repeat` says. */
template <class T, int W, int R, bool NORM> struct plain_walk {
    enum { V = 4 };
    using slot = slot_of<T, V>;

    lane_head<W, V> h;
    float dw[W][V];
    float dx[W - 1][V]; /* gradients of the last rows, the newest first, but for what rows to come add */
    int repeat, lanes;
    float eps, q_scale;
    bool active;
    const char *ring; /* of x in shared memory, then one for each head of d_out */
    uint32_t ring_at;
    const char *x, *up; /* of the row that is to be fetched next, and their strides in bytes */
    int32_t x_step, up_step, up_head;
    char *to; /* of the row whose gradient is complete next */
    int32_t to_step;
    int walk, count, own; /* rows; rows that there are, behind which du is 0; rows of the piece */

    __device__ __forceinline__ void fetch(int k, int ahead, bool there) const /* into the k-th slots */
    {
        const char *from = up + (int64_t)up_step * ahead;
        uint32_t at = ring_at + (uint32_t)(k * slot::size);
        slot::copy(at, (const T *)(x + (int64_t)x_step * ahead), there);
        if constexpr (R == 0) {
#pragma unroll 1
            for (int j = 0; j < repeat; j++, from += up_head)
                slot::copy(at += SLOTS * slot::size, (const T *)from, there);
        } else {
#pragma unroll
            for (int j = 0; j < R; j++, from += up_head)
                slot::copy(at += SLOTS * slot::size, (const T *)from, there);
        }
        copy_commit();
    }

    __device__ __forceinline__ void read_upstream(float (&dn)[V], const char *from) const
    {
        auto add = [&] {
            float one[V];
            slot::read(one, from += SLOTS * slot::size);
#pragma unroll
            for (int e = 0; e < V; e++) dn[e] += one[e];
        };
        slot::read(dn, from += SLOTS * slot::size);
        if constexpr (R == 0) {
#pragma unroll 1
            for (int j = 1; j < repeat; j++) add();
        } else {
#pragma unroll
            for (int j = 1; j < R; j++) add();
        }
    }

    /* From the convolution's sums to du. */
    __device__ __forceinline__ void through_norm(float (&u)[PAIR][V], float (&dn)[PAIR][V]) const
    {
        float slope[PAIR][V];
#pragma unroll
        for (int q = 0; q < PAIR; q++)
#pragma unroll
            for (int e = 0; e < V; e++) slope[q][e] = silu_slope(u[q][e], &u[q][e]);
        if constexpr (NORM) {
            float scale[PAIR], dot[PAIR];
#pragma unroll
            for (int q = 0; q < PAIR; q++) scale[q] = lane_sum(u[q], u[q]), dot[q] = lane_sum(u[q], dn[q]);
            root_and_dot(scale, dot, eps, lanes);
#pragma unroll
            for (int q = 0; q < PAIR; q++) {
                const float down = scale[q] * (scale[q] * dot[q]), all = scale[q] * q_scale;
#pragma unroll
                for (int e = 0; e < V; e++) dn[q][e] = fmaf(-u[q][e], down, dn[q][e]) * all;
            }
        }
#pragma unroll
        for (int q = 0; q < PAIR; q++)
#pragma unroll
            for (int e = 0; e < V; e++) dn[q][e] *= slope[q][e];
    }

    /* Four rows, of which the first is a multiple of four. EDGE: at the beginning or the end, where it matters which they are. */
    template <bool EDGE> __device__ __forceinline__ void rows(int base, const convolution &conv)
    {
        const int half = base & RING;
        const char *at = ring + half * slot::size;
#pragma unroll
        for (int r = 0; r < RING; r += PAIR) {
            float x_new[PAIR][V], u[PAIR][V], dn[PAIR][V];
            if (EDGE && base + r >= walk) break;
            copy_wait<SLOTS - PAIR>();
#pragma unroll
            for (int q = 0; q < PAIR; q++) {
                slot::read(x_new[q], at + (r + q) * slot::size);
                read_upstream(dn[q], at + (r + q) * slot::size);
            }
#pragma unroll
            for (int e = 0; e < V; e++) h.past[r][e] = x_new[0][e]; /* the second one's place is still needed */
#pragma unroll
            for (int q = 0; q < PAIR; q++) convolve<true>(u[q], h, x_new[q], conv, 0, 0, r + q);
            through_norm(u, dn);
#pragma unroll
            for (int q = 0; q < PAIR; q++) /* the slots have been used */
                fetch(half + r + q, r + q, EDGE ? active && base + r + q + SLOTS < count : active);
#pragma unroll
            for (int q = 0; q < PAIR; q++) {
                const int i = base + r + q;
                float v[V];
#pragma unroll
                for (int e = 0; e < V; e++) {
                    const float du = dn[q][e];
                    h.past[r + q][e] = x_new[q][e];
                    if (!EDGE || i < own) {
#pragma unroll
                        for (int j = 0; j < W; j++)
                            dw[j][e] = fmaf(du, h.past[(r + q + 5 - W + j) & 3][e], dw[j][e]);
                    }
                    v[e] = fmaf(h.weight[0][e], du, dx[W - 2][e]);
#pragma unroll
                    for (int k = W - 2; k > 0; k--) dx[k][e] = fmaf(h.weight[W - 1 - k][e], du, dx[k - 1][e]);
                    dx[0][e] = h.weight[W - 1][e] * du;
                }
                if (active && (!EDGE || (i >= W - 1 && i < walk)))
                    store<T, V>((T *)(to + (int64_t)to_step * (r + q)), v);
            }
        }
        x += (int64_t)x_step * RING, up += (int64_t)up_step * RING, to += (int64_t)to_step * RING;
    }

    __device__ __forceinline__ void go(const convolution &conv)
    {
        for (int base = 0; base < walk; base += RING) {
            if (base > 0 && base + RING + SLOTS <= count)
                rows<false>(base, conv);
            else
                rows<true>(base, conv);
        }
    }
};

template <class T, int W, int R, bool NORM>
static __device__ __forceinline__ void backward_plain(const bwd_params &p, int part, int unit, int64_t t0,
                                                      int64_t t1, char *shared, float *partial)
{
    using walker = plain_walk<T, W, R, NORM>;
    using slot = typename walker::slot;
    enum { V = walker::V };
    const section &s = p.in[part];
    const rows &d_out = p.d_out[part], &d_in = p.d_in[part];
    const lane_place l = place_in<V>(s, unit);
    const int channel = s.first + l.head * s.dim + l.channel;
    walker w;
    w.active = l.count > 0;
    w.repeat = p.repeat[part], w.lanes = s.lanes, w.eps = p.l2_eps;
    w.q_scale = part == PART_Q ? p.q_scale : 1.0f;
    w.ring = shared + (threadIdx.x >> 5) * p.ring + slot::lane(), w.ring_at = shared_address(w.ring);
    w.x_step = (int32_t)(s.x.step * (int)sizeof(T)), w.up_step = (int32_t)(d_out.step * (int)sizeof(T));
    w.up_head = (int32_t)(p.head_step[part] * d_out.head * (int)sizeof(T));
    w.to_step = (int32_t)(d_in.step * (int)sizeof(T));
#pragma unroll
    for (int e = 0; e < V; e++) {
#pragma unroll
        for (int j = 0; j < W; j++) w.dw[j][e] = 0.0f;
#pragma unroll
        for (int k = 0; k < W - 1; k++) w.dx[k][e] = 0.0f;
    }
    place where = {};
    if (t0 < t1) {
        where = place_of(p.seq, t0);
        read_taps<T>(w.h, p.conv, channel, l.count);
    }

    for (int64_t t = t0; t < t1;) { /* a sequence, or what the piece has of it */
        T *to = (T *)d_in.data + l.head * d_in.head + l.channel + offset_in(d_in, p.seq, where, t);
        if (where.n >= p.seq.count) {
            const float zeros[V] = {};
#pragma unroll 1
            for (int64_t i = 0; w.active && i < t1 - t; i++) store<T, V>(to + i * d_in.step, zeros);
            break;
        }
        w.own = (int)((where.end < t1 ? where.end : t1) - t), w.walk = w.own + W - 1;
        w.count = where.end - t < w.walk ? (int)(where.end - t) : w.walk;
        w.to = (char *)to - (int64_t)w.to_step * (W - 1);
        w.x = (const char *)((const T *)s.x.data + offset_in(s.x, p.seq, where, t) + l.head * s.x.head + l.channel);
        w.up = (const char *)((const T *)d_out.data + offset_in(d_out, p.seq, where, t) +
                              first_head(p, part, l.head) * d_out.head + l.channel);
#pragma unroll 1
        for (int i = 0; i < SLOTS; i++) {
            w.fetch(i, 0, w.active && i < w.count);
            w.x += w.x_step, w.up += w.up_step;
        }
        rewind<T>(w.h, s, p.conv, p.seq, where, t, l);
        w.go(p.conv);
        copy_wait<0>();
        t += w.own;
        if (t < t1) next_sequence(p.seq, where, t);
    }
    if (partial) store_sums(p, w.dw, channel, w.active, shared, partial);
}

#endif
