/* SPDX-License-Identifier: Apache-2.0
 *
 * Two processes under mpirun against one: stages of a pipeline with streams that hop, and a sequence-parallel layout, in which
 * each process has half of the tokens of every operator. Activations must have the bits of one process; gradients of
 * parameters are sums over tokens and may differ in their order. */
#include <dlfcn.h>
#include <string.h>

#include "check/random.h"
#include "support/gpt.h"
#include "support/memory.h"
#include "support/suite.h"
#include "train/ranks.h"

static ranks all;
static int failures;

static void require(int holds, const char *what)
{
    if (!holds) fprintf(stderr, "rank %d: %s\n", all.rank, what);
    failures += !holds;
}

/* Floats to and from the other process. */
static void send_floats(float *values, int64_t count)
{
    int (*send)(const void *, int, void *, int, int, void *);
    void *symbol = dlsym(all.library, "MPI_Send");
    memcpy(&send, &symbol, sizeof symbol);
    require(!send(values, (int)count, all.type_float, 1 - all.rank, 0, all.world), "MPI_Send");
}

static void receive_floats(float *values, int64_t count)
{
    int (*receive)(void *, int, void *, int, int, void *, void *);
    void *symbol = dlsym(all.library, "MPI_Recv"), *no_status = NULL;
    memcpy(&receive, &symbol, sizeof symbol);
    require(!receive(values, (int)count, all.type_float, 1 - all.rank, 0, all.world, no_status), "MPI_Recv");
}

/* ---- pipeline ------------------------------------------------------------------------------------------------------------ */

static void pipeline(weft_residual residual)
{
    enum { TOKENS = 16 };
    weft_model_config c = gpt_config(residual, WEFT_F32);
    gpt whole, part;
    double loss = 0;
    c.layers = 4, c.dropout = 0.2, c.bias = 1, c.recompute = residual != WEFT_RESIDUAL_PLAIN;
    gpt_open(&whole, &c, 2, 8, 0.1);
    double want = gpt_step(&whole) * TOKENS;
    int last = all.rank;
    c.layers = 2;
    c.stage = last ? WEFT_STAGE_LAST : WEFT_STAGE_FIRST;
    c.first_layer = last ? 2 : 0;
    gpt_open(&part, &c, 2, 8, 0);
    int32_t tensors;
    weft_model_param_count(&c, &tensors, NULL);
    int64_t count = TOKENS * c.streams * c.channels, mixes = TOKENS * c.streams;
    float *streams = must_alloc((size_t)count * sizeof(float)), *mix = must_alloc((size_t)mixes * sizeof(float));
    const int single = residual == WEFT_RESIDUAL_MHC_SINGLE_PASS;
    weft_model_args args = {.struct_size = sizeof args,
                            .parameters = part.parameters,
                            .gradients = part.gradients,
                            .tokens = whole.tokens,
                            .targets = whole.targets,
                            .training = 1,
                            .step = &whole.step,
                            .loss = &loss,
                            .streams_in = streams,
                            .streams_out = streams,
                            .d_streams_in = streams,
                            .d_streams_out = streams,
                            .mix_in = single ? mix : NULL,
                            .mix_out = single ? mix : NULL,
                            .d_mix_in = single ? mix : NULL,
                            .d_mix_out = single ? mix : NULL};
    for (int pass = 0; pass < 2; pass++) { /* take the parameters; compare the gradients */
        for (int32_t t = 0; t < tensors; t++) {
            weft_model_param to, from;
            weft_model_param_at(&c, t, &to);
            if (!gpt_find(&whole.config, to.name, &from)) {
                require(0, to.name);
                continue;
            }
            size_t bytes = (size_t)from.count * sizeof(float);
            if (pass == 0)
                memcpy((float *)part.parameters + to.offset, (float *)whole.parameters + from.offset, bytes);
            else
                require(!memcmp((float *)part.gradients + to.offset, (float *)whole.gradients + from.offset, bytes),
                        to.name);
        }
        if (pass == 1) break;
        memset(part.gradients, 0, (size_t)part.elements * sizeof(float));
        if (last) receive_floats(streams, count);
        if (last && single) receive_floats(mix, mixes);
        require(weft_model_forward(&part.exec, &part.model, &args) == WEFT_OK, "forward");
        if (!last) send_floats(streams, count);
        if (!last && single) send_floats(mix, mixes);
        if (last) require(loss == want, "loss");
        if (!last) receive_floats(streams, count);
        if (!last && single) receive_floats(mix, mixes);
        require(weft_model_backward(&part.exec, &part.model, &args) == WEFT_OK, "backward");
        if (last) send_floats(streams, count);
        if (last && single) send_floats(mix, mixes);
    }
    free(streams);
    free(mix);
    gpt_close(&part);
    gpt_close(&whole);
}

/* ---- sequence-parallel layout ---------------------------------------------------------------------------------------------- */

enum { T = 64, N = 4, C = 48, GATES = N * (N + 2) };

typedef struct site_values {
    float x[T * N * C], f[T * C], d_y[T * N * C], y[T * N * C], d_x[T * N * C], v[T * C];
    float phi[GATES * N * C], alpha[3], beta[GATES], h[T * GATES], ms[T], post[T * N], res[T * N * N];
    float d_post[T * N], d_res[T * N * N], d_phi[GATES * N * C];
} site_values;

/* Pre, post and their backward over tokens first .. first + count - 1. */
static void run_site(site_values *s, int64_t first, int64_t count)
{
    weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);
    weft_dropout dropout = {.p = 0.2, .seed = 3, .site = 1, .token_base = first};
    weft_mhc_numerics numerics;
    size_t need = 1 << 24;
    weft_mhc_preset_numerics(WEFT_PRESET_DEEPSEEK_V4, &numerics);
    exec.workspace = must_alloc(exec.workspace_bytes = need);
    weft_tensor x = weft_dense3(s->x + first * N * C, WEFT_F32, count, N, C);
    weft_tensor phi = weft_dense3(s->phi, WEFT_F32, GATES, N, C), alpha = weft_dense1(s->alpha, WEFT_F32, 3);
    weft_tensor beta = weft_dense1(s->beta, WEFT_F32, GATES),
                h = weft_dense2(s->h + first * GATES, WEFT_F32, count, GATES);
    weft_tensor ms = weft_dense1(s->ms + first, WEFT_F32, count),
                f = weft_dense2(s->f + first * C, WEFT_F32, count, C);
    weft_tensor post = weft_dense2(s->post + first * N, WEFT_F32, count, N);
    weft_tensor res = weft_dense3(s->res + first * N * N, WEFT_F32, count, N, N);
    weft_tensor d_post = weft_dense2(s->d_post + first * N, WEFT_F32, count, N);
    weft_tensor d_res = weft_dense3(s->d_res + first * N * N, WEFT_F32, count, N, N);
    weft_tensor d_x = weft_dense3(s->d_x + first * N * C, WEFT_F32, count, N, C);
    weft_tensor d_phi = weft_dense3(s->d_phi, WEFT_F32, GATES, N, C);
#define CALL(op, ...) require(weft_##op(&exec, WEFT_ARGS(weft_##op##_args, __VA_ARGS__)) == WEFT_OK, #op)
    CALL(mhc_pre_fwd, .numerics = numerics, .sub_eps = 1e-6, .x = x, .phi = phi, .alpha = alpha, .beta = beta,
         .h = h, .ms = ms, .post = post, .res = res, .v = weft_dense2(s->v + first * C, WEFT_F32, count, C));
    CALL(mhc_post_fwd, .numerics = numerics, .dropout = dropout, .x = x, .f = f, .post = post, .res = res,
         .y = weft_dense3(s->y + first * N * C, WEFT_F32, count, N, C));
    CALL(mhc_post_bwd, .numerics = numerics, .dropout = dropout, .x = x, .f = f, .post = post, .res = res,
         .d_y = weft_dense3(s->d_y + first * N * C, WEFT_F32, count, N, C), .d_x = {d_x, 0}, .d_post = {d_post, 0},
         .d_res = {d_res, 0});
    CALL(mhc_pre_bwd, .numerics = numerics, .sub_eps = 1e-6, .x = x, .phi = phi, .alpha = alpha, .beta = beta,
         .h = h, .ms = ms, .d_v = f, .d_post = d_post, .d_res = d_res, .d_x = {d_x, 1}, .d_phi = {d_phi, 0});
#undef CALL
    free(exec.workspace);
}

static void fill_normal(float *to, size_t count, rng *random)
{
    for (size_t i = 0; i < count; i++) to[i] = (float)rng_normal(random);
}

#define SAME_SHARD(field, width)                                                                                   \
    require(                                                                                                       \
        !memcmp(shard->field + first * (width), whole->field + first * (width), sizeof(float) * half * (width)),   \
        #field)

static void sequence_parallel(void)
{
    const int64_t half = T / 2, first = all.rank * half;
    site_values *whole = must_alloc(sizeof *whole), *shard = must_alloc(sizeof *shard);
    rng random = {rng_name(1, "sequence")};
    fill_normal((float *)whole, sizeof *whole / sizeof(float), &random);
    memcpy(shard, whole, sizeof *whole);
    run_site(whole, 0, T);
    run_site(shard, first, half);
    SAME_SHARD(v, C);
    SAME_SHARD(y, N * C);
    SAME_SHARD(d_x, N * C);
    require(ranks_sum(&all, shard->d_phi, GATES * N * C), "sum over the processes");
    double largest = 0, worst = 0;
    for (int i = 0; i < GATES * N * C; i++) {
        largest = fmax(largest, fabs((double)whole->d_phi[i]));
        worst = value_worst(worst, fabs((double)shard->d_phi[i] - (double)whole->d_phi[i]));
    }
    /* Sums over 64 tokens in two orders: 2 * 64 roundings of partial sums, 8e-6 where none is larger than the largest. */
    require(largest > 0 && worst < 1e-5 * largest, "d_phi");
    free(whole);
    free(shard);
}

int main(void)
{
    enum { SKIPPED = 77 };
    char error[256];
    if (!ranks_open(&all, error, sizeof error)) {
        fprintf(stderr, "%s\n", error);
        return SKIPPED;
    }
    if (all.count != 2) {
        fprintf(stderr, "skipped: for mpirun -np 2\n");
        return SKIPPED;
    }
    for (int k = 0; k < WEFT_RESIDUAL_COUNT; k++) pipeline((weft_residual)k);
    sequence_parallel();
    if (failures) ranks_abort(&all, 1);
    ranks_close(&all);
    return failures != 0;
}
