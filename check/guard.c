/* SPDX-License-Identifier: Apache-2.0 */
#include "check/guard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/element.h"

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

void guard_fill(void *p, size_t bytes)
{
    unsigned char *to = p;
    for (size_t i = 0; i < bytes; i++) to[i] = guard_pattern[i & 1];
}

int guard_intact(const void *block, size_t from, size_t to)
{
    const unsigned char *p = block;
    for (size_t i = from; i < to; i++)
        if (p[i] != guard_pattern[i & 1]) return 0;
    return 1;
}

/* Looking at a whole block needs its edges open. */
static void open_edges(const guard *g)
{
    ASAN_UNPOISON_MEMORY_REGION(g->block, g->block_bytes);
}

static void close_edges(const guard *g)
{
    ASAN_POISON_MEMORY_REGION(g->block, g->front);
    ASAN_POISON_MEMORY_REGION(g->block + g->front + g->bytes, GUARD);
}

int guard_alloc(guard *g, size_t bytes, size_t skew)
{
    *g = (guard){.bytes = bytes, .front = GUARD + skew};
    g->block_bytes = g->front + bytes + GUARD;
    g->block = aligned_alloc(64, (g->block_bytes + 63) / 64 * 64);
    if (!g->block) return 0;
    guard_fill(g->block, g->block_bytes);
    close_edges(g);
    return 1;
}

void guard_free(guard *g)
{
    if (g->block) open_edges(g);
    free(g->block);
    free(g->sealed);
    *g = (guard){0};
}

int guard_seal(guard *g)
{
    if (!g->sealed) g->sealed = malloc(g->block_bytes);
    if (!g->sealed) return 0;
    open_edges(g);
    memcpy(g->sealed, g->block, g->block_bytes);
    close_edges(g);
    return 1;
}

void guard_reset(const guard *g)
{
    open_edges(g);
    memcpy(g->block, g->sealed, g->block_bytes);
    close_edges(g);
}

int guard_untouched(const guard *g)
{
    open_edges(g);
    int same = memcmp(g->block, g->sealed, g->block_bytes) == 0;
    close_edges(g);
    return same;
}

/* The block with the sealed elements of the output: where it differs from the sealed block, something else was written.
 * The first such byte, -1 for none, -2 without memory. */
static ptrdiff_t beside_elements(const guard *g, const weft_tensor *output)
{
    char *copy = malloc(g->block_bytes);
    ptrdiff_t found = -1;
    if (!copy) return -2;
    memcpy(copy, g->block, g->block_bytes);
    const int64_t count = tensor_count(output), size = (int64_t)weft_dtype_size(output->dtype);
    cursor c = cursor_open(output);
    if (c.dense) memcpy(copy + g->front, g->sealed + g->front, (size_t)(count * size));
    for (int64_t i = 0; !c.dense && i < count; i++, cursor_step(&c))
        memcpy(cursor_data(&c, copy + g->front), cursor_data(&c, g->sealed + g->front), (size_t)size);
    if (memcmp(copy, g->sealed, g->block_bytes) != 0)
        for (found = 0; copy[found] == g->sealed[found];) found++;
    free(copy);
    return found;
}

static const char *differences(const guard *g, const weft_tensor *output)
{
    static _Thread_local char text[100];
    if (!g->sealed) {
        int intact =
            guard_intact(g->block, 0, g->front) && guard_intact(g->block, g->front + g->bytes, g->block_bytes);
        return intact ? NULL : "memory around it was written";
    }
    if (!output) return memcmp(g->block, g->sealed, g->block_bytes) ? "an input was written" : NULL;
    ptrdiff_t at = beside_elements(g, output);
    if (at == -2) return "out of memory";
    if (at < 0) return NULL;
    snprintf(text, sizeof text, "byte %lld relative to its data was written and is no element of it",
             (long long)at - (long long)g->front);
    return text;
}

const char *guard_check(const guard *g, const weft_tensor *output)
{
    open_edges(g);
    const char *wrong = differences(g, output);
    close_edges(g);
    return wrong;
}
