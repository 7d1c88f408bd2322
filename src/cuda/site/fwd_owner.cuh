/* SPDX-License-Identifier: Apache-2.0
 *
 * The reduction owner and the Sinkhorn warp of the fused site kernel: each block has both for the tokens that it owns. */
#ifndef WEFT_CUDA_SITE_FWD_OWNER_CUH
#define WEFT_CUDA_SITE_FWD_OWNER_CUH

#include "cuda/mhc/token_math.cuh"
#include "cuda/site/fwd.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Tokens of this cluster, without the padding of the last tile. */
static __device__ __forceinline__ int64_t site_live(const site_args &p, const site_block &b)
{
    const int64_t cut = site_token(p, b, b.count - 1, SITE_TILE) - p.tokens;
    return (int64_t)b.count * SITE_TILE - (cut > 0 ? cut : 0);
}

/* Batches of logits on their way to the Sinkhorn warp. */
template <int N, int BATCHES, int BATCH> struct site_logits {
    static constexpr int all = BATCHES * BATCH;
    float *at;

    __device__ __forceinline__ site_logits(const site_args &p, const site_block &b)
        : at((float *)(b.shared + p.offset.logits))
    {
    }
    /* Before those of token k are written. */
    __device__ __forceinline__ void begin(const site_block &b, uint32_t k) const
    {
        if (k % BATCH == 0) barrier_wait(b.barrier.logits_empty + k / BATCH % BATCHES * 8, (k / all & 1) ^ 1);
    }
    __device__ __forceinline__ float *of(uint32_t k, int element) const
    {
        return at + k % all * (N * N) + element;
    }
    /* After those up to token `last` are written; `live`: the number of tokens. */
    __device__ __forceinline__ void end(const site_block &b, uint32_t last, uint32_t live) const
    {
        if ((last + 1) % BATCH == 0 || last + 1 >= live)
            barrier_arrive(b.barrier.logits_full + last / BATCH % BATCHES * 8);
    }
};

/* ---- one token at a time, a row of the projection per lane ---------------------------------------------------------------- */

/* Per-token outputs that are not all fp32. */
template <int N, int R>
static __device__ __noinline__ void write_loose(const site_args &p, int64_t token, int lane, float h, float ms,
                                                float gate)
{
    if (lane < p.phi_rows) {
        if (has(p.h)) put(p.h, token * p.h.stride[0] + lane * p.h.stride[1], h);
        if (lane < N && has(p.pre)) put(p.pre, token * p.pre.stride[0] + lane * p.pre.stride[1], gate);
        if (lane >= N && lane < 2 * N && has(p.post_out))
            put(p.post_out, token * p.post_out.stride[0] + (lane - N) * p.post_out.stride[1], gate);
    } else if (lane == R && has(p.ms)) {
        put(p.ms, token * p.ms.stride[0], ms);
    }
}

/* Outputs of a lane for a token: one value of h, and one of pre, post or the mean square. Where all are fp32, the common case, two
 * pointers and their strides are computed once. */
template <int N, int R> struct site_notes {
    char *h = nullptr, *other = nullptr;
    int64_t h_step, other_step;
    int lane;
    bool plain;

    __device__ __forceinline__ site_notes(const site_args &p, int lane) : lane(lane)
    {
        const bool fp32 = p.h.dtype == WEFT_F32 && p.ms.dtype == WEFT_F32;
        plain =
            fp32 && (!has(p.pre) || p.pre.dtype == WEFT_F32) && (!has(p.post_out) || p.post_out.dtype == WEFT_F32);
        if (lane < p.phi_rows && has(p.h)) h = p.h.data + lane * p.h.stride[1] * 4;
        h_step = p.h.stride[0] * 4, other_step = p.pre.stride[0] * 4;
        if (lane < N && has(p.pre)) other = p.pre.data + lane * p.pre.stride[1] * 4;
        if (lane >= N && lane < 2 * N && lane < R && has(p.post_out))
            other = p.post_out.data + (lane - N) * p.post_out.stride[1] * 4, other_step = p.post_out.stride[0] * 4;
        if (lane == R && has(p.ms)) other = p.ms.data, other_step = p.ms.stride[0] * 4;
    }
    __device__ __forceinline__ void write(const site_args &p, int64_t token, float sum, float ms, float gate) const
    {
        if (plain) {
            if (h) *(float *)(h + token * h_step) = sum;
            if (other) *(float *)(other + token * other_step) = lane == R ? ms : gate;
        } else {
            write_loose<N, R>(p, token, lane, sum, ms, gate);
        }
    }
};

/* Adds the slices of a value in block order. */
template <int CLUSTER> static __device__ __forceinline__ float add_slices_of(const float *from)
{
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < CLUSTER; s++) sum += from[s * SITE_ROW];
    return sum;
}

static __device__ __forceinline__ float add_slices(const float *from, int cluster)
{
    return cluster == 16 ? add_slices_of<16>(from) : add_slices_of<8>(from);
}

/* Sends the same N floats to the same offset of every block. */
template <int N>
static __device__ __forceinline__ void broadcast(const site_args &p, const site_block &b, uint32_t at,
                                                 const float (&v)[N], uint32_t barrier)
{
    if (b.lane < p.cluster) cluster_send(cluster_address(at, b.lane), v, cluster_address(barrier, b.lane));
}

template <int N, site_kind KIND, int BATCHES, int BATCH>
static __device__ __forceinline__ void own_tokens(const site_args &p, const site_block &b, uint32_t all,
                                                  uint32_t live)
{
    constexpr int R = site_shape<N, KIND>::rows;
    const int lane = b.lane, kind = lane < N ? 0 : lane < 2 * N ? 1 : 2, column = lane <= R ? lane : 0;
    const float alpha = lane < p.phi_rows ? get(p.alpha, kind * p.alpha.stride[0]) : 0.0f;
    const float beta = lane < p.phi_rows ? get(p.beta, lane * p.beta.stride[0]) : 0.0f;
    const site_logits<N, BATCHES, BATCH> logits(p, b);
    const uint32_t pre_at = shared_address(b.shared + p.offset.pre),
                   aside = shared_address(b.shared + p.offset.aside);
    const site_notes<N, R> notes(p, lane);
    site_queue queue;
#pragma unroll 1
    for (; queue.k < all; queue.next(p, 1)) {
        const float *const from =
            (const float *)(b.shared + p.offset.received) + queue.slot * p.cluster * SITE_ROW + column;
        barrier_wait(b.barrier.sums + queue.slot * 8, queue.parity);
        const float h = add_slices(from, p.cluster);
        const float ms = __shfl_sync(0xffffffffu, h, R) * p.mean;
        const float inv = mm_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
        const float z = mm_gate_logit(h, inv, alpha, beta);
        const bool is_live = queue.k < live;
        if constexpr (KIND != SITE_HEAD) {
            if (is_live && has(p.res_out)) { /* first: with few tokens the Sinkhorn warp finishes last */
                logits.begin(b, queue.k);
                if (lane >= 2 * N && lane < R) *logits.of(queue.k, lane - 2 * N) = z;
                logits.end(b, queue.k, live);
            }
        }
        const float gate = gate_of(z, kind, p.numbers);
        const float stored = as_stored(p.pre, gate);
        float pre[N];
#pragma unroll
        for (int i = 0; i < N; i++) pre[i] = __shfl_sync(0xffffffffu, stored, i);
        if (lane == 0)
            tma_expect(b.barrier.sums + queue.slot * 8, (uint32_t)p.cluster * site_shape<N, KIND>::fours * 16);
        __syncwarp();
        const site_place at(p, b, queue.k);
        broadcast<N>(p, b, has(p.pre_in) ? aside : pre_at + (at.stage * SITE_TILE + at.row) * N * 4, pre,
                     b.barrier.pre + at.stage * 8);
        if (is_live) notes.write(p, site_token(p, b, (int)at.tile, (int)at.row), h, ms, gate);
    }
}

/* ---- several tokens at a time ------------------------------------------------------------------------------------------- */

/* Groups of lanes, a token each. A lane has four neighbouring sums of its token as they were received, and later one of its gates, of
 * which there are at most as many as lanes. */
enum { OWNER_LANES = 8, OWNER_TOKENS = 32 / OWNER_LANES };

/* Per-token outputs of a lane that are not all fp32: four values of h, one of pre or post, and in one lane the mean square. */
template <int N, int R>
static __device__ __noinline__ void write_fours_loose(const site_args &p, int64_t token, int part, const float4 sum,
                                                      float ms, float gate)
{
    const float h[4] = {sum.x, sum.y, sum.z, sum.w};
    const view &to = part < N ? p.pre : p.post_out;
#pragma unroll
    for (int c = 0; c < 4; c++)
        if (part * 4 + c < p.phi_rows && has(p.h))
            put(p.h, token * p.h.stride[0] + (part * 4 + c) * p.h.stride[1], h[c]);
    if (part < 2 * N && part < R && has(to)) put(to, token * to.stride[0] + part % N * to.stride[1], gate);
    if (part == R / 4 && has(p.ms)) put(p.ms, token * p.ms.stride[0], ms);
}

/* The same where all are fp32 and four values of h are 16 aligned bytes: the common case, with pointers computed once. */
template <int N, int R> struct site_fours {
    char *h = nullptr, *gate = nullptr;
    int64_t h_step, gate_step;
    int part;
    bool plain;

    __device__ __forceinline__ site_fours(const site_args &p, int part) : part(part)
    {
        const view &to = part < N ? p.pre : p.post_out;
        plain = p.h.dtype == WEFT_F32 && p.ms.dtype == WEFT_F32 && (!has(p.pre) || p.pre.dtype == WEFT_F32) &&
                (!has(p.post_out) || p.post_out.dtype == WEFT_F32) && p.phi_rows % 4 == 0 && p.h.stride[1] == 1 &&
                p.h.stride[0] % 4 == 0 && ((uint64_t)p.h.data & 15) == 0;
        h_step = p.h.stride[0] * 4, gate_step = to.stride[0] * 4;
        if (part * 4 < p.phi_rows && has(p.h)) h = p.h.data + part * 16;
        if (part == R / 4 && has(p.ms)) h = p.ms.data, h_step = p.ms.stride[0] * 4;
        if (part < 2 * N && part < R && has(to)) gate = to.data + part % N * to.stride[1] * 4;
    }
    __device__ __forceinline__ void write(const site_args &p, int64_t token, const float (&sum)[4], float ms,
                                          float value) const
    {
        if (!plain) {
            write_fours_loose<N, R>(p, token, part, make_float4(sum[0], sum[1], sum[2], sum[3]), ms, value);
            return;
        }
        if (h && part != R / 4) *(float4 *)(h + token * h_step) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        if (h && part == R / 4) *(float *)(h + token * h_step) = ms;
        if (gate) *(float *)(gate + token * gate_step) = value;
    }
};

/* Adds the slices of four values in block order. */
template <int CLUSTER> static __device__ __forceinline__ void add_fours_of(float (&sum)[4], uint32_t from)
{
#pragma unroll
    for (int s = 0; s < CLUSTER; s++) {
        const uint4 v = load_shared4(from + s * (SITE_ROW * 4));
        sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y);
        sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
    }
}

static __device__ __forceinline__ void add_fours(float (&sum)[4], uint32_t from, int cluster)
{
    if (cluster == 4) return add_fours_of<4>(sum, from);
    add_fours_of<2>(sum, from);
}

/* As many tokens as have arrived: the owner of a small cluster has several of every tile, and one after the other they would set the
 * pace. */
template <int N, site_kind KIND, int BATCHES, int BATCH>
static __device__ __forceinline__ void own_groups(const site_args &p, const site_block &b, uint32_t all,
                                                  uint32_t live)
{
    typedef site_shape<N, KIND> shape;
    constexpr int R = shape::rows;
    static_assert(shape::fours <= OWNER_LANES && 2 * N <= OWNER_LANES && BATCH % OWNER_TOKENS == 0,
                  "a group of lanes has a token");
    const int part = b.lane % OWNER_LANES, group = b.lane - part, ahead = b.lane / OWNER_LANES;
    float alpha[4], beta[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int row = part * 4 + c, kind = row < N ? 0 : row < 2 * N ? 1 : 2;
        alpha[c] = row < p.phi_rows ? get(p.alpha, kind * p.alpha.stride[0]) : 0.0f;
        beta[c] = row < p.phi_rows ? get(p.beta, row * p.beta.stride[0]) : 0.0f;
    }
    const site_logits<N, BATCHES, BATCH> logits(p, b);
    const uint32_t received = shared_address(b.shared + p.offset.received) + (part < shape::fours ? part : 0) * 16,
                   pre_at = shared_address(b.shared + p.offset.pre),
                   aside = shared_address(b.shared + p.offset.aside);
    const site_fours<N, R> notes(p, part);
    site_queue queue;
    int many;
#pragma unroll 1
    for (; queue.k < all; queue.next(p, many)) {
        const uint32_t k = queue.k;
        barrier_wait(b.barrier.sums + queue.slot * 8, queue.parity);
        /* A batch of logits ends with a group. */
        many = queue.arrived<OWNER_LANES>(p, b.barrier.sums, ahead, k + ahead < all && k % BATCH + ahead < BATCH);
        const bool mine = ahead < many;
        const int slot = queue.slot_of(p, mine ? ahead : 0);
        float sum[4] = {}, z[4];
        add_fours(sum, received + slot * p.cluster * (SITE_ROW * 4), p.cluster);
        const float ms = __shfl_sync(0xffffffffu, sum[R % 4], group + R / 4) * p.mean;
        const float inv = mm_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
#pragma unroll
        for (int c = 0; c < 4; c++) z[c] = mm_gate_logit(sum[c], inv, alpha[c], beta[c]);
        if constexpr (KIND != SITE_HEAD) {
            if (k < live && has(p.res_out)) {
                logits.begin(b, k);
                if (mine && part * 4 >= 2 * N && part * 4 < R)
                    store_shared4(shared_address(logits.of(k + ahead, part * 4 - 2 * N)),
                                  make_uint4(__float_as_uint(z[0]), __float_as_uint(z[1]), __float_as_uint(z[2]),
                                             __float_as_uint(z[3])));
                logits.end(b, k + many - 1, live);
            }
        }
        float gate = 0.0f, pre[N];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float v = __shfl_sync(0xffffffffu, z[c], group + part / 4);
            if (part % 4 == c) gate = v;
        }
        gate = gate_of(gate, part < N ? 0 : 1, p.numbers);
        const float stored = as_stored(p.pre, gate);
#pragma unroll
        for (int i = 0; i < N; i++) pre[i] = __shfl_sync(0xffffffffu, stored, group + i);
        if (mine && part == 0) tma_expect(b.barrier.sums + slot * 8, (uint32_t)p.cluster * shape::fours * 16);
        __syncwarp();
        const site_place at(p, b, k + ahead);
        const uint32_t to = has(p.pre_in) ? aside : pre_at + (at.stage * SITE_TILE + at.row) * (N * 4);
        if (mine && part < p.cluster)
            cluster_send(cluster_address(to, part), pre, cluster_address(b.barrier.pre + at.stage * 8, part));
        if (mine && k + ahead < live) notes.write(p, site_token(p, b, (int)at.tile, (int)at.row), sum, ms, gate);
    }
}

/* ---- the warps ------------------------------------------------------------------------------------------------------------ */

/* Reduction owner. With pre_in the values sent are not read, but every block waits for the barrier, so that no owner falls
 * behind. */
template <int N, site_kind KIND, int BATCHES, int BATCH>
static __device__ __forceinline__ void owner_warp(const site_args &p, const site_block &b)
{
    const uint32_t all = site_owned(p, b, (int64_t)b.count * SITE_TILE), live = site_owned(p, b, site_live(p, b));
    wait_for_previous();
    if (p.cluster <= 4)
        own_groups<N, KIND, BATCHES, BATCH>(p, b, all, live);
    else
        own_tokens<N, KIND, BATCHES, BATCH>(p, b, all, live);
}

/* Sinkhorn warp: one token per lane. */
template <int N, int BATCHES, int BATCH>
static __device__ __forceinline__ void sinkhorn_warp(const site_args &p, const site_block &b)
{
    constexpr int LOGITS = BATCHES * BATCH;
    const uint32_t mine = site_owned(p, b, site_live(p, b));
    const uint32_t logits = shared_address(b.shared + p.offset.logits);
    const view &to = p.res_out;
#pragma unroll 1
    for (uint32_t k0 = 0; k0 < mine; k0 += BATCH) {
        const uint32_t k = k0 + b.lane % BATCH;
        const uint32_t batch = k0 / BATCH % BATCHES, parity = k0 / LOGITS & 1;
        float z[N * N];
        barrier_wait(b.barrier.logits_full + batch * 8, parity);
#pragma unroll
        for (int e = 0; e < N * N; e += 4) {
            const uint4 v = load_shared4(logits + (k % LOGITS * (N * N) + e) * 4);
            z[e] = __uint_as_float(v.x), z[e + 1] = __uint_as_float(v.y);
            z[e + 2] = __uint_as_float(v.z), z[e + 3] = __uint_as_float(v.w);
        }
        barrier_arrive(b.barrier.logits_empty + batch * 8);
        if (b.lane >= BATCH || k >= mine) continue;
        sinkhorn_fwd<N>(z, p.numbers);
        const uint32_t number = b.rank + (k << p.cluster_log);
        const int64_t token = site_token(p, b, (int)(number / SITE_TILE), (int)(number % SITE_TILE));
        if (p.res_lines) {
            float *const line = (float *)to.data + token * to.stride[0];
#pragma unroll
            for (int o = 0; o < N; o++) {
                float v[N];
#pragma unroll
                for (int i = 0; i < N; i++) v[i] = z[o * N + i];
                store<float, N>(line + o * to.stride[1], v);
            }
        } else {
#pragma unroll 1
            for (int o = 0; o < N; o++)
#pragma unroll
                for (int i = 0; i < N; i++) {
                    float v = 0.0f;
#pragma unroll
                    for (int k = 0; k < N; k++)
                        if (o == k) v = z[k * N + i];
                    put(to, token * to.stride[0] + o * to.stride[1] + i * to.stride[2], v);
                }
        }
    }
}

#endif
#endif
