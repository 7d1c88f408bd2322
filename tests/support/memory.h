/* SPDX-License-Identifier: Apache-2.0
 *
 * What problem.c and run.c share: guards, the pattern that fills what nobody may read, and walks over strided
 * views. */
#ifndef WEFT_TESTS_MEMORY_H
#define WEFT_TESTS_MEMORY_H

#include <stdlib.h>

#include "support/problem.h"

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif
#ifdef WITH_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

enum { GUARD = 128 };

/* A NaN in bf16, f16, f32 and f64. */
static const unsigned char guard_pattern[2] = {0xf5, 0xff};

static inline void fill_pattern(char *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) p[i] = (char)guard_pattern[i & 1];
}

static inline void *must_alloc(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!p) abort();
    return p;
}

#endif
