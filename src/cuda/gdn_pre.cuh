/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels in front of the gated delta rule share [G1] [G2] [G3] [G4].
 *
 * A team of lanes of one warp works on a head: lane l has the channels VEC l .. VEC l + VEC-1, and the team's size is the
 * power of two that holds the head, so that a warp has one head or several side by side. A team walks over a range of
 * tokens, counted through all sequences, and keeps the last rows of its head in registers; what a token needs of the past
 * is there. Dense sequences are packed ones with computed offsets, and memory order is a matter of strides: nothing else
 * knows the difference. */
#ifndef WEFT_CUDA_GDN_PRE_CUH
#define WEFT_CUDA_GDN_PRE_CUH

#include "core/status.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/gdn_pre_plan.h"

#define real float
#define scalar float
#define GM(name) gm_##name
#define GM_FN static __device__ __forceinline__
#define GM_MOST 1
#define GM_EXP_ALL(x, n) (*(x) = expf(*(x)))
#define GM_SET(x) ((float)(x))
#define GM_EXP(x) expf(x)
#define GM_LOG1P(x) log1pf(x)
#define GM_FMA(a, b, c) fmaf(a, b, c)
#define GM_GT(a, b, x, y) ((a) > (b) ? (x) : (y))
#include "core/gdn_math.h"
#undef real
#undef scalar

static __device__ __forceinline__ float silu(float u)
{
    gm_silus(&u, 1);
    return u;
}

/* y = silu(u); returns its derivative. */
static __device__ __forceinline__ float silu_slope(float u, float *y)
{
    float slope;
    *y = u;
    gm_silu_slopes(y, &slope, 1);
    return slope;
}

/* ---- tensors of four dimensions ------------------------------------------------------------------------------------ */

/* [B, S, H, D] or [B, S, H] as a kernel gets it. */
struct rows {
    char *data;
    weft_dtype dtype; /* WEFT_NONE: absent */
    int32_t add;
    int64_t batch, step, head, channel; /* strides in elements */
};

static inline rows rows_of(const weft_tensor *t, int add = 0)
{
    return {
        (char *)t->data, t->dtype, add, t->stride[0], t->stride[1], t->stride[2], t->ndim > 3 ? t->stride[3] : 0};
}

static inline rows rows_of(const weft_grad *g)
{
    return rows_of(&g->to, g->add);
}

static __host__ __device__ __forceinline__ bool has(const rows &r)
{
    return r.dtype != WEFT_NONE;
}

static __device__ __forceinline__ float get(const rows &r, int64_t i)
{
    return get(view{r.data, r.dtype, 0, {0, 0, 0}}, i);
}

static __device__ __forceinline__ void put(const rows &r, int64_t i, float v)
{
    put(view{r.data, r.dtype, r.add, {0, 0, 0}}, i, v);
}

/* Bytes that an access of VEC channels may have at once, by strides and address: all of it, or single elements. */
static inline bool reads_wide(const weft_tensor *t, int64_t vec)
{
    const int64_t bytes = vec * (int64_t)weft_dtype_size(t->dtype), unit = bytes < 16 ? bytes : 16;
    if (!weft_has(t)) return true;
    if (t->stride[3] != 1 || (uintptr_t)t->data % (uintptr_t)unit) return false;
    for (int d = 0; d < 3; d++)
        if (t->shape[d] > 1 && t->stride[d] * (int64_t)weft_dtype_size(t->dtype) % unit) return false;
    return t->shape[3] % vec == 0;
}

/* ---- sequences --------------------------------------------------------------------------------------------------------- */

struct sequences {
    const void *cu; /* NULL: dense */
    bool wide;      /* cu is int64 */
    int64_t stride, count, steps, tokens;
};

static inline sequences sequences_of(const weft_call *call, const weft_tensor *cu)
{
    sequences s = {NULL, false, 0, call->batch, call->steps, call->batch * call->steps};
    if (!weft_has(cu)) return s;
    s.cu = cu->data, s.wide = cu->dtype == WEFT_I64, s.stride = cu->stride[0], s.count = call->sequences;
    return s;
}

/* First token of sequence n. What the device finds in cu is not checked: it is clamped into the tokens there are. */
static __device__ __forceinline__ int64_t start_of(const sequences &s, int64_t n)
{
    if (!s.cu) return n * s.steps;
    const int64_t at = s.wide ? ((const int64_t *)s.cu)[n * s.stride] : ((const int32_t *)s.cu)[n * s.stride];
    return at < 0 ? 0 : at > s.tokens ? s.tokens : at;
}

/* The sequence of token t, or count behind the last one. All lanes ask for the same token and search together. */
static __device__ __forceinline__ int64_t sequence_of(const sequences &s, int64_t t)
{
    if (!s.cu) return s.steps > 0 ? t / s.steps : s.count;
    int64_t low = 0, high = s.count; /* the first that ends behind t */
    while (low < high) {
        const int64_t step = (high - low + 31) / 32;
        int64_t probe = low + ((threadIdx.x & 31) + 1) * step - 1;
        if (probe > high - 1) probe = high - 1;
        const unsigned behind = __ballot_sync(0xffffffffu, start_of(s, probe + 1) > t);
        if (!behind) return high;
        const int first = __ffs(behind) - 1;
        const int64_t found = __shfl_sync(0xffffffffu, probe, first);
        const int64_t before = __shfl_sync(0xffffffffu, probe, first ? first - 1 : 0);
        if (first) low = before + 1;
        high = found;
    }
    return low;
}

/* Where a walk is: the sequence and its bounds. */
struct place {
    int64_t n, start, end;
};

static __device__ __forceinline__ place place_of(const sequences &s, int64_t t)
{
    place p;
    p.n = sequence_of(s, t);
    if (p.n < s.count) {
        p.start = start_of(s, p.n), p.end = start_of(s, p.n + 1);
        if (p.start > t) p.start = t;
    } else {
        p.start = t, p.end = s.tokens;
    }
    return p;
}

/* The sequence that begins at t, the end of the one before. */
static __device__ __forceinline__ void next_sequence(const sequences &s, place &p, int64_t t)
{
    do {
        p.n++;
        p.end = p.n < s.count ? start_of(s, p.n + 1) : s.tokens;
    } while (p.n < s.count && p.end <= t);
    p.start = t;
}

/* A token of dense sequences as (b, s); of packed ones as (0, t). */
struct token {
    int64_t b, s;
};

static __device__ __forceinline__ token token_at(const sequences &q, int64_t t)
{
    if (q.cu || q.steps == 0) return {0, t};
    const int64_t b = t / q.steps;
    return {b, t - b * q.steps};
}

static __device__ __forceinline__ void advance(token &t, const sequences &q)
{
    if (++t.s == q.steps && !q.cu) t.s = 0, t.b++;
}

static __device__ __forceinline__ int64_t offset_of(const rows &r, const token &t)
{
    return t.b * r.batch + t.s * r.step;
}

/* ---- a head ---------------------------------------------------------------------------------------------------------------- */

enum { VEC = 4 };

/* q, k, v or z: where its rows are, and which channels of the weight and of a state belong to it. */
struct section {
    rows x;
    int32_t heads, dim, first; /* first channel */
    int32_t lanes, teams;      /* of a team; teams of a warp */
};

static inline section section_of(const weft_tensor *x, int64_t first)
{
    section s = {};
    s.x = rows_of(x), s.heads = (int32_t)x->shape[2], s.dim = (int32_t)x->shape[3], s.first = (int32_t)first;
    s.lanes = weft_gdn_team(s.dim, VEC);
    if (s.lanes == 0) s.lanes = 32; /* a lane has several groups of channels, 32 VEC apart */
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

static __device__ __forceinline__ lane_place place_in(const section &s, int unit)
{
    const int lane = threadIdx.x & 31, head = unit * s.teams + lane / s.lanes, channel = lane % s.lanes * VEC;
    const int count = head < s.heads ? s.dim - channel : 0;
    return {head, channel, count > VEC ? VEC : count < 0 ? 0 : count};
}

/* The sum over a team, the same in all of its lanes. A larger team with zeros in it gives the same bits. */
static __device__ __forceinline__ float team_sum(float v, int lanes)
{
#pragma unroll
    for (int m = 16; m; m >>= 1)
        if (m < lanes) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}

/* ---- the convolution ---------------------------------------------------------------------------------------------------------- */

struct convolution {
    view weight, bias; /* [C, W], [C] */
    view state;        /* [rows, C, L] */
    const void *index; /* rows of the states, NULL: sequence n has row n */
    bool wide_index;
    int64_t index_stride;
    int32_t width, history; /* W, L */
    int32_t linear;         /* no silu */
};

static __device__ __forceinline__ int64_t state_row(const convolution &c, int64_t n)
{
    if (!c.index) return n;
    return c.wide_index ? ((const int64_t *)c.index)[n * c.index_stride]
                        : ((const int32_t *)c.index)[n * c.index_stride];
}

static __device__ __forceinline__ float state_at(const convolution &c, int64_t n, int channel, int64_t slot)
{
    const int64_t row = has(c.state) && slot >= 0 ? state_row(c, n) : -1;
    if (row < 0) return 0.0f;
    return get(c.state, row * c.state.stride[0] + channel * c.state.stride[1] + slot * c.state.stride[2]);
}

/* What the convolution reads of one channel at token t, which may lie in front of its sequence. */
template <class T>
static __device__ __forceinline__ float past_at(const section &s, const convolution &c, const sequences &seq,
                                                const place &p, int64_t t, int head, int channel)
{
    if (t < p.start) return state_at(c, p.n, s.first + head * s.dim + channel, c.history + (t - p.start));
    return widen(((const T *)s.x.data)[offset_of(s.x, token_at(seq, t)) + head * s.x.head + channel * s.x.channel]);
}

/* The same for a lane's channels, of rows that can be read at once. */
template <class T>
static __device__ __forceinline__ void read_past(float (&v)[VEC], const section &s, const convolution &c,
                                                 const sequences &seq, const place &p, int64_t t,
                                                 const lane_place &l)
{
    if (t >= p.start) {
        load<T, VEC>(v, (const T *)s.x.data + offset_of(s.x, token_at(seq, t)) + l.head * s.x.head + l.channel);
        return;
    }
#pragma unroll
    for (int e = 0; e < VEC; e++)
        v[e] = state_at(c, p.n, s.first + l.head * s.dim + l.channel + e, c.history + (t - p.start));
}

/* One lane's channels of a head: taps, and the last rows, the r-th of a walk in past[r mod 4]. */
template <int W> struct lane_head {
    float weight[W][VEC], bias[VEC], past[4][VEC];
};

template <int W>
static __device__ __forceinline__ void read_taps(lane_head<W> &h, const convolution &c, int channel, int count)
{
#pragma unroll
    for (int e = 0; e < VEC; e++) {
        h.bias[e] = e < count && has(c.bias) ? get(c.bias, (channel + e) * c.bias.stride[0]) : 0.0f;
#pragma unroll
        for (int j = 0; j < W; j++)
            h.weight[j][e] =
                e < count ? get(c.weight, (channel + e) * c.weight.stride[0] + j * c.weight.stride[1]) : 0.0f;
    }
}

/* u = bias + sum of taps, the oldest first. `slot` is that of the token, a constant once loops are unrolled. */
template <int W> static __device__ __forceinline__ void convolve(float (&u)[VEC], const lane_head<W> &h, int slot)
{
#pragma unroll
    for (int e = 0; e < VEC; e++) {
        u[e] = h.bias[e];
#pragma unroll
        for (int j = 0; j < W; j++) u[e] = fmaf(h.weight[j][e], h.past[(slot + 5 - W + j) & 3][e], u[e]);
    }
}

/* The same for one channel, from memory. */
template <class T>
static __device__ __forceinline__ float convolve_any(const section &s, const convolution &c, const sequences &seq,
                                                     const place &p, int64_t t, int head, int channel)
{
    const int own = s.first + head * s.dim + channel;
    float u = has(c.bias) ? get(c.bias, own * c.bias.stride[0]) : 0.0f;
    for (int j = 0; j < c.width; j++)
        u = fmaf(get(c.weight, own * c.weight.stride[0] + j * c.weight.stride[1]),
                 past_at<T>(s, c, seq, p, t - (c.width - 1) + j, head, channel), u);
    return u;
}

/* ---- the gate -------------------------------------------------------------------------------------------------------------------- */

struct decays {
    rows a;
    view a_log, dt_bias;
    int32_t parity; /* exp(a_log) as its dtype holds it */
};

static __device__ __forceinline__ float gate_input(const decays &d, int64_t at, int h)
{
    return get(d.a, at + h * d.a.head) + (has(d.dt_bias) ? get(d.dt_bias, h * d.dt_bias.stride[0]) : 0.0f);
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
