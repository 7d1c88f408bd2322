/* SPDX-License-Identifier: Apache-2.0 */
#include "check/guard.h"

#include <stdlib.h>
#include <string.h>

#include "check/element.h"

enum { EDGE = 256, SENTINEL = 0xa5, UNTOUCHED = 0xff }; /* all bits set is NaN in every dtype */

int guard_alloc(guard *g, size_t bytes, size_t skew)
{
    size_t total = (EDGE + skew + bytes + EDGE + 63) / 64 * 64;
    *g = (guard){.bytes = bytes};
    g->base = aligned_alloc(64, total);
    if (!g->base) return 0;
    g->data = g->base + EDGE + skew;
    memset(g->base, SENTINEL, total);
    memset(g->data, UNTOUCHED, bytes);
    return 1;
}

void guard_free(guard *g)
{
    free(g->base);
    free(g->copy);
    *g = (guard){0};
}

int guard_remember(guard *g)
{
    g->copy = malloc(g->bytes + 1);
    if (g->copy) memcpy(g->copy, g->data, g->bytes);
    return g->copy != NULL;
}

static int edges_intact(const guard *g)
{
    for (const unsigned char *p = g->base; p < g->data; p++)
        if (*p != SENTINEL) return 0;
    for (const unsigned char *p = g->data + g->bytes; p < g->data + g->bytes + EDGE; p++)
        if (*p != SENTINEL) return 0;
    return 1;
}

const char *guard_input(const guard *g)
{
    if (!edges_intact(g)) return "memory around it was written";
    if (g->copy && memcmp(g->copy, g->data, g->bytes)) return "an input was written";
    return NULL;
}

const char *guard_output(const guard *g, const weft_tensor *t)
{
    if (!edges_intact(g)) return "memory around it was written";
    int64_t count = tensor_count(t);
    if (tensor_span(t) == count) return NULL;
    size_t size = weft_dtype_size(t->dtype);
    unsigned char *used = calloc(1, g->bytes + 1);
    const char *wrong = NULL;
    if (!used) return "out of memory";
    for (int64_t i = 0; i < count; i++) memset(used + (size_t)tensor_offset(t, i) * size, 1, size);
    for (size_t k = 0; k < g->bytes; k++)
        if (!used[k] && g->data[k] != UNTOUCHED) wrong = "the gap between two rows was written";
    free(used);
    return wrong;
}
