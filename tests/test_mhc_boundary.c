/* SPDX-License-Identifier: Apache-2.0
 *
 * Post of one sub-layer and pre of the next in one call [M11]. */
#include "support/suite.h"

static void reference_against_finite_differences(void **state)
{
    (void)state;
    fd_suite("mhc_boundary");
}

static void forward_against_the_chain(void **state)
{
    (void)state;
    grid_suite("mhc_boundary_fwd");
}

static void backward_against_the_chain(void **state)
{
    (void)state;
    grid_suite("mhc_boundary_bwd");
}

static void reference_against_its_chain(void **state)
{
    (void)state;
    grid_chain_on_ref("mhc_boundary_fwd");
}

static void forward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_boundary_fwd");
}

static void backward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_boundary_bwd");
}

/* ---- the single pass of CUDA's backward -------------------------------------------------------------------------- */

/* Problems that it takes: bf16, dense rows, channels in vectors. `kind` draws what else there is. */
static spec single_pass(int kind)
{
    static const int64_t shapes[][3] = {{16, 4, 128}, {1, 4, 8},    {17, 4, 136},  {33, 2, 64},  {100, 4, 264},
                                        {15, 2, 200}, {70, 4, 512}, {130, 4, 120}, {49, 2, 1032}};
    /* without the norm of the sub-layer, in either form, some of them without what may be missing */
    static const char *const absent[] = {" d_v bias pre_in ",
                                         " d_v bias ",
                                         " d_v y pre_in ",
                                         " d_v bias d_y y ",
                                         " d_v d_u ",
                                         " d_v d_u pre_in bias d_y ",
                                         " d_v bias pre_in y d_res ",
                                         " bias d_u ",
                                         " bias d_u pre_in y ",
                                         " pre_in ",
                                         " y d_y bias d_u ",
                                         " d_post d_x d_sub_weight ",
                                         " d_f d_phi d_res d_post "};
    enum { SHAPES = sizeof shapes / sizeof *shapes, ABSENT = sizeof absent / sizeof *absent };
    const int64_t *shape = shapes[kind % SHAPES];
    spec s = {.op = "mhc_boundary_bwd",
              .tokens = shape[0],
              .streams = shape[1],
              .channels = shape[2],
              .act = WEFT_BF16,
              .wide = WEFT_BF16,
              .absent = absent[kind % ABSENT],
              .add = kind % 4 == 3,
              .pad = kind % 5 == 4 ? 8 : 0,
              .seed = (uint64_t)kind};
    weft_mhc_preset_numerics((weft_mhc_preset)(kind % WEFT_PRESET_COUNT), &s.numerics);
    if (kind % 3 == 2) s.dropout = (weft_dropout){.p = 0.3, .seed = 5, .token_base = 1000, .shared = kind & 1};
    return s;
}

enum { SINGLE_PASS_KINDS = 117 }; /* every shape with everything that may be missing */

static void single_pass_against_the_chain(void **state)
{
    (void)state;
    /* without a GPU this is the grid once more */
    for (int kind = 0; kind < SINGLE_PASS_KINDS; kind += test_quick() || !test_on_cuda() ? 10 : 1) {
        spec s = single_pass(kind);
        grid_compare(&s);
    }
    test_verdict();
}

static void expect_same(problem *p, weft_exec exec, const pack *want, const char *what)
{
    problem_must_run(p, exec);
    pack got = problem_pack(p);
    pack_expect_same(p, &got, want, what);
    pack_free(&got);
}

/* Neither the multiprocessors nor chance decide a bit of it. */
static void single_pass_is_reproducible(void **state)
{
    (void)state;
    if (!test_on_cuda()) skip();
    for (int kind = 0; kind < SINGLE_PASS_KINDS; kind += test_quick() ? 30 : 9) {
        spec s = single_pass(kind);
        s.tokens = 1300;
        problem *p = problem_make(&s);
        problem_must_run(p, on_cuda(0));
        pack want = problem_pack(p);
        for (int run = 0; run < 3; run++) expect_same(p, on_cuda(0), &want, "another run");
        expect_same(p, on_cuda(7), &want, "another number of multiprocessors");
        pack_free(&want);
        problem_free(p);
    }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_against_finite_differences),
        cmocka_unit_test(forward_against_the_chain),
        cmocka_unit_test(backward_against_the_chain),
        cmocka_unit_test(reference_against_its_chain),
        cmocka_unit_test(forward_rounds_once),
        cmocka_unit_test(backward_rounds_once),
        cmocka_unit_test(single_pass_against_the_chain),
        cmocka_unit_test(single_pass_is_reproducible),
    };
    return suite_run("mhc_boundary", tests);
}
