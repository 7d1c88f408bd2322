/* SPDX-License-Identifier: Apache-2.0
 *
 * One axis at a time around a small problem, then random points of the whole space: faults sit at edges and at
 * combinations, and a full product would run for hours. */
#include "support/grid.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "check/compare.h"
#include "check/element.h"
#include "check/expect.h"
#include "check/run.h"
#include "support/chain.h"

static const weft_dtype acts[] = {WEFT_F32, WEFT_BF16, WEFT_F16};

int grid_isas(weft_isa isas[4])
{
    int count = 0;
    for (int isa = WEFT_ISA_BASE; isa <= (int)weft_cpu_isa(); isa++) isas[count++] = (weft_isa)isa;
    return count;
}

int grid_execs(weft_exec execs[GRID_EXECS], int threads)
{
    weft_isa isas[4];
    int count = test_on_cpu() ? grid_isas(isas) : 0;
    for (int i = 0; i < count; i++) execs[i] = on_cpu(isas[i], threads);
    if (test_on_cuda()) execs[count++] = on_cuda(0);
    return count;
}

bool grid_uses(const char *op, int32_t dim)
{
    const weft_op_info *info = weft_op_find(op);
    for (int32_t i = 0; i < info->num_args; i++)
        for (int32_t d = 0; d < info->args[i].ndim; d++)
            if (info->args[i].dim[d] == dim) return true;
    return false;
}

static bool runs_sinkhorn(const char *op)
{
    return strstr("mhc_sinkhorn_fwd mhc_sinkhorn_bwd mhc_coef_fwd mhc_coef_bwd mhc_pre_fwd mhc_pre_bwd", op) !=
           NULL;
}

/* Operators whose expectation does not call the reference: that is held to it too. */
static bool checks_reference(const char *op)
{
    return strncmp(op, "gdn", 3) == 0;
}

static bool is_backward(const char *op)
{
    return strcmp(op + strlen(op) - 3, "bwd") == 0;
}

/* ---- how much of their bounds errors use ------------------------------------------------------------------------- */

enum { MAX_RATIOS = 256 };
static struct ratio {
    char op[32], name[32];
    bool narrow; /* 16-bit outputs: their own rounding is most of the bound, so they are listed apart */
    bool cuda;   /* has bounds of its own */
    double worst;
} ratios[MAX_RATIOS];
static int num_ratios;

static void note_ratio(const char *op, const expect_result *r, weft_exec exec, const comparison *c)
{
    bool narrow = weft_dtype_size(r->tensor->dtype) == 2, cuda = exec.backend == WEFT_BACKEND_CUDA;
    int i = 0;
    if (!(c->bound > 0) || exec.backend == WEFT_BACKEND_REF) return;
    while (i < num_ratios && !(strcmp(ratios[i].op, op) == 0 && strcmp(ratios[i].name, r->name) == 0 &&
                               ratios[i].narrow == narrow && ratios[i].cuda == cuda))
        i++;
    if (i == MAX_RATIOS) return;
    if (i == num_ratios) {
        num_ratios++;
        snprintf(ratios[i].op, sizeof ratios[i].op, "%s", op);
        snprintf(ratios[i].name, sizeof ratios[i].name, "%.31s", r->name);
        ratios[i].narrow = narrow;
        ratios[i].cuda = cuda;
    }
    ratios[i].worst = fmax(ratios[i].worst, c->error / c->bound);
}

void grid_print_ratios(void)
{
    if (num_ratios) fprintf(stderr, "largest error / bound, in the grids of this test:\n");
    for (int i = 0; i < num_ratios; i++)
        fprintf(stderr, "  %-18s %-14s %-6s %.3f%s\n", ratios[i].op, ratios[i].name,
                ratios[i].narrow ? "16 bit" : "f32", ratios[i].worst, ratios[i].cuda ? " on cuda" : "");
}

/* ---- one problem --------------------------------------------------------------------------------------------------- */

static void compare_results(const problem *p, weft_exec exec, const expectation *e)
{
    char where[80];
    for (int i = 0; i < e->num_results; i++) {
        const expect_result *r = &e->result[i];
        comparison c = compare(r->tensor, r->want, r->bound);
        note_ratio(p->op->name, r, exec, &c);
        if (!c.failed) continue;
        tensor_coordinates(r->tensor, c.index, where, sizeof where);
        test_failed("%s on %s: %s[%s]: got %.9g, want %.9g, error %.3g, bound %.3g; %lld of %lld are off",
                    problem_text(p), exec_name(exec), r->name, where, c.got, c.want, c.error, c.bound,
                    (long long)c.failed, (long long)c.count);
    }
}

/* What follows from other inputs must be what this backend's forward made. */
static void give_forward(problem *p, weft_exec exec)
{
    const char *wrong = run_prepare(&exec, p->op, p->args, run_call);
    if (wrong) test_failed("%s on %s: %s", problem_text(p), exec_name(exec), wrong);
    problem_seal(p);
}

/* Runs the call and says what it must give; the caller ends the expectation. */
static void run_expected(problem *p, weft_exec exec, expectation *e)
{
    problem_reset(p);
    give_forward(p, exec);
    expect_begin(e, &exec, p->op, p->args);
    problem_must_run(p, exec);
    if (!expect_finish(e)) test_failed("%s: %s", problem_text(p), e->scope.problem);
    compare_results(p, exec, e);
}

void grid_compare_expectation(problem *p, weft_exec exec)
{
    expectation e;
    run_expected(p, exec, &e);
    expect_end(&e);
}

/* Instruction sets of the CPU give the same bits, tiles of AMX aside. */
static bool same_arithmetic(weft_exec a, weft_exec b)
{
    return a.backend == b.backend && (a.isa == WEFT_ISA_AMX) == (b.isa == WEFT_ISA_AMX);
}

static void compare_one(problem *p, weft_exec exec, const weft_exec *before, expectation *e)
{
    if (chain_knows(p->spec.op) && !(exec.backend == WEFT_BACKEND_CUDA && is_backward(p->spec.op))) {
        if (chain_sums_apart(p, exec)) grid_compare_expectation(p, exec);
        chain_compare(p, exec);
    } else if (e->op && same_arithmetic(exec, *before)) {
        problem_must_run(p, exec);
        compare_results(p, exec, e);
    } else {
        expect_end(e);
        run_expected(p, exec, e);
    }
}

void grid_compare_problem(problem *p)
{
    weft_exec execs[GRID_EXECS], before = {0};
    int count = grid_execs(execs, 2);
    pack avx2 = {0};
    expectation e = {0}; /* of `before`, and of those with its arithmetic */
    if (checks_reference(p->spec.op) && p->spec.tokens < 500) grid_compare_expectation(p, on_ref());
    for (int i = 0; i < count; i++) {
        if (!weft_op_has(p->op, execs[i].backend)) continue;
        compare_one(p, execs[i], &before, &e);
        before = execs[i];
        if (execs[i].isa == WEFT_ISA_AVX2) avx2 = problem_pack(p);
        if (execs[i].isa == WEFT_ISA_AVX512) {
            pack avx512 = problem_pack(p);
            pack_expect_same(p, &avx512, &avx2, "avx512 against avx2");
            pack_free(&avx512);
        }
    }
    pack_free(&avx2);
    expect_end(&e);
}

void grid_compare(const spec *s)
{
    problem *p = problem_make(s);
    grid_compare_problem(p);
    problem_free(p);
}

void grid_chain_on_ref(const char *op)
{
    char absent[256];
    rng r = {rng_name(2, op)};
    if (is_backward(op)) return; /* the reference sums gradients in double, which a chain of fp32 buffers cannot */
    for (int i = 0; i < (test_quick() ? 5 : 30); i++) {
        spec s = grid_draw(op, &r, absent, sizeof absent);
        /* the head's gates are never stored, so a chain that stores them agrees in float64 only */
        if (i % 2 || strcmp(op, "mhc_head_fwd") == 0) {
            s.act = s.wide = s.coef = s.param = WEFT_F64;
            s.mix = false;
        }
        problem *p = problem_make(&s);
        chain_compare(p, on_ref());
        problem_free(p);
    }
    test_verdict();
}

/* ---- sweeps -------------------------------------------------------------------------------------------------- */

static void sweep_streams(const char *op)
{
    for (int64_t n = 1; n <= WEFT_MAX_STREAMS; n += test_quick() ? 5 : 1)
        for (int64_t c = 3; c <= 17; c += 14) {
            spec s = {.op = op, .tokens = 3, .streams = n, .channels = c, .act = acts[(n + c / 17) % 3]};
            s.stream_layout = (layout)(n / 3 % 2);
            s.wide = n & 1 ? WEFT_F32 : s.act;
            if (c == 17 && !grid_uses(op, WEFT_DIM_CHANNELS)) break;
            grid_compare(&s);
        }
}

static void sweep_channels(const char *op)
{
    static const int64_t channels[] = {1, 3, 15, 16, 17, 31, 32, 33, 64, 96, 100, 255, 257, 1023, 2049};
    static const int64_t streams[] = {4, 2, 8, 3};
    if (!grid_uses(op, WEFT_DIM_CHANNELS)) return;
    for (size_t c = 0; c < sizeof channels / sizeof *channels; c++)
        for (size_t n = 0; n < 4; n++)
            for (size_t a = 0; a < 3; a++) {
                spec s = {.op = op, .tokens = 2, .streams = streams[n], .channels = channels[c], .act = acts[a]};
                if (channels[c] > 300 && (n + a + c) % 4) continue; /* the wide ones in turns */
                if (test_quick() && (n + a + c) % 5) continue;
                s.wide = (n + a) & 1 ? WEFT_F32 : s.act;
                s.stream_layout = (layout)((c + a) % 2);
                s.param_layout = (layout)((c + n) % 2);
                s.param = acts[(c + n) % 3];
                grid_compare(&s);
            }
}

static void sweep_tokens(const char *op)
{
    static const int64_t tokens[] = {0, 1, 2, 13, 17, 31, 33, 64, 65, 127, 129, 257};
    for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
        for (size_t a = 0; a < 3; a++) {
            spec s = {.op = op, .tokens = tokens[t], .streams = 4, .act = acts[a]};
            s.channels = (t + a) % 2 ? 33 : 64;
            if (test_quick() && (t + a) % 3) continue;
            s.wide = t & 1 ? WEFT_F32 : s.act;
            s.add = t % 4 == 1;
            s.streams = t % 3 == 2 ? 2 : 4;
            grid_compare(&s);
        }
    /* Sums over tokens are folded every so many tokens, depending on the size of a row: across those edges. */
    static const int64_t edges[][3] = {{1023, 4, 5}, {1025, 4, 17}, {1057, 2, 33}, {2049, 3, 3}, {257, 8, 2048}};
    for (int k = 0; k < (test_quick() ? 2 : 5); k++) {
        spec edge = {.op = op, .tokens = edges[k][0], .streams = edges[k][1], .channels = edges[k][2], .rows = 9};
        edge.act = k == 4 ? WEFT_F32 : acts[k % 3];
        if (k == 4 && (!is_backward(op) || !grid_uses(op, WEFT_DIM_CHANNELS))) continue;
        grid_compare(&edge);
    }
    /* more tokens than a 16-bit index counts, and not a multiple of anything */
    spec s = {.op = op, .tokens = test_quick() ? 4099 : 65539, .streams = 2, .channels = 1, .act = WEFT_BF16};
    grid_compare(&s);
}

/* Strided, padded, misaligned, broadcast: one at a time, at sizes where the fast paths would otherwise run. */
static void sweep_views(const char *op)
{
    for (int k = 0; k < 24; k++) {
        spec s = {.op = op, .tokens = 9, .streams = k % 2 ? 4 : 8, .channels = k % 3 ? 48 : 50, .act = acts[k % 3]};
        s.wide = k & 1 ? WEFT_F32 : s.act;
        s.param = s.coef = acts[(k / 3) % 3];
        s.stream_layout = s.param_layout = (layout)(k / 8);
        s.pad = k % 4 == 1 ? 5 : 0;
        s.misalign = k % 4 == 2;
        s.broadcast = k % 4 == 3;
        s.add = k / 4 & 1;
        grid_compare(&s);
    }
}

/* Without a residual mix, at the edges where the paths of a merge and of gates part. */
static void sweep_independent(const char *op)
{
    static const int64_t streams[] = {4, 2, 8, 3, 1, 12, 32};
    if (strncmp(op, "mhc_", 4) != 0) return;
    for (int k = 0; k < 12; k++) { /* whole vectors in either layout, written and added to */
        spec s = {.op = op, .tokens = 5, .streams = streams[k % 3], .channels = 64, .act = acts[k / 2 % 3]};
        s.independent = true;
        s.wide = s.act;
        s.stream_layout = (layout)(k / 3 % 2);
        s.add = k / 6;
        grid_compare(&s);
    }
    for (int k = 0; k < (test_quick() ? 7 : 28); k++) {
        spec s = {.op = op, .tokens = 1 + k * 5 % 37, .streams = streams[k % 7], .act = acts[k % 3]};
        s.independent = true;
        s.channels = k % 4 == 0 ? 64 : k % 4 == 1 ? 33 : k % 4 == 2 ? 160 : 7;
        s.wide = k / 3 & 1 ? WEFT_F32 : s.act;
        s.stream_layout = (layout)(k / 2 % LAYOUT_COUNT);
        s.add = k / 4 & 1;
        if (k % 5 == 2) s.dropout = (weft_dropout){.p = 0.25, .seed = 9, .site = 4, .shared = k & 1};
        weft_mhc_preset_numerics(WEFT_PRESET_HY_V4, &s.numerics);
        if (k % 3 == 1) s.numerics.post_eps = 0.05;
        grid_compare(&s);
    }
}

static void sweep_numerics(const char *op)
{
    static const int64_t streams[] = {4, 2, 8, 3, 1, 32};
    static const int iterations[] = {1, 2, 20, 100};
    char absent[1] = "";
    rng r = {rng_name(1, op)};
    if (!runs_sinkhorn(op)) return;
    for (int rule = 0; rule < 5; rule++)
        for (int it = 0; it < 4; it++)
            for (int k = 0; k < (test_quick() ? 2 : 6); k++) {
                spec s = grid_draw(op, &r, absent, sizeof absent);
                s.mix = false;
                s.tokens = 33;
                s.channels = 5;
                s.streams = streams[k];
                s.rows = 0;
                s.numerics.sinkhorn = (weft_sinkhorn)rule;
                s.numerics.sinkhorn_iters = iterations[it];
                s.numerics.sinkhorn_eps = k % 3 == 2 ? 0.05 : 1e-6;
                if (s.streams == 32) s.tokens = 5;
                grid_compare(&s);
            }
}

static void draw_gdn(spec *s, rng *r)
{
    static const int64_t dims[] = {1, 3, 8, 16, 17, 32, 33, 40, 64, 100};
    s->tokens = rng_below(r, 6);
    s->steps = rng_below(r, 3) ? rng_below(r, 40) + 1 : rng_below(r, 6) + 1;
    s->packed = rng_below(r, 2);
    s->padding = rng_below(r, 3) - 1;
    s->key_heads = 1 + rng_below(r, 3);
    s->streams = s->key_heads * (1 + rng_below(r, 3));
    s->heads = rng_below(r, 2) ? s->key_heads : s->streams;
    s->key_dim = dims[rng_below(r, 10)];
    s->value_dim = dims[rng_below(r, 10)];
    s->width = 1 + rng_below(r, rng_below(r, 3) ? 4 : 8);
    s->history = s->width - 1 + rng_below(r, 3);
    s->gdn = weft_gdn_defaults();
    s->gdn.activation = rng_below(r, 4) ? WEFT_GDN_SILU : WEFT_GDN_LINEAR;
    s->gdn.l2norm = rng_below(r, 4) != 0;
    s->gdn.l2_eps = rng_below(r, 2) ? 1e-6 : 0.01;
    s->gdn.head_map = (weft_gdn_head_map)rng_below(r, 2);
    s->gdn.q_scale = rng_below(r, 2) ? 1 : 0.125;
    s->gdn.beta_scale = rng_below(r, 2) ? 1 : 2;
    s->gdn.g_chunk = rng_below(r, 2) ? 0 : (int32_t)(1 + rng_below(r, 70));
    s->gdn.g_log2 = (int32_t)rng_below(r, 2);
    s->rule_chunk = rng_below(r, 2) ? 0 : (int)(1 + rng_below(r, 20));
}

spec grid_draw(const char *op, rng *r, char *absent, size_t size)
{
    static const int64_t streams[] = {1, 2, 3, 4, 4, 5, 8, 8};
    const weft_op_info *info = weft_op_find(op);
    const weft_op_info *layer = weft_mhc_replay_layer_info();
    spec s = {.op = op, .mix = true};
    s.tokens = rng_below(r, 20);
    s.streams = streams[rng_below(r, 8)];
    s.channels = 1 + rng_below(r, rng_below(r, 4) ? 40 : 140);
    if (rng_below(r, 4) == 0) s.channels = 32 * (1 + rng_below(r, 4)); /* whole lines, whole tiles */
    if (strncmp(op, "gdn", 3) == 0) draw_gdn(&s, r);
    s.rows = rng_below(r, 2) ? 1 + rng_below(r, 40) : 0;
    s.act = acts[rng_below(r, 3)];
    s.seed = rng_next(r);
    weft_mhc_preset_numerics((weft_mhc_preset)rng_below(r, WEFT_PRESET_COUNT), &s.numerics);
    s.numerics.apply = (weft_apply)rng_below(r, 2);
    s.contract = (weft_contract)rng_below(r, 2);
    s.layers = 1 + (int)rng_below(r, MAX_LAYERS);
    s.open_ended = rng_below(r, 2);
    if (rng_below(r, 2))
        s.dropout = (weft_dropout){.p = 0.25,
                                   .seed = rng_next(r),
                                   .site = rng_next(r),
                                   .token_base = rng_below(r, 1000),
                                   .shared = (int32_t)rng_below(r, 2)};
    s.independent = rng_below(r, 4) == 0;
    if (rng_below(r, 2)) s.numerics.post_eps = 0.01;
    absent[0] = '\0';
    size_t used = 0;
    for (int32_t i = 0; i < info->num_args + layer->num_args; i++) {
        const weft_arg_info *a = i < info->num_args ? &info->args[i] : &layer->args[i - info->num_args];
        if (i >= info->num_args && strcmp(op, "mhc_replay_fwd") != 0) break;
        if (!a->optional || rng_below(r, 4) || used + strlen(a->name) + 4 > size) continue;
        used += (size_t)snprintf(absent + used, size - used, " %s ", a->name);
    }
    s.absent = absent;
    return s;
}

static void sweep_mix(const char *op)
{
    char absent[512];
    rng r = {rng_name(0, op)};
    for (int i = 0; i < (test_quick() ? 25 : 300); i++) {
        spec s = grid_draw(op, &r, absent, sizeof absent);
        grid_compare(&s);
    }
}

void grid_suite(const char *op)
{
    sweep_streams(op);
    sweep_channels(op);
    sweep_tokens(op);
    sweep_views(op);
    sweep_numerics(op);
    sweep_independent(op);
    sweep_mix(op);
    test_verdict();
}

/* ---- one rounding -------------------------------------------------------------------------------------------- */

/* Outputs whose dtype is free: the activation type is fixed by the inputs. */
static bool can_be_wide(const arg *a)
{
    return a->guard.block && arg_is_output(a) && a->info->type != WEFT_TYPE_ACT &&
           !(a->info->in_place &&
             strstr(a->name, "state")); /* rows of a cache that nobody names stay as they are */
}

static void rounding_case(const spec *s, weft_exec exec)
{
    char where[80];
    problem *narrow = problem_make(s), *wide = problem_make(s), *fresh = problem_make(s);
    problem_must_run(narrow, exec);
    for (int i = 0; i < wide->num_args; i++)
        if (can_be_wide(&wide->arg[i])) arg_rebind(&wide->arg[i], WEFT_F32, false);
    problem_seal(wide);
    problem_must_run(wide, exec);
    for (int i = 0; i < narrow->num_args; i++) {
        const arg *a = &narrow->arg[i];
        if (!can_be_wide(a)) continue;
        double *got = arg_values(a), *value = arg_values(&wide->arg[i]), *before = arg_values(&fresh->arg[i]);
        double largest = 0; /* parts may cancel, so the scale of the whole tensor counts */
        for (int64_t k = 0; k < a->elements; k++) largest = fmax(largest, fabs(value[k]));
        for (int64_t k = 0; k < a->elements; k++) {
            unsigned char cell[8];
            double sum = arg_adds(a) ? before[k] + value[k] : value[k], want;
            value_store(cell, a->view->dtype, (double)(float)sum);
            want = value_load(cell, a->view->dtype);
            if (got[k] == want || (isnan(got[k]) && isnan(want))) continue;
            /* A sum may be fused with the last product, or take a gradient's parts one after the other: that moves
             * it by fp32 roundings of the parts, never by one of the narrow type. */
            double parts = 0x1p-22 * (fabs(before[k]) + largest);
            bool loose = arg_adds(a);
            if (exec.backend == WEFT_BACKEND_CUDA) {
                /* Another dtype or layout may be another kernel there, with another order of sums, and a factor
                 * taken apart or not. */
                parts = 0x1p-14 * largest + 0x1p-22 * fabs(before[k]);
                loose = true;
            }
            if (loose && fabs(got[k] - sum) <= parts + element_unit(a->view->dtype) * (fabs(sum) + parts)) continue;
            test_failed("%s on %s: %s%s: got %.9g, want %.9g = the rounded %s%.9g", problem_text(narrow),
                        exec_name(exec), a->name, arg_coordinate(a, k, where, sizeof where), got[k], want,
                        arg_adds(a) ? "sum with " : "", value[k]);
            break;
        }
        free(got), free(value), free(before);
    }
    problem_free(narrow);
    problem_free(wide);
    problem_free(fresh);
}

/* The reference computes in double: its result in a dtype is its float64 result, rounded once. */
static void rounding_on_ref(const spec *s)
{
    char where[80];
    problem *p = problem_make(s), *exact = problem_twin(p);
    problem_must_run(p, on_ref());
    problem_must_run(exact, on_ref());
    for (int i = 0; i < p->num_args; i++) {
        const arg *a = &p->arg[i];
        if (!a->guard.block || !arg_is_output(a)) continue;
        for (int64_t k = 0; k < a->elements; k++) {
            unsigned char cell[8];
            value_store(cell, a->view->dtype, arg_get(&exact->arg[i], k));
            double got = arg_get(a, k), want = value_load(cell, a->view->dtype);
            if (got == want || (isnan(got) && isnan(want))) continue;
            test_failed("%s on ref: %s%s: got %.9g, want %.9g", problem_text(p), a->name,
                        arg_coordinate(a, k, where, sizeof where), got, want);
            break;
        }
    }
    problem_free(p);
    problem_free(exact);
}

void grid_rounding(const char *op)
{
    char absent[512];
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 1);
    rng r = {rng_name(3, op)};
    for (int i = 0; i < (test_quick() ? 6 : 80); i++) {
        spec s = grid_draw(op, &r, absent, sizeof absent);
        for (int k = 0; k < count; k++)
            if (weft_op_has(weft_op_find(op), execs[k].backend)) rounding_case(&s, execs[k]);
        if (expect_is_single(op)) rounding_on_ref(&s);
    }
    test_verdict();
}
