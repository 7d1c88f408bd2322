/* SPDX-License-Identifier: Apache-2.0
 *
 * What the processes of a training run must have in common. */
#ifndef WEFT_CLI_TRAIN_FACTS_H
#define WEFT_CLI_TRAIN_FACTS_H

#include "train/agree.h"
#include "train/trainer.h"

/* The run: versions, the checkpoint that it continues from ("" for none), all options but those of a process, the text. */
void train_facts_run(agree_notes *notes, const option *table, const char *checkpoint, const corpus *text);
/* The model as it stands: what computes it, the step, the bits of parameters and optimiser. */
void train_facts_model(agree_notes *notes, const trainer *t);

#endif
