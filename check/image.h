/* SPDX-License-Identifier: Apache-2.0
 *
 * A call whose tensors lie in host memory, made on the CUDA backend: a copy of the args struct whose tensors, dropout
 * step and workspace are on the device. */
#ifndef WEFT_CHECK_IMAGE_H
#define WEFT_CHECK_IMAGE_H

#include <weft/mhc.h>
#include <weft/ops.h>

#include "check/mirror.h"

/* Host memory that travels with the tensors in it: guards. */
typedef struct image_range {
    const char *name;
    void *host;
    size_t bytes;
} image_range;

typedef struct image {
    const weft_op_info *op;
    weft_exec exec; /* with the workspace */
    void *args;     /* with device pointers */
    mirror mirror;
    weft_mhc_replay_layer *layers;
    char wrong[200]; /* "", or what went wrong outside of the library */
} image;

/* Lays the call out on the device and sends it there. Not WEFT_OK: the library's own answer to the question for the
 * workspace. Where im->wrong is set, it went wrong elsewhere, and there is nothing to call. */
weft_status image_open(image *im, const weft_op_info *op, const weft_exec *exec, const void *args,
                       const image_range *around, int num_around);
void image_close(image *im);
/* All of it from the host again, or back to the host. 0, and im->wrong says why: also where memory beside a tensor or
 * the workspace was written. */
int image_put(image *im);
int image_get(image *im);

/* One call, from the host's memory to the host's memory. `wrong` as above. */
weft_status image_call(const weft_op_info *op, const weft_exec *exec, const void *args, const image_range *around,
                       int num_around, char *wrong, size_t size);

#endif
