/* SPDX-License-Identifier: Apache-2.0
 *
 * Processes that train one model must have the same options, text, checkpoint, backend and version: sizes that differ would
 * overrun buffers of a sum, numbers of steps that differ would leave one process waiting, and texts that differ would train
 * without a word. So they compare notes before any buffer is exchanged, and none continues alone. */
#ifndef WEFT_CLI_AGREE_H
#define WEFT_CLI_AGREE_H

#include "train/ranks.h"

enum { AGREE_ERROR = 512, AGREE_NAME = 32, AGREE_VALUE = 96, AGREE_FACTS = 80, AGREE_WHY = 2048 };

typedef struct agree_fact {
    char name[AGREE_NAME];
    char value[AGREE_VALUE];
} agree_fact;

/* What a process sends. The layout is the same in every version of the program and depends on no option, so that processes of
 * different versions can still compare. Zero-initialised: nothing to say. */
typedef struct agree_notes {
    char error[AGREE_ERROR]; /* why this process cannot continue; "" where it can */
    agree_fact facts[AGREE_FACTS];
} agree_notes;

/* Adds a fact; one more than AGREE_FACTS is an error of the notes. A value that is too long keeps its beginning and a fingerprint of the whole. */
void agree_note(agree_notes *notes, const char *name, const char *value);

/* All processes call it with their notes. 1 where none has an error and all have the same facts. Otherwise 0 in all of them,
 * with the same reason in `why`: what differs and in which ranks. An error that all have in common is a reason in rank 0 and
 * "" in the others. */
int agree(const ranks *all, const agree_notes *mine, char why[AGREE_WHY]);
/* 1 in all processes where at least one of them was asked to stop. */
int agree_to_stop(const ranks *all, int asked);

#endif
