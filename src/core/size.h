/* SPDX-License-Identifier: Apache-2.0
 *
 * Arithmetic of sizes. A sum or product of sizes that does not fit stays at the largest number, which no limit admits: so a
 * caller's sizes can be multiplied first and compared once. */
#ifndef WEFT_CORE_SIZE_H
#define WEFT_CORE_SIZE_H

#include <stddef.h>
#include <stdint.h>

/* Elements that a tensor has, or spans from its first to its last, and the largest stride: more bytes than processors
 * address, and few enough that a tensor's offsets, its bytes and its work in a thousand layers fit 63 bits. */
#define WEFT_MOST_ELEMENTS ((int64_t)1 << 48)
/* Global index of a call's first token: those of the others fit as well. */
#define WEFT_MOST_TOKEN_BASE ((int64_t)1 << 62)
/* Bytes of memory that a caller can be asked for. */
#define WEFT_MOST_BYTES ((size_t)1 << 62)

/* Of numbers from 0 on. */
static inline int64_t weft_times(int64_t a, int64_t b)
{
    int64_t c;
    return __builtin_mul_overflow(a, b, &c) ? INT64_MAX : c;
}

static inline int64_t weft_plus(int64_t a, int64_t b)
{
    int64_t c;
    return __builtin_add_overflow(a, b, &c) ? INT64_MAX : c;
}

static inline size_t weft_bytes_times(size_t a, size_t b)
{
    size_t c;
    return __builtin_mul_overflow(a, b, &c) ? SIZE_MAX : c;
}

static inline size_t weft_bytes_plus(size_t a, size_t b)
{
    size_t c;
    return __builtin_add_overflow(a, b, &c) ? SIZE_MAX : c;
}

#endif
