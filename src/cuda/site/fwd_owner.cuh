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
    float sum = 0.0f;
    if (cluster == 16) return add_slices_of<16>(from);
    if (cluster == 8) return add_slices_of<8>(from);
    if (cluster == 4) return add_slices_of<4>(from);
#pragma unroll 1
    for (int s = 0; s < cluster; s++) sum += from[s * SITE_ROW];
    return sum;
}

/* Sends the same N floats to the same offset of every block. */
template <int N>
static __device__ __forceinline__ void broadcast(const site_args &p, const site_block &b, uint32_t at,
                                                 const float (&v)[N], uint32_t barrier)
{
    if (b.lane < p.cluster) cluster_send(cluster_address(at, b.lane), v, cluster_address(barrier, b.lane));
}

/* Reduction owner. With pre_in the values sent are not read, but every block waits for the barrier, so that no owner falls
 * behind. */
template <int N, site_kind KIND, int BATCHES, int BATCH>
static __device__ __forceinline__ void owner_warp(const site_args &p, const site_block &b)
{
    constexpr int R = site_shape<N, KIND>::rows, LOGITS = BATCHES * BATCH;
    const int lane = b.lane, kind = lane < N ? 0 : lane < 2 * N ? 1 : 2, column = lane <= R ? lane : 0;
    wait_for_previous();
    const float alpha = lane < p.phi_rows ? get(p.alpha, kind * p.alpha.stride[0]) : 0.0f;
    const float beta = lane < p.phi_rows ? get(p.beta, lane * p.beta.stride[0]) : 0.0f;
    float *const logits = (float *)(b.shared + p.offset.logits);
    const uint32_t pre_at = shared_address(b.shared + p.offset.pre),
                   aside = shared_address(b.shared + p.offset.aside);
    const int64_t live = site_live(p, b);
    const site_notes<N, R> notes(p, lane);
    site_owned at(p, b);
#pragma unroll 1
    for (; at.tile < (uint32_t)b.count; at.next(p)) {
        const float *const from =
            (const float *)(b.shared + p.offset.received) + at.slot * p.cluster * SITE_ROW + column;
        barrier_wait(b.barrier.sums + at.slot * 8, at.parity);
        const float h = add_slices(from, p.cluster);
        const float ms = __shfl_sync(0xffffffffu, h, R) * p.mean;
        const float inv = mm_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
        const float z = mm_gate_logit(h, inv, alpha, beta);
        const bool is_live = at.tile * SITE_TILE + at.row < live;
        if constexpr (KIND != SITE_HEAD) {
            if (is_live && has(p.res_out)) { /* first: with few tokens the Sinkhorn warp finishes last */
                const uint32_t batch = at.k / BATCH % BATCHES;
                barrier_wait(b.barrier.logits_empty + batch * 8, (at.k / LOGITS & 1) ^ 1);
                if (lane >= 2 * N && lane < R) logits[(lane - 2 * N) * LOGITS + at.k % LOGITS] = z;
                barrier_arrive(b.barrier.logits_full + batch * 8);
            }
        }
        const float gate = gate_of(z, kind, p.numbers);
        const float stored = as_stored(p.pre, gate);
        float pre[N];
#pragma unroll
        for (int i = 0; i < N; i++) pre[i] = __shfl_sync(0xffffffffu, stored, i);
        if (lane == 0)
            tma_expect(b.barrier.sums + at.slot * 8, (uint32_t)p.cluster * site_shape<N, KIND>::fours * 16);
        __syncwarp();
        broadcast<N>(p, b, has(p.pre_in) ? aside : pre_at + (at.stage * SITE_TILE + at.row) * N * 4, pre,
                     b.barrier.pre + at.stage * 8);
        if (is_live) notes.write(p, site_token(p, b, (int)at.tile, (int)at.row), h, ms, gate);
    }
}

/* Sinkhorn warp: one token per lane. */
template <int N, int BATCHES, int BATCH>
static __device__ __forceinline__ void sinkhorn_warp(const site_args &p, const site_block &b)
{
    constexpr int LOGITS = BATCHES * BATCH;
    const int64_t live = site_live(p, b), mine = (live - (int64_t)b.rank + p.cluster - 1) >> p.cluster_log;
    const float *const logits = (const float *)(b.shared + p.offset.logits);
    const view &to = p.res_out;
#pragma unroll 1
    for (int64_t k0 = 0; k0 < mine; k0 += BATCH) {
        const int64_t k = k0 + b.lane % BATCH;
        const uint32_t batch = k0 / BATCH % BATCHES, parity = k0 / LOGITS & 1;
        float z[N * N];
        /* The last batch may have fewer tokens: this warp arrives for the missing ones. */
#pragma unroll 1
        for (int64_t missing = mine; missing < k0 + BATCH; missing++)
            barrier_arrive(b.barrier.logits_full + batch * 8);
        barrier_wait(b.barrier.logits_full + batch * 8, parity);
#pragma unroll
        for (int e = 0; e < N * N; e++) z[e] = logits[e * LOGITS + k % LOGITS];
        barrier_arrive(b.barrier.logits_empty + batch * 8);
        if (b.lane >= BATCH || k >= mine) continue;
        sinkhorn_fwd<N>(z, p.numbers);
        const int64_t number = (int64_t)b.rank + (k << p.cluster_log);
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
