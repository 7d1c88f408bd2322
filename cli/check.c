/* SPDX-License-Identifier: Apache-2.0
 *
 * `weft check`: every operator on random data against what expect.h says it must give. A list of cases covers
 * shapes, dtypes, layouts and presets; one line per operator and tensor shows the element that came closest to its
 * bound. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/compare.h"
#include "check/device.h"
#include "check/element.h"
#include "check/expect.h"
#include "check/guard.h"
#include "check/problem.h"
#include "check/random.h"
#include "check/run.h"
#include "commands.h"
#include "common/options.h"
#include "golden/golden.h"

typedef struct check_case {
    int64_t tokens, channels, streams;
    int act, wide, coef, param; /* weft_dtype */
    int swapped, pad, add, optional;
    weft_mhc_preset preset;
    int rule, iters; /* 0: as in the preset; else rule + 1 */
    double eps;      /* 0: as in the preset; else of a conspicuous size, for all of them */
    double dropout;
    int shared, poison; /* poison: a NaN in the fourth token, which must stay there */
    int independent;    /* two scales, merges without res */
    int quick, gpu;     /* also under --quick; only on a GPU, where wide rows have kernels of their own */
} check_case;

/* Short names for the table alone. */
#define RULE(name) .rule = WEFT_SINKHORN_##name + 1
#define PRESET(name) .preset = WEFT_PRESET_##name
enum {
    BF16 = WEFT_BF16,
    F16 = WEFT_F16,
    F32 = WEFT_F32,
    ALL = PROBLEM_ALL,
    NONE = PROBLEM_NONE,
    SOME = PROBLEM_SOME
};

/* clang-format off */
static const check_case cases[] = {
    /*   T     C   n  act   wide  coef  param CN pad add optional */
    {   33,  128,  4, BF16, BF16, F32,  F32,  0, 0, 0, ALL,  PRESET(DEEPSEEK_V4), .quick = 1},
    {   17,   96,  4, F32,  F32,  F32,  F32,  1, 0, 1, ALL,  PRESET(TRANSFORMER_ENGINE), .quick = 1},
    {   29,   65,  2, F16,  F32,  F16,  BF16, 0, 3, 0, SOME, PRESET(MEGATRON_MAIN), .dropout = 0.25, .quick = 1},
    {    1,  257,  8, BF16, F32,  BF16, BF16, 0, 1, 1, ALL,  PRESET(MEGATRON_DEV), .dropout = 0.5, .shared = 1, .quick = 1},
    {   61,   40,  3, F32,  F32,  F32,  F32,  0, 0, 0, SOME, PRESET(LIGER), .iters = 2, .eps = 0.05, .quick = 1},
    {    0,   64,  4, BF16, BF16, F32,  F32,  0, 0, 0, ALL,  PRESET(DEEPSEEK_V4)},
    {    0,   64,  4, BF16, F32,  F32,  BF16, 0, 0, 1, ALL,  PRESET(DEEPSEEK_V4)},
    {    5,   24, 32, F32,  F32,  F32,  F32,  0, 0, 0, ALL,  PRESET(MEGATRON_DSV4), RULE(THRESHOLD), .eps = 0.1},
    {  130,  512,  4, BF16, BF16, F32,  F32,  0, 0, 0, NONE, PRESET(DEEPSEEK_V41)},
    {   19,  300,  4, BF16, F32,  F32,  F32,  1, 5, 0, SOME, PRESET(TRANSFORMER_ENGINE)},
    {    7,    1,  1, F32,  F32,  F32,  F32,  0, 0, 0, ALL,  PRESET(MEGATRON_DSV4)},
    {   40,   48,  5, F16,  F16,  F32,  F32,  1, 0, 1, SOME, PRESET(MEGATRON_DSV4), .iters = 1, .eps = 0.02},
    {  515,   16,  4, BF16, BF16, F32,  F32,  0, 0, 1, SOME, PRESET(DEEPSEEK_V4), .iters = 3, .dropout = 0.1},
    {   23,   72,  8, F32,  F32,  F32,  BF16, 1, 2, 0, ALL,  PRESET(MEGATRON_MAIN), .iters = 2, .eps = 0.7},
    {   21,   16,  3, F32,  F32,  F32,  F32,  0, 0, 0, ALL,  PRESET(LIGER), RULE(THRESHOLD), .iters = 1, .eps = 1},
    {   31, 2048,  4, BF16, BF16, F32,  F32,  0, 0, 0, ALL,  PRESET(DEEPSEEK_V4)},
    {   45,  160,  4, BF16, BF16, F32,  F32,  0, 0, 0, ALL,  PRESET(HY_V4), .independent = 1, .quick = 1},
    {   34,   41,  3, F32,  F32,  F32,  F32,  1, 2, 1, SOME, PRESET(HY_V4), .independent = 1, .eps = 0.3, .dropout = 0.25, .quick = 1},
    {   66,  256,  8, F16,  F32,  F16,  F16,  0, 0, 1, NONE, PRESET(MEGATRON_MAIN), .independent = 1},
    {    0,   64,  4, BF16, BF16, F32,  F32,  0, 0, 1, ALL,  PRESET(HY_V4), .independent = 1},
    {    9,   33, 12, F32,  F32,  F32,  F32,  0, 0, 0, ALL,  PRESET(HY_V4), .independent = 1, .poison = 1},
    {   12,   33,  4, F32,  F32,  F32,  F32,  0, 0, 0, ALL,  PRESET(LIGER), .poison = 1},
    {   70, 1024,  4, BF16, BF16, F32,  F32,  1, 0, 0, ALL,  PRESET(TRANSFORMER_ENGINE), .gpu = 1, .quick = 1},
    {   37, 4096,  4, BF16, F32,  F32,  BF16, 0, 0, 1, ALL,  PRESET(DEEPSEEK_V4), .dropout = 0.1, .gpu = 1, .quick = 1},
    {   33, 1280,  4, F16,  F16,  F32,  F32,  0, 0, 0, ALL,  PRESET(MEGATRON_DEV), .gpu = 1, .quick = 1},
    {    9, 2560,  4, F32,  F32,  F32,  F32,  0, 0, 0, ALL,  PRESET(LIGER), .gpu = 1, .quick = 1},
    {   21,  768,  2, BF16, BF16, F32,  F32,  1, 0, 1, ALL,  PRESET(MEGATRON_MAIN), .gpu = 1, .quick = 1},
    {   13,  512,  8, BF16, BF16, F32,  F32,  0, 0, 0, ALL,  PRESET(DEEPSEEK_V4), .gpu = 1, .quick = 1},
    {   41, 4096,  4, BF16, BF16, F32,  F32,  0, 0, 0, ALL,  PRESET(HY_V4), .independent = 1, .gpu = 1, .quick = 1},
    {  300, 1024,  2, F32,  F32,  F32,  F32,  1, 0, 1, ALL,  PRESET(HY_V4), .independent = 1, .dropout = 0.1, .gpu = 1, .quick = 1},
    {  700,  256,  4, BF16, BF16, F32,  F32,  0, 0, 0, ALL,  PRESET(DEEPSEEK_V4), .gpu = 1, .quick = 1},
};
/* clang-format on */
enum { NUM_CASES = sizeof cases / sizeof cases[0] };

/* One line of the report. */
typedef struct line {
    const char *name;
    comparison worst;
    int cases, failed;
} line;

typedef struct report {
    const weft_op_info *op;
    line lines[EXPECT_MAX_ARGS];
    int num_lines;
} report;

static problem_spec spec_of(const check_case *c, uint64_t seed)
{
    problem_spec s = {.tokens = c->tokens,
                      .channels = c->channels,
                      .streams = c->streams,
                      .rows = c->tokens % 2 ? 2 * c->streams + c->streams * c->streams : 7,
                      .act = (weft_dtype)c->act,
                      .wide = (weft_dtype)c->wide,
                      .coef = (weft_dtype)c->coef,
                      .param = (weft_dtype)c->param,
                      .swapped = c->swapped,
                      .pad = c->pad,
                      .add = c->add,
                      .optional = (problem_optional)c->optional,
                      .contract = c->swapped ? WEFT_CONTRACT_SUM : WEFT_CONTRACT_MEAN,
                      .dropout = c->dropout,
                      .dropout_shared = c->shared,
                      .independent = c->independent,
                      .layers = 3,
                      .seed = seed};
    weft_mhc_preset_numerics(c->preset, &s.numerics);
    if (c->rule) s.numerics.sinkhorn = (weft_sinkhorn)(c->rule - 1);
    if (c->eps > 0) {
        s.numerics.rms_eps = s.numerics.pre_eps = s.numerics.post_eps = s.numerics.sinkhorn_eps = c->eps;
        s.numerics.post_mult = 1.75;
    }
    if (c->iters) s.numerics.sinkhorn_iters = c->iters;
    return s;
}

static void describe(const check_case *c, uint64_t seed, char *text, size_t size)
{
    snprintf(text, size, "tokens %lld, channels %lld, streams %lld, %s, %s, %s%s, case %d, seed %llu",
             (long long)c->tokens, (long long)c->channels, (long long)c->streams,
             weft_dtype_name((weft_dtype)c->act), c->swapped ? "(C,n)" : "(n,C)", weft_mhc_preset_name(c->preset),
             c->independent ? " without a residual mix" : "", (int)(c - cases), (unsigned long long)seed);
}

static line *line_of(report *r, const char *name)
{
    for (int i = 0; i < r->num_lines; i++)
        if (!strcmp(r->lines[i].name, name)) return &r->lines[i];
    r->lines[r->num_lines] = (line){.name = name, .worst.index = -1};
    return &r->lines[r->num_lines++];
}

static void fail(report *r, const char *name, const char *why, const char *where)
{
    line_of(r, name)->failed++;
    printf("  %s %s: %s\n    (%s)\n", r->op->name, name, why, where);
}

static void judge(report *r, const expect_result *e, const char *where)
{
    comparison c = compare(e->tensor, e->want, e->bound);
    line *l = line_of(r, e->name);
    compare_merge(&l->worst, &c);
    l->cases++;
    if (!c.failed) return;
    char at[80], why[256];
    tensor_coordinates(e->tensor, c.index, at, sizeof at);
    snprintf(why, sizeof why, "%lld of %lld elements are off; [%s]: got %.9g, want %.9g, error %.3g, bound %.3g",
             (long long)c.failed, (long long)c.count, at, c.got, c.want, c.error, c.bound);
    fail(r, e->name, why, where);
}

/* Gives every tensor memory and the inputs their values; 0 where there is no memory. */
static int fill(problem *p, const check_case *c, guard *guards)
{
    int poison = c->poison;
    for (int i = 0; i < p->num_args; i++) {
        const problem_arg *arg = &p->arg[i];
        /* One element off the boundary where rows are padded: no vector of the call is aligned. */
        size_t skew = c->pad ? weft_dtype_size(arg->tensor->dtype) : 0;
        if (!guard_alloc(&guards[i], problem_bytes(arg), skew)) return 0;
        arg->tensor->data = guard_data(&guards[i]);
        if (arg->info->kind == WEFT_ARG_IN || arg->add) problem_fill(p, arg);
        if (poison && arg->info->kind == WEFT_ARG_IN && arg->info->dim[0] == WEFT_DIM_BATCH) {
            element_store(arg->tensor->data, arg->tensor->dtype, 2 * arg->tensor->stride[1], NAN);
            poison = 0;
        }
        if (poison && arg->info->kind == WEFT_ARG_IN && arg->info->dim[0] == WEFT_DIM_TOKENS) {
            element_store(arg->tensor->data, arg->tensor->dtype, 3 * arg->tensor->stride[0], NAN);
            poison = 0;
        }
    }
    return 1;
}

/* What happened to memory beside the results. */
static void check_memory(report *r, const problem *p, const guard *guards, const char *where)
{
    for (int i = 0; i < p->num_args; i++) {
        const problem_arg *arg = &p->arg[i];
        const char *wrong = guard_check(&guards[i], arg->info->kind == WEFT_ARG_IN ? NULL : arg->tensor);
        if (wrong) fail(r, arg->info->name, wrong, where);
    }
}

static void run_case(report *r, const weft_exec *exec, const check_case *c, uint64_t seed)
{
    char where[256];
    problem p;
    problem_spec spec = spec_of(c, random_seed(seed + (uint64_t)(c - cases), r->op->name));
    describe(c, seed, where, sizeof where);
    guard *guards = NULL;
    if (!problem_make(&p, r->op, &spec) || !(guards = calloc((size_t)p.num_args, sizeof *guards)) ||
        !fill(&p, c, guards)) {
        fail(r, "memory", "not enough of it", where);
    } else {
        expectation e;
        const char *wrong = run_prepare(exec, p.op, p.args, run_call);
        for (int i = 0; i < p.num_args && !wrong; i++)
            if (!guard_seal(&guards[i])) wrong = "not enough memory";
        expect_begin(&e, exec, r->op, p.args);
        if (!wrong) wrong = run_call(exec, r->op, p.args);
        if (!wrong && !expect_finish(&e)) wrong = e.scope.problem;
        if (wrong)
            fail(r, "call", wrong, where);
        else
            for (int i = 0; i < e.num_results; i++) judge(r, &e.result[i], where);
        check_memory(r, &p, guards, where);
        expect_end(&e);
    }
    for (int i = 0; guards && i < p.num_args; i++) guard_free(&guards[i]);
    free(guards);
    problem_free(&p);
}

static void check_op(const weft_op_info *op, const weft_exec *exec, int quick, uint64_t seed, golden_counts *counts)
{
    report r = {.op = op};
    for (int i = 0; i < NUM_CASES; i++)
        if ((!quick || cases[i].quick) && (!cases[i].gpu || exec->backend == WEFT_BACKEND_CUDA))
            run_case(&r, exec, &cases[i], seed);
    for (int i = 0; i < r.num_lines; i++) {
        const line *l = &r.lines[i];
        printf("%-4s %-17s %-13s %2d cases  error %9.3e  bound %9.3e  %s\n", weft_backend_name(exec->backend),
               op->name, l->name, l->cases, l->worst.error, l->worst.bound, l->failed ? "FAIL" : "ok");
        *(l->failed ? &counts->failed : &counts->passed) += 1;
    }
    fflush(stdout);
}

static int check_random(const weft_exec *exec, const char *filter, int quick, uint64_t seed, golden_counts *counts)
{
    for (int32_t i = 0; i < weft_op_count(); i++)
        if (run_selected(filter, weft_op_at(i))) {
            if (weft_op_has(weft_op_at(i), exec->backend))
                check_op(weft_op_at(i), exec, quick, seed, counts);
            else
                printf("%-4s %-17s skipped: the backend has no kernels for it yet\n",
                       weft_backend_name(exec->backend), weft_op_at(i)->name);
        }
    return EXIT_PASSED;
}

static const char *operator_name(int i)
{
    return i < weft_op_count() ? weft_op_at(i)->name : NULL;
}

int command_check(int argc, char **argv)
{
    static const char *const backends[] = {"all", "ref", "cpu", "cuda", NULL};
    static const char *const isas[] = {"best", "base", "avx2", "avx512", "amx", NULL};
    static const char *const precisions[] = {"full", "tf32", NULL};
    int backend = 0, isa = 0, precision = 0, quick = 0, code = EXIT_PASSED;
    int64_t seed = 1, threads = 0;
    const char *op = NULL, *golden = NULL;
    const option options[] = {
        {.name = "backend",
         .kind = OPTION_CHOICE,
         .to = &backend,
         .choices = backends,
         .help = "which backend to check; all: those that this machine can run"},
        {.name = "op",
         .kind = OPTION_TEXT,
         .to = &op,
         .value = "NAME",
         .help = "one operator: mhc_post, or mhc_post_fwd for one pass"},
        {.name = "seed",
         .kind = OPTION_INT,
         .to = &seed,
         .value = "S",
         .max = INT64_MAX,
         .help = "seed of the random data"},
        {.name = "golden",
         .kind = OPTION_TEXT,
         .to = &golden,
         .value = "DIR",
         .help = "compare with the golden files in DIR instead"},
        {.name = "isa",
         .kind = OPTION_CHOICE,
         .to = &isa,
         .choices = isas,
         .help = "cpu: highest instruction set to use"},
        {.name = "threads",
         .kind = OPTION_INT,
         .to = &threads,
         .value = "N",
         .max = 4096,
         .help = "cpu: number of threads, 0 for OpenMP's default; cuda: multiprocessors to plan for, 0 for all"},
        {.name = "precision",
         .kind = OPTION_CHOICE,
         .to = &precision,
         .choices = precisions,
         .help = "cuda: of the projection of f32 streams"},
        {.name = "quick", .kind = OPTION_FLAG, .to = &quick, .help = "a few cases only, for slow tools"},
        {0},
    };
    int stop = options_parse(argc, argv, options);
    if (stop >= 0) return stop;

    int known = op == NULL;
    for (int32_t i = 0; i < weft_op_count(); i++) known |= run_selected(op, weft_op_at(i));
    if (!known) return options_reject("check", "op", op, operator_name);
    if (op && golden) {
        fprintf(stderr, "weft check: --op: rejected with --golden, which compares whole files\n");
        return EXIT_UNUSABLE;
    }
    if (backend && !weft_backend_available((weft_backend)backend)) {
        fprintf(stderr,
                "weft check: --backend: expected one that weft info lists, got %s, which is not available %s\n",
                backends[backend],
                backend == WEFT_BACKEND_CUDA && !device_built() ? "in this build" : "on this machine");
        return EXIT_UNUSABLE;
    }
    if (isa > (int)weft_cpu_isa()) {
        fprintf(stderr, "weft check: --isa: expected at most %s on this machine and build, got %s\n",
                weft_isa_name(weft_cpu_isa()), isas[isa]);
        return EXIT_UNUSABLE;
    }

    golden_counts counts = {0};
    for (int b = WEFT_BACKEND_REF; b <= WEFT_BACKEND_CUDA; b++) {
        if (backend && b != backend) continue;
        if (!weft_backend_available((weft_backend)b)) {
            printf("%-4s skipped: %s\n", weft_backend_name((weft_backend)b),
                   device_built() ? "no GPU on this machine" : "not part of this build");
            continue;
        }
        weft_exec exec = WEFT_STRUCT(weft_exec, .backend = (weft_backend)b);
        if (b == WEFT_BACKEND_CPU) exec.isa = (weft_isa)isa;
        if (b == WEFT_BACKEND_CUDA) exec.precision = (weft_precision)precision;
        if (b != WEFT_BACKEND_REF) exec.threads = (int32_t)threads;
        int one =
            golden ? golden_check(golden, &exec, &counts) : check_random(&exec, op, quick, (uint64_t)seed, &counts);
        if (one > code) code = one;
    }
    if (counts.not_compared) printf("%lld tensors were not compared\n", (long long)counts.not_compared);
    printf("%lld passed, %lld failed\n", (long long)counts.passed, (long long)counts.failed);
    if (counts.failed && code == EXIT_PASSED) code = EXIT_FAILED;
    return code;
}
