/* SPDX-License-Identifier: Apache-2.0
 *
 * Buffers that notice what happens to them. Every buffer lies between two edges. Edges, gaps between rows and outputs
 * before the call hold a pattern that is NaN in every dtype, so what is read by mistake shows in the results and what is
 * written by mistake shows here. Under AddressSanitizer the edges are poisoned: a read beyond the data ends the
 * program. */
#ifndef WEFT_CHECK_GUARD_H
#define WEFT_CHECK_GUARD_H

#include <weft/weft.h>

enum { GUARD = 256 }; /* bytes of an edge */

/* A NaN in bf16, f16, f32 and f64, by the parity of a byte's place in its block. */
static const unsigned char guard_pattern[2] = {0xf5, 0xff};

void guard_fill(void *p, size_t bytes);
/* Bytes `from` to `to` of a block still hold the pattern. */
int guard_intact(const void *block, size_t from, size_t to);

typedef struct guard {
    char *block;               /* edge, data, edge; NULL: no memory */
    char *sealed;              /* block as guard_seal has found it; NULL before */
    size_t block_bytes, front; /* front: bytes of the block before the data */
    size_t bytes;              /* of the data */
} guard;

/* skew: bytes beyond a 64-byte boundary at which the data begin. 1, or 0 where there is no memory. */
int guard_alloc(guard *g, size_t bytes, size_t skew);
void guard_free(guard *g);
static inline char *guard_data(const guard *g)
{
    return g->block + g->front;
}

/* Remembers all bytes; 1, or 0 where there is no memory. */
int guard_seal(guard *g);
void guard_reset(const guard *g); /* back to the sealed state */
/* No byte differs from the sealed state. */
int guard_untouched(const guard *g);
/* NULL, or what is wrong, valid until the next call in the same thread: the block differs from its sealed state, or, where
 * it was not sealed, its edges from the pattern. The elements of `output` may have changed; NULL: nothing may. */
const char *guard_check(const guard *g, const weft_tensor *output);

#endif
