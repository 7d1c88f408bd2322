/* SPDX-License-Identifier: Apache-2.0
 *
 * Recompute plan: which streams a training step keeps, and how the others come back.
 *
 * A model of `layers` layers has two sites a layer, attention and MLP: site s = 2 * layer + (0 or 1). Each site has an input
 * x_s [T, n, C], a sub-layer input v_s [T, C] behind the norm, and an output y_s = x_{s+1}. Without recompute all of them
 * stay until backward. With it, layers form groups of `group`; a group's first input stays (resident), everything between
 * shares one group's memory (transient) that the next group overwrites, and before a group's backward weft_plan_replay
 * rebuilds it by one mhc_replay call, in forward order and bit for bit. Coefficients and sub-layer outputs are the caller's
 * and are kept: they are small, and the replay needs them.
 *
 * The plan is host metadata in a struct of the caller's; its memory is the caller's too, in the backend's space.
 *
 *     state of a group:  idle -> open (forward) -> discarded (close) -> restored (replay) -> idle (release)
 *
 * A call out of this order is WEFT_ERR_STATE. Without recompute close and replay do nothing and the order is the same. */
#ifndef WEFT_PLAN_H
#define WEFT_PLAN_H

#include <weft/mhc.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_PLAN_MAX_LAYERS 256

typedef struct weft_plan_desc {
    size_t struct_size;
    int32_t layers;    /* 1 .. WEFT_PLAN_MAX_LAYERS */
    int32_t recompute; /* 0: everything stays, the same calls */
    int32_t group;  /* layers per group, 1 .. layers; 0: one group of all layers. The last group may be shorter */
    int32_t poison; /* 1: discarded memory is filled with NaN, so a stale read shows */
    int64_t tokens, streams,
        channels; /* 0 .. 2^32, 1 .. WEFT_MAX_STREAMS, 1 .. 2^24; their product is at most 2^48 */
    weft_dtype dtype;
} weft_plan_desc;

typedef struct weft_plan_bytes {
    size_t resident;  /* survives from forward to backward: group inputs and the last output */
    size_t transient; /* one group's streams and sub-layer inputs */
    size_t total;     /* to ask for */
    size_t keep_all;  /* what total would be without recompute */
    size_t reserved[4];
} weft_plan_bytes;

typedef enum weft_plan_state {
    WEFT_PLAN_IDLE = 0,
    WEFT_PLAN_OPEN,
    WEFT_PLAN_DISCARDED,
    WEFT_PLAN_RESTORED
} weft_plan_state;

/* Read-only for everybody but the functions below. desc lies in front of the reserved bytes, so that it can grow too. */
typedef struct weft_plan {
    char *resident, *transient;
    int32_t groups, layers_per_group;
    unsigned char state[WEFT_PLAN_MAX_LAYERS];
    weft_plan_desc desc;
    uint64_t reserved[16];
} weft_plan;

/* Where a site's tensors are: x, y [T, n, C], v [T, C]. Frozen. */
typedef struct weft_plan_site {
    weft_tensor x, v, y;
} weft_plan_site;

WEFT_API weft_status weft_plan_query(const weft_plan_desc *desc, weft_plan_bytes *bytes);
/* Layers per group with the smallest total: scans all of them. 0 where an argument is out of range. */
WEFT_API int32_t weft_plan_best_group(int32_t layers, int64_t streams);

/* memory: bytes.total of it, aligned to 64 bytes. */
WEFT_API weft_status weft_plan_open(const weft_plan_desc *desc, void *memory, size_t bytes, weft_plan *plan);
/* -1 where there is no such layer. */
WEFT_API int32_t weft_plan_group_of(const weft_plan *plan, int32_t layer);
/* 1 where this layer is the last of its group. */
WEFT_API int32_t weft_plan_ends_group(const weft_plan *plan, int32_t layer);

/* A new forward pass: every group is idle again. */
WEFT_API weft_status weft_plan_begin(weft_plan *plan);
/* In forward, opens the group; in backward the group must be restored. */
WEFT_API weft_status weft_plan_site_at(weft_plan *plan, int32_t site, weft_plan_site *to);
/* The streams behind the last site, which stay until backward. */
WEFT_API weft_tensor weft_plan_output(const weft_plan *plan);
/* End of a group's forward: its transient memory is given up. A second call does nothing. */
WEFT_API weft_status weft_plan_close(weft_plan *plan, const weft_exec *exec, int32_t group);

/* layers: an array as in weft_mhc_replay_fwd_args, one entry per site of the group, in forward order, with the coefficients, f, bias, dropout and norm of that
 * site; their u is left as it is, v and y are filled in here, and the last entry's f, post, res are ignored, because its
 * y is resident. A second call does nothing. */
typedef struct weft_plan_replay_args {
    size_t struct_size;
    int32_t group;
    weft_mhc_numerics numerics;
    weft_mhc_replay_layer *layers;
    int32_t num_layers;
} weft_plan_replay_args;
WEFT_API weft_status weft_plan_replay(weft_plan *plan, const weft_exec *exec, const weft_plan_replay_args *args);
WEFT_API weft_status weft_plan_replay_workspace(const weft_plan *plan, const weft_exec *exec,
                                                const weft_plan_replay_args *args, size_t *bytes);
/* After a group's backward. */
WEFT_API weft_status weft_plan_release(weft_plan *plan, int32_t group);

#ifdef __cplusplus
}
#endif
#endif
