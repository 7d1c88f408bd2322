/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints of a run: DIR/step-00000100/ with model.safetensors (the parameters under the names of weft/model.h, loadable
 * as a state dict) and optimizer.safetensors. Such a folder appears whole or not at all: it is written under another name,
 * brought to disk and renamed. Functions return 1, or 0 with the reason in error. */
#ifndef WEFT_CLI_CHECKPOINT_H
#define WEFT_CLI_CHECKPOINT_H

#include "files.h"
#include "trainer.h"

/* A checkpoint is a folder called step- and a number in decimal, with a model.safetensors in it; what else lies in the folder
 * of a run is left alone. */

/* Saves and then removes all but the last `keep` up to this one, by the names that they have. Links are not removed. */
int checkpoint_save(const trainer *t, const option *table, const char *folder, int64_t keep, char *error,
                    size_t size);
/* The last checkpoint of a run, or the folder itself where it is one; path is "" where there is none. */
int checkpoint_find(const char *folder, char path[FILES_PATH], char *error, size_t size);
/* Options that the checkpoint was made with, except those in given; a fixed option that is given and differs is an error.
 * texts: room for the texts among them. */
int checkpoint_options(const char *path, const option *table, const unsigned char *given, char *texts,
                       size_t texts_size, char *error, size_t size);
/* Parameters, optimiser and step into a trainer of the same shape; without gradients, the parameters alone. */
int checkpoint_load(trainer *t, const char *path, char *error, size_t size);

#endif
