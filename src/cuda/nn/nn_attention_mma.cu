/* SPDX-License-Identifier: Apache-2.0
 *
 * Causal attention [T2] of heads of D = 64 or 128 channels in bf16, on tensor cores. A block has 128 rows of a head, 16 to a
 * warp, and walks the other side in tiles of 64 rows that pass through shared memory, two at a time, while scores stay in
 * registers:
 *
 *     forward   rows are queries, tiles are keys and values: S = Q K^T, softmax on the way, O += P V
 *     d_query   rows are queries, tiles are keys and values: S and P again, dP = dO V^T, dQ += dS K
 *     d_key     rows are keys, tiles are queries and dO:     S^T and P^T again, dV += P^T dO, dK += dS^T Q
 *
 * d_query and d_key each make S and dP, seven products where five would do, so that every sum belongs to one warp and runs in
 * one order. P and dS are rounded to bf16 as factors; all sums are fp32. Bytes a token and head: 8 D forward (2 D each of q,
 * k, v read and o written, once k and v are in L2), about 24 D backward. */
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/nn/nn.cuh"

enum { WARPS = 8, BLOCK = WARPS * 32, ROWS = WARPS * 16, TILE = 64 };

/* Of heads of D channels: bytes of a tile and of a block's own rows in shared memory. */
template <int D> struct head_bytes {
    enum { TILE_ROWS = TILE * D * 2, OWN_ROWS = ROWS * D * 2 };
};

/* A head's part of arrays whose rows are `stride` elements apart. */
struct head_task {
    const bf16 *qkv, *d_o;
    bf16 *o, *d_qkv;
    float *lse;
    const float *delta;
    int length, heads, tiles; /* tiles: blocks of 128 rows of a sequence */
    int64_t width;            /* heads * D */
};

struct place {
    int first, head; /* first row of the block, in its sequence */
    int64_t base;    /* first row of the sequence */
};

/* `last_first`: blocks with the most to do begin first. */
static __device__ __forceinline__ place place_of_block(const head_task &p, bool last_first)
{
    const int tile = (int)(blockIdx.x % (unsigned)p.tiles), pair = (int)(blockIdx.x / (unsigned)p.tiles);
    place at;
    at.first = (last_first ? p.tiles - 1 - tile : tile) * ROWS;
    at.head = pair % p.heads;
    at.base = (int64_t)(pair / p.heads) * p.length;
    return at;
}

/* ---- tiles in shared memory ----------------------------------------------------------------------------------------------------
 *
 * An array of R rows has its first 64 channels as rows of 128 bytes, and its other 64 behind them; 16-byte chunks are permuted so
 * that ldmatrix meets no bank twice, as wgmma.cuh describes. */

template <int R> static __device__ __forceinline__ uint32_t chunk_at(uint32_t array, int row, int chunk)
{
    return array + (uint32_t)(chunk / 8 * (R * 128) + (row * 8 + (chunk % 8 ^ (row & 7))) * 16);
}

/* R rows from row `first` on; zeros past the end of the sequence. */
template <int D, int R>
static __device__ __forceinline__ void load_rows(uint32_t to, const bf16 *from, int64_t stride, int first,
                                                 int length)
{
#pragma unroll 1 /* of registers there are few, of time between tiles there is much */
    for (int e = threadIdx.x; e < R * (D / 8); e += BLOCK) {
        const int row = e / (D / 8), chunk = e % (D / 8), in = first + row < length ? first + row : length - 1;
        copy_async(chunk_at<R>(to, row, chunk), from + in * stride + chunk * 8, first + row < length);
    }
}

/* What this thread has asked for is there, for tensor cores as well; a barrier makes that true of the block. */
static __device__ __forceinline__ void loads_wait()
{
    copy_wait<0>();
#ifdef WEFT_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* ---- products ---------------------------------------------------------------------------------------------------------------------
 *
 * Each comes twice: for warpgroups, and for warps where there are none. A product that is begun has read its factors and written
 * its result when a wait that covers it returns. */

template <int PIECES> static __device__ __forceinline__ void clear(float (&d)[PIECES][4])
{
#pragma unroll
    for (int i = 0; i < PIECES; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) d[i][k] = 0.0f;
}

/* All products but the last `Pending` are done; d is the result of one of them. */
template <int Pending, int PIECES> static __device__ __forceinline__ void product_wait(float (&d)[PIECES][4])
{
#ifdef WEFT_WGMMA
    wgmma_wait<Pending>();
    wgmma_settle(d);
#endif
}

/* A warp's 16 rows of a score's row p, rounded, as the left factor: step k has rows 16 k to 16 k + 15 of the tile. */
static __device__ __forceinline__ void narrow_rows(uint32_t (&a)[TILE / 16][4], const float (&p)[TILE / 8][4])
{
#pragma unroll
    for (int step = 0; step < TILE / 16; step++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            a[step][e] = narrow2(p[2 * step + e / 2][e % 2 * 2], p[2 * step + e / 2][e % 2 * 2 + 1], bf16());
}

#ifdef WEFT_WGMMA

/* Begins d [64 rows, 64 rows of a tile] = the warpgroup's rows of `own` times the tile's rows, transposed. */
template <int D>
static __device__ __forceinline__ void rows_times_rows(float (&d)[TILE / 8][4], uint32_t own, int warp,
                                                       uint32_t tile)
{
    const uint64_t a = wgmma_factor(own + (uint32_t)(warp / 4 * 64 * 128)), b = wgmma_factor(tile);
    wgmma_settle(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < D / 16; step++) { /* 32 bytes a step, in units of 16 */
        const int half = step / 4, in = step % 4 * 2;
        wgmma_rows(d, a + half * (ROWS * 128 / 16) + in, b + half * (TILE * 128 / 16) + in, step > 0);
    }
    wgmma_commit();
}

/* d [64 rows, D channels] += p [64 rows, 64 rows of a tile], rounded, times the tile. */
template <int D>
static __device__ __forceinline__ void times_tile(float (&d)[D / 8][4], const float (&p)[TILE / 8][4],
                                                  uint32_t tile)
{
    uint32_t a[TILE / 16][4];
    narrow_rows(a, p);
    const uint64_t b = wgmma_factor(tile);
    wgmma_settle(d);
    wgmma_settle(a); /* written before the fence */
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE / 16; step++) /* 16 rows a step */
#pragma unroll
        for (int half = 0; half < D / 64; half++)
            wgmma_columns(*(float(*)[8][4])d[half * 8], a[step],
                          b + half * (TILE * 128 / 16) + step * (16 * 128 / 16));
    wgmma_commit();
    product_wait<0>(d);
#pragma unroll
    for (int step = 0; step < TILE / 16; step++) /* the products have read these until here */
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" ::"r"(a[step][e]));
}

#else

/* d [16 rows, 64 rows of a tile] = the warp's rows of `own` times the tile's rows, transposed. The left factor is read anew for
 * every tile: there are no registers to keep it in. */
template <int D>
static __device__ __forceinline__ void rows_times_rows(float (&d)[TILE / 8][4], uint32_t own, int warp,
                                                       uint32_t tile)
{
    const int lane = threadIdx.x % 32;
    clear(d);
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        uint32_t a[4];
        ldmatrix4(a, chunk_at<ROWS>(own, warp * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int pair = 0; pair < TILE / 16; pair++) { /* 16 rows: b[0..1] the first eight, b[2..3] the others */
            uint32_t b[4];
            ldmatrix4(b, chunk_at<TILE>(tile, pair * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
            mma16(d[2 * pair], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma16(d[2 * pair + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

/* d [16 rows, D channels] += p [16 rows, 64 rows of a tile], rounded, times the tile. */
template <int D>
static __device__ __forceinline__ void times_tile(float (&d)[D / 8][4], const float (&p)[TILE / 8][4],
                                                  uint32_t tile)
{
    const int lane = threadIdx.x % 32;
    uint32_t a[TILE / 16][4];
    narrow_rows(a, p);
#pragma unroll
    for (int step = 0; step < TILE / 16; step++)
#pragma unroll
        for (int pair = 0; pair < D / 16; pair++) { /* sixteen channels */
            uint32_t b[4];
            ldmatrix4_trans(b, chunk_at<TILE>(tile, step * 16 + lane / 8 % 2 * 8 + lane % 8, pair * 2 + lane / 16));
            mma16(d[2 * pair], a[step][0], a[step][1], a[step][2], a[step][3], b[0], b[1]);
            mma16(d[2 * pair + 1], a[step][0], a[step][1], a[step][2], a[step][3], b[2], b[3]);
        }
}
#endif

/* Sixteen rows of D channels, as far as the sequence goes; lane 4 g + t has rows g and g + 8, channels 2t and 2t + 1. */
template <int PIECES>
static __device__ __forceinline__ void put_rows(bf16 *to, int64_t stride, int row, int length,
                                                const float (&d)[PIECES][4], const float (&factor)[2])
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = row + g + 8 * half;
        if (at >= length) continue;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            *(uint32_t *)(to + at * stride + i * 8 + 2 * t) =
                narrow2(d[i][2 * half] * factor[half], d[i][2 * half + 1] * factor[half], bf16());
    }
}

/* Scores are kept in powers of two. The approximation is good to 2^-22, and P is rounded to 2^-9. */
static __device__ __forceinline__ float exp2_of(float v)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

/* 1/sqrt(D) of a score, and the same in powers of two. */
template <int D> static __device__ __forceinline__ float scale_of()
{
    return D == 64 ? 0.125f : 0.08838834764831845f;
}

template <int D> static __device__ __forceinline__ float scale2_of()
{
    return scale_of<D>() * LOG2E;
}

/* Of a lane's four neighbours, which share its rows. */
static __device__ __forceinline__ float quad_max(float v)
{
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

static __device__ __forceinline__ float quad_sum(float v)
{
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

/* ---- forward ------------------------------------------------------------------------------------------------------------------- */

template <int D> static __global__ void __launch_bounds__(BLOCK, D == 64 ? 2 : 1) fwd_kernel(head_task p)
{
    enum { TILE_BYTES = head_bytes<D>::TILE_ROWS, ROWS_BYTES = head_bytes<D>::OWN_ROWS, PIECES = TILE / 8 };
    extern __shared__ __align__(1024) char room[];
    const uint32_t own = shared_address(room), ring = own + ROWS_BYTES;
    const place at = place_of_block(p, true);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = at.first + warp * 16, last = (at.first + ROWS - 1 < p.length ? at.first + ROWS : p.length) - 1;
    const int tiles = last / TILE + 1;
    const int64_t stride = 3 * p.width;
    const bf16 *q = p.qkv + at.base * stride + at.head * D, *k = q + p.width, *v = k + p.width;

    load_rows<D, ROWS>(own, q, stride, at.first, p.length);
    load_rows<D, TILE>(ring, k, stride, 0, p.length);
    load_rows<D, TILE>(ring + TILE_BYTES, v, stride, 0, p.length);
    copy_commit();

    float o[D / 8][4], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    clear(o);
    for (int j = 0; j < tiles; j++) {
        const uint32_t keys = ring + (uint32_t)(j % 2) * 2 * TILE_BYTES,
                       next = ring + (uint32_t)((j + 1) % 2) * 2 * TILE_BYTES;
        loads_wait();
        __syncthreads(); /* this tile is there, and the previous one is no longer read */
        if (j + 1 < tiles) {
            load_rows<D, TILE>(next, k, stride, (j + 1) * TILE, p.length);
            load_rows<D, TILE>(next + TILE_BYTES, v, stride, (j + 1) * TILE, p.length);
            copy_commit();
        }
        if (j * TILE > row + 15) continue; /* all of it lies ahead of these queries */
        float s[PIECES][4];
        rows_times_rows<D>(s, own, warp, keys);
        product_wait<0>(s);
        if (j * TILE + TILE - 1 > row)
#pragma unroll
            for (int i = 0; i < PIECES; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (j * TILE + i * 8 + 2 * t + e % 2 > row + g + e / 2 * 8) s[i][e] = -INFINITY;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float high = -INFINITY, part = 0.0f;
#pragma unroll
            for (int i = 0; i < PIECES; i++) high = fmaxf(high, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
            const float now = fmaxf(top[half], quad_max(high) * scale2_of<D>()), shrink = exp2_of(top[half] - now);
#pragma unroll
            for (int i = 0; i < PIECES; i++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    s[i][e] = exp2_of(__fmaf_rn(s[i][e], scale2_of<D>(), -now));
                    part += s[i][e];
                }
#pragma unroll
            for (int i = 0; i < D / 8; i++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) o[i][e] *= shrink;
            sum[half] = __fmaf_rn(sum[half], shrink, part);
            top[half] = now;
        }
        times_tile<D>(o, s, keys + TILE_BYTES);
    }
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float all = quad_sum(sum[half]);
        const int at_row = row + g + 8 * half;
        factor[half] = 1.0f / all;
        if (t == 0 && at_row < p.length)
            p.lse[(at.base + at_row) * p.heads + at.head] = top[half] * LN2 + logf(all);
    }
    put_rows(p.o + at.base * p.width + at.head * D, p.width, row, p.length, o, factor);
}

/* ---- backward ------------------------------------------------------------------------------------------------------------------ */

template <int D> static __global__ void __launch_bounds__(BLOCK, 1) d_query_kernel(head_task p)
{
    enum { TILE_BYTES = head_bytes<D>::TILE_ROWS, ROWS_BYTES = head_bytes<D>::OWN_ROWS, PIECES = TILE / 8 };
    extern __shared__ __align__(1024) char room[];
    const uint32_t own = shared_address(room), ring = own + 2 * ROWS_BYTES;
    const place at = place_of_block(p, true);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = at.first + warp * 16, last = (at.first + ROWS - 1 < p.length ? at.first + ROWS : p.length) - 1;
    const int tiles = last / TILE + 1;
    const int64_t stride = 3 * p.width;
    const bf16 *q = p.qkv + at.base * stride + at.head * D, *k = q + p.width, *v = k + p.width;

    load_rows<D, ROWS>(own, q, stride, at.first, p.length);
    load_rows<D, ROWS>(own + ROWS_BYTES, p.d_o + at.base * p.width + at.head * D, p.width, at.first, p.length);
    load_rows<D, TILE>(ring, k, stride, 0, p.length);
    load_rows<D, TILE>(ring + TILE_BYTES, v, stride, 0, p.length);
    copy_commit();

    float lse[2], all[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at_row = row + g + 8 * half;
        const int64_t e = (at.base + at_row) * p.heads + at.head;
        lse[half] = at_row < p.length ? p.lse[e] * LOG2E : INFINITY;
        all[half] = at_row < p.length ? p.delta[e] : 0.0f;
    }
    float d_q[D / 8][4];
    clear(d_q);
    for (int j = 0; j < tiles; j++) {
        const uint32_t keys = ring + (uint32_t)(j % 2) * 2 * TILE_BYTES,
                       next = ring + (uint32_t)((j + 1) % 2) * 2 * TILE_BYTES;
        loads_wait();
        __syncthreads();
        if (j + 1 < tiles) {
            load_rows<D, TILE>(next, k, stride, (j + 1) * TILE, p.length);
            load_rows<D, TILE>(next + TILE_BYTES, v, stride, (j + 1) * TILE, p.length);
            copy_commit();
        }
        if (j * TILE > row + 15) continue;
        float s[PIECES][4], d_p[PIECES][4];
        rows_times_rows<D>(s, own, warp, keys);
        rows_times_rows<D>(d_p, own + ROWS_BYTES, warp, keys + TILE_BYTES);
        product_wait<0>(s);
        product_wait<0>(d_p);
        const bool crosses = j * TILE + TILE - 1 > row;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const bool ahead = crosses && j * TILE + i * 8 + 2 * t + e % 2 > row + g + e / 2 * 8;
                const float share = ahead ? 0.0f : exp2_of(__fmaf_rn(s[i][e], scale2_of<D>(), -lse[e / 2]));
                s[i][e] = share * (d_p[i][e] - all[e / 2]);
            }
        times_tile<D>(d_q, s, keys);
    }
    const float factor[2] = {scale_of<D>(), scale_of<D>()};
    put_rows(p.d_qkv + at.base * stride + at.head * D, stride, row, p.length, d_q, factor);
}

/* Beside a tile of queries: the logarithms of their divisors in powers of two, and their deltas. */
static __device__ __forceinline__ void load_figures(float *to, const head_task &p, const place &at, int first)
{
    for (int e = threadIdx.x; e < TILE; e += BLOCK) {
        const int row = first + e;
        const int64_t i = (at.base + row) * p.heads + at.head;
        to[e] = row < p.length ? p.lse[i] * LOG2E : INFINITY; /* a query that is not there sees nothing */
        to[TILE + e] = row < p.length ? p.delta[i] : 0.0f;
    }
}

template <int D> static __global__ void __launch_bounds__(BLOCK, 1) d_key_kernel(head_task p)
{
    enum { TILE_BYTES = head_bytes<D>::TILE_ROWS, ROWS_BYTES = head_bytes<D>::OWN_ROWS, PIECES = TILE / 8 };
    extern __shared__ __align__(1024) char room[];
    __shared__ float figures[2][2 * TILE];
    const uint32_t own = shared_address(room), ring = own + 2 * ROWS_BYTES;
    const place at = place_of_block(p, false);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = at.first + warp * 16, begin = at.first / TILE, end = (p.length - 1) / TILE + 1;
    const int64_t stride = 3 * p.width;
    const bf16 *q = p.qkv + at.base * stride + at.head * D, *k = q + p.width, *v = k + p.width;
    const bf16 *d_o = p.d_o + at.base * p.width + at.head * D;

    load_rows<D, ROWS>(own, k, stride, at.first, p.length);
    load_rows<D, ROWS>(own + ROWS_BYTES, v, stride, at.first, p.length);
    load_rows<D, TILE>(ring, q, stride, begin * TILE, p.length);
    load_rows<D, TILE>(ring + TILE_BYTES, d_o, p.width, begin * TILE, p.length);
    copy_commit();
    load_figures(figures[0], p, at, begin * TILE);

    float d_k[D / 8][4], d_v[D / 8][4];
    clear(d_k);
    clear(d_v);
    for (int i = begin; i < end; i++) {
        const int turn = (i - begin) % 2;
        const uint32_t queries = ring + (uint32_t)turn * 2 * TILE_BYTES,
                       next = ring + (uint32_t)(1 - turn) * 2 * TILE_BYTES;
        loads_wait();
        __syncthreads();
        if (i + 1 < end) {
            load_rows<D, TILE>(next, q, stride, (i + 1) * TILE, p.length);
            load_rows<D, TILE>(next + TILE_BYTES, d_o, p.width, (i + 1) * TILE, p.length);
            copy_commit();
            load_figures(figures[1 - turn], p, at, (i + 1) * TILE);
        }
        if (i * TILE + TILE - 1 < row) continue; /* none of these queries sees these keys */
        float s[PIECES][4], d_p[PIECES][4];
        rows_times_rows<D>(s, own, warp, queries);
        rows_times_rows<D>(d_p, own + ROWS_BYTES, warp, queries + TILE_BYTES);
        product_wait<1>(s);
        const bool crosses = i * TILE < row + 15;
#pragma unroll
        for (int c = 0; c < PIECES; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = c * 8 + 2 * t + e % 2;
                const bool behind = crosses && i * TILE + column < row + g + e / 2 * 8;
                s[c][e] = behind ? 0.0f : exp2_of(__fmaf_rn(s[c][e], scale2_of<D>(), -figures[turn][column]));
            }
        times_tile<D>(d_v, s, queries + TILE_BYTES);
        product_wait<0>(d_p);
#pragma unroll
        for (int c = 0; c < PIECES; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[c][e] = s[c][e] * (d_p[c][e] - figures[turn][TILE + c * 8 + 2 * t + e % 2]);
        times_tile<D>(d_k, s, queries);
    }
    const float scale[2] = {scale_of<D>(), scale_of<D>()}, one[2] = {1.0f, 1.0f};
    bf16 *to = p.d_qkv + at.base * stride + at.head * D;
    put_rows(to + p.width, stride, row, p.length, d_k, scale);
    put_rows(to + 2 * p.width, stride, row, p.length, d_v, one);
}

/* ---- launches ------------------------------------------------------------------------------------------------------------------- */

template <int D> static head_task task_of(const weft_attention *a, const float *delta)
{
    head_task p = {};
    p.qkv = (const bf16 *)a->qkv, p.o = (bf16 *)a->o, p.lse = (float *)a->lse;
    p.d_o = (const bf16 *)a->d_o, p.d_qkv = (bf16 *)a->d_qkv, p.delta = delta;
    p.length = (int)a->length, p.heads = (int)a->heads;
    p.tiles = (int)ceil_div(a->length, ROWS);
    p.width = a->heads * D;
    return p;
}

static dim3 grid_for(const weft_attention *a)
{
    return dim3((unsigned)(ceil_div(a->length, ROWS) * a->sequences * a->heads));
}

template <int D> static weft_status fwd(const weft_call *call, const weft_attention *a)
{
    const launch_shape shape = {grid_for(a), BLOCK, head_bytes<D>::OWN_ROWS + 4 * head_bytes<D>::TILE_ROWS};
    return launch(call, "attention", fwd_kernel<D>, shape, task_of<D>(a, NULL));
}

/* Of shared memory; forward needs less. */
template <int D> static size_t backward_bytes()
{
    return 2 * head_bytes<D>::OWN_ROWS + 4 * head_bytes<D>::TILE_ROWS;
}

template <int D> static weft_status bwd(const weft_call *call, const weft_attention *a, const float *delta)
{
    const launch_shape shape = {grid_for(a), BLOCK, backward_bytes<D>()};
    WEFT_TRY(launch(call, "attention", d_query_kernel<D>, shape, task_of<D>(a, delta)));
    return launch(call, "attention", d_key_kernel<D>, shape, task_of<D>(a, delta));
}

size_t weft_cuda_attention_mma_shared(int64_t head_dim)
{
    return head_dim == 64 ? backward_bytes<64>() : backward_bytes<128>();
}

weft_status weft_cuda_attention_mma_fwd(const weft_call *call, const weft_attention *a)
{
    return a->head_dim == 64 ? fwd<64>(call, a) : fwd<128>(call, a);
}

weft_status weft_cuda_attention_mma_bwd(const weft_call *call, const weft_attention *a, const float *delta)
{
    return a->head_dim == 64 ? bwd<64>(call, a, delta) : bwd<128>(call, a, delta);
}
