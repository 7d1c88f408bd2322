/* SPDX-License-Identifier: Apache-2.0 */
#include "check/mirror.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/device.h"
#include "check/guard.h"

void mirror_open(mirror *m)
{
    const char *exact = getenv("WEFT_DEVICE_EXACT");
    memset(m, 0, sizeof *m);
    m->exact = exact && *exact && *exact != '0';
}

void mirror_close(mirror *m)
{
    if (m->exact)
        for (int i = 0; i < m->count; i++) device_free(m->block[i].base);
    device_free(m->device);
    free(m->staging);
    m->staging = m->device = NULL;
    m->count = 0;
}

int mirror_add(mirror *m, const char *name, void *host, size_t bytes)
{
    char *begin = host, *end = begin + bytes;
    if (!bytes) return 1;
    for (int i = 0; host && i < m->count;) {
        mirror_block *b = &m->block[i];
        if (!b->host || end <= b->host || begin >= b->host + b->bytes) {
            i++;
            continue;
        }
        if (b->host + b->bytes > end) end = b->host + b->bytes;
        if (b->host < begin) begin = b->host;
        name = b->name;
        *b = m->block[--m->count];
        i = 0; /* the union may touch one that was passed over */
    }
    if (m->count == MIRROR_MAX_BLOCKS) return 0;
    m->block[m->count++] =
        (mirror_block){.name = name, .host = host ? begin : NULL, .bytes = host ? (size_t)(end - begin) : bytes};
    return 1;
}

const char *mirror_make(mirror *m)
{
    for (int i = 0; i < m->count; i++) {
        mirror_block *b = &m->block[i];
        size_t skew = b->host ? (uintptr_t)b->host % 64 : 1;
        b->offset = m->bytes + GUARD + skew;
        m->bytes = (b->offset + b->bytes + GUARD + 255) / 256 * 256;
        if (!m->exact) continue;
        b->base = device_alloc(skew + b->bytes);
        if (!b->base) return "not enough memory on the device";
        b->device = b->base + skew;
    }
    if (m->exact) return NULL;
    m->staging = malloc(m->bytes + 1);
    if (!m->staging) return "not enough memory";
    m->device = device_alloc(m->bytes);
    if (!m->device) return "not enough memory on the device";
    for (int i = 0; i < m->count; i++) m->block[i].device = m->device + m->block[i].offset;
    return NULL;
}

const char *mirror_up(mirror *m)
{
    const char *wrong = NULL;
    if (!m->exact) guard_fill(m->staging, m->bytes);
    for (int i = 0; i < m->count && !wrong; i++) {
        const mirror_block *b = &m->block[i];
        if (m->exact && b->host)
            wrong = device_put(b->device, b->host, b->bytes);
        else if (!m->exact && b->host)
            memcpy(m->staging + b->offset, b->host, b->bytes);
    }
    return wrong || m->exact ? wrong : device_put(m->device, m->staging, m->bytes);
}

/* Constants may lie where the host must not write: only what has changed is written. */
static void put_back(const mirror_block *b, const char *data)
{
    if (memcmp(b->host, data, b->bytes)) memcpy(b->host, data, b->bytes);
}

static const char *down_exact(mirror *m)
{
    const char *wrong = NULL;
    for (int i = 0; i < m->count && !wrong; i++) {
        const mirror_block *b = &m->block[i];
        if (!b->host) continue;
        char *copy = malloc(b->bytes);
        wrong = copy ? device_get(copy, b->device, b->bytes) : "not enough memory";
        if (!wrong) put_back(b, copy);
        free(copy);
    }
    return wrong;
}

const char *mirror_down(mirror *m)
{
    if (m->exact) return down_exact(m);
    const char *wrong = device_get(m->staging, m->device, m->bytes), *beside = NULL;
    for (int i = 0; i < m->count && !wrong; i++) {
        const mirror_block *b = &m->block[i];
        const size_t end = b->offset + b->bytes;
        if (b->host) put_back(b, m->staging + b->offset);
        if (!guard_intact(m->staging, b->offset - GUARD, b->offset) || !guard_intact(m->staging, end, end + GUARD))
            beside = b->name;
    }
    if (wrong || !beside) return wrong;
    snprintf(m->text, sizeof m->text, "memory around %s was written on the device", beside);
    return m->text;
}

void *mirror_at(const mirror *m, const void *host)
{
    for (int i = 0; i < m->count; i++) {
        const mirror_block *b = &m->block[i];
        if (!host && !b->host) return b->device;
        if (host && b->host && (const char *)host >= b->host && (const char *)host < b->host + b->bytes)
            return b->device + ((const char *)host - b->host);
    }
    return NULL;
}
