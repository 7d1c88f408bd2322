/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs by kind: those whose options differ in the seed alone, and what they have in common. */
#ifndef WEFT_CLI_KINDS_H
#define WEFT_CLI_KINDS_H

#include <sys/stat.h>

#include "report/runlog_read.h"

typedef struct report_run {
    run_record log;
    struct stat file; /* of the log */
    char name[64];    /* of its folder */
} report_run;

/* A figure over the runs of a kind that have it; count 0: none has. */
typedef struct spread {
    double mean, low, high;
    int count, seeds; /* seeds: of losses, how many different ones; a copy of a run adds none */
} spread;

typedef struct run_kind {
    char name[96];     /* "mhc", or "mhc, rate 0.001" where another kind is called mhc too */
    report_run **runs; /* finished ones first, each part in the order they were given */
    int count, finished;
    spread unfinished; /* steps done by the runs that have not done all of theirs */
    /* Of the finished runs where there is one, else of all. */
    spread steps, loss, validation; /* loss: mean of the last tenth of the steps */
    /* Largest of the run, mean over tokens or largest token. An unfinished run can raise the highest, not lower the lowest. */
    spread gain, column_gain, gain_max, column_gain_max;
    spread layers; /* largest gradient norm of a layer by the smallest, at the last measurement; as the losses */
    spread seconds, tokens_per_s; /* medians */
    spread bytes, stream_bytes;
} run_kind;

typedef struct report {
    report_run **runs;
    int num_runs;
    run_kind *kinds; /* the plain residual, hc, mhc, mhc_single_pass, then others as they came */
    int num_kinds;
} report;

/* Sorts the runs into kinds; 0 without memory. report_close frees the runs as well. */
int report_sort(report *r);
void report_close(report *r);
/* The figures of one run, as of a kind of its own. */
run_kind kind_of_one(report_run **run);

double run_steps_done(const run_record *r);
/* The steps that a run is to have; 0 where the log does not say. */
double run_steps_wanted(const run_record *r);
int run_has_seed_of(const run_record *a, const run_record *b);
/* The streams that a run has; "0" stands for four, or for one with the plain residual. */
int run_streams(const run_record *r);
/* An option's value as a reader wants it: 0.003 for 0.0030000000000000001. "" where the log does not say. */
void run_option_text(const run_record *r, const char *name, char *text, size_t size);
/* The value that all runs of all kinds have; 0 where they differ or do not say. */
int report_common(const report *r, const char *name, char *text, size_t size);

/* Values of a kind over its steps: mean over the runs that have one, least and largest. Geometric mean for log axes. Few
 * enough points for a chart: neighbouring steps are taken together. */
typedef struct curve {
    double *x, *mean, *low, *high;
    size_t count;
} curve;

typedef enum curve_form {
    CURVE_MEAN,
    CURVE_GEOMETRIC,
    CURVE_SMOOTH
} curve_form; /* smooth: each run over a 25th of it */
/* 0 without memory; curve_close follows either way. */
int curve_of(curve *c, const run_kind *kind, run_column column, curve_form form);
/* The same over layers, of the gradient norms of the runs that say how the kind ends. */
int curve_of_layers(curve *c, const run_kind *kind);
void curve_close(curve *c);

#endif
