/* SPDX-License-Identifier: Apache-2.0
 *
 * A model in training: memory, one step, validation. What a step does depends on the options, the parameters and the number of
 * the step alone, so a run that was killed continues as if it had not been.
 *
 * All memory is one block of the backend's. On a GPU a step is put on the device as a whole, update and clipping included, and
 * the host waits once, for the figures that it writes down. */
#ifndef WEFT_CLI_TRAINER_H
#define WEFT_CLI_TRAINER_H

#include <weft/model.h>

#include "train/corpus.h"
#include "train/nccl.h"
#include "train/ranks.h"
#include "train/train_options.h"

/* Parameters of one layer, or of what lies before or after the layers: neighbours in the array. */
typedef struct trainer_piece {
    int64_t offset, count;
    int32_t layer; /* -1: none */
} trainer_piece;

/* What the device reads in a step, and where it lies on the host: the same memory on the CPU. */
typedef struct trainer_batch {
    uint64_t *step;
    int32_t *tokens, *targets; /* micro-batch after micro-batch */
} trainer_batch;

/* What a step leaves in the backend's memory, as doubles in this order. */
typedef struct trainer_figures {
    double *losses; /* a micro-batch's sum over its tokens, each */
    double *sums;   /* of squares of the gradient, by piece */
    double *norm, *factor;
} trainer_figures;

typedef struct trainer {
    const train_options *options;
    corpus *text; /* NULL: parameters only, for sampling */
    const ranks *ranks;
    nccl nccl;
    weft_exec exec; /* with the optimiser's workspace */
    weft_blas blas; /* library NULL: the built-in loop */
    weft_model_config config;
    weft_model model;
    int32_t tensors, num_pieces;
    int64_t elements;
    weft_model_param *params;
    trainer_piece *pieces;
    char *block;                                    /* all that follows, in the backend's memory */
    float *parameters, *gradients, *first, *second; /* second: AdamW; first is also Muon's moment */
    void *memory;                                   /* of the model */
    size_t memory_bytes;
    int64_t length;         /* of the longest sequence that it has room for */
    weft_model_state state; /* of trainer_go_on; memory NULL without one */
    trainer_batch batch, host_batch;
    trainer_figures figures, host_figures;
    size_t batch_bytes, figures_bytes;
    void *host_block; /* of a GPU's batch and figures; NULL on the CPU */
    float *host_sums; /* gradients on their way through MPI, where NCCL cannot take them */
    int64_t step;     /* steps done */
    size_t bytes;     /* of the block */
    char error[512];
} trainer;

typedef struct step_figures {
    double loss, gradient_norm, rate; /* the norm before clipping */
    double *layer_norms;              /* gradient norm per layer, then the rest of the model */
} step_figures;

/* text may be NULL where nothing is trained. 1, or 0 with the reason in error; trainer_close is due either way. */
int trainer_open(trainer *t, const train_options *options, const weft_model_config *config, corpus *text,
                 const ranks *ranks, int64_t sequences, int64_t length);
void trainer_close(trainer *t);
/* How the gradients of several processes are summed on GPUs. All processes call it once their trainers are open. */
int trainer_connect(trainer *t);
/* One step. 0 where a call failed, or where a number is not finite: then the parameters are as they were. */
int trainer_step(trainer *t, step_figures *figures);
/* Mean loss over the validation windows. */
int trainer_validate(trainer *t, double *loss);
/* The residual mix of a site, its mean over the tokens of the last forward: n * n numbers, [in, out]. */
int trainer_mix(trainer *t, int32_t site, double *mix);
/* Logits after the last of `count` tokens. The cost follows the count, not the length that the trainer was opened with. */
int trainer_predict(trainer *t, const int32_t *tokens, int64_t count, float *logits);
/* A state for trainer_go_on, with room for so many tokens in layers that attend. */
int trainer_remember(trainer *t, int64_t capacity);
/* Logits after tokens that follow those of the calls before. */
int trainer_go_on(trainer *t, const int32_t *tokens, int64_t count, float *logits);

/* An array of the trainer's as the host can read it: itself, or a copy, which trainer_unmap writes back where it has been
 * changed. NULL where there is no memory. */
float *trainer_map(const trainer *t, float *array);
int trainer_unmap(const trainer *t, float *array, float *host, int changed);

#endif
