/* SPDX-License-Identifier: Apache-2.0
 *
 * Host memory and its image on the device, for one call: blocks are added, sent up, used there, and fetched back. Each
 * lies between sentinels on the device and keeps its alignment to 64 bytes. All blocks travel in one copy.
 *
 * With WEFT_DEVICE_EXACT=1 each block is an allocation of its own without sentinels, and scratch is left as the device
 * gives it: then compute-sanitizer sees an access one byte beyond, and a read of what nobody wrote. */
#ifndef WEFT_CLI_MIRROR_H
#define WEFT_CLI_MIRROR_H

#include <stddef.h>

enum { MIRROR_MAX_BLOCKS = 160 };

typedef struct mirror_block {
    const char *name;
    char *host; /* NULL: scratch, all NaN before the call */
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
/* The number of the block, or -1 where there are too many. host NULL: scratch, at an odd address. */
int mirror_add(mirror *m, const char *name, void *host, size_t bytes);
/* NULL, or what went wrong. */
const char *mirror_up(mirror *m);
/* Also where the surroundings of a block were written. Valid until mirror_close. */
const char *mirror_down(mirror *m);
/* The image of a host address in one of the blocks, or NULL. */
void *mirror_at(const mirror *m, const void *host);

#endif
