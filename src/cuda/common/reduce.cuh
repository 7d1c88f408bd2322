/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums in a fixed order: over the lanes of a warp, over the warps of a block, over partial sums in memory. The order
 * depends on the block size alone, and kernels choose that from streams and channels alone. */
#ifndef WEFT_CUDA_REDUCE_CUH
#define WEFT_CUDA_REDUCE_CUH

#include "cuda/common/vec.cuh"

/* All lanes get the sum. */
static __device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

/* W neighbours of `count` rows, `apart` floats from each other, added to total in order. EACH rows are in flight at once
 * however few are left, where an unrolled loop takes these one after the other. */
template <int EACH, int W>
static __device__ __forceinline__ void add_rows(float (&total)[W], const float *from, int64_t apart, int count)
{
#pragma unroll 1
    for (; count > 0; count -= EACH) {
        float v[EACH][W];
#pragma unroll
        for (int s = 0; s < EACH; s++, from += apart)
            if (s < count) load_shared(v[s], from);
#pragma unroll
        for (int s = 0; s < EACH; s++)
#pragma unroll
            for (int e = 0; e < W; e++)
                if (s < count) total[e] += v[s][e];
    }
}

/* The steps of warp_sums from `half` on. A recursion, and a choice between values: as a loop over steps, or with a choice
 * between elements, the compiler keeps v in local memory. */
template <int HALF, int STEP, int M> static __device__ __forceinline__ void warp_sums_from(float (&v)[M])
{
    if constexpr (HALF > 0) {
        const bool upper = (threadIdx.x & STEP) != 0;
#pragma unroll
        for (int k = 0; k < HALF; k++) {
            const float low = v[k], high = v[k + HALF];
            v[k] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, STEP);
        }
        warp_sums_from<HALF / 2, STEP / 2>(v);
    } else if constexpr (STEP > 0) {
        v[0] += __shfl_xor_sync(0xffffffffu, v[0], STEP);
        warp_sums_from<0, STEP / 2>(v);
    }
}

/* Sums M values over the lanes of a warp with about M + log shuffles instead of 5 M: at each step a lane keeps one half
 * of its values and hands the other half to its partner. Afterwards lane l holds in v[0] the sum number
 * owner_index<M>(l); M is a power of two up to 32. With M < 32 several lanes hold the same sum. */
template <int M> static __device__ __forceinline__ void warp_sums(float (&v)[M])
{
    static_assert(M >= 1 && M <= 32 && (M & (M - 1)) == 0, "a power of two");
    warp_sums_from<M / 2, 16>(v);
}

/* Which sum a lane holds after warp_sums<M>. */
template <int M> static __device__ __forceinline__ int owner_index(int lane)
{
    int index = 0, step = 16;
#pragma unroll
    for (int half = M / 2; half > 0; half >>= 1, step >>= 1) index += lane & step ? half : 0;
    return index;
}

/* Sums over a block of `warps` warps; room: at least warps * M floats of shared memory. total[M] is in room afterwards,
 * after a barrier, for all to read: the warps' sums are added in their order. */
template <int M> static __device__ __forceinline__ void block_sums(float (&v)[M], float *room, int warps)
{
    constexpr int P = M <= 1 ? 1 : M <= 2 ? 2 : M <= 4 ? 4 : M <= 8 ? 8 : M <= 16 ? 16 : 32;
    static_assert(M <= 32, "in two rounds, please");
    float all[P];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < P; k++) all[k] = k < M ? v[k] : 0.0f;
    warp_sums<P>(all);
    const int mine = owner_index<P>(lane);
    if (mine < M && (lane & (32 / P - 1)) == 0) room[warp * M + mine] = all[0];
    __syncthreads();
    if (warps > 1) {
        for (int k = threadIdx.x; k < M; k += blockDim.x) {
            float s = room[k];
            for (int w = 1; w < warps; w++) s += room[w * M + k];
            room[k] = s;
        }
        __syncthreads();
    }
}

#endif
