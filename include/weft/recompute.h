/* SPDX-License-Identifier: Apache-2.0
 *
 * Recompute: which streams a training step keeps, and how the others come back.
 *
 * A model of `layers` layers has two sites a layer, attention and MLP: site s = 2 * layer + (0 or 1). Each site has an input
 * x_s [T, n, C], a sub-layer input v_s [T, C] behind the norm, and an output y_s = x_{s+1}. Without recompute all of them
 * stay until backward. With it, layers form groups of `group`; a group's first input stays (resident), everything between
 * shares one group's memory (transient) that the next group overwrites, and before a group's backward weft_recompute_replay
 * rebuilds it by one mhc_replay call, in forward order and bit for bit. Coefficients and sub-layer outputs are the caller's
 * and are kept: they are small, and the replay needs them.
 *
 * weft_recompute is host metadata in a struct of the caller's; its memory is the caller's too, in the backend's space.
 *
 *     state of a group:  idle -> open (forward) -> discarded (close) -> restored (replay) -> idle (release)
 *
 * A call out of this order is WEFT_ERR_STATE. Without recompute close and replay do nothing and the order is the same. */
#ifndef WEFT_RECOMPUTE_H
#define WEFT_RECOMPUTE_H

#include <weft/mhc.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_RECOMPUTE_MAX_LAYERS 256

typedef struct weft_recompute_desc {
    size_t struct_size;
    int32_t layers;    /* 1 .. WEFT_RECOMPUTE_MAX_LAYERS */
    int32_t recompute; /* 0: everything stays, the same calls */
    int32_t group;  /* layers per group, 1 .. layers; 0: one group of all layers. The last group may be shorter */
    int32_t poison; /* 1: discarded memory is filled with NaN, so a stale read shows */
    int64_t tokens, streams,
        channels; /* 0 .. 2^32, 1 .. WEFT_MAX_STREAMS, 1 .. 2^24; their product is at most 2^48 */
    weft_dtype dtype;
} weft_recompute_desc;

typedef struct weft_recompute_bytes {
    size_t resident;  /* survives from forward to backward: group inputs and the last output */
    size_t transient; /* one group's streams and sub-layer inputs */
    size_t total;     /* to ask for */
    size_t keep_all;  /* what total would be without recompute */
    size_t reserved[4];
} weft_recompute_bytes;

typedef enum weft_recompute_state {
    WEFT_RECOMPUTE_IDLE = 0,
    WEFT_RECOMPUTE_OPEN,
    WEFT_RECOMPUTE_DISCARDED,
    WEFT_RECOMPUTE_RESTORED
} weft_recompute_state;

/* Read-only except for the functions below. desc lies in front of the reserved bytes, so that it can grow too. */
typedef struct weft_recompute {
    char *resident, *transient;
    int32_t groups, layers_per_group;
    unsigned char state[WEFT_RECOMPUTE_MAX_LAYERS];
    weft_recompute_desc desc;
    uint64_t reserved[16];
} weft_recompute;

/* Where a site's tensors are: x, y [T, n, C], v [T, C]. Frozen. */
typedef struct weft_recompute_site {
    weft_tensor x, v, y;
} weft_recompute_site;

WEFT_API weft_status weft_recompute_query(const weft_recompute_desc *desc, weft_recompute_bytes *bytes);
/* Layers per group with the smallest total: scans all of them. 0 where an argument is out of range. */
WEFT_API int32_t weft_recompute_best_group(int32_t layers, int64_t streams);

/* memory: bytes.total of it, aligned to 64 bytes. */
WEFT_API weft_status weft_recompute_open(const weft_recompute_desc *desc, void *memory, size_t bytes,
                                         weft_recompute *recompute);
/* -1 where there is no such layer. */
WEFT_API int32_t weft_recompute_group_of(const weft_recompute *recompute, int32_t layer);
/* 1 where this layer is the last of its group. */
WEFT_API int32_t weft_recompute_ends_group(const weft_recompute *recompute, int32_t layer);

/* A new forward pass: every group is idle again. */
WEFT_API weft_status weft_recompute_begin(weft_recompute *recompute);
/* In forward, opens the group; in backward the group must be restored. */
WEFT_API weft_status weft_recompute_site_at(weft_recompute *recompute, int32_t site, weft_recompute_site *to);
/* The streams after the last site, which stay until backward. */
WEFT_API weft_tensor weft_recompute_output(const weft_recompute *recompute);
/* End of a group's forward: its transient memory is given up. A second call does nothing. */
WEFT_API weft_status weft_recompute_close(weft_recompute *recompute, const weft_exec *exec, int32_t group);

/* layers: an array as in weft_mhc_replay_fwd_args, one entry per site of the group, in forward order, with the coefficients, f, bias, dropout and norm of that
 * site; their u is left as it is, v and y are filled in here, and the last entry's f, post, res are ignored, because its
 * y is resident. A second call does nothing. */
typedef struct weft_recompute_replay_args {
    size_t struct_size;
    int32_t group;
    weft_mhc_numerics numerics;
    weft_mhc_replay_layer *layers;
    int32_t num_layers;
} weft_recompute_replay_args;
WEFT_API weft_status weft_recompute_replay(weft_recompute *recompute, const weft_exec *exec,
                                           const weft_recompute_replay_args *args);
WEFT_API weft_status weft_recompute_replay_workspace(const weft_recompute *recompute, const weft_exec *exec,
                                                     const weft_recompute_replay_args *args, size_t *bytes);
/* After a group's backward. */
WEFT_API weft_status weft_recompute_release(weft_recompute *recompute, int32_t group);

#ifdef __cplusplus
}
#endif
#endif
