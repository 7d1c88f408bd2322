/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels in front of the gated delta rule share [G1] [G2] [G3] [G4].
 *
 * A team of lanes of one warp works on a head: lane l has the channels V l .. V l + V-1, and the team's size is the power
 * of two that holds the head, so that a warp has one head or several side by side. V is 8 where all rows can be read eight
 * 16-bit numbers at a time, else 4; sums over a head are taken in the same order for both. A team walks over a range of
 * tokens, counted through all sequences, and keeps the last rows of its head in registers; what a token needs of the past
 * is there. Dense sequences are packed ones with computed offsets, and memory order is a matter of strides: nothing else
 * knows the difference. */
#ifndef WEFT_CUDA_GDN_PRE_CUH
#define WEFT_CUDA_GDN_PRE_CUH

#include "cuda/common/mma.cuh"
#include "cuda/gdn/gdn_cache.cuh"
#include "cuda/gdn/gdn_math.cuh"
#include "cuda/gdn/gdn_pre_plan.h"
#include "cuda/gdn/gdn_tokens.cuh"

/* ---- which kernels there are for a call ------------------------------------------------------------------------------------ */

/* Channels of a lane, by what rows allow: `most`, or 4, or 0 for anything. There are no such kernels for one tap, nor for eight
 * channels of less than four taps. */
template <class T, int N> static int widest(const weft_call *call, const weft_tensor *const (&all)[N], int most)
{
    const int64_t dim = call->key_dim > call->value_dim ? call->key_dim : call->value_dim;
    for (int vec = most; vec >= 4; vec /= 2) {
        bool wide = call->width <= 4 && call->width >= (vec == most ? 2 : 4) && dim <= 32 * vec;
        for (const weft_tensor *t : all) wide = wide && reads_wide(t, vec);
        if (wide) return vec;
    }
    return 0;
}

/* What the loops of most models need: silu, the norm, no bias, one rounding. All else is in kernels of their own, because
 * what is never executed still takes its place in the instruction cache. */
static inline bool is_usual(const weft_gdn_options *o, const weft_tensor *bias)
{
    return o->activation == WEFT_GDN_SILU && o->l2norm && o->rounding == WEFT_GDN_THROUGH && !weft_has(bias);
}

/* ---- a head ---------------------------------------------------------------------------------------------------------------- */

enum { GROUP = 4 }; /* channels that a sum over a head begins with */

/* q, k, v or z: where its rows are, and which channels of the weight and of a state belong to it. */
struct section {
    rows x;
    int32_t heads, dim, first; /* first channel */
    int32_t lanes, teams;      /* of a team; teams of a warp */
};

static inline section section_of(const weft_tensor *x, int64_t first, int vec)
{
    section s = {};
    s.x = rows_of(x), s.heads = (int32_t)x->shape[2], s.dim = (int32_t)x->shape[3], s.first = (int32_t)first;
    s.lanes = weft_gdn_team(s.dim, vec);
    if (s.lanes == 0) s.lanes = 32; /* a lane has several groups of channels, 32 GROUP apart */
    s.teams = 32 / s.lanes;
    return s;
}

static inline int32_t units_of(const section &s)
{
    return (s.heads + s.teams - 1) / s.teams;
}

/* A lane's place in its part. `count` channels, none where there is nothing to do but take part in sums. */
struct lane_place {
    int32_t head, channel, count;
};

template <int V> static __device__ __forceinline__ lane_place place_in(const section &s, int unit)
{
    const int lane = threadIdx.x & 31, head = unit * s.teams + lane / s.lanes, channel = lane % s.lanes * V;
    const int count = head < s.heads ? s.dim - channel : 0;
    return {head, channel, count > V ? V : count < 0 ? 0 : count};
}

/* A lane's part of a sum of products, group by group and then their sum, as the team's sum would go on. */
template <int V> static __device__ __forceinline__ float lane_sum(const float (&a)[V], const float (&b)[V])
{
    float sum[V / GROUP] = {};
#pragma unroll
    for (int k = 0; k < V / GROUP; k++)
#pragma unroll
        for (int e = 0; e < GROUP; e++) sum[k] = fmaf(a[k * GROUP + e], b[k * GROUP + e], sum[k]);
    if constexpr (V == 2 * GROUP) sum[0] += sum[1];
    return sum[0];
}

/* Sums over a team, the same in all of its lanes: neighbours first. A larger team with zeros in it gives the same bits. */
template <int N> static __device__ __forceinline__ void team_sums(float (&v)[N], int lanes)
{
#pragma unroll
    for (int m = 1; m < 32; m *= 2)
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float other = __shfl_xor_sync(0xffffffffu, v[k], m); /* by all: a branch around it costs more */
            if (m < lanes) v[k] += other;
        }
}

/* The same where a lane has N groups of channels, 32 groups apart. */
template <int N> static __device__ __forceinline__ float groups_sum(const float (&v)[N], int lanes)
{
    float sum[N];
#pragma unroll
    for (int k = 0; k < N; k++) sum[k] = v[k];
    team_sums(sum, lanes);
#pragma unroll
    for (int m = 1; m < N; m *= 2)
#pragma unroll
        for (int k = 0; k + m < N; k += 2 * m) sum[k] += sum[k + m];
    return sum[0];
}

/* ---- rows on their way ------------------------------------------------------------------------------------------------ */

enum { SLOTS = 8 }; /* rows under way */

/* copy_async of 8 bytes. */
static __device__ __forceinline__ void copy_async8(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0)
                 : "memory");
}

/* V channels of a lane from memory to a slot in shared memory, past the registers, and from there to registers: zeros where
 * there are none. Each lane reads only what it has copied itself, 16 bytes or less at a time; the lanes' lie side by side.
 * Addresses in shared memory are those of lane 0's plus `lane` bytes. */
template <class S, int V> struct slot_of {
    static constexpr int bytes = V * (int)sizeof(S), unit = bytes < 16 ? bytes : 16, size = 32 * bytes;

    static __device__ __forceinline__ int lane()
    {
        return (int)(threadIdx.x & 31) * unit;
    }

    static __device__ __forceinline__ void copy(uint32_t to, const S *from, bool valid)
    {
#pragma unroll
        for (int k = 0; k < bytes / unit; k++) {
            if constexpr (unit == 16)
                copy_async(to + k * 512, from + k * (16 / (int)sizeof(S)), valid);
            else
                copy_async8(to, from, valid);
        }
    }

    static __device__ __forceinline__ void read(float (&v)[V], const char *from)
    {
        raw<S, V> r;
#pragma unroll
        for (int k = 0; k < bytes / unit; k++) {
            if constexpr (unit == 16) {
                const uint4 w = *(const uint4 *)(from + k * 512);
                r.word[4 * k] = w.x, r.word[4 * k + 1] = w.y, r.word[4 * k + 2] = w.z, r.word[4 * k + 3] = w.w;
            } else {
                const uint2 w = *(const uint2 *)from;
                r.word[0] = w.x, r.word[1] = w.y;
            }
        }
        unpack(v, r);
    }
};

/* ---- the convolution ---------------------------------------------------------------------------------------------------------- */

struct convolution {
    view weight, bias;            /* [C, W], [C] */
    view state;                   /* [rows, C, L] */
    cache_rows cache;             /* of the states */
    int32_t width, history;       /* W, L */
    int32_t linear;               /* no silu */
    bool wide_weight, wide_state; /* a lane's taps, or slots, lie side by side, on a boundary of 16 bytes */
};

/* Numbers of `inner` to a channel, all side by side, so that those of four channels can be had 16 bytes at a time. */
static inline bool lies_side_by_side(const weft_tensor *t, int channel_dim, int64_t inner)
{
    const int64_t size = (int64_t)weft_dtype_size(t->dtype);
    if (!weft_has(t) || (uintptr_t)t->data % 16 || t->stride[channel_dim] != inner) return false;
    if (inner > 1 && t->stride[channel_dim + 1] != 1) return false;
    return channel_dim == 0 || t->shape[0] < 2 || t->stride[0] * size % 16 == 0;
}

static inline convolution convolution_of(const weft_call *call, const weft_tensor *weight, const weft_tensor *bias,
                                         const weft_tensor *state, const weft_gdn_options *o)
{
    convolution c = {};
    c.weight = view_of(weight), c.bias = view_of(bias), c.state = view_of(state);
    c.width = (int32_t)call->width, c.history = (int32_t)(call->history < 0 ? 0 : call->history);
    c.linear = o->activation == WEFT_GDN_LINEAR;
    c.cache.rows = weft_has(state) ? state->shape[0] : 0;
    c.wide_weight = lies_side_by_side(weight, 0, c.width);
    c.wide_state = weft_has(state) && lies_side_by_side(state, 1, c.history);
    return c;
}

/* What the convolution reads of one channel at token t, which may lie in front of its sequence. `row` is its state's. */
template <class T>
static __device__ __forceinline__ float past_at(const section &s, const convolution &c, const sequences &seq,
                                                const place &p, int64_t row, int64_t t, int head, int channel)
{
    if (t >= p.start)
        return widen(((const T *)s.x.data)[offset_in(s.x, seq, p, t) + head * s.x.head + channel * s.x.channel]);
    const int64_t slot = c.history + (t - p.start);
    if (row < 0 || slot < 0) return 0.0f;
    return get(c.state, row * c.state.stride[0] + (s.first + head * s.dim + channel) * c.state.stride[1] +
                            slot * c.state.stride[2]);
}

/* One lane's channels of a head: taps, and the last rows. Of a walk, its r-th row is in past[r mod 4]; the row j in front of
 * its first is in past[4 - j]. */
template <int W, int V> struct lane_head {
    float weight[W][V], past[4][V];
};

/* Numbers of N to a channel for V channels, side by side. */
template <class S, int V, int N>
static __device__ __forceinline__ void get_side_by_side(float (&v)[V * N], const S *from)
{
#pragma unroll
    for (int k = 0; k < V * N * (int)sizeof(S) / 16; k++) {
        constexpr int per = 16 / sizeof(S);
        float piece[per];
        load<S, per>(piece, from + k * per);
#pragma unroll
        for (int e = 0; e < per; e++) v[k * per + e] = piece[e];
    }
}

template <class T, int W, int V>
static __device__ __forceinline__ void read_taps(lane_head<W, V> &h, const convolution &c, int channel, int count)
{
    constexpr bool fits = V * W * sizeof(T) % 16 == 0;
#pragma unroll
    for (int e = 0; e < V; e++)
#pragma unroll
        for (int j = 0; j < W; j++) h.weight[j][e] = 0.0f;
    if (count <= 0) return;
    if (c.wide_weight && (c.weight.dtype == WEFT_F32 || (fits && c.weight.dtype == number<T>::dtype))) {
        float all[V * W];
        if (c.weight.dtype == WEFT_F32)
            get_side_by_side<float, V, W>(all, (const float *)c.weight.data + channel * W);
        else if constexpr (fits)
            get_side_by_side<T, V, W>(all, (const T *)c.weight.data + channel * W);
#pragma unroll
        for (int e = 0; e < V; e++)
#pragma unroll
            for (int j = 0; j < W; j++) h.weight[j][e] = all[e * W + j];
        return;
    }
#pragma unroll
    for (int e = 0; e < V; e++)
#pragma unroll
        for (int j = 0; j < W; j++)
            h.weight[j][e] = get(c.weight, (channel + e) * c.weight.stride[0] + j * c.weight.stride[1]);
}

/* The last L slots of a state of L, from all of its slots side by side. */
template <class S, int L, int V>
static __device__ __forceinline__ void get_slots(float (&past)[4][V], const convolution &c, int64_t at)
{
    float all[V * L];
    get_side_by_side<S, V, L>(all, (const S *)c.state.data + at);
#pragma unroll
    for (int e = 0; e < V; e++)
#pragma unroll
        for (int i = 0; i < L; i++) past[4 - L + i][e] = all[e * L + i];
}

template <class S, int V>
static __device__ __forceinline__ bool get_state_wide(float (&past)[4][V], const convolution &c, int64_t at)
{
    if constexpr (V * sizeof(S) % 16 == 0) {
        switch (c.history) {
        case 1: get_slots<S, 1>(past, c, at); return true;
        case 2: get_slots<S, 2>(past, c, at); return true;
        case 3: get_slots<S, 3>(past, c, at); return true;
        case 4: get_slots<S, 4>(past, c, at); return true;
        default: return false;
        }
    }
    return false;
}

/* The newest slots of a state, four of them at most, the newest in past[3]; zeros where there are fewer, or no state. */
template <class T, int V>
static __device__ __forceinline__ void read_state(float (&past)[4][V], const convolution &c, int64_t row,
                                                  int channel)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int e = 0; e < V; e++) past[i][e] = 0.0f;
    if (row < 0 || c.history == 0) return;
    const int64_t at = row * c.state.stride[0] + channel * c.state.stride[1];
    if (c.wide_state && c.state.dtype == WEFT_F32 && get_state_wide<float>(past, c, at)) return;
    if (c.wide_state && c.state.dtype == number<T>::dtype && get_state_wide<T>(past, c, at)) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int slot = c.history - 4 + i;
        if (slot < 0) continue;
#pragma unroll
        for (int e = 0; e < V; e++)
            past[i][e] = get(c.state, at + e * c.state.stride[1] + slot * c.state.stride[2]);
    }
}

/* The W - 1 rows in front of token t of a walk, of the sequence or of its state. */
template <class T, int W, int V>
static __device__ __forceinline__ void rewind(lane_head<W, V> &h, const section &s, const convolution &c,
                                              const sequences &seq, const place &p, int64_t t, const lane_place &l)
{
    const int64_t age = t - p.start;
    const int64_t row = age < W - 1 && has(c.state) ? state_row(c.cache, p.n) : -1;
    if (age == 0) {
        read_state<T>(h.past, c, l.count > 0 ? row : -1, s.first + l.head * s.dim + l.channel);
        return;
    }
    const T *from = (const T *)s.x.data + offset_in(s.x, seq, p, t) + l.head * s.x.head + l.channel;
#pragma unroll
    for (int j = 1; j < W; j++) {
#pragma unroll
        for (int e = 0; e < V; e++) h.past[4 - j][e] = 0.0f;
        if (l.count <= 0) continue;
        if (j <= age) {
            load<T, V>(h.past[4 - j], from - j * s.x.step);
            continue;
        }
#pragma unroll
        for (int e = 0; e < V; e++) h.past[4 - j][e] = past_at<T>(s, c, seq, p, row, t - j, l.head, l.channel + e);
    }
}

/* u = bias + sum of taps, the oldest first, x the newest row. `slot` is its own, a constant once loops are unrolled. PLAIN: there is
 * no bias. Few models have one: it is read again for every row, and takes no registers. */
template <bool PLAIN, int W, int V>
static __device__ __forceinline__ void convolve(float (&u)[V], const lane_head<W, V> &h, const float (&x)[V],
                                                const convolution &c, int channel, int count, int slot)
{
#pragma unroll
    for (int e = 0; e < V; e++) u[e] = 0.0f;
    if (!PLAIN && has(c.bias) && count > 0) {
#pragma unroll
        for (int e = 0; e < V; e++) u[e] = get(c.bias, (channel + e) * c.bias.stride[0]);
    }
#pragma unroll
    for (int e = 0; e < V; e++) {
#pragma unroll
        for (int j = 0; j < W - 1; j++) u[e] = fmaf(h.weight[j][e], h.past[(slot + 5 - W + j) & 3][e], u[e]);
        u[e] = fmaf(h.weight[W - 1][e], x[e], u[e]);
    }
}

/* The same for one channel, from memory. */
template <class T>
static __device__ __forceinline__ float convolve_any(const section &s, const convolution &c, const sequences &seq,
                                                     const place &p, int64_t row, int64_t t, int head, int channel)
{
    const int own = s.first + head * s.dim + channel;
    float u = has(c.bias) ? get(c.bias, own * c.bias.stride[0]) : 0.0f;
    for (int j = 0; j < c.width; j++)
        u = fmaf(get(c.weight, own * c.weight.stride[0] + j * c.weight.stride[1]),
                 past_at<T>(s, c, seq, p, row, t - (c.width - 1) + j, head, channel), u);
    return u;
}

/* ---- rows that are copied ------------------------------------------------------------------------------------------------ */

enum { COPIES = 8 }; /* under way: a copy needs no registers but these */

/* A lane's channels of the tokens from t0 to t1, zeros from `end` on. */
template <class T, int V>
static __device__ __forceinline__ void copy_rows(const rows &from, const rows &to, const sequences &q,
                                                 const lane_place &l, int64_t t0, int64_t t1, int64_t end)
{
    run tokens;
    if (l.count <= 0) return;
    for (int64_t t = t0; t < t1; t += tokens.count) {
        tokens = run_at(q, t, t1, end);
        const T *source = (const T *)from.data + offset_of(from, tokens.at) + l.head * from.head + l.channel;
        T *target = (T *)to.data + offset_of(to, tokens.at) + l.head * to.head + l.channel;
#pragma unroll 1
        for (int base = 0; base < tokens.count; base += COPIES) {
            raw<T, V> v[COPIES] = {};
#pragma unroll
            for (int r = 0; r < COPIES; r++, source += from.step)
                if (base + r < tokens.there) load_raw(v[r], source);
#pragma unroll
            for (int r = 0; r < COPIES; r++, target += to.step)
                if (base + r < tokens.count) store_raw(target, v[r]);
        }
    }
}

/* ---- the gate -------------------------------------------------------------------------------------------------------------------- */

/* Lanes of a token when lanes are heads: all, or as few as hold them, and then several tokens lie side by side. */
static __host__ __device__ __forceinline__ int gate_lanes(int heads)
{
    int lanes = 32;
    while (lanes / 2 >= heads) lanes /= 2;
    return lanes;
}

struct decays {
    rows a;
    view a_log, dt_bias;
    int32_t parity; /* exp(a_log) as its dtype holds it */
};

static __device__ __forceinline__ float gate_bias(const decays &d, int h)
{
    return has(d.dt_bias) ? get(d.dt_bias, h * d.dt_bias.stride[0]) : 0.0f;
}

/* exp(a_log / 2), of which the functions of gdn_math.h take two. */
static __device__ __forceinline__ float half_rate(const decays &d, int h)
{
    const float a = get(d.a_log, h * d.a_log.stride[0]);
    if (!d.parity) return expf(0.5f * a);
    const float rate = expf(a);
    return sqrtf(d.a_log.dtype == WEFT_BF16  ? rounded<bf16>(rate)
                 : d.a_log.dtype == WEFT_F16 ? rounded<f16>(rate)
                                             : rate);
}

#endif
