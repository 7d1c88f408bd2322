/* SPDX-License-Identifier: Apache-2.0 */
#include "check/problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <weft/norm.h>

#include "check/element.h"
#include "check/parallel.h"
#include "check/random.h"

/* ---- fields that are not tensors ----------------------------------------------------------------------------- */

/* Offsets of such fields in an args struct; zero (struct_size) where there is none. */
static const struct scalars {
    const char *op;
    size_t numerics, dropout, eps, rms_eps, rms_eps_kind, pre_eps, contract, gdn, scale, head_map;
} scalars[] = {
#define AT(type, field) offsetof(weft_##type##_args, field)
    {.op = "mhc_scale_fwd", .numerics = AT(mhc_scale_fwd, numerics)},
    {.op = "mhc_scale_bwd", .numerics = AT(mhc_scale_bwd, numerics)},
    {.op = "mhc_sinkhorn_fwd", .numerics = AT(mhc_sinkhorn_fwd, numerics)},
    {.op = "mhc_sinkhorn_bwd", .numerics = AT(mhc_sinkhorn_bwd, numerics)},
    {.op = "mhc_coef_fwd", .numerics = AT(mhc_coef_fwd, numerics)},
    {.op = "mhc_coef_bwd", .numerics = AT(mhc_coef_bwd, numerics)},
    {.op = "mhc_post_fwd", .numerics = AT(mhc_post_fwd, numerics), .dropout = AT(mhc_post_fwd, dropout)},
    {.op = "mhc_post_bwd", .numerics = AT(mhc_post_bwd, numerics), .dropout = AT(mhc_post_bwd, dropout)},
    {.op = "mhc_pre_fwd", .numerics = AT(mhc_pre_fwd, numerics), .eps = AT(mhc_pre_fwd, sub_eps)},
    {.op = "mhc_pre_bwd", .numerics = AT(mhc_pre_bwd, numerics), .eps = AT(mhc_pre_bwd, sub_eps)},
    {.op = "mhc_boundary_fwd",
     .numerics = AT(mhc_boundary_fwd, numerics),
     .dropout = AT(mhc_boundary_fwd, dropout),
     .eps = AT(mhc_boundary_fwd, sub_eps)},
    {.op = "mhc_boundary_bwd",
     .numerics = AT(mhc_boundary_bwd, numerics),
     .dropout = AT(mhc_boundary_bwd, dropout),
     .eps = AT(mhc_boundary_bwd, sub_eps)},
    {.op = "mhc_replay_fwd", .numerics = AT(mhc_replay_fwd, numerics)},
    {.op = "mhc_head_fwd",
     .rms_eps = AT(mhc_head_fwd, rms_eps),
     .rms_eps_kind = AT(mhc_head_fwd, rms_eps_kind),
     .pre_eps = AT(mhc_head_fwd, pre_eps)},
    {.op = "mhc_head_bwd",
     .rms_eps = AT(mhc_head_bwd, rms_eps),
     .rms_eps_kind = AT(mhc_head_bwd, rms_eps_kind),
     .pre_eps = AT(mhc_head_bwd, pre_eps)},
    {.op = "mhc_contract_fwd", .contract = AT(mhc_contract_fwd, kind)},
    {.op = "mhc_contract_bwd", .contract = AT(mhc_contract_bwd, kind)},
    {.op = "rmsnorm_fwd", .eps = AT(rmsnorm_fwd, eps)},
    {.op = "rmsnorm_bwd", .eps = AT(rmsnorm_bwd, eps)},
    {.op = "gdn_pre_fwd", .gdn = AT(gdn_pre_fwd, options)},
    {.op = "gdn_pre_bwd", .gdn = AT(gdn_pre_bwd, options)},
    {.op = "gdn_pre_step", .gdn = AT(gdn_pre_step, options)},
    {.op = "gdn_rule_fwd", .scale = AT(gdn_rule_fwd, scale), .head_map = AT(gdn_rule_fwd, head_map)},
    {.op = "gdn_rule_bwd", .scale = AT(gdn_rule_bwd, scale), .head_map = AT(gdn_rule_bwd, head_map)},
#undef AT
};

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

static const struct scalars *scalars_of(const char *op)
{
    for (size_t i = 0; i < sizeof scalars / sizeof scalars[0]; i++)
        if (!strcmp(scalars[i].op, op)) return &scalars[i];
    return NULL;
}

static void set_scalars(const problem_spec *spec, const char *op, char *args)
{
    const struct scalars *s = scalars_of(op);
    if (!s) return;
    const weft_mhc_numerics *n = &spec->numerics;
    weft_dropout dropout = make_dropout(spec, 0);
    if (s->numerics) memcpy(args + s->numerics, n, sizeof *n);
    if (s->dropout) memcpy(args + s->dropout, &dropout, sizeof dropout);
    if (s->eps) memcpy(args + s->eps, &sub_eps, sizeof sub_eps);
    if (s->rms_eps) memcpy(args + s->rms_eps, &n->rms_eps, sizeof n->rms_eps);
    if (s->rms_eps_kind) memcpy(args + s->rms_eps_kind, &n->rms_eps_kind, sizeof n->rms_eps_kind);
    if (s->pre_eps) memcpy(args + s->pre_eps, &n->pre_eps, sizeof n->pre_eps);
    if (s->contract) memcpy(args + s->contract, &spec->contract, sizeof spec->contract);
    double scale = 1 / sqrt((double)(spec->key_dim > 0 ? spec->key_dim : 1));
    if (s->gdn) memcpy(args + s->gdn, &spec->gdn, sizeof spec->gdn);
    if (s->scale) memcpy(args + s->scale, &scale, sizeof scale);
    if (s->head_map) memcpy(args + s->head_map, &spec->gdn.head_map, sizeof spec->gdn.head_map);
}

/* ---- tensors ------------------------------------------------------------------------------------------------- */

weft_dtype problem_dtype(const problem_spec *spec, weft_arg_type type)
{
    switch (type) {
    case WEFT_TYPE_ACT: return spec->act;
    case WEFT_TYPE_WIDE: return spec->wide;
    case WEFT_TYPE_COEF: return spec->coef;
    case WEFT_TYPE_PARAM: return spec->param;
    case WEFT_TYPE_INDEX: return spec->seed % 2 ? WEFT_I64 : WEFT_I32;
    default: return spec->act == WEFT_F64 ? WEFT_F64 : WEFT_F32;
    }
}

static int64_t size_of_dim(const problem_spec *spec, int32_t dim)
{
    switch (dim) {
    case WEFT_DIM_TOKENS: return spec->tokens;
    case WEFT_DIM_STREAMS: return spec->streams;
    case WEFT_DIM_CHANNELS: return spec->channels;
    case WEFT_DIM_GATES: return 2 * spec->streams + spec->streams * spec->streams;
    case WEFT_DIM_ROWS: return spec->rows;
    case WEFT_DIM_BATCH: return spec->batch;
    case WEFT_DIM_STEPS: return spec->steps;
    case WEFT_DIM_KEY_HEADS: return spec->key_heads;
    case WEFT_DIM_VALUE_HEADS: return spec->value_heads;
    case WEFT_DIM_HEADS: return spec->repeat ? spec->value_heads : spec->key_heads;
    case WEFT_DIM_KEY_DIM: return spec->key_dim;
    case WEFT_DIM_VALUE_DIM: return spec->value_dim;
    case WEFT_DIM_CONV: return 2 * spec->key_heads * spec->key_dim + spec->value_heads * spec->value_dim;
    case WEFT_DIM_WIDTH: return spec->width;
    case WEFT_DIM_HISTORY: return spec->history;
    case WEFT_DIM_SEQUENCES: return spec->sequences;
    case WEFT_DIM_OFFSETS: return spec->sequences + 1;
    case WEFT_DIM_CACHE: return spec->sequences + 1;
    default: return dim;
    }
}

static weft_tensor make_tensor(const problem_spec *spec, const weft_arg_info *info)
{
    int64_t shape[WEFT_MAX_DIMS] = {0};
    int d = info->ndim;
    for (int i = 0; i < d; i++) shape[i] = size_of_dim(spec, info->dim[i]);
    weft_tensor t = weft_dense(NULL, problem_dtype(spec, info->type), d, shape);
    if (spec->swapped && d >= 2 && info->dim[d - 2] == WEFT_DIM_STREAMS && info->dim[d - 1] == WEFT_DIM_CHANNELS) {
        t.stride[d - 2] = 1;
        t.stride[d - 1] = shape[d - 2];
    }
    if (spec->swapped && info->dim[0] == WEFT_DIM_BATCH) { /* steps outside the batch */
        t.stride[0] = d > 2 ? t.stride[1] : 1;
        t.stride[1] = t.stride[0] * shape[0];
    }
    if (d >= 2 && info->dim[0] == WEFT_DIM_TOKENS) t.stride[0] += spec->pad;
    if (d >= 2 && info->dim[0] == WEFT_DIM_BATCH && !spec->swapped) {
        t.stride[1] += spec->pad;
        t.stride[0] += spec->pad * shape[1];
    }
    return t;
}

static int find_arg(const weft_op_info *op, const char *name)
{
    for (int i = 0; i < op->num_args; i++)
        if (!strcmp(op->args[i].name, name)) return i;
    return -1;
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
    for (int i = 0; spec->without && spec->without[i]; i++)
        if (!strcmp(spec->without[i], info->name)) return 0;
    if (spec->optional == PROBLEM_ALL) return 1;
    if (spec->optional == PROBLEM_NONE) return info->kind != WEFT_ARG_IN;
    return random_uniform(random_seed(spec->seed, info->name), (uint64_t)site) < 0.5f;
}

/* Tensors that make no sense without another one of the same call. The order matters: a row may take away what a
 * later row asks for. */
static const struct {
    const char *name, *needs;
} needs[] = {
    {"sub_weight", "v"},
    {"sub_weight", "d_v"},
    {"d_sub_weight", "sub_weight"},
    {"d_norm_weight", "norm_weight"},
    {"d_pre_in", "pre_in"},
    {"d_bias", "bias"},
    {"d_weight", "weight"},
    {"gate", "z"},
    {"d_state", "state"},
    {"d_dt_bias", "dt_bias"},
};

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
            int of_post = !strcmp(name, "f") || !strcmp(name, "post") || !strcmp(name, "res");
            int short_end = spec->optional == PROBLEM_SOME && site == spec->layers - 1 && spec->seed % 2;
            if (of_post || !strcmp(name, "pre")) there[i] = 1;
            if (short_end && (of_post || !strcmp(name, "y") || !strcmp(name, "bias"))) there[i] = 0;
        }
    for (size_t k = 0; k < sizeof needs / sizeof needs[0]; k++) {
        int i = find_arg(op, needs[k].name), j = find_arg(op, needs[k].needs);
        if (i >= 0 && j >= 0 && !there[j]) there[i] = 0;
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
static void complete(problem_spec *s)
{
    if (s->steps) return;
    int64_t n = s->streams, dim = s->channels < 96 ? s->channels : 96;
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
    complete(&completed);
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
    set_scalars(spec, op->name, p->args);
    make_group(p, op, 0, p->args);
    if (is_replay) {
        weft_mhc_replay_fwd_args *a = p->args;
        a->layers = p->layers;
        a->num_layers = spec->layers;
        for (int32_t l = 0; l < spec->layers; l++) {
            p->layers[l].struct_size = sizeof p->layers[l];
            p->layers[l].dropout = make_dropout(spec, l);
            p->layers[l].sub_eps = sub_eps;
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

typedef struct distribution {
    int normal;         /* else uniform */
    float center, size; /* normal: mean and deviation; uniform: middle and half the width */
} distribution;

/* Sizes as in a network that trains: gates away from saturation, coefficients positive. */
static distribution distribution_of(const problem_spec *spec, const weft_op_info *op, const weft_arg_info *info)
{
    const char *name = info->name;
    if (!strncmp(op->name, "gdn_rule", 8)) { /* keys of about unit length, gates that forget */
        if (!strcmp(name, "key")) return (distribution){1, 0, 1 / sqrtf((float)spec->key_dim)};
        if (!strcmp(name, "beta")) return (distribution){0, 0.5f, 0.45f};
        if (!strcmp(name, "g")) return (distribution){0, -0.15f, 0.15f};
    }
    static const struct {
        const char *name;
        distribution d;
    } table[] = {
        {"alpha", {0, 1, 0.5f}},       {"beta", {1, 0, 0.5f}},   {"pre", {0, 0.5f, 0.45f}},
        {"pre_in", {0, 0.5f, 0.45f}},  {"post", {0, 1, 0.9f}},   {"ms", {0, 1, 0.5f}},
        {"norm_weight", {0, 1, 0.5f}}, {"weight", {0, 1, 0.5f}}, {"sub_weight", {0, 1, 0.5f}},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (!strcmp(table[i].name, name)) return table[i].d;
    if (!strcmp(name, "res")) return (distribution){0, 1.0f / (float)spec->streams, 0.9f / (float)spec->streams};
    if (!strcmp(name, "phi")) return (distribution){1, 0, 1 / sqrtf((float)spec->streams * (float)spec->channels)};
    return (distribution){1, 0, 1};
}

int problem_is_normal(const problem *p, const problem_arg *arg)
{
    distribution d = distribution_of(&p->spec, p->op, arg->info);
    if (arg->info->type == WEFT_TYPE_INDEX) return 0;
    return d.normal && d.center == 0 && d.size == 1;
}

static float draw(distribution d, uint64_t seed, int64_t index)
{
    float x = d.normal ? random_normal(seed, (uint64_t)index) : 2 * random_uniform(seed, (uint64_t)index) - 1;
    return d.center + d.size * x;
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

/* Offsets that leave the last token out, some sequences being empty; rows of a cache from its end, one of padding. */
static double index_value(const problem *p, const problem_arg *arg, int64_t i)
{
    const problem_spec *s = &p->spec;
    if (arg->info->dim[0] != WEFT_DIM_OFFSETS) return i % 7 == 5 ? -1 : (double)(s->sequences - i);
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
    distribution d = distribution_of(&p->spec, p->op, arg->info);
    uint64_t seed = seed_of(p, arg);
    if (arg->info->type == WEFT_TYPE_INDEX) {
        for (int64_t i = 0; i < count; i++) element_store(data, arg->tensor->dtype, i, index_value(p, arg, i));
    } else if (arg->tensor->dtype == WEFT_F32) {
        PARALLEL_FOR
        for (int64_t i = 0; i < count; i++) ((float *)data)[i] = draw(d, seed, i);
    } else if (arg->tensor->dtype == WEFT_BF16) {
        PARALLEL_FOR
        for (int64_t i = 0; i < count; i++) ((uint16_t *)data)[i] = quick_bf16(draw(d, seed, i));
    } else if (arg->tensor->dtype == WEFT_F16) {
        PARALLEL_FOR
        for (int64_t i = 0; i < count; i++) ((uint16_t *)data)[i] = quick_f16(draw(d, seed, i));
    } else {
        for (int64_t i = 0; i < count; i++) element_store(data, arg->tensor->dtype, i, draw(d, seed, i));
    }
}

void problem_fill(const problem *p, const problem_arg *arg)
{
    const weft_tensor *t = arg->tensor;
    distribution d = distribution_of(&p->spec, p->op, arg->info);
    uint64_t seed = seed_of(p, arg);
    int64_t count = tensor_count(t);
    if (tensor_span(t) == count)
        problem_fill_block(p, arg, t->data, count);
    else
        for (int64_t i = 0; i < count; i++) element_store(t->data, t->dtype, tensor_offset(t, i), draw(d, seed, i));
}
