/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory for one operator after the other. Large buffers are kept and handed out again, because filling one with random
 * numbers takes longer than most operators run. */
#ifndef WEFT_CLI_POOL_H
#define WEFT_CLI_POOL_H

#include <weft/weft.h>

typedef struct pool_buffer {
    void *data;
    size_t bytes;
    weft_dtype dtype;
    int kept, used; /* kept: its values may be used again as they are */
} pool_buffer;

typedef struct pool {
    pool_buffer *buffers;
    int count;
    int device; /* on the device instead of the host */
} pool;

/* Everything handed out before is free again. */
void pool_begin(pool *p);
/* keep: the values are plain normal numbers that nobody writes to. *fresh is 0 where the buffer holds such numbers
 * already. NULL where there is no memory. */
void *pool_take(pool *p, size_t bytes, weft_dtype dtype, int keep, int *fresh);
void pool_free(pool *p);

#endif
