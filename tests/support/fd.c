/* SPDX-License-Identifier: Apache-2.0
 *
 * The loss is sum <G, output> with random G, which backward gets as its upstream gradients. Which tensor of
 * backward belongs to which of forward follows from the names: d_x is the gradient of x, d_y the upstream gradient
 * of y. */
#include "support/fd.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { MAX_SAMPLES = 60 };

typedef struct pair {
    problem *fwd, *bwd;
    weft_exec exec; /* with a workspace for fwd */
} pair;

static arg *upstream_of(const pair *q, const arg *output)
{
    char name[48];
    snprintf(name, sizeof name, "d_%s", output->name);
    arg *a = problem_arg(q->bwd, name);
    return a && a->info->kind == WEFT_ARG_IN ? a : NULL;
}

static double loss(const pair *q)
{
    double sum = 0;
    if (q->fwd->call(&q->exec, q->fwd->args) != WEFT_OK) test_failed("%s: %s", q->fwd->op->name, weft_last_error());
    for (int i = 0; i < q->fwd->num_args; i++) {
        const arg *out = &q->fwd->arg[i], *up = arg_is_output(out) ? upstream_of(q, out) : NULL;
        if (!out->guard.block || !up || !up->guard.block) continue;
        const double *a = out->view->data, *b = up->view->data; /* both dense float64 */
        for (int64_t k = 0; k < out->elements; k++) sum += a[k] * b[k];
    }
    return sum;
}

/* Fourth-order difference along a direction of one input. */
static double slope(const pair *q, arg *input, const double *direction)
{
    const double h = 1e-4;
    double *x = input->view->data, *keep = arg_values(input), at[4];
    static const double steps[4] = {-2, -1, 1, 2};
    for (int s = 0; s < 4; s++) {
        for (int64_t k = 0; k < input->elements; k++) x[k] = keep[k] + steps[s] * h * direction[k];
        at[s] = loss(q);
    }
    for (int64_t k = 0; k < input->elements; k++) x[k] = keep[k];
    free(keep);
    return (8 * (at[2] - at[1]) - (at[3] - at[0])) / (12 * h);
}

static void check_input(const pair *q, const arg *grad, arg *input)
{
    char where[80];
    double scale = 0, *direction = calloc((size_t)input->elements + 1, sizeof *direction);
    const double *g = grad->view->data;
    rng r = {rng_name(q->fwd->seed, grad->name)};
    if (!direction) fail_msg("out of memory");
    for (int64_t k = 0; k < grad->elements; k++) scale = fmax(scale, fabs(g[k]));
    /* A loss of some hundred terms near 1 is off by about 1e-14; by 1e-4 that is 1e-10. What the fourth order leaves out is
     * h^4 = 1e-16 of the fifth derivative, which is larger than the gradient where eps or a norm is small: 1e-7. */
    double bound = 1e-7 * scale + 2e-10;
    for (int s = 0; s < MAX_SAMPLES && s < grad->elements; s++) {
        int64_t k = grad->elements <= MAX_SAMPLES ? s : rng_below(&r, grad->elements);
        direction[k] = 1;
        double fd = slope(q, input, direction);
        direction[k] = 0;
        if (fabs(fd - g[k]) <= bound) continue;
        test_failed("%s: %s%s: got %.12g, finite difference %.12g, bound %.3g", problem_text(q->bwd), grad->name,
                    arg_coordinate(grad, k, where, sizeof where), g[k], fd, bound);
        break;
    }
    /* One direction through all elements sees those that were not sampled. */
    double dot = 0, norm = 0;
    for (int64_t k = 0; k < grad->elements; k++) {
        direction[k] = rng_next(&r) & 1 ? 1 : -1;
        dot += g[k] * direction[k];
        norm += fabs(g[k]);
    }
    /* A step along all elements moves the loss further: scale the step down by what it moves. */
    double shrink = 1 / sqrt((double)grad->elements + 1);
    for (int64_t k = 0; k < grad->elements; k++) direction[k] *= shrink;
    double fd = slope(q, input, direction) / shrink;
    if (!(fabs(fd - dot) <= 1e-7 * norm + 2e-9))
        test_failed("%s: %s along a random direction: got %.12g, finite difference %.12g", problem_text(q->bwd),
                    grad->name, dot, fd);
    free(direction);
}

/* Gives backward the inputs and results of forward. */
static bool wire(const pair *q)
{
    for (int i = 0; i < q->bwd->num_args; i++) {
        arg *to = &q->bwd->arg[i];
        if (to->info->kind == WEFT_ARG_GRAD && to->guard.block) {
            const arg *of = problem_arg(q->fwd, to->name + 2);
            if (of && !of->guard.block) arg_drop(to); /* the gradient of what forward did without */
        }
        if (to->info->kind != WEFT_ARG_IN || !to->guard.block) continue;
        const arg *same = problem_arg(q->fwd, to->name);
        const arg *out = strncmp(to->name, "d_", 2) == 0 ? problem_arg(q->fwd, to->name + 2) : NULL;
        if (!same && out && !out->guard.block) {
            if (!to->info->optional) return false;
            arg_drop(to);
        }
        if (!same) continue;
        if (!same->guard.block) {
            if (!to->info->optional) return false;
            arg_drop(to);
            continue;
        }
        size_t bytes = (size_t)to->elements * weft_dtype_size(to->view->dtype);
        if (bytes) memcpy(to->view->data, same->view->data, bytes);
    }
    problem_settle(q->bwd);
    problem_seal(q->bwd);
    return true;
}

void fd_check(const spec *s)
{
    char fwd[48], bwd[48];
    spec fs = *s;
    snprintf(fwd, sizeof fwd, "%s_fwd", s->op);
    snprintf(bwd, sizeof bwd, "%s_bwd", s->op);
    fs.act = fs.wide = fs.coef = fs.param = WEFT_F64;
    fs.op = fwd;
    if (fs.gdn.q_scale == 0) {
        /* an eps that shows, and with which no row is so short that differences cannot follow the norm */
        fs.gdn = weft_gdn_defaults();
        fs.gdn.l2_eps = 0.05;
    }
    spec bs = fs;
    bs.op = bwd;
    pair q = {problem_make(&fs), problem_make(&bs), on_ref()};
    size_t bytes = 0;
    if (q.fwd->workspace(&q.exec, q.fwd->args, &bytes) != WEFT_OK) test_failed("%s: %s", fwd, weft_last_error());
    q.exec.workspace = malloc(bytes + 1);
    q.exec.workspace_bytes = bytes;
    loss(&q);
    if (wire(&q)) {
        problem_must_run(q.bwd, on_ref());
        for (int i = 0; i < q.bwd->num_args; i++) {
            const arg *grad = &q.bwd->arg[i];
            if (grad->info->kind != WEFT_ARG_GRAD || !grad->guard.block) continue;
            arg *input = problem_arg(q.fwd, grad->name + 2);
            if (input && input->guard.block && input->info->kind == WEFT_ARG_IN)
                check_input(&q, grad, input);
            else
                test_failed("%s: %s: forward has no input of that name", bwd, grad->name);
        }
    }
    free(q.exec.workspace);
    problem_free(q.fwd);
    problem_free(q.bwd);
}

static bool has(const char *stem, const char *list)
{
    char key[48];
    snprintf(key, sizeof key, " %s ", stem);
    return strstr(list, key) != NULL;
}

/* Each optional argument of forward and backward left out by itself, then all of them. */
static void optional_arguments(const spec *base)
{
    char op[48], absent[64];
    spec s = *base;
    for (int pass = 0; pass < 2; pass++) {
        snprintf(op, sizeof op, "%s_%s", base->op, pass ? "bwd" : "fwd");
        const weft_op_info *info = weft_op_find(op);
        for (int32_t i = 0; i < info->num_args; i++) {
            if (!info->args[i].optional) continue;
            snprintf(absent, sizeof absent, " %s ", info->args[i].name);
            s.absent = absent;
            fd_check(&s);
        }
    }
    s.absent = " bias norm_weight weight sub_weight pre_in y ";
    fd_check(&s);
}

void fd_suite(const char *stem)
{
    static const int64_t streams[] = {4, 1, 2, 3, 8};
    static const int iterations[] = {1, 2, 20};
    bool numerics = has(stem, " mhc_scale mhc_sinkhorn mhc_coef mhc_post mhc_head mhc_pre mhc_boundary ");
    bool rules = has(stem, " mhc_sinkhorn mhc_coef mhc_pre ");
    bool drops = has(stem, " mhc_post mhc_boundary ");
    for (int k = 0; k < 5; k++) {
        spec s = {.op = stem, .tokens = 3, .streams = streams[k], .channels = streams[k] < 4 ? 5 : 3};
        if (test_quick() && k > 2) break;
        fd_check(&s);
        s.contract = WEFT_CONTRACT_SUM;
        if (strcmp(stem, "mhc_contract") == 0) fd_check(&s);
        if (k == 0 || k == 3) optional_arguments(&s);
        for (int preset = 0; numerics && preset < WEFT_PRESET_COUNT; preset++) {
            weft_mhc_preset_numerics((weft_mhc_preset)preset, &s.numerics);
            fd_check(&s);
            /* presets pair an eps kind with a rule; the other index convention, and a gate that is not 2 sigmoid */
            s.numerics.apply = s.numerics.apply == WEFT_APPLY_IN_OUT ? WEFT_APPLY_OUT_IN : WEFT_APPLY_IN_OUT;
            s.numerics.rms_eps = 0.1;
            s.numerics.pre_eps = 0.01;
            s.numerics.post_mult = 1.7;
            fd_check(&s);
        }
        if (strncmp(stem, "mhc_", 4) == 0) {
            spec alone = s;
            alone.independent = true;
            weft_mhc_preset_numerics(WEFT_PRESET_HY_V4, &alone.numerics);
            alone.numerics.post_eps = 0.02;
            fd_check(&alone);
            alone.dropout = (weft_dropout){.p = 0.3, .seed = 7, .site = 3, .token_base = 5};
            if (drops) fd_check(&alone);
        }
        /* eps so large that every place where it stands shows, clamps are active and sums fall below the threshold
         * */
        static const double eps[] = {1e-6, 0.05, 0.6};
        for (int rule = 0; rules && rule < 5; rule++)
            for (int it = 0; it < 3; it++)
                for (int e = 0; e < 3; e++) {
                    s.numerics.sinkhorn = (weft_sinkhorn)rule;
                    s.numerics.sinkhorn_iters = iterations[it];
                    s.numerics.sinkhorn_eps = eps[e];
                    s.numerics.rms_eps_kind = (weft_eps_kind)(it & 1);
                    fd_check(&s);
                    if (rule == WEFT_SINKHORN_LOG) break;
                }
        for (int shared = 0; drops && shared < 2; shared++) {
            s.dropout = (weft_dropout){.p = 0.3, .seed = 7, .site = 3, .token_base = 5, .shared = shared};
            fd_check(&s);
        }
    }
    test_verdict();
}
