/* SPDX-License-Identifier: Apache-2.0
 *
 * The learned head and replay, as chains of single operators like the rest of the fused ones. */
#include <stdlib.h>

#include "check/element.h"
#include "check/expect.h"

/* ---- head -------------------------------------------------------------------------------------------------------
 * Its gates are the first group of mhc_scale: with the other groups' rows zero, that operator computes them. */

static quantity padded(expect_scope *s, quantity q, int64_t tokens, int64_t from, int64_t to)
{
    quantity r = {expect_array(s, tokens * to), expect_array(s, tokens * to)};
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t j = 0; j < from && j < to; j++) {
            r.val[t * to + j] = q.val[t * from + j];
            r.err[t * to + j] = error_of(q, t * from + j);
        }
    return r;
}

static int64_t gate_rows(const expect_scope *s)
{
    return 2 * s->streams + s->streams * s->streams;
}

static weft_mhc_numerics head_numerics(double rms_eps, weft_eps_kind kind, double pre_eps)
{
    return (weft_mhc_numerics){.rms_eps = rms_eps, .rms_eps_kind = kind, .pre_eps = pre_eps, .post_mult = 1};
}

static void give_gates(expect_call *scale, const expect_call *call, quantity h, quantity ms)
{
    expect_scope *s = call->scope;
    expect_give(scale, "h", padded(s, h, s->tokens, s->streams, gate_rows(s)));
    expect_give(scale, "ms", ms);
    expect_give(scale, "alpha", padded(s, expect_take(call, "alpha"), 1, 1, 3));
    expect_give(scale, "beta", padded(s, expect_take(call, "beta"), 1, s->streams, gate_rows(s)));
}

static quantity run_gates(const expect_call *call, const weft_mhc_numerics *numerics, quantity h, quantity ms)
{
    weft_mhc_scale_fwd_args args = {.numerics = *numerics};
    expect_call *scale = expect_open(call->scope, "mhc_scale_fwd", &args);
    give_gates(scale, call, h, ms);
    expect_want(scale, "pre");
    expect_want(scale, "post");
    expect_want(scale, "logits");
    expect_eval(scale);
    /* The gates are never stored: a backend may hand them on in float32 or unrounded. */
    quantity pre = expect_take(scale, "pre");
    double unit = element_unit(call->scope->act == WEFT_F64 ? WEFT_F64 : WEFT_F32);
    for (int64_t k = 0; k < call->scope->tokens * call->scope->streams; k++) pre.err[k] += unit * pre.val[k];
    return pre;
}

void expect_head_fwd(expect_call *call)
{
    const weft_mhc_head_fwd_args *a = call->args;
    expect_scope *s = call->scope;
    weft_mhc_numerics numerics = head_numerics(a->rms_eps, a->rms_eps_kind, a->pre_eps);
    weft_dtype full = s->act == WEFT_F64 ? WEFT_F64 : WEFT_F32;

    weft_mhc_project_fwd_args project_args = {0};
    expect_call *project = expect_open(s, "mhc_project_fwd", &project_args);
    project->rows = s->streams;
    expect_give(project, "x", expect_take(call, "x"));
    expect_give(project, "phi", expect_take(call, "phi"));
    expect_give(project, "norm_weight", expect_take(call, "norm_weight"));
    expect_want(project, "h");
    expect_want(project, "ms");
    expect_eval(project);
    quantity h = expect_take(project, "h"), ms = expect_take(project, "ms");
    expect_give(call, "h", h);
    expect_give(call, "ms", ms);
    h = expect_got(call, "h").val ? expect_got(call, "h") : expect_stored(s, full, h, s->tokens * s->streams);
    ms = expect_got(call, "ms").val ? expect_got(call, "ms") : expect_stored(s, full, ms, s->tokens);

    weft_mhc_aggregate_fwd_args aggregate_args = {0};
    expect_call *aggregate = expect_open(s, "mhc_aggregate_fwd", &aggregate_args);
    expect_give(aggregate, "x", expect_take(call, "x"));
    expect_give(aggregate, "pre", run_gates(call, &numerics, h, ms));
    expect_want(aggregate, "u");
    expect_eval(aggregate);
    expect_give(call, "u", expect_take(aggregate, "u"));
}

void expect_head_bwd(expect_call *call)
{
    const weft_mhc_head_bwd_args *a = call->args;
    expect_scope *s = call->scope;
    weft_mhc_numerics numerics = head_numerics(a->rms_eps, a->rms_eps_kind, a->pre_eps);
    quantity x = expect_take(call, "x"), h = expect_take(call, "h"), ms = expect_take(call, "ms");

    weft_mhc_aggregate_bwd_args aggregate_args = {0};
    expect_call *aggregate = expect_open(s, "mhc_aggregate_bwd", &aggregate_args);
    expect_give(aggregate, "x", x);
    expect_give(aggregate, "pre", run_gates(call, &numerics, h, ms));
    expect_give(aggregate, "d_u", expect_take(call, "d_u"));
    expect_want(aggregate, "d_x");
    expect_want(aggregate, "d_pre");
    expect_eval(aggregate);

    weft_mhc_scale_bwd_args scale_args = {.numerics = numerics};
    expect_call *scale = expect_open(s, "mhc_scale_bwd", &scale_args);
    give_gates(scale, call, h, ms);
    expect_give(scale, "d_pre", expect_take(aggregate, "d_pre"));
    expect_want(scale, "d_h");
    expect_want(scale, "d_ms");
    expect_want(scale, "d_alpha");
    expect_want(scale, "d_beta");
    expect_eval(scale);
    expect_give(call, "d_alpha", expect_take(scale, "d_alpha"));
    expect_give(call, "d_beta", expect_take(scale, "d_beta"));

    weft_mhc_project_bwd_args project_args = {0};
    expect_call *project = expect_open(s, "mhc_project_bwd", &project_args);
    project->rows = s->streams;
    expect_give(project, "x", x);
    expect_give(project, "phi", expect_take(call, "phi"));
    expect_give(project, "norm_weight", expect_take(call, "norm_weight"));
    expect_give(project, "d_h", padded(s, expect_take(scale, "d_h"), s->tokens, gate_rows(s), s->streams));
    expect_give(project, "d_ms", expect_take(scale, "d_ms"));
    expect_want(project, "d_x");
    expect_want(project, "d_phi");
    int gain = call->wanted[expect_index(call, "d_norm_weight")];
    if (gain) expect_want(project, "d_norm_weight");
    expect_eval(project);
    expect_give(call, "d_phi", expect_take(project, "d_phi"));
    if (gain) expect_give(call, "d_norm_weight", expect_take(project, "d_norm_weight"));
    expect_give(call, "d_x",
                expect_sum(s, expect_take(aggregate, "d_x"), expect_take(project, "d_x"),
                           s->tokens * s->streams * s->channels));
}

/* ---- replay -------------------------------------------------------------------------------------------------- */

struct expect_layer {
    quantity in[16]; /* by index in weft_mhc_replay_layer_info */
};

void expect_replay_begin(expectation *e)
{
    const weft_mhc_replay_fwd_args *a = e->args;
    const weft_op_info *info = weft_mhc_replay_layer_info();
    expect_scope *s = &e->scope;
    e->layers = (void *)expect_array(s, a->num_layers * (int64_t)(sizeof *e->layers / sizeof(double)));
    for (int32_t l = 0; l < a->num_layers; l++)
        for (int i = 0; i < info->num_args; i++) {
            const weft_tensor *t = expect_tensor(&info->args[i], &a->layers[l]);
            if (t->dtype != WEFT_NONE && info->args[i].kind == WEFT_ARG_IN)
                e->layers[l].in[i].val = expect_read(s, t);
        }
}

static quantity layer_input(const expectation *e, int32_t l, const char *name)
{
    const weft_op_info *info = weft_mhc_replay_layer_info();
    expect_call names = {.op = info};
    return e->layers[l].in[expect_index(&names, name)];
}

/* The result is reported where it is requested; the next stage starts from it, or from the rounded expectation. */
static quantity hand_on(expectation *e, const char *name, const weft_tensor *t, quantity q, int64_t length)
{
    if (t->dtype == WEFT_NONE) return expect_stored(&e->scope, e->scope.act, q, length);
    expect_add_result(e, name, t, q, NULL);
    return (quantity){expect_read(&e->scope, t), NULL};
}

void expect_replay_finish(expectation *e)
{
    const weft_mhc_replay_fwd_args *a = e->args;
    expect_scope *s = &e->scope;
    quantity x = expect_take(e->call, "x");
    for (int32_t l = 0; l < a->num_layers && !s->problem[0]; l++) {
        const weft_mhc_replay_layer *layer = &a->layers[l];
        if (layer->u.dtype != WEFT_NONE || layer->v.dtype != WEFT_NONE) {
            weft_mhc_aggregate_fwd_args args = {0};
            expect_call *aggregate = expect_open(s, "mhc_aggregate_fwd", &args);
            expect_give(aggregate, "x", x);
            expect_give(aggregate, "pre", layer_input(e, l, "pre"));
            expect_want(aggregate, "u");
            expect_eval(aggregate);
            quantity u = hand_on(e, "u", &layer->u, expect_take(aggregate, "u"), s->tokens * s->channels);
            if (layer->v.dtype != WEFT_NONE) {
                weft_rmsnorm_fwd_args norm_args = {.eps = layer->sub_eps};
                expect_call *norm = expect_open(s, "rmsnorm_fwd", &norm_args);
                expect_give(norm, "u", u);
                expect_give(norm, "weight", layer_input(e, l, "sub_weight"));
                expect_want(norm, "v");
                expect_eval(norm);
                expect_add_result(e, "v", &layer->v, expect_take(norm, "v"), NULL);
            }
        }
        if (!layer_input(e, l, "f").val) continue;
        weft_mhc_post_fwd_args args = {.numerics = a->numerics, .dropout = layer->dropout};
        expect_call *post = expect_open(s, "mhc_post_fwd", &args);
        static const char *const names[] = {"f", "bias", "post", "res"};
        expect_give(post, "x", x);
        for (int i = 0; i < 4; i++) expect_give(post, names[i], layer_input(e, l, names[i]));
        expect_want(post, "y");
        expect_eval(post);
        x = hand_on(e, "y", &layer->y, expect_take(post, "y"), s->tokens * s->streams * s->channels);
    }
}
