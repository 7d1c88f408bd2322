/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of a warpgroup (four warps) on tensor cores that read their factors from shared memory: instructions of compute
 * capability 9.0a. WEFT_WGMMA is defined where they exist.
 *
 * A factor in shared memory is rows of 128 bytes, 64 numbers, from an address that is a multiple of 1024 on; the 16-byte
 * chunk c of row r lies at chunk c ^ (r % 8). Fragments of D [64, 64] += A [64, 16] B [16, 64] in warp w of the warpgroup are
 * those of mma.cuh for rows 16 w to 16 w + 15, eight columns to an element of d. What a product reads and writes is its own
 * from the call until a wait that covers it. */
#ifndef WEFT_CUDA_WGMMA_CUH
#define WEFT_CUDA_WGMMA_CUH

#include "cuda/common/vec.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WEFT_WGMMA

/* The factor at `address`. Steps between 8 rows are 1024 bytes; 32 bytes further are the next 16 columns, 2048 the next 16
 * rows. */
static __device__ __forceinline__ uint64_t wgmma_factor(uint32_t address)
{
    const uint64_t rows_128_bytes = (uint64_t)1 << 62, eight_rows = (uint64_t)(1024 >> 4) << 32,
                   unused = (uint64_t)1 << 16;
    return rows_128_bytes | eight_rows | unused | (address & 0x3ffff) >> 4;
}

/* Before the first product that uses registers written by other instructions. */
static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* All but the last `Pending` committed groups are done. */
template <int Pending> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/* Keeps the compiler from moving a use of d over what stands here; of factors in registers likewise. */
template <int N> static __device__ __forceinline__ void wgmma_settle(float (&d)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) asm volatile("" : "+f"(d[i][k])::"memory");
}

template <int N> static __device__ __forceinline__ void wgmma_settle(uint32_t (&a)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) asm volatile("" : "+r"(a[i][k])::"memory");
}

#define WGMMA_PIECE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_PIECES                                                                                               \
    WGMMA_PIECE(0), WGMMA_PIECE(1), WGMMA_PIECE(2), WGMMA_PIECE(3), WGMMA_PIECE(4), WGMMA_PIECE(5),                \
        WGMMA_PIECE(6), WGMMA_PIECE(7)
#define WGMMA_64                                                                                                   \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "     \
    "%12, "                                                                                                        \
    "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define WGMMA_32                                                                                                   \
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "     \
    "%12, %13, %14, %15}, "
#define WGMMA_16 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "

/* d = (add ? d : 0) + A B with the rows of A and the columns of B as rows in shared memory. */
static __device__ __forceinline__ void wgmma_rows(float (&d)[8][4], uint64_t a, uint64_t b, bool add)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; " WGMMA_64 "%32, %33, p, 1, 1, 0, 0; }"
                 : WGMMA_PIECES
                 : "l"(a), "l"(b), "r"((int)add));
}

/* d = (ADD ? d : 0) + A B with A in registers. TURNED: the rows of B, 64 columns each, are rows in shared memory; otherwise its
 * columns are. All 64 columns always: ptxas waits for every product where another has some of its accumulators. */
template <bool TURNED, bool ADD>
static __device__ __forceinline__ void wgmma_registers(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; " WGMMA_64 "{%32, %33, %34, %35}, %36, p, 1, 1, %38; }"
                 : WGMMA_PIECES
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD), "n"(TURNED));
}

/* d += A B with A in registers and the rows of B, 64 columns each, as rows in shared memory. */
static __device__ __forceinline__ void wgmma_columns(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b)
{
    wgmma_registers<true, true>(d, a, b);
}

/* d = (add ? d : 0) + A B of N = 16, 32 or 64 columns, both in shared memory. TURNED_A: rows of A's turned are rows in shared memory;
 * TURNED_B: rows of B are. */
template <int N, bool TURNED_A, bool TURNED_B>
static __device__ __forceinline__ void wgmma_shared(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool add)
{
    static_assert(N == 16 || N == 32 || N == 64, "as many columns as there are instructions for here");
    if constexpr (N == 64)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; " WGMMA_64 "%32, %33, p, 1, 1, %35, %36; }"
                     : WGMMA_PIECES
                     : "l"(a), "l"(b), "r"((int)add), "n"(TURNED_A), "n"(TURNED_B));
    else if constexpr (N == 16)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0; " WGMMA_16 "%8, %9, p, 1, 1, %11, %12; }"
                     : WGMMA_PIECE(0), WGMMA_PIECE(1)
                     : "l"(a), "l"(b), "r"((int)add), "n"(TURNED_A), "n"(TURNED_B));
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0; " WGMMA_32 "%16, %17, p, 1, 1, %19, %20; }"
                     : WGMMA_PIECE(0), WGMMA_PIECE(1), WGMMA_PIECE(2), WGMMA_PIECE(3)
                     : "l"(a), "l"(b), "r"((int)add), "n"(TURNED_A), "n"(TURNED_B));
}

#undef WGMMA_PIECE
#undef WGMMA_PIECES
#undef WGMMA_64
#undef WGMMA_32
#undef WGMMA_16
#endif
#endif
