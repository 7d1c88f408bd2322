/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes in front of the gated delta rule. */
#include "cuda/gdn_pre_plan.h"

enum {
    WARP = 32,
    LONGEST = 128, /* forward: a range's first rows are read twice, which is 2% of this */
    SHORTEST = 4,
    WARPS_PER_SM = 24,    /* forward: a good part of them twice */
    NOMINAL_WARPS = 4096, /* backward: enough for any GPU there is */
    LONGEST_SUM = 512,
    SHORTEST_SUM = 16
};

int32_t weft_gdn_team(int64_t dim, int32_t vec)
{
    int32_t lanes = 1;
    while (lanes < WARP && lanes * (int64_t)vec < dim) lanes *= 2;
    return lanes * (int64_t)vec < dim ? 0 : lanes;
}

static weft_gdn_ranges ranges_of(int64_t tokens, int64_t warps, int64_t wanted, int64_t shortest, int64_t longest)
{
    weft_gdn_ranges r = {longest, 0};
    while (r.tokens > shortest && (tokens + r.tokens - 1) / r.tokens * warps < wanted) r.tokens /= 2;
    r.count = (tokens + r.tokens - 1) / r.tokens;
    return r;
}

weft_gdn_ranges weft_gdn_fwd_ranges(int64_t tokens, int64_t warps, int32_t sms)
{
    return ranges_of(tokens, warps, 3 * (int64_t)WARPS_PER_SM * sms, SHORTEST, LONGEST);
}

weft_gdn_ranges weft_gdn_bwd_ranges(int64_t tokens, int64_t warps)
{
    return ranges_of(tokens, warps, NOMINAL_WARPS, SHORTEST_SUM, LONGEST_SUM);
}
