/* SPDX-License-Identifier: Apache-2.0
 *
 * TMA, compute capability 9.0 and newer: boxes of a tensor between global and shared memory, and rows of
 * bytes. A load completes on a barrier that expects a number of bytes; a store completes in the order of its group. Writes
 * beyond the tensor's edge are clipped, reads there return zeros.
 *
 *
 * Boxes are 64 16-bit channels wide, so a row of one is 128 bytes: piece p of 16 bytes of row r lies at piece p ^ (r & 7),
 * where boxes begin on multiples of 1024 bytes. */
#ifndef WEFT_CUDA_TMA_CUH
#define WEFT_CUDA_TMA_CUH

#include <cuda.h>

#include <atomic>

#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"

enum { TMA_CHANNELS = 64, TMA_ROW = 128, TMA_ALIGN = 1024 };

/* ---- host ----------------------------------------------------------------------------------------------------------- */

/* A bf16 tensor [tokens][streams][channels] as boxes of `tokens_of_box` tokens, all streams and 64 channels: in shared
 * memory box[stream][token][channel]. Strides in elements, multiples of 8 but for one stream's; data aligned to 16 bytes. */
struct tma_tensor {
    void *data;
    int64_t tokens, streams, channels, token_stride, stream_stride;
};

/* Whether TMA can move its rows. Strides count even for one token: its sums must not depend on the number of tokens. Data
 * without an address yet count as aligned, and all data where addresses have no meaning. */
static inline bool tma_fits(const weft_tensor *t, bool addressed = true)
{
    const int64_t most = (int64_t)1 << 38;
    if (!weft_has(t)) return true;
    for (int i = 0; i + 1 < t->ndim; i++)
        if (t->stride[i] <= 0 || t->stride[i] % 8 || t->stride[i] >= most) return false;
    return t->stride[t->ndim - 1] == 1 && (!addressed || (uintptr_t)t->data % 16 == 0);
}

/* The driver function that encodes tensor maps. */
typedef CUresult tma_encode(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                            const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* Looked up at run time, so that the library loads without a driver; the address is constant and is kept. */
static inline weft_status tma_open(const weft_call *call, tma_encode **encode)
{
    static std::atomic<void *> known;
    const char *what = "tensor maps";
    void *found = known.load(std::memory_order_relaxed);
    if (!found) {
        cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
        CUDA_TRY(
            call, what,
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
#else
        CUDA_TRY(call, what, cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result));
#endif
        if (result != cudaDriverEntryPointSuccess || !found)
            return weft_cuda_status(call, what, cudaErrorSymbolNotFound);
        known.store(found, std::memory_order_relaxed);
    }
    *encode = (tma_encode *)found;
    return WEFT_OK;
}

static inline weft_status tma_map_of(const weft_call *call, tma_encode *encode, CUtensorMap *map,
                                     const tma_tensor *t, int bytes, int rank, const cuuint64_t *size,
                                     const cuuint64_t *stride, const cuuint32_t *box)
{
    const cuuint32_t step[4] = {1, 1, 1, 1};
    const CUresult error =
        encode(map, bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, t->data,
               size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? WEFT_OK : weft_cuda_status(call, "a tensor map", cudaErrorInvalidValue);
}

static inline weft_status tma_map(const weft_call *call, tma_encode *encode, CUtensorMap *map, const tma_tensor *t,
                                  int tokens_of_box)
{
    const cuuint64_t size[3] = {(cuuint64_t)t->channels, (cuuint64_t)t->tokens, (cuuint64_t)t->streams};
    const cuuint64_t stride[2] = {(cuuint64_t)(t->token_stride * 2),
                                  (cuuint64_t)((t->streams > 1 ? t->stream_stride : t->token_stride) * 2)};
    const cuuint32_t box[3] = {TMA_CHANNELS, (cuuint32_t)tokens_of_box, (cuuint32_t)t->streams};
    return tma_map_of(call, encode, map, t, 2, 3, size, stride, box);
}

/* A tensor as rows of boxes. Where a row of channels is made of whole boxes, `boxes` neighbouring ones are one TMA box,
 * box[box][stream][token][channel] in shared memory, and one load. Otherwise each box is a load, clipped at the end of the
 * row. */
static inline bool tma_in_rows(const tma_tensor *t, int64_t width = TMA_CHANNELS)
{
    return t->channels % width == 0;
}

static inline weft_status tma_map_rows(const weft_call *call, tma_encode *encode, CUtensorMap *map,
                                       const tma_tensor *t, int tokens_of_box, int boxes)
{
    const bool rows = tma_in_rows(t);
    const cuuint64_t size[4] = {rows ? (cuuint64_t)TMA_CHANNELS : (cuuint64_t)t->channels, (cuuint64_t)t->tokens,
                                (cuuint64_t)t->streams, (cuuint64_t)(rows ? t->channels / TMA_CHANNELS : 1)};
    const cuuint64_t stride[3] = {(cuuint64_t)(t->token_stride * 2),
                                  (cuuint64_t)((t->streams > 1 ? t->stream_stride : t->token_stride) * 2), TMA_ROW};
    const cuuint32_t box[4] = {TMA_CHANNELS, (cuuint32_t)tokens_of_box, (cuuint32_t)t->streams,
                               (cuuint32_t)(rows ? boxes : 1)};
    return tma_map_of(call, encode, map, t, 2, 4, size, stride, box);
}

/* An fp32 tensor of few tokens: `boxes` boxes of 32 channels of all tokens and streams are one load,
 * box[stream][box][token][channel] in shared memory; where a row does not end with a box, one box of one stream is. A box has
 * tokens_of_box tokens; those that the tensor does not have are zeros. */
static inline weft_status tma_map_fp32(const weft_call *call, tma_encode *encode, CUtensorMap *map,
                                       const tma_tensor *t, int tokens_of_box, int boxes)
{
    const int64_t width = TMA_ROW / 4;
    const bool rows = tma_in_rows(t, width);
    const cuuint64_t size[4] = {(cuuint64_t)(rows ? width : t->channels), (cuuint64_t)t->tokens,
                                (cuuint64_t)(rows ? t->channels / width : 1), (cuuint64_t)t->streams};
    const cuuint64_t stride[3] = {(cuuint64_t)(t->token_stride * 4), TMA_ROW, (cuuint64_t)(t->stream_stride * 4)};
    const cuuint32_t box[4] = {(cuuint32_t)width, (cuuint32_t)tokens_of_box, (cuuint32_t)(rows ? boxes : 1),
                               (cuuint32_t)(rows ? t->streams : 1)};
    return tma_map_of(call, encode, map, t, 4, 4, size, stride, box);
}

/* ---- device --------------------------------------------------------------------------------------------------------- */

/* Offset of the 16-byte piece p of row r of a box. */
static __device__ __forceinline__ uint32_t tma_piece(uint32_t row, uint32_t piece)
{
    return row * TMA_ROW + ((piece ^ (row & 7)) << 4);
}

/* Stage of a ring of buffers and the parity of its barriers' current phase. */
struct ring_cursor {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next(int stages)
    {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/* Barriers that were just initialised are visible to TMA after this. */
static __device__ __forceinline__ void tma_barriers_ready()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Arrives once and expects `bytes`. */
static __device__ __forceinline__ void tma_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* Prefetches the map. */
static __device__ __forceinline__ void tma_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

static __device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, int channel, int token,
                                                uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(channel), "r"(token), "r"(0)
                 : "memory");
}

/* Of a map of four dimensions. */
static __device__ __forceinline__ void tma_load4(uint32_t to, const CUtensorMap *map, int channel, int token,
                                                 int c2, int c3, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(channel), "r"(token), "r"(c2), "r"(c3)
                 : "memory");
}

/* Prefetches the box into the L2. */
static __device__ __forceinline__ void tma_prefetch4(const CUtensorMap *map, int channel, int token, int c2, int c3)
{
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(channel),
                 "r"(token), "r"(c2), "r"(c3)
                 : "memory");
}

/* Hints for what is loaded: evict_last or evict_normal. volatile: cheaper to recompute than to keep in two registers. */
static __device__ __forceinline__ uint64_t evict_last()
{
    uint64_t hint;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(hint));
    return hint;
}

static __device__ __forceinline__ uint64_t evict_normal()
{
    uint64_t hint;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(hint));
    return hint;
}

/* 128 bytes, aligned to 128, become evict_normal again. */
static __device__ __forceinline__ void make_normal(const void *at)
{
    asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(at) : "memory");
}

/* hint: L2 eviction policy. */
static __device__ __forceinline__ void tma_load_hinted(uint32_t to, const CUtensorMap *map, int channel, int token,
                                                       int c2, int c3, uint32_t barrier, uint64_t hint)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(channel), "r"(token), "r"(c2), "r"(c3), "l"(hint)
        : "memory");
}

/* bytes: a multiple of 16; both addresses too. */
static __device__ __forceinline__ void tma_load_bytes(uint32_t to, const void *from, uint32_t bytes,
                                                      uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* Prefetches the bytes into the L2. */
static __device__ __forceinline__ void tma_prefetch_bytes(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void tma_store(const CUtensorMap *map, uint32_t from, int channel, int token)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(channel), "r"(token), "r"(0)
                 : "memory");
}

/* Of a map of four dimensions. */
static __device__ __forceinline__ void tma_store4(const CUtensorMap *map, uint32_t from, int channel, int token,
                                                  int c2, int c3)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(from), "r"(channel), "r"(token), "r"(c2), "r"(c3)
        : "memory");
}

static __device__ __forceinline__ void tma_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until the committed stores have read shared memory; with ALL, until they have written global memory. */
template <bool ALL> static __device__ __forceinline__ void tma_wait()
{
    if constexpr (ALL)
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    else
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Makes this thread's writes to shared memory visible to TMA. */
static __device__ __forceinline__ void tma_publish()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#endif
#endif
