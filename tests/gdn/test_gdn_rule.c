/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated delta rule [G5] [G6]: the reference against finite differences in both of its forms, the CPU and the GPU
 * against the reference. A whole layer is in test_gdn_layer.c. */
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

/* ---- heads of 64 and 128 in bf16, which a GPU takes in chunks of 64 tokens ------------------------------------------------ */

/* Keys that hardly differ, beta near 1 and g near 0: what a chunk solves is then as far from the identity as it gets. */
static void make_hard(problem *p)
{
    arg *key = problem_arg(p, "key"), *beta = problem_arg(p, "beta"), *g = problem_arg(p, "g");
    int64_t dk = key->view->shape[3];
    for (int64_t i = 0; i < key->elements; i++)
        arg_set(key, i, (1 + 0.05 * arg_get(key, i) * sqrt((double)dk)) / sqrt((double)dk));
    for (int64_t i = 0; i < beta->elements; i++) arg_set(beta, i, 1 - 0.02 * arg_get(beta, i));
    for (int64_t i = 0; i < g->elements; i++) arg_set(g, i, 1e-3 * arg_get(g, i));
    problem_seal(p);
}

static void in_chunks(const char *op)
{
    static const int64_t steps[] = {1, 63, 64, 65, 130}, packed[] = {0, 64, 1, 0, 129, 3};
    for (int v = 0; v < 12; v++) {
        spec s = {.op = op, .tokens = 1 + v % 2, .streams = 4, .channels = 64, .act = WEFT_BF16, .wide = WEFT_BF16};
        if (test_quick() && v % 5) continue;
        s.heads = v % 3 == 0 ? 4 : v % 3;
        s.steps = steps[v % 5];
        s.key_dim = v % 4 < 2 ? 64 : 128;
        s.value_dim = v % 4 % 2 ? 128 : 64;
        if (v == 3 || v == 4 || v == 7 || v == 8)
            s.streams = 2048 / s.value_dim; /* as many columns as groups of four warps want */
        s.gdn = weft_gdn_defaults();
        s.gdn.head_map = v & 1 ? WEFT_GDN_TILED : WEFT_GDN_INTERLEAVED;
        s.seed = (uint64_t)v;
        s.add = v % 5 == 3;
        s.misalign = v % 6 == 1;
        if (v % 4 == 2) s.absent = " state final_state d_state d_final_state ";
        if (v % 3 == 1) s.packed = true, s.tokens = 6, s.lengths = packed;
        problem *p = problem_make(&s);
        if (v % 4 == 3) make_hard(p);
        grid_compare_problem(p);
        problem_free(p);
    }
    test_verdict();
}

static void forward_in_chunks(void **state)
{
    (void)state;
    in_chunks("gdn_rule_fwd");
}

static void backward_in_chunks(void **state)
{
    (void)state;
    in_chunks("gdn_rule_bwd");
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
        cmocka_unit_test(forward_in_chunks),
        cmocka_unit_test(backward_in_chunks),
        cmocka_unit_test(step_against_the_reference),
        cmocka_unit_test(step_rounds_once),
        cmocka_unit_test(forward_rounds_once),
        cmocka_unit_test(backward_rounds_once),
    };
    return suite_run("gdn_rule", tests);
}
