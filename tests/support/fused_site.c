/* SPDX-License-Identifier: Apache-2.0 */
#include "support/fused_site.h"

#include <string.h>

#include "check/device.h"
#include "support/suite.h"

static const int64_t shapes[][3] = {{16, 4, 128}, {1, 4, 8},    {17, 4, 136},  {33, 2, 64},  {100, 4, 264},
                                    {15, 2, 200}, {70, 4, 512}, {130, 4, 120}, {49, 2, 1032}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* What the streams are made of: both types of 16 bits, (n,C) and (C,n). */
static const struct {
    weft_dtype act;
    layout streams, params;
} memory[] = {{WEFT_BF16, LAYOUT_NC, LAYOUT_NC},
              {WEFT_BF16, LAYOUT_CN, LAYOUT_CN},
              {WEFT_F16, LAYOUT_NC, LAYOUT_NC},
              {WEFT_F16, LAYOUT_CN, LAYOUT_NC}};
enum { MEMORY = sizeof memory / sizeof *memory };

/* Dense rows, channels in vectors; `kind` draws what else there is, all of it for each kind of memory, and again without a residual
 * mix where the operator has one. */
static spec problem_of(const fused_site *of, int kind)
{
    const int each = SHAPES * of->num_absent, of_memory = kind / each % MEMORY, independent = kind / each >= MEMORY;
    kind %= each;
    const int64_t *shape = shapes[kind % SHAPES];
    spec s = {.op = of->op,
              .tokens = shape[0],
              .streams = shape[1],
              .channels = shape[2],
              .act = memory[of_memory].act,
              .wide = memory[of_memory].act,
              .stream_layout = memory[of_memory].streams,
              .param_layout = memory[of_memory].params,
              .absent = of->absent[kind % of->num_absent],
              .add = kind % 4 == 3,
              .independent = independent,
              .pad = kind % 5 == 4 ? 8 : 0,
              .scale = kind % 7 == 6 ? 1e-3 : 0, /* f16 is subnormal in places */
              .seed = (uint64_t)kind};
    weft_mhc_preset_numerics((weft_mhc_preset)(kind % WEFT_PRESET_COUNT), &s.numerics);
    if (kind % 3 == 2) s.dropout = (weft_dropout){.p = 0.3, .seed = 5, .token_base = 1000, .shared = kind & 1};
    return s;
}

static int kinds(const fused_site *of)
{
    return SHAPES * of->num_absent * MEMORY * (of->has_matrix ? 2 : 1);
}

void fused_site_against_chain(void **state)
{
    const fused_site *of = *state;
    for (int kind = 0; kind < kinds(of); kind += test_quick() || !test_on_cuda() ? 41 : 1) {
        spec s = problem_of(of, kind);
        grid_compare(&s);
    }
    test_verdict();
}

/* ---- which path ------------------------------------------------------------------------------------------------------- */

static const char *const fused = "fused: one kernel";

static int path_has(const spec *s, const char *words)
{
    problem *p = problem_make(s);
    weft_exec exec = on_cuda(0);
    const char *path = NULL;
    if (weft_op_path(p->op, &exec, p->args, &path) != WEFT_OK) fail_msg("%s", weft_last_error());
    const int found = strstr(path, words) != NULL;
    problem_free(p);
    return found;
}

static void expect_path(spec s, const char *words)
{
    if (!path_has(&s, words)) test_failed("%s: expected a path with the words '%s'", s.op, words);
}

/* The words in the path of a call that nothing else keeps from being fused. Its code is for compute capability 9.0 alone:
 * other GPUs never take it, nor does a build without that code, whose PTX for older GPUs runs on these too. */
static const char *words_of_fitting(void)
{
    device_facts f;
    const bool there = device_facts_of(0, &f) && f.major == 9 && strstr(device_architectures(), "90");
    return there ? fused : "compute capability 9.0";
}

/* What does not take it is told why. */
void fused_site_is_taken(void **state)
{
    const fused_site *of = *state;
    spec s = problem_of(of, 0);
    if (!test_on_cuda()) skip();
    for (int kind = 0; kind < kinds(of); kind++) expect_path(problem_of(of, kind), words_of_fitting());
    if (strcmp(words_of_fitting(), fused) != 0) {
        test_verdict();
        return;
    }
    s.act = s.wide = WEFT_F32;
    expect_path(s, "not all bf16 or all f16");
    s = problem_of(of, 0), s.streams = 8;
    expect_path(s, "number of streams");
    s = problem_of(of, 0), s.channels = 130;
    expect_path(s, "multiple of 8");
    s = problem_of(of, 0), s.numerics.sinkhorn_iters = 10000;
    expect_path(s, of->has_matrix ? "Sinkhorn" : fused);
    s.independent = of->has_matrix;
    expect_path(s, fused);
    test_verdict();
}

/* ---- reproducible ------------------------------------------------------------------------------------------------------ */

static void expect_same(problem *p, weft_exec exec, const pack *want, const char *what)
{
    problem_must_run(p, exec);
    pack got = problem_pack(p);
    pack_expect_same(p, &got, want, what);
    pack_free(&got);
}

void fused_site_is_reproducible(void **state)
{
    const fused_site *of = *state;
    if (!test_on_cuda()) skip();
    for (int kind = 0; kind < kinds(of); kind += test_quick() ? 121 : 37) {
        spec s = problem_of(of, kind);
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

/* ---- forward: every dtype, layout and width ------------------------------------------------------------------------------ */

/* How a token is dealt to blocks, which kernel that takes and whether a row is made of whole boxes follow from the width: a few
 * boxes, four and five, six and seven in a block of the largest cluster, with and without channels left over. In (C, n) a row of x
 * may be made of whole boxes where one of f is not: 80 and 608 channels of four streams. */
static const int64_t widths[][2] = {{4, 72},   {4, 256},   {4, 512},   {4, 520},  {4, 608},  {4, 640},
                                    {4, 1056}, {4, 2560},  {4, 4096},  {4, 5120}, {4, 6144}, {4, 7160},
                                    {4, 7168}, {2, 96},    {2, 1024},  {2, 1280}, {2, 2056}, {2, 8192},
                                    {2, 9984}, {2, 14336}, {2, 14328}, {4, 80}};

/* Each dtype and layout has kernels of its own. */
static const struct form {
    weft_dtype act;
    layout streams;
} forms[] = {{WEFT_BF16, LAYOUT_NC}, {WEFT_BF16, LAYOUT_CN}, {WEFT_F16, LAYOUT_NC}, {WEFT_F16, LAYOUT_CN}};
enum { FORMS = sizeof forms / sizeof *forms };

static bool has_matrix(const char *op)
{
    return strcmp(op, "mhc_head_fwd") != 0;
}

/* More tiles than clusters, and one token that is alone in its tile; or a few tokens. A site has its residual mix, or it and its merge
 * have none; of either kind there are merges alone without one. */
static spec forward_of(const char *op, size_t k, size_t form, bool independent)
{
    spec s = {.op = op,
              .tokens = k % 3 ? 8 * 9 + 1 : 5,
              .streams = widths[k][0],
              .channels = widths[k][1],
              .act = forms[form].act,
              .wide = forms[form].act,
              .stream_layout = forms[form].streams,
              .param_layout = (layout)((k + form / 2) % 2),
              .independent = independent,
              .absent = k % 2        ? " bias pre_in v sub_weight "
                        : k % 7 == 2 ? " bias res "
                                     : " bias ",
              .seed = k};
    weft_mhc_preset_numerics((weft_mhc_preset)(k % WEFT_PRESET_COUNT), &s.numerics);
    if (k % 5 == 4) s.dropout = (weft_dropout){.p = 0.3, .seed = 5, .token_base = 1000};
    return s;
}

void fused_site_of_any_width(void **state)
{
    const char *op = *state;
    if (!test_on_cuda()) skip();
    for (size_t form = 0; form < FORMS * (has_matrix(op) ? 2 : 1); form++)
        for (size_t k = 0; k < sizeof widths / sizeof *widths; k++) {
            spec s = forward_of(op, k, form % FORMS, form >= FORMS);
            if (test_quick() && (k + form) % 4) continue;
            expect_path(s, words_of_fitting());
            grid_compare(&s);
        }
    test_verdict();
}

/* A width for each kind of kernel, more tokens than the clusters take at once; a token's bits do not depend on the tokens in front
 * of it either. */
void fused_site_forward_is_reproducible(void **state)
{
    static const size_t kinds_of_width[] = {0, 2, 5, 12, 13, 14};
    const char *op = *state;
    if (!test_on_cuda()) skip();
    for (size_t form = 0; form < FORMS * (has_matrix(op) ? 2 : 1); form++)
        for (size_t k = 0; k < sizeof kinds_of_width / sizeof *kinds_of_width; k++) {
            spec s = forward_of(op, kinds_of_width[k], form % FORMS, form >= FORMS);
            if (test_quick() && (k + form) % 3) continue;
            s.tokens = s.channels > 2000 ? 150 : 1300;
            problem *p = problem_make(&s);
            problem_must_run(p, on_cuda(0));
            pack want = problem_pack(p);
            for (int run = 0; run < 2; run++) expect_same(p, on_cuda(0), &want, "another run");
            expect_same(p, on_cuda(17), &want, "another number of multiprocessors");
            pack_free(&want);
            problem_free(p);
        }
    test_verdict();
}

/* Rows that cannot be copied 16 bytes at a time, f32, odd channels, too many streams. */
void fused_site_forward_is_not_taken(void **state)
{
    const char *op = *state;
    if (!test_on_cuda()) skip();
    if (strcmp(words_of_fitting(), fused) != 0) skip();
    for (size_t form = 0; form < FORMS; form++) {
        spec s = forward_of(op, 3, form, false);
        s.pad = 4;
        expect_path(s, "16 bytes");
        s = forward_of(op, 3, form, false), s.act = s.wide = WEFT_F32;
        expect_path(s, "unfused: "); /* pre has another sentence for f32 */
        s = forward_of(op, 3, form, false), s.channels = 516;
        expect_path(s, "multiple of 8");
        s = forward_of(op, 3, form, false), s.streams = 8;
        expect_path(s, "number of streams");
    }
    test_verdict();
}
