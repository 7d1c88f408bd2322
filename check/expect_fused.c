/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused operators as the chains of single ones that they stand for. A stage starts from what the backend stored of
 * the stage before, where it did; otherwise from the expected value together with its error. */
#include <string.h>

#include "check/element.h"
#include "check/expect.h"
#include "check/shape.h"

/* The backend's own result where it was stored, else the expected one after the rounding that handing it on
 * means. */
static quantity as_stored(const expect_call *call, const char *name, quantity q, weft_dtype dtype)
{
    int i = expect_index(call, name);
    if (call->got[i]) return (quantity){call->got[i], NULL};
    return expect_stored(call->scope, dtype, q, expect_length(call, i));
}

static weft_dtype full_type(const expect_scope *s)
{
    return s->act == WEFT_F64 ? WEFT_F64 : WEFT_F32;
}

/* Inputs of the same name. */
static void pass(expect_call *to, const expect_call *from, const char *const *names)
{
    for (; *names; names++) expect_give(to, *names, expect_take(from, *names));
}

static int is_wanted(const expect_call *call, const char *name)
{
    return call->wanted[expect_index(call, name)];
}

static int has_mix(const expect_call *call)
{
    return call->scope->scales == 3;
}

/* Of the coefficients of a site, and of what has no such thing. */
static void want_all(expect_call *call)
{
    for (int i = 0; i < call->op->num_args; i++)
        if (call->op->args[i].kind != WEFT_ARG_IN && (has_mix(call) || !shape_is_mix(&call->op->args[i])))
            call->wanted[i] = 1;
}

/* Hands a stage's results to the operator under the same names, as far as it has and wants them. */
static void results(expect_call *to, const expect_call *from, const char *const *names)
{
    for (; *names; names++)
        if (is_wanted(to, *names)) expect_give(to, *names, expect_take(from, *names));
}

#define NAMES(...) ((const char *const[]){__VA_ARGS__, NULL})

/* ---- coefficients -------------------------------------------------------------------------------------------- */

static expect_call *run_gates(const expect_call *call, const weft_mhc_numerics *numerics)
{
    weft_mhc_scale_fwd_args args = {.numerics = *numerics};
    expect_call *gates = expect_open(call->scope, "mhc_scale_fwd", &args);
    pass(gates, call, NAMES("h", "ms", "alpha", "beta"));
    want_all(gates);
    expect_eval(gates);
    return gates;
}

void expect_coef_fwd(expect_call *call)
{
    const weft_mhc_numerics *numerics = &((const weft_mhc_coef_fwd_args *)call->args)->numerics;
    expect_call *gates = run_gates(call, numerics);
    results(call, gates, NAMES("pre", "post"));
    if (!has_mix(call)) return;
    weft_mhc_sinkhorn_fwd_args args = {.numerics = *numerics};
    expect_call *sinkhorn = expect_open(call->scope, "mhc_sinkhorn_fwd", &args);
    expect_give(sinkhorn, "logits", expect_take(gates, "logits"));
    expect_want(sinkhorn, "res");
    expect_eval(sinkhorn);
    results(call, sinkhorn, NAMES("res"));
}

void expect_coef_bwd(expect_call *call)
{
    const weft_mhc_numerics *numerics = &((const weft_mhc_coef_bwd_args *)call->args)->numerics;
    weft_mhc_scale_bwd_args args = {.numerics = *numerics};
    expect_call *scale = expect_open(call->scope, "mhc_scale_bwd", &args);
    pass(scale, call, NAMES("h", "ms", "alpha", "beta", "d_pre", "d_post"));
    if (expect_take(call, "d_res").val) {
        weft_mhc_sinkhorn_bwd_args sinkhorn_args = {.numerics = *numerics};
        expect_call *sinkhorn = expect_open(call->scope, "mhc_sinkhorn_bwd", &sinkhorn_args);
        expect_give(sinkhorn, "logits", expect_take(run_gates(call, numerics), "logits"));
        pass(sinkhorn, call, NAMES("d_res"));
        expect_want(sinkhorn, "d_logits");
        expect_eval(sinkhorn);
        expect_give(scale, "d_logits", expect_take(sinkhorn, "d_logits"));
    }
    want_all(scale);
    expect_eval(scale);
    results(call, scale, NAMES("d_h", "d_ms", "d_alpha", "d_beta"));
}

/* ---- pre ----------------------------------------------------------------------------------------------------- */

static int64_t gate_rows(const expect_scope *s)
{
    return shape_gates(s->streams, s->scales);
}

static expect_call *run_project(const expect_call *call, quantity x, int64_t rows)
{
    weft_mhc_project_fwd_args args = {0};
    expect_call *project = expect_open(call->scope, "mhc_project_fwd", &args);
    project->rows = rows;
    expect_give(project, "x", x);
    pass(project, call, NAMES("phi", "norm_weight"));
    want_all(project);
    expect_eval(project);
    return project;
}

static quantity run_aggregate(expect_scope *s, quantity x, quantity pre)
{
    weft_mhc_aggregate_fwd_args args = {0};
    expect_call *aggregate = expect_open(s, "mhc_aggregate_fwd", &args);
    expect_give(aggregate, "x", x);
    expect_give(aggregate, "pre", pre);
    want_all(aggregate);
    expect_eval(aggregate);
    return expect_take(aggregate, "u");
}

static quantity run_norm(expect_scope *s, double eps, quantity u, quantity weight)
{
    weft_rmsnorm_fwd_args args = {.eps = eps};
    expect_call *norm = expect_open(s, "rmsnorm_fwd", &args);
    expect_give(norm, "u", u);
    expect_give(norm, "weight", weight);
    want_all(norm);
    expect_eval(norm);
    return expect_take(norm, "v");
}

void expect_pre_fwd(expect_call *call)
{
    const weft_mhc_pre_fwd_args *a = call->args;
    expect_scope *s = call->scope;
    weft_dtype full = full_type(s);
    quantity x = expect_take(call, "x"), mix = expect_take(call, "pre_in");

    expect_call *project = run_project(call, x, gate_rows(s));
    results(call, project, NAMES("h", "ms"));

    weft_mhc_coef_fwd_args args = {.numerics = a->numerics};
    expect_call *coef = expect_open(s, "mhc_coef_fwd", &args);
    expect_give(coef, "h", as_stored(call, "h", expect_take(project, "h"), full));
    expect_give(coef, "ms", as_stored(call, "ms", expect_take(project, "ms"), full));
    pass(coef, call, NAMES("alpha", "beta"));
    want_all(coef);
    expect_eval(coef);
    results(call, coef, NAMES("pre", "post", "res"));

    if (!mix.val) mix = as_stored(call, "pre", expect_take(coef, "pre"), full);
    quantity u = run_aggregate(s, x, mix);
    if (is_wanted(call, "u")) expect_give(call, "u", u);
    if (is_wanted(call, "v"))
        expect_give(call, "v",
                    run_norm(s, a->sub_eps, as_stored(call, "u", u, s->act), expect_take(call, "sub_weight")));
}

/* d_u plus what comes through the norm, and the gradient of the norm's gain. */
static quantity norm_backward(expect_call *call, double eps, quantity x, quantity mix)
{
    expect_scope *s = call->scope;
    int64_t length = s->tokens * s->channels;
    quantity d_u = expect_take(call, "d_u"), none = {expect_array(s, length), NULL};
    if (!expect_take(call, "d_v").val) return d_u.val ? d_u : none;
    weft_rmsnorm_bwd_args args = {.eps = eps};
    expect_call *norm = expect_open(s, "rmsnorm_bwd", &args);
    expect_give(norm, "u", expect_stored(s, s->act, run_aggregate(s, x, mix), length));
    expect_give(norm, "weight", expect_take(call, "sub_weight"));
    pass(norm, call, NAMES("d_v"));
    expect_want(norm, "d_u");
    if (is_wanted(call, "d_sub_weight")) {
        expect_want(norm, "d_weight");
        expect_eval(norm);
        expect_give(call, "d_sub_weight", expect_take(norm, "d_weight"));
    } else {
        expect_eval(norm);
    }
    return expect_sum(s, d_u, expect_take(norm, "d_u"), length);
}

static expect_call *run_aggregate_bwd(expect_scope *s, quantity x, quantity pre, quantity d_u)
{
    weft_mhc_aggregate_bwd_args args = {0};
    expect_call *aggregate = expect_open(s, "mhc_aggregate_bwd", &args);
    expect_give(aggregate, "x", x);
    expect_give(aggregate, "pre", pre);
    expect_give(aggregate, "d_u", d_u);
    want_all(aggregate);
    expect_eval(aggregate);
    return aggregate;
}

/* The projection's share of the gradients; d_x is the sum with another share. */
static void finish_project_bwd(expect_call *call, int64_t rows, quantity d_h, quantity d_ms, quantity other_d_x)
{
    expect_scope *s = call->scope;
    weft_mhc_project_bwd_args args = {0};
    expect_call *project = expect_open(s, "mhc_project_bwd", &args);
    project->rows = rows;
    pass(project, call, NAMES("x", "phi", "norm_weight"));
    expect_give(project, "d_h", d_h);
    expect_give(project, "d_ms", d_ms);
    expect_want(project, "d_x");
    expect_want(project, "d_phi");
    if (is_wanted(call, "d_norm_weight")) expect_want(project, "d_norm_weight");
    expect_eval(project);
    results(call, project, NAMES("d_phi", "d_norm_weight"));
    if (is_wanted(call, "d_x"))
        expect_give(call, "d_x",
                    expect_sum(s, other_d_x, expect_take(project, "d_x"), s->tokens * s->streams * s->channels));
}

void expect_pre_bwd(expect_call *call)
{
    const weft_mhc_pre_bwd_args *a = call->args;
    expect_scope *s = call->scope;
    int64_t length = s->tokens * s->streams;
    quantity x = expect_take(call, "x"), mix = expect_take(call, "pre_in"), d_pre = expect_take(call, "d_pre");
    int shifted = mix.val != NULL;
    if (!shifted) mix = expect_stored(s, full_type(s), expect_take(run_gates(call, &a->numerics), "pre"), length);

    quantity d_u = norm_backward(call, a->sub_eps, x, mix);
    expect_call *aggregate = run_aggregate_bwd(s, x, mix, d_u);
    quantity d_mix = expect_take(aggregate, "d_pre");
    if (!shifted)
        d_pre = expect_sum(s, d_pre, d_mix, length);
    else if (is_wanted(call, "d_pre_in"))
        expect_give(call, "d_pre_in", d_mix);

    weft_mhc_coef_bwd_args args = {.numerics = a->numerics};
    expect_call *coef = expect_open(s, "mhc_coef_bwd", &args);
    pass(coef, call, NAMES("h", "ms", "alpha", "beta", "d_post", "d_res"));
    expect_give(coef, "d_pre", d_pre);
    want_all(coef);
    expect_eval(coef);
    results(call, coef, NAMES("d_alpha", "d_beta"));
    finish_project_bwd(call, gate_rows(s), expect_take(coef, "d_h"), expect_take(coef, "d_ms"),
                       expect_take(aggregate, "d_x"));
}

/* ---- boundary ------------------------------------------------------------------------------------------------ */

static quantity run_post(const expect_call *call, const weft_mhc_numerics *numerics, const weft_dropout *dropout)
{
    weft_mhc_post_fwd_args args = {.numerics = *numerics, .dropout = *dropout};
    expect_call *post = expect_open(call->scope, "mhc_post_fwd", &args);
    pass(post, call, NAMES("x", "f", "bias", "post", "res"));
    want_all(post);
    expect_eval(post);
    return expect_take(post, "y");
}

/* Names of the next site's coefficients in boundary and in pre. */
static const char *const renamed[][2] = {{"pre_out", "pre"}, {"post_out", "post"}, {"res_out", "res"}};

void expect_boundary_fwd(expect_call *call)
{
    const weft_mhc_boundary_fwd_args *a = call->args;
    quantity y = run_post(call, &a->numerics, &a->dropout);
    expect_give(call, "y", y);

    weft_mhc_pre_fwd_args args = {.numerics = a->numerics, .sub_eps = a->sub_eps};
    expect_call *pre = expect_open(call->scope, "mhc_pre_fwd", &args);
    expect_give(pre, "x", as_stored(call, "y", y, call->scope->act));
    pass(pre, call, NAMES("phi", "norm_weight", "alpha", "beta", "pre_in", "sub_weight"));
    for (const char *const *name = NAMES("h", "ms", "u", "v"); *name; name++)
        pre->got[expect_index(pre, *name)] = expect_got(call, *name).val;
    for (int i = 0; i < (has_mix(call) ? 3 : 2); i++)
        pre->got[expect_index(pre, renamed[i][1])] = expect_got(call, renamed[i][0]).val;
    want_all(pre);
    expect_eval(pre);
    results(call, pre, NAMES("h", "ms", "u", "v"));
    for (int i = 0; i < 3; i++)
        if (is_wanted(call, renamed[i][0])) expect_give(call, renamed[i][0], expect_take(pre, renamed[i][1]));
}

void expect_boundary_bwd(expect_call *call)
{
    const weft_mhc_boundary_bwd_args *a = call->args;
    expect_scope *s = call->scope;
    int64_t length = s->tokens * s->streams * s->channels;
    quantity y = expect_take(call, "y");
    if (!y.val) y = expect_stored(s, s->act, run_post(call, &a->numerics, &a->dropout), length);

    weft_mhc_pre_bwd_args args = {.numerics = a->numerics, .sub_eps = a->sub_eps};
    expect_call *pre = expect_open(s, "mhc_pre_bwd", &args);
    expect_give(pre, "x", y);
    pass(pre, call, NAMES("phi", "norm_weight", "alpha", "beta", "pre_in", "sub_weight", "h", "ms", "d_u", "d_v"));
    expect_give(pre, "d_pre", expect_take(call, "d_pre_out"));
    expect_give(pre, "d_post", expect_take(call, "d_post_out"));
    expect_give(pre, "d_res", expect_take(call, "d_res_out"));
    const char *const *parameters =
        NAMES("d_phi", "d_norm_weight", "d_alpha", "d_beta", "d_pre_in", "d_sub_weight");
    expect_want(pre, "d_x");
    for (const char *const *name = parameters; *name; name++)
        if (is_wanted(call, *name)) expect_want(pre, *name);
    expect_eval(pre);
    results(call, pre, parameters);

    weft_mhc_post_bwd_args post_args = {.numerics = a->numerics, .dropout = a->dropout};
    expect_call *post = expect_open(s, "mhc_post_bwd", &post_args);
    pass(post, call, NAMES("x", "f", "bias", "post", "res"));
    expect_give(post, "d_y", expect_sum(s, expect_take(call, "d_y"), expect_take(pre, "d_x"), length));
    for (const char *const *name = NAMES("d_x", "d_f", "d_bias", "d_post", "d_res"); *name; name++)
        if (is_wanted(call, *name)) expect_want(post, *name);
    expect_eval(post);
    results(call, post, NAMES("d_x", "d_f", "d_bias", "d_post", "d_res"));
}
