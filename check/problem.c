/* SPDX-License-Identifier: Apache-2.0 */
#include "check/problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/element.h"
#include "check/parallel.h"
#include "check/random.h"
#include "check/scalars.h"
#include "check/shape.h"

static const double sub_eps = 1e-6;

static weft_dropout make_dropout(const problem_spec *spec, int64_t site)
{
    static const uint64_t step = ((uint64_t)3 << 32) + 17;
    weft_dropout none = {0};
    if (spec->dropout == 0) return none;
    return (weft_dropout){.p = spec->dropout,
                          .seed = spec->seed,
                          .site = (uint64_t)site + 3,
                          .step = &step,
                          .token_base = 5,
                          .shared = spec->dropout_shared};
}

static void set_scalars(const problem_spec *spec, const weft_op_info *op, void *args, int64_t site)
{
    scalar_values values = {.numerics = spec->numerics,
                            .dropout = make_dropout(spec, site),
                            .gdn = spec->gdn,
                            .eps = sub_eps,
                            .scale = 1 / sqrt((double)(spec->key_dim > 0 ? spec->key_dim : 1)),
                            .kind = (int32_t)spec->contract};
    scalars_set(op, args, &values);
}

static shape_sizes sizes_of(const problem_spec *s)
{
    return (shape_sizes){.tokens = s->tokens,
                         .streams = s->streams,
                         .channels = s->channels,
                         .rows = s->rows,
                         .scales = s->independent ? 2 : 3,
                         .batch = s->batch,
                         .steps = s->steps,
                         .sequences = s->sequences,
                         .cache = s->sequences + 1,
                         .key_heads = s->key_heads,
                         .value_heads = s->value_heads,
                         .heads = s->repeat ? s->value_heads : s->key_heads,
                         .key_dim = s->key_dim,
                         .value_dim = s->value_dim,
                         .width = s->width,
                         .history = s->history};
}

static weft_tensor make_tensor(const problem_spec *spec, const weft_arg_info *info)
{
    shape_sizes sizes = sizes_of(spec);
    shape_types types = {spec->act, spec->wide, spec->coef, spec->param, spec->seed % 2 ? WEFT_I64 : WEFT_I32};
    return shape_tensor(&sizes, info, shape_dtype(&types, info->type), spec->swapped ? LAYOUT_CN : LAYOUT_NC,
                        spec->pad);
}

static weft_tensor *tensor_at(const weft_arg_info *info, void *args)
{
    void *field = (char *)args + info->offset;
    return info->kind == WEFT_ARG_GRAD ? &((weft_grad *)field)->to : (weft_tensor *)field;
}

static int is_there(const problem_spec *spec, const weft_arg_info *info, int64_t site)
{
    if (info->dim[0] == WEFT_DIM_OFFSETS) return spec->packed;
    if (!info->optional) return 1;
    if (spec->independent && shape_is_mix(info)) return 0;
    for (int i = 0; spec->without && spec->without[i]; i++)
        if (!strcmp(spec->without[i], info->name)) return 0;
    if (spec->optional == PROBLEM_ALL) return 1;
    /* without res a merge is another function, which is for `independent` to ask for */
    if (spec->optional == PROBLEM_NONE) return info->kind != WEFT_ARG_IN || !strcmp(info->name, "res");
    return random_uniform(random_seed(spec->seed, info->name), (uint64_t)site) < 0.5f;
}

/* The tensors of an operator, or of one layer of replay. */
static void make_group(problem *p, const weft_op_info *op, int64_t site, void *args)
{
    const problem_spec *spec = &p->spec;
    int there[64] = {0};
    for (int i = 0; i < op->num_args; i++) there[i] = is_there(spec, &op->args[i], site);
    if (p->layers && op != p->op)
        for (int i = 0; i < op->num_args; i++) {
            /* Coefficients are what replay works from. The last layer may end with u. */
            const char *name = op->args[i].name;
            int of_post = !strcmp(name, "f") || !strcmp(name, "post");
            int short_end = spec->optional == PROBLEM_SOME && site == spec->layers - 1 && spec->seed % 2;
            if (of_post || !strcmp(name, "pre")) there[i] = 1;
            if (short_end && (of_post || !strcmp(name, "res") || !strcmp(name, "y") || !strcmp(name, "bias")))
                there[i] = 0;
        }
    for (int round = 0; round < 2; round++) /* what one takes away another may need */
        for (int i = 0; i < op->num_args; i++) {
            int j = shape_partner(op, i);
            if (j >= 0 && !there[j]) there[i] = 0;
        }
    for (int i = 0; i < op->num_args; i++) {
        const weft_arg_info *info = &op->args[i];
        if (!there[i]) continue;
        problem_arg *arg = &p->arg[p->num_args++];
        *arg = (problem_arg){info, tensor_at(info, args), info->kind == WEFT_ARG_GRAD && spec->add};
        *arg->tensor = make_tensor(spec, info);
        if (arg->add) ((weft_grad *)((char *)args + info->offset))->add = 1;
    }
}

/* Sizes of weft/gdn.h from those that every case has. */
static void complete(problem_spec *s, const weft_op_info *op)
{
    if (s->steps) return;
    int64_t n = s->streams, dim = s->channels < 96 ? s->channels : 96;
    /* heads that a GPU takes in chunks */
    if (dim == 96 && !strncmp(op->name, "gdn_rule", 8)) dim = s->channels < 1024 ? 64 : 128;
    s->packed = s->tokens % 2 == 1;
    s->batch = s->packed ? 1 : s->tokens > 16 ? 2 + s->tokens % 3 : s->tokens;
    s->sequences = s->packed ? (s->tokens < 6 ? s->tokens : 6) : s->batch;
    s->steps = s->packed ? s->tokens : s->batch ? s->tokens / s->batch : 3;
    s->value_heads = n;
    s->key_heads = n % 2 ? n : n / 2;
    s->repeat = !s->swapped;
    s->key_dim = dim;
    s->value_dim = dim % 3 ? dim : dim / 3 * 2;
    s->width = 1 + s->tokens % 5;
    s->history = s->width - 1 + s->tokens % 2;
    s->gdn = weft_gdn_defaults();
    s->gdn.head_map = s->add ? WEFT_GDN_TILED : WEFT_GDN_INTERLEAVED;
    s->gdn.g_chunk = s->tokens % 3 ? 0 : 5;
    s->gdn.beta_scale = s->add ? 2 : 1;
}

int problem_make(problem *p, const weft_op_info *op, const problem_spec *given)
{
    problem_spec completed = *given;
    const problem_spec *spec = &completed;
    complete(&completed, op);
    const weft_op_info *layer = weft_mhc_replay_layer_info();
    int is_replay = !strcmp(op->name, "mhc_replay_fwd");
    int max_args = op->num_args + (is_replay ? spec->layers * layer->num_args : 0);
    *p = (problem){.op = op, .spec = *spec};
    p->args = calloc(1, op->args_size);
    p->arg = calloc((size_t)max_args, sizeof *p->arg);
    if (is_replay) p->layers = calloc((size_t)spec->layers, sizeof *p->layers);
    if (!p->args || !p->arg || (is_replay && !p->layers)) {
        problem_free(p);
        return 0;
    }
    *(size_t *)p->args = op->args_size;
    set_scalars(spec, op, p->args, 0);
    make_group(p, op, 0, p->args);
    if (is_replay) {
        weft_mhc_replay_fwd_args *a = p->args;
        a->layers = p->layers;
        a->num_layers = spec->layers;
        for (int32_t l = 0; l < spec->layers; l++) {
            p->layers[l].struct_size = sizeof p->layers[l];
            set_scalars(spec, layer, &p->layers[l], l);
            make_group(p, layer, l, &p->layers[l]);
        }
    }
    return 1;
}

void problem_free(problem *p)
{
    free(p->args);
    free(p->arg);
    free(p->layers);
    *p = (problem){0};
}

size_t problem_bytes(const problem_arg *arg)
{
    return (size_t)tensor_span(arg->tensor) * weft_dtype_size(arg->tensor->dtype);
}

/* ---- values -------------------------------------------------------------------------------------------------- */

static shape_values values_of(const problem *p, const problem_arg *arg)
{
    shape_sizes sizes = sizes_of(&p->spec);
    return shape_values_of(p->op, &sizes, arg->info);
}

int problem_is_normal(const problem *p, const problem_arg *arg)
{
    shape_values v = values_of(p, arg);
    if (arg->info->type == WEFT_TYPE_INDEX) return 0;
    return v.kind == VALUES_NORMAL && v.center == 0 && v.size == 1;
}

static float draw(shape_values v, uint64_t seed, int64_t index)
{
    return (float)shape_value(v, (double)random_normal(seed, (uint64_t)index));
}

/* Benchmarks fill gigabytes: bits instead of the careful rounding of element.h. Truncation is as random as
 * rounding. */
static uint16_t quick_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static uint16_t quick_f16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int32_t exponent = (int32_t)(bits >> 23 & 255) - 112;
    if (exponent <= 0 || exponent >= 31) return 0;
    return (uint16_t)(bits >> 16 & 0x8000) | (uint16_t)(exponent << 10) | (uint16_t)(bits >> 13 & 1023);
}

static uint64_t seed_of(const problem *p, const problem_arg *arg)
{
    uint64_t seed = random_seed(p->spec.seed, arg->info->name);
    return p->layers ? random_bits(seed, (uint64_t)(arg - p->arg)) : seed;
}

/* Offsets that leave the last token out, some sequences being empty, or even ones; rows of a cache from its end, one of padding. */
static double index_value(const problem *p, const problem_arg *arg, int64_t i)
{
    const problem_spec *s = &p->spec;
    if (arg->info->dim[0] != WEFT_DIM_OFFSETS) return i % 7 == 5 ? -1 : (double)(s->sequences - i);
    if (s->even) return (double)(i * s->steps / s->sequences);
    int64_t end = s->steps > 1 ? s->steps - 1 : s->steps;
    return (double)(i == 0 ? 0 : i == s->sequences ? end : end * (i / 2) / s->sequences);
}

void problem_slice(problem *p, int64_t tokens)
{
    for (int i = 0; i < p->num_args; i++) {
        const problem_arg *arg = &p->arg[i];
        weft_tensor *t = arg->tensor;
        if (arg->info->dim[0] == WEFT_DIM_TOKENS) t->shape[0] = tokens;
        if (arg->info->dim[0] == WEFT_DIM_BATCH) t->shape[1] = tokens < p->spec.steps ? tokens : p->spec.steps;
        if (arg->info->dim[0] != WEFT_DIM_OFFSETS) continue;
        for (int64_t n = 0; n < t->shape[0]; n++)
            element_store(t->data, t->dtype, n, fmin(index_value(p, arg, n), (double)tokens));
    }
}

void problem_fill_block(const problem *p, const problem_arg *arg, void *data, int64_t count)
{
    shape_values v = values_of(p, arg);
    uint64_t seed = seed_of(p, arg);
    if (arg->info->type == WEFT_TYPE_INDEX) {
        for (int64_t i = 0; i < count; i++) element_store(data, arg->tensor->dtype, i, index_value(p, arg, i));
    } else if (arg->tensor->dtype == WEFT_F32) {
        PARALLEL_FOR
        for (int64_t i = 0; i < count; i++) ((float *)data)[i] = draw(v, seed, i);
    } else if (arg->tensor->dtype == WEFT_BF16) {
        PARALLEL_FOR
        for (int64_t i = 0; i < count; i++) ((uint16_t *)data)[i] = quick_bf16(draw(v, seed, i));
    } else if (arg->tensor->dtype == WEFT_F16) {
        PARALLEL_FOR
        for (int64_t i = 0; i < count; i++) ((uint16_t *)data)[i] = quick_f16(draw(v, seed, i));
    } else {
        for (int64_t i = 0; i < count; i++) element_store(data, arg->tensor->dtype, i, draw(v, seed, i));
    }
}

void problem_fill(const problem *p, const problem_arg *arg)
{
    const weft_tensor *t = arg->tensor;
    shape_values v = values_of(p, arg);
    uint64_t seed = seed_of(p, arg);
    int64_t count = tensor_count(t);
    if (tensor_span(t) == count)
        problem_fill_block(p, arg, t->data, count);
    else
        for (int64_t i = 0; i < count; i++) element_store(t->data, t->dtype, tensor_offset(t, i), draw(v, seed, i));
}
