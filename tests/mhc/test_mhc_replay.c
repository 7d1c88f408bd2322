/* SPDX-License-Identifier: Apache-2.0
 *
 * Multi-layer replay [M12]: forward only. */
#include "support/suite.h"

static void forward_against_the_chain(void **state)
{
    (void)state;
    grid_suite("mhc_replay_fwd");
}

static void reference_against_its_chain(void **state)
{
    (void)state;
    grid_chain_on_ref("mhc_replay_fwd");
}

static void forward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_replay_fwd");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_against_the_chain),
        cmocka_unit_test(reference_against_its_chain),
        cmocka_unit_test(forward_rounds_once),
    };
    return suite_run("mhc_replay", tests);
}
