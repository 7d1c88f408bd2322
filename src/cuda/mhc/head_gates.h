/* SPDX-License-Identifier: Apache-2.0
 *
 * The gates of the learned head contraction [M9], for mhc_head.cu: what lies between its projection and its aggregate.
 * Tokens and streams are the call's. */
#ifndef WEFT_CUDA_HEAD_GATES_H
#define WEFT_CUDA_HEAD_GATES_H

#include "core/kernel.h"

/* gate [T, n] f32 from h [T, n], ms [T], alpha and beta. */
weft_status weft_cuda_head_gates_fwd(const weft_call *call, const weft_mhc_head_fwd_args *a, const weft_tensor *h,
                                     const weft_tensor *ms, const weft_tensor *gate);

/* Bytes of room that weft_cuda_head_gates_bwd needs, for partial sums of d_alpha and d_beta. */
size_t weft_cuda_head_gates_room(const weft_call *call, const weft_mhc_head_bwd_args *a);

/* From d_gate [T, n] f32 and the h and ms of a: gate_out [T, n] (the gates once more), d_h [T, n], d_ms [T], all f32,
 * overwritten, and each may be absent; d_alpha and d_beta of a. room: aligned to 64 bytes; NULL where its size is 0. */
weft_status weft_cuda_head_gates_bwd(const weft_call *call, const weft_mhc_head_bwd_args *a,
                                     const weft_tensor *d_gate, const weft_tensor *gate_out, const weft_tensor *d_h,
                                     const weft_tensor *d_ms, void *room);

#endif
