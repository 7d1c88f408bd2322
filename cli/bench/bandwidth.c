/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bandwidth.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check/parallel.h"
#include "check/random.h"

double bandwidth_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Both pointers on a 64-byte boundary, bytes a multiple of 64. Stores that go past the caches spare the machine
 * from reading what is about to be overwritten. Assembly, because intrinsics are for src/cpu. */
static void copy_past_caches(char *to, const char *from, size_t bytes)
{
#if defined(__x86_64__)
    for (size_t i = 0; i < bytes; i += 64)
        __asm__ volatile("movaps (%0), %%xmm0\n\t"
                         "movaps 16(%0), %%xmm1\n\t"
                         "movaps 32(%0), %%xmm2\n\t"
                         "movaps 48(%0), %%xmm3\n\t"
                         "movntps %%xmm0, (%1)\n\t"
                         "movntps %%xmm1, 16(%1)\n\t"
                         "movntps %%xmm2, 32(%1)\n\t"
                         "movntps %%xmm3, 48(%1)"
                         :
                         : "r"(from + i), "r"(to + i)
                         : "memory", "xmm0", "xmm1", "xmm2", "xmm3");
    __asm__ volatile("sfence" ::: "memory");
#else
    memcpy(to, from, bytes);
#endif
}

static double time_copy(char *to, const char *from, size_t bytes, int threads, int past_caches)
{
    size_t share = bytes / (size_t)threads / 64 * 64;
    double start = bandwidth_clock();
    PARALLEL_FOR_THREADS(threads)
    for (int i = 0; i < threads; i++) {
        size_t begin = (size_t)i * share, length = i == threads - 1 ? bytes - begin : share;
        if (past_caches)
            copy_past_caches(to + begin, from + begin, length);
        else
            memcpy(to + begin, from + begin, length);
    }
    return bandwidth_clock() - start;
}

double bandwidth_copy(int threads)
{
    enum { ROUNDS = 6 };
    const size_t bytes = (size_t)256 << 20; /* far more than any cache */
    char *from = aligned_alloc(4096, bytes), *to = aligned_alloc(4096, bytes);
    double best = 0;
    if (from && to) {
        PARALLEL_FOR
        for (int64_t i = 0; i < (int64_t)(bytes / 8); i++) {
            ((uint64_t *)from)[i] = random_bits(1, (uint64_t)i);
            ((uint64_t *)to)[i] = 0;
        }
        for (int round = 0; round < 2 * ROUNDS; round++) {
            double rate = 2 * (double)bytes / time_copy(to, from, bytes, threads, round % 2);
            if (round > 1 && rate > best) best = rate;
        }
        /* Whatever was measured, it did copy. */
        if (memcmp(from, to, bytes)) best = 0;
    }
    free(from);
    free(to);
    return best;
}
