/* SPDX-License-Identifier: Apache-2.0
 *
 * The gradients of all chunks at once, as in gdn_rule_grad.cuh, where four warps make products together (wgmma.cuh). A block has
 * a chunk and a key head, and four groups: each has a quarter of Dk of the products with states and of the results; of those with
 * D two have halves of dO D^T and N, the others of dY D^T and L'. */
#ifndef WEFT_CUDA_GDN_RULE_GROUP_GRAD_CUH
#define WEFT_CUDA_GDN_RULE_GROUP_GRAD_CUH

#include "cuda/gdn/gdn_rule_group.cuh"

enum { GROUP_GRAD_THREADS = 4 * GROUP };

/* Shared memory: a stage has 64 columns of a value head, as boxes. */
template <int DK> struct group_grad_room {
    static constexpr uint32_t before = 0, after = DK * 128, deltas = 2 * after, d_y = deltas + BOX_BYTES;
    static constexpr uint32_t d_o = d_y + BOX_BYTES, value = d_o + BOX_BYTES, gates = value + BOX_BYTES;
    static constexpr uint32_t stage = gates + 2048;
    /* behind the two stages */
    static constexpr uint32_t key = 0, query = DK / 64 * BOX_BYTES, outer = 2 * query, inner = outer + BOX_BYTES;
    static constexpr uint32_t parts = inner + BOX_BYTES;
    /* by group: sums of rows for beta, g, and those behind g; by warp: of columns, and <S, T> */
    static constexpr uint32_t rest = parts + (12 * CHUNK + 8 * CHUNK + 16) * 4;
    static constexpr uint32_t bytes = 2 * stage + rest;
    static constexpr int put_step = DK + 4; /* floats of a row of results, in the stages' room */
};
static_assert(SCALARS * 4 <= 2048, "gates and sums of exponents fit");

#ifdef WEFT_WGMMA

/* COUNT rows of 64 numbers into a box; zeros from row `count` on. */
template <int COUNT>
static __device__ __forceinline__ void bring_box(uint32_t to, const bf16 *from, int64_t step, int count)
{
    constexpr int ROWS = GROUP_GRAD_THREADS / 8;
    const int row = (int)threadIdx.x / 8, piece = (int)threadIdx.x % 8;
    const bf16 *p = from + row * step + piece * 8;
    uint32_t there = to + (uint32_t)row * 128 + (uint32_t)((piece ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < COUNT; i += ROWS) {
        copy_async(there, i + row < count ? p : from, i + row < count);
        p += ROWS * step, there += ROWS * 128;
    }
}

static __device__ __forceinline__ void bring_tokens(unsigned char *room, uint32_t to, const rows &from, bool wide,
                                                    const sequences &seq, const chunk &c, int64_t head, int channel)
{
    const bf16 *const data =
        (const bf16 *)from.data + offset_in(from, seq, c.at, c.first) + head * from.head + channel * from.channel;
    if (wide) {
        bring_box<CHUNK>(shared_address(room) + to, data, from.step, c.count);
        return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < CHUNK * 64; i += GROUP_GRAD_THREADS) {
        const int row = i / 64, column = i % 64;
        bf16 *const there =
            (bf16 *)(room + to + (uint32_t)row * 128 + (uint32_t)((column / 8 ^ (row & 7)) << 4)) + column % 8;
        *there = row < c.count ? data[row * from.step + column * from.channel] : narrow<bf16>(0.0f);
    }
}

template <int DK>
static __device__ __forceinline__ void group_grad_fetch(const grad_params &p, unsigned char *room, uint32_t stage,
                                                        const chunk &c, int64_t slot, int h, int column)
{
    typedef group_grad_room<DK> R;
    const int64_t x = slot * p.r.value_heads + h, dv = p.r.value_dim;
    const uint32_t to = shared_address(room) + stage;
    bring_box<DK>(to + R::before, p.before + x * DK * dv + column, dv, DK);
    bring_box<DK>(to + R::after, p.after + x * DK * dv + column, dv, DK);
    bring_box<CHUNK>(to + R::deltas, p.deltas + x * CHUNK * dv + column, dv, CHUNK);
    bring_box<CHUNK>(to + R::d_y, p.d_y + x * CHUNK * dv + column, dv, CHUNK);
    bring_tokens(room, stage + R::d_o, p.d_o, p.wide_d_o, p.r.seq, c, h, column);
    bring_tokens(room, stage + R::value, p.r.value, p.wide_value, p.r.seq, c, h, column);
    fetch_floats<GROUP_GRAD_THREADS, SCALARS>(room, stage + R::gates, p.gates + x * SCALARS, threadIdx.x);
    copy_commit();
}

/* Two neighbours of a row of boxes of 64 rows. */
static __device__ __forceinline__ uint32_t pair_at(int row, int column)
{
    return (uint32_t)(column / 64) * BOX_BYTES + (uint32_t)row * 128 +
           (uint32_t)((column % 64 / 8 ^ (row & 7)) << 4) + (uint32_t)(column % 8) * 2;
}

/* A gradient of 64 tokens, by way of shared memory. */
template <int DK>
static __device__ __forceinline__ void put_gradient(const grad_params &p, unsigned char *room, const rows &out,
                                                    bool wide, const chunk &c, int kh, int row, int column,
                                                    const float (&grad)[DK / 32][4])
{
    constexpr int STEP = group_grad_room<DK>::put_step;
    float *const all = (float *)room;
    if (!has(out)) return;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < DK / 32; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            *(float2 *)(all + (row + 8 * e) * STEP + column + n * 8) =
                make_float2(grad[n][2 * e], grad[n][2 * e + 1]);
    __syncthreads();
    const int64_t at = offset_in(out, p.r.seq, c.at, c.first) + kh * out.head;
    if (wide && out.dtype == WEFT_BF16 && !out.add) {
        for (int i = threadIdx.x; i < c.count * (DK / 8); i += GROUP_GRAD_THREADS) {
            const float *const v = all + i / (DK / 8) * STEP + i % (DK / 8) * 8;
            const float4 a = *(const float4 *)v, b = *(const float4 *)(v + 4);
            store_vector((bf16 *)out.data + at + i / (DK / 8) * out.step + i % (DK / 8) * 8,
                         narrow2(a.x, a.y, bf16()), narrow2(a.z, a.w, bf16()), narrow2(b.x, b.y, bf16()),
                         narrow2(b.z, b.w, bf16()));
        }
        return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < c.count * DK; i += GROUP_GRAD_THREADS)
        put(out, at + i / DK * out.step + i % DK * out.channel, all[i / DK * STEP + i % DK]);
}

#endif

template <int DK> __global__ void __launch_bounds__(GROUP_GRAD_THREADS, 1) group_grad_kernel(const grad_params p)
{
#ifdef WEFT_WGMMA
    extern __shared__ __align__(1024) unsigned char group_memory[];
    unsigned char *const room = group_memory;
    typedef group_grad_room<DK> R;
    constexpr int QUARTER = DK / 4;
    const int part = __shfl_sync(0xffffffffu, (int)threadIdx.x / GROUP, 0), side = part >> 1,
              across = (part & 1) * 32;
    const int warp = (int)threadIdx.x % GROUP / 32, lane = threadIdx.x & 31, t = lane & 3;
    const int row = warp * 16 + (lane >> 2), column = part * QUARTER + 2 * t; /* this thread's first */
    const int64_t slot = blockIdx.x / (unsigned)p.r.heads;
    const int kh = (int)(blockIdx.x % (unsigned)p.r.heads), members = p.r.value_heads / p.r.heads;
    const int blocks = p.r.value_dim / GRAD_COLUMNS, rounds = members * blocks;
    const chunk c = chunk_of(p.r.seq, slot);
    if (c.count == 0) return;
    const uint32_t base = shared_address(room);
    constexpr uint32_t own = 2 * R::stage;
    unsigned char *const key = room + own + R::key, *const query = room + own + R::query;
    unsigned char *const square = room + own + (side ? R::inner : R::outer);
    const uint64_t keys = wgmma_factor(base + own + R::key), queries = wgmma_factor(base + own + R::query);
    const uint64_t outer = wgmma_factor(base + own + R::outer), inner = wgmma_factor(base + own + R::inner);
    /* this group's columns of K and Q, as rows of a right factor */
    const uint64_t quarter = (uint64_t)(part * QUARTER / 64 * (BOX_BYTES / 16) + part * QUARTER % 64 / 8);
    float *const of_beta = (float *)(room + own + R::parts), *const of_g = of_beta + 4 * CHUNK;
    float *const of_end = of_g + 4 * CHUNK, *const of_columns = of_end + 4 * CHUNK,
                 *const of_warps = of_columns + 8 * CHUNK;

    for (int i = 0; i < DK / 64; i++) {
        bring_tokens(room, own + R::key + (uint32_t)i * BOX_BYTES, p.r.key, p.wide_key, p.r.seq, c, kh, i * 64);
        bring_tokens(room, own + R::query + (uint32_t)i * BOX_BYTES, p.r.query, p.wide_query, p.r.seq, c, kh,
                     i * 64);
    }
    group_grad_fetch<DK>(p, room, 0, c, slot, value_head_of(p.r, kh, 0), 0);
    float dq[QUARTER / 8][4] = {}, dk[QUARTER / 8][4] = {};
    float with_deltas[4][4]; /* dO D^T or dY D^T */
    float row_beta[2] = {}, row_g[2] = {}, row_end[2] = {},
          whole = 0; /* this thread's part of the sums of its two rows, and of <S, T> */
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int h = value_head_of(p.r, kh, round / blocks), block = round % blocks;
        const uint32_t stage = round & 1 ? R::stage : 0;
        copy_wait<0>();
        tma_publish(); /* to tensor cores too */
        __syncthreads();
        if (round + 1 < rounds)
            group_grad_fetch<DK>(p, room, stage ? 0 : R::stage, c, slot,
                                 value_head_of(p.r, kh, (round + 1) / blocks), (round + 1) % blocks * GRAD_COLUMNS);
        const bool more = block > 0;
        const uint32_t at = base + stage;
        const uint64_t d_o = wgmma_factor(at + R::d_o), d_y = wgmma_factor(at + R::d_y);
        const uint64_t deltas = wgmma_factor(at + R::deltas), mine = side ? d_y : d_o;
        const uint64_t before = wgmma_factor(at + R::before + (uint32_t)(part * QUARTER * 128));
        const uint64_t after = wgmma_factor(at + R::after + (uint32_t)(part * QUARTER * 128));
        float one[QUARTER / 8][4], other[QUARTER / 8][4]; /* dO S^T, then D T^T; dY S^T */
        wgmma_settle(with_deltas);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            wgmma_shared<32, false, false>(with_deltas, mine + k * 2, deltas + across * (128 / 16) + k * 2,
                                           more || k);
            wgmma_shared<QUARTER, false, false>(one, d_o + k * 2, before + k * 2, k > 0);
        }
        wgmma_commit();
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma_shared<QUARTER, false, false>(other, d_y + k * 2, before + k * 2, k > 0);
        wgmma_commit();
        if (block == 0) row_beta[0] = row_beta[1] = row_g[0] = row_g[1] = row_end[0] = row_end[1] = whole = 0;
            /* dY V, and <S, T>, meanwhile */
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll 1
            for (int n = 0; n < 2; n++) {
                float a[2], b[2];
                const uint32_t pair = pair_at(row + 8 * e, part * 16 + n * 8 + 2 * t);
                widen2(a[0], a[1], *(const uint32_t *)(room + stage + R::d_y + pair), bf16());
                widen2(b[0], b[1], *(const uint32_t *)(room + stage + R::value + pair), bf16());
                row_beta[e] = fmaf(a[0], b[0], row_beta[e]);
                row_beta[e] = fmaf(a[1], b[1], row_beta[e]);
            }
#pragma unroll 1
        for (int i = threadIdx.x; i < DK * GRAD_COLUMNS / 8; i += GROUP_GRAD_THREADS) {
            const uint4 s4 = *(const uint4 *)(room + stage + R::before + (uint32_t)i * 16),
                        t4 = *(const uint4 *)(room + stage + R::after + (uint32_t)i * 16);
            const uint32_t s2[4] = {s4.x, s4.y, s4.z, s4.w}, t2[4] = {t4.x, t4.y, t4.z, t4.w};
#pragma unroll
            for (int z = 0; z < 4; z++) {
                float a[2], b[2];
                widen2(a[0], a[1], s2[z], bf16());
                widen2(b[0], b[1], t2[z], bf16());
                whole = fmaf(a[0], b[0], whole);
                whole = fmaf(a[1], b[1], whole);
            }
        }
        const float *const from = (const float *)(room + stage + R::gates), *const to = from + CHUNK,
                           *const betas = to + CHUNK;
        const double *const sums = (const double *)(from + GATES);
        auto take = [&](const float(&x)[QUARTER / 8][4], int which) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = row + 8 * e;
                const float decay = from[i];
                const float factor = which == 0 ? p.r.scale * decay : which == 1 ? -decay * betas[i] : to[i];
                float sum = 0;
#pragma unroll
                for (int n = 0; n < QUARTER / 8; n++) {
                    float k0, k1;
                    widen2(k0, k1, *(const uint32_t *)((which == 0 ? query : key) + pair_at(i, column + n * 8)),
                           bf16());
                    sum = fmaf(k0, x[n][2 * e], sum);
                    sum = fmaf(k1, x[n][2 * e + 1], sum);
                    float(&grad)[4] = which == 0 ? dq[n] : dk[n];
                    grad[2 * e] = fmaf(factor, x[n][2 * e], grad[2 * e]);
                    grad[2 * e + 1] = fmaf(factor, x[n][2 * e + 1], grad[2 * e + 1]);
                }
                if (which < 2) row_g[e] = fmaf(factor, sum, row_g[e]);
                if (which == 1) row_beta[e] = fmaf(-decay, sum, row_beta[e]);
                if (which == 2) row_end[e] = fmaf(factor, sum, row_end[e]);
            }
        };
        wgmma_wait<1>();
        wgmma_settle(with_deltas), wgmma_settle(one);
        take(one, 0);
        wgmma_settle(one);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma_shared<QUARTER, false, false>(one, deltas + k * 2, after + k * 2, k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_settle(other);
        take(other, 1);
        wgmma_wait<0>();
        wgmma_settle(one);
        take(one, 2);
        if (block + 1 < blocks) continue;

        float products[4][4]; /* Q K^T or K K^T; made again rather than kept */
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DK / 16; k++)
            wgmma_shared<32, false, false>(products, along(side ? keys : queries, k),
                                           along(keys + across * (128 / 16), k), k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(products);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float down[2] = {};
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = row + 8 * e, j = across + n * 8 + 2 * t;
                const float beta = betas[i];
                float a[2];
#pragma unroll
                for (int w = 0; w < 2; w++) {
                    const float below = expf((float)(sums[i] - sums[j + w])), product = products[n][2 * e + w];
                    const float gam = j + w < i ? below : 1.0f, d = with_deltas[n][2 * e + w];
                    if (side) {
                        const float l = j + w < i ? -d * gam : 0.0f;
                        a[w] = beta * l;
                        row_beta[e] = fmaf(l, product, row_beta[e]);
                    } else {
                        a[w] = j + w <= i ? p.r.scale * d * gam : 0.0f;
                    }
                    const float x = j + w < i ? a[w] * product : 0.0f;
                    row_g[e] += x;
                    down[w] += x;
                }
                *(uint32_t *)(square + pair_at(i, j)) = narrow2(a[0], a[1], bf16());
            }
#pragma unroll
            for (int w = 0; w < 2; w++) {
                down[w] = column_sum(down[w]);
                if (lane < 4) of_columns[(side * 4 + warp) * CHUNK + across + n * 8 + 2 * t + w] = down[w];
            }
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float b = row_sum(row_beta[e]), g = row_sum(row_g[e]), f = row_sum(row_end[e]);
            const int i = part * CHUNK + row + 8 * e;
            if (t == 0) of_beta[i] = b, of_g[i] = g, of_end[i] = f;
        }
#pragma unroll
        for (int m = 1; m < 32; m *= 2) whole += __shfl_xor_sync(0xffffffffu, whole, m);
        if (lane == 0) of_warps[threadIdx.x / 32] = whole;
        tma_publish();
        __syncthreads();
        /* N K, N^T Q, (L' + L'^T) K */
        wgmma_settle(dq), wgmma_settle(dk);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int rows16 = k * (16 * 128 / 16);
            wgmma_shared<QUARTER, false, true>(dq, outer + k * 2, keys + quarter + rows16, true);
            wgmma_shared<QUARTER, true, true>(dk, outer + rows16, queries + quarter + rows16, true);
            wgmma_shared<QUARTER, false, true>(dk, inner + k * 2, keys + quarter + rows16, true);
            wgmma_shared<QUARTER, true, true>(dk, inner + rows16, keys + quarter + rows16, true);
        }
        wgmma_commit();
        if (threadIdx.x < 32) { /* dG, and its sums from the end; two tokens for a lane */
            float d[2], all = 0, tail = 0;
            for (int w = 0; w < 16; w++) all += of_warps[w];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = 2 * lane + e;
                float f = 0, g = 0, columns = 0;
                for (int w = 0; w < 4; w++) f += of_end[w * CHUNK + i], g += of_g[w * CHUNK + i];
                for (int w = 0; w < 8; w++) columns += of_columns[w * CHUNK + i];
                d[e] = (g - columns) - f;
                tail += f;
            }
#pragma unroll
            for (int m = 1; m < 32; m *= 2) tail += __shfl_xor_sync(0xffffffffu, tail, m);
            float sum = d[0] + d[1];
#pragma unroll
            for (int m = 1; m < 32; m *= 2) {
                const float other = __shfl_down_sync(0xffffffffu, sum, m);
                if (lane + m < 32) sum += other;
            }
            float behind = __shfl_down_sync(0xffffffffu, sum, 1);
            if (lane == 31) behind = 0;
            tail = fmaf(from[CHUNK - 1], all, tail);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = 2 * lane + e;
                if (i >= c.count) continue;
                if (has(p.d_g))
                    put(p.d_g, offset_in(p.d_g, p.r.seq, c.at, c.first + i) + h * p.d_g.head,
                        tail + (e ? d[1] + behind : sum));
                if (has(p.d_beta))
                    put(p.d_beta, offset_in(p.d_beta, p.r.seq, c.at, c.first + i) + h * p.d_beta.head,
                        (of_beta[i] + of_beta[CHUNK + i]) + (of_beta[2 * CHUNK + i] + of_beta[3 * CHUNK + i]));
            }
        }
        wgmma_wait<0>();
        wgmma_settle(dq), wgmma_settle(dk);
    }
    put_gradient<DK>(p, room, p.d_query, p.wide_d_query, c, kh, row, column, dq);
    put_gradient<DK>(p, room, p.d_key, p.wide_d_key, c, kh, row, column, dk);
#endif
}

#endif
