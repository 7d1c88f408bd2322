/* SPDX-License-Identifier: Apache-2.0 */
#include "common/pool.h"

#include <stdlib.h>
#include <string.h>

#include "check/device.h"

void pool_begin(pool *p)
{
    for (int i = 0; i < p->count; i++) p->buffers[i].used = 0;
}

void *pool_take(pool *p, size_t bytes, weft_dtype dtype, int keep, int *fresh)
{
    for (int i = 0; i < p->count; i++) {
        pool_buffer *b = &p->buffers[i];
        if (b->used || b->bytes != bytes || b->dtype != dtype || b->kept != keep) continue;
        b->used = 1;
        *fresh = !keep;
        return b->data;
    }
    pool_buffer *more = realloc(p->buffers, (size_t)(p->count + 1) * sizeof *more);
    if (!more) return NULL;
    p->buffers = more;
    pool_buffer *b = &more[p->count];
    *b = (pool_buffer){NULL, bytes, dtype, keep, 1};
    b->data = p->device ? device_alloc(bytes) : aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096);
    if (!b->data) return NULL;
    /* Outputs too are touched now: the operator is not to pay for page faults. */
    if (p->device)
        (void)device_fill(b->data, 0xff, bytes);
    else
        memset(b->data, 0xff, bytes);
    p->count++;
    *fresh = 1;
    return b->data;
}

void pool_free(pool *p)
{
    for (int i = 0; i < p->count; i++)
        if (p->device)
            device_free(p->buffers[i].data);
        else
            free(p->buffers[i].data);
    free(p->buffers);
    *p = (pool){.device = p->device};
}
