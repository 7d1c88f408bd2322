/* SPDX-License-Identifier: Apache-2.0 */
#include "common/safetensors_write.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/checksum.h"
#include "common/files.h"
#include "common/json.h"

static void put_tensor(FILE *to, const safetensors_tensor *tensor, size_t begin)
{
    fputc(',', to);
    json_put_string(to, tensor->name);
    fprintf(to, ":{\"dtype\":\"%s\",\"shape\":[", safetensors_dtype_name(tensor->dtype));
    for (int d = 0; d < tensor->ndim; d++) fprintf(to, "%s%lld", d ? "," : "", (long long)tensor->shape[d]);
    fprintf(to, "],\"data_offsets\":[%zu,%zu]}", begin, begin + tensor->bytes);
}

/* The header with zeros as its checksum; NULL where there is no memory. */
static char *header_of(const safetensors_tensor *tensors, size_t num_tensors, const safetensors_pair *metadata,
                       size_t num_metadata, size_t *size)
{
    char *text = NULL;
    size_t begin = 0;
    FILE *to = open_memstream(&text, size);
    if (!to) return NULL;
    fputs(SAFETENSORS_CHECKSUM "00000000\"", to);
    for (size_t i = 0; i < num_metadata; i++) {
        fputc(',', to);
        json_put_string(to, metadata[i].key);
        fputc(':', to);
        json_put_string(to, metadata[i].value);
    }
    fputc('}', to);
    for (size_t i = 0; i < num_tensors; i++) {
        put_tensor(to, &tensors[i], begin);
        begin += tensors[i].bytes;
    }
    fputc('}', to);
    for (long length = ftell(to); length % 8; length++) fputc(' ', to); /* so that tensors begin aligned */
    int failed = ferror(to);
    if (!fclose(to) && !failed) return text;
    free(text);
    return NULL;
}

int safetensors_write(const char *path, const safetensors_tensor *tensors, size_t num_tensors,
                      const safetensors_pair *metadata, size_t num_metadata, char *error, size_t size)
{
    unsigned char length[8];
    char digits[SAFETENSORS_CHECKSUM_DIGITS + 1];
    size_t header_size = 0;
    char *header = header_of(tensors, num_tensors, metadata, num_metadata, &header_size);
    if (!header) {
        snprintf(error, size, "%s: out of memory", path);
        return 0;
    }
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)header_size >> 8 * i);
    uint32_t sum = checksum_crc32c(checksum_crc32c(0, length, 8), header, header_size);
    for (size_t i = 0; i < num_tensors; i++) sum = checksum_crc32c(sum, tensors[i].data, tensors[i].bytes);
    snprintf(digits, sizeof digits, "%08x", (unsigned)sum);
    memcpy(header + SAFETENSORS_CHECKSUM_AT - 8, digits, SAFETENSORS_CHECKSUM_DIGITS);

    FILE *file = files_create(path);
    int ok = file && fwrite(length, 1, 8, file) == 8 && fwrite(header, 1, header_size, file) == header_size;
    for (size_t i = 0; ok && i < num_tensors; i++)
        ok = fwrite(tensors[i].data, 1, tensors[i].bytes, file) == tensors[i].bytes;
    ok = ok && fflush(file) == 0 && fsync(fileno(file)) == 0;
    if (!ok) snprintf(error, size, "%s: %s", path, strerror(errno));
    if (file && fclose(file) && ok) {
        ok = 0;
        snprintf(error, size, "%s: %s", path, strerror(errno));
    }
    if (file && !ok) remove(path);
    free(header);
    return ok;
}
