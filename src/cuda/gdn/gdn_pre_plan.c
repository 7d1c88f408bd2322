/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes in front of the gated delta rule. */
#include "cuda/gdn/gdn_pre_plan.h"

enum {
    WARP = 32,
    LONGEST = 32, /* forward: the rows in front of a range come from the L2 again, but long ranges end unevenly */
    SHORTEST = 4,
    WARPS_PER_SM = 16,
    MOST_SEQUENCES = 4, /* decoding: of a warp, which reads its taps once for all of them */
    ROUNDS = 2, /* forward: at least so many times what a GPU holds at once, so that the last round costs little */
    NOMINAL_BLOCKS = 192, /* backward: enough for any GPU there is, */
    BLOCK_CHANNELS = 256, /* which have so many channels each */
    LONGEST_PIECE = 128,  /* a piece's sums are fp32, and the rows behind it are computed twice */
    SHORTEST_PIECE = 8
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
    return ranges_of(tokens, warps, ROUNDS * (int64_t)WARPS_PER_SM * sms, SHORTEST, LONGEST);
}

weft_gdn_ranges weft_gdn_bwd_ranges(int64_t tokens, int64_t channels)
{
    return ranges_of(tokens, (channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS, NOMINAL_BLOCKS,
                     WEFT_GDN_PIECES * SHORTEST_PIECE, WEFT_GDN_PIECES * LONGEST_PIECE);
}

int64_t weft_gdn_step_groups(int64_t sequences, int64_t warps, int32_t sms)
{
    int64_t room = (int64_t)WARPS_PER_SM * sms, each = (sequences * warps + room - 1) / room;
    each = each < 1 ? 1 : each > MOST_SEQUENCES ? MOST_SEQUENCES : each;
    return (sequences + each - 1) / each;
}
