/* SPDX-License-Identifier: Apache-2.0
 *
 * Buffers that notice what happens to them: sentinels on both sides, a copy of what an input held, NaN in every
 * output and in the gaps between its rows. */
#ifndef WEFT_CLI_GUARD_H
#define WEFT_CLI_GUARD_H

#include <weft/weft.h>

typedef struct guard {
    unsigned char *base, *data;
    size_t bytes;
    unsigned char *copy; /* of the data, taken by guard_remember */
} guard;

/* skew: bytes beyond a 64-byte boundary at which the data begin. 1, or 0 where there is no memory. */
int guard_alloc(guard *g, size_t bytes, size_t skew);
void guard_free(guard *g);
int guard_remember(guard *g);

/* NULL, or what is wrong. */
const char *guard_input(const guard *g);
const char *guard_output(const guard *g, const weft_tensor *t);

#endif
