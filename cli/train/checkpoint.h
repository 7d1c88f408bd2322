/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints of a run: DIR/step-00000100/ with model.safetensors (the parameters under the names of weft/model.h, loadable
 * as a state dict) and optimizer.safetensors. Such a folder appears whole or not at all: it is written under another name,
 * brought to disk and renamed. Functions return 1, or 0 with the reason in error. */
#ifndef WEFT_CLI_CHECKPOINT_H
#define WEFT_CLI_CHECKPOINT_H

#include "common/files.h"
#include "train/checkpoint_file.h"
#include "train/trainer.h"

/* A checkpoint is a folder called step- and a number in decimal, with a model.safetensors in it; what else lies in the folder
 * of a run is left alone. */

/* Saves and then removes all but the last `keep` up to this one, by the names that they have. Links are not removed. */
int checkpoint_save(const trainer *t, const option *table, const char *folder, int64_t keep, char *error,
                    size_t size);
/* The last checkpoint of a run, or the folder itself where it is one; path is "" where there is none. */
int checkpoint_find(const char *folder, char path[FILES_PATH], char *error, size_t size);
/* The model of the checkpoint at `path`. checkpoint_file_close must follow, after an error too. */
int checkpoint_open(checkpoint_file *model, const char *path, char *error, size_t size);
/* The same for the last checkpoint of a run, which may be training: what it drops meanwhile gives way to what it saves. */
int checkpoint_open_last(checkpoint_file *model, const char *folder, char path[FILES_PATH], char *error,
                         size_t size);
/* checkpoint_file_fits with the path in its reason. */
int checkpoint_fits(const checkpoint_file *model, const char *path, const weft_model_config *config, char *error,
                    size_t size);
/* A line on stderr where damage in the checkpoint would not be noticed. */
void checkpoint_warn(const char *command, const checkpoint_file *model, const char *path);
/* Parameters, optimiser and step into a trainer of the same shape; without gradients, the parameters alone. */
int checkpoint_load(trainer *t, const checkpoint_file *model, const char *path, char *error, size_t size);

#endif
