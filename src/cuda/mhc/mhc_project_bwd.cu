/* SPDX-License-Identifier: Apache-2.0
 *
 * Projection and mean square, backward [M1]: d_x and d_phi from one read of x. Reads 2nC, writes 2nC bytes a token in 16
 * bits, plus the copies of phi that d_phi is summed from.
 *
 * `share` takes the rows of d_h apart into bf16 hi + lo. `backward` gives a block some columns and a range of tokens: psi
 * of these columns stays in registers, x goes by in stages, and each stage serves two products:
 *     d_x[t,k]  = sum_j d_h[t,j] psi[j,k] + (2 d_ms[t] / K) x[t,k]       hi hi + lo hi + hi lo
 *     dpsi[j,k] = sum_t d_h[t,j] x[t,k]                                  x exact, d_h as hi + lo
 * `finish` adds the ranges of tokens in order and makes d_phi and d_norm_weight of them. The number of ranges depends on
 * tokens, columns and rows only. */
#include "cuda/mhc/mhc_project_finish.cuh"

enum { STAGE_TOKENS = 32, STAGES = 4, WARPS = 8 };

/* A token's row of d_h in shared memory: hi, lo, and a piece with 2 d_ms / K. An odd number of 16-byte pieces, so that
 * eight rows begin in eight different banks. */
template <int NT> struct dh_row {
    static constexpr int pieces = 2 * NT + 1, bytes = pieces * 16;
};

__global__ void share_kernel(uint4 *to, view d_h, view d_ms, int32_t rows, int32_t row_tiles, int64_t tokens,
                             float scale)
{
    const int pieces = 2 * row_tiles + 1;
    let_next_begin();
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < tokens * pieces;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t token = i / pieces;
        const int piece = (int)(i % pieces), lo = piece >= row_tiles;
        uint32_t word[4] = {};
        if (piece == 2 * row_tiles) {
            if (has(d_ms)) word[0] = __float_as_uint(scale * get(d_ms, token * d_ms.stride[0]));
        } else if (has(d_h)) {
            for (int e = 0; e < 4; e++) {
                float v[2];
                for (int k = 0; k < 2; k++) {
                    const int row = (piece - lo * row_tiles) * 8 + 2 * e + k;
                    v[k] = row < rows ? get(d_h, token * d_h.stride[0] + row * d_h.stride[1]) : 0.0f;
                }
                uint32_t high, low;
                split2(high, low, v[0], v[1]);
                word[e] = lo ? low : high;
            }
        }
        to[i] = make_uint4(word[0], word[1], word[2], word[3]);
    }
}

struct backward_args {
    const void *x;
    const uint4 *dh;
    const float *psi; /* [rows], psi_stride apart */
    float *dpsi; /* [splits][rows][columns]: partial sums, or d_phi itself where there is one range of tokens */
    int64_t psi_stride, dpsi_stride; /* from row to row */
    bool add_dpsi;
    int32_t rows;
    columns k;
    view d_x, base, pre, du;
    int64_t tokens, x_stride, split_tokens;
    int32_t across; /* blocks side by side over the columns */
    bool
        d_x_plain; /* d_x, and base where there is one, have rows in the order of x that can be written 16 bytes at a time */
    bool du_vectors; /* a lane's columns are channels of one stream, and du can be read in one go */
};

static __device__ __forceinline__ int64_t offset_of(const view &v, const columns &k, int64_t token, uint32_t column)
{
    uint32_t stream, channel;
    column_at(k, column, stream, channel);
    return token * v.stride[0] + stream * v.stride[1] + channel * v.stride[2];
}

/* v = (base +) pre du + v, in that order: what an aggregate and this projection would leave in an fp32 buffer. */
template <class T, int E>
static __device__ __forceinline__ void join_extra(float (&v)[E], const backward_args &p, int64_t token,
                                                  uint32_t column)
{
    float sum[E] = {};
    if (has(p.base) && p.d_x_plain) {
        get_wide<T, E>(sum, p.base, token * p.base.stride[0] + column);
    } else if (has(p.base)) {
#pragma unroll
        for (int e = 0; e < E; e++) sum[e] = get(p.base, offset_of(p.base, p.k, token, column + e));
    }
    if (has(p.du)) {
        uint32_t stream, channel;
        column_at(p.k, column, stream, channel);
        if (p.du_vectors) {
            const float coef = get(p.pre, token * p.pre.stride[0] + stream * p.pre.stride[1]);
            float du[E];
            get_wide<T, E>(du, p.du, token * p.du.stride[0] + channel);
#pragma unroll
            for (int e = 0; e < E; e++) sum[e] = has(p.base) ? sum[e] + coef * du[e] : coef * du[e];
        } else {
#pragma unroll
            for (int e = 0; e < E; e++) {
                const float product = get(p.pre, token * p.pre.stride[0] + stream * p.pre.stride[1]) *
                                      get(p.du, token * p.du.stride[0] + channel * p.du.stride[1]);
                sum[e] = has(p.base) ? sum[e] + product : product;
                if (p.k.cn) {
                    if (++stream == p.k.streams) stream = 0, channel++;
                } else {
                    if (++channel == p.k.channels) channel = 0, stream++;
                }
            }
        }
    }
#pragma unroll
    for (int e = 0; e < E; e++) v[e] = sum[e] + v[e];
}

/* W neighbouring elements, of T or fp32, as they came. */
template <int W> struct wide {
    uint32_t word[W];
};

template <class T, int W> static __device__ __forceinline__ void fetch(wide<W> &to, const view &from, int64_t i)
{
    if (from.dtype == WEFT_F32) {
        raw<float, W> r;
        load_raw_shared(r, (const float *)from.data + i);
        memcpy(&to, &r, sizeof r);
    } else {
        raw<T, W> r;
        load_raw_shared(r, (const T *)from.data + i);
        memcpy(&to, &r, sizeof r);
    }
}

template <class T, int W>
static __device__ __forceinline__ void unpack(float (&v)[W], const wide<W> &from, weft_dtype dtype)
{
    if (dtype == WEFT_F32) {
        raw<float, W> r;
        memcpy(&r, &from, sizeof r);
        unpack(v, r);
    } else {
        raw<T, W> r;
        memcpy(&r, &from, sizeof r);
        unpack(v, r);
    }
}

/* What join_extra adds to one row of one lane, fetched a stage before it is needed: there is one block on a
 * multiprocessor, too few warps to wait for memory one after the other. */
template <int W> struct terms {
    wide<W> base, du;
    float pre;
};

template <class T, int W>
static __device__ __forceinline__ void fetch_terms(terms<W> &to, const backward_args &p, int64_t token,
                                                   uint32_t column, uint32_t stream, uint32_t channel)
{
    if (has(p.base)) fetch<T>(to.base, p.base, token * p.base.stride[0] + column);
    if (!has(p.du)) return;
    to.pre = get(p.pre, token * p.pre.stride[0] + stream * p.pre.stride[1]);
    fetch<T>(to.du, p.du, token * p.du.stride[0] + channel);
}

/* The same sum as join_extra's. */
template <class T, int W>
static __device__ __forceinline__ void join_terms(float (&v)[W], const backward_args &p, const terms<W> &from)
{
    float sum[W] = {}, du[W];
    if (has(p.base)) unpack<T>(sum, from.base, p.base.dtype);
    if (has(p.du)) {
        unpack<T>(du, from.du, p.du.dtype);
#pragma unroll
        for (int e = 0; e < W; e++) sum[e] = has(p.base) ? sum[e] + from.pre * du[e] : from.pre * du[e];
    }
#pragma unroll
    for (int e = 0; e < W; e++) v[e] = sum[e] + v[e];
}

/* How d_x is made: stored 16 bytes at a time in the activations' type; the same with more terms or in fp32; or element
 * by element in any layout. */
enum extra_kind { EXTRA_NONE, EXTRA_AHEAD, EXTRA_ANY };

/* A warp owns NQ * 8 columns. Which of them a tensor-core tile calls its n-th is free: with column
 * (n >> 1) * 2 NQ + 2 q + (n & 1) for tile q, a lane ends up with 2 NQ neighbouring columns of d_x. */
template <class T, int NT, int NQ, extra_kind EXTRA>
__global__ void __launch_bounds__(WARPS * 32, NT <= 3 && EXTRA == EXTRA_NONE ? 2 : 1)
    backward_kernel(const backward_args p)
{
    constexpr int COLUMNS = WARPS * NQ * 8, PIECES = COLUMNS / 8, THREADS = WARPS * 32, DH = dh_row<NT>::pieces;
    constexpr int X_BYTES = STAGE_TOKENS * PIECES * 16, STAGE_BYTES = X_BYTES + STAGE_TOKENS * DH * 16;
    constexpr int WIDTH = 2 * NQ; /* columns of a lane in d_x */
    constexpr int MK = NQ / 2;    /* tiles of 16 columns in dpsi */
    static_assert(NQ == 4 || NQ == 2, "a lane's columns are 8 or 16 bytes");
    extern __shared__ __align__(128) char shared[];

    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int64_t column0 = (int64_t)(blockIdx.x % (unsigned)p.across) * COLUMNS;
    const int64_t split = blockIdx.x / (unsigned)p.across, token0 = split * p.split_tokens;
    const int64_t token1 = token0 + p.split_tokens < p.tokens ? token0 + p.split_tokens : p.tokens;
    const int rows = (int)(token1 - token0), stages = (rows + STAGE_TOKENS - 1) / STAGE_TOKENS;

    /* Rows 0 and 1 of eight must not share banks with each other when a warp reads four pieces of both. */
    auto piece_at = [&](int row, int piece) {
        return row * PIECES + (piece ^ (((row & 1) << 2) | ((row >> 1) & 3)));
    };
    /* A thread copies the same piece of every eighth row, or so: an address that only grows. */
    constexpr int APART = THREADS / PIECES;
    const int my_row = tid / PIECES, my_piece = tid % PIECES;
    const bool inside = column0 + my_piece * 8 < p.k.count;
    const T *x_from = (const T *)p.x + (token0 + my_row) * p.x_stride + column0 + my_piece * 8;
    auto load_x = [&](int stage, int slot) {
        const uint32_t to = shared_address(shared) + slot * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < STAGE_TOKENS / APART; i++) {
            const int row = i * APART + my_row;
            const bool valid = inside && stage * STAGE_TOKENS + row < rows;
            copy_async(to + piece_at(row, my_piece) * 16, valid ? x_from + i * APART * p.x_stride : (const T *)p.x,
                       valid);
        }
        x_from += STAGE_TOKENS * p.x_stride;
    };
    const uint4 *const dh_from = p.dh + token0 * DH;
    auto load_dh = [&](int stage, int slot) {
        const uint32_t to = shared_address(shared) + slot * STAGE_BYTES + X_BYTES;
        const int from = stage * STAGE_TOKENS * DH, end = rows * DH;
        for (int i = tid; i < STAGE_TOKENS * DH; i += THREADS)
            copy_async(to + i * 16, dh_from + (from + i < end ? from + i : 0), from + i < end);
    };

#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        if (s < stages) load_x(s, s);

    wait_for_previous();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < stages) load_dh(s, s);
        copy_commit();
    }

    /* psi of this warp's columns, hi and lo, as halves of B: rows 8 h + 2t, 2t + 1 of column n = g. */
    uint32_t psi_hi[NQ][NT], psi_lo[NQ][NT];
    if (has(p.d_x)) {
        float v[NQ][NT][2];
#pragma unroll
        for (int q = 0; q < NQ; q++) {
            const int64_t own = column0 + warp * NQ * 8 + (g >> 1) * WIDTH + 2 * q + (g & 1);
#pragma unroll
            for (int h = 0; h < NT; h++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int row = 8 * h + 2 * t + e;
                    v[q][h][e] = own < p.k.count && row < p.rows ? __ldg(p.psi + row * p.psi_stride + own) : 0.0f;
                }
        }
#pragma unroll
        for (int q = 0; q < NQ; q++)
#pragma unroll
            for (int h = 0; h < NT; h++) split2(psi_hi[q][h], psi_lo[q][h], v[q][h][0], v[q][h][1]);
    }

    const int64_t column = column0 + warp * NQ * 8 + t * WIDTH; /* of this lane in d_x */
    T *d_x_to = (T *)p.d_x.data + (token0 + g) * p.d_x.stride[0] + column;
    float dpsi[MK][NT][4] = {};
    int slot = 0;

    constexpr int ROWS = EXTRA == EXTRA_AHEAD ? STAGE_TOKENS / 8 : 1; /* of this lane in a stage */
    terms<WIDTH> now[ROWS], next_terms[ROWS];
    uint32_t stream = 0, channel = 0;
    auto fetch_ahead = [&](terms<WIDTH>(&to)[ROWS], int stage) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int row = stage * STAGE_TOKENS + r * 8 + g;
            if (row < rows && column < p.k.count)
                fetch_terms<T>(to[r], p, token0 + row, (uint32_t)column, stream, channel);
        }
    };
    if constexpr (EXTRA == EXTRA_AHEAD) {
        column_at(p.k, (uint32_t)column, stream, channel);
        fetch_ahead(now, 0);
    }
    for (int stage = 0; stage < stages; stage++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        {
            const int next = stage + STAGES - 1;
            const int next_slot = slot == 0 ? STAGES - 1 : slot - 1;
            if (next < stages) {
                load_x(next, next_slot);
                load_dh(next, next_slot);
            }
            copy_commit();
        }
        if constexpr (EXTRA == EXTRA_AHEAD) fetch_ahead(next_terms, stage + 1);
        const char *base = shared + slot * STAGE_BYTES, *dh_base = base + X_BYTES;
        const uint32_t x_at = shared_address(base), dh_at = shared_address(dh_base);
#pragma unroll
        for (int m = 0; m < STAGE_TOKENS / 16; m++) {
            if (p.dpsi) {
                /* A = x with columns as rows, B = d_h: both transposed on the way out of shared memory. */
                uint32_t x_hi[MK][4], x_lo[MK][4];
#pragma unroll
                for (int k = 0; k < MK; k++) {
                    const int row = m * 16 + (lane & 7) + ((lane >> 4) & 1) * 8;
                    const int piece = warp * NQ + k * 2 + ((lane >> 3) & 1);
                    uint32_t a[4];
                    ldmatrix4_trans(a, x_at + piece_at(row, piece) * 16);
#pragma unroll
                    for (int e = 0; e < 4; e++) split_pair(x_hi[k][e], x_lo[k][e], a[e], T());
                }
#pragma unroll
                for (int q = 0; q < NT; q++) {
                    const int row = m * 16 + (lane & 15);
                    uint32_t b[4]; /* hi of tokens 0-7, 8-15, lo of the same */
                    ldmatrix4_trans(b, dh_at + (row * DH + q + (lane >> 4) * NT) * 16);
#pragma unroll
                    for (int k = 0; k < MK; k++) {
                        mma16(dpsi[k][q], x_hi[k][0], x_hi[k][1], x_hi[k][2], x_hi[k][3], b[0], b[1]);
                        mma16(dpsi[k][q], x_hi[k][0], x_hi[k][1], x_hi[k][2], x_hi[k][3], b[2], b[3]);
                        if constexpr (number<T>::dtype == WEFT_F16)
                            mma16(dpsi[k][q], x_lo[k][0], x_lo[k][1], x_lo[k][2], x_lo[k][3], b[0], b[1]);
                    }
                }
            }
            if (!has(p.d_x)) continue;
            /* Halves of A: 8 columns of d_h for rows g and g + 8; hi is 0 .. NT-1, lo is NT .. 2 NT - 1. */
            uint32_t a[2 * NT][2];
#pragma unroll
            for (int h = 0; h < 2 * NT; h += 2) {
                const int row = m * 16 + (lane & 15);
                uint32_t r[4];
                ldmatrix4(r, dh_at + (row * DH + h + (lane >> 4)) * 16);
                a[h][0] = r[0], a[h][1] = r[1], a[h + 1][0] = r[2], a[h + 1][1] = r[3];
            }
            float acc[NQ][4] = {};
#pragma unroll
            for (int q = 0; q < NQ; q++) {
                /* 3 NT halves of products, two at a time: hi hi, lo hi, then hi lo. */
#pragma unroll
                for (int h = 0; h + 1 < 3 * NT; h += 2) {
                    const int h0 = h, h1 = h + 1;
                    const int a0 = h0 < 2 * NT ? h0 : h0 - 2 * NT, a1 = h1 < 2 * NT ? h1 : h1 - 2 * NT;
                    mma16(acc[q], a[a0][0], a[a0][1], a[a1][0], a[a1][1],
                          h0 < 2 * NT ? psi_hi[q][h0 % NT] : psi_lo[q][h0 % NT],
                          h1 < 2 * NT ? psi_hi[q][h1 % NT] : psi_lo[q][h1 % NT]);
                }
                if constexpr (3 * NT % 2) mma8(acc[q], a[NT - 1][0], a[NT - 1][1], psi_lo[q][NT - 1]);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = m * 16 + g + half * 8;
                if (stage * STAGE_TOKENS + row >= rows || column >= p.k.count) continue;
                const float coef = *(const float *)(dh_base + (row * DH + 2 * NT) * 16);
                const int at = warp * NQ + t * WIDTH / 8;
                raw<T, WIDTH> r;
                memcpy(&r, __builtin_assume_aligned(base + piece_at(row, at) * 16 + t * WIDTH % 8 * 2, WIDTH * 2),
                       sizeof r);
                float x[WIDTH], v[WIDTH];
                unpack(x, r);
#pragma unroll
                for (int q = 0; q < NQ; q++)
#pragma unroll
                    for (int e = 0; e < 2; e++) v[2 * q + e] = fmaf(coef, x[2 * q + e], acc[q][half * 2 + e]);
                if constexpr (EXTRA == EXTRA_NONE) {
                    store<T, WIDTH>(d_x_to + (m * 16 + half * 8) * p.d_x.stride[0], v);
                    continue;
                }
                const int64_t token = token0 + stage * STAGE_TOKENS + row;
                if constexpr (EXTRA == EXTRA_AHEAD) {
                    join_terms<T>(v, p, now[m * 2 + half]);
                    put_wide<T, WIDTH>(p.d_x, token * p.d_x.stride[0] + column, v);
                    continue;
                }
                join_extra<T>(v, p, token, (uint32_t)column);
                if (p.d_x_plain) {
                    put_wide<T, WIDTH>(p.d_x, token * p.d_x.stride[0] + column, v);
                } else {
#pragma unroll
                    for (int e = 0; e < WIDTH; e++)
                        put(p.d_x, offset_of(p.d_x, p.k, token, (uint32_t)column + e), v[e]);
                }
            }
        }
        if constexpr (EXTRA == EXTRA_AHEAD) memcpy(now, next_terms, sizeof now);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        d_x_to += STAGE_TOKENS * p.d_x.stride[0];
    }
    let_next_begin();

    if (!p.dpsi) return;
    float *to = p.dpsi + split * p.rows * p.k.count;
#pragma unroll
    for (int k = 0; k < MK; k++)
#pragma unroll
        for (int q = 0; q < NT; q++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int64_t own = column0 + warp * NQ * 8 + k * 16 + g + (e >> 1) * 8;
                const int row = q * 8 + 2 * t + (e & 1);
                if (own >= p.k.count || row >= p.rows) continue;
                float *at = to + row * p.dpsi_stride + own;
                *at = p.add_dpsi ? *at + dpsi[k][q][e] : dpsi[k][q][e];
            }
}

/* ---- d_phi, d_norm_weight ---------------------------------------------------------------------------------------------- */

/* A thread per column and, where every row stands for itself, per row. */
__global__ void finish_kernel(const __grid_constant__ finish_args a, const float *partial, int32_t splits)
{
    const int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_previous();
    if (column < a.k.count)
        finish_columns<1>(a, {partial + column, a.k.count, a.w.rows * a.k.count, splits}, column,
                          (int32_t)blockIdx.y);
}

weft_status weft_cuda_project_finish(const weft_call *call, const weft_mhc_project_bwd_args *a,
                                     const float *partial, int32_t splits, columns k)
{
    const finish_args args = finish_args_of(call, a, k);
    const dim3 grid((unsigned)((k.count + 127) / 128), (unsigned)finish_rows(&args));
    return launch(call, "sums over tokens", finish_kernel, {.grid = grid, .block = 128, .order = OVERLAP}, args,
                  partial, splits);
}

/* ---- launch ------------------------------------------------------------------------------------------------------------ */

template <class T, int NT, int NQ>
static weft_status launch_backward(const weft_call *call, const backward_args &p, int64_t blocks)
{
    constexpr size_t stage = STAGE_TOKENS * WARPS * NQ * 16 + STAGE_TOKENS * dh_row<NT>::bytes;
    launch_shape shape = {
        .grid = (unsigned)blocks, .block = WARPS * 32, .shared = stage * STAGES, .order = OVERLAP};
    const char *what = "projection backward";
    if (p.d_x_plain && !has(p.du) && !has(p.base) && (!has(p.d_x) || p.d_x.dtype == number<T>::dtype))
        return launch(call, what, backward_kernel<T, NT, NQ, EXTRA_NONE>, shape, p);
    if (NT <= 3 && p.d_x_plain && (!has(p.du) || p.du_vectors))
        return launch(call, what, backward_kernel < T, NT, NQ, NT <= 3 ? EXTRA_AHEAD : EXTRA_ANY >, shape, p);
    return launch(call, what, backward_kernel<T, NT, NQ, EXTRA_ANY>, shape, p);
}

static bool wants_sums(const weft_mhc_project_bwd_args *a)
{
    return weft_has(&a->d_phi.to) || weft_has(&a->d_norm_weight.to);
}

static int32_t columns_of_block(int32_t tiles)
{
    return tiles == 10 ? WARPS * 16 : WARPS * 32;
}

struct bwd_room {
    uint4 *dh;
    float *partial, *psi;
};

static bwd_room bwd_lay_out(weft_arena *arena, const weft_call *call, const weft_mhc_project_bwd_args *a,
                            weft_project_bwd_plan *plan)
{
    const int32_t tiles = weft_cuda_project_row_tiles(call->rows);
    const int64_t k = call->streams * call->channels;
    bwd_room r = {};
    *plan = weft_cuda_project_bwd_plan(call->tokens, k, call->rows, columns_of_block(tiles));
    if (tiles && call->dtype != WEFT_F32) r.psi = (float *)weft_arena_take(arena, (size_t)(call->rows * k) * 4);
    if (tiles && call->dtype != WEFT_F32)
        r.dh = (uint4 *)weft_arena_take(arena, (size_t)(call->tokens * (2 * tiles + 1)) * 16);
    if (wants_sums(a)) r.partial = (float *)weft_arena_take(arena, (size_t)(plan->splits * call->rows * k) * 4);
    return r;
}

static bool fits(const weft_tensor *t, stream_layout order)
{
    return !weft_has(t) || rows_are_plain(t, order);
}

template <class T>
static weft_status tensor_cores(const weft_call *call, const weft_mhc_project_bwd_args *a,
                                const project_extra *extra, const bwd_room &room, const weft_project_bwd_plan *plan,
                                stream_layout order)
{
    const int32_t tiles = weft_cuda_project_row_tiles(call->rows);
    const int64_t pieces = call->tokens * (2 * tiles + 1);
    const columns k = columns_of(call, order);
    weft_status status;
    backward_args p = {.x = a->x.data,
                       .dh = room.dh,
                       .psi = (const float *)a->phi.data,
                       .dpsi = room.partial,
                       .psi_stride = a->phi.stride[0],
                       .dpsi_stride = k.count,
                       .add_dpsi = false,
                       .rows = (int32_t)call->rows,
                       .k = k,
                       .d_x = view_of(&a->d_x),
                       .base = {},
                       .pre = {},
                       .du = {},
                       .tokens = call->tokens,
                       .x_stride = a->x.stride[0],
                       .split_tokens = plan->split_tokens,
                       .across = (int32_t)((k.count + plan->block_columns - 1) / plan->block_columns),
                       .d_x_plain = fits(&a->d_x.to, order) && (!extra || fits(&extra->base, order)),
                       .du_vectors = false};
    if (extra) {
        p.pre = view_of(&extra->pre), p.du = view_of(&extra->du), p.base = view_of(&extra->base);
        p.du_vectors = order == LAYOUT_NC && row_fits(&extra->du, tiles == 10 ? 4 : 8);
    }
    if (p.d_x.add) p.base = p.d_x; /* a base of its own is for overwriting */
    p.d_x.add = 0;
    if (has(p.d_x) && !weft_project_phi_is_psi(&a->phi, &a->norm_weight, order)) {
        p.psi = room.psi, p.psi_stride = k.count;
        status = weft_cuda_project_spread(call, &a->phi, &a->norm_weight, k, room.psi);
        if (status != WEFT_OK) return status;
    }
    const weft_tensor *d_phi = &a->d_phi.to;
    const bool direct = room.partial && plan->splits == 1 && !weft_has(&a->norm_weight) &&
                        d_phi->dtype == WEFT_F32 && row_order(d_phi) == order;
    if (direct) p.dpsi = (float *)d_phi->data, p.dpsi_stride = d_phi->stride[0], p.add_dpsi = a->d_phi.add;
    status = launch(call, "d_h", share_kernel, {.grid = grid_of((pieces + 255) / 256), .block = 256}, room.dh,
                    view_of(&a->d_h), view_of(&a->d_ms), (int32_t)call->rows, tiles, call->tokens,
                    2.0f / (float)k.count);
    if (status != WEFT_OK) return status;
    switch (tiles) {
    case 1: status = launch_backward<T, 1, 4>(call, p, plan->blocks); break;
    case 3:
        /* Blocks of half the columns where there are too few to fill the machine; no sum notices. */
        if (plan->blocks >= call->sms) {
            status = launch_backward<T, 3, 4>(call, p, plan->blocks);
        } else {
            p.across = (int32_t)((k.count + WARPS * 16 - 1) / (WARPS * 16));
            status = launch_backward<T, 3, 2>(call, p, (int64_t)p.across * plan->splits);
        }
        break;
    default: status = launch_backward<T, 10, 2>(call, p, plan->blocks); break;
    }
    if (status != WEFT_OK || !room.partial || direct) return status;
    return weft_cuda_project_finish(call, a, room.partial, plan->splits, k);
}

weft_status weft_cuda_project_bwd(const weft_call *call, const weft_mhc_project_bwd_args *a,
                                  const project_extra *extra)
{
    weft_project_bwd_plan plan;
    weft_arena arena = cuda_arena(call);
    const bwd_room room = bwd_lay_out(&arena, call, a, &plan);
    const stream_layout order = row_order(&a->x);
    /* What the result is must not depend on where it goes, so the inputs alone decide. */
    const bool plain = room.dh && call->tokens > 0 && rows_are_plain(&a->x, order);
    if (plain && call->dtype == WEFT_BF16) return tensor_cores<bf16>(call, a, extra, room, &plan, order);
    if (plain && call->dtype == WEFT_F16) return tensor_cores<f16>(call, a, extra, room, &plan, order);
    return weft_cuda_project_any_bwd(call, a, extra, room.partial, &plan);
}

size_t weft_cuda_project_bwd_bytes(const weft_call *call, const weft_mhc_project_bwd_args *a)
{
    weft_project_bwd_plan plan;
    weft_call query = *call;
    query.query = true;
    weft_arena arena = cuda_arena(&query);
    bwd_lay_out(&arena, call, a, &plan);
    return weft_arena_bytes(&arena);
}

static weft_status bwd(const weft_call *call, const void *args)
{
    return weft_cuda_project_bwd(call, (const weft_mhc_project_bwd_args *)args, NULL);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    return weft_cuda_project_bwd_bytes(call, (const weft_mhc_project_bwd_args *)args);
}

const weft_kernel weft_cuda_mhc_project_bwd[] = {{.run = bwd, .workspace = bwd_workspace}, {}};
