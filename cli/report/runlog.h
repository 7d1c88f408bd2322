/* SPDX-License-Identifier: Apache-2.0
 *
 * The log of a run: one JSON object a line, first the options, then a line per step. Every line is handed to the system as
 * soon as it is complete. */
#ifndef WEFT_CLI_RUNLOG_H
#define WEFT_CLI_RUNLOG_H

#include <stdio.h>

#include "common/options.h"

typedef struct runlog {
    FILE *file;
    int lists; /* in the list of lists that is being written */
    int error; /* errno of the first write that failed */
} runlog;

/* Opens DIR/log.jsonl. With step 0 it begins anew; otherwise what is there up to that step stays. 1, or 0 with the reason in
 * error. */
int runlog_open(runlog *log, const char *folder, int64_t step, char *error, size_t size);
int runlog_close(runlog *log);

void runlog_options(runlog *log, const option *table);
/* A line is begun with the step, gets its figures, and is ended. NaN is written as null. */
void runlog_begin(runlog *log, int64_t step);
void runlog_number(runlog *log, const char *name, double value);
void runlog_numbers(runlog *log, const char *name, const double *values, int count);
/* Begins a list of lists; runlog_list adds one to it, and runlog_close_lists ends it. */
void runlog_open_lists(runlog *log, const char *name);
void runlog_list(runlog *log, const double *values, int count);
void runlog_close_lists(runlog *log);
void runlog_end(runlog *log);

#endif
