/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated delta rule [G5] [G6]: the reference against finite differences in both of its forms, the CPU against the
 * reference. A whole layer is in test_gdn_layer.c. */
#include "support/suite.h"

static const int64_t lengths[] = {0, 1, 0, 2, 3, 5, 4, 0, 1, 7, 0};
enum { SEQUENCES = sizeof lengths / sizeof *lengths };

static void reference_against_finite_differences(void **state)
{
    (void)state;
    fd_suite("gdn_rule");
}

static void differences_of_both_forms(void **state)
{
    (void)state;
    static const int chunks[] = {0, 1, 2, 3, 8};
    for (int v = 0; v < 20; v++) {
        spec s = {.op = "gdn_rule", .tokens = 2, .streams = 4, .channels = 3, .steps = 1 + v % 7};
        s.heads = v % 3 == 0 ? 1 : v % 3 == 1 ? 2 : 4;
        s.gdn = weft_gdn_defaults();
        s.gdn.head_map = v & 1 ? WEFT_GDN_TILED : WEFT_GDN_INTERLEAVED;
        s.value_dim = 2 + v % 3;
        s.rule_chunk = chunks[v % 5];
        fd_check(&s);
        s.packed = true;
        s.tokens = SEQUENCES;
        s.lengths = lengths;
        fd_check(&s);
    }
    test_verdict();
}

static void forward_against_the_reference(void **state)
{
    (void)state;
    grid_suite("gdn_rule_fwd");
}

static void backward_against_the_reference(void **state)
{
    (void)state;
    grid_suite("gdn_rule_bwd");
}

static void step_against_the_reference(void **state)
{
    (void)state;
    grid_suite("gdn_rule_step");
}

static void step_rounds_once(void **state)
{
    (void)state;
    grid_rounding("gdn_rule_step");
}

static void forward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("gdn_rule_fwd");
}

static void backward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("gdn_rule_bwd");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_against_finite_differences),
        cmocka_unit_test(differences_of_both_forms),
        cmocka_unit_test(forward_against_the_reference),
        cmocka_unit_test(backward_against_the_reference),
        cmocka_unit_test(step_against_the_reference),
        cmocka_unit_test(step_rounds_once),
        cmocka_unit_test(forward_rounds_once),
        cmocka_unit_test(backward_rounds_once),
    };
    return suite_run("gdn_rule", tests);
}
