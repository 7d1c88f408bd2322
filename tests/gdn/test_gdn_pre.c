/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule [G1] [G2] [G3] [G4]: the reference against finite differences, the backends against the
 * reference. What is promised bit by bit is in test_gdn_promises.c. */
#include "support/suite.h"

/* Empty sequences at both ends and in the middle, lengths around every width. */
static const int64_t lengths[] = {0, 1, 0, 2, 3, 5, 4, 0, 1, 7, 0};
enum { SEQUENCES = sizeof lengths / sizeof *lengths };

/* ---- finite differences ------------------------------------------------------------------------------------------ */

static void reference_against_finite_differences(void **state)
{
    (void)state;
    fd_suite("gdn_pre");
}

static weft_gdn_options fd_options(void)
{
    weft_gdn_options o = weft_gdn_defaults();
    o.l2_eps = 0.05;
    return o;
}

static void differences_of_options(void **state)
{
    (void)state;
    for (int v = 0; v < 48; v++) {
        if (test_quick() && v % 5) continue;
        spec s = {
            .op = "gdn_pre", .tokens = 2, .streams = 4, .channels = 3, .steps = 1 + v % 7, .gdn = fd_options()};
        s.gdn.activation = v & 1 ? WEFT_GDN_LINEAR : WEFT_GDN_SILU;
        s.gdn.l2norm = v >> 1 & 1;
        s.gdn.head_map = v >> 2 & 1 ? WEFT_GDN_TILED : WEFT_GDN_INTERLEAVED;
        s.gdn.q_scale = v >> 3 & 1 ? 0.7 : 1;
        s.gdn.beta_scale = v >> 4 & 1 ? 2 : 1;
        s.gdn.g_chunk = v % 3;
        s.gdn.g_log2 = v >> 1 & 1;
        s.width = 1 + v % WEFT_GDN_MAX_WIDTH;
        s.history = s.width - 1 + v % 4;
        s.key_heads = v % 3 ? 2 : 1;
        s.heads = v & 8 ? s.key_heads : 4;
        s.value_dim = 2 + v % 2;
        fd_check(&s);
        s.packed = true;
        s.tokens = SEQUENCES;
        s.lengths = lengths;
        fd_check(&s);
    }
    test_verdict();
}

/* ---- the backends --------------------------------------------------------------------------------------------------- */

static void forward_against_the_reference(void **state)
{
    (void)state;
    grid_suite("gdn_pre_fwd");
}

static void backward_against_the_reference(void **state)
{
    (void)state;
    grid_suite("gdn_pre_bwd");
}

static void decoding_against_the_reference(void **state)
{
    (void)state;
    grid_suite("gdn_pre_step");
}

static void forward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("gdn_pre_fwd");
}

static void backward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("gdn_pre_bwd");
}

static void decoding_rounds_once(void **state)
{
    (void)state;
    grid_rounding("gdn_pre_step");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_against_finite_differences),
        cmocka_unit_test(differences_of_options),
        cmocka_unit_test(forward_against_the_reference),
        cmocka_unit_test(backward_against_the_reference),
        cmocka_unit_test(decoding_against_the_reference),
        cmocka_unit_test(forward_rounds_once),
        cmocka_unit_test(backward_rounds_once),
        cmocka_unit_test(decoding_rounds_once),
    };
    return suite_run("gdn_pre", tests);
}
