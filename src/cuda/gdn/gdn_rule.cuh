/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of the gated delta rule share [G5] [G6]: the call as they see it, chunks and where their
 * matrices lie, and fragments of tiles in shared memory.
 *
 * A chunk is 64 tokens of a sequence, counted from its first one. Its slot follows from where the sequence
 * begins, so that no sequence needs to know how many chunks the others have. */
#ifndef WEFT_CUDA_GDN_RULE_CUH
#define WEFT_CUDA_GDN_RULE_CUH

#include "cuda/common/mma.cuh"
#include "cuda/gdn/gdn_tokens.cuh"

/* SCALARS: floats of a chunk's gates, and its sums of exponents in double behind them. */
enum { CHUNK = 64, SQUARE = CHUNK * CHUNK, GATES = 3 * CHUNK, SCALARS = GATES + 2 * CHUNK };

/* [N, Hv, Dk, Dv] in fp32; data NULL: absent. */
struct states {
    float *data;
    int32_t add;
    int64_t stride[4];
};

static inline states states_of(const weft_tensor *t, int add = 0)
{
    states s = {};
    if (weft_has(t)) s.data = (float *)t->data, s.add = add;
    for (int i = 0; i < 4 && weft_has(t); i++) s.stride[i] = t->stride[i];
    return s;
}

static __device__ __forceinline__ int64_t state_at(const states &s, int64_t n, int64_t h, int64_t i, int64_t j)
{
    return n * s.stride[0] + h * s.stride[1] + i * s.stride[2] + j * s.stride[3];
}

static __device__ __forceinline__ float state_get(const states &s, int64_t n, int64_t h, int64_t i, int64_t j)
{
    return s.data ? s.data[state_at(s, n, h, i, j)] : 0.0f;
}

static __device__ __forceinline__ void state_put(const states &s, int64_t n, int64_t h, int64_t i, int64_t j,
                                                 float v)
{
    if (!s.data) return;
    float *at = s.data + state_at(s, n, h, i, j);
    *at = s.add ? *at + v : v;
}

struct rule {
    sequences seq;
    rows query, key, value, beta, g;
    int32_t heads, value_heads, key_dim, value_dim, tiled;
    float scale;
};

/* The args of forward and of backward call their inputs by the same names. */
template <class Args> static rule rule_of(const weft_call *call, const Args *a)
{
    rule r = {};
    r.seq = sequences_of(call, &a->cu_seqlens);
    r.query = rows_of(&a->query), r.key = rows_of(&a->key), r.value = rows_of(&a->value);
    r.beta = rows_of(&a->beta), r.g = rows_of(&a->g);
    r.heads = (int32_t)call->heads, r.value_heads = (int32_t)call->value_heads;
    r.key_dim = (int32_t)call->key_dim, r.value_dim = (int32_t)call->value_dim;
    r.tiled = a->head_map == WEFT_GDN_TILED, r.scale = (float)a->scale;
    return r;
}

static __device__ __forceinline__ int key_head_of(const rule &r, int h)
{
    return r.tiled ? h % r.heads : h / (r.value_heads / r.heads);
}

/* The i-th of the value heads that read a key head. */
static __device__ __forceinline__ int value_head_of(const rule &r, int key_head, int i)
{
    return r.tiled ? i * r.heads + key_head : key_head * (r.value_heads / r.heads) + i;
}

/* Tokens of a sequence; none where its offsets decrease. */
static __device__ __forceinline__ place sequence_at(const sequences &s, int64_t n)
{
    place p = {n, start_of(s, n), start_of(s, n + 1)};
    if (p.end < p.start) p.end = p.start;
    return p;
}

/* ---- chunks -------------------------------------------------------------------------------------------------- */

static inline int64_t slots_of(const sequences &s)
{
    return s.tokens / CHUNK + s.count;
}

static __device__ __forceinline__ int64_t first_slot(const sequences &s, int64_t n)
{
    return start_of(s, n) / CHUNK + n;
}

/* A chunk: its sequence, its first token and how many it has. None: count 0. */
struct chunk {
    place at;
    int64_t first;
    int count;
};

static __device__ __forceinline__ chunk chunk_of(const sequences &s, int64_t slot)
{
    int64_t low = 0, high = s.count - 1; /* the last sequence that begins at this slot or in front of it */
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (first_slot(s, middle) <= slot)
            low = middle;
        else
            high = middle - 1;
    }
    chunk c = {sequence_at(s, low), 0, 0};
    c.first = c.at.start + (slot - first_slot(s, low)) * CHUNK;
    const int64_t left = c.first >= c.at.start ? c.at.end - c.first : 0;
    c.count = left > CHUNK ? (int)CHUNK : left > 0 ? (int)left : 0;
    return c;
}

/* Matrices of all chunks in the workspace, one for each slot and value head, slots outside. */
struct chunks {
    bf16 *m_hi, *m_lo; /* [64][64]: M = (I + L)^-1, as hi + lo */
    bf16 *pairs;       /* [64][64]: P without the scale */
    float *gates;      /* [3][64]: decay from the chunk's beginning and to its end, beta; then G, 64 doubles */
};

/* ---- tiles in shared memory ---------------------------------------------------------------------------------- */

/* Rows of 16-bit numbers, 16 bytes longer than they need be, so that eight neighbouring rows begin in eight
 * different groups of banks. */
struct tile {
    uint32_t at, step; /* bytes */
};

static __host__ __device__ constexpr uint32_t tile_step(int columns)
{
    return (uint32_t)columns * 2 + 16;
}

static __host__ __device__ constexpr uint32_t tile_bytes(int count, int columns)
{
    return (uint32_t)count * tile_step(columns);
}

/* 16 x 16 pieces of a tile X as fragments, in the order of ldmatrix: A[m][k] = X[row + m][column + k]. */
static __device__ __forceinline__ void left(uint32_t (&a)[4], const tile &x, int row, int column)
{
    const int lane = threadIdx.x & 31;
    ldmatrix4(a, x.at + (uint32_t)(row + (lane & 15)) * x.step + (uint32_t)(column + (lane >> 4) * 8) * 2);
}

/* A[m][k] = X[row + k][column + m]. */
static __device__ __forceinline__ void left_turned(uint32_t (&a)[4], const tile &x, int row, int column)
{
    const int lane = threadIdx.x & 31;
    ldmatrix4_trans(a, x.at + (uint32_t)(row + (lane & 7) + (lane >> 4) * 8) * x.step +
                           (uint32_t)(column + (lane >> 3 & 1) * 8) * 2);
}

/* B[k][n] = X[row + k][column + n]: two fragments of eight columns. */
static __device__ __forceinline__ void right(uint32_t (&b)[4], const tile &x, int row, int column)
{
    const int lane = threadIdx.x & 31;
    ldmatrix4_trans(b, x.at + (uint32_t)(row + (lane & 15)) * x.step + (uint32_t)(column + (lane >> 4) * 8) * 2);
}

/* B[k][n] = X[row + n][column + k]. */
static __device__ __forceinline__ void right_turned(uint32_t (&b)[4], const tile &x, int row, int column)
{
    const int lane = threadIdx.x & 31;
    ldmatrix4(b, x.at + (uint32_t)(row + (lane & 7) + (lane >> 4) * 8) * x.step +
                     (uint32_t)(column + (lane >> 3 & 1) * 8) * 2);
}

/* D += A B for 16 columns. */
static __device__ __forceinline__ void multiply(float (&d)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4])
{
    mma16(d[0], a[0], a[1], a[2], a[3], b[0], b[1]);
    mma16(d[1], a[0], a[1], a[2], a[3], b[2], b[3]);
}

/* d += a + b */
static __device__ __forceinline__ void add(float (&d)[2][4], const float (&a)[2][4], const float (&b)[2][4])
{
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) d[n][k] += a[n][k] + b[n][k];
}

/* Where a lane's pair k (0: rows above, 1: rows below) of columns n of a 16 x 16 result lies. */
static __device__ __forceinline__ int pair_row(int k)
{
    return ((threadIdx.x & 31) >> 2) + 8 * k;
}

static __device__ __forceinline__ int pair_column(int n)
{
    return n * 8 + (threadIdx.x & 3) * 2;
}

static __device__ __forceinline__ void put_pair(unsigned char *room, const tile &x, int row, int column,
                                                uint32_t pair)
{
    *(uint32_t *)(room + x.at + (uint32_t)row * x.step + (uint32_t)column * 2) = pair;
}

static __device__ __forceinline__ uint32_t get_pair(const unsigned char *room, const tile &x, int row, int column)
{
    return *(const uint32_t *)(room + x.at + (uint32_t)row * x.step + (uint32_t)column * 2);
}

/* A result of 16 x 16 as hi + lo. */
static __device__ __forceinline__ void put_split(unsigned char *room, const tile &hi, const tile &lo, int row,
                                                 int column, const float (&d)[2][4])
{
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t h, l;
            split2(h, l, d[n][2 * k], d[n][2 * k + 1]);
            put_pair(room, hi, row + pair_row(k), column + pair_column(n), h);
            put_pair(room, lo, row + pair_row(k), column + pair_column(n), l);
        }
}

/* 64 rows of a chunk to a tile where they cannot be read 16 bytes at a time. */
static __device__ __noinline__ void fetch_slowly(unsigned char *room, const tile to, const rows from,
                                                 const bf16 *data, int count, int columns, int threads, int thread)
{
    for (int i = thread; i < CHUNK * columns; i += threads) {
        const int row = i / columns, column = i % columns;
        bf16 *const there = (bf16 *)(room + to.at + (uint32_t)row * to.step) + column;
        *there = row < count ? data[row * from.step + column * from.channel] : narrow<bf16>(0.0f);
    }
}

/* THREADS threads, of which this is number `thread`, move COUNT rows of COLUMNS numbers, 16 bytes at a time;
 * zeros from row `count` on. */
template <int THREADS, int COUNT, int COLUMNS>
static __device__ __forceinline__ void fetch(unsigned char *room, const tile &to, const bf16 *from, int64_t step,
                                             int count, int thread)
{
    constexpr int PIECES = COLUMNS / 8, ROWS = THREADS / PIECES; /* rows at a time */
    static_assert(THREADS % PIECES == 0, "a thread stays in its piece of a row");
    const int row = thread / PIECES, piece = thread % PIECES;
    const bf16 *p = from + row * step + piece * 8;
    uint32_t there = shared_address(room) + to.at + (uint32_t)row * to.step + (uint32_t)piece * 16;
#pragma unroll
    for (int i = 0; i < COUNT; i += ROWS) {
        if (COUNT % ROWS == 0 || i + row < COUNT) copy_async(there, i + row < count ? p : from, i + row < count);
        p += ROWS * step, there += ROWS * to.step;
    }
}

/* 64 rows of a chunk on their way to a tile: COLUMNS of a head, of which the first is `channel`; zeros behind
 * the end. `wide`: rows can be read 16 bytes at a time. */
template <int THREADS, int COLUMNS>
static __device__ __forceinline__ void fetch_rows(unsigned char *room, const tile &to, const rows &from, bool wide,
                                                  const sequences &seq, const place &at, int64_t first, int count,
                                                  int64_t head, int channel, int thread)
{
    const bf16 *const data =
        (const bf16 *)from.data + offset_in(from, seq, at, first) + head * from.head + channel * from.channel;
    if (wide)
        fetch<THREADS, CHUNK, COLUMNS>(room, to, data, from.step, count, thread);
    else
        fetch_slowly(room, to, from, data, count, COLUMNS, THREADS, thread);
}

/* COUNT floats, a multiple of 4. */
template <int THREADS, int COUNT>
static __device__ __forceinline__ void fetch_floats(unsigned char *room, uint32_t to, const float *from, int thread)
{
    static_assert(COUNT / 4 <= THREADS, "one piece for a thread");
    if (thread < COUNT / 4) copy_async(shared_address(room) + to + (uint32_t)thread * 16, from + thread * 4, true);
}

#endif
