/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of a cluster (compute capability 9.0 and newer), which reach each other's shared memory: a value goes to another
 * block together with its bytes on a barrier there, so blocks do not run in lockstep. */
#ifndef WEFT_CUDA_CLUSTER_CUH
#define WEFT_CUDA_CLUSTER_CUH

#include <stdint.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

static __device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ uint32_t cluster_blocks()
{
    uint32_t blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}

static __device__ __forceinline__ uint32_t cluster_index()
{
    uint32_t index;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return index;
}

/* All threads of all blocks arrive, and each of them waits, in turn; no thread may wait for another one in between, since in a
 * cluster of one block the two are one. Orders nothing but what a fence has made known before: barriers that exist now, and
 * blocks that are still there. */
static __device__ __forceinline__ void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait_for_all()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The same for plain stores: a thread that waits sees the stores of all threads before their arrival. */
static __device__ __forceinline__ void cluster_publish()
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

/* The address of the same place in the shared memory of another block. */
static __device__ __forceinline__ uint32_t cluster_address(uint32_t own, uint32_t rank)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
    return there;
}

static __device__ __forceinline__ void cluster_store(uint32_t to, float v)
{
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

/* Both addresses in the same block. */
static __device__ __forceinline__ void cluster_send(uint32_t to, float v, uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(v)), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void cluster_send(uint32_t to, const float (&v)[2], uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void cluster_send(uint32_t to, const float (&v)[4], uint32_t barrier)
{
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])),
        "r"(__float_as_uint(v[3])), "r"(barrier)
        : "memory");
}

#endif
#endif
