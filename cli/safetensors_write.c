/* SPDX-License-Identifier: Apache-2.0 */
#include "safetensors_write.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"

/* A header that grows; nothing more is written once memory has run out. */
typedef struct text {
    char *bytes;
    size_t size, room;
    int failed;
} text;

static void put(text *t, const char *bytes, size_t size)
{
    if (t->failed) return;
    if (t->size + size + 1 > t->room) {
        size_t room = (t->size + size + 1) * 2;
        char *more = realloc(t->bytes, room);
        if (!more) {
            t->failed = 1;
            return;
        }
        t->bytes = more;
        t->room = room;
    }
    memcpy(t->bytes + t->size, bytes, size);
    t->size += size;
}

static void put_text(text *t, const char *s)
{
    put(t, s, strlen(s));
}

static void put_string(text *t, const char *s)
{
    put(t, "\"", 1);
    for (; *s; s++) {
        char escape[8];
        if (*s == '"' || *s == '\\')
            put(t, (char[]){'\\', *s}, 2);
        else if ((unsigned char)*s < 0x20) {
            snprintf(escape, sizeof escape, "\\u%04x", (unsigned)*s);
            put_text(t, escape);
        } else
            put(t, s, 1);
    }
    put(t, "\"", 1);
}

static void put_tensor(text *t, const safetensors_tensor *tensor, size_t begin)
{
    char number[48];
    put_string(t, tensor->name);
    put_text(t, ":{\"dtype\":");
    put_string(t, safetensors_dtype_name(tensor->dtype));
    put_text(t, ",\"shape\":[");
    for (int d = 0; d < tensor->ndim; d++) {
        snprintf(number, sizeof number, "%s%lld", d ? "," : "", (long long)tensor->shape[d]);
        put_text(t, number);
    }
    snprintf(number, sizeof number, "],\"data_offsets\":[%zu,%zu]}", begin, begin + tensor->bytes);
    put_text(t, number);
}

static text header_of(const safetensors_tensor *tensors, size_t num_tensors, const safetensors_pair *metadata,
                      size_t num_metadata)
{
    text t = {0};
    size_t begin = 0;
    put_text(&t, "{\"__metadata__\":{");
    for (size_t i = 0; i < num_metadata; i++) {
        if (i) put(&t, ",", 1);
        put_string(&t, metadata[i].key);
        put(&t, ":", 1);
        put_string(&t, metadata[i].value);
    }
    put(&t, "}", 1);
    for (size_t i = 0; i < num_tensors; i++) {
        put(&t, ",", 1);
        put_tensor(&t, &tensors[i], begin);
        begin += tensors[i].bytes;
    }
    put(&t, "}", 1);
    while (t.size % 8) put(&t, " ", 1); /* so that tensors begin aligned */
    return t;
}

int safetensors_write(const char *path, const safetensors_tensor *tensors, size_t num_tensors,
                      const safetensors_pair *metadata, size_t num_metadata, char *error, size_t size)
{
    text header = header_of(tensors, num_tensors, metadata, num_metadata);
    unsigned char length[8];
    FILE *file = header.failed ? NULL : files_create(path);
    int ok = file != NULL;
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)header.size >> 8 * i);
    ok = ok && fwrite(length, 1, 8, file) == 8 && fwrite(header.bytes, 1, header.size, file) == header.size;
    for (size_t i = 0; ok && i < num_tensors; i++)
        ok = fwrite(tensors[i].data, 1, tensors[i].bytes, file) == tensors[i].bytes;
    ok = ok && fflush(file) == 0 && fsync(fileno(file)) == 0;
    if (!ok) snprintf(error, size, "%s: %s", path, header.failed ? "out of memory" : strerror(errno));
    if (file && fclose(file) && ok) {
        ok = 0;
        snprintf(error, size, "%s: %s", path, strerror(errno));
    }
    if (file && !ok) remove(path);
    free(header.bytes);
    return ok;
}
