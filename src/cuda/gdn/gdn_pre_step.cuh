/* SPDX-License-Identifier: Apache-2.0
 *
 * Decoding [G1] [G2] [G3] [G4]: a few tokens of each of many requests, whose states lie in the rows of a cache. */
#ifndef WEFT_CUDA_GDN_PRE_STEP_CUH
#define WEFT_CUDA_GDN_PRE_STEP_CUH

#include "cuda/gdn/gdn_pre_fwd.cuh"

/* ---- any call -------------------------------------------------------------------------------------------------------------- */

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

/* All tokens of a request, whose state is in registers all the while; the newest row is always past[3], `next` the first. */
template <class T, bool PLAIN, int W, int V>
static __device__ __forceinline__ void step_rows(const fwd_params &p, int part, const lane_rows<T, V> &lane,
                                                 lane_head<W, V> &h, const place &where, raw<T, V> next)
{
    const section &s = p.in[part];
    const rows &out = p.out[part];
    const int64_t count = where.end - where.start;
    const T *x = lane.from + offset_in(s.x, p.seq, where, where.start);
    T *y = lane.to + offset_in(out, p.seq, where, where.start);
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
}

template <class T, int V>
static __device__ __forceinline__ raw<T, V> first_row(const fwd_params &p, int part, const lane_rows<T, V> &lane,
                                                      const place &where)
{
    raw<T, V> next = {};
    if (lane.active && where.end > where.start)
        load_raw(next, lane.from + offset_in(p.in[part].x, p.seq, where, where.start));
    return next;
}

template <class T, int W, int V, bool PLAIN>
static __device__ __forceinline__ void step_heads(const fwd_params &p, int part, int unit, lane_head<W, V> &h,
                                                  const place &where, int64_t row)
{
    const lane_rows<T, V> lane = lane_rows_of<T, V>(p, part, unit);
    if (row < 0) {
        zero_rows(p, part, lane, offset_in(p.out[part], p.seq, where, where.start), where.end - where.start);
        return;
    }
    const raw<T, V> next = first_row(p, part, lane, where);
    read_state<T>(h.past, p.conv, lane.active ? row : -1, lane.channel);
    step_rows<T, PLAIN>(p, part, lane, h, where, next);
    if (!lane.active || p.conv.history == 0) return;
    const int64_t at = row * p.new_state.stride[0] + lane.channel * p.new_state.stride[1];
    if (p.wide_new_state && p.new_state.dtype == WEFT_F32 && put_state_wide<float>(p, at, h.past)) return;
    if (p.wide_new_state && p.new_state.dtype == number<T>::dtype && put_state_wide<T>(p, at, h.past)) return;
    store_state<T, V>(p, part, unit, where, row);
}

/* What request n has: its tokens, and its row, -1 for padding. Padding after the last request belongs to one more. */
struct request {
    place where, or_padding; /* the latter behind the last sequence, where it is padding */
    int64_t row;
};

static __device__ __forceinline__ request request_of(const fwd_params &p, int64_t n)
{
    request r;
    r.where = {n, start_of(p.seq, n), n < p.seq.count ? start_of(p.seq, n + 1) : p.seq.tokens};
    if (r.where.end < r.where.start) r.where.end = r.where.start;
    r.row = n < p.seq.count ? own_row(p.conv.cache, n, p.searched) : -1;
    r.or_padding = {r.row < 0 ? p.seq.count : n, r.where.start, r.where.end};
    return r;
}

/* As chunk_gates_kernel; a warp has a request. */
template <class T> __global__ void step_chunk_gates_kernel(const fwd_params p)
{
    const int64_t n = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (n >= p.seq.count + (p.seq.cu != NULL)) return;
    const request r = request_of(p, n);
    forward_gates<T>(p, r.where.start, r.where.end, r.or_padding);
}

/* A warp has every `apart`-th request. */
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
        const request r = request_of(p, n);
        const place &where = r.where;
        const int64_t row = r.row;
        if (part == PART_Z) {
            copy_heads<T, V>(p, unit, where.start, where.end, row < 0 ? where.start : where.end);
        } else if (part == PART_GATES) {
            forward_each_gate<T>(p, where.start, where.end, row < 0 ? where.start : where.end);
        } else if constexpr (V == 0) {
            forward_any<T>(p, part, unit, where.start, where.end, r.or_padding);
            if (row >= 0) store_state<T, 0>(p, part, unit, where, row);
        } else {
            step_heads<T, W, V, PLAIN>(p, part, unit, h, where, row);
        }
    }
}

/* ---- the usual case -------------------------------------------------------------------------------------------------------- */

/* Four taps of type S, states of L slots of the activations' type, all of them side by side and of heads that fill their teams;
 * dense sequences and the rest as is_usual says. A call takes about as long as its memory does to answer once, so everything is
 * asked for at once, and by neighbouring lanes from neighbouring places: taps and states come through shared memory. The warps of
 * a block have the same heads of different sequences, and taps in common. A warp of v also copies what it has of z. */
template <class T, class S, int L> struct plain_step {
    enum {
        V = number<T>::per_vector,
        W = 4,
        TAPS = V * W * (int)sizeof(S) / 16, /* of 16 bytes, of a lane */
        STATES = V * L * (int)sizeof(T) / 16,
        TAPS_PER = 16 / (int)sizeof(S),
        PER = 16 / (int)sizeof(T)
    };
    uint4 taps[32 * TAPS], states[WARPS][32 * STATES];

    /* Lanes read theirs one after the other: eight lanes in a row from different banks. */
    static __device__ __forceinline__ int tap_at(int lane, int k)
    {
        return lane * TAPS + (k ^ ((lane * TAPS / 8) & (TAPS - 1)));
    }

    __device__ __forceinline__ void fetch_taps(const convolution &c, int channel, int active)
    {
        const char *from = c.weight.data + (int64_t)channel * W * (int)sizeof(S);
        for (int i = (int)threadIdx.x; i < active * TAPS; i += WARPS * 32)
            copy_async(shared_address(taps + tap_at(i / TAPS, i % TAPS)), from + i * 16, true);
    }

    __device__ __forceinline__ void read_taps(lane_head<W, V> &h, int lane) const
    {
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            float some[TAPS_PER];
            load_shared<S, TAPS_PER>(some, (const S *)(taps + tap_at(lane, k)));
#pragma unroll
            for (int i = 0; i < TAPS_PER; i++) h.weight[(k * TAPS_PER + i) % W][(k * TAPS_PER + i) / W] = some[i];
        }
    }

    __device__ __forceinline__ void fetch_state(const view &state, int64_t row, int channel, int active)
    {
        uint4 *const to = states[threadIdx.x >> 5];
        const char *from = state.data + (row * state.stride[0] + (int64_t)channel * L) * (int)sizeof(T);
#pragma unroll
        for (int k = 0; k < STATES; k++) {
            const int i = k * 32 + (int)(threadIdx.x & 31);
            if (i < active * STATES) copy_async(shared_address(to + i), from + i * 16, true);
        }
    }

    __device__ __forceinline__ void read_state(lane_head<W, V> &h, int lane) const
    {
        const uint4 *const from = states[threadIdx.x >> 5] + lane * STATES;
#pragma unroll
        for (int k = 0; k < STATES; k++) {
            float some[PER];
            load_shared<T, PER>(some, (const T *)(from + k));
#pragma unroll
            for (int i = 0; i < PER; i++) h.past[4 - L + (k * PER + i) % L][(k * PER + i) / L] = some[i];
        }
    }

    __device__ __forceinline__ void store_state(const view &state, const lane_head<W, V> &h, int64_t row,
                                                int channel, int active)
    {
        const int lane = (int)(threadIdx.x & 31);
        uint4 *const by = states[threadIdx.x >> 5];
        char *to = state.data + (row * state.stride[0] + (int64_t)channel * L) * (int)sizeof(T);
#pragma unroll
        for (int k = 0; k < STATES; k++) {
            float some[PER];
            raw<T, PER> packed;
#pragma unroll
            for (int i = 0; i < PER; i++) some[i] = h.past[4 - L + (k * PER + i) % L][(k * PER + i) / L];
            pack(packed, some);
            by[lane * STATES + k] = make_uint4(packed.word[0], packed.word[1], packed.word[2], packed.word[3]);
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < STATES; k++) {
            const int i = k * 32 + lane;
            const uint4 v = by[i];
            if (i < active * STATES) store_vector(to + i * 16, v.x, v.y, v.z, v.w);
        }
        __syncwarp();
    }
};

template <class T, class S, int L>
__global__ void __launch_bounds__(WARPS * 32, 4) step_plain_kernel(const fwd_params p)
{
    using step = plain_step<T, S, L>;
    enum { V = step::V };
    __shared__ step shared;
    int unit = (int)(blockIdx.x % (unsigned)p.first_unit[PARTS]);
    const int64_t first = (int64_t)(blockIdx.x / (unsigned)p.first_unit[PARTS]) * WARPS + (threadIdx.x >> 5);
    const int part = part_of(p, unit), lane = (int)(threadIdx.x & 31);
    let_next_begin();
    wait_for_previous();
    if (part == PART_GATES) {
        for (int64_t n = first; n < p.seq.count; n += p.apart)
            forward_each_gate<T>(p, n * p.seq.steps, (n + 1) * p.seq.steps,
                                 own_row(p.conv.cache, n, p.searched) < 0 ? 0 : p.seq.tokens);
        return;
    }
    const section &s = p.in[part];
    const lane_rows<T, V> mine = lane_rows_of<T, V>(p, part, unit);
    const int channel = s.first + unit * 32 * V,
              rest = s.heads * s.dim - unit * 32 * V; /* of the warp's first lane */
    const int active = rest < 32 * V ? rest / V : 32;
    lane_head<step::W, V> h;
    shared.fetch_taps(p.conv, channel, active);
    bool ready = false;
    for (int64_t n = first; n < p.seq.count || !ready; n += p.apart) {
        const place where = {n, n * p.seq.steps, (n + 1) * p.seq.steps};
        const int64_t named = n < p.seq.count ? state_row(p.conv.cache, n) : -1;
        raw<T, V> next = {};
        if (named >= 0) {
            shared.fetch_state(p.conv.state, named, channel, active);
            next = first_row(p, part, mine, where);
        }
        copy_commit();
        const int64_t row = named >= 0 && named_again(p.conv.cache, (int)n, named, p.searched)
                                ? -1
                                : named; /* while the load of the state is in flight */
        if (part == PART_V && has(p.out[PART_Z]) && n < p.seq.count)
            copy_rows<T, V>(p.in[PART_Z].x, p.out[PART_Z], p.seq, mine.l, where.start, where.end,
                            row < 0 ? where.start : where.end);
        copy_wait<0>();
        if (ready) {
            __syncwarp();
        } else {
            __syncthreads();
            shared.read_taps(h, lane);
            ready = true;
        }
        if (row < 0) {
            if (n < p.seq.count)
                zero_rows(p, part, mine, offset_in(p.out[part], p.seq, where, where.start), p.seq.steps);
            continue;
        }
        shared.read_state(h, lane);
        step_rows<T, true>(p, part, mine, h, where, next);
        __syncwarp();
        shared.store_state(p.new_state, h, row, channel, active);
    }
}

#endif
