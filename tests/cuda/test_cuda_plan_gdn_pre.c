/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes in front of the gated delta rule: every token is in one range, heads fit their teams, and what decides the
 * order of a sum depends on the shape alone. Runs without a GPU. */
#include "cuda/gdn/gdn_pre_plan.h"
#include "support/suite.h"

static const int64_t token_counts[] = {0, 1, 3, 4, 15, 16, 17, 127, 128, 129, 4096, 16384, 65537, (int64_t)1 << 40};
static const int64_t warp_counts[] = {1, 3, 12, 48, 64, 96, 4096};
static const int64_t channel_counts[] = {1, 96, 1536, 8192, 12288, (int64_t)1 << 22};
static const int32_t sm_counts[] = {1, 7, 108, 132, 1000};

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))
#define FOR(var, list) for (int var = 0; var < COUNT(list); var++)

static void teams_hold_heads(void **state)
{
    (void)state;
    for (int32_t vec = 4; vec <= 8; vec *= 2)
        for (int64_t dim = 1; dim <= 1024; dim++) {
            int32_t lanes = weft_gdn_team(dim, vec);
            if (lanes == 0) {
                assert_true(dim > 32 * vec);
                continue;
            }
            assert_true(lanes >= 1 && lanes <= 32 && (lanes & (lanes - 1)) == 0);
            assert_true(lanes * vec >= dim);
            assert_true(lanes == 1 || lanes / 2 * vec < dim); /* and not twice as large as it must be */
        }
}

static void check_ranges(weft_gdn_ranges r, int64_t tokens)
{
    assert_true(r.tokens >= 4 && r.tokens % 4 == 0); /* walks go four rows at a time */
    assert_true(r.count * r.tokens >= tokens);
    assert_true(tokens == 0 ? r.count == 0 : (r.count - 1) * r.tokens < tokens);
}

static void ranges_cover_the_tokens_once(void **state)
{
    (void)state;
    FOR(t, token_counts)
    {
        FOR(w, warp_counts)
        FOR(s, sm_counts)
        check_ranges(weft_gdn_fwd_ranges(token_counts[t], warp_counts[w], sm_counts[s]), token_counts[t]);
        FOR(c, channel_counts)
        check_ranges(weft_gdn_bwd_ranges(token_counts[t], channel_counts[c]), token_counts[t]);
    }
}

/* The bounds of parameter gradients count on it: at most 128 numbers are added in single precision. */
static void pieces_are_short_and_equal(void **state)
{
    (void)state;
    FOR(t, token_counts) FOR(c, channel_counts)
    {
        weft_gdn_ranges r = weft_gdn_bwd_ranges(token_counts[t], channel_counts[c]);
        assert_true(r.tokens % WEFT_GDN_PIECES == 0 && r.tokens / WEFT_GDN_PIECES <= 128);
    }
}

/* Partial sums are written and read once more: they must stay a small part of what a range reads. */
static void ranges_of_sums_are_long_where_there_are_many_tokens(void **state)
{
    (void)state;
    FOR(c, channel_counts) assert_true(weft_gdn_bwd_ranges((int64_t)1 << 20, channel_counts[c]).tokens >= 128);
    assert_true(weft_gdn_bwd_ranges(16384, 1536).tokens >= 128);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(teams_hold_heads),
                                       cmocka_unit_test(ranges_cover_the_tokens_once),
                                       cmocka_unit_test(pieces_are_short_and_equal),
                                       cmocka_unit_test(ranges_of_sums_are_long_where_there_are_many_tokens)};
    return suite_run("cuda_plan_gdn_pre", tests);
}
