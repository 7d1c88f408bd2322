/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs an operator with a workspace of exactly the size it asks for, and returns a sentence about a failure. */
#ifndef WEFT_CHECK_RUN_H
#define WEFT_CHECK_RUN_H

#include <weft/ops.h>

/* An operator, or two functions that stand for it. */
typedef struct run_functions {
    const weft_op_info *op; /* where the others are NULL */
    weft_status (*call)(const weft_exec *exec, const void *args);
    weft_status (*workspace)(const weft_exec *exec, const void *args, size_t *bytes);
} run_functions;

/* A call on a backend of the host, with a guarded workspace full of NaN. *wrong: NULL, or what went wrong beside the
 * call. */
weft_status run_guarded(const weft_exec *exec, const run_functions *f, const void *args, const char **wrong);

/* NULL, or what went wrong: the library's own sentence, or that the workspace was overrun. Valid until the next
 * call. The tensors are in host memory; for the CUDA backend they travel to the device and back. */
const char *run_call(const weft_exec *exec, const weft_op_info *op, const void *args);
/* The same where the tensors are in the backend's memory already. Returns when a device is done. */
const char *run_resident(const weft_exec *exec, const weft_op_info *op, const void *args);

/* Inputs that follow from others: boundary's backward must be given the y that its forward stored. `call` is one of
 * the functions above. */
const char *run_prepare(const weft_exec *exec, const weft_op_info *op, const void *args,
                        const char *(*call)(const weft_exec *, const weft_op_info *, const void *));

/* 1 where `filter` is NULL, the operator's name, or its name without _fwd or _bwd. */
int run_selected(const char *filter, const weft_op_info *op);

#endif
