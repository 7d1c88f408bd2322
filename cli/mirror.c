/* SPDX-License-Identifier: Apache-2.0 */
#include "mirror.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

enum { EDGE = 256, SENTINEL = 0xa5, UNTOUCHED = 0xff }; /* all bits set is NaN in every dtype */

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
    if (m->count == MIRROR_MAX_BLOCKS) return -1;
    mirror_block *b = &m->block[m->count];
    *b = (mirror_block){.name = name, .host = host, .bytes = bytes};
    b->offset = m->bytes + EDGE + (host ? (uintptr_t)host % 64 : 1);
    m->bytes = (b->offset + bytes + EDGE + 255) / 256 * 256;
    return m->count++;
}

static const char *up_exact(mirror *m)
{
    const char *wrong = NULL;
    for (int i = 0; i < m->count && !wrong; i++) {
        mirror_block *b = &m->block[i];
        size_t skew = b->offset % 64;
        b->base = device_alloc(skew + b->bytes);
        if (!b->base) return "not enough memory on the device";
        b->device = b->base + skew;
        if (b->host && b->bytes) wrong = device_put(b->device, b->host, b->bytes);
    }
    return wrong;
}

const char *mirror_up(mirror *m)
{
    if (m->exact) return up_exact(m);
    m->staging = malloc(m->bytes);
    m->device = device_alloc(m->bytes);
    if (!m->staging) return "not enough memory";
    if (!m->device) return "not enough memory on the device";
    memset(m->staging, SENTINEL, m->bytes);
    for (int i = 0; i < m->count; i++) {
        mirror_block *b = &m->block[i];
        b->device = m->device + b->offset;
        if (b->host)
            memcpy(m->staging + b->offset, b->host, b->bytes);
        else
            memset(m->staging + b->offset, UNTOUCHED, b->bytes);
    }
    return device_put(m->device, m->staging, m->bytes);
}

static int intact(const char *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)p[i] != SENTINEL) return 0;
    return 1;
}

/* Constants may lie where the host must not write: only what has changed is written. */
static const char *fetch(const mirror_block *b)
{
    char *copy = malloc(b->bytes);
    const char *wrong = copy ? device_get(copy, b->device, b->bytes) : "not enough memory";
    if (!wrong && memcmp(b->host, copy, b->bytes)) memcpy(b->host, copy, b->bytes);
    free(copy);
    return wrong;
}

const char *mirror_down(mirror *m)
{
    const char *wrong = m->exact ? NULL : device_get(m->staging, m->device, m->bytes), *beside = NULL;
    for (int i = 0; i < m->count && !wrong; i++) {
        mirror_block *b = &m->block[i];
        if (m->exact) {
            if (b->host && b->bytes) wrong = fetch(b);
            continue;
        }
        const char *data = m->staging + b->offset;
        if (b->host && memcmp(b->host, data, b->bytes)) memcpy(b->host, data, b->bytes);
        if (!beside && (!intact(data - EDGE, EDGE) || !intact(data + b->bytes, EDGE))) beside = b->name;
    }
    if (wrong || !beside) return wrong;
    snprintf(m->text, sizeof m->text, "memory around %s was written on the device", beside);
    return m->text;
}

void *mirror_at(const mirror *m, const void *host)
{
    for (int i = 0; i < m->count; i++) {
        const mirror_block *b = &m->block[i];
        if (b->host && (const char *)host >= b->host && (const char *)host < b->host + b->bytes)
            return b->device + ((const char *)host - b->host);
    }
    return NULL;
}
