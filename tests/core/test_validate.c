/* SPDX-License-Identifier: Apache-2.0
 *
 * Bad tensors, generated from the operators' own descriptions: every rule of weft/mhc.h is broken at every argument
 * of every operator, one at a time. The answer must be the right status and a sentence with the operator, the
 * argument, what was expected and what came, and no byte may have been written. */
#include "support/refuse.h"

static void absent_one(bench *b, weft_exec exec)
{
    EACH_ARG(b, a)
    {
        if (a->info->optional) continue;
        a->view->dtype = WEFT_NONE;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "required argument absent");
        query_refuses(b, WEFT_ERR_ARGUMENT, "required argument absent");
        restore(b, exec);
    }
}

static void rank_one(bench *b, weft_exec exec)
{
    static const int32_t wrong[] = {-1, 0, 5, 1000, INT32_MIN, INT32_MAX};
    EACH_ARG(b, a)
    {
        for (int k = 0; k < 8; k++) {
            a->view->ndim = k < 6 ? wrong[k] : k == 6 ? a->info->ndim - 1 : a->info->ndim + 1;
            refuses(b, WEFT_ERR_ARGUMENT, a->name, "wrong rank");
            query_refuses(b, WEFT_ERR_ARGUMENT, "wrong rank");
            restore(b, exec);
        }
    }
}

/* A size that a single tensor shows can disagree with nothing: the streams of an expanded tensor. */
static bool alone(const problem *p, int32_t dim)
{
    int seen = 0;
    /* the rows of gates follow from the streams and the number of scales */
#define OF_GATES(d) ((d) == WEFT_DIM_STREAMS || (d) == WEFT_DIM_GATES || (d) == WEFT_DIM_SCALES)
    for (int i = 0; i < p->num_args; i++)
        for (int d = 0; d < p->arg[i].info->ndim; d++) {
            int32_t other = p->arg[i].info->dim[d];
            seen += OF_GATES(dim) ? OF_GATES(other) : other == dim;
        }
#undef OF_GATES
    return seen == 1;
}

static void dims_one(bench *b, weft_exec exec)
{
    static const int64_t absurd[] = {-1, INT64_MIN, (int64_t)1 << 62, INT64_MAX, ((int64_t)1 << 40) + 1};
    EACH_ARG(b, a)
    {
        for (int d = 0; d < a->info->ndim; d++) {
            for (int64_t step = -1; step <= 1 && !alone(b->p, a->info->dim[d]); step += 2) {
                a->view->shape[d] += step;
                refuses(b, WEFT_ERR_ARGUMENT, NULL, "a dimension off by one");
                query_refuses(b, WEFT_ERR_ARGUMENT, "a dimension off by one");
                restore(b, exec);
            }
            for (size_t k = 0; k < sizeof absurd / sizeof *absurd; k++) {
                a->view->shape[d] = absurd[k];
                refuses(b, WEFT_ERR_ARGUMENT, a->name, "an absurd dimension");
                query_refuses(b, WEFT_ERR_ARGUMENT, "an absurd dimension");
                restore(b, exec);
            }
        }
    }
}

/* One size absurd in all tensors at once, so that nothing disagrees. */
static void whole_size(bench *b, weft_exec exec, int32_t dim, int64_t size, weft_status want, const char *what)
{
    bool any = false;
    EACH_ARG(b, a)
    {
        for (int d = 0; d < a->info->ndim && a->guard.block; d++) {
            int64_t gates = dim == WEFT_DIM_STREAMS && a->info->dim[d] == WEFT_DIM_GATES;
            if (a->info->dim[d] != dim && !gates) continue;
            a->view->shape[d] = gates ? 2 * size + size * size : size;
            any = true;
        }
    }
    if (any && want != WEFT_OK) refuses(b, want, NULL, what);
    if (any) query_refuses(b, want, what);
    restore(b, exec);
}

static void sizes_one(bench *b, weft_exec exec)
{
    whole_size(b, exec, WEFT_DIM_STREAMS, 0, WEFT_ERR_ARGUMENT, "0 streams");
    whole_size(b, exec, WEFT_DIM_STREAMS, WEFT_MAX_STREAMS + 1, WEFT_ERR_ARGUMENT, "33 streams");
    whole_size(b, exec, WEFT_DIM_CHANNELS, 0, WEFT_ERR_ARGUMENT, "0 channels");
    whole_size(b, exec, WEFT_DIM_CHANNELS, (int64_t)1 << 62, WEFT_ERR_ARGUMENT, "2^62 channels");
    whole_size(b, exec, WEFT_DIM_ROWS, 0, WEFT_ERR_ARGUMENT, "0 rows");
    whole_size(b, exec, WEFT_DIM_ROWS, 4097, WEFT_ERR_ARGUMENT, "4097 rows");
    whole_size(b, exec, WEFT_DIM_TOKENS, -1, WEFT_ERR_ARGUMENT, "-1 tokens");
    whole_size(b, exec, WEFT_DIM_TOKENS, ((int64_t)1 << 40) + 1, WEFT_ERR_ARGUMENT, "2^40 + 1 tokens");
    /* the query does not touch data, so the largest allowed call can be asked about */
    whole_size(b, exec, WEFT_DIM_TOKENS, (int64_t)1 << 40, WEFT_OK, "2^40 tokens");
}

static void dtypes_one(bench *b, weft_exec exec)
{
    static const weft_dtype narrow[] = {WEFT_BF16, WEFT_F16};
    EACH_ARG(b, a)
    {
        static const int bad[] = {7, 77, -1};
        for (int k = 0; k < 3; k++) {
            a->view->dtype = (weft_dtype)bad[k];
            refuses(b, WEFT_ERR_ARGUMENT, a->name, "no dtype at all");
            query_refuses(b, WEFT_ERR_ARGUMENT, "no dtype at all");
            restore(b, exec);
        }
        if (a->info->type != WEFT_TYPE_INDEX) {
            a->view->dtype = WEFT_I32;
            refuses(b, WEFT_ERR_ARGUMENT, a->name, "integers where numbers are needed");
            restore(b, exec);
        }
        /* one f64 among f32 (the first tensor decides, so the others may be the ones that are named) */
        a->view->dtype = WEFT_F64;
        if (b->p->num_args > 1) refuses(b, WEFT_ERR_ARGUMENT, NULL, "float64 among others");
        restore(b, exec);
        for (int k = 0; k < 2; k++) {
            a->view->dtype = narrow[k];
            if (a->info->type == WEFT_TYPE_FULL || a->info->type == WEFT_TYPE_INDEX)
                refuses(b, WEFT_ERR_ARGUMENT, a->name, "16 bits where f32 or integers are needed");
            restore(b, exec);
        }
    }
}

/* The activation type is one: bf16 next to f16 is refused, for activations and stream gradients alike. */
static void mixed_activations(bench *b, weft_exec exec)
{
    int acts = 0, wides = 0;
    EACH_ARG(b, a)
    {
        acts += a->info->type == WEFT_TYPE_ACT;
        wides += a->info->type == WEFT_TYPE_WIDE;
        if (a->info->type == WEFT_TYPE_ACT || a->info->type == WEFT_TYPE_WIDE) a->view->dtype = WEFT_BF16;
    }
    query_refuses(b, WEFT_OK, "all activations bf16");
    EACH_ARG(b, a)
    {
        bool is_stream = a->info->type == WEFT_TYPE_ACT || a->info->type == WEFT_TYPE_WIDE;
        if (!is_stream || acts + wides < 2) continue;
        a->view->dtype = WEFT_F16;
        query_refuses(b, WEFT_ERR_ARGUMENT, "one f16 tensor among bf16 activations");
        a->view->dtype = WEFT_F32;
        /* f32 next to a 16-bit activation type is for gradients only */
        query_refuses(b, a->info->type == WEFT_TYPE_WIDE ? WEFT_OK : WEFT_ERR_ARGUMENT,
                      "one f32 tensor among bf16 ones");
        a->view->dtype = WEFT_BF16;
    }
    restore(b, exec);
}

static void pointers_one(bench *b, weft_exec exec)
{
    EACH_ARG(b, a)
    {
        if (!a->guard.block) continue;
        a->view->data = NULL;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "NULL data");
        query_refuses(b, WEFT_OK, "NULL data"); /* "Tensor data is not looked at" */
        restore(b, exec);
        a->view->data = (char *)a->view->data + 1;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "data off its element by one byte");
        restore(b, exec);
        a->view->data = (char *)a->view->data + weft_dtype_size(a->view->dtype) / 2;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "data off its element by half of it");
        restore(b, exec);
    }
}

static void strides_one(bench *b, weft_exec exec)
{
    static const int64_t bad[] = {-1, INT64_MIN, (int64_t)1 << 61, INT64_MAX};
    EACH_ARG(b, a)
    {
        for (int d = 0; d < a->info->ndim && a->guard.block; d++) {
            if (a->view->shape[d] < 2) continue;
            for (int k = 0; k < 4; k++) {
                a->view->stride[d] = bad[k];
                refuses(b, WEFT_ERR_ARGUMENT, a->name, "negative or absurd stride");
                query_refuses(b, WEFT_ERR_ARGUMENT, "negative or absurd stride");
                restore(b, exec);
            }
            if (!arg_is_output(a)) continue;
            a->view->stride[d] = 0;
            refuses(b, WEFT_ERR_ARGUMENT, a->name, "output with stride 0");
            restore(b, exec);
            for (int e = 0; e < a->info->ndim; e++) {
                if (e == d || a->view->shape[e] < 2) continue;
                a->view->stride[d] = a->view->stride[e];
                refuses(b, WEFT_ERR_ARGUMENT, a->name, "output with two equal strides");
                restore(b, exec);
            }
        }
        if (a->info->kind != WEFT_ARG_GRAD) continue;
        for (int add = -1; add <= 2; add += 3) {
            ((weft_grad *)(void *)a->view)->add = add;
            refuses(b, WEFT_ERR_ARGUMENT, a->name, "add neither 0 nor 1");
            restore(b, exec);
        }
    }
}

/* An optional tensor that is there without the one it belongs to. */
static void orphans_one(bench *b, weft_exec exec)
{
    EACH_ARG(b, a)
    {
        if (a->info->kind != WEFT_ARG_GRAD) continue;
        arg *of = problem_arg(b->p, a->name + 2);
        if (!of || !of->info->optional) continue;
        of->view->dtype = WEFT_NONE;
        refuses(b, WEFT_ERR_ARGUMENT, a->name, "a gradient of an absent tensor");
        restore(b, exec);
    }
    arg *weight = problem_arg(b->p, "sub_weight");
    arg *norm = problem_arg(b->p, problem_arg(b->p, "d_sub_weight") ? "d_v" : "v");
    if (weight && norm) {
        norm->view->dtype = WEFT_NONE;
        refuses(b, WEFT_ERR_ARGUMENT, "sub_weight", "a norm's weight without the norm");
        restore(b, exec);
    }
}

TEST(required_arguments, absent_one)
TEST(ranks, rank_one)
TEST(dimensions, dims_one)
TEST(sizes, sizes_one)
TEST(dtypes, dtypes_one)
TEST(one_activation_type, mixed_activations)
TEST(pointers, pointers_one)
TEST(strides, strides_one)
TEST(orphans, orphans_one)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(required_arguments),
        cmocka_unit_test(ranks),
        cmocka_unit_test(dimensions),
        cmocka_unit_test(sizes),
        cmocka_unit_test(dtypes),
        cmocka_unit_test(one_activation_type),
        cmocka_unit_test(pointers),
        cmocka_unit_test(strides),
        cmocka_unit_test(orphans),
    };
    return suite_run("validate", tests);
}
