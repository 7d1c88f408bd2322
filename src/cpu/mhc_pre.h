/* SPDX-License-Identifier: Apache-2.0
 *
 * The tiles of `pre` [M10] that `boundary` uses too. */
#ifndef WEFT_CPU_MHC_PRE_H
#define WEFT_CPU_MHC_PRE_H

#include "cpu/common/tiles.h"

/* Scratch of one thread: what a tile hands from one operator to the next where the caller does not want to see it. */
typedef struct cpu_pre_room {
    float *h, *ms, *pre, *d_pre, *du, *norm;
    char *u;
    vf *hist;
} cpu_pre_room;

typedef struct cpu_pre_fwd {
    cpu_psi psi;
    float *alpha, *beta, *sub_weight;
    char *rooms;
    int64_t room_bytes;
    bool stream;
} cpu_pre_fwd;

cpu_pre_fwd CPU(pre_fwd_take)(weft_arena *arena, const weft_call *call, const weft_mhc_pre_fwd_args *a);
void CPU(pre_fwd_pack)(const weft_call *call, const cpu_pre_fwd *p, const weft_mhc_pre_fwd_args *a);
/* Tokens t0 .. t1, at most TILE. */
void CPU(pre_fwd_tile)(const weft_call *call, const cpu_pre_fwd *p, const weft_mhc_pre_fwd_args *a, int64_t t0,
                       int64_t t1, int thread);

typedef struct cpu_pre_bwd {
    cpu_psi psi;
    cpu_dpsi dpsi;
    float *alpha, *beta, *sub_weight;
    float *dh, *dms; /* of a macro tile: [macro][rows], [macro] */
    cpu_sum gates, norm;
    char *rooms;
    int64_t room_bytes;
    bool stream;
} cpu_pre_bwd;

/* `d_x`: whether the gradient of x will be requested. */
cpu_pre_bwd CPU(pre_bwd_take)(weft_arena *arena, const weft_call *call, const weft_mhc_pre_bwd_args *a, bool d_x);
void CPU(pre_bwd_pack)(const weft_call *call, const cpu_pre_bwd *p, const weft_mhc_pre_bwd_args *a);
/* The arguments from token t0 on. */
weft_mhc_pre_bwd_args CPU(pre_bwd_from)(const weft_mhc_pre_bwd_args *a, int64_t t0);
/* The block of `tokens` tokens at the start of a, which lies `offset` tokens into the macro tile. base: what d_x is added to, if
 * not to itself. */
void CPU(pre_bwd_tile)(const weft_call *call, const cpu_pre_bwd *p, const weft_mhc_pre_bwd_args *a,
                       const weft_tensor *base, int64_t offset, int64_t tokens, int thread);
/* After the tiles of a macro tile: dpsi and the sums of `tokens` tokens; x from the macro tile's first token on. */
void CPU(pre_bwd_fold)(const weft_call *call, const cpu_pre_bwd *p, const weft_tensor *x, int64_t tokens);
void CPU(pre_bwd_finish)(const weft_call *call, const cpu_pre_bwd *p, const weft_mhc_pre_bwd_args *a);

#endif
