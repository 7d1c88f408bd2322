/* SPDX-License-Identifier: Apache-2.0
 *
 * Backward of the gated delta rule in chunks [G6], behind the states and deltas of the forward scan: a scan from
 * the last chunk to the first for the gradient of the state, cut as forward is, and a kernel for all chunks at
 * once that makes the gradients of a key head from those of the value heads that read it, in order. T being the
 * state's gradient behind a chunk, S the state in front of it:
 *     dD = scale P^T dO + w K T;   dY = M^T dD;   d_v = beta dY;   T <- gam_end T + scale (gam Q)^T dO - (gam beta K)^T dY
 *     N = scale (dO D^T) o Gam, j <= i;   L' = -beta (dY D^T) o Gam, j < i
 *     d_q = scale gam dO S^T + N K;   d_k = -gam beta dY S^T + N^T Q + (L' + L'^T) K + w D T^T
 * What T goes through is taken as hi + lo but for P; in the second kernel everything is one bf16 number. */
#ifndef WEFT_CUDA_GDN_RULE_GRAD_CUH
#define WEFT_CUDA_GDN_RULE_GRAD_CUH

#include "cuda/gdn/gdn_rule_chunk.cuh"
#include "cuda/gdn/gdn_rule_scan.cuh"

static __device__ __noinline__ void put_slowly(const rows to, int64_t at, float v)
{
    put(to, at, v);
}

/* Two neighbours of a row of a gradient. `wide`: rows are of pairs that can be written at once. */
static __device__ __forceinline__ void put_two(const rows &to, bool wide, int64_t row, int64_t channel, float a,
                                               float b)
{
    if (wide && to.dtype == WEFT_BF16 && !to.add) {
        *(uint32_t *)((bf16 *)to.data + row + channel) = narrow2(a, b, bf16());
        return;
    }
    put_slowly(to, row + channel * to.channel, a);
    put_slowly(to, row + (channel + 1) * to.channel, b);
}

/* ---- from the last chunk to the first ------------------------------------------------------------------------ */

struct back_params {
    rule r;
    chunks from;
    rows d_o, d_value;
    states d_last, d_state;
    bf16 *after, *d_y; /* by slot and value head: T behind the chunk [Dk, Dv], and dY [64, Dv] */
    int32_t stages;
    bool wide_query, wide_key, wide_d_o, wide_d_value;
};

template <int DK, int C> struct back_room {
    static constexpr uint32_t key = 0, query = tile_bytes(CHUNK, DK), m_hi = 2 * query;
    static constexpr uint32_t m_lo = m_hi + tile_bytes(CHUNK, CHUNK), pairs = m_lo + tile_bytes(CHUNK, CHUNK);
    static constexpr uint32_t d_o = pairs + tile_bytes(CHUNK, CHUNK), gates = d_o + tile_bytes(CHUNK, C);
    static constexpr uint32_t stage = gates + GATES * 4;
    static constexpr uint32_t t_hi = 0, t_lo = tile_bytes(DK, C), x_hi = 2 * t_lo,
                              x_lo = x_hi + tile_bytes(CHUNK, C);
    static constexpr uint32_t y_hi = x_lo + tile_bytes(CHUNK, C), y_lo = y_hi + tile_bytes(CHUNK, C);
    static constexpr uint32_t o_hi = y_lo + tile_bytes(CHUNK, C), o_lo = o_hi + tile_bytes(CHUNK, C);
    static constexpr uint32_t rest = o_lo + tile_bytes(CHUNK, C);
};

template <int DK, int C>
static __device__ __forceinline__ void back_fetch(const back_params &p, unsigned char *room, uint32_t stage,
                                                  const place &at, int64_t slot, int chunk_number, int h, int kh,
                                                  int column, int thread, int part)
{
    typedef back_room<DK, C> R;
    const int64_t first = at.start + (int64_t)chunk_number * CHUNK, left = at.end - first;
    const int count = left > CHUNK ? (int)CHUNK : (int)left;
    const int64_t x = (slot + chunk_number) * p.r.value_heads + h;
    const sequences &q = p.r.seq;
    const uint32_t square = tile_step(CHUNK);
    if (part == 0) {
        fetch_rows<PRODUCERS, DK>(room, {stage + R::key, tile_step(DK)}, p.r.key, p.wide_key, q, at, first, count,
                                  kh, 0, thread);
        fetch_rows<PRODUCERS, C>(room, {stage + R::d_o, tile_step(C)}, p.d_o, p.wide_d_o, q, at, first, count, h,
                                 column, thread);
    }
    if (part == 1) {
        fetch_rows<PRODUCERS, DK>(room, {stage + R::query, tile_step(DK)}, p.r.query, p.wide_query, q, at, first,
                                  count, kh, 0, thread);
        fetch<PRODUCERS, CHUNK, CHUNK>(room, {stage + R::m_hi, square}, p.from.m_hi + x * SQUARE, CHUNK, CHUNK,
                                       thread);
    }
    if (part == 2) {
        fetch<PRODUCERS, CHUNK, CHUNK>(room, {stage + R::m_lo, square}, p.from.m_lo + x * SQUARE, CHUNK, CHUNK,
                                       thread);
        fetch<PRODUCERS, CHUNK, CHUNK>(room, {stage + R::pairs, square}, p.from.pairs + x * SQUARE, CHUNK, CHUNK,
                                       thread);
        fetch_floats<PRODUCERS, GATES>(room, stage + R::gates, p.from.gates + x * SCALARS, thread);
    }
}

template <int DK, int C>
__global__ void __launch_bounds__(C / 16 * 128 + PRODUCERS) back_kernel(const back_params p)
{
    extern __shared__ __align__(128) unsigned char room[];
    typedef back_room<DK, C> R;
    constexpr int THREADS = C / 16 * 128, ROWS = DK / 4, TILES = ROWS / 16;
    const int warp = threadIdx.x >> 5, column = warp / 4 * 16;
    const int token = (warp & 4 ? 3 - (warp & 3) : warp & 3) * 16, row = (warp & 3) * ROWS;
    const int across = p.r.value_dim / C;
    const int first_column = (int)(blockIdx.x % (unsigned)across) * C;
    const int h = (int)(blockIdx.x / (unsigned)across % (unsigned)p.r.value_heads), kh = key_head_of(p.r, h);
    const int64_t n = blockIdx.x / ((unsigned)across * (unsigned)p.r.value_heads);
    const place at = sequence_at(p.r.seq, n);
    const int64_t slot = first_slot(p.r.seq, n);
    const int count = (int)((at.end - at.start + CHUNK - 1) / CHUNK);
    const uint32_t base = shared_address(room), own = (uint32_t)p.stages * R::stage;
    const tile t_hi = {own + R::t_hi, tile_step(C)}, t_lo = {own + R::t_lo, tile_step(C)};
    const tile x_hi = {own + R::x_hi, tile_step(C)}, x_lo = {own + R::x_lo, tile_step(C)};
    const tile y_hi = {own + R::y_hi, tile_step(C)}, y_lo = {own + R::y_lo, tile_step(C)};
    const tile o_hi = {own + R::o_hi, tile_step(C)}, o_lo = {own + R::o_lo, tile_step(C)};
    auto addressed = [base](const tile &t) { return tile{base + t.at, t.step}; };
    const tile at_hi = addressed(t_hi), at_lo = addressed(t_lo), ax_hi = addressed(x_hi), ax_lo = addressed(x_lo);
    const tile ay_hi = addressed(y_hi), ay_lo = addressed(y_lo), ao_hi = addressed(o_hi), ao_lo = addressed(o_lo);

    if (threadIdx.x >= THREADS) {
        fetch_ahead<THREADS>(count, p.stages, [&](int c, int part) {
            back_fetch<DK, C>(p, room, p.stages == 2 && (c & 1) ? R::stage : 0, at, slot, count - 1 - c, h, kh,
                              first_column, threadIdx.x - THREADS, part);
        });
        return;
    }
    float s[TILES][2][4];
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[m][k][e] = state_get(p.d_last, n, h, row + m * 16 + pair_row(e >> 1),
                                       first_column + column + pair_column(k) + (e & 1));
    for (int i = 0; i < count; i++) {
        const int c = count - 1 - i;
        const uint32_t stage = p.stages == 2 && (i & 1) ? R::stage : 0;
        const tile k = {base + stage + R::key, tile_step(DK)}, q = {base + stage + R::query, tile_step(DK)};
        const tile m_hi = {base + stage + R::m_hi, tile_step(CHUNK)},
                   m_lo = {base + stage + R::m_lo, tile_step(CHUNK)};
        const tile pairs = {base + stage + R::pairs, tile_step(CHUNK)};
        const tile d_o = {stage + R::d_o, tile_step(C)}, ad_o = addressed(d_o);
        const float *const from = (const float *)(room + stage + R::gates), *const to = from + CHUNK,
                           *const beta = to + CHUNK;
        const int64_t x = (slot + c) * p.r.value_heads + h, first = at.start + (int64_t)c * CHUNK;
#pragma unroll
        for (int m = 0; m < TILES; m++) put_split(room, t_hi, t_lo, row + m * 16, column, s[m]);
        meet<THREADS>();
#pragma unroll
        for (int j = threadIdx.x; j < DK * (C / 8); j += THREADS) {
            const int r = j / (C / 8), z = j % (C / 8);
            const uint4 w = *(const uint4 *)(room + t_hi.at + (uint32_t)r * t_hi.step + z * 16);
            store_vector(p.after + (x * DK + r) * p.r.value_dim + first_column + z * 8, w.x, w.y, w.z, w.w);
        }

        float d[2][4] = {}, o[2][4] = {}, low[2][4] = {};
#pragma unroll
        for (int j = 0; j < DK; j += 16) {
            uint32_t a[4], hi[4], lo[4];
            right(hi, at_hi, j, column);
            right(lo, at_lo, j, column);
            left(a, k, token, j);
            multiply(low, a, lo);
            multiply(d, a, hi);
        }
#pragma unroll
        for (int l = 0; l < CHUNK; l += 16) {
            uint32_t a[4], b[4];
            left_turned(a, pairs, l, token);
            right(b, ad_o, l, column);
            multiply(o, a, b);
        }
#pragma unroll
        for (int kk = 0; kk < 2; kk++) {
            const int t = token + pair_row(kk);
            const float end = to[t], decay = p.r.scale * from[t];
#pragma unroll
            for (int nn = 0; nn < 2; nn++) {
                float a, b;
                widen2(a, b, get_pair(room, d_o, t, column + pair_column(nn)), bf16());
                d[nn][2 * kk] = fmaf(p.r.scale, o[nn][2 * kk], end * (d[nn][2 * kk] + low[nn][2 * kk]));
                d[nn][2 * kk + 1] =
                    fmaf(p.r.scale, o[nn][2 * kk + 1], end * (d[nn][2 * kk + 1] + low[nn][2 * kk + 1]));
                o[nn][2 * kk] = decay * a, o[nn][2 * kk + 1] = decay * b;
            }
        }
        put_split(room, x_hi, x_lo, token, column, d);
        put_split(room, o_hi, o_lo, token, column, o);
        meet<THREADS>();

        float y[2][4] = {}, one[2][4] = {}, two[2][4] = {};
#pragma unroll
        for (int l = 0; l < CHUNK; l += 16) {
            uint32_t a[4], b[4], hi[4], lo[4];
            left_turned(a, m_hi, l, token);
            left_turned(b, m_lo, l, token);
            right(hi, ax_hi, l, column);
            right(lo, ax_lo, l, column);
            multiply(one, b, hi);
            multiply(two, a, lo);
            multiply(y, a, hi);
        }
        add(y, one, two);
        const int64_t out = has(p.d_value) ? offset_in(p.d_value, p.r.seq, at, first) + h * p.d_value.head : 0;
#pragma unroll
        for (int kk = 0; kk < 2; kk++) {
            const int t = token + pair_row(kk);
            const float b = beta[t], back = -from[t] * b;
#pragma unroll
            for (int nn = 0; nn < 2; nn++) {
                const int j = first_column + column + pair_column(nn);
                *(uint32_t *)(p.d_y + (x * CHUNK + t) * p.r.value_dim + j) =
                    narrow2(y[nn][2 * kk], y[nn][2 * kk + 1], bf16());
                if (has(p.d_value) && first + t < at.end)
                    put_two(p.d_value, p.wide_d_value, out + t * p.d_value.step, j, b * y[nn][2 * kk],
                            b * y[nn][2 * kk + 1]);
                y[nn][2 * kk] *= back, y[nn][2 * kk + 1] *= back;
            }
        }
        put_split(room, y_hi, y_lo, token, column, y);
        meet<THREADS>();

        const float whole = from[CHUNK - 1];
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int nn = 0; nn < 2; nn++)
#pragma unroll
                for (int kk = 0; kk < 4; kk++) s[m][nn][kk] *= whole;
#pragma unroll
        for (int l = 0; l < CHUNK; l += 16) {
            uint32_t hi[4], lo[4], a[4];
            right(hi, ao_hi, l, column);
            right(lo, ao_lo, l, column);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                left_turned(a, q, l, row + m * 16);
                multiply(s[m], a, lo);
                multiply(s[m], a, hi);
            }
            right(hi, ay_hi, l, column);
            right(lo, ay_lo, l, column);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                left_turned(a, k, l, row + m * 16);
                multiply(s[m], a, lo);
                multiply(s[m], a, hi);
            }
        }
        if (p.stages == 1) meet<THREADS>();
    }
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                state_put(p.d_state, n, h, row + m * 16 + pair_row(e >> 1),
                          first_column + column + pair_column(k) + (e & 1), s[m][k][e]);
}

/* ---- gradients of all chunks at once ------------------------------------------------------------------------- */

enum { GRAD_THREADS = 256, GRAD_COLUMNS = 64 };

struct grad_params {
    rule r;
    const float *gates;
    const bf16 *before, *after, *deltas, *d_y;
    rows d_o, d_query, d_key, d_beta, d_g;
    int32_t stages;
    bool wide_query, wide_key, wide_value, wide_d_o, wide_d_query, wide_d_key;
};

/* Shared memory: a stage has 64 columns of a value head. */
template <int DK> struct grad_room {
    static constexpr uint32_t before = 0, after = tile_bytes(DK, GRAD_COLUMNS), deltas = 2 * after;
    static constexpr uint32_t d_y = deltas + tile_bytes(CHUNK, GRAD_COLUMNS),
                              d_o = d_y + tile_bytes(CHUNK, GRAD_COLUMNS);
    static constexpr uint32_t value = d_o + tile_bytes(CHUNK, GRAD_COLUMNS);
    static constexpr uint32_t gates = value + tile_bytes(CHUNK, GRAD_COLUMNS), stage = gates + SCALARS * 4;
    /* behind the stages */
    static constexpr uint32_t key = 0, query = tile_bytes(CHUNK, DK), outer = 2 * query;
    static constexpr uint32_t inner = outer + tile_bytes(CHUNK, CHUNK), parts = inner + tile_bytes(CHUNK, CHUNK);
    /* by half of the columns: sums of rows for beta, g, and those behind g; by warp: of columns, and <S, T> */
    static constexpr uint32_t rest = parts + (6 * CHUNK + 8 * 32 + 8) * 4;
};

template <int DK>
static __device__ __forceinline__ void grad_fetch(const grad_params &p, unsigned char *room, uint32_t stage,
                                                  const chunk &c, int64_t slot, int h, int column)
{
    typedef grad_room<DK> R;
    const int64_t x = slot * p.r.value_heads + h, dv = p.r.value_dim;
    const uint32_t step = tile_step(GRAD_COLUMNS);
    const int thread = threadIdx.x;
    fetch<GRAD_THREADS, DK, GRAD_COLUMNS>(room, {stage + R::before, step}, p.before + x * DK * dv + column, dv, DK,
                                          thread);
    fetch<GRAD_THREADS, DK, GRAD_COLUMNS>(room, {stage + R::after, step}, p.after + x * DK * dv + column, dv, DK,
                                          thread);
    fetch<GRAD_THREADS, CHUNK, GRAD_COLUMNS>(room, {stage + R::deltas, step}, p.deltas + x * CHUNK * dv + column,
                                             dv, CHUNK, thread);
    fetch<GRAD_THREADS, CHUNK, GRAD_COLUMNS>(room, {stage + R::d_y, step}, p.d_y + x * CHUNK * dv + column, dv,
                                             CHUNK, thread);
    fetch_rows<GRAD_THREADS, GRAD_COLUMNS>(room, {stage + R::d_o, step}, p.d_o, p.wide_d_o, p.r.seq, c.at, c.first,
                                           c.count, h, column, thread);
    fetch_rows<GRAD_THREADS, GRAD_COLUMNS>(room, {stage + R::value, step}, p.r.value, p.wide_value, p.r.seq, c.at,
                                           c.first, c.count, h, column, thread);
    fetch_floats<GRAD_THREADS, SCALARS>(room, stage + R::gates, p.gates + x * SCALARS, thread);
    copy_commit();
}

/* Over the four lanes of a row. */
static __device__ __forceinline__ float row_sum(float v)
{
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

/* Over the eight lanes of a column. */
static __device__ __forceinline__ float column_sum(float v)
{
    v += __shfl_xor_sync(0xffffffffu, v, 4);
    v += __shfl_xor_sync(0xffffffffu, v, 8);
    return v + __shfl_xor_sync(0xffffffffu, v, 16);
}

template <int DK> __global__ void __launch_bounds__(GRAD_THREADS, 1) grad_kernel(const grad_params p)
{
#ifndef WEFT_WGMMA /* gdn_rule_group_grad.cuh */
    extern __shared__ __align__(128) unsigned char room[];
    typedef grad_room<DK> R;
    constexpr int HALF = DK / 2, ACROSS = HALF / 16, TWO = 2; /* TWO: 16 columns of products with states at once */
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = warp >> 2;
    const int token = (side ? 3 - (warp & 3) : warp & 3) * 16;
    const int64_t slot = blockIdx.x / (unsigned)p.r.heads;
    const int kh = (int)(blockIdx.x % (unsigned)p.r.heads), members = p.r.value_heads / p.r.heads;
    const int blocks = p.r.value_dim / GRAD_COLUMNS, rounds = members * blocks;
    const chunk c = chunk_of(p.r.seq, slot);
    if (c.count == 0) return;
    const uint32_t base = shared_address(room), own = (uint32_t)p.stages * R::stage, step = tile_step(GRAD_COLUMNS);
    const tile k = {own + R::key, tile_step(DK)}, q = {own + R::query, tile_step(DK)};
    const tile outer = {own + R::outer, tile_step(CHUNK)}, inner = {own + R::inner, tile_step(CHUNK)};
    auto addressed = [base](const tile &t) { return tile{base + t.at, t.step}; };
    const tile ak = addressed(k), aq = addressed(q), a_outer = addressed(outer), a_inner = addressed(inner);
    float *const of_beta = (float *)(room + own + R::parts), *const of_g = of_beta + 2 * CHUNK;
    float *const of_end = of_g + 2 * CHUNK, *const of_columns = of_end + 2 * CHUNK,
                 *const of_warps = of_columns + 8 * 32;

    fetch_rows<GRAD_THREADS, DK>(room, k, p.r.key, p.wide_key, p.r.seq, c.at, c.first, c.count, kh, 0, threadIdx.x);
    fetch_rows<GRAD_THREADS, DK>(room, q, p.r.query, p.wide_query, p.r.seq, c.at, c.first, c.count, kh, 0,
                                 threadIdx.x);
    grad_fetch<DK>(p, room, 0, c, slot, value_head_of(p.r, kh, 0), 0);
    copy_wait<0>();
    __syncthreads();
    float dq[ACROSS][2][4] = {}, dk[ACROSS][2][4] = {};
    float nn[2][2][4] = {}, ll[2][2][4] = {}; /* dO D^T, dY D^T */
    float row_beta[2] = {}, row_g[2] = {}, row_end[2] = {},
          whole = 0; /* this thread's part of the sums of its two rows, and of <S, T> */
    for (int round = 0; round < rounds; round++) {
        const int h = value_head_of(p.r, kh, round / blocks), block = round % blocks;
        const uint32_t stage = p.stages == 2 && (round & 1) ? R::stage : 0;
        copy_wait<0>();
        __syncthreads();
        if (p.stages == 2 && round + 1 < rounds)
            grad_fetch<DK>(p, room, stage ? 0 : R::stage, c, slot, value_head_of(p.r, kh, (round + 1) / blocks),
                           (round + 1) % blocks * GRAD_COLUMNS);
        if (block == 0) {
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) nn[n][0][e] = nn[n][1][e] = ll[n][0][e] = ll[n][1][e] = 0;
#pragma unroll
            for (int e = 0; e < 2; e++) row_beta[e] = row_g[e] = row_end[e] = 0;
            whole = 0;
        }
        const tile before = {base + stage + R::before, step}, after = {base + stage + R::after, step};
        const tile deltas = {base + stage + R::deltas, step}, d_y = {base + stage + R::d_y, step};
        const tile d_o = {base + stage + R::d_o, step}, y = {stage + R::d_y, step}, v = {stage + R::value, step};
        const float *const from = (const float *)(room + stage + R::gates), *const to = from + CHUNK,
                           *const betas = to + CHUNK;
        const double *const sums = (const double *)(from + GATES);
        float decay[2], end[2], beta[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int i = token + pair_row(e);
            decay[e] = from[i], end[e] = to[i], beta[e] = betas[i];
        }
        /* products with D */
#pragma unroll
        for (int d = 0; d < GRAD_COLUMNS; d += 16) {
            uint32_t a[4], e[4], b[4];
            left(a, d_o, token, d);
            left(e, d_y, token, d);
#pragma unroll
            for (int n = 0; n < 2; n++) { /* above the diagonal too: a branch takes longer */
                right_turned(b, deltas, side * 32 + n * 16, d);
                multiply(nn[n], a, b);
                multiply(ll[n], e, b);
            }
        }
        /* products with the states: dO S^T, dY S^T, D T^T */
#pragma unroll
        for (int piece = 0; piece < 3 * ACROSS / TWO; piece++) {
            const int which = piece % 3, n0 = piece / 3 * TWO, columns = side * HALF + n0 * 16;
            float t[TWO][2][4] = {};
            const tile &x = which == 0 ? d_o : which == 1 ? d_y : deltas, &s = which == 2 ? after : before;
#pragma unroll 2
            for (int d = 0; d < GRAD_COLUMNS; d += 16) {
                uint32_t a[4], b[4];
                left(a, x, token, d);
#pragma unroll
                for (int n = 0; n < TWO; n++) {
                    right_turned(b, s, columns + n * 16, d);
                    multiply(t[n], a, b);
                }
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float factor = which == 0 ? p.r.scale * decay[e] : which == 1 ? -decay[e] * beta[e] : end[e];
                float sum = 0;
#pragma unroll
                for (int n = 0; n < TWO; n++)
#pragma unroll
                    for (int z = 0; z < 2; z++) {
                        float k0, k1;
                        widen2(k0, k1,
                               get_pair(room, which == 0 ? q : k, token + pair_row(e),
                                        columns + n * 16 + pair_column(z)),
                               bf16());
                        sum = fmaf(k0, t[n][z][2 * e], sum);
                        sum = fmaf(k1, t[n][z][2 * e + 1], sum);
#pragma unroll
                        for (int w = 0; w < 2; w++) {
                            float &grad = which == 0 ? dq[n0 + n][z][2 * e + w] : dk[n0 + n][z][2 * e + w];
                            grad = fmaf(factor, t[n][z][2 * e + w], grad);
                        }
                    }
                if (which < 2) row_g[e] = fmaf(factor, sum, row_g[e]);
                if (which == 1) row_beta[e] = fmaf(-decay[e], sum, row_beta[e]);
                if (which == 2) row_end[e] = fmaf(factor, sum, row_end[e]);
            }
        }
        /* dY V, and <S, T> */
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float a[2], b[2];
                const int i = token + pair_row(e), j = side * 32 + pair_column(n);
                widen2(a[0], a[1], get_pair(room, y, i, j), bf16());
                widen2(b[0], b[1], get_pair(room, v, i, j), bf16());
                row_beta[e] = fmaf(a[0], b[0], row_beta[e]);
                row_beta[e] = fmaf(a[1], b[1], row_beta[e]);
            }
#pragma unroll
        for (int i = threadIdx.x; i < DK * GRAD_COLUMNS / 8; i += GRAD_THREADS) {
            const uint32_t at = stage + (uint32_t)(i / (GRAD_COLUMNS / 8)) * step + i % (GRAD_COLUMNS / 8) * 16;
            const uint4 s4 = *(const uint4 *)(room + R::before + at), t4 = *(const uint4 *)(room + R::after + at);
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
        if (block + 1 == blocks) {
            float kk[2][2][4] = {}, qk[2][2][4] = {}; /* of 16 tokens and 32 others; made again rather than kept */
#pragma unroll
            for (int d = 0; d < DK; d += 16) {
                uint32_t a[4], e[4], b[4];
                left(a, ak, token, d);
                left(e, aq, token, d);
#pragma unroll
                for (int n = 0; n < 2; n++)
                    if (side * 32 + n * 16 <= token) {
                        right_turned(b, ak, side * 32 + n * 16, d);
                        multiply(kk[n], a, b);
                        multiply(qk[n], e, b);
                    }
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int z = 0; z < 2; z++) {
                    float down[2] = {};
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int i = token + pair_row(e), j = side * 32 + n * 16 + pair_column(z);
                        float a[2], b[2];
#pragma unroll
                        for (int w = 0; w < 2; w++) {
                            const float below = expf((float)(sums[i] - sums[j + w]));
                            const float gam = j + w < i ? below : 1.0f;
                            a[w] = j + w <= i ? p.r.scale * nn[n][z][2 * e + w] * gam : 0.0f;
                            const float l = j + w < i ? -ll[n][z][2 * e + w] * gam : 0.0f;
                            b[w] = beta[e] * l;
                            row_beta[e] = fmaf(l, kk[n][z][2 * e + w], row_beta[e]);
                            const float x =
                                j + w < i ? fmaf(a[w], qk[n][z][2 * e + w], b[w] * kk[n][z][2 * e + w]) : 0.0f;
                            row_g[e] += x;
                            down[w] += x;
                        }
                        put_pair(room, outer, i, j, narrow2(a[0], a[1], bf16()));
                        put_pair(room, inner, i, j, narrow2(b[0], b[1], bf16()));
                    }
#pragma unroll
                    for (int w = 0; w < 2; w++) {
                        down[w] = column_sum(down[w]);
                        if (lane < 4)
                            of_columns[token / 16 * CHUNK + side * 32 + n * 16 + pair_column(z) + w] = down[w];
                    }
                }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float b = row_sum(row_beta[e]), g = row_sum(row_g[e]), f = row_sum(row_end[e]);
                const int i = side * CHUNK + token + pair_row(e);
                if ((lane & 3) == 0) of_beta[i] = b, of_g[i] = g, of_end[i] = f;
            }
#pragma unroll
            for (int m = 1; m < 32; m *= 2) whole += __shfl_xor_sync(0xffffffffu, whole, m);
            if (lane == 0) of_warps[warp] = whole;
            __syncthreads();
            /* N K, N^T Q, (L' + L'^T) K */
#pragma unroll
            for (int l = 0; l < CHUNK; l += 16) {
                uint32_t a[4], b[4], e[4], bk[4], bq[4];
                if (l <= token) {
                    left(a, a_outer, token, l);
                    left(b, a_inner, token, l);
#pragma unroll
                    for (int n = 0; n < ACROSS; n++) {
                        right(bk, ak, l, side * HALF + n * 16);
                        multiply(dq[n], a, bk);
                        multiply(dk[n], b, bk);
                    }
                }
                if (l >= token) {
                    left_turned(a, a_outer, l, token);
                    left_turned(e, a_inner, l, token);
#pragma unroll
                    for (int n = 0; n < ACROSS; n++) {
                        right(bq, aq, l, side * HALF + n * 16);
                        right(bk, ak, l, side * HALF + n * 16);
                        multiply(dk[n], a, bq);
                        multiply(dk[n], e, bk);
                    }
                }
            }
            if (warp == 0) { /* dG, and its sums from the end; two tokens for a lane */
                float d[2], all = 0, tail = 0;
                for (int w = 0; w < 8; w++) all += of_warps[w];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int i = 2 * lane + e;
                    const float f = of_end[i] + of_end[CHUNK + i];
                    float columns = 0;
                    for (int w = 0; w < 4; w++) columns += of_columns[w * CHUNK + i];
                    d[e] = ((of_g[i] + of_g[CHUNK + i]) - columns) - f;
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
                            of_beta[i] + of_beta[CHUNK + i]);
                }
            }
        }
        if (p.stages == 1 && round + 1 < rounds) {
            __syncthreads();
            grad_fetch<DK>(p, room, 0, c, slot, value_head_of(p.r, kh, (round + 1) / blocks),
                           (round + 1) % blocks * GRAD_COLUMNS);
        }
    }
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const rows &out = which ? p.d_key : p.d_query;
        if (!has(out)) continue;
        const int64_t at = offset_in(out, p.r.seq, c.at, c.first) + kh * out.head;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int i = token + pair_row(e);
            if (i >= c.count) continue;
#pragma unroll
            for (int n = 0; n < ACROSS; n++)
#pragma unroll
                for (int z = 0; z < 2; z++) {
                    const float(&g)[4] = which ? dk[n][z] : dq[n][z];
                    put_two(out, which ? p.wide_d_key : p.wide_d_query, at + i * out.step,
                            side * HALF + n * 16 + pair_column(z), g[2 * e], g[2 * e + 1]);
                }
        }
    }
#endif
}

#endif
