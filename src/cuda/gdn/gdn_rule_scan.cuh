/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated delta rule from chunk to chunk [G6]. Columns of the state do not know each other: a block has a
 * sequence, a value head and C columns, and goes through the chunks with the state in fp32 registers. Per chunk,
 * the state being S:
 *     R = beta (V - gam K S);   D = M R;   O = scale (gam Q S + P D);   S <- gam_end S + K^T (w D)
 * What the state goes through, S, R, M and w D, is taken as hi + lo, 16 bits; what only an output sees, S and D
 * in O, as one bf16 number. A warp has 16 tokens and 16 columns of everything, and a quarter of the rows of S.
 * The next chunk is under way to shared memory meanwhile, where there is room for two. */
#ifndef WEFT_CUDA_GDN_RULE_SCAN_CUH
#define WEFT_CUDA_GDN_RULE_SCAN_CUH

#include "cuda/gdn/gdn_rule.cuh"

struct scan_params {
    rule r;
    chunks from;
    rows o;
    states state, last;
    bf16 *before,
        *deltas; /* for backward, by slot and value head: S in front of the chunk [Dk, Dv], and D [64, Dv] */
    int32_t stages;
    bool wide_query, wide_key, wide_value, wide_o;
};

/* Shared memory. A stage has a chunk. */
template <int DK, int C, bool OUTPUTS> struct scan_room {
    static constexpr uint32_t key = 0, query = tile_bytes(CHUNK, DK);
    static constexpr uint32_t m_hi = query + (OUTPUTS ? tile_bytes(CHUNK, DK) : 0);
    static constexpr uint32_t m_lo = m_hi + tile_bytes(CHUNK, CHUNK), pairs = m_lo + tile_bytes(CHUNK, CHUNK);
    static constexpr uint32_t value = pairs + (OUTPUTS ? tile_bytes(CHUNK, CHUNK) : 0);
    static constexpr uint32_t gates = value + tile_bytes(CHUNK, C), stage = gates + GATES * 4;
    /* behind the stages */
    static constexpr uint32_t s_hi = 0, s_lo = tile_bytes(DK, C), r_hi = 2 * s_lo,
                              r_lo = r_hi + tile_bytes(CHUNK, C);
    static constexpr uint32_t d = r_lo + tile_bytes(CHUNK, C), e_hi = d + tile_bytes(CHUNK, C);
    static constexpr uint32_t e_lo = e_hi + tile_bytes(CHUNK, C), rest = e_lo + tile_bytes(CHUNK, C);
};

/* Threads that move chunks, behind those that compute. They arrive at all barriers, a third of a chunk on its way between
 * two of them, so that every order is that of a barrier of the block. */
enum { PRODUCERS = 128 };

template <int DK, int C, bool OUTPUTS>
static __device__ __forceinline__ void scan_fetch(const scan_params &p, unsigned char *room, uint32_t stage,
                                                  const place &at, int64_t slot, int chunk_number, int h, int kh,
                                                  int column, int thread, int part)
{
    typedef scan_room<DK, C, OUTPUTS> R;
    const int64_t first = at.start + (int64_t)chunk_number * CHUNK, left = at.end - first;
    const int count = left > CHUNK ? (int)CHUNK : (int)left;
    const int64_t x = (slot + chunk_number) * p.r.value_heads + h;
    const sequences &q = p.r.seq;
    const uint32_t square = tile_step(CHUNK);
    if (part == 0) {
        fetch_rows<PRODUCERS, DK>(room, {stage + R::key, tile_step(DK)}, p.r.key, p.wide_key, q, at, first, count,
                                  kh, 0, thread);
        fetch_rows<PRODUCERS, C>(room, {stage + R::value, tile_step(C)}, p.r.value, p.wide_value, q, at, first,
                                 count, h, column, thread);
    }
    if (part == 1) {
        if (OUTPUTS)
            fetch_rows<PRODUCERS, DK>(room, {stage + R::query, tile_step(DK)}, p.r.query, p.wide_query, q, at,
                                      first, count, kh, 0, thread);
        fetch<PRODUCERS, CHUNK, CHUNK>(room, {stage + R::m_hi, square}, p.from.m_hi + x * SQUARE, CHUNK, CHUNK,
                                       thread);
    }
    if (part == 2) {
        fetch<PRODUCERS, CHUNK, CHUNK>(room, {stage + R::m_lo, square}, p.from.m_lo + x * SQUARE, CHUNK, CHUNK,
                                       thread);
        if (OUTPUTS)
            fetch<PRODUCERS, CHUNK, CHUNK>(room, {stage + R::pairs, square}, p.from.pairs + x * SQUARE, CHUNK,
                                           CHUNK, thread);
        fetch_floats<PRODUCERS, GATES>(room, stage + R::gates, p.from.gates + x * SCALARS, thread);
    }
}

/* A barrier of the block that those who compute and those who move reach at different places, where __syncthreads may not stand. */
template <int THREADS> static __device__ __forceinline__ void meet()
{
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS + PRODUCERS) : "memory");
}

/* What they do: bring(c, part) begins to move a third of the c-th chunk. THREADS: of those that compute. */
template <int THREADS, class Bring>
static __device__ __forceinline__ void fetch_ahead(int count, int stages, Bring bring)
{
    for (int c = 0; c < count; c++) {
        const bool ahead = stages == 2 && c + 1 < count;
        if (c == 0 || stages == 1) bring(c, 0), bring(c, 1), bring(c, 2);
        copy_commit();
        copy_wait<0>();
        meet<THREADS>(); /* the chunk is there, and no warp reads the one before */
        if (ahead) bring(c + 1, 0);
        meet<THREADS>(); /* the two barriers between the steps of those that compute */
        if (ahead) bring(c + 1, 1);
        meet<THREADS>();
        if (ahead) bring(c + 1, 2);
        if (stages == 1) meet<THREADS>(); /* no warp reads this one */
    }
}

template <int DK, int C, bool OUTPUTS>
__global__ void __launch_bounds__(C / 16 * 128 + PRODUCERS) scan_kernel(const scan_params p)
{
    extern __shared__ __align__(128) unsigned char room[];
    typedef scan_room<DK, C, OUTPUTS> R;
    constexpr int THREADS = C / 16 * 128;           /* that compute */
    constexpr int ROWS = DK / 4, TILES = ROWS / 16; /* of S, for a warp */
    const int warp = threadIdx.x >> 5, column = warp / 4 * 16;
    /* the tokens of a warp, so that those of one scheduler have as much to do as the others' below the diagonal */
    const int token = (warp & 4 ? 3 - (warp & 3) : warp & 3) * 16, row = (warp & 3) * ROWS;
    const int across = p.r.value_dim / C;
    const int first_column = (int)(blockIdx.x % (unsigned)across) * C;
    const int h = (int)(blockIdx.x / (unsigned)across % (unsigned)p.r.value_heads), kh = key_head_of(p.r, h);
    const int64_t n = blockIdx.x / ((unsigned)across * (unsigned)p.r.value_heads);
    const place at = sequence_at(p.r.seq, n);
    const int64_t slot = first_slot(p.r.seq, n);
    const int count = (int)((at.end - at.start + CHUNK - 1) / CHUNK);
    const uint32_t base = shared_address(room), own = (uint32_t)p.stages * R::stage;
    const tile s_hi = {own + R::s_hi, tile_step(C)}, s_lo = {own + R::s_lo, tile_step(C)};
    const tile r_hi = {own + R::r_hi, tile_step(C)}, r_lo = {own + R::r_lo, tile_step(C)};
    const tile d_one = {own + R::d, tile_step(C)};
    const tile e_hi = {own + R::e_hi, tile_step(C)}, e_lo = {own + R::e_lo, tile_step(C)};
    auto addressed = [base](const tile &t) { return tile{base + t.at, t.step}; };
    const tile as_hi = addressed(s_hi), as_lo = addressed(s_lo), ar_hi = addressed(r_hi), ar_lo = addressed(r_lo);
    const tile ad = addressed(d_one), ae_hi = addressed(e_hi), ae_lo = addressed(e_lo);

    if (threadIdx.x >= THREADS) {
        fetch_ahead<THREADS>(count, p.stages, [&](int c, int part) {
            scan_fetch<DK, C, OUTPUTS>(p, room, p.stages == 2 && (c & 1) ? R::stage : 0, at, slot, c, h, kh,
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
                s[m][k][e] = state_get(p.state, n, h, row + m * 16 + pair_row(e >> 1),
                                       first_column + column + pair_column(k) + (e & 1));
    for (int c = 0; c < count; c++) {
        const uint32_t stage = p.stages == 2 && (c & 1) ? R::stage : 0;
        const tile k = {base + stage + R::key, tile_step(DK)}, q = {base + stage + R::query, tile_step(DK)};
        const tile m_hi = {base + stage + R::m_hi, tile_step(CHUNK)},
                   m_lo = {base + stage + R::m_lo, tile_step(CHUNK)};
        const tile pairs = {base + stage + R::pairs, tile_step(CHUNK)}, v = {stage + R::value, tile_step(C)};
        const float *const from = (const float *)(room + stage + R::gates), *const to = from + CHUNK,
                           *const beta = to + CHUNK;
        const int64_t x = (slot + c) * p.r.value_heads + h;
#pragma unroll
        for (int m = 0; m < TILES; m++) put_split(room, s_hi, s_lo, row + m * 16, column, s[m]);
        meet<THREADS>();
        if (!OUTPUTS)
#pragma unroll
            for (int i = threadIdx.x; i < DK * (C / 8); i += THREADS) {
                const int r = i / (C / 8), j = i % (C / 8);
                const uint4 w = *(const uint4 *)(room + s_hi.at + (uint32_t)r * s_hi.step + j * 16);
                store_vector(p.before + (x * DK + r) * p.r.value_dim + first_column + j * 8, w.x, w.y, w.z, w.w);
            }

        float ks[2][4] = {}, qs[2][4] = {}, low[2][4] = {};
#pragma unroll
        for (int d = 0; d < DK; d += 16) {
            uint32_t a[4], hi[4], lo[4];
            right(hi, as_hi, d, column);
            right(lo, as_lo, d, column);
            left(a, k, token, d);
            multiply(ks, a, hi);
            multiply(low, a, lo);
            if (OUTPUTS) {
                left(a, q, token, d);
                multiply(qs, a, hi);
            }
        }
        float decay[2], end[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int i = token + pair_row(e);
            decay[e] = from[i], end[e] = to[i];
#pragma unroll
            for (int nn = 0; nn < 2; nn++) {
                float a, b;
                widen2(a, b, get_pair(room, v, i, column + pair_column(nn)), bf16());
                ks[nn][2 * e] = beta[i] * fmaf(-decay[e], ks[nn][2 * e] + low[nn][2 * e], a);
                ks[nn][2 * e + 1] = beta[i] * fmaf(-decay[e], ks[nn][2 * e + 1] + low[nn][2 * e + 1], b);
            }
        }
        put_split(room, r_hi, r_lo, token, column, ks);
        meet<THREADS>();

        float d[2][4] = {}, one[2][4] = {}, two[2][4] = {};
#pragma unroll
        for (int l = 0; l < CHUNK; l += 16) {
            uint32_t a[4], b[4], hi[4], lo[4];
            left(a, m_hi, token, l);
            left(b, m_lo, token, l);
            right(hi, ar_hi, l, column);
            right(lo, ar_lo, l, column);
            multiply(one, b, hi);
            multiply(two, a, lo);
            multiply(d, a, hi);
        }
        add(d, one, two);
        float e[2][4];
#pragma unroll
        for (int nn = 0; nn < 2; nn++)
#pragma unroll
            for (int kk = 0; kk < 2; kk++) {
                const uint32_t pair = narrow2(d[nn][2 * kk], d[nn][2 * kk + 1], bf16());
                const int i = token + pair_row(kk), j = column + pair_column(nn);
                if (OUTPUTS)
                    put_pair(room, d_one, i, j, pair);
                else
                    *(uint32_t *)(p.deltas + (x * CHUNK + i) * p.r.value_dim + first_column + j) = pair;
                e[nn][2 * kk] = d[nn][2 * kk] * end[kk], e[nn][2 * kk + 1] = d[nn][2 * kk + 1] * end[kk];
            }
        put_split(room, e_hi, e_lo, token, column, e);
        meet<THREADS>();

        if (OUTPUTS) {
#pragma unroll
            for (int nn = 0; nn < 2; nn++)
#pragma unroll
                for (int kk = 0; kk < 4; kk++) qs[nn][kk] *= decay[kk >> 1];
#pragma unroll
            for (int l = 0; l < CHUNK; l += 16)
                if (l <= token) {
                    uint32_t a[4], b[4];
                    left(a, pairs, token, l);
                    right(b, ad, l, column);
                    multiply(qs, a, b);
                }
        }
        const float whole = from[CHUNK - 1];
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int nn = 0; nn < 2; nn++)
#pragma unroll
                for (int kk = 0; kk < 4; kk++) s[m][nn][kk] *= whole;
#pragma unroll
        for (int l = 0; l < CHUNK; l += 16) {
            uint32_t hi[4], lo[4];
            right(hi, ae_hi, l, column);
            right(lo, ae_lo, l, column);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                uint32_t a[4];
                left_turned(a, k, l, row + m * 16);
                multiply(s[m], a, lo);
                multiply(s[m], a, hi);
            }
        }
        if (OUTPUTS) {
            const int64_t first = at.start + (int64_t)c * CHUNK;
            bf16 *const o = (bf16 *)p.o.data + offset_in(p.o, p.r.seq, at, first) + h * p.o.head;
#pragma unroll
            for (int kk = 0; kk < 2; kk++) {
                const int i = token + pair_row(kk);
                if (first + i >= at.end) continue;
#pragma unroll
                for (int nn = 0; nn < 2; nn++) {
                    const int64_t j = first_column + column + pair_column(nn);
                    const float y0 = p.r.scale * qs[nn][2 * kk], y1 = p.r.scale * qs[nn][2 * kk + 1];
                    if (p.wide_o) {
                        *(uint32_t *)(o + i * p.o.step + j) = narrow2(y0, y1, bf16());
                    } else {
                        o[i * p.o.step + j * p.o.channel] = narrow<bf16>(y0);
                        o[i * p.o.step + (j + 1) * p.o.channel] = narrow<bf16>(y1);
                    }
                }
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
                state_put(p.last, n, h, row + m * 16 + pair_row(e >> 1),
                          first_column + column + pair_column(k) + (e & 1), s[m][k][e]);
}

#endif
