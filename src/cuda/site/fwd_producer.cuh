/* SPDX-License-Identifier: Apache-2.0
 *
 * The producer warp of the fused site kernel: loads tiles, coefficients and psi into shared memory. */
#ifndef WEFT_CUDA_SITE_FWD_PRODUCER_CUH
#define WEFT_CUDA_SITE_FWD_PRODUCER_CUH

#include "cuda/site/fwd.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* A line of N floats, or one float; zeros where it is invalid. */
template <int BYTES> static __device__ __forceinline__ void copy_line(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(valid ? BYTES : 0)
                 : "memory");
}

/* Arrives on the barrier when the copies of this thread have completed. */
static __device__ __forceinline__ void copy_arrive(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/* Coefficients of post: a lane copies the same lines of every tile and advances its pointers. A token has post and the rows of
 * the matrix in memory order. */
template <int N> struct site_lines {
    static constexpr int each = N + 1, rounds = (SITE_TILE * each + 31) / 32;
    const char *from[rounds];
    int64_t step[rounds];
    int token[rounds]; /* of a tile; SITE_TILE: none */

    __device__ __forceinline__ void begin(const site_args &p, const site_block &b)
    {
#pragma unroll
        for (int r = 0; r < rounds; r++) {
            const int e = r * 32 + b.lane, line = e % each;
            const view &v = line == 0 ? p.post : p.res;
            token[r] = e / each < SITE_TILE && (line == 0 || !p.unmixed) ? e / each : SITE_TILE;
            from[r] =
                v.data + (site_token(p, b, 0, token[r]) * v.stride[0] + (line ? line - 1 : 0) * v.stride[1]) * 4;
            step[r] = (int64_t)p.clusters * SITE_TILE * v.stride[0] * 4;
        }
    }
    __device__ __forceinline__ void copy(const site_args &p, const site_block &b, int64_t first, uint32_t to)
    {
#pragma unroll
        for (int r = 0; r < rounds; r++) {
            const bool valid = first + token[r] < p.tokens;
            if (token[r] < SITE_TILE)
                copy_line<N * 4>(to + (r * 32 + b.lane) * N * 4, valid ? from[r] : p.post.data, valid);
            from[r] += step[r];
        }
    }
};

/* Coefficients of any strides, a float at a time. */
template <int N>
static __device__ __noinline__ void copy_loose(const site_args &p, const site_block &b, int64_t first, uint32_t to)
{
    constexpr int EACH = N + N * N;
#pragma unroll 1
    for (int e = b.lane; e < SITE_TILE * EACH; e += 32) {
        const int row = e / EACH, k = e - row * EACH - N;
        const bool valid = first + row < p.tokens;
        const int64_t token = valid ? first + row : 0;
        if (k >= 0 && p.unmixed) continue;
        const int64_t offset = k < 0 ? token * p.post.stride[0] + (k + N) * p.post.stride[1]
                                     : token * p.res.stride[0] + k / N * p.res.stride[1] + k % N * p.res.stride[2];
        copy_line<4>(to + e * 4, (k < 0 ? p.post.data : p.res.data) + offset * 4, valid);
    }
}

/* One lane: loads this block's boxes of a tile: for 64 channels BOXES boxes of STREAMS streams. Without post there is no cache hint:
 * any hint, the default policy included, costs 6 % of the head's time. */
template <int STREAMS, int BOXES, bool POST>
static __device__ __forceinline__ void load_rows(const site_args &p, const site_block &b, uint32_t to,
                                                 const CUtensorMap *map, int token, uint32_t barrier, bool keep,
                                                 bool rows)
{
    int channel = rows ? 0 : b.first_channel * BOXES;
    const int box = rows ? (int)b.rank * p.boxes * BOXES : 0;
#pragma unroll 1
    for (int k = 0; k < (rows ? 1 : p.boxes * BOXES); k++, to += STREAMS * BOX_BYTES, channel += SITE_BOX)
        if constexpr (POST)
            tma_load_hinted(to, map, channel, token, 0, box, barrier, keep ? evict_last() : evict_normal());
        else
            tma_load4(to, map, channel, token, 0, box, barrier);
}

/* Streams of a tile. In (C, n) a token is one stream of nC elements, whose boxes are units. */
template <stream_layout L, int N, bool POST>
static __device__ __forceinline__ void load_streams_of(const site_args &p, const site_block &b, uint32_t to,
                                                       int token, uint32_t barrier, bool keep)
{
    if constexpr (L == LAYOUT_NC)
        load_rows<N, 1, POST>(p, b, to, &p.x, token, barrier, keep, p.rows);
    else
        load_rows<1, N, POST>(p, b, to, &p.x, token, barrier, keep, p.rows);
}

/* f is made of whole boxes. */
template <stream_layout L> static __device__ __forceinline__ bool f_in_rows(const site_args &p)
{
    return L == LAYOUT_NC ? p.rows : p.f_rows;
}

/* One lane: loads psi of as many boxes of 64 channels from `box` on as fit. */
template <stream_layout L, int N, site_kind KIND, bool ONCE>
static __device__ __forceinline__ void load_psi(const site_args &p, const site_block &b, int box)
{
    typedef site_shape<N, KIND> shape;
    const int count = p.boxes - box < p.psi_boxes ? p.boxes - box : p.psi_boxes;
    uint32_t to = shared_address(b.shared) + p.offset.first_psi;
    if (!ONCE) tma_expect(b.barrier.psi_full, (uint32_t)(count * shape::psi_box));
#pragma unroll 1
    for (int k = 0; k < count; k++, to += shape::psi_box) {
        const int column =
            (L == LAYOUT_NC ? 2 : 2 * N) * ((int)b.rank * p.boxes + box + k); /* of 32 channels; (C, n): elements */
        const uint32_t barrier = b.barrier.psi_full + (ONCE ? k * 8 : 0);
        if (ONCE) tma_expect(barrier, shape::psi_box);
        if (p.psi_rows) {
            tma_load4(to, &p.psi, 0, 0, column, 0, barrier);
            continue;
        }
#pragma unroll 1
        for (int pair = 0; pair < 2 * N; pair++)
            if constexpr (L == LAYOUT_NC)
                tma_load4(to + pair * shape::psi_pair, &p.psi, (column + (pair & 1)) * (TMA_ROW / 4), 0, 0,
                          pair >> 1, barrier);
            else
                tma_load4(to + pair * shape::psi_pair, &p.psi, (column + pair) * (TMA_ROW / 4), 0, 0, 0, barrier);
    }
}

/* Loads the remaining psi; on return its buffer is free. */
template <stream_layout L, int N, site_kind KIND, bool ONCE>
static __device__ __forceinline__ void load_remaining_psi(const site_args &p, const site_block &b)
{
    uint32_t parity = 0;
#pragma unroll 1
    for (int box = p.psi_boxes; box < p.boxes; box += p.psi_boxes, parity ^= 1) {
        barrier_wait(b.barrier.psi_empty, parity);
        if (b.lane == 0) {
            tma_publish(); /* generic-proxy writes of the operands come before the TMA writes */
            load_psi<L, N, KIND, ONCE>(p, b, box);
        }
        __syncwarp();
    }
    barrier_wait(b.barrier.psi_empty, parity);
}

/* Loads f of a tile into its own buffer. The load is issued when the previous tile is mixed, early enough because the prefetch has
 * put f in the L2. Tiles are not loaded earlier either: more loads in flight are slower. */
template <stream_layout L>
static __device__ __forceinline__ void load_f(const site_args &p, const site_block &b, int i)
{
    constexpr int AHEAD = 2;
    barrier_wait(b.barrier.f_empty, (i & 1) ^ 1);
    if (b.lane == 0) {
        tma_expect(b.barrier.f_full, (uint32_t)p.boxes * BOX_BYTES);
        load_rows<1, 1, true>(p, b, shared_address(b.shared + p.offset.f), &p.f, (int)site_token(p, b, i, 0),
                              b.barrier.f_full, false, f_in_rows<L>(p));
        if (f_in_rows<L>(p) && i + AHEAD < b.count)
            tma_prefetch4(&p.f, 0, (int)site_token(p, b, i + AHEAD, 0), 0, (int)b.rank * p.boxes);
    }
    __syncwarp();
}

/* Input streams are loaded with evict_last when the new streams exceed the L2: the L2 then evicts the new streams early, which is
 * faster than evicting the input, although the input is not read again. release_streams resets the policy after the last load so
 * that the next launch finds the L2 free; the last tiles are not kept at all. */
static __device__ __forceinline__ bool keeps_in_l2(const site_args &p, const site_block &b, int i)
{
    return p.old && i < b.count - p.stages;
}

/* A lane has a token's boxes of a stream, or in (C, n) as many of its units, old_stream apart too. */
template <stream_layout L, int N>
static __device__ __forceinline__ void release_streams(const site_args &p, const site_block &b)
{
    const int64_t row =
        b.lane % N * p.old_stream + b.first_channel * (int64_t)sizeof(bf16) * (L == LAYOUT_NC ? 1 : N);
    const int boxes = min(p.boxes, L == LAYOUT_NC ? (p.channels - b.first_channel + SITE_BOX - 1) / SITE_BOX
                                                  : ((p.channels - b.first_channel) * N + SITE_BOX - 1) / SITE_BOX -
                                                        b.lane % N * p.boxes);
    if (b.lane >= SITE_TILE * N) return;
#pragma unroll 1
    for (int i = max(b.count - p.in_cache, 0); keeps_in_l2(p, b, i); i++) {
        const char *const from = p.old + site_token(p, b, i, b.lane / N) * p.old_token + row;
#pragma unroll 1
        for (int k = 0; k < boxes; k++) make_normal(from + k * TMA_ROW);
    }
}

/* Producer. The barriers of a tile's results, pre and inverse, are armed before the tile's load is issued. */
template <stream_layout L, int N, site_kind KIND, int PAIRS>
static __device__ __forceinline__ void producer_warp(const site_args &p, const site_block &b)
{
    constexpr bool POST = KIND == SITE_BOUNDARY, APART = POST && site_roles<PAIRS>::wide;
    constexpr bool ONCE = site_once<N, KIND, PAIRS>();
    const uint32_t tiles = shared_address(b.shared + p.offset.tiles),
                   coef = shared_address(b.shared + p.offset.coef);
    const uint32_t pre = shared_address(b.shared + p.offset.pre) + b.lane * 4;
    site_lines<N> lines;
    ring_cursor c;
#pragma unroll 1
    for (int i = 0; i < b.count; i++, c.next(p.stages)) {
        const uint32_t barrier = b.barrier.full + c.stage * 8;
        const int64_t token = site_token(p, b, i, 0);
        if (i == p.early) load_remaining_psi<L, N, KIND, ONCE>(p, b);
        barrier_wait(b.barrier.empty + c.stage * 8, c.parity ^ 1);
        if (i == 0) wait_for_previous(); /* other warps access memory only after a load has arrived */
        if (b.lane == 0) {
            const uint32_t to = tiles + c.stage * p.offset.stage;
            tma_publish(); /* generic-proxy writes of the mix warps come before the TMA writes */
            tma_expect(barrier, (uint32_t)p.boxes * (N + (POST && !APART)) * BOX_BYTES);
            load_streams_of<L, N, POST>(p, b, to, (int)token, barrier, keeps_in_l2(p, b, i));
            if constexpr (POST && !APART)
                load_rows<1, 1, POST>(p, b, to + p.boxes * N * BOX_BYTES, &p.f, (int)token, barrier, false,
                                      f_in_rows<L>(p));
            tma_expect(b.barrier.pre + c.stage * 8, SITE_TILE * N * 4);
            if (p.norm) tma_expect(b.barrier.inverse + c.stage * 8, SITE_TILE * 4);
        }
        __syncwarp();
        if constexpr (APART) load_f<L>(p, b, i);
        if constexpr (POST) {
            const uint32_t to = coef + c.stage * (SITE_TILE * (N + N * N) * 4);
            if (i == 0) lines.begin(p, b);
            if (p.coef_lines)
                lines.copy(p, b, token, to);
            else
                copy_loose<N>(p, b, token, to);
        }
        if (has(p.pre_in)) {
            const int row = b.lane / N;
            const bool valid = token + row < p.tokens;
            const int64_t offset = valid ? (token + row) * p.pre_in.stride[0] + b.lane % N * p.pre_in.stride[1] : 0;
            if (row < SITE_TILE)
                copy_line<4>(pre + c.stage * (SITE_TILE * N * 4), p.pre_in.data + offset * 4, valid);
        }
        if (POST || has(p.pre_in)) copy_arrive(barrier);
        if (i == 0) cluster_wait_for_all();
    }
    if (b.count <= p.early) load_remaining_psi<L, N, KIND, ONCE>(p, b);
    if constexpr (POST) release_streams<L, N>(p, b);
}

#endif
#endif
