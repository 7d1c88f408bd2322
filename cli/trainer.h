/* SPDX-License-Identifier: Apache-2.0
 *
 * A model in training: memory, one step, validation. What a step does depends on the options, the parameters and the number of
 * the step alone, so a run that was killed goes on as if it had not been. */
#ifndef WEFT_CLI_TRAINER_H
#define WEFT_CLI_TRAINER_H

#include <weft/model.h>

#include "corpus.h"
#include "ranks.h"
#include "train_options.h"

typedef struct trainer {
    const train_options *options;
    const corpus *text; /* NULL: parameters only, for sampling */
    const ranks *ranks;
    weft_exec exec;
    weft_blas blas; /* library NULL: the built-in loop */
    weft_model_config config;
    weft_model model;
    int32_t tensors;
    int64_t elements;
    weft_model_param *params;
    float *parameters, *gradients, *first, *second; /* second: AdamW; first is also Muon's moment */
    void *memory, *workspace;
    size_t workspace_bytes;
    int32_t *tokens, *targets;
    int64_t step; /* steps done */
    size_t bytes; /* all of the above */
    char error[512];
} trainer;

typedef struct step_figures {
    double loss, gradient_norm, rate, clipped; /* clipped: the factor, at most 1 */
    double *layer_norms;                       /* gradient norm per layer, then the rest of the model */
} step_figures;

/* text may be NULL where nothing is trained. 1, or 0 with the reason in error; trainer_close is due either way. */
int trainer_open(trainer *t, const train_options *options, const weft_model_config *config, const corpus *text,
                 const ranks *ranks, int64_t sequences, int64_t length);
void trainer_close(trainer *t);
/* One step. 0 where a call failed, or where a number is not finite: then the parameters are as they were. */
int trainer_step(trainer *t, step_figures *figures);
/* Mean loss over the validation windows. */
int trainer_validate(trainer *t, double *loss);

#endif
