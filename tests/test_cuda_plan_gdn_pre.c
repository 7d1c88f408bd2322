/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes in front of the gated delta rule: every token is in one range, heads fit their teams, and what decides the
 * order of a sum depends on the shape alone. Runs without a GPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cuda/gdn_pre_plan.h"

static const int64_t token_counts[] = {0, 1, 3, 4, 15, 16, 17, 127, 128, 129, 4096, 16384, 65537, (int64_t)1 << 40};
static const int64_t warp_counts[] = {1, 3, 12, 48, 64, 96, 4096};
static const int32_t sm_counts[] = {1, 7, 108, 132, 1000};

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))
#define FOR(var, list) for (int var = 0; var < COUNT(list); var++)

static void teams_hold_heads(void **state)
{
    (void)state;
    for (int64_t dim = 1; dim <= 1024; dim++) {
        int32_t lanes = weft_gdn_team(dim, 4);
        if (lanes == 0) {
            assert_true(dim > 128);
            continue;
        }
        assert_true(lanes >= 1 && lanes <= 32 && (lanes & (lanes - 1)) == 0);
        assert_true(lanes * 4 >= dim);
        assert_true(lanes == 1 || lanes / 2 * 4 < dim); /* and not twice as large as it must be */
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
    FOR(t, token_counts) FOR(w, warp_counts)
    {
        check_ranges(weft_gdn_bwd_ranges(token_counts[t], warp_counts[w]), token_counts[t]);
        FOR(s, sm_counts)
        check_ranges(weft_gdn_fwd_ranges(token_counts[t], warp_counts[w], sm_counts[s]), token_counts[t]);
    }
}

/* Partial sums are written and read once more: they must stay a small part of what a range reads. */
static void ranges_of_sums_are_long_where_there_are_many_tokens(void **state)
{
    (void)state;
    FOR(w, warp_counts) assert_true(weft_gdn_bwd_ranges((int64_t)1 << 20, warp_counts[w]).tokens >= 128);
    assert_true(weft_gdn_bwd_ranges(16384, 64).tokens >= 128);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(teams_hold_heads),
                                       cmocka_unit_test(ranges_cover_the_tokens_once),
                                       cmocka_unit_test(ranges_of_sums_are_long_where_there_are_many_tokens)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
