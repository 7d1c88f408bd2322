/* SPDX-License-Identifier: Apache-2.0
 *
 * `gdn_pre_step` [G4] as arguments of the forward it is. */
#ifndef WEFT_CORE_GDN_PARTS_H
#define WEFT_CORE_GDN_PARTS_H

#include "core/kernel.h"

/* Decoding is forward with the states in rows of a cache, which state_index tells. */
static inline weft_gdn_pre_fwd_args weft_gdn_step_as_fwd(const weft_gdn_pre_step_args *s)
{
    return (weft_gdn_pre_fwd_args){.options = s->options,
                                   .q = s->q,
                                   .k = s->k,
                                   .v = s->v,
                                   .z = s->z,
                                   .b = s->b,
                                   .a = s->a,
                                   .weight = s->weight,
                                   .bias = s->bias,
                                   .a_log = s->a_log,
                                   .dt_bias = s->dt_bias,
                                   .cu_seqlens = s->cu_seqlens,
                                   .state = s->state,
                                   .query = s->query,
                                   .key = s->key,
                                   .value = s->value,
                                   .gate = s->gate,
                                   .beta = s->beta,
                                   .g = s->g,
                                   .final_state = s->new_state};
}

#endif
