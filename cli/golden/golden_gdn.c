/* SPDX-License-Identifier: Apache-2.0
 *
 * The convention of Gated DeltaNet: projection rows (B, S, P) with columns q | k | v | z | b | a, heads repeated. Every case
 * goes through the operators as one fused row, in the order (S, B, P) as well, and token by token through the decoding
 * operator; all must agree with the file. */
#include <stdio.h>
#include <string.h>

#include <weft/gdn.h>

#include "golden/golden_file.h"

static const golden_tolerance tolerance = {1e-5, 0};

typedef struct layer {
    golden_file *file;
    weft_dtype dtype;
    int64_t batch, steps, columns, key_heads, key_dim, value_heads, value_dim, width, channels;
    weft_tensor proj, weight, a_log, dt_bias, cu_seqlens;
} layer;

static weft_tensor rows_of(const layer *l, int64_t heads, int64_t dim)
{
    int64_t shape[4] = {l->batch, l->steps, heads, dim};
    int ndim = dim ? 4 : 3;
    return weft_dense(golden_memory(l->file, l->batch * l->steps * heads * (dim ? dim : 1), l->dtype), l->dtype,
                      ndim, shape);
}

static weft_tensor input_of(const layer *l, const char *name, int64_t heads, int64_t dim)
{
    weft_tensor t = rows_of(l, heads, dim);
    t.data = golden_input(l->file, name, l->batch * l->steps * heads * (dim ? dim : 1), l->dtype);
    return t;
}

static weft_gdn_sections sections_of(const layer *l, const weft_tensor *proj)
{
    return weft_gdn_split(proj, l->key_heads, l->key_dim, l->value_heads, l->value_dim);
}

static weft_gdn_pre_fwd_args forward_args(const layer *l, const weft_tensor *proj)
{
    weft_gdn_sections s = sections_of(l, proj);
    return (weft_gdn_pre_fwd_args){.struct_size = sizeof(weft_gdn_pre_fwd_args),
                                   .options = weft_gdn_defaults(),
                                   .q = s.q,
                                   .k = s.k,
                                   .v = s.v,
                                   .z = s.z,
                                   .b = s.b,
                                   .a = s.a,
                                   .weight = l->weight,
                                   .a_log = l->a_log,
                                   .dt_bias = l->dt_bias,
                                   .cu_seqlens = l->cu_seqlens,
                                   .query = rows_of(l, l->value_heads, l->key_dim),
                                   .key = rows_of(l, l->value_heads, l->key_dim),
                                   .value = rows_of(l, l->value_heads, l->value_dim),
                                   .gate = rows_of(l, l->value_heads, l->value_dim),
                                   .beta = rows_of(l, l->value_heads, 0),
                                   .g = rows_of(l, l->value_heads, 0)};
}

static void compare_outputs(const layer *l, const weft_gdn_pre_fwd_args *f)
{
    golden_compare(l->file, "query", &f->query, tolerance);
    golden_compare(l->file, "key", &f->key, tolerance);
    golden_compare(l->file, "value", &f->value, tolerance);
    golden_compare(l->file, "gate", &f->gate, tolerance);
    golden_compare(l->file, "beta", &f->beta, tolerance);
    golden_compare(l->file, "g", &f->g, tolerance);
}

/* The same rows with the sequence outermost in memory. */
static weft_tensor sequence_first(const layer *l)
{
    weft_tensor t = l->proj;
    size_t row = (size_t)l->columns * weft_dtype_size(l->dtype);
    t.stride[0] = l->columns;
    t.stride[1] = l->batch * l->columns;
    t.data = golden_memory(l->file, l->batch * l->steps * l->columns, l->dtype);
    for (int64_t b = 0; b < l->batch; b++)
        for (int64_t s = 0; s < l->steps; s++)
            memcpy((char *)t.data + (size_t)(s * l->batch + b) * row,
                   (const char *)l->proj.data + (size_t)(b * l->steps + s) * row, row);
    return t;
}

static weft_tensor one_step(weft_tensor t, int64_t step)
{
    t.data = (char *)t.data + step * t.stride[1] * (int64_t)weft_dtype_size(t.dtype);
    t.shape[1] = 1;
    return t;
}

/* Sequences of one length, token by token. */
static void decode(const layer *l)
{
    golden_file *file = l->file;
    weft_gdn_pre_fwd_args f = forward_args(l, &l->proj);
    int64_t slots = l->width - 1, floats = l->batch * l->channels * slots;
    weft_tensor state = weft_dense3(golden_memory(file, floats, l->dtype), l->dtype, l->batch, l->channels, slots);
    memset(state.data, 0, (size_t)floats * weft_dtype_size(l->dtype));
    for (int64_t s = 0; s < l->steps; s++) {
        weft_gdn_pre_step_args a = {.struct_size = sizeof a,
                                    .options = f.options,
                                    .q = one_step(f.q, s),
                                    .k = one_step(f.k, s),
                                    .v = one_step(f.v, s),
                                    .z = one_step(f.z, s),
                                    .b = one_step(f.b, s),
                                    .a = one_step(f.a, s),
                                    .weight = f.weight,
                                    .a_log = f.a_log,
                                    .dt_bias = f.dt_bias,
                                    .state = state,
                                    .query = one_step(f.query, s),
                                    .key = one_step(f.key, s),
                                    .value = one_step(f.value, s),
                                    .gate = one_step(f.gate, s),
                                    .beta = one_step(f.beta, s),
                                    .g = one_step(f.g, s),
                                    .new_state = state};
        golden_call(file, "gdn_pre_step", &a);
    }
    compare_outputs(l, &f);
}

static void backward(const layer *l)
{
    golden_file *file = l->file;
    int64_t Hv = l->value_heads;
    weft_gdn_sections s = sections_of(l, &l->proj);
    weft_tensor d_proj = l->proj, d_weight = l->weight, d_a_log = l->a_log, d_dt_bias = l->dt_bias;
    d_proj.data = golden_memory(file, l->batch * l->steps * l->columns, l->dtype);
    d_weight.data = golden_memory(file, l->channels * l->width, l->dtype);
    d_a_log.data = golden_memory(file, Hv, l->dtype);
    d_dt_bias.data = golden_memory(file, Hv, l->dtype);
    weft_gdn_sections d = sections_of(l, &d_proj);
    weft_gdn_pre_bwd_args a = {.struct_size = sizeof a,
                               .options = weft_gdn_defaults(),
                               .q = s.q,
                               .k = s.k,
                               .v = s.v,
                               .b = s.b,
                               .a = s.a,
                               .weight = l->weight,
                               .a_log = l->a_log,
                               .dt_bias = l->dt_bias,
                               .cu_seqlens = l->cu_seqlens,
                               .d_query = input_of(l, "d_query", Hv, l->key_dim),
                               .d_key = input_of(l, "d_key", Hv, l->key_dim),
                               .d_value = input_of(l, "d_value", Hv, l->value_dim),
                               .d_gate = input_of(l, "d_gate", Hv, l->value_dim),
                               .d_beta = input_of(l, "d_beta", Hv, 0),
                               .d_g = input_of(l, "d_g", Hv, 0),
                               .d_q = {d.q, 0},
                               .d_k = {d.k, 0},
                               .d_v = {d.v, 0},
                               .d_z = {d.z, 0},
                               .d_b = {d.b, 0},
                               .d_a = {d.a, 0},
                               .d_weight = {d_weight, 0},
                               .d_a_log = {d_a_log, 0},
                               .d_dt_bias = {d_dt_bias, 0}};
    golden_call(file, "gdn_pre_bwd", &a);
    golden_compare(file, "d_proj", &d_proj, tolerance);
    golden_compare(file, "d_conv_weight", &d_weight, tolerance);
    golden_compare(file, "d_A_log", &d_a_log, tolerance);
    golden_compare(file, "d_dt_bias", &d_dt_bias, tolerance);
}

void golden_gdn(golden_file *file)
{
    layer l = {.file = file, .dtype = file->exec->backend == WEFT_BACKEND_REF ? WEFT_F64 : WEFT_F32};
    l.batch = golden_size(file, "proj", 3, 0);
    l.steps = golden_size(file, "proj", 3, 1);
    l.columns = golden_size(file, "proj", 3, 2);
    l.value_heads = golden_size(file, "query", 4, 2);
    l.key_dim = golden_size(file, "query", 4, 3);
    l.value_dim = golden_size(file, "value", 4, 3);
    l.channels = golden_size(file, "conv_weight", 2, 0);
    l.width = golden_size(file, "conv_weight", 2, 1);
    /* Results take memory by these sizes, so the file must hold as many. */
    if (golden_size(file, "query", 4, 0) != l.batch || golden_size(file, "query", 4, 1) != l.steps ||
        golden_size(file, "value", 4, 0) != l.batch || golden_size(file, "value", 4, 1) != l.steps ||
        golden_size(file, "value", 4, 2) != l.value_heads)
        golden_fail(file, "%s: proj, query and value differ in their sizes", file->prefix);
    if (file->problem[0]) return;
    int64_t keys = l.columns - 2 * l.value_heads * (l.value_dim + 1);
    l.key_heads = keys / (2 * l.key_dim);
    if (l.key_heads < 1 || keys != 2 * l.key_heads * l.key_dim ||
        l.channels != keys + l.value_heads * l.value_dim) {
        golden_fail(file, "%s.proj: not the columns of q, k, v, z, b and a", file->prefix);
        return;
    }
    l.proj = weft_dense3(golden_input(file, "proj", l.batch * l.steps * l.columns, l.dtype), l.dtype, l.batch,
                         l.steps, l.columns);
    l.weight =
        weft_dense2(golden_input(file, "conv_weight", l.channels * l.width, l.dtype), l.dtype, l.channels, l.width);
    l.a_log = weft_dense1(golden_input(file, "A_log", l.value_heads, l.dtype), l.dtype, l.value_heads);
    l.dt_bias = weft_dense1(golden_input(file, "dt_bias", l.value_heads, l.dtype), l.dtype, l.value_heads);
    if (golden_has(file, "cu_seqlens")) {
        int64_t offsets = golden_size(file, "cu_seqlens", 1, 0);
        l.cu_seqlens = weft_dense1(golden_input(file, "cu_seqlens", offsets, WEFT_I32), WEFT_I32, offsets);
    }
    if (file->problem[0]) return;
    weft_tensor orders[2] = {l.proj, sequence_first(&l)};
    for (int i = 0; i < 2; i++) {
        weft_gdn_pre_fwd_args f = forward_args(&l, &orders[i]);
        golden_call(file, "gdn_pre_fwd", &f);
        compare_outputs(&l, &f);
    }
    if (!golden_has(file, "cu_seqlens") && l.width > 1) decode(&l);
    backward(&l);
}
