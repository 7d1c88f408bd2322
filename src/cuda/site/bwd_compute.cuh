/* SPDX-License-Identifier: Apache-2.0
 *
 * The compute warps of the fused backward kernel [M11]: a tile of x, f, d_y and d_u becomes d_x and d_f in place; the sums over
 * channels overwrite y; the sums over tokens are in registers. */
#ifndef WEFT_CUDA_SITE_BWD_COMPUTE_CUH
#define WEFT_CUDA_SITE_BWD_COMPUTE_CUH

#include "cuda/site/bwd_pass.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Four channels of one stream of a token, or of f or d_u. */
struct quad {
    uint32_t word[2];
};

static __device__ __forceinline__ quad get_quad(const char *p)
{
    const uint2 v = *(const uint2 *)p;
    return {{v.x, v.y}};
}

static __device__ __forceinline__ void put_quad(char *p, const quad &q)
{
    *(uint2 *)p = make_uint2(q.word[0], q.word[1]);
}

/* A lane's four channels of all streams of a token: words as get_pair takes them. A piece is what one access reads or writes: a stream, or
 * in (C,n) 16 bytes. */
template <int N, stream_layout L> struct lane_streams {
    static constexpr int pieces = L == LAYOUT_CN ? N / 2 : N, words = 2 * N / pieces;
    uint32_t word[2 * N];

    /* The address is tile + flip, where flip has bit 4 of a piece's number to be exchanged; 0 in (n,C). */
    __device__ __forceinline__ void get(int k, const char *tile, uint32_t flip)
    {
        if constexpr (L == LAYOUT_CN) {
            const uint4 v = *(const uint4 *)(tile + (flip ^ k << 4));
            word[4 * k] = v.x, word[4 * k + 1] = v.y, word[4 * k + 2] = v.z, word[4 * k + 3] = v.w;
        } else {
            const quad v = get_quad(tile + k * lane_place<N, L>::row_box);
            word[2 * k] = v.word[0], word[2 * k + 1] = v.word[1];
        }
    }
    __device__ __forceinline__ void put(int k, char *tile, uint32_t flip) const
    {
        if constexpr (L == LAYOUT_CN)
            *(uint4 *)(tile + (flip ^ k << 4)) =
                make_uint4(word[4 * k], word[4 * k + 1], word[4 * k + 2], word[4 * k + 3]);
        else
            put_quad(tile + k * lane_place<N, L>::row_box, {{word[2 * k], word[2 * k + 1]}});
    }
};

/* Second step of the sum over the four lanes that share two tokens; the order of processing does the first. On return lane t has half
 * of the sums, part t >> 1, in the first elements. */
template <int M> static __device__ __forceinline__ void share_sums(float (&v)[M], int t)
{
#pragma unroll
    for (int k = 0; k < M / 2; k++)
        v[k] = (t & 2 ? v[k + M / 2] : v[k]) + __shfl_xor_sync(0xffffffffu, t & 2 ? v[k] : v[k + M / 2], 2);
}

/* Stores two channels of the gradients that TMA cannot store. */
template <class T, int N, stream_layout L, bool POST>
static __device__ __forceinline__ void put_pairs(const fused_args &p, int64_t token, int channel,
                                                 const float (&d_x)[N][2], const float (&d_f)[2])
{
    const view &to = p.d_x_any, &row = p.d_f_any;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        if (L == LAYOUT_CN && p.d_x_wide) {
            float v[N];
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = d_x[j][e];
            put_wide<T, N>(to, token * to.stride[0] + (channel + e) * N, v);
        }
#pragma unroll
        for (int j = 0; j < N; j++)
            if (has(to) && !(L == LAYOUT_CN && p.d_x_wide))
                put(to, token * to.stride[0] + j * to.stride[1] + (channel + e) * to.stride[2], d_x[j][e]);
        if (POST && has(row)) put(row, token * row.stride[0] + (channel + e) * row.stride[1], d_f[e]);
    }
}

/* Adds the sums over tokens of four channels over the lanes that share them, and stores the result. */
static __device__ __forceinline__ void put_sums(float *to, const float2 *from)
{
    float v[4] = {from[0].x, from[0].y, from[1].x, from[1].y};
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int step = 16; step >= 4; step >>= 1) v[c] += __shfl_xor_sync(0xffffffffu, v[c], step);
        if ((threadIdx.x & 31) < 4) to[c] = v[c];
    }
}

/* A compute warp processes a piece. */
template <class T, int N, stream_layout L, bool FULL_, bool SHIFTED, bool NORM, site_kind KIND>
static __device__ __forceinline__ void compute(const fused_args &p, const tiles_of_block &b, const weft_mask &mask,
                                               int slice, const boundary_piece &part, bool is_first,
                                               ring_cursor &ring)
{
    typedef sizes<N, FULL_, KIND> S;
    typedef boundary_record<N, KIND> R;
    typedef sum_room<N, L, SHIFTED, KIND> room;
    typedef lane_place<N, L> P;
    constexpr bool POST = KIND == SITE_BOUNDARY;
    constexpr int NT = R::row_tiles, PIECES = R::pieces, M = room::count;
    /* y is stored word by word where no registers remain to hold it. In (C,n) two channels of four streams are a piece of 16 bytes, and
     * y and d_x are stored by pieces. */
    constexpr bool CN = L == LAYOUT_CN, PIECE = CN && N == 4, AT_ONCE = !CN && POST && SHIFTED && NORM;
    constexpr bool ASKS = FULL_;           /* asks for a norm at run time */
    constexpr int PRE_AT = room::used - N; /* of d_pre_in among the sums */
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int channel0 = slice * BOUNDARY_SLICE + warp * 16, channel = channel0 + t * 4;
    const int token = P::token_of(g);
    const uint32_t piece = tma_piece(token, 2 * (warp & 3) + (t >> 1)) + (t & 1) * 8;
    /* Of the streams: a part that is added, and in (C,n) one whose pieces differ in bit 4. */
    uint32_t base = 0, flip = 0;
    if constexpr (CN)
        flip = P::of_lane(warp, token, t);
    else
        base = (warp >> 2) * S::box + piece;
    const uint32_t row_offset = (warp >> 2) * S::row_box + piece;
    /* psi of this warp's columns, hi and lo, as halves of B. Column n of tile q of a stream is channel
     * (n >> 1) * 4 + 2 q + (n & 1), so that a lane holds four neighbours. */
    uint32_t psi_hi[2 * N][NT], psi_lo[2 * N][NT];
    uint4 *const psi_room = (uint4 *)(b.shared + S::psi_lo) + (warp * 2 * N) * 32 + lane;
    if constexpr (CN) {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            const int c = channel0 + (g >> 1) * 4 + 2 * q + (g & 1);
#pragma unroll
            for (int h = 0; h < NT; h++) {
                float v[2][N] = {};
                const float *from = p.psi + (8 * h + 2 * t) * p.psi_stride + (int64_t)c * N;
                const bool is_row = 8 * h + 2 * t < p.phi_rows;
                if (is_row && c < p.channels) load<float, N>(v[0], from), load<float, N>(v[1], from + p.psi_stride);
#pragma unroll
                for (int j = 0; j < N; j++) split2(psi_hi[2 * j + q][h], psi_lo[2 * j + q][h], v[0][j], v[1][j]);
            }
        }
    }
#pragma unroll
    for (int q = 0; q < 2 * N; q++) {
        const int c = channel0 + (g >> 1) * 4 + 2 * (q & 1) + (g & 1);
#pragma unroll
        for (int h = 0; h < NT && !CN; h++) {
            float v[2] = {};
            const float *from = p.psi + (8 * h + 2 * t) * p.psi_stride + (int64_t)(q >> 1) * p.channels + c;
            const bool is_row = 8 * h + 2 * t < p.phi_rows;
            if (is_row && c < p.channels) v[0] = __ldg(from), v[1] = __ldg(from + p.psi_stride);
            split2(psi_hi[q][h], psi_lo[q][h], v[0], v[1]);
        }
        if constexpr (FULL_)
            psi_room[q * 32] = make_uint4(psi_lo[q][0], psi_lo[q][NT > 1 ? 1 : 0], psi_lo[q][NT > 2 ? 2 : 0], 0);
    }
    float dpsi[N][NT][4] = {};
    /* A lane's sums over tokens of its four channels. */
    float2 *const d_weight = (float2 *)(b.shared + S::d_weight) + threadIdx.x * 2;
    float2 *const d_bias = (float2 *)(b.shared + S::d_bias) + threadIdx.x * 2;
    if constexpr (NORM) {
        const int c = channel0 + (lane & 15);
        __syncwarp();
        if (lane < 16)
            ((float *)(b.shared + S::weight))[warp * 16 + lane] =
                has(p.weight) && c < p.channels ? get(p.weight, c * p.weight.stride[0]) : 1.0f;
        __syncwarp();
        d_weight[0] = d_weight[1] = make_float2(0.0f, 0.0f);
    }
    if constexpr (FULL_) d_bias[0] = d_bias[1] = make_float2(0.0f, 0.0f);
    if constexpr (FULL_ && POST)
        if (has(p.bias)) {
            const int c = channel0 + (lane & 15);
            __syncwarp();
            if (lane < 16)
                ((float *)(b.shared + S::bias))[warp * 16 + lane] =
                    c < p.channels ? get(p.bias, c * p.bias.stride[0]) : 0.0f;
            __syncwarp();
        }
    const bool has_any = FULL_ && (has(p.d_x_any) || (POST && has(p.d_f_any)));
    const float factor_kept = FULL_ ? (float)mask.scale : 1.0f;
    if (is_first) barrier_arrive(b.barrier.psi);

    for (int tile_token = part.tile * BOUNDARY_TILE, end = tile_token + part.count * BOUNDARY_TILE;
         tile_token != end; tile_token += BOUNDARY_TILE) {
        char *const tile = b.shared + ring.stage * S::tile, *const record =
                                                                b.shared + S::records + ring.stage * S::record;
        barrier_wait(b.barrier.full + ring.stage * 8, ring.parity);

        /* MMA: g = d_y + the projection's part; halves of A are 8 columns of d_h, hi then lo; hi hi, lo hi, then hi lo. */
        float acc[2 * N][4] = {};
        if (POST && p.has_d_y) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                lane_streams<N, L> v;
#pragma unroll
                for (int k = 0; k < v.pieces; k++) {
                    v.get(k, tile + base + half * 8 * TMA_ROW + S::d_y, flip);
#pragma unroll
                    for (int w = k * v.words; w < (k + 1) * v.words; w++) {
                        if constexpr (CN) { /* two streams of a channel */
                            const int j = 2 * w % N, c = 2 * w / N;
                            widen2(acc[2 * j + c / 2][2 * half + c % 2], acc[2 * j + 2 + c / 2][2 * half + c % 2],
                                   v.word[w], T());
                        } else {
                            widen2(acc[w][2 * half], acc[w][2 * half + 1], v.word[w], T());
                        }
                    }
                }
            }
        }
        {
            uint32_t a[2 * NT][2];
#pragma unroll
            for (int h = 0; h < 2 * NT; h += 2) {
                uint32_t r[4];
                ldmatrix4(r, shared_address(record) + (P::token_of(lane & 15) * PIECES + h + (lane >> 4)) * 16);
                a[h][0] = r[0], a[h][1] = r[1], a[h + 1][0] = r[2], a[h + 1][1] = r[3];
            }
            /* NT is odd: one product begins with hi hi and ends with lo hi, and one is of half the size. */
#pragma unroll
            for (int h = 0; h < 2 * NT; h += 2)
#pragma unroll
                for (int q = 0; q < 2 * N; q++)
                    mma16(acc[q], a[h][0], a[h][1], a[h + 1][0], a[h + 1][1], psi_hi[q][h % NT],
                          psi_hi[q][(h + 1) % NT]);
#pragma unroll
            for (int q = 0; q < 2 * N; q++) {
                if constexpr (FULL_) {
                    const uint4 v = psi_room[q * 32];
                    const uint32_t word[3] = {v.x, v.y, v.z};
#pragma unroll
                    for (int h = 0; h < NT; h++) psi_lo[q][h] = word[h];
                }
                if constexpr (NT == 3)
                    mma16(acc[q], a[0][0], a[0][1], a[1][0], a[1][1], psi_lo[q][0], psi_lo[q][1]);
                mma8(acc[q], a[NT - 1][0], a[NT - 1][1], psi_lo[q][NT - 1]);
            }
        }

        /* Lane t first processes the token whose sums lane t ^ 1 keeps, and sends these over: even lanes keep the first token's, odd
         * lanes the second's. The sums received are added last; accumulating onto them would make the order of a token's channels
         * depend on the token's position in the tile. */
        float sums[M ? M : 1], got[M ? M : 1];
#pragma unroll
        for (int turn = 0; turn < 2; turn++) {
            const int half = turn ? t & 1 : ~t & 1;
            char *const mine = tile + base + half * 8 * TMA_ROW, *const my_row =
                                                                     tile + row_offset + half * 8 * TMA_ROW;
            const int own = tile_token + token + half * 8;
            token_coefs<N, KIND> k;
            get_record(k, record + (token + half * 8) * PIECES * 16);
            const float scale = k.scale + k.late;
            quad f = {}, row = {};
            if constexpr (POST) f = get_quad(my_row + S::f);
            lane_streams<N, L> x, out = {};
#pragma unroll
            for (int i = 0; i < x.pieces; i++) {
                x.get(i, mine + S::x, flip);
                if (!POST && p.has_d_y) out.get(i, mine + S::d_y, flip);
            }
            if ((NORM && !ASKS) || p.has_row) row = get_quad(my_row + S::row);
            const bool inside = own < p.tokens && channel < p.channels;
            uint32_t kept = 0; /* four bits for each stream */
            if constexpr (FULL_ && POST)
                if (mask.on) {
                    uint32_t keep[N];
                    keep_tile<N, 4>(keep, mask, own, channel);
#pragma unroll
                    for (int o = 0; o < N; o++) kept |= keep[o] << 4 * o;
                }
#pragma unroll
            for (int e = 0; e < M; e++) {
                if (turn) got[e] = __shfl_xor_sync(0xffffffffu, sums[e], 1);
                sums[e] = 0.0f;
            }
#pragma unroll
            for (int q = 0; q < 2; q++) {
                float xs[N][2], ys[N][2], gs[N][2], fb[2], du[2], d_x[N][2], d_f[2];
                widen2(fb[0], fb[1], f.word[q], T());
                widen2(du[0], du[1], row.word[q], T());
                get_pair<T, N, 4, L>(xs, x.word, 2 * q);
                if constexpr (FULL_ && POST)
                    if (has(p.bias) && inside) {
                        const float2 bias = ((const float2 *)(b.shared + S::bias))[(warp * 16 + t * 4 + 2 * q) / 2];
                        fb[0] = fb[0] + bias.x, fb[1] = fb[1] + bias.y;
                    }
                auto factor = [&](int o, int e) { return kept >> (4 * o + 2 * q + e) & 1 ? factor_kept : 0.0f; };
#pragma unroll
                for (int o = 0; o < N; o++) {
                    ys[o][0] = xs[o][0], ys[o][1] = xs[o][1];
                    if constexpr (POST) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            ys[o][e] = k.post[o] * fb[e];
                            if constexpr (FULL_)
                                if (mask.on) ys[o][e] = ys[o][e] * factor(o, e);
#pragma unroll
                            for (int j = 0; j < N; j++) ys[o][e] = fmaf(k.w[o][j], xs[j][e], ys[o][e]);
                        }
                        if constexpr (!CN) {
                            x.word[2 * o + q] = narrow2(ys[o][0], ys[o][1], T());
                            widen2(ys[o][0], ys[o][1], x.word[2 * o + q], T());
                            if constexpr (AT_ONCE)
                                *(uint32_t *)(mine + S::x + o * S::row_box + 4 * q) = x.word[2 * o + q];
                        }
                    }
                }
                if constexpr (POST && CN) {
                    put_pair<T, N, 4, L>(x.word, ys, 2 * q);
                    get_pair<T, N, 4, L>(ys, x.word, 2 * q);
                    if constexpr (PIECE) x.put(q, mine + S::x, flip);
                }
                if (NORM && (!ASKS || p.has_norm)) {
                    const float2 weight = ((const float2 *)(b.shared + S::weight))[(warp * 16 + t * 4 + 2 * q) / 2];
                    float u[2], d_u[2] = {};
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        u[e] = k.pre[0] * ys[0][e];
#pragma unroll
                        for (int o = 1; o < N; o++) u[e] = fmaf(k.pre[o], ys[o][e], u[e]);
                    }
                    widen2(u[0], u[1], narrow2(u[0], u[1], T()), T());
                    if constexpr (FULL_)
                        if (has(p.d_u) && inside) {
                            const T *from = (const T *)p.d_u.data + own * p.d_u.stride[0] + channel + 2 * q;
                            widen2(d_u[0], d_u[1], *(const uint32_t *)from, T());
                        }
                    float2 sum = d_weight[q];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        (e ? sum.y : sum.x) = fmaf(du[e], u[e] * k.r, e ? sum.y : sum.x);
                        du[e] = fmaf(fmaf(u[e], -k.k, du[e] * (e ? weight.y : weight.x)), k.r, d_u[e]);
                    }
                    d_weight[q] = sum;
                }
#pragma unroll
                for (int o = 0; o < N; o++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        gs[o][e] = fmaf(k.pre[o], du[e],
                                        fmaf(scale, ys[o][e], half ? acc[2 * o + q][2 + e] : acc[2 * o + q][e]));
#pragma unroll
                for (int e = 0; e < 2; e++) {
#pragma unroll
                    for (int o = 0; o < N; o++) {
                        if constexpr (SHIFTED) sums[PRE_AT + o] = fmaf(du[e], ys[o][e], sums[PRE_AT + o]);
                        if constexpr (POST) {
                            float gm = gs[o][e];
                            if constexpr (FULL_)
                                if (mask.on) gm = gm * factor(o, e);
                            d_f[e] = o ? fmaf(k.post[o], gm, d_f[e]) : k.post[o] * gm;
                            sums[o] = fmaf(gm, fb[e], sums[o]);
#pragma unroll
                            for (int j = 0; j < N; j++) {
                                sums[N + o * N + j] = fmaf(xs[j][e], gs[o][e], sums[N + o * N + j]);
                                d_x[j][e] = o ? fmaf(k.w[o][j], gs[o][e], d_x[j][e]) : k.w[o][j] * gs[o][e];
                            }
                        }
                    }
                }
                if constexpr (!POST) {
                    get_pair<T, N, 4, L>(d_x, out.word, 2 * q);
#pragma unroll
                    for (int j = 0; j < N; j++) d_x[j][0] = d_x[j][0] + gs[j][0], d_x[j][1] = d_x[j][1] + gs[j][1];
                }
                put_pair<T, N, 4, L>(out.word, d_x, 2 * q);
                if constexpr (PIECE) out.put(q, mine + S::d_y, flip);
                if constexpr (POST) f.word[q] = narrow2(d_f[0], d_f[1], T());
                if constexpr (FULL_ && POST) {
                    const float2 sum = d_bias[q];
                    d_bias[q] = make_float2(sum.x + d_f[0], sum.y + d_f[1]);
                }
                if constexpr (FULL_)
                    if (inside && has_any) put_pairs<T, N, L, POST>(p, own, channel + 2 * q, d_x, d_f);
            }
#pragma unroll
            for (int i = 0; i < x.pieces; i++) {
                if constexpr (POST && !AT_ONCE && !PIECE) x.put(i, mine + S::x, flip);
                if constexpr (!PIECE) out.put(i, mine + S::d_y, flip);
            }
            if constexpr (POST) put_quad(my_row + S::f, f);
        }
#pragma unroll
        for (int e = 0; e < M; e++) sums[e] += got[e];
        __syncwarp();

        /* MMA: dpsi, A = y with channels, or columns as they lie in memory, as rows, B = d_h, both transposed by ldmatrix. d_h is two
         * bf16 numbers whatever its magnitude. These, and a y of f16, are TF32 numbers without an error: no second split. */
        if (p.dpsi) {
            uint32_t dh[NT][4]; /* hi of tokens 0-7, 8-15, lo of the same */
#pragma unroll
            for (int q = 0; q < NT; q++)
                ldmatrix4_trans(dh[q], shared_address(record) + ((lane & 15) * PIECES + q + (lane >> 4) * NT) * 16);
            const uint32_t row = (lane & 7) + (lane >> 4) * 8;
            const uint32_t from = shared_address(tile) + S::x + P::piece(warp, 0, row, lane >> 3 & 1);
#pragma unroll
            for (int o = 0; o < N; o++) {
                uint32_t a[4];
                ldmatrix4_trans(a, CN ? from ^ o << 5 : from + o * S::row_box);
                if constexpr (number<T>::dtype == WEFT_F16) {
                    /* k = t is token 2 t of eight, k = t + 4 the one after it. */
                    float y[4][2];
#pragma unroll
                    for (int e = 0; e < 4; e++) widen2(y[e][0], y[e][1], a[e], T());
#pragma unroll
                    for (int k = 0; k < 4; k++)
#pragma unroll
                        for (int q = 0; q < NT; q++) {
                            const int e = k % 2 * 2;
                            float b0, b1;
                            widen2(b0, b1, dh[q][k], bf16());
                            mma8_tf32(dpsi[o][q], y[e][0], y[e + 1][0], y[e][1], y[e + 1][1], b0, b1);
                        }
                } else {
#pragma unroll
                    for (int q = 0; q < NT; q++) mma16(dpsi[o][q], a[0], a[1], a[2], a[3], dh[q][0], dh[q][1]);
#pragma unroll
                    for (int q = 0; q < NT; q++) mma16(dpsi[o][q], a[0], a[1], a[2], a[3], dh[q][2], dh[q][3]);
                }
            }
        }
        if constexpr (M > 0) share_sums(sums, t); /* overlaps the tensor cores */
        __syncwarp();
        if (M && p.sums) {
#pragma unroll
            for (int e = 0; e < room::half; e += 2)
                *(float2 *)(tile + S::x + room::offset(warp, token + (t & 1) * 8, t >> 1, e)) =
                    make_float2(sums[e], sums[e + 1]);
        }
        tma_publish();
        barrier_arrive(b.barrier.done + ring.stage * 8);
        ring.next(S::stages);
    }

    /* Epilogue: sums over tokens */
    const int64_t piece_of_all = (int64_t)blockIdx.x + slice;
    if (p.dpsi) {
        constexpr int ROW = N * BOUNDARY_SLICE;
        float *const to = p.dpsi + piece_of_all * (R::rows * ROW) + warp * (CN ? 16 * N : 16) + g;
        constexpr int APART = CN ? 16 : BOUNDARY_SLICE;
#pragma unroll
        for (int o = 0; o < N; o++)
#pragma unroll
            for (int q = 0; q < NT; q++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (R::rows % 8 == 0 || q * 8 + 2 * t < R::rows)
                        to[(q * 8 + 2 * t + (e & 1)) * ROW + o * APART + (e >> 1) * 8] = dpsi[o][q][e];
    }
    const int64_t own = piece_of_all * BOUNDARY_SLICE + warp * 16 + t * 4;
    if constexpr (NORM)
        if (p.d_weight) put_sums(p.d_weight + own, d_weight);
    if constexpr (FULL_ && POST)
        if (p.d_bias) put_sums(p.d_bias + own, d_bias);
}

#endif

#endif
