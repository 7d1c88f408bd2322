/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of DLPack's binary interface (major version 1) that the extension needs to look at a tensor: the borrowed
 * view of a tensor and the table of C functions that a framework hangs on its tensor type as
 * `__dlpack_c_exchange_api__`. Frameworks that publish it are read without a Python call and without compiling against
 * them. */
#ifndef WEFT_PYTHON_DLPACK_H
#define WEFT_PYTHON_DLPACK_H

#include <stdint.h>

enum { DL_MAJOR = 1 };
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3 };
enum { DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4 };

typedef struct dl_device {
    int32_t type; /* an enum in the original */
    int32_t index;
} dl_device;

typedef struct dl_dtype {
    uint8_t code, bits;
    uint16_t lanes;
} dl_dtype;

typedef struct dl_tensor {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_header {
    uint32_t major, minor;
    struct dl_header *older;
} dl_header;

typedef struct dl_exchange {
    dl_header header;
    int (*allocate)(void); /* these three have arguments; nobody here calls them */
    int (*from_object)(void);
    int (*to_object)(void);
    /* Borrows: shape and strides live as long as the object. No stream is waited for. May be NULL. */
    int (*view)(void *object, dl_tensor *out);
    int (*stream)(int32_t device_type, int32_t device, void **out);
} dl_exchange;

#endif
