/* SPDX-License-Identifier: Apache-2.0
 *
 * Plain arrays, which the model and the optimisers take instead of tensors: alignment and overlap. */
#ifndef WEFT_CORE_ARRAYS_H
#define WEFT_CORE_ARRAYS_H

#include <stdbool.h>

#include "core/status.h"

/* A dense array of `count` elements; not looked at where it is NULL or has none. */
typedef struct weft_array {
    const char *name;
    const void *data;
    int64_t count;
    size_t element; /* bytes, and what the address is a multiple of */
    bool out;
    const char *over; /* array whose very memory this output may use, or NULL */
} weft_array;
/* All aligned, and no output shares memory with another. */
weft_status weft_check_arrays(const char *call, const weft_array *arrays, int count);

#endif
