/* SPDX-License-Identifier: Apache-2.0
 *
 * Several processes that train one model: MPI, loaded only where the program was started by mpirun. */
#ifndef WEFT_CLI_RANKS_H
#define WEFT_CLI_RANKS_H

#include <stddef.h>
#include <stdint.h>

typedef struct ranks {
    int rank, count;
    int started;       /* by mpirun, be it as one process */
    int local, locals; /* the same among the processes of this machine */
    void *library;     /* NULL: one process, and nothing is exchanged */
    void *world, *type_float, *type_double, *type_byte, *sum;
    int (*allreduce)(const void *from, void *to, int count, void *type, void *op, void *comm);
    int (*allgather)(const void *from, int count, void *type, void *to, int each, void *type_each, void *comm);
    int (*broadcast)(void *data, int count, void *type, int from, void *comm);
    int (*finalize)(void);
    int (*abort)(void *comm, int code);
} ranks;

/* 1, or 0 with the reason in error. */
int ranks_open(ranks *r, char *error, size_t size);
void ranks_close(ranks *r);
/* The sum over all processes, in place. */
int ranks_sum(const ranks *r, float *values, int64_t count);
int ranks_sum_double(const ranks *r, double *values, int count);
/* What process 0 has, for all. */
int ranks_share(const ranks *r, void *data, int bytes);
/* What each process has, in the order of their ranks, for all; `bytes` of each. */
int ranks_gather(const ranks *r, const void *mine, void *all, int bytes);
/* 1 where every process says so. */
int ranks_all(const ranks *r, int mine);
/* Ends all processes where one cannot continue. */
void ranks_abort(const ranks *r, int code);

#endif
