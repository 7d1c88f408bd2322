/* SPDX-License-Identifier: Apache-2.0
 *
 * Building one call: sizes, strides, buffers between guards, random values. */
#include "support/problem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#include "support/fields.h"
#include "support/memory.h"

/* ---- names of things ----------------------------------------------------------------------------------------- */

const char *problem_text(const problem *p)
{
    static _Thread_local char text[700];
    const spec *s = &p->spec;
    snprintf(
        text, sizeof text,
        "%s tokens=%lld streams=%lld channels=%lld rows=%lld act=%s wide=%s coef=%s param=%s layout=%d/%d pad=%lld "
        "misalign=%d broadcast=%d add=%d mix=%d independent=%d absent=\"%s\" sinkhorn=%d iters=%d p=%g seed=%llu",
        s->op, (long long)s->tokens, (long long)s->streams, (long long)s->channels, (long long)s->rows,
        weft_dtype_name(s->act), weft_dtype_name(s->wide), weft_dtype_name(s->coef), weft_dtype_name(s->param),
        (int)s->stream_layout, (int)s->param_layout, (long long)s->pad, s->misalign, s->broadcast, s->add, s->mix,
        s->independent, s->absent ? s->absent : "", (int)s->numerics.sinkhorn, (int)s->numerics.sinkhorn_iters,
        s->dropout.p, (unsigned long long)p->seed);
    if (strncmp(s->op, "gdn", 3) == 0) {
        size_t used = strlen(text);
        const weft_gdn_options *o = &s->gdn;
        snprintf(
            text + used, sizeof text - used,
            " steps=%lld packed=%d heads=%lld/%lld/%lld dims=%lld/%lld width=%lld history=%lld options=%d %d %g %g "
            "%g %d %d %d %d chunk=%d",
            (long long)s->steps, s->packed, (long long)s->key_heads, (long long)s->streams, (long long)s->heads,
            (long long)s->key_dim, (long long)s->value_dim, (long long)s->width, (long long)s->history,
            (int)o->activation, (int)o->l2norm, o->l2_eps, o->q_scale, o->beta_scale, (int)o->head_map,
            (int)o->rounding, (int)o->g_chunk, (int)o->g_log2, s->rule_chunk);
    }
    return text;
}

const char *arg_coordinate(const arg *a, int64_t index, char *text, size_t size)
{
    int64_t at[WEFT_MAX_DIMS] = {0};
    for (int d = a->view->ndim - 1; d >= 0; d--) {
        at[d] = index % a->view->shape[d];
        index /= a->view->shape[d];
    }
    size_t used = (size_t)snprintf(text, size, "[");
    for (int d = 0; d < a->view->ndim && used < size; d++)
        used += (size_t)snprintf(text + used, size - used, d ? ", %lld" : "%lld", (long long)at[d]);
    if (used < size) snprintf(text + used, size - used, "]");
    return text;
}

/* ---- elements ------------------------------------------------------------------------------------------------ */

void *arg_at(const arg *a, int64_t index)
{
    return (char *)a->view->data + tensor_offset(a->view, index) * (int64_t)weft_dtype_size(a->view->dtype);
}

double arg_get(const arg *a, int64_t index)
{
    return value_load(arg_at(a, index), a->view->dtype);
}

void arg_set(arg *a, int64_t index, double value)
{
    value_store(arg_at(a, index), a->view->dtype, value);
}

double *arg_values(const arg *a)
{
    double *out = must_alloc((size_t)a->elements * sizeof *out + 64);
    cursor c = cursor_open(a->view);
    for (int64_t i = 0; i < a->elements; i++, cursor_step(&c))
        out[i] = value_load(cursor_data(&c, a->view->data), a->view->dtype);
    return out;
}

void arg_fill(arg *a, const double *values)
{
    cursor c = cursor_open(a->view);
    for (int64_t i = 0; i < a->elements; i++, cursor_step(&c))
        value_store(cursor_data(&c, a->view->data), a->view->dtype, values[i]);
}

arg *problem_arg(problem *p, const char *name)
{
    for (int i = 0; i < p->num_args; i++)
        if (strcmp(p->arg[i].name, name) == 0) return &p->arg[i];
    return NULL;
}

/* ---- building ------------------------------------------------------------------------------------------------ */

/* First token of a packed sequence: the same in forward and backward. */
static int64_t packed_start(const spec *s, int64_t n)
{
    rng r = {rng_name(s->seed, "lengths")};
    int64_t start = 0;
    for (int64_t i = 0; i < n; i++) start += s->lengths ? s->lengths[i] : rng_below(&r, 2 * s->steps + 1);
    return start;
}

/* Values of offsets, or rows of a cache in another order than the sequences', every fifth one of padding. */
static double index_value(const spec *s, const weft_arg_info *info, int64_t n)
{
    if (info->dim[0] == WEFT_DIM_OFFSETS) return (double)packed_start(s, n);
    return n % 5 == 4 ? -1 : (double)(s->tokens + 1 - n);
}

static shape_sizes sizes_of(const spec *s)
{
    const bool packed = s->packed;
    return (shape_sizes){.tokens = s->tokens,
                         .streams = s->streams,
                         .channels = s->channels,
                         .rows = s->rows,
                         .scales = s->independent ? 2 : 3,
                         .batch = packed ? 1 : s->tokens,
                         .steps =
                             packed ? packed_start(s, s->tokens) + (s->padding > 0 ? s->padding : 0) : s->steps,
                         .sequences = s->tokens,
                         .cache = s->tokens + 2,
                         .key_heads = s->key_heads,
                         .value_heads = s->streams,
                         .heads = s->heads,
                         .key_dim = s->key_dim,
                         .value_dim = s->value_dim,
                         .width = s->width,
                         .history = s->history};
}

/* What one argument is made of: the spec's choice, or with `mix` a draw of its own. */
typedef struct choice {
    weft_dtype dtype;
    layout order;
    int64_t pad;
    int misalign;
    bool add, broadcast;
} choice;

static choice choose(const spec *s, const weft_arg_info *info, rng *r)
{
    static const weft_dtype any[] = {WEFT_F32, WEFT_BF16, WEFT_F16};
    bool is_stream = info->type == WEFT_TYPE_ACT || info->type == WEFT_TYPE_WIDE;
    choice c = {.order = is_stream ? s->stream_layout : s->param_layout,
                .pad = s->pad,
                .misalign = s->misalign,
                .add = s->add,
                .broadcast = s->broadcast};
    shape_types types = {s->act, s->wide, s->coef, s->param, s->seed % 2 ? WEFT_I64 : WEFT_I32};
    if (s->mix) {
        uint64_t bits = rng_next(r);
        types.wide = bits & 1 ? WEFT_F32 : s->act;
        types.coef = types.param = any[bits % 3];
        c.order = (layout)(bits >> 8 & 3) % LAYOUT_COUNT; /* NC twice as often */
        c.pad = bits >> 12 & 1 ? (int64_t)(bits >> 13 & 7) : 0;
        c.misalign = (int)(bits >> 16 & 3);
        c.add = bits >> 20 & 1;
        c.broadcast = (bits >> 24 & 7) == 0;
    }
    c.dtype = shape_dtype(&types, info->type);
    c.broadcast =
        c.broadcast && info->type == WEFT_TYPE_COEF && info->kind == WEFT_ARG_IN && info->dim[0] == WEFT_DIM_TOKENS;
    return c;
}

static void bind_buffer(arg *a, const choice *c)
{
    weft_tensor *t = a->view;
    size_t size = weft_dtype_size(t->dtype);
    a->elements = tensor_count(t);
    if (!guard_alloc(&a->guard, (size_t)tensor_span(t) * size, (size_t)c->misalign * size))
        fail_msg("out of memory");
    t->data = a->elements ? guard_data(&a->guard) : NULL;
}

static bool listed(const char *names, const char *name)
{
    char key[48];
    snprintf(key, sizeof key, " %s ", name);
    return strstr(names, key) != NULL;
}

static bool left_out(const spec *s, const weft_arg_info *info, const char *full, int layer)
{
    if (!info->optional) return false;
    if (s->independent && shape_is_mix(info)) return true;
    if (!s->absent) return false;
    if (layer >= 0 && layer < s->layers - 1 && listed(" f post ", info->name)) return false;
    return strcmp(s->absent, "*") == 0 || listed(s->absent, info->name) || listed(s->absent, full);
}

static void add_args(problem *p, const weft_op_info *info, void *base, int layer)
{
    for (int32_t i = 0; i < info->num_args; i++) {
        arg *a = &p->arg[p->num_args++];
        if (p->num_args > MAX_ARGS) fail_msg("MAX_ARGS is too small for %s", p->op->name);
        a->info = &info->args[i];
        a->layer = layer;
        a->by_token =
            a->info->dim[0] == WEFT_DIM_TOKENS ||
            (!p->spec.packed && (a->info->dim[0] == WEFT_DIM_BATCH || a->info->dim[0] == WEFT_DIM_SEQUENCES));
        a->view = (weft_tensor *)(void *)((char *)base + a->info->offset);
        if (layer < 0)
            snprintf(a->name, sizeof a->name, "%s", a->info->name);
        else
            snprintf(a->name, sizeof a->name, "layers[%d].%s", layer, a->info->name);
    }
}

static void make_arg(problem *p, arg *a)
{
    const spec *s = &p->spec;
    rng r = {rng_name(p->seed, a->name)};
    choice c = choose(s, a->info, &r);
    memset(a->view, 0, sizeof *a->view);
    bool offsets = a->info->dim[0] == WEFT_DIM_OFFSETS; /* what makes a call packed */
    if (offsets ? !s->packed : left_out(s, a->info, a->name, a->layer)) return;
    /* "The last layer may lack f, post, res and y" */
    if (s->open_ended && a->layer == s->layers - 1 && listed(" f bias post res y ", a->info->name)) return;
    const shape_sizes sizes = sizes_of(s);
    *a->view = shape_tensor(&sizes, a->info, c.dtype, c.order, c.pad);
    if (c.broadcast) a->view->stride[0] = 0;
    bind_buffer(a, &c);
    if (a->info->kind == WEFT_ARG_GRAD) ((weft_grad *)(void *)a->view)->add = c.add;
    if (arg_is_output(a) && !arg_adds(a)) return; /* stays NaN */
    double *values = must_alloc((size_t)a->elements * sizeof *values + 64);
    const shape_values typical = shape_values_of(p->op, &sizes, a->info);
    const bool scaled = a->info->type == WEFT_TYPE_ACT || a->info->type == WEFT_TYPE_WIDE;
    for (int64_t i = 0; i < a->elements; i++)
        values[i] = arg_is_index(a) ? index_value(s, a->info, i)
                                    : shape_value(typical, rng_normal(&r)) * (scaled ? s->scale : 1);
    arg_fill(a, values);
    free(values);
}

/* Some optional tensors need each other: leaves out what has lost its partner. */
static void drop_without(problem *p, const char *what, const char *needs)
{
    arg *a = problem_arg(p, what), *b = problem_arg(p, needs);
    if (a && b && a->guard.block && !b->guard.block) arg_drop(a);
}

void problem_settle(problem *p)
{
    for (int i = 0; i < 2 * p->op->num_args; i++) { /* twice: what one takes away another may need */
        const int k = i % p->op->num_args, partner = shape_partner(p->op, k);
        if (partner >= 0) drop_without(p, p->op->args[k].name, p->op->args[partner].name);
    }
    for (int l = 0; l < p->spec.layers && p->arg[p->num_args - 1].layer >= 0; l++) {
        static const char *const pairs[][2] = {{"u", "pre"},  {"v", "pre"}, {"sub_weight", "v"}, {"f", "post"},
                                               {"post", "f"}, {"res", "f"}, {"bias", "f"},       {"y", "f"}};
        char what[40], needs[40];
        for (size_t k = 0; k < sizeof pairs / sizeof *pairs; k++) {
            snprintf(what, sizeof what, "layers[%d].%s", l, pairs[k][0]);
            snprintf(needs, sizeof needs, "layers[%d].%s", l, pairs[k][1]);
            drop_without(p, what, needs);
        }
    }
}

void arg_drop(arg *a)
{
    guard_free(&a->guard);
    a->elements = 0;
    memset(a->view, 0, a->info->kind == WEFT_ARG_GRAD ? sizeof(weft_grad) : sizeof(weft_tensor));
}

void arg_rebind(arg *a, weft_dtype dtype, bool add)
{
    weft_tensor old = *a->view;
    double *values = arg_values(a);
    arg_drop(a);
    choice plain = {.dtype = dtype};
    *a->view = weft_dense(NULL, dtype, old.ndim, old.shape);
    bind_buffer(a, &plain);
    if (a->info->kind == WEFT_ARG_GRAD) ((weft_grad *)(void *)a->view)->add = add;
    if (add) arg_fill(a, values);
    free(values);
}

/* Sizes of weft/gdn.h from those that all operators have. */
static void complete_heads(spec *s)
{
    int64_t n = s->streams, dim = s->channels < 300 ? s->channels : 300;
    if (s->key_heads == 0) s->key_heads = n % 2 == 0 ? n / 2 : n % 3 == 0 ? n / 3 : n;
    if (s->heads == 0) s->heads = n;
    if (s->key_dim == 0) s->key_dim = dim;
    if (s->value_dim == 0) s->value_dim = dim % 5 ? dim : (dim + 1) / 2;
    if (s->width == 0) s->width = 4;
    if (s->history == 0) s->history = s->width - 1 + s->tokens % 2;
    if (s->steps == 0) s->steps = 5;
    if (s->padding == 0) s->padding = 3;
    if (s->gdn.q_scale == 0) s->gdn = weft_gdn_defaults();
}

static void complete(spec *s)
{
    complete_heads(s);
    if (s->act == WEFT_NONE) s->act = WEFT_F32;
    weft_dtype plain = s->act == WEFT_F64 ? WEFT_F64 : WEFT_F32;
    if (s->wide == WEFT_NONE) s->wide = plain;
    if (s->coef == WEFT_NONE) s->coef = plain;
    if (s->param == WEFT_NONE) s->param = plain;
    if (s->rows == 0) s->rows = shape_gates(s->streams, s->independent ? 2 : 3);
    if (s->sub_eps == 0) s->sub_eps = 1e-5;
    if (s->layers == 0) s->layers = 3;
    if (s->scale == 0) s->scale = 1;
    if (s->numerics.sinkhorn_iters == 0) weft_mhc_preset_numerics(WEFT_PRESET_DEEPSEEK_V4, &s->numerics);
}

problem *problem_make(const spec *s)
{
    problem *p = calloc(1, sizeof *p);
    if (!p) fail_msg("out of memory");
    p->spec = *s;
    complete(&p->spec);
    s = &p->spec;
    p->op = weft_op_find(s->op);
    if (!p->op) fail_msg("there is no operator %s", s->op);
    p->seed = rng_name(s->seed, s->op);
    if (s->packed) p->seed = rng_mix(p->seed, 77);
    p->seed = rng_mix(rng_mix(rng_mix(p->seed, (uint64_t)s->tokens), (uint64_t)s->streams), (uint64_t)s->channels);
    p->args = calloc(1, p->op->args_size);
    if (!p->args) fail_msg("out of memory");
    *(size_t *)p->args = p->op->args_size;
    fields_bind(p);
    add_args(p, p->op, p->args, -1);
    if (strcmp(s->op, "mhc_replay_fwd") == 0)
        for (int l = 0; l < s->layers; l++) add_args(p, weft_mhc_replay_layer_info(), &p->layers[l], l);
    for (int i = 0; i < p->num_args; i++) make_arg(p, &p->arg[i]);
    problem_settle(p);
    fields_set(p);
    problem_seal(p);
    return p;
}

void problem_free(problem *p)
{
    if (!p) return;
    for (int i = 0; i < p->num_args; i++)
        if (p->arg[i].guard.block) arg_drop(&p->arg[i]);
    free(p->args);
    free(p);
}

problem *problem_twin(const problem *p)
{
    spec s = p->spec;
    s.act = s.wide = s.coef = s.param = WEFT_F64;
    s.stream_layout = s.param_layout = LAYOUT_NC;
    s.pad = s.misalign = 0;
    s.broadcast = s.mix = false;
    problem *twin = problem_make(&s);
    twin->step = p->step;
    for (int i = 0; i < p->num_args; i++) {
        const arg *from = &p->arg[i];
        arg *to = &twin->arg[i];
        if (!from->guard.block) {
            if (to->guard.block) arg_drop(to);
            continue;
        }
        if (from->info->kind == WEFT_ARG_GRAD) ((weft_grad *)(void *)to->view)->add = arg_adds(from);
        if (arg_is_output(from) && !arg_adds(from)) continue;
        double *values = arg_values(from);
        arg_fill(to, values);
        free(values);
    }
    problem_seal(twin);
    return twin;
}
