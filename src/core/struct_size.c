/* SPDX-License-Identifier: Apache-2.0
 *
 * Which sizes of a struct may be passed. */
#include "core/struct_size.h"

#include <stddef.h>
#include <stdio.h>

#include <weft/gdn.h>

/* precision and trust_pointers, which are zero in most calls, may be missing. */
const weft_sizes weft_exec_sizes = {offsetof(weft_exec, precision), sizeof(weft_exec), "WEFT_EXEC"};
const weft_sizes weft_replay_layer_sizes = {sizeof(weft_mhc_replay_layer), sizeof(weft_mhc_replay_layer),
                                            "WEFT_STRUCT"};

/* Lie by value inside other structs: a new field is made of reserved ones, and the size stays. */
#define PINNED(type, bytes)                                                                                        \
    _Static_assert(sizeof(void *) != 8 || sizeof(type) == (bytes),                                                 \
                   #type " has a fixed size: use its reserved fields")
PINNED(weft_tensor, 80);
PINNED(weft_grad, 88);
PINNED(weft_mhc_numerics, 104);
PINNED(weft_dropout, 96);
PINNED(weft_gdn_options, 96);
#undef PINNED

weft_status weft_check_size(const char *call, const char *prefix, const weft_sizes *sizes, size_t size)
{
    if (size < sizes->first)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %sstruct_size: expected at least %zu (use %s), got %zu", call,
                         prefix, sizes->first, sizes->macro, size);
    if (size > sizes->now + 65536 || size % sizeof size)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %sstruct_size: expected %zu (use %s), got %zu", call, prefix,
                         sizes->now, sizes->macro, size);
    return WEFT_OK;
}

weft_status weft_check_struct(const char *call, const char *prefix, const weft_sizes *sizes, const void *given)
{
    size_t size;
    memcpy(&size, given, sizeof size);
    WEFT_TRY(weft_check_size(call, prefix, sizes, size));
    for (size_t i = sizes->now; i < size; i++)
        if (((const unsigned char *)given)[i])
            return weft_fail(
                WEFT_ERR_UNSUPPORTED,
                "%s: %sstruct_size: expected %zu, got %zu with a field set that this version does not know", call,
                prefix, sizes->now, size);
    return WEFT_OK;
}

weft_status weft_check_replay_layers(const char *call, const weft_mhc_replay_layer *layers, int32_t count)
{
    const size_t size = layers->struct_size;
    for (int32_t l = 0; l < count; l++) {
        char prefix[32];
        const char *at = (const char *)layers + (size_t)l * size;
        size_t own;
        memcpy(&own, at, sizeof own);
        if (own == size && size == weft_replay_layer_sizes.now) continue;
        snprintf(prefix, sizeof prefix, "layers[%d].", (int)l);
        if (own != size)
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: %sstruct_size: expected %zu like layers[0], got %zu", call,
                             prefix, size, own);
        WEFT_TRY(weft_check_struct(call, prefix, &weft_replay_layer_sizes, at));
    }
    return WEFT_OK;
}
