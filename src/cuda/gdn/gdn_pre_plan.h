/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes in front of the gated delta rule. Plain arithmetic, no CUDA. */
#ifndef WEFT_CUDA_GDN_PRE_PLAN_H
#define WEFT_CUDA_GDN_PRE_PLAN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Lanes of a team: the power of two that holds a head of `dim` channels, `vec` to a lane; 0 where a warp does not. */
int32_t weft_gdn_team(int64_t dim, int32_t vec);

/* Tokens that a warp walks over, and how many such ranges there are. */
typedef struct weft_gdn_ranges {
    int64_t tokens, count;
} weft_gdn_ranges;

enum { WEFT_GDN_PIECES = 8 }; /* backward: a range is that of a block, whose warps have a piece each */

/* Forward: nothing is summed over tokens, so ranges may be as short as it takes to fill the machine. */
weft_gdn_ranges weft_gdn_fwd_ranges(int64_t tokens, int64_t warps, int32_t sms);
/* Backward: parameter gradients are summed range by range, so the number must not depend on the machine. */
weft_gdn_ranges weft_gdn_bwd_ranges(int64_t tokens, int64_t channels);

/* Decoding: up to so many requests every warp compares all indices with its own; of more, a launch in front does so for all
 * heads. */
enum { WEFT_GDN_SEARCHED = 512 };

/* Decoding: groups of sequences, each of which the same warps go through one by one. */
int64_t weft_gdn_step_groups(int64_t sequences, int64_t warps, int32_t sms);

#ifdef __cplusplus
}
#endif
#endif
