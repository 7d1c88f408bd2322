/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule, forward and decoding [G1] [G2] [G3] [G4], in one launch. Every warp has a part (heads of
 * q, k or v, heads of z to copy, or the gates) and a range of tokens, or in decoding a sequence. Reads and writes everything
 * once, but for the W - 1 rows in front of a range.
 *
 * W = 0 stands for any width, any head and any alignment: rows are read again for every token, element by element. */
#include "cuda/gdn_pre.cuh"

enum { WARPS = 4, AHEAD = 4, GATE_TOKENS = 8, MAX_GROUPS = WEFT_GDN_MAX_DIM / (32 * VEC) };
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
    view new_state;
};

/* ---- q, k, v ------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float activate(const fwd_params &p, float u)
{
    return p.conv.linear ? u : silu(u);
}

static __device__ __forceinline__ float scale_of(const fwd_params &p, int part, float squares)
{
    const float r = part < PART_V && p.l2norm ? 1.0f / sqrtf(squares + p.l2_eps) : 1.0f;
    return part == PART_Q ? r * p.q_scale : r;
}

/* The heads of the result that a head goes to: `repeat` of them from here on, head_step apart. */
static __device__ __forceinline__ int64_t first_head(const fwd_params &p, int part, int head)
{
    return p.head_step[part] == 1 ? (int64_t)head * p.repeat[part] : head;
}

template <class T, int W>
static __device__ __forceinline__ void forward_heads(const fwd_params &p, int part, int unit, int64_t t0,
                                                     int64_t t1, place where)
{
    const section &s = p.in[part];
    const rows &out = p.out[part];
    const lane_place l = place_in(s, unit);
    const bool active = l.count > 0;
    const int channel = s.first + l.head * s.dim + l.channel;
    const T *from = (const T *)s.x.data + l.head * s.x.head + l.channel;
    T *to = (T *)out.data + first_head(p, part, l.head) * out.head + l.channel;
    const int64_t copy_step = p.head_step[part] * out.head;
    lane_head<W> h;
    read_taps(h, p.conv, channel, l.count);

    raw<T, VEC> ahead[AHEAD] = {};
    token now = token_at(p.seq, t0), later = now;
#pragma unroll
    for (int r = 0; r < AHEAD; r++) {
        if (active && t0 + r < t1) load_raw(ahead[r], from + offset_of(s.x, later));
        advance(later, p.seq);
    }
    bool zero = where.n >= p.seq.count || (p.conv.index && state_row(p.conv, where.n) < 0);
    auto rewind = [&](int slot, int64_t t) { /* rows in front of token t, the first of a walk or of a sequence */
#pragma unroll
                                             for (int j = 1; j < W; j++) {
#pragma unroll
                                                 for (int e = 0; e < VEC; e++) h.past[(slot - j) & 3][e] = 0.0f;
                                                 if (active && !zero)
                                                     read_past<T>(h.past[(slot - j) & 3], s, p.conv, p.seq, where,
                                                                  t - j, l);
                                             }
    };
    rewind(0, t0);
    for (int64_t base = t0; base < t1; base += AHEAD) {
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            const int64_t t = base + r;
            if (t >= t1) break;
            if (t == where.end) {
                next_sequence(p.seq, where, t);
                zero = where.n >= p.seq.count;
                rewind(r, t);
            }
            unpack(h.past[r], ahead[r]);
            if (active && t + AHEAD < t1) load_raw(ahead[r], from + offset_of(s.x, later));
            float y[VEC], squares = 0.0f;
            convolve(y, h, r);
#pragma unroll
            for (int e = 0; e < VEC; e++) {
                y[e] = activate(p, y[e]);
                if (p.parity) y[e] = rounded<T>(y[e]);
                squares = fmaf(y[e], y[e], squares);
            }
            if (part < PART_V && p.l2norm) squares = team_sum(active ? squares : 0.0f, s.lanes);
            const float scale = scale_of(p, part, squares);
#pragma unroll
            for (int e = 0; e < VEC; e++) y[e] = zero ? 0.0f : y[e] * scale;
            if (active) {
                raw<T, VEC> packed;
                pack(packed, y);
                T *at = to + offset_of(out, now);
                for (int i = 0; i < p.repeat[part]; i++, at += copy_step) store_raw(at, packed);
            }
            advance(now, p.seq);
            advance(later, p.seq);
        }
    }
}

/* The same in the same order for anything else. */
template <class T>
static __device__ void forward_any(const fwd_params &p, int part, int unit, int64_t t0, int64_t t1, place where)
{
    const section &s = p.in[part];
    const rows &out = p.out[part];
    const lane_place l = place_in(s, unit);
    const int groups = (s.dim + 32 * VEC - 1) / (32 * VEC);
    token now = token_at(p.seq, t0);
    float y[MAX_GROUPS][VEC];
    for (int64_t t = t0; t < t1; t++, advance(now, p.seq)) {
        if (t == where.end) next_sequence(p.seq, where, t);
        const bool zero = where.n >= p.seq.count || (p.conv.index && state_row(p.conv, where.n) < 0);
        float squares = 0.0f;
        for (int k = 0; k < groups; k++)
            for (int e = 0; e < VEC; e++) {
                const int c = l.channel + k * 32 * VEC + e;
                y[k][e] = 0.0f;
                if (l.head >= s.heads || c >= s.dim || zero) continue;
                y[k][e] = activate(p, convolve_any<T>(s, p.conv, p.seq, where, t, l.head, c));
                if (p.parity) y[k][e] = rounded<T>(y[k][e]);
                squares = fmaf(y[k][e], y[k][e], squares);
            }
        if (part < PART_V && p.l2norm) squares = team_sum(squares, s.lanes);
        const float scale = scale_of(p, part, squares);
        for (int k = 0; k < groups; k++)
            for (int e = 0; e < VEC; e++) {
                const int c = l.channel + k * 32 * VEC + e;
                if (l.head >= s.heads || c >= s.dim) continue;
                int64_t at = offset_of(out, now) + first_head(p, part, l.head) * out.head + c * out.channel;
                for (int i = 0; i < p.repeat[part]; i++, at += p.head_step[part] * out.head)
                    ((T *)out.data)[at] = narrow<T>(zero ? 0.0f : y[k][e] * scale);
            }
    }
}

/* ---- z ------------------------------------------------------------------------------------------------------------------ */

template <class T, int W>
static __device__ __forceinline__ void copy_heads(const fwd_params &p, int unit, int64_t t0, int64_t t1, bool zero)
{
    const section &s = p.in[PART_Z];
    const rows &out = p.out[PART_Z];
    const lane_place l = place_in(s, unit);
    if (l.count <= 0) return;
    const T *from = (const T *)s.x.data + l.head * s.x.head;
    T *to = (T *)out.data + l.head * out.head;
    const int64_t end = zero ? 0 : p.seq.cu ? start_of(p.seq, p.seq.count) : p.seq.tokens;
    token at = token_at(p.seq, t0);
    if constexpr (W == 0) {
        for (int64_t t = t0; t < t1; t++, advance(at, p.seq))
            for (int c = l.channel; c < s.dim; c += c % VEC == VEC - 1 ? 31 * VEC + 1 : 1)
                to[offset_of(out, at) + c * out.channel] =
                    t < end ? from[offset_of(s.x, at) + c * s.x.channel] : narrow<T>(0.0f);
    } else {
        for (int64_t base = t0; base < t1; base += AHEAD) {
            raw<T, VEC> v[AHEAD] = {};
            token later = at;
#pragma unroll
            for (int r = 0; r < AHEAD; r++) {
                if (base + r < t1 && base + r < end) load_raw(v[r], from + offset_of(s.x, later) + l.channel);
                advance(later, p.seq);
            }
#pragma unroll
            for (int r = 0; r < AHEAD; r++) {
                if (base + r >= t1) break;
                store_raw(to + offset_of(out, at) + l.channel, v[r]);
                advance(at, p.seq);
            }
        }
    }
}

/* ---- beta and g --------------------------------------------------------------------------------------------------------- */

/* Lanes are heads. Sums within a chunk begin anew at its first token, wherever the walk begins. */
static __device__ __forceinline__ void forward_gates(const fwd_params &p, int64_t t0, int64_t t1, place where)
{
    for (int h = threadIdx.x & 31; h < p.value_heads; h += 32) {
        const float half = half_rate(p.decay, h);
        auto decay = [&](const token &at) {
            return gm_decay(gate_input(p.decay, offset_of(p.decay.a, at), h), half, -1.0f);
        };
        place w = where;
        float g = 0.0f;
        if (p.g_chunk && w.n < p.seq.count)
            for (int64_t k = t0 - (t0 - w.start) % p.g_chunk; k < t0; k++) g += decay(token_at(p.seq, k));
        token at = token_at(p.seq, t0);
        for (int64_t t = t0; t < t1; t++, advance(at, p.seq)) {
            if (t == w.end) next_sequence(p.seq, w, t);
            float beta = 0.0f, out = 0.0f;
            if (w.n < p.seq.count && !(p.conv.index && state_row(p.conv, w.n) < 0)) {
                const float one = decay(at);
                g = p.g_chunk && (t - w.start) % p.g_chunk ? g + one : one;
                out = g * p.g_factor;
                beta = gm_beta(get(p.b, offset_of(p.b, at) + h * p.b.head), p.beta_scale);
            }
            put(p.beta, offset_of(p.beta, at) + h * p.beta.head, beta);
            put(p.g, offset_of(p.g, at) + h * p.g.head, out);
        }
    }
}

/* ---- states --------------------------------------------------------------------------------------------------------------- */

/* One lane's channels of a state after its sequence. In place, a slot is read before it is written: slots move towards 0. */
template <class T>
static __device__ __forceinline__ void store_state(const fwd_params &p, int part, int unit, const place &where,
                                                   int64_t row)
{
    const section &s = p.in[part];
    const lane_place l = place_in(s, unit);
    if (l.head >= s.heads) return;
    for (int c = l.channel; c < s.dim; c += c % VEC == VEC - 1 ? 31 * VEC + 1 : 1) {
        const int64_t own = row * p.new_state.stride[0] + (s.first + l.head * s.dim + c) * p.new_state.stride[1];
        for (int slot = 0; slot < p.conv.history; slot++)
            put(p.new_state, own + slot * p.new_state.stride[2],
                past_at<T>(s, p.conv, p.seq, where, where.end - p.conv.history + slot, l.head, c));
    }
}

/* ---- launch --------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ int part_of(const fwd_params &p, int &unit)
{
    int part = PART_Q;
    while (part < PART_GATES && unit >= p.first_unit[part + 1]) part++;
    unit -= p.first_unit[part];
    return part;
}

template <class T, int W>
static __device__ __forceinline__ void run_part(const fwd_params &p, int part, int unit, int64_t t0, int64_t t1,
                                                const place &where, bool padding)
{
    if (part == PART_Z)
        copy_heads<T, W>(p, unit, t0, t1, padding);
    else if (part == PART_GATES)
        forward_gates(p, t0, t1, where);
    else if constexpr (W == 0)
        forward_any<T>(p, part, unit, t0, t1, where);
    else
        forward_heads<T, W>(p, part, unit, t0, t1, where);
}

template <class T, int W> __global__ void __launch_bounds__(WARPS * 32, 4) fwd_kernel(const fwd_params p)
{
    const int units = p.first_unit[PARTS], across = (units + WARPS - 1) / WARPS;
    int unit = (int)(blockIdx.x % (unsigned)across) * WARPS + (threadIdx.x >> 5);
    int64_t t0 = (int64_t)(blockIdx.x / (unsigned)across) * p.range, t1 = t0 + p.range;
    if (unit >= units) return;
    const int part = part_of(p, unit);
    if (part == PART_GATES) t0 += unit * GATE_TOKENS, t1 = t0 + GATE_TOKENS < t1 ? t0 + GATE_TOKENS : t1;
    if (t1 > p.seq.tokens) t1 = p.seq.tokens;
    if (t0 >= t1) return;
    run_part<T, W>(p, part, unit, t0, t1, part == PART_Z ? place{} : place_of(p.seq, t0), false);
}

/* A warp has a sequence. Padding behind the last one belongs to one more. */
template <class T, int W> __global__ void __launch_bounds__(WARPS * 32, 4) step_kernel(const fwd_params p)
{
    const int units = p.first_unit[PARTS], across = (units + WARPS - 1) / WARPS;
    int unit = (int)(blockIdx.x % (unsigned)across) * WARPS + (threadIdx.x >> 5);
    const int64_t n = blockIdx.x / (unsigned)across;
    if (unit >= units) return;
    const int part = part_of(p, unit);
    const place where = {n, start_of(p.seq, n), n < p.seq.count ? start_of(p.seq, n + 1) : p.seq.tokens};
    const int64_t row = n < p.seq.count ? state_row(p.conv, n) : -1;
    if (where.start < where.end) run_part<T, W>(p, part, unit, where.start, where.end, where, row < 0);
    if (part < PART_Z && row >= 0) store_state<T>(p, part, unit, where, row);
}

/* The states after forward, when everybody has read those before it. */
template <class T> __global__ void final_kernel(const fwd_params p)
{
    const int units = p.first_unit[PART_Z], across = (units + WARPS - 1) / WARPS;
    int unit = (int)(blockIdx.x % (unsigned)across) * WARPS + (threadIdx.x >> 5);
    const int64_t n = blockIdx.x / (unsigned)across;
    if (unit >= units) return;
    const int part = part_of(p, unit);
    store_state<T>(p, part, unit, {n, start_of(p.seq, n), start_of(p.seq, n + 1)}, n);
}

/* What forward and decoding have in common: their structs have the same fields. */
template <class Args> static fwd_params params_of(const weft_call *call, const Args *a)
{
    const weft_gdn_options &o = a->options;
    const weft_tensor *const in[4] = {&a->q, &a->k, &a->v, &a->z};
    const weft_tensor *const out[4] = {&a->query, &a->key, &a->value, &a->gate};
    const int64_t keys = call->key_heads * call->key_dim, first[4] = {0, keys, 2 * keys, 0};
    fwd_params p = {};
    p.seq = sequences_of(call, &a->cu_seqlens);
    p.conv.weight = view_of(&a->weight), p.conv.bias = view_of(&a->bias), p.conv.state = view_of(&a->state);
    p.conv.history = (int32_t)(call->history < 0 ? 0 : call->history);
    p.conv.width = (int32_t)call->width;
    p.conv.linear = o.activation == WEFT_GDN_LINEAR;
    for (int i = 0; i < 4; i++) {
        const bool wanted = weft_has(out[i]) && weft_has(in[i]);
        if (!wanted) {
            p.first_unit[i + 1] = p.first_unit[i];
            continue;
        }
        p.in[i] = section_of(in[i], first[i]);
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

/* Rows that can be read and written VEC channels at a time, in heads that a team of lanes holds; else the row for width 0. */
template <class Args> static int64_t kernel_width(const weft_call *call, const Args *a)
{
    const weft_tensor *const all[] = {&a->q, &a->k, &a->v, &a->z, &a->query, &a->key, &a->value, &a->gate};
    bool wide = call->width <= 4 && call->key_dim <= 32 * VEC && call->value_dim <= 32 * VEC;
    for (const weft_tensor *t : all) wide = wide && (!weft_has(t) || reads_wide(t, VEC));
    return wide ? call->width : 0;
}

template <class T> static fwd_function fwd_of(int64_t width)
{
    static constexpr fwd_function all[] = {fwd_kernel<T, 0>, fwd_kernel<T, 1>, fwd_kernel<T, 2>, fwd_kernel<T, 3>,
                                           fwd_kernel<T, 4>};
    return all[width];
}

template <class T> static fwd_function step_of(int64_t width)
{
    static constexpr fwd_function all[] = {step_kernel<T, 0>, step_kernel<T, 1>, step_kernel<T, 2>,
                                           step_kernel<T, 3>, step_kernel<T, 4>};
    return all[width];
}

static unsigned blocks_of(int32_t units, int64_t times)
{
    return grid_of((units + WARPS - 1) / WARPS * times);
}

template <class T> static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_gdn_pre_fwd_args *a = (const weft_gdn_pre_fwd_args *)args;
    fwd_params p = params_of(call, a);
    if (p.seq.tokens > 0) {
        const weft_gdn_ranges r = weft_gdn_fwd_ranges(p.seq.tokens, p.first_unit[PART_GATES], call->sms);
        p.range = r.tokens;
        p.first_unit[PARTS] = p.first_unit[PART_GATES] + (int32_t)((r.tokens + GATE_TOKENS - 1) / GATE_TOKENS);
        WEFT_TRY(launch(call, "forward", fwd_of<T>(kernel_width(call, a)),
                        {.grid = blocks_of(p.first_unit[PARTS], r.count), .block = WARPS * 32}, p));
    }
    if (!weft_has(&a->final_state) || p.seq.count == 0) return WEFT_OK;
    p.new_state = view_of(&a->final_state);
    return launch(call, "final states", final_kernel<T>,
                  {.grid = blocks_of(p.first_unit[PART_Z], p.seq.count), .block = WARPS * 32}, p);
}

template <class T> static weft_status step(const weft_call *call, const void *args)
{
    const weft_gdn_pre_step_args *a = (const weft_gdn_pre_step_args *)args;
    fwd_params p = params_of(call, a);
    if (p.seq.count == 0 && p.seq.tokens == 0) return WEFT_OK;
    if (weft_has(&a->state_index)) {
        p.conv.index = a->state_index.data, p.conv.wide_index = a->state_index.dtype == WEFT_I64;
        p.conv.index_stride = a->state_index.stride[0];
    }
    p.new_state = view_of(&a->new_state);
    p.first_unit[PARTS] = p.first_unit[PART_GATES] + 1;
    return launch(call, "decoding", step_of<T>(kernel_width(call, a)),
                  {.grid = blocks_of(p.first_unit[PARTS], p.seq.count + (p.seq.cu != NULL)), .block = WARPS * 32},
                  p);
}

const weft_kernel weft_cuda_gdn_pre_fwd[] = {
    {WEFT_BF16, 0, fwd<bf16>, NULL}, {WEFT_F16, 0, fwd<f16>, NULL}, {WEFT_F32, 0, fwd<float>, NULL}, {}};
const weft_kernel weft_cuda_gdn_pre_step[] = {
    {WEFT_BF16, 0, step<bf16>, NULL}, {WEFT_F16, 0, step<f16>, NULL}, {WEFT_F32, 0, step<float>, NULL}, {}};
