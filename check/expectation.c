/* SPDX-License-Identifier: Apache-2.0
 *
 * From a call with tensors of any dtype and layout to quantities and back: the front of expect.h. */
#include <math.h>
#include <string.h>

#include "check/element.h"
#include "check/expect.h"
#include "check/shape.h"

const weft_tensor *expect_tensor(const weft_arg_info *info, const void *args)
{
    const void *field = (const char *)args + info->offset;
    return info->kind == WEFT_ARG_GRAD ? &((const weft_grad *)field)->to : field;
}

double *expect_read(expect_scope *scope, const weft_tensor *t)
{
    int64_t count = tensor_count(t);
    double *values = expect_array(scope, count);
    cursor at = cursor_open(t);
    for (int64_t i = 0; i < count; i++, cursor_step(&at))
        values[i] = value_load(cursor_data(&at, t->data), t->dtype);
    return values;
}

/* The sizes that the dimensions' symbols stand for in this call. */
static void read_sizes(expect_scope *s, const weft_op_info *op, const void *args, int64_t *rows)
{
    s->scales = 3;
    for (int i = 0; i < op->num_args; i++) /* first: it says what the rows of gates are made of */
        if (op->args[i].dim[0] == WEFT_DIM_SCALES && expect_tensor(&op->args[i], args)->dtype != WEFT_NONE)
            s->scales = expect_tensor(&op->args[i], args)->shape[0];
    for (int i = 0; i < op->num_args; i++) {
        const weft_arg_info *info = &op->args[i];
        const weft_tensor *t = expect_tensor(info, args);
        if (t->dtype == WEFT_NONE) continue;
        if (info->type == WEFT_TYPE_ACT) s->act = t->dtype;
        for (int d = 0; d < t->ndim; d++) {
            if (info->dim[d] == WEFT_DIM_TOKENS) s->tokens = t->shape[d];
            if (info->dim[d] == WEFT_DIM_STREAMS) s->streams = t->shape[d];
            if (info->dim[d] == WEFT_DIM_CHANNELS) s->channels = t->shape[d];
            if (info->dim[d] == WEFT_DIM_ROWS) *rows = t->shape[d];
            /* the only trace of n in gates without their outputs */
            for (int64_t n = 1; info->dim[d] == WEFT_DIM_GATES && n <= WEFT_MAX_STREAMS; n++)
                if (shape_gates(n, s->scales) == t->shape[d]) s->streams = n;
        }
    }
}

/* Which arithmetic the backend may use. On a GPU a sum over channels ends with a warp's tree and its warps one after the
 * other, and exp, log and the inverse root are good to 2 ulp, four roundings each. The projection of 16-bit streams may
 * run on bf16 units: a float32 factor is then two bf16 numbers. A tensor core adds 16 products and the sum so far in one
 * go, each of the 17 cut off (not rounded) at 2^-23 of the largest: two units for each, once for each of up to three
 * products of high and low parts. */
static void read_arithmetic(expect_scope *s, const weft_exec *exec, const weft_op_info *op, const void *args)
{
    weft_dtype phi = WEFT_NONE, gain = WEFT_NONE;
    weft_isa isa = exec->isa == WEFT_ISA_BEST ? weft_cpu_isa() : exec->isa;
    int cuda = exec->backend == WEFT_BACKEND_CUDA;
    s->unit = ldexp(1, exec->backend == WEFT_BACKEND_REF ? -52 : -24);
    s->tree = cuda ? 24 : 8;
    s->sigmoid = cuda ? 8 : 4;
    s->root = cuda ? 8 : 6;
    s->normalize = cuda ? 11 : 3;
    if (exec->backend == WEFT_BACKEND_REF) return;
    for (int i = 0; i < op->num_args; i++) {
        if (!strcmp(op->args[i].name, "phi")) phi = expect_tensor(&op->args[i], args)->dtype;
        if (!strcmp(op->args[i].name, "norm_weight")) gain = expect_tensor(&op->args[i], args)->dtype;
    }
    const char *path = "";
    if (cuda && !strncmp(op->name, "gdn_rule", 8) && weft_op_path(op, exec, args, &path) == WEFT_OK &&
        !strncmp(path, "in chunks", 9)) {
        s->chunk = 64;
        s->tensor = 17 * 2 * 3 / 16.0;
        s->split = ldexp(1, -17);
        s->low = 2 * s->split;
    }
    if (phi == WEFT_NONE) return;
    const double term = 17 * 2 * 3 / 16.0;
    /* A low part is at most half an ulp of the high one, and half an ulp of the low one is lost. */
    const double half = ldexp(1, -17);
    if (cuda && s->act != WEFT_F32) {
        s->tensor = term;
        s->exact_phi = s->act == WEFT_BF16 && phi == WEFT_BF16 && gain == WEFT_NONE;
        s->split = half;
        s->low = 2 * half;
    } else if (cuda && exec->precision == WEFT_PRECISION_TF32) {
        s->tensor = term;
        s->split = ldexp(1, -10); /* both factors of a product may be rounded to 11 bits */
    } else if (isa == WEFT_ISA_AMX && s->act == WEFT_BF16 && s->channels % 32 == 0 &&
               !strcmp(op->name + strlen(op->name) - 3, "fwd")) {
        s->split = half; /* tiles of 32 channels, forward only */
    }
}

void expect_begin(expectation *e, const weft_exec *exec, const weft_op_info *op, const void *args)
{
    *e = (expectation){.op = op, .args = args};
    expect_scope *s = &e->scope;
    int64_t rows = 0;
    if (op->num_args > EXPECT_MAX_ARGS) {
        expect_fail(s, "an operator with more arguments than expect.h has room for");
        return;
    }
    read_sizes(s, op, args, &rows);
    read_arithmetic(s, exec, op, args);
    e->call = expect_open(s, op->name, args);
    e->call->rows = rows;
    for (int i = 0; i < op->num_args; i++) {
        const weft_arg_info *info = &op->args[i];
        const weft_tensor *t = expect_tensor(info, args);
        if (t->dtype == WEFT_NONE) continue;
        e->call->wanted[i] = info->kind != WEFT_ARG_IN;
        if (info->kind == WEFT_ARG_IN) e->call->q[i].val = expect_read(s, t);
        const weft_grad *grad = (const void *)((const char *)args + info->offset);
        if (info->kind == WEFT_ARG_GRAD && grad->add) e->old[i] = expect_read(s, t);
    }
    if (!strcmp(op->name, "mhc_replay_fwd")) expect_replay_begin(e);
}

void expect_add_result(expectation *e, const char *name, const weft_tensor *tensor, quantity q, const double *old)
{
    expect_scope *s = &e->scope;
    int64_t length = tensor_count(tensor);
    /* Of the store, and of what may underflow on the way there. */
    double unit = element_unit(tensor->dtype), tiny = element_tiny(tensor->dtype) / 2,
           lost = s->unit < 0x1p-40 ? 0 : EXPECT_UNDERFLOW;
    if (e->num_results % 16 == 0) {
        expect_result *list = expect_room(s, (size_t)(e->num_results + 16) * sizeof *list);
        if (e->num_results) memcpy(list, e->result, (size_t)e->num_results * sizeof *list);
        e->result = list;
    }
    expect_result *r = &e->result[e->num_results++];
    *r = (expect_result){name, tensor, q.val, expect_array(s, length)};
    for (int64_t k = 0; k < length; k++) {
        double error = error_of(q, k);
        if (old) {
            q.val[k] += old[k];
            error += s->unit * fabs(q.val[k]);
        }
        error += lost;
        r->bound[k] = error + unit * (fabs(q.val[k]) + error) + tiny;
    }
}

int expect_finish(expectation *e)
{
    expect_call *call = e->call;
    if (!call) return 0;
    for (int i = 0; i < e->op->num_args; i++)
        if (call->wanted[i]) call->got[i] = expect_read(&e->scope, expect_tensor(&e->op->args[i], e->args));
    if (e->layers) {
        expect_replay_finish(e);
    } else {
        expect_eval(call);
        for (int i = 0; i < e->op->num_args && !e->scope.problem[0]; i++)
            if (call->wanted[i])
                expect_add_result(e, e->op->args[i].name, expect_tensor(&e->op->args[i], e->args), call->q[i],
                                  e->old[i]);
    }
    return e->scope.problem[0] == 0;
}

void expect_end(expectation *e)
{
    expect_free(&e->scope);
    *e = (expectation){0};
}
