/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums over the GPUs of several processes: NCCL, loaded only where there is more than one. */
#ifndef WEFT_CLI_NCCL_H
#define WEFT_CLI_NCCL_H

#include "train/ranks.h"

typedef struct nccl {
    void *library; /* NULL: not in use */
    void *comm;
    int (*allreduce)(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream);
    int (*destroy)(void *comm);
} nccl;

/* Each process has a GPU of its own and has made it current. 1 where all processes can sum; 0 with the reason, the same
 * answer for all. */
int nccl_open(nccl *n, const ranks *all, char *why, size_t size);
void nccl_close(nccl *n);
/* The sum over all processes, in place, on the stream. */
int nccl_sum(const nccl *n, float *values, int64_t count, void *stream);

#endif
