/* SPDX-License-Identifier: Apache-2.0
 *
 * What the benchmark's halves share: bench.c has the command, the report and the CPU, bench_device.c the GPU. */
#ifndef WEFT_CLI_BENCH_H
#define WEFT_CLI_BENCH_H

#include "check/device.h"
#include "check/problem.h"
#include "common/pool.h"

typedef struct bench {
    weft_exec exec;
    problem_spec spec;
    int64_t key_heads, value_heads; /* of weft/gdn.h */
    int64_t sequences;              /* packed into so many; 0: one, as it is */
    int decoding;                   /* tokens are requests of one token each */
    double seconds, copy;           /* for one operator; bytes per second */
    int json, threads;
    const char *isa, *preset;
    pool memory;
    device_facts gpu; /* CUDA only, as the rest */
    device_timer *timer;
    void *scrap; /* what evicting the L2 writes */
    void *workspace;
    size_t workspace_bytes;
} bench;

typedef struct timing {
    double seconds, best, bytes; /* median and fastest run */
    double sustained;            /* GPU: median of the runs after the first twenty; 0 where there are too few */
    const char *cache;           /* GPU: "warm" or "flushed" */
    const char *path;            /* of weft_op_path */
    char problem[700];           /* "" or why there is no time */
} timing;

double bench_median(double *times, int count); /* sorts them */

/* NULL, or why there can be no benchmark on the device. */
const char *bench_device_open(bench *b);
void bench_device_close(bench *b);
/* Bytes read and written per second by a large copy within the device. */
double bench_device_copy(bench *b);
/* Checks and times one operator; NULL, or what went wrong. */
const char *bench_device_run(bench *b, problem *p, timing *t);
/* Fills a tensor on the device with random values. */
const char *bench_device_fill(const problem *p, const problem_arg *arg);

#endif
