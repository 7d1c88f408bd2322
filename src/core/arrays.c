/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arrays.h"

#include <string.h>

static uint64_t bytes_of(const weft_array *a)
{
    return a->data && a->count > 0 ? (uint64_t)a->count * a->element : 0;
}

static bool shared(const weft_array *a, const weft_array *b)
{
    const uint64_t at = (uintptr_t)a->data, bt = (uintptr_t)b->data;
    return bytes_of(a) && bytes_of(b) && at < bt + bytes_of(b) && bt < at + bytes_of(a);
}

static bool in_place(const weft_array *a, const weft_array *b)
{
    return a->over && strcmp(a->over, b->name) == 0 && a->data == b->data && bytes_of(a) == bytes_of(b);
}

weft_status weft_check_arrays(const char *call, const weft_array *arrays, int count)
{
    for (const weft_array *a = arrays; a < arrays + count; a++) {
        if (bytes_of(a) && (uintptr_t)a->data % a->element)
            return weft_fail(WEFT_ERR_ARGUMENT,
                             "%s: %s: expected a pointer aligned to its %d-byte elements, got %p", call, a->name,
                             (int)a->element, a->data);
        for (const weft_array *b = arrays; b < arrays + count && a->out; b++)
            if (a != b && shared(a, b) && !in_place(a, b) && !in_place(b, a))
                return weft_fail(WEFT_ERR_OVERLAP, "%s: %s: expected memory of its own, got memory shared with %s",
                                 call, a->name, b->name);
    }
    return WEFT_OK;
}
