/* SPDX-License-Identifier: Apache-2.0
 *
 * A set of what kernels were permitted, which only grows. A permit is one word, so every thread may look and add at once;
 * where the set has no room left, a permit is requested again. */
#ifndef WEFT_CUDA_PERMITS_TABLE_H
#define WEFT_CUDA_PERMITS_TABLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { PERMIT_SLOTS = 2048, PERMIT_TRIES = 16, PERMIT_DEVICES = 64 };
typedef enum weft_permit { WEFT_PERMIT_SHARED = 1, WEFT_PERMIT_CLUSTER = 2 } weft_permit;

typedef struct weft_permits {
    _Atomic uint64_t slot[PERMIT_SLOTS]; /* 0: free */
} weft_permits;

/* 0 where it cannot be kept. */
static inline uint64_t weft_permit_word(const void *kernel, int device, weft_permit what)
{
    const uint64_t address = (uint64_t)(uintptr_t)kernel;
    if (address >> 56 || device < 0 || device >= PERMIT_DEVICES) return 0;
    return address | (uint64_t)device << 56 | (uint64_t)what << 62;
}

static inline uint64_t weft_permit_slot(uint64_t word, int try)
{
    return ((word * 0x9e3779b97f4a7c15u >> 40) + (uint64_t)try) % PERMIT_SLOTS;
}

static inline bool weft_permit_kept(weft_permits *all, uint64_t word)
{
    for (int i = 0; word && i < PERMIT_TRIES; i++) {
        const uint64_t got = atomic_load_explicit(&all->slot[weft_permit_slot(word, i)], memory_order_acquire);
        if (got == word) return true;
        if (got == 0) return false;
    }
    return false;
}

static inline void weft_permit_keep(weft_permits *all, uint64_t word)
{
    for (int i = 0; word && i < PERMIT_TRIES; i++) {
        uint64_t got = 0;
        if (atomic_compare_exchange_strong_explicit(&all->slot[weft_permit_slot(word, i)], &got, word,
                                                    memory_order_release, memory_order_relaxed) ||
            got == word)
            return;
    }
}

#endif
