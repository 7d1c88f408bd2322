/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor cores and asynchronous copies, as instructions of compute capability 8.0, so that one source serves every GPU.
 *
 * Fragments of a 16x8x16 product D += A B, lane = 4 g + t:
 *     A  a[0] (row g, k 2t 2t+1)  a[1] (row g+8, same k)  a[2] (row g, k 2t+8 2t+9)  a[3] (row g+8, same)
 *     B  b[0] (k 2t 2t+1, column g)  b[1] (k 2t+8 2t+9, column g)
 *     D  d[0] d[1] (row g, columns 2t 2t+1)  d[2] d[3] (row g+8, same columns)
 *
 * A float is split into two bf16 numbers, hi + lo, which keeps 16 bits of its mantissa: more than TF32's 11. */
#ifndef WEFT_CUDA_MMA_CUH
#define WEFT_CUDA_MMA_CUH

#include "cuda/common/vec.cuh"

static __device__ __forceinline__ void mma16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* The same for f16. */
static __device__ __forceinline__ void mma16_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                 uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(b0));
}

/* A 16x8x8 product of fp32 numbers of which the first 11 bits count. a: rows g, g + 8, g, g + 8 and k = t, t, t + 4, t + 4; b: k = t, t + 4 and
 * column g; d as above. */
static __device__ __forceinline__ void mma8_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0,
                                                 float b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
                   "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* 16 bytes from global to shared memory, past the registers; zeros where `valid` is false. */
static __device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}

static __device__ __forceinline__ void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* All but the last `Pending` committed groups have arrived. */
template <int Pending> static __device__ __forceinline__ void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/* Barriers in shared memory, whose phases have the parities 0, 1, 0, ... A wait for parity 1 on a new one returns. One is made in 50
 * cycles and a warp makes one at a time, whatever the number of its lanes that want to: several are for several warps. */
static __device__ __forceinline__ void barrier_init(uint32_t barrier, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

/* Whether that phase is over. */
static __device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    uint32_t done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
#else
    while (!barrier_test(barrier, parity)) {}
#endif
}

/* ---- two bf16 numbers for one float --------------------------------------------------------------------------------- */

/* What is left of v after its bf16 part. Nothing for infinity and NaN, which are bf16 numbers themselves. */
static __device__ __forceinline__ float rest_of(float v, float hi)
{
    return fabsf(hi) < __int_as_float(0x7f800000) ? v - hi : 0.0f;
}

static __device__ __forceinline__ void split2(uint32_t &hi, uint32_t &lo, float a, float b)
{
    float ha, hb;
    hi = narrow2(a, b, bf16());
    widen2(ha, hb, hi, bf16());
    lo = narrow2(rest_of(a, ha), rest_of(b, hb), bf16());
}

/* A register of two activations as bf16 pairs: exact, with an empty lo for bf16 itself. */
static __device__ __forceinline__ void split_pair(uint32_t &hi, uint32_t &lo, uint32_t pair, bf16)
{
    hi = pair;
    lo = 0;
}
static __device__ __forceinline__ void split_pair(uint32_t &hi, uint32_t &lo, uint32_t pair, f16)
{
    float a, b;
    widen2(a, b, pair, f16());
    split2(hi, lo, a, b);
}

#endif
