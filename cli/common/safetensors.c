/* SPDX-License-Identifier: Apache-2.0 */
#include "common/safetensors.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/checksum.h"
#include "common/files.h"
#include "common/json.h"

/* As the format's own implementation: a longer header is a mistake or an attack. */
#define MAX_HEADER 100000000

static const struct {
    const char *name;
    size_t size;
} dtypes[SAFETENSORS_DTYPE_COUNT] = {
    [SAFETENSORS_BOOL] = {"BOOL", 1},       [SAFETENSORS_U8] = {"U8", 1},
    [SAFETENSORS_I8] = {"I8", 1},           [SAFETENSORS_F8_E5M2] = {"F8_E5M2", 1},
    [SAFETENSORS_F8_E4M3] = {"F8_E4M3", 1}, [SAFETENSORS_I16] = {"I16", 2},
    [SAFETENSORS_U16] = {"U16", 2},         [SAFETENSORS_F16] = {"F16", 2},
    [SAFETENSORS_BF16] = {"BF16", 2},       [SAFETENSORS_I32] = {"I32", 4},
    [SAFETENSORS_U32] = {"U32", 4},         [SAFETENSORS_F32] = {"F32", 4},
    [SAFETENSORS_F64] = {"F64", 8},         [SAFETENSORS_I64] = {"I64", 8},
    [SAFETENSORS_U64] = {"U64", 8},
};

const char *safetensors_dtype_name(safetensors_dtype dtype)
{
    return dtypes[dtype].name;
}

size_t safetensors_dtype_size(safetensors_dtype dtype)
{
    return dtypes[dtype].size;
}

__attribute__((format(printf, 2, 3))) static int fail(safetensors *file, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(file->error, sizeof file->error, format, list);
    va_end(list);
    return 0;
}

/* Lists grow with what has been read, so a file cannot ask for more memory than a few times its own header. */
static void *grow(void *list, size_t count, size_t item)
{
    if (count & (count - 1)) return list; /* powers of two are when it is full */
    return realloc(list, (count ? count * 2 : 1) * item);
}

static int parse_dtype(json *j, char *scratch, safetensors_dtype *dtype)
{
    size_t length;
    if (!json_string(j, scratch, &length)) return 0;
    for (int i = 0; i < SAFETENSORS_DTYPE_COUNT; i++)
        if (!strcmp(scratch, dtypes[i].name)) {
            *dtype = (safetensors_dtype)i;
            return 1;
        }
    return json_fail(j, "unknown dtype '%.20s'", scratch);
}

/* [1, 2, 3] into at most max values. */
static int parse_integers(json *j, int64_t *values, int32_t max, int32_t *count)
{
    *count = 0;
    if (!json_take(j, '[')) return 0;
    if (json_peek(j) == ']') return json_take(j, ']');
    for (;;) {
        if (*count == max) return json_fail(j, "a list of more than %d numbers", (int)max);
        if (!json_integer(j, &values[(*count)++])) return 0;
        if (json_peek(j) == ']') return json_take(j, ']');
        if (!json_take(j, ',')) return 0;
    }
}

/* {"dtype": .., "shape": .., "data_offsets": ..} in any order, each once, nothing else. */
static int parse_tensor(json *j, char *scratch, safetensors_tensor *t)
{
    static const char *const keys[] = {"dtype", "shape", "data_offsets"};
    int64_t offsets[2];
    int32_t num_offsets;
    int seen = 0;
    if (!json_take(j, '{')) return 0;
    do {
        size_t length;
        int key = 0;
        if (!json_string(j, scratch, &length)) return 0;
        while (key < 3 && strcmp(scratch, keys[key])) key++;
        if (key == 3) return json_fail(j, "unknown field '%.20s' of a tensor", scratch);
        if (seen & 1 << key) return json_fail(j, "field '%s' twice", keys[key]);
        seen |= 1 << key;
        if (!json_take(j, ':')) return 0;
        if (key == 0 && !parse_dtype(j, scratch, &t->dtype)) return 0;
        if (key == 1 && !parse_integers(j, t->shape, SAFETENSORS_MAX_DIMS, &t->ndim)) return 0;
        if (key == 2) {
            if (!parse_integers(j, offsets, 2, &num_offsets)) return 0;
            if (num_offsets != 2) return json_fail(j, "data_offsets needs two numbers");
        }
    } while (json_peek(j) == ',' && json_take(j, ','));
    if (!json_take(j, '}')) return 0;
    for (int key = 0; key < 3; key++)
        if (!(seen & 1 << key)) return json_fail(j, "a tensor without '%s'", keys[key]);
    if (offsets[1] < offsets[0]) return json_fail(j, "data_offsets end before they begin");
    t->begin = (size_t)offsets[0];
    t->bytes = (size_t)(offsets[1] - offsets[0]);
    return 1;
}

/* {"key": "value", ...} */
static int parse_metadata(safetensors *file, json *j, char **strings)
{
    if (!json_take(j, '{')) return 0;
    if (json_peek(j) == '}') return json_take(j, '}');
    do {
        safetensors_pair *list = grow(file->metadata, file->num_metadata, sizeof *list);
        if (!list) return json_fail(j, "out of memory");
        file->metadata = list;
        size_t length;
        list[file->num_metadata].key = *strings;
        if (!json_string(j, *strings, &length) || !json_take(j, ':')) return 0;
        *strings += length + 1;
        list[file->num_metadata].value = *strings;
        if (!json_string(j, *strings, &length)) return 0;
        *strings += length + 1;
        file->num_metadata++;
    } while (json_peek(j) == ',' && json_take(j, ','));
    return json_take(j, '}');
}

static int parse_header(safetensors *file, json *j)
{
    char *strings = file->strings;
    int metadata_seen = 0;
    if (!json_take(j, '{')) return 0;
    if (json_peek(j) != '}') do {
            size_t length;
            if (!json_string(j, strings, &length) || !json_take(j, ':')) return 0;
            if (!strcmp(strings, "__metadata__")) {
                if (metadata_seen++) return json_fail(j, "__metadata__ twice");
                if (!parse_metadata(file, j, &strings)) return 0;
                continue;
            }
            safetensors_tensor *list = grow(file->tensors, file->num_tensors, sizeof *list);
            if (!list) return json_fail(j, "out of memory");
            file->tensors = list;
            safetensors_tensor *t = &list[file->num_tensors];
            memset(t, 0, sizeof *t);
            t->name = strings;
            strings += length + 1;
            /* The fields' own strings are not kept: they are decoded where the next name will go. */
            if (!parse_tensor(j, strings, t)) return 0;
            file->num_tensors++;
        } while (json_peek(j) == ',' && json_take(j, ','));
    if (!json_take(j, '}')) return 0;
    if (json_peek(j) || j->at != j->end) return json_fail(j, "something follows the header's object");
    return 1;
}

static int by_begin(const void *a, const void *b)
{
    const safetensors_tensor *s = a, *t = b;
    if (s->begin != t->begin) return s->begin < t->begin ? -1 : 1;
    return s->bytes < t->bytes ? -1 : s->bytes > t->bytes;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const safetensors_tensor *)a)->name, ((const safetensors_tensor *)b)->name);
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const safetensors_pair *)a)->key, ((const safetensors_pair *)b)->key);
}

/* Shape, dtype and offsets must say the same, and the tensors must fill the data exactly, without gap or
 * overlap. */
static int check_tensors(safetensors *file, const unsigned char *data, size_t size)
{
    size_t expected = 0;
    if (file->num_tensors) qsort(file->tensors, file->num_tensors, sizeof *file->tensors, by_begin);
    for (size_t i = 0; i < file->num_tensors; i++) {
        safetensors_tensor *t = &file->tensors[i];
        if (t->begin > size || t->bytes > size - t->begin)
            return fail(file, "tensor '%.60s' ends at byte %zu of the data, the file has %zu: truncated?", t->name,
                        t->begin + t->bytes, size);
        /* A product with a zero in it is zero, however large the other sizes are. */
        int64_t count = 1;
        for (int d = 0; d < t->ndim; d++)
            if (t->shape[d] == 0) count = 0;
        for (int d = 0; d < t->ndim && count; d++) {
            if (count > INT64_MAX / 8 / t->shape[d]) return fail(file, "tensor '%.60s' is too large", t->name);
            count *= t->shape[d];
        }
        t->count = count;
        if ((uint64_t)count * dtypes[t->dtype].size != t->bytes)
            return fail(file, "tensor '%.60s': %lld elements of %s do not fill the %zu bytes of its data_offsets",
                        t->name, (long long)count, dtypes[t->dtype].name, t->bytes);
        if (t->begin != expected)
            return fail(file, "tensor '%.60s' begins at byte %zu of the data, expected %zu: %s", t->name, t->begin,
                        expected, t->begin < expected ? "tensors overlap" : "a gap between tensors");
        expected = t->begin + t->bytes;
        t->data = data + t->begin;
    }
    if (expected != size)
        return fail(file, "the tensors end at byte %zu of the data, the file has %zu", expected, size);

    if (file->num_tensors) qsort(file->tensors, file->num_tensors, sizeof *file->tensors, by_name);
    for (size_t i = 1; i < file->num_tensors; i++)
        if (!strcmp(file->tensors[i - 1].name, file->tensors[i].name))
            return fail(file, "tensor '%.60s' twice", file->tensors[i].name);
    if (file->num_metadata) qsort(file->metadata, file->num_metadata, sizeof *file->metadata, by_key);
    for (size_t i = 1; i < file->num_metadata; i++)
        if (!strcmp(file->metadata[i - 1].key, file->metadata[i].key))
            return fail(file, "metadata '%.60s' twice", file->metadata[i].key);
    return 1;
}

static int check_checksum(safetensors *file, const unsigned char *bytes, size_t header, size_t size)
{
    const size_t at = SAFETENSORS_CHECKSUM_AT, digits = SAFETENSORS_CHECKSUM_DIGITS;
    char expected[16];
    if (8 + header < at + digits || memcmp(bytes + 8, SAFETENSORS_CHECKSUM, at - 8) != 0) return 1;
    uint32_t sum = checksum_crc32c(0, bytes, at);
    sum = checksum_crc32c(sum, "00000000", digits);
    sum = checksum_crc32c(sum, bytes + at + digits, size - at - digits);
    snprintf(expected, sizeof expected, "%08x", (unsigned)sum);
    if (memcmp(bytes + at, expected, digits) != 0)
        return fail(file, "damaged: its checksum is %.8s, its content has %s", (const char *)bytes + at, expected);
    file->verified = 1;
    return 1;
}

int safetensors_parse(safetensors *file, const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    uint64_t length = 0;
    memset(file, 0, sizeof *file);
    if (size < 8) return fail(file, "%zu bytes are too few for a safetensors file", size);
    for (int i = 7; i >= 0; i--) length = length << 8 | at[i];
    if (length > MAX_HEADER)
        return fail(file, "a header of %llu bytes: not a safetensors file", (unsigned long long)length);
    if (length > size - 8)
        return fail(file, "a header of %llu bytes in a file of %zu: truncated?", (unsigned long long)length, size);

    json j = {.begin = at + 8, .at = at + 8, .end = at + 8 + length};
    file->strings = malloc((size_t)length + 1);
    if (!file->strings) return fail(file, "out of memory");
    if (!parse_header(file, &j)) return fail(file, "%s", j.error);
    return check_tensors(file, at + 8 + length, size - 8 - (size_t)length) &&
           check_checksum(file, at, (size_t)length, size);
}

int safetensors_open(safetensors *file, const char *path)
{
    size_t size;
    memset(file, 0, sizeof *file);
    void *bytes = files_read(path, SIZE_MAX - 1, &size, file->error, sizeof file->error);
    if (!bytes) return 0;
    int ok = safetensors_parse(file, bytes, size);
    file->bytes = bytes;
    return ok;
}

void safetensors_close(safetensors *file)
{
    free(file->tensors);
    free(file->metadata);
    free(file->strings);
    free(file->bytes);
    memset(file, 0, sizeof *file);
}

const safetensors_tensor *safetensors_find(const safetensors *file, const char *name)
{
    safetensors_tensor key = {.name = name};
    return file->num_tensors ? bsearch(&key, file->tensors, file->num_tensors, sizeof key, by_name) : NULL;
}

const char *safetensors_metadata(const safetensors *file, const char *key)
{
    safetensors_pair wanted = {.key = key};
    const safetensors_pair *found =
        file->num_metadata ? bsearch(&wanted, file->metadata, file->num_metadata, sizeof wanted, by_key) : NULL;
    return found ? found->value : NULL;
}
