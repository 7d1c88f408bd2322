/* SPDX-License-Identifier: Apache-2.0
 *
 * What a training run is: one struct, one table that serves the command line, the file of --config, the metadata of a
 * checkpoint and the head of a log. */
#ifndef WEFT_CLI_TRAIN_OPTIONS_H
#define WEFT_CLI_TRAIN_OPTIONS_H

#include <weft/model.h>

#include "common/options.h"

enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON };
enum { ON_CPU, ON_CUDA };
enum { DTYPE_AUTO, DTYPE_F32, DTYPE_BF16 };
extern const char *const train_backends[]; /* by these numbers; ends with NULL */
enum { MAX_TRAIN_OPTIONS = 64 };

typedef struct train_options {
    /* where */
    const char *config_file, *data, *out;
    int resume, quiet;
    int backend, dtype; /* dtype: 0 auto, then f32, bf16 */
    int64_t threads;
    /* the model */
    int residual, exit, preset; /* exit: 0 auto, then weft_exit + 1; preset: 0 auto, then weft_mhc_preset + 1 */
    int mixer;                  /* weft_mixer */
    int64_t streams, layers, heads, key_heads, conv_width, channels, hidden, context, sinkhorn, group;
    int bias, recompute, poison;
    double dropout, alpha;
    int first_mix;
    /* training */
    int64_t steps, batch, micro, warmup, seed;
    int optimizer;
    double rate, rate_end, decay, clip, beta1, beta2, eps, muon_rate, momentum;
    /* what is written down */
    int64_t val_every, val_batches, save_every, keep, gain_every;
} train_options;

/* Defaults, and the table over *o; the table ends with an empty row. */
void train_options_open(train_options *o, option table[MAX_TRAIN_OPTIONS]);
/* The model that they describe; 1, or 0 with the reason in error. */
int train_options_model(const train_options *o, weft_model_config *config, char *error, size_t size);

#endif
