/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads safetensors files: an 8-byte little-endian header length, a JSON header, the tensors' bytes. Strict: what
 * the header says must agree with itself and with the size of the file before anything is handed out, so a caller
 * only has to ask whether a tensor has the shape and dtype it wants. Needs no other parts of the program than
 * json.h, files.h and checksum.h. */
#ifndef WEFT_CLI_SAFETENSORS_H
#define WEFT_CLI_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#define SAFETENSORS_MAX_DIMS 8

typedef enum safetensors_dtype {
    SAFETENSORS_BOOL,
    SAFETENSORS_U8,
    SAFETENSORS_I8,
    SAFETENSORS_F8_E5M2,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_I16,
    SAFETENSORS_U16,
    SAFETENSORS_F16,
    SAFETENSORS_BF16,
    SAFETENSORS_I32,
    SAFETENSORS_U32,
    SAFETENSORS_F32,
    SAFETENSORS_F64,
    SAFETENSORS_I64,
    SAFETENSORS_U64,
    SAFETENSORS_DTYPE_COUNT
} safetensors_dtype;

typedef struct safetensors_tensor {
    const char *name;
    safetensors_dtype dtype;
    int32_t ndim;
    int64_t shape[SAFETENSORS_MAX_DIMS];
    int64_t count;    /* elements */
    const void *data; /* not necessarily aligned to its element: the format does not promise it */
    size_t bytes;
    size_t begin; /* offset of data after the header */
} safetensors_tensor;

typedef struct safetensors_pair {
    const char *key, *value;
} safetensors_pair;

typedef struct safetensors {
    size_t num_tensors, num_metadata;
    safetensors_tensor *tensors; /* in the order of their names, as strcmp sees them */
    safetensors_pair *metadata;  /* in the order of their keys */
    char error[256];             /* the reason where a function returned 0 */
    char *strings;               /* owned: all names, keys and values */
    void *bytes;                 /* owned by safetensors_open; NULL after safetensors_parse */
    int verified;                /* the file has a checksum in SAFETENSORS_CHECKSUM's place, and it is right */
} safetensors;

/* How the header of a file with a checksum begins; the CRC-32C of the file follows as eight hexadecimal digits. They count as
 * zeros in the checksum. For other readers it is an entry of the metadata like any other. */
#define SAFETENSORS_CHECKSUM "{\"__metadata__\":{\"crc32c\":\""
enum { SAFETENSORS_CHECKSUM_AT = 8 + sizeof SAFETENSORS_CHECKSUM - 1, SAFETENSORS_CHECKSUM_DIGITS = 8 };

/* Both return 1, or 0 with the reason in file->error; a checksum that is wrong is one. safetensors_close must follow either
 * and may be repeated. */
int safetensors_open(safetensors *file, const char *path);
/* The bytes stay the caller's and must outlive `file`. */
int safetensors_parse(safetensors *file, const void *bytes, size_t size);
void safetensors_close(safetensors *file);

/* NULL where there is none of that name. */
const safetensors_tensor *safetensors_find(const safetensors *file, const char *name);
const char *safetensors_metadata(const safetensors *file, const char *key);

const char *safetensors_dtype_name(safetensors_dtype dtype);
size_t safetensors_dtype_size(safetensors_dtype dtype);

#endif
