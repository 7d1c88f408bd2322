/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads what cli/report/runlog.h writes, and what earlier and later versions write: names that are not known are passed over. A
 * last line that was cut off is left out; anything else that is not a log is an error. */
#ifndef WEFT_CLI_RUNLOG_READ_H
#define WEFT_CLI_RUNLOG_READ_H

#include <stddef.h>
#include <stdint.h>

/* Columns of a log; a step that lacks one has NaN there. */
typedef enum run_column {
    RUN_STEP,
    RUN_LOSS,
    RUN_VAL_LOSS,
    RUN_RATE,
    RUN_GRADIENT_NORM,
    RUN_SECONDS,
    RUN_TOKENS_PER_S,
    RUN_ROW_GAIN,
    RUN_ROW_GAIN_MAX,
    RUN_COLUMN_GAIN,
    RUN_COLUMN_GAIN_MAX,
    RUN_BYTES,
    RUN_STREAM_BYTES,
    RUN_PEAK_BYTES,
    RUN_COLUMNS
} run_column;

typedef struct run_option {
    char name[32], value[64];
} run_option;

/* An option beside those of the log: the step, or steps, after which the run was given another number of steps. */
#define RUN_LONGER "lengthened at"

typedef struct run_record {
    /* Each name once, with the value that was written last. A log of mhc that names no first-mix has the uniform one, and
     * one that names no mixer has attention. */
    run_option *options;
    int num_options;
    double *column[RUN_COLUMNS];
    size_t count, room;
    double *layer_norms; /* the last that were written */
    int num_layer_norms;
    double *
        mixes; /* the last that were written: num_mixes matrices [streams, streams], from a stream and to a stream */
    int num_mixes, streams;
    int stepless; /* after an error: it is a log, but of a run that ended before its first step */
    char error[256];
} run_record;

/* The value of an option; NULL where the log does not say. */
const char *run_record_option(const run_record *r, const char *name);
/* 1, or 0 with the reason in error; run_record_close must follow either way. */
int run_record_parse(run_record *r, const char *text, size_t size);
int run_record_open(run_record *r, const char *path);
void run_record_close(run_record *r);

#endif
