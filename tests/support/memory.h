/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that a test cannot go on without. */
#ifndef WEFT_TESTS_MEMORY_H
#define WEFT_TESTS_MEMORY_H

#include <stdlib.h>

#include "check/guard.h"

static inline void *must_alloc(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!p) abort();
    return p;
}

#endif
