/* SPDX-License-Identifier: Apache-2.0
 *
 * What is not an operator: names, version, tensor helpers, and the list of operators as data. */
#include "support/suite.h"

static void names(void **state)
{
    (void)state;
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", WEFT_VERSION_MAJOR, WEFT_VERSION_MINOR, WEFT_VERSION_PATCH);
    assert_string_equal(weft_version(), version);
    for (int i = WEFT_OK; i <= WEFT_ERR_STATE; i++)
        for (int k = WEFT_OK; k < i; k++)
            assert_string_not_equal(weft_status_name((weft_status)i), weft_status_name((weft_status)k));
    static const struct {
        weft_dtype dtype;
        const char *name;
        size_t size;
    } dtypes[] = {{WEFT_NONE, "none", 0}, {WEFT_F32, "f32", 4}, {WEFT_BF16, "bf16", 2}, {WEFT_F16, "f16", 2},
                  {WEFT_F64, "f64", 8},   {WEFT_I32, "i32", 4}, {WEFT_I64, "i64", 8}};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        assert_string_equal(weft_dtype_name(dtypes[i].dtype), dtypes[i].name);
        assert_int_equal(weft_dtype_size(dtypes[i].dtype), dtypes[i].size);
    }
    assert_string_equal(weft_backend_name(WEFT_BACKEND_REF), "ref");
    assert_string_equal(weft_backend_name(WEFT_BACKEND_CPU), "cpu");
    assert_string_equal(weft_backend_name(WEFT_BACKEND_CUDA), "cuda");
    assert_string_equal(weft_isa_name(WEFT_ISA_AVX512), "avx512");
    /* numbers that are no value of the enum still have a name */
    for (int i = -1; i < 200; i += 100) {
        assert_non_null(weft_status_name((weft_status)(i * 7)));
        assert_non_null(weft_dtype_name((weft_dtype)(i * 7)));
        assert_non_null(weft_backend_name((weft_backend)(i * 7)));
        assert_non_null(weft_isa_name((weft_isa)(i * 7)));
        assert_int_equal(weft_dtype_size((weft_dtype)(i * 7)), 0);
    }
}

static void machine(void **state)
{
    (void)state;
    assert_in_range(weft_cpu_isa(), WEFT_ISA_BASE, WEFT_ISA_AMX);
    assert_int_equal(weft_backend_available(WEFT_BACKEND_REF), 1);
    assert_int_equal(weft_backend_available(WEFT_BACKEND_CPU), 1);
    assert_int_equal(weft_backend_available((weft_backend)0), 0);
    assert_int_equal(weft_backend_available((weft_backend)99), 0);
    fprintf(stderr, "  instruction sets up to %s are tested here\n", weft_isa_name(weft_cpu_isa()));
}

static void dense_tensors(void **state)
{
    (void)state;
    float data[24];
    weft_tensor t = weft_dense3(data, WEFT_F32, 2, 3, 4);
    assert_ptr_equal(t.data, data);
    assert_int_equal(t.ndim, 3);
    assert_int_equal(t.stride[0], 12);
    assert_int_equal(t.stride[1], 4);
    assert_int_equal(t.stride[2], 1);
    assert_int_equal(t.shape[3], 0);
    t = weft_dense3_swapped(data, WEFT_F32, 2, 3, 4);
    assert_int_equal(t.shape[1], 3);
    assert_int_equal(t.stride[0], 12);
    assert_int_equal(t.stride[1], 1);
    assert_int_equal(t.stride[2], 3);
    t = weft_dense1(data, WEFT_BF16, 24);
    assert_int_equal(t.ndim, 1);
    assert_int_equal(t.stride[0], 1);
    t = weft_dense2(data, WEFT_F16, 3, 8);
    assert_int_equal(t.stride[0], 8);
}

/* The descriptions are what bindings and these tests are generated from, so they have to be right themselves. */
static void descriptions(void **state)
{
    (void)state;
    assert_true(weft_op_count() > 0);
    assert_null(weft_op_at(-1));
    assert_null(weft_op_at(weft_op_count()));
    assert_null(weft_op_find("mhc_post"));
    assert_null(weft_op_find(NULL));
    for (int32_t i = 0; i < weft_op_count() + 1; i++) {
        bool layer = i == weft_op_count();
        const weft_op_info *op = layer ? weft_mhc_replay_layer_info() : weft_op_at(i);
        if (!layer) assert_ptr_equal(weft_op_find(op->name), op);
        if (layer) assert_null(weft_op_find(op->name));
        bool output = false;
        unsigned char described[8192] = {0};
        assert_true(op->args_size <= sizeof described);
        memset(described, 1, sizeof(size_t)); /* struct_size */
        for (const weft_scalar_info *s = op->scalars; s && s->name; s++) {
            static const size_t sizes[] = {sizeof(double), sizeof(int32_t), sizeof(weft_mhc_numerics),
                                           sizeof(weft_dropout), sizeof(weft_gdn_options)};
            assert_in_range(s->type, 0, WEFT_SCALAR_GDN);
            size_t size = sizes[s->type];
            assert_true(s->offset + size <= op->args_size);
            assert_int_equal(s->offset % (size < 8 ? size : 8), 0);
            memset(described + s->offset, 1, size);
            for (int32_t k = 0; k < op->num_args; k++) assert_true(s->offset + size <= op->args[k].offset);
        }
        for (int32_t k = 0; k < op->num_args; k++) {
            const weft_arg_info *a = &op->args[k];
            size_t size = a->kind == WEFT_ARG_GRAD ? sizeof(weft_grad) : sizeof(weft_tensor);
            assert_in_range(a->ndim, 1, WEFT_MAX_DIMS);
            assert_true(a->offset >= sizeof(size_t));
            assert_true(a->offset + size <= op->args_size);
            assert_int_equal(a->offset % sizeof(void *), 0);
            output = output || a->kind != WEFT_ARG_IN;
            memset(described + a->offset, 1, size);
            for (int d = 0; d < a->ndim; d++) assert_true(a->dim[d] >= 1 && a->dim[d] <= WEFT_DIM_SCALES);
            /* "gradients are d_<name>" */
            if (a->kind == WEFT_ARG_GRAD) assert_memory_equal(a->name, "d_", 2);
            for (int32_t m = 0; m < k; m++) {
                const weft_arg_info *b = &op->args[m];
                size_t other = b->kind == WEFT_ARG_GRAD ? sizeof(weft_grad) : sizeof(weft_tensor);
                assert_string_not_equal(a->name, b->name);
                assert_true(a->offset + size <= b->offset || b->offset + other <= a->offset);
            }
            if (!a->in_place) continue;
            assert_int_not_equal(a->kind, WEFT_ARG_IN);
            const weft_arg_info *over = NULL;
            for (int32_t m = 0; m < op->num_args; m++)
                if (strcmp(op->args[m].name, a->in_place) == 0) over = &op->args[m];
            assert_non_null(over);
            assert_int_equal(over->kind, WEFT_ARG_IN);
            assert_int_equal(over->ndim, a->ndim);
            assert_memory_equal(over->dim, a->dim, sizeof a->dim);
        }
        /* Nothing of an args struct is left out, but for the list of layers that a replay has. */
        if (strcmp(op->name, "mhc_replay_fwd") == 0) {
            size_t layers = offsetof(weft_mhc_replay_fwd_args, layers);
            memset(described + layers, 1, op->args_size - layers);
        } else {
            assert_true(output);
        }
        for (size_t at = 0, gap = 0; at < op->args_size; at++) {
            gap = described[at] ? 0 : gap + 1;
            assert_true(gap < 8); /* padding is shorter */
        }
    }
}

static void calls_by_description(void **state)
{
    (void)state;
    weft_op_info copy = *weft_op_at(0);
    weft_exec exec = on_ref();
    size_t bytes = 0, args[64] = {0};
    assert_int_equal(weft_op_call(&copy, &exec, args), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "op"));
    assert_int_equal(weft_op_call(NULL, &exec, args), WEFT_ERR_ARGUMENT);
    assert_int_equal(weft_op_workspace(weft_mhc_replay_layer_info(), &exec, args, &bytes), WEFT_ERR_ARGUMENT);
}

/* Asks as weft_op_workspace does: data is not looked at, everything else is. */
static void plans(void **state)
{
    (void)state;
    const weft_op_info *op = weft_op_find("mhc_expand_fwd");
    weft_exec exec = on_ref();
    weft_mhc_expand_fwd_args args = {.struct_size = sizeof args,
                                     .u = weft_dense2(NULL, WEFT_F32, 3, 4),
                                     .x = weft_dense3(NULL, WEFT_F32, 3, 2, 4)};
    const char *path = NULL;
    assert_int_equal(weft_op_path(op, &exec, &args, &path), WEFT_OK);
    assert_string_equal(path, "the only path of this backend");
    assert_int_equal(weft_op_path(op, &exec, &args, NULL), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "path"));
    assert_int_equal(weft_op_path(weft_mhc_replay_layer_info(), &exec, &args, &path), WEFT_ERR_ARGUMENT);
    args.x.shape[2] = 5;
    assert_int_equal(weft_op_path(op, &exec, &args, &path), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "mhc_expand_fwd"));
}

/* weft_last_error is about the last call: it goes away with a success. */
static void last_error(void **state)
{
    (void)state;
    float u[4] = {1, 2, 3, 4}, x[8];
    weft_exec exec = on_ref();
    weft_tensor tu = weft_dense2(u, WEFT_F32, 1, 4), tx = weft_dense3(x, WEFT_F32, 1, 2, 4);
    assert_int_equal(weft_mhc_expand_fwd(&exec, WEFT_ARGS(weft_mhc_expand_fwd_args, .u = tu)), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "mhc_expand_fwd"));
    assert_int_equal(weft_mhc_expand_fwd(&exec, WEFT_ARGS(weft_mhc_expand_fwd_args, .u = tu, .x = tx)), WEFT_OK);
    assert_string_equal(weft_last_error(), "");
    for (int i = 0; i < 8; i++) assert_true(x[i] == u[i % 4]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),
        cmocka_unit_test(machine),
        cmocka_unit_test(dense_tensors),
        cmocka_unit_test(descriptions),
        cmocka_unit_test(calls_by_description),
        cmocka_unit_test(plans),
        cmocka_unit_test(last_error),
    };
    return suite_run("core", tests);
}
