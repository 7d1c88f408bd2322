/* SPDX-License-Identifier: Apache-2.0
 *
 * The scans of the gated delta rule [G6] where four warps make products together (wgmma.cuh). A group has 64 columns of the
 * state, and everything turned: its accumulators are S^T [64 columns, Dk] and D^T [64 columns, 64 tokens], rows of which are
 * rows of the left factor of the next product as they are, so that between one product and the next numbers stay in the
 * registers of their thread. What comes from shared memory are right factors, K, Q, M and P of the chunk, which another group of
 * warps brings, a chunk ahead. A block has GROUPS such groups of one head, which read the same factors and wait for each other
 * nowhere else.
 *
 * What is hi + lo and what is one bf16 number is as in gdn_rule_scan.cuh and gdn_rule_grad.cuh. */
#ifndef WEFT_CUDA_GDN_RULE_GROUP_CUH
#define WEFT_CUDA_GDN_RULE_GROUP_CUH

#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/gdn/gdn_rule_grad.cuh"
#include "cuda/gdn/gdn_rule_scan.cuh"

enum { GROUP = 128, GROUP_COLUMNS = 64, GROUP_STAGES = 3, BOX_BYTES = CHUNK * 128 };

/* Shared memory: stages of a chunk, as boxes of 64 rows of 64 columns (wgmma.cuh); barriers. `value` is what has Dv columns: a box
 * for each group, in whose columns a warp turns its results once it has read them. */
template <int DK, int GROUPS, bool QUERY> struct group_room {
    static constexpr uint32_t keys = DK / 64 * BOX_BYTES, key = 0, m_hi = keys, m_lo = m_hi + BOX_BYTES;
    static constexpr uint32_t value = m_lo + BOX_BYTES, query = value + GROUPS * BOX_BYTES;
    static constexpr uint32_t pairs = query + (QUERY ? keys : 0), gates = pairs + (QUERY ? BOX_BYTES : 0);
    static constexpr uint32_t stage = gates + 1024;
    static constexpr uint32_t barriers = GROUP_STAGES * stage;
    static constexpr uint32_t bytes = barriers + GROUP_STAGES * 2 * 8;
};
static_assert(GATES * 4 <= 1024, "gates fit");

/* A block's columns, head and sequence. */
struct group_place {
    place at;
    int64_t n, slot;
    int h, kh, first_column, count;
};

static __device__ __forceinline__ group_place group_place_of(const rule &r, int columns)
{
    group_place g;
    const unsigned across = (unsigned)(r.value_dim / columns);
    g.first_column = (int)(blockIdx.x % across) * columns;
    g.h = (int)(blockIdx.x / across % (unsigned)r.value_heads), g.kh = key_head_of(r, g.h);
    g.n = blockIdx.x / (across * (unsigned)r.value_heads);
    g.at = sequence_at(r.seq, g.n), g.slot = first_slot(r.seq, g.n);
    g.count = (int)((g.at.end - g.at.start + CHUNK - 1) / CHUNK);
    return g;
}

#ifdef WEFT_WGMMA

/* ---- chunks on their way to shared memory -------------------------------------------------------------------------------- */

/* 64 rows of COLUMNS numbers into boxes; zeros from row `count` on. `lower`: of a square, the blocks of 16 x 16 up to the
 * diagonal. */
template <int COLUMNS>
static __device__ __forceinline__ void bring(uint32_t to, const bf16 *from, int64_t step, int count, int thread,
                                             bool lower = false)
{
    constexpr int PIECES = COLUMNS / 8, ROWS = GROUP / PIECES; /* rows at a time, a multiple of 8 */
    static_assert(ROWS % 8 == 0, "a thread's rows are alike in their last three bits");
    const int row = thread / PIECES, piece = thread % PIECES;
    const bf16 *p = from + row * step + piece * 8;
    uint32_t there =
        to + (uint32_t)(piece / 8) * BOX_BYTES + (uint32_t)row * 128 + (uint32_t)((piece % 8 ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < CHUNK; i += ROWS) {
        if (!lower || piece / 2 <= (i + row) / 16) copy_async(there, i + row < count ? p : from, i + row < count);
        p += ROWS * step, there += ROWS * 128;
    }
}

/* What `lower` leaves out; products take it all the same. */
static __device__ __forceinline__ void clear_upper(unsigned char *square, int thread)
{
    for (int i = thread; i < CHUNK * 8; i += GROUP) {
        const int row = i / 8, piece = i % 8;
        if (piece / 2 > row / 16)
            *(uint4 *)(square + (uint32_t)row * 128 + (uint32_t)((piece ^ (row & 7)) << 4)) =
                make_uint4(0, 0, 0, 0);
    }
}

template <int COLUMNS>
static __device__ __forceinline__ void bring_rows(unsigned char *room, uint32_t to, const rows &from, bool wide,
                                                  const sequences &seq, const place &at, int64_t first, int count,
                                                  int64_t head, int channel, int thread)
{
    const bf16 *const data =
        (const bf16 *)from.data + offset_in(from, seq, at, first) + head * from.head + channel * from.channel;
    if (wide) {
        bring<COLUMNS>(shared_address(room) + to, data, from.step, count, thread);
        return;
    }
#pragma unroll 1
    for (int i = thread; i < CHUNK * COLUMNS; i += GROUP) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        bf16 *const there = (bf16 *)(room + to + (uint32_t)(column / 64) * BOX_BYTES + (uint32_t)row * 128 +
                                     (uint32_t)((column % 64 / 8 ^ (row & 7)) << 4)) +
                            column % 8;
        *there = row < count ? data[row * from.step + column * from.channel] : narrow<bf16>(0.0f);
    }
}

/* The group that brings chunks: the i-th is number i, or the i-th from the end where BACK. */
template <int DK, int GROUPS, bool QUERY, bool BACK>
static __device__ __forceinline__ void bring_chunks(const rule &r, const chunks &from, const rows &value,
                                                    const bool (&wide)[3], unsigned char *room,
                                                    const group_place &g, uint32_t full, uint32_t empty)
{
    typedef group_room<DK, GROUPS, QUERY> R;
    const int thread = (int)(threadIdx.x % GROUP);
    for (int s = 0; s < GROUP_STAGES; s++) {
        const uint32_t squares[] = {R::m_hi, R::m_lo, QUERY ? R::pairs : R::m_lo};
        for (const uint32_t square : squares) clear_upper(room + (uint32_t)s * R::stage + square, thread);
    }
    int stage = 0, before = 0; /* stages of this chunk and of the one that came before it */
    uint32_t parity = 1;
    for (int i = 0; i < g.count; i++) {
        const int c = BACK ? g.count - 1 - i : i;
        const int64_t first = g.at.start + (int64_t)c * CHUNK, left = g.at.end - first;
        const int count = left > CHUNK ? (int)CHUNK : (int)left;
        const int64_t x = (g.slot + c) * r.value_heads + g.h;
        const uint32_t in = (uint32_t)stage * R::stage, to = shared_address(room) + in;
        barrier_wait(empty + stage * 8, parity);
        bring_rows<DK>(room, in + R::key, r.key, wide[0], r.seq, g.at, first, count, g.kh, 0, thread);
        bring_rows<GROUPS * 64>(room, in + R::value, value, wide[1], r.seq, g.at, first, count, g.h, g.first_column,
                                thread);
        if constexpr (QUERY) {
            bring_rows<DK>(room, in + R::query, r.query, wide[2], r.seq, g.at, first, count, g.kh, 0, thread);
            bring<CHUNK>(to + R::pairs, from.pairs + x * SQUARE, CHUNK, CHUNK, thread, true);
        }
        bring<CHUNK>(to + R::m_hi, from.m_hi + x * SQUARE, CHUNK, CHUNK, thread, true);
        bring<CHUNK>(to + R::m_lo, from.m_lo + x * SQUARE, CHUNK, CHUNK, thread, true);
        fetch_floats<GROUP, GATES>(room, in + R::gates, from.gates + x * SCALARS, thread);
        copy_commit();
        if (i > 0) {
            copy_wait<1>();
            tma_publish(); /* to tensor cores too */
            barrier_arrive(full + before * 8);
        }
        before = stage;
        if (++stage == GROUP_STAGES) stage = 0, parity ^= 1;
    }
    if (g.count > 0) {
        copy_wait<0>();
        tma_publish();
        barrier_arrive(full + before * 8);
    }
}

/* ---- fragments ---------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void split_two(uint32_t &hi, uint32_t &lo, float a, float b)
{
    float ha, hb;
    hi = narrow2(a, b, bf16());
    widen2(ha, hb, hi, bf16());
    lo = narrow2(a - ha, b - hb, bf16());
}

/* Sixteen columns of accumulators as the left factor of a product. */
static __device__ __forceinline__ void split_step(uint32_t (&hi)[4], uint32_t (&lo)[4], const float (&x)[4],
                                                  const float (&y)[4])
{
    split_two(hi[0], lo[0], x[0], x[1]);
    split_two(hi[1], lo[1], x[2], x[3]);
    split_two(hi[2], lo[2], y[0], y[1]);
    split_two(hi[3], lo[3], y[2], y[3]);
}

static __device__ __forceinline__ void narrow_step(uint32_t (&a)[4], const float (&x)[4], const float (&y)[4])
{
    a[0] = narrow2(x[0], x[1], bf16()), a[1] = narrow2(x[2], x[3], bf16());
    a[2] = narrow2(y[0], y[1], bf16()), a[3] = narrow2(y[2], y[3], bf16());
}

static __device__ __forceinline__ void settle(uint32_t (&a)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[e])::"memory");
}

/* Columns 16 warp to 16 warp + 15 of tokens 16 step to 16 step + 15 of a box, turned. */
static __device__ __forceinline__ void turned(uint32_t (&a)[4], uint32_t box, int warp, int step)
{
    const uint32_t lane = threadIdx.x & 31, row = (uint32_t)step * 16 + (lane >> 4) * 8 + (lane & 7);
    ldmatrix4_trans(a, box + row * 128 + (((uint32_t)warp * 2 + (lane >> 3 & 1) ^ (lane & 7)) << 4));
}

/* d += A^T B for 16 rows of B, DK columns in boxes. */
template <int DK>
static __device__ __forceinline__ void times_rows(float (&d)[DK / 8][4], const uint32_t (&a)[4], uint64_t b,
                                                  int step)
{
#pragma unroll
    for (int box = 0; box < DK / 64; box++)
        wgmma_registers<true, true>(*(float(*)[8][4])d[box * 8], a,
                                    b + (uint64_t)(box * (BOX_BYTES / 16) + step * (16 * 128 / 16)));
}

/* Of a right factor whose columns are rows of boxes, where its rows 16 step and on are. */
static __device__ __forceinline__ uint64_t along(uint64_t b, int step)
{
    return b + (uint64_t)(step / 4 * (BOX_BYTES / 16) + step % 4 * 2);
}

/* Fragments of 16 columns of 64 rows, turned in the warp's columns of a box; put(row, piece, eight numbers) gets both halves of
 * every row. */
template <class Put>
static __device__ __forceinline__ void put_turned(unsigned char *box, int warp, const uint32_t (*a)[4], Put put)
{
    const uint32_t lane = threadIdx.x & 31, own = (uint32_t)warp * 2;
    const uint32_t at =
        shared_address(box) + ((lane >> 4) * 8 + (lane & 7)) * 128 + ((own + (lane >> 3 & 1) ^ (lane & 7)) << 4);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         at + (uint32_t)k * 16 * 128),
                     "r"(a[k][0]), "r"(a[k][1]), "r"(a[k][2]), "r"(a[k][3])
                     : "memory");
    __syncwarp();
    const uint32_t piece = lane & 1, from = (lane >> 1) * 128 + ((own + piece ^ (lane >> 1 & 7)) << 4);
#pragma unroll
    for (int k = 0; k < 4; k++)
        put(k * 16 + (int)(lane >> 1), (int)piece, *(const uint4 *)(box + from + (uint32_t)k * 16 * 128));
    __syncwarp();
}

/* A warp's sixteen columns of the state, turned: lane 4 g + t has columns g and g + 8, of Dk 8 i + 2 t and its neighbour. */
template <int DK>
static __device__ __forceinline__ void get_state(float (&s)[DK / 8][4], const states &from, int64_t n, int64_t h,
                                                 int column)
{
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    const float *const at = from.data + state_at(from, n, h, 2 * t, column + g);
#pragma unroll
    for (int i = 0; i < DK / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[i][e] = from.data ? at[(i * 8 + (e & 1)) * from.stride[2] + (e >> 1) * 8 * from.stride[3]] : 0.0f;
}

template <int DK>
static __device__ __forceinline__ void put_state(const float (&s)[DK / 8][4], const states &to, int64_t n,
                                                 int64_t h, int column)
{
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    if (!to.data) return;
    float *const at = to.data + state_at(to, n, h, 2 * t, column + g);
#pragma unroll
    for (int i = 0; i < DK / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float *const there = at + (i * 8 + (e & 1)) * to.stride[2] + (e >> 1) * 8 * to.stride[3];
            *there = to.add ? *there + s[i][e] : s[i][e];
        }
}

template <int COUNT> static __device__ __forceinline__ void scale_all(float (&s)[COUNT][4], float factor)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[i][e] *= factor;
}

/* The state [Dk, Dv] at `to` as one bf16 number, this warp's columns. */
template <int DK>
static __device__ __forceinline__ void keep_state(unsigned char *box, int warp, const uint32_t (&hi)[DK / 16][4],
                                                  bf16 *to, int64_t step)
{
#pragma unroll
    for (int half = 0; half < DK / 64; half++)
        put_turned(box, warp, hi + half * 4, [&](int row, int piece, uint4 w) {
            store_vector(to + (half * 64 + row) * step + piece * 8, w.x, w.y, w.z, w.w);
        });
}

/* Barriers of the stages: `full` when a chunk is there, `empty` when the groups have read it. */
template <int GROUPS> static __device__ __forceinline__ void make_barriers(uint32_t full, uint32_t empty)
{
    if (threadIdx.x == 0) {
        for (int s = 0; s < GROUP_STAGES; s++) {
            barrier_init(full + s * 8, GROUP);
            barrier_init(empty + s * 8,
                         GROUPS * GROUP); /* every lane arrives: racecheck sees no order within a warp */
        }
    }
    __syncthreads();
}

/* Two groups have more registers than an even share of them. */
template <int GROUPS> static __device__ __forceinline__ void share_registers(bool compute)
{
    if constexpr (GROUPS == 2) {
        if (compute)
            set_registers<232, true>();
        else
            set_registers<40, false>();
    }
}

/* ---- forward -------------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void narrow_outputs(uint32_t (&a)[4][4], const float (&o)[8][4], float scale)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float x[4], y[4];
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = scale * o[2 * k][e], y[e] = scale * o[2 * k + 1][e];
        narrow_step(a[k], x, y);
    }
}

static __device__ __forceinline__ void put_outputs(const scan_params &p, const group_place &g, unsigned char *box,
                                                   int warp, int c, int column, const uint32_t (&a)[4][4])
{
    const int64_t first = g.at.start + (int64_t)c * CHUNK, left = g.at.end - first;
    bf16 *const to = (bf16 *)p.o.data + offset_in(p.o, p.r.seq, g.at, first) + g.h * p.o.head;
    put_turned(box, warp, a, [&](int row, int piece, uint4 w) {
        if (row >= left) return;
        const int64_t j = column + piece * 8;
        if (p.wide_o) {
            store_vector(to + row * p.o.step + j, w.x, w.y, w.z, w.w);
        } else {
            const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const uint16_t bits = (uint16_t)(words[e / 2] >> e % 2 * 16);
                ((uint16_t *)to)[row * p.o.step + (j + e) * p.o.channel] = bits;
            }
        }
    });
}

/* R = beta (V - gam K S) of 16 tokens, as the left factor. */
static __device__ __forceinline__ void residual_step(uint32_t (&hi)[4], uint32_t (&lo)[4], const float (&ks)[8][4],
                                                     const uint32_t (&v)[4], const float *gates, int k)
{
    float x[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int i = k * 16 + n * 8 + 2 * (threadIdx.x & 3);
        const float2 gam = *(const float2 *)(gates + i), beta = *(const float2 *)(gates + 2 * CHUNK + i);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float a, b;
            widen2(a, b, v[2 * n + e], bf16());
            x[n][2 * e] = beta.x * fmaf(-gam.x, ks[2 * k + n][2 * e], a);
            x[n][2 * e + 1] = beta.y * fmaf(-gam.y, ks[2 * k + n][2 * e + 1], b);
        }
    }
    split_step(hi, lo, x[0], x[1]);
}

/* d = R^T M^T, sixteen tokens of R at a time. */
template <int K>
static __device__ __forceinline__ void solve_step(float (&d)[8][4], const uint32_t (&hi)[4],
                                                  const uint32_t (&lo)[4], uint64_t m_hi, uint64_t m_lo)
{
    wgmma_registers<false, (K > 0)>(d, hi, m_lo + K * 2);
    wgmma_registers<false, true>(d, lo, m_hi + K * 2);
    wgmma_registers<false, true>(d, hi, m_hi + K * 2);
}

/* o += D^T P^T in the same way. */
template <int K>
static __device__ __forceinline__ void pairs_step(float (&o)[8][4], const uint32_t (&d)[4], uint64_t pairs)
{
    wgmma_registers<false, true>(o, d, pairs + K * 2);
}

#endif

template <int DK, int GROUPS, bool OUTPUTS>
__global__ void __launch_bounds__(GROUPS *GROUP + GROUP, 1) group_scan_kernel(const scan_params p)
{
#ifdef WEFT_WGMMA
    extern __shared__ __align__(1024) unsigned char group_memory[];
    unsigned char *const room = group_memory;
    typedef group_room<DK, GROUPS, OUTPUTS> R;
    const uint32_t base = shared_address(room), full = base + R::barriers, empty = full + GROUP_STAGES * 8;
    const group_place g = group_place_of(p.r, GROUPS * GROUP_COLUMNS);
    make_barriers<GROUPS>(full, empty);
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / GROUP, 0);
    if (group == GROUPS) {
        share_registers<GROUPS>(false);
        bring_chunks<DK, GROUPS, OUTPUTS, false>(p.r, p.from, p.r.value, {p.wide_key, p.wide_value, p.wide_query},
                                                 room, g, full, empty);
    } else {
        share_registers<GROUPS>(true);
        const int warp = (int)threadIdx.x % GROUP / 32, t = threadIdx.x & 3;
        const int column = g.first_column + group * GROUP_COLUMNS + warp * 16; /* this warp's first */
        int in = 0;                                                            /* stage */
        uint32_t parity = 0;
        float s[DK / 8][4];
        uint32_t out[4][4] = {}; /* O of the chunk before */
        get_state<DK>(s, p.state, g.n, g.h, column);
#pragma unroll 1
        for (int c = 0; c < g.count; c++) {
            const uint32_t stage = (uint32_t)in * R::stage, at = base + stage;
            unsigned char *const box = room + stage + R::value + (uint32_t)group * BOX_BYTES;
            const uint32_t values = shared_address(box);
            const uint64_t keys = wgmma_factor(at + R::key), queries = wgmma_factor(at + R::query);
            const uint64_t m_hi = wgmma_factor(at + R::m_hi), m_lo = wgmma_factor(at + R::m_lo);
            const uint64_t pairs = wgmma_factor(at + R::pairs);
            const float *const gates = (const float *)(room + stage + R::gates);
            const int64_t x = (g.slot + c) * p.r.value_heads + g.h;
            barrier_wait(full + in * 8, parity);

            float ks[8][4], d[8][4], o[8][4];
            wgmma_wait<0>(), wgmma_settle(s);
            uint32_t hi[DK / 16][4], lo[DK / 16][4], v[4][4];
#pragma unroll
            for (int k = 0; k < DK / 16; k++) {
                split_step(hi[k], lo[k], s[2 * k], s[2 * k + 1]);
                settle(hi[k]), settle(lo[k]);
                wgmma_fence();
                if (k == 0)
                    wgmma_registers<false, false>(ks, lo[k], along(keys, k));
                else
                    wgmma_registers<false, true>(ks, lo[k], along(keys, k));
                wgmma_registers<false, true>(ks, hi[k], along(keys, k));
            }
            wgmma_commit();
            if constexpr (OUTPUTS) {
                wgmma_settle(o);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < DK / 16; k++) {
                    if (k == 0)
                        wgmma_registers<false, false>(o, hi[k], along(queries, k));
                    else
                        wgmma_registers<false, true>(o, hi[k], along(queries, k));
                }
                wgmma_commit();
                if (c > 0) {
                    const int before = in ? in - 1 : GROUP_STAGES - 1;
                    put_outputs(p, g, room + (uint32_t)before * R::stage + R::value + (uint32_t)group * BOX_BYTES,
                                warp, c - 1, column, out);
                    barrier_arrive(empty + before * 8);
                }
                scale_all(s, gates[CHUNK - 1]);
                wgmma_wait<1>();
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) turned(v[k], values, warp, k);
                keep_state<DK>(box, warp, hi, p.before + x * DK * p.r.value_dim + column, p.r.value_dim);
                scale_all(s, gates[CHUNK - 1]);
                wgmma_wait<0>();
            }
            wgmma_settle(ks), wgmma_settle(lo);

            uint32_t r_hi[4][4], r_lo[4][4];
            if constexpr (OUTPUTS)
#pragma unroll
                for (int k = 0; k < 4; k++) turned(v[k], values, warp, k);
#define STEP(K)                                                                                                    \
    settle(r_hi[K]), settle(r_lo[K]);                                                                              \
    wgmma_fence();                                                                                                 \
    solve_step<K>(d, r_hi[K], r_lo[K], m_hi, m_lo);
            residual_step(r_hi[0], r_lo[0], ks, v[0], gates, 0);
            residual_step(r_hi[1], r_lo[1], ks, v[1], gates, 1);
            if constexpr (OUTPUTS) {
                wgmma_wait<0>();
                wgmma_settle(o);
            }
            wgmma_settle(hi);
            STEP(0) STEP(1) residual_step(r_hi[2], r_lo[2], ks, v[2], gates, 2);
            STEP(2)
            residual_step(r_hi[3], r_lo[3], ks, v[3], gates, 3);
            STEP(3)
#undef STEP
            wgmma_commit();
            if constexpr (OUTPUTS) {
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const float2 gam = *(const float2 *)(gates + n * 8 + 2 * t);
                    o[n][0] *= gam.x, o[n][1] *= gam.y, o[n][2] *= gam.x, o[n][3] *= gam.y;
                }
            }
            wgmma_wait<0>();
            wgmma_settle(d), wgmma_settle(r_hi), wgmma_settle(r_lo);

            uint32_t one[4][4];
#pragma unroll
            for (int k = 0; k < 4; k++) narrow_step(one[k], d[2 * k], d[2 * k + 1]);
            if constexpr (OUTPUTS) {
                wgmma_settle(one), wgmma_settle(o);
                wgmma_fence();
                pairs_step<0>(o, one[0], pairs), pairs_step<1>(o, one[1], pairs);
                pairs_step<2>(o, one[2], pairs), pairs_step<3>(o, one[3], pairs);
            }
            wgmma_settle(s);
#pragma unroll
            for (int k = 0; k < 4; k++) {
#pragma unroll
                for (int n = 2 * k; n < 2 * k + 2; n++) {
                    const float2 end = *(const float2 *)(gates + CHUNK + n * 8 + 2 * t);
                    d[n][0] *= end.x, d[n][1] *= end.y, d[n][2] *= end.x, d[n][3] *= end.y;
                }
                split_step(r_hi[k], r_lo[k], d[2 * k], d[2 * k + 1]);
                settle(r_hi[k]), settle(r_lo[k]);
                wgmma_fence();
                times_rows<DK>(s, r_lo[k], keys, k);
                times_rows<DK>(s, r_hi[k], keys, k);
            }
            wgmma_commit();
            if constexpr (!OUTPUTS)
                put_turned(box, warp, one, [&](int row, int piece, uint4 w) {
                    store_vector(p.deltas + (x * CHUNK + row) * p.r.value_dim + column + piece * 8, w.x, w.y, w.z,
                                 w.w);
                });
            wgmma_wait<0>();
            wgmma_settle(s), wgmma_settle(r_hi), wgmma_settle(r_lo);
            if constexpr (OUTPUTS) {
                wgmma_settle(o), wgmma_settle(one);
                narrow_outputs(out, o, p.r.scale);
            }
            if (!OUTPUTS) barrier_arrive(empty + in * 8); /* else once O has been turned there */
            if (++in == GROUP_STAGES) in = 0, parity ^= 1;
        }
        if constexpr (OUTPUTS)
            if (g.count > 0) /* where no chunk comes any more */
                put_outputs(p, g,
                            room + (uint32_t)((g.count - 1) % GROUP_STAGES) * R::stage + R::value +
                                (uint32_t)group * BOX_BYTES,
                            warp, g.count - 1, column, out);
        put_state<DK>(s, p.last, g.n, g.h, column);
    }
#endif
}

/* ---- from the last chunk to the first ------------------------------------------------------------------------------------ */

#ifdef WEFT_WGMMA

/* y = X^T M, sixteen tokens of X at a time, the last first. */
template <int K>
static __device__ __forceinline__ void solve_back_step(float (&y)[8][4], const uint32_t (&hi)[4],
                                                       const uint32_t (&lo)[4], uint64_t m_hi, uint64_t m_lo)
{
    constexpr int ROWS = K * 16 * 128 / 16;
    wgmma_registers<true, (K < 3)>(y, hi, m_lo + ROWS);
    wgmma_registers<true, true>(y, lo, m_hi + ROWS);
    wgmma_registers<true, true>(y, hi, m_hi + ROWS);
}

/* o = dO^T P in the same way. */
template <int K>
static __device__ __forceinline__ void pairs_back_step(float (&o)[8][4], const uint32_t (&a)[4], uint64_t pairs)
{
    wgmma_registers<true, (K < 3)>(o, a, pairs + K * 16 * 128 / 16);
}

/* dV = beta dY where rows cannot be written 16 bytes at a time. */
static __device__ __forceinline__ void put_values(const back_params &p, const group_place &g, unsigned char *box,
                                                  int warp, int64_t first, int column, const float *gates,
                                                  const float (&y)[8][4])
{
    const int lane = threadIdx.x & 31, t = lane & 3;
    const int64_t at = offset_in(p.d_value, p.r.seq, g.at, first) + g.h * p.d_value.head;
    auto turned = [&](int i,
                      int j) { /* [16 tokens][16 columns] of fp32, a token in two of the warp's rows */
                               const int row = 2 * i + (j >> 3);
                               return (float *)(box + row * 128 + ((warp * 2 + (j >> 2 & 1) ^ (row & 7)) << 4)) +
                                      (j & 3);
    };
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float *const beta = gates + 2 * CHUNK + k * 16;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = n * 8 + 2 * t + (e & 1);
                *turned(i, (lane >> 2) + 8 * (e >> 1)) = beta[i] * y[2 * k + n][e];
            }
        __syncwarp();
#pragma unroll 1
        for (int z = lane; z < 16 * 16; z += 32) {
            const int i = k * 16 + z / 16;
            if (first + i < g.at.end)
                put(p.d_value, at + i * p.d_value.step + (column + z % 16) * p.d_value.channel,
                    *turned(z / 16, z % 16));
        }
        __syncwarp();
    }
}

#endif

template <int DK, int GROUPS>
__global__ void __launch_bounds__(GROUPS *GROUP + GROUP, 1) group_back_kernel(const back_params p)
{
#ifdef WEFT_WGMMA
    extern __shared__ __align__(1024) unsigned char group_memory[];
    unsigned char *const room = group_memory;
    typedef group_room<DK, GROUPS, true> R;
    const uint32_t base = shared_address(room), full = base + R::barriers, empty = full + GROUP_STAGES * 8;
    const group_place g = group_place_of(p.r, GROUPS * GROUP_COLUMNS);
    make_barriers<GROUPS>(full, empty);
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / GROUP, 0);
    if (group == GROUPS) {
        share_registers<GROUPS>(false);
        bring_chunks<DK, GROUPS, true, true>(p.r, p.from, p.d_o, {p.wide_key, p.wide_d_o, p.wide_query}, room, g,
                                             full, empty);
    } else {
        share_registers<GROUPS>(true);
        const int warp = (int)threadIdx.x % GROUP / 32, t = threadIdx.x & 3;
        const int column = g.first_column + group * GROUP_COLUMNS + warp * 16;
        int in = 0; /* stage */
        uint32_t parity = 0;
        const bool wide_values = p.wide_d_value && p.d_value.dtype == WEFT_BF16 && !p.d_value.add;
        float s[DK / 8][4];
        get_state<DK>(s, p.d_last, g.n, g.h, column);
#pragma unroll 1
        for (int i = 0; i < g.count; i++) {
            const int c = g.count - 1 - i;
            const uint32_t stage = (uint32_t)in * R::stage, at = base + stage;
            unsigned char *const box = room + stage + R::value + (uint32_t)group * BOX_BYTES;
            const uint64_t keys = wgmma_factor(at + R::key), queries = wgmma_factor(at + R::query);
            const uint64_t m_hi = wgmma_factor(at + R::m_hi), m_lo = wgmma_factor(at + R::m_lo);
            const uint64_t pairs = wgmma_factor(at + R::pairs);
            const float *const gates = (const float *)(room + stage + R::gates);
            const int64_t x = (g.slot + c) * p.r.value_heads + g.h, first = g.at.start + (int64_t)c * CHUNK;
            barrier_wait(full + in * 8, parity);

            float kt[8][4], po[8][4];
            wgmma_wait<0>(), wgmma_settle(s);
            uint32_t hi[DK / 16][4], lo[DK / 16][4], out[4][4];
#pragma unroll
            for (int k = 0; k < DK / 16; k++) {
                split_step(hi[k], lo[k], s[2 * k], s[2 * k + 1]);
            }
            wgmma_settle(hi), wgmma_settle(lo);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < DK / 16; k++) {
                if (k == 0)
                    wgmma_registers<false, false>(kt, lo[k], along(keys, k));
                else
                    wgmma_registers<false, true>(kt, lo[k], along(keys, k));
                wgmma_registers<false, true>(kt, hi[k], along(keys, k));
            }
            wgmma_commit();
#pragma unroll
            for (int k = 0; k < 4; k++) turned(out[k], shared_address(box), warp, k);
            keep_state<DK>(box, warp, hi, p.after + x * DK * p.r.value_dim + column, p.r.value_dim);
            scale_all(s, gates[CHUNK - 1]);
            wgmma_wait<0>();
            wgmma_settle(kt), wgmma_settle(hi), wgmma_settle(lo);
            wgmma_settle(out);
            wgmma_fence();
            pairs_back_step<3>(po, out[3], pairs), pairs_back_step<2>(po, out[2], pairs);
            pairs_back_step<1>(po, out[1], pairs), pairs_back_step<0>(po, out[0], pairs);
            wgmma_commit();
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float2 end = *(const float2 *)(gates + CHUNK + n * 8 + 2 * t);
                kt[n][0] *= end.x, kt[n][1] *= end.y, kt[n][2] *= end.x, kt[n][3] *= end.y;
            }
            wgmma_wait<0>();
            wgmma_settle(po), wgmma_settle(out);

            float y[8][4];
            uint32_t x_hi[4][4], x_lo[4][4];
#define STEP(K)                                                                                                    \
    {                                                                                                              \
        float z[2][4];                                                                                             \
        for (int n = 0; n < 2; n++)                                                                                \
            for (int e = 0; e < 4; e++) z[n][e] = fmaf(p.r.scale, po[2 * K + n][e], kt[2 * K + n][e]);             \
        split_step(x_hi[K], x_lo[K], z[0], z[1]);                                                                  \
        settle(x_hi[K]), settle(x_lo[K]);                                                                          \
        wgmma_fence();                                                                                             \
        solve_back_step<K>(y, x_hi[K], x_lo[K], m_hi, m_lo);                                                       \
    }
            STEP(3);
            STEP(2);
            STEP(1);
            STEP(0);
#undef STEP
            wgmma_commit();
            wgmma_settle(s);
            uint32_t o_hi[4][4], o_lo[4][4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float z[2][4];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float2 gam = *(const float2 *)(gates + k * 16 + n * 8 + 2 * t);
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float a, b;
                        widen2(a, b, out[k][2 * n + e], bf16());
                        z[n][2 * e] = p.r.scale * gam.x * a, z[n][2 * e + 1] = p.r.scale * gam.y * b;
                    }
                }
                split_step(o_hi[k], o_lo[k], z[0], z[1]);
                settle(o_hi[k]), settle(o_lo[k]);
                wgmma_fence();
                times_rows<DK>(s, o_lo[k], queries, k);
                times_rows<DK>(s, o_hi[k], queries, k);
            }
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_settle(y), wgmma_settle(x_hi), wgmma_settle(x_lo);
            uint32_t one[4][4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float z[2][4];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int token = k * 16 + n * 8 + 2 * t;
                    const float2 gam = *(const float2 *)(gates + token),
                                 beta = *(const float2 *)(gates + 2 * CHUNK + token);
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        z[n][e] = (e & 1 ? -gam.y * beta.y : -gam.x * beta.x) * y[2 * k + n][e];
                }
                narrow_step(one[k], y[2 * k], y[2 * k + 1]);
                split_step(x_hi[k], x_lo[k], z[0], z[1]);
                settle(x_hi[k]), settle(x_lo[k]);
                wgmma_fence();
                times_rows<DK>(s, x_lo[k], keys, k);
                times_rows<DK>(s, x_hi[k], keys, k);
            }
            wgmma_commit();
            put_turned(box, warp, one, [&](int row, int piece, uint4 w) {
                store_vector(p.d_y + (x * CHUNK + row) * p.r.value_dim + column + piece * 8, w.x, w.y, w.z, w.w);
            });
            if (has(p.d_value)) {
                if (wide_values) {
                    bf16 *const to = (bf16 *)p.d_value.data + offset_in(p.d_value, p.r.seq, g.at, first) +
                                     g.h * p.d_value.head + column;
                    const int64_t left = g.at.end - first;
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        float z[2][4];
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            const float2 beta = *(const float2 *)(gates + 2 * CHUNK + k * 16 + n * 8 + 2 * t);
#pragma unroll
                            for (int e = 0; e < 4; e++) z[n][e] = (e & 1 ? beta.y : beta.x) * y[2 * k + n][e];
                        }
                        narrow_step(one[k], z[0], z[1]);
                    }
                    put_turned(box, warp, one, [&](int row, int piece, uint4 w) {
                        if (row < left) store_vector(to + row * p.d_value.step + piece * 8, w.x, w.y, w.z, w.w);
                    });
                } else {
                    put_values(p, g, box, warp, first, column, gates, y);
                }
            }
            wgmma_wait<0>();
            wgmma_settle(s), wgmma_settle(x_hi), wgmma_settle(x_lo), wgmma_settle(o_hi), wgmma_settle(o_lo);
            barrier_arrive(empty + in * 8);
            if (++in == GROUP_STAGES) in = 0, parity ^= 1;
        }
        put_state<DK>(s, p.d_state, g.n, g.h, column);
    }
#endif
}

#endif
