/* SPDX-License-Identifier: Apache-2.0
 *
 * What a convention sees of a golden file: the tensors of one case by their short names. The first thing that is
 * wrong is remembered, and everything after it does nothing, so a convention needs no error handling of its own. */
#ifndef WEFT_CLI_GOLDEN_FILE_H
#define WEFT_CLI_GOLDEN_FILE_H

#include <weft/ops.h>

#include "check/compare.h"
#include "check/run.h"
#include "common/safetensors.h"

typedef struct golden_file {
    safetensors tensors;
    const weft_exec *exec;
    char prefix[64];    /* the case */
    int32_t iters;      /* of this case, from the metadata; 0 where it says nothing */
    unsigned char *use; /* by tensor: unknown, input or compared */
    comparison *result; /* by tensor */
    void *memory;       /* a list of blocks */
    char problem[512];  /* "" while all is well */
} golden_file;

/* How far a value may be off: a fraction of the tensor's largest value plus ulps of the dtype it is stored in. */
typedef struct golden_tolerance {
    double of_largest, ulps;
} golden_tolerance;

__attribute__((format(printf, 2, 3))) int golden_fail(golden_file *file, const char *format, ...);
int golden_has(const golden_file *file, const char *name);
/* A size of a tensor that must have ndim dimensions and elements in it; 0 where it does not. */
int64_t golden_size(golden_file *file, const char *name, int ndim, int dim);
/* A copy of a tensor with that many elements, converted to dtype; NULL where something is wrong. */
void *golden_input(golden_file *file, const char *name, int64_t count, weft_dtype dtype);
/* Room for a result, all NaN. */
void *golden_memory(golden_file *file, int64_t count, weft_dtype dtype);
/* got: dense, its memory in the order of the file. Several comparisons of one tensor make one line.
 * A result that the file does not hold is not compared. */
void golden_compare(golden_file *file, const char *name, const weft_tensor *got, golden_tolerance tolerance);
void golden_call(golden_file *file, const char *op, const void *args);

void golden_te(golden_file *file);
void golden_megatron(golden_file *file);
void golden_deepseek(golden_file *file);
void golden_gdn(golden_file *file);

#endif
