/* SPDX-License-Identifier: Apache-2.0
 *
 * Host memory and its image on the device: ranges are added, sent up, used there, and fetched back. Ranges that overlap
 * become one block. Each block lies between sentinels on the device and keeps its alignment to 64 bytes; all of them
 * travel in one copy.
 *
 * With WEFT_DEVICE_EXACT=1 each block is an allocation of its own without sentinels, and scratch is left as the device
 * gives it: then compute-sanitizer sees an access one byte beyond, and a read of what nobody wrote. */
#ifndef WEFT_CHECK_MIRROR_H
#define WEFT_CHECK_MIRROR_H

#include <stddef.h>

enum { MIRROR_MAX_BLOCKS = 256 };

typedef struct mirror_block {
    const char *name;
    char *host; /* NULL: scratch, all NaN when it is sent up */
    size_t bytes, offset;
    char *base, *device;
} mirror_block;

typedef struct mirror {
    mirror_block block[MIRROR_MAX_BLOCKS];
    int count, exact;
    size_t bytes;
    char *staging, *device;
    char text[160];
} mirror;

void mirror_open(mirror *m);
void mirror_close(mirror *m);
/* All ranges are added before any is sent. 0 where there are too many. An empty range is no block. */
int mirror_add(mirror *m, const char *name, void *host, size_t bytes);
/* Memory on the device. NULL, or what went wrong. */
const char *mirror_make(mirror *m);
const char *mirror_up(mirror *m);
/* Also where the surroundings of a block were written. Valid until mirror_close. */
const char *mirror_down(mirror *m);
/* The image of a host address in one of the blocks, or NULL; of NULL the scratch, at an odd address. */
void *mirror_at(const mirror *m, const void *host);

#endif
