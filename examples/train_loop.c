/* SPDX-License-Identifier: Apache-2.0
 *
 * A training loop around weft/model.h: a small mHC transformer learns a text by heart, on the CPU.
 *
 * The model owns no memory: parameters are one array, and a block whose size weft_model_query tells holds everything that lies
 * between forward and backward. `weft train` is this loop with files, checkpoints, a schedule and GPUs.
 *
 *     cc train_loop.c $(pkg-config --cflags --libs weft) -lm && ./a.out */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <weft/model.h>
#include <weft/optim.h>

enum { SEQUENCES = 4, LENGTH = 32, TOKENS = SEQUENCES * LENGTH, STEPS = 120, MOST_TENSORS = 256 };

static const char text[] =
    "In an mHC model the residual connection is n streams instead of one. Around every sub-layer the "
    "streams are collapsed into its input, its output is spread over them, and they are mixed by a "
    "matrix whose rows and columns sum to one.";

static void must(weft_status status)
{
    if (status == WEFT_OK) return;
    fprintf(stderr, "%s: %s\n", weft_status_name(status), weft_last_error());
    exit(1);
}

/* All that the library gets is aligned to 64 bytes and begins as zeros. */
static void *reserve(size_t bytes)
{
    size_t room = (bytes / 64 + 1) * 64;
    void *memory = aligned_alloc(64, room);
    if (!memory) exit(1);
    return memset(memory, 0, room);
}

/* Windows of the text: each token's target is the one behind it. */
static void next_batch(int step, int32_t *tokens, int32_t *targets)
{
    const int windows = (int)sizeof text - 1 - LENGTH;
    for (int s = 0; s < SEQUENCES; s++) {
        int begin = (step * SEQUENCES + s) * 37 % windows;
        for (int i = 0; i < LENGTH; i++) {
            tokens[s * LENGTH + i] = (unsigned char)text[begin + i];
            targets[s * LENGTH + i] = (unsigned char)text[begin + i + 1];
        }
    }
}

int main(void)
{
    const weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);
    weft_model_config config = {.struct_size = sizeof config};
    must(weft_model_defaults(WEFT_RESIDUAL_MHC, &config));
    config.layers = 2;
    config.heads = 2;
    config.channels = 32;
    config.hidden = 64;
    config.context = LENGTH;

    /* Parameters, gradients and the state of AdamW have one layout, tensor by tensor. */
    int32_t tensors;
    int64_t elements;
    weft_model_param params[MOST_TENSORS];
    must(weft_model_param_count(&config, &tensors, &elements));
    if (tensors > MOST_TENSORS) return 1;
    for (int32_t i = 0; i < tensors; i++) must(weft_model_param_at(&config, i, &params[i]));
    const size_t bytes = (size_t)elements * sizeof(float);
    float *parameters = reserve(bytes), *gradients = reserve(bytes), *first = reserve(bytes),
          *second = reserve(bytes);
    must(weft_model_init(&config, 1, parameters));

    weft_model_bytes need;
    weft_model model;
    must(weft_model_query(&exec, &config, SEQUENCES, LENGTH, &need));
    void *memory = reserve(need.total);
    must(weft_model_bind(&exec, &config, SEQUENCES, LENGTH, memory, need.total, &model));

    /* The optimiser's calls have a workspace of their own; the model's is part of its memory. */
    weft_exec update = exec;
    must(weft_sum_squares_workspace(&update, elements, &update.workspace_bytes));
    update.workspace = reserve(update.workspace_bytes);

    weft_blas blas = {0}; /* OpenBLAS where it is found, else the library's own loop */
    const weft_blas *products = weft_blas_open(NULL, &blas) == WEFT_OK ? &blas : NULL;

    int32_t tokens[TOKENS], targets[TOKENS];
    double loss = 0, begun_with = 0;
    for (uint64_t step = 0; step < STEPS; step++) {
        double sum, norm, factor;
        next_batch((int)step, tokens, targets);
        memset(gradients, 0, bytes); /* backward adds */
        loss = 0;
        const weft_model_args args =
            WEFT_STRUCT(weft_model_args, .blas = products, .parameters = parameters, .gradients = gradients,
                        .tokens = tokens, .targets = targets, .training = 1, .step = &step, .loss = &loss);
        must(weft_model_forward(&exec, &model, &args));
        must(weft_model_backward(&exec, &model, &args));
        loss /= TOKENS;
        if (step == 0) begun_with = loss;

        /* The gradient is clipped to a norm of 1; what is not finite makes the factor NaN, and nothing is updated. */
        must(weft_sum_squares(&update, gradients, elements, &sum));
        must(weft_clip(&update, WEFT_ARGS(weft_clip_args, .sums = &sum, .count = 1, .others = &loss,
                                          .num_others = 1, .largest = 1, .norm = &norm, .factor = &factor)));
        for (int32_t i = 0; i < tensors; i++) {
            const weft_model_param *p = &params[i];
            must(weft_adamw(&update,
                            WEFT_ARGS(weft_adamw_args, .parameter = parameters + p->offset,
                                      .first = first + p->offset, .second = second + p->offset,
                                      .gradient = gradients + p->offset, .count = p->count,
                                      .step = (int64_t)step + 1, .rate = 1e-2, .beta1 = 0.9, .beta2 = 0.95,
                                      .eps = 1e-8, .decay = p->matrix ? 0.1 : 0, .scale = 1, .factor = &factor)));
        }
        if (step % 20 == 0 || step == STEPS - 1)
            printf("step %3d  loss %.4f  gradient norm %.3f\n", (int)step + 1, loss, norm);
    }
    weft_model_gains gains;
    must(weft_model_gain(&exec, &model, &gains));
    printf("gain from the first layer to the last: %.4f, at the largest token %.4f\n", gains.row_mean,
           gains.row_max);

    weft_blas_close(&blas);
    free(memory), free(update.workspace), free(parameters), free(gradients), free(first), free(second);
    return loss < begun_with / 4 ? 0 : 1;
}
