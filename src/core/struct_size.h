/* SPDX-License-Identifier: Apache-2.0
 *
 * Structs of callers, which begin with struct_size. A caller may have been compiled with an earlier or a later version: its
 * struct is completed with zeros, or taken as far as this version knows it. Code behind these functions meets the current
 * layout only. */
#ifndef WEFT_CORE_STRUCT_SIZE_H
#define WEFT_CORE_STRUCT_SIZE_H

#include <string.h>

#include <weft/mhc.h>

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sizes of a struct: the smallest one that callers pass, which never changes once it is published, and the current one. */
typedef struct weft_sizes {
    size_t first, now;
    const char *macro; /* that fills struct_size, for messages */
} weft_sizes;

extern const weft_sizes weft_exec_sizes, weft_replay_layer_sizes;
/* An initialiser, for structs that have not grown yet. */
#define WEFT_SIZES(type)                                                                                           \
    {                                                                                                              \
        sizeof(type), sizeof(type), "WEFT_ARGS"                                                                    \
    }

/* May a struct of this size be passed? `call` and `prefix` begin the message: "<call>: <prefix>struct_size:". */
weft_status weft_check_size(const char *call, const char *prefix, const weft_sizes *sizes, size_t size);
/* And is zero what this version does not know of it? */
weft_status weft_check_struct(const char *call, const char *prefix, const weft_sizes *sizes, const void *given);

/* The caller's struct where it has the current size, else `copy`, which becomes one that has. */
static inline weft_status weft_take_struct(const char *call, const char *prefix, const weft_sizes *sizes,
                                           const void *given, void *copy, const void **taken)
{
    size_t size;
    memcpy(&size, given, sizeof size);
    *taken = given;
    if (size == sizes->now) return WEFT_OK;
    WEFT_TRY(weft_check_struct(call, prefix, sizes, given));
    const size_t known = size < sizes->now ? size : sizes->now;
    memcpy(copy, given, known);
    memset((char *)copy + known, 0, sizes->now - known);
    memcpy(copy, &sizes->now, sizeof sizes->now);
    *taken = copy;
    return WEFT_OK;
}

static inline weft_status weft_take_exec(const char *call, const weft_exec *given, weft_exec *copy,
                                         const weft_exec **taken)
{
    const void *at;
    if (given == NULL) return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec: expected a pointer, got NULL", call);
    WEFT_TRY(weft_take_struct(call, "exec.", &weft_exec_sizes, given, copy, &at));
    *taken = (const weft_exec *)at;
    return WEFT_OK;
}

/* The layers of a replay: all have the size of the first, and it is one that may be passed. */
weft_status weft_check_replay_layers(const char *call, const weft_mhc_replay_layer *layers, int32_t count);

/* Layer l of layers that were checked; one that is smaller than the current layout is completed in `room`. */
static inline const weft_mhc_replay_layer *weft_replay_layer_at(const weft_mhc_replay_layer *layers, int32_t l,
                                                                weft_mhc_replay_layer *room)
{
    const size_t size = layers->struct_size;
    const char *at = (const char *)layers + (size_t)l * size;
    if (size >= sizeof *room) return (const weft_mhc_replay_layer *)(const void *)at;
    memcpy(room, at, size);
    memset((char *)room + size, 0, sizeof *room - size);
    return room;
}

#ifdef __cplusplus
}
#endif
#endif
