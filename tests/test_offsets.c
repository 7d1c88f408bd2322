/* SPDX-License-Identifier: Apache-2.0
 *
 * Offsets beyond 2^31 elements: a few tokens that lie gigabytes apart in reserved address space, of which only the
 * pages of those tokens ever exist. A 32-bit product anywhere on the way to an address ends in the wrong token or
 * in a fault. */
#define _DEFAULT_SOURCE 1
#include <sys/mman.h>

#include "support/suite.h"

enum { TOKENS = 3 };
static const int64_t APART = ((int64_t)1 << 31) + 4096 + 24; /* elements from one token to the next */

/* Moves an argument into its own sparse region. Returns its size, 0 where the system does not give so much. */
static size_t spread(arg *a, char **region)
{
    size_t size = (size_t)weft_dtype_size(a->view->dtype);
    size_t bytes = ((size_t)APART * (TOKENS - 1) + (size_t)(a->elements / TOKENS) * 4) * size + 4096;
    *region = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*region == MAP_FAILED) return 0;
    double *values = arg_values(a);
    a->view->data = *region;
    a->view->stride[0] = APART;
    arg_fill(a, values);
    free(values);
    return bytes;
}

static void far_apart(const char *op, weft_dtype act, layout order, weft_exec exec)
{
    spec s = {
        .op = op, .tokens = TOKENS, .streams = 4, .channels = 40, .act = act, .wide = act, .stream_layout = order};
    problem *p = problem_make(&s);
    problem_must_run(p, exec);
    pack want = problem_pack(p);
    problem_reset(p);
    for (int i = 0; i < p->num_args; i++) {
        arg *a = &p->arg[i];
        char *region;
        if (!a->block || !arg_by_token(a)) continue;
        weft_tensor keep = *a->view;
        size_t bytes = spread(a, &region);
        if (!bytes) {
            fprintf(stderr, "  no address space for %s of %s: skipped\n", a->name, op);
            *a->view = keep;
            continue;
        }
        if (problem_call(p, exec) != WEFT_OK) {
            test_failed("%s: %s spread out: %s", op, a->name, weft_last_error());
        } else {
            pack got = problem_pack(p);
            pack_expect_same(p, &got, &want, a->name);
            pack_free(&got);
        }
        munmap(region, bytes);
        *a->view = keep;
        problem_reset(p);
    }
    pack_free(&want);
    problem_free(p);
}

static void tokens_far_apart(void **state)
{
    (void)state;
    weft_isa isas[4];
    int count = grid_isas(isas);
    static const char *const ops[] = {"mhc_aggregate_fwd", "mhc_aggregate_bwd", "mhc_post_fwd", "mhc_post_bwd",
                                      "mhc_project_fwd",   "mhc_project_bwd",   "mhc_pre_fwd",  "mhc_boundary_fwd",
                                      "mhc_expand_fwd",    "mhc_contract_bwd",  "mhc_coef_fwd", "mhc_sinkhorn_bwd",
                                      "rmsnorm_fwd",       "mhc_replay_fwd"};
    for (size_t o = 0; o < sizeof ops / sizeof *ops; o++)
        for (int e = -1; e < count; e++)
            for (int v = 0; v < 2; v++)
                far_apart(ops[o], v ? WEFT_BF16 : WEFT_F32, (layout)v, e < 0 ? on_ref() : on_cpu(isas[e], 1));
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(tokens_far_apart)};
    return suite_run("offsets", tests);
}
