/* SPDX-License-Identifier: Apache-2.0
 *
 * For the tests that look at the device itself. */
#ifndef WEFT_TESTS_DEVICE_H
#define WEFT_TESTS_DEVICE_H

#include "check/image.h"
#include "support/suite.h"

static inline void need_gpu(void)
{
    if (test_on_cuda()) return;
    fprintf(stderr, "  skipped: no GPU\n");
    skip();
}

/* The operators that the CUDA backend has kernels for, as weft_op_at counts all of them. */
static inline const weft_op_info *gpu_op_at(int32_t index)
{
    for (int32_t i = 0; i < weft_op_count(); i++)
        if (weft_op_has(weft_op_at(i), WEFT_BACKEND_CUDA) && index-- == 0) return weft_op_at(i);
    return NULL;
}

static inline int32_t gpu_op_count(void)
{
    int32_t count = 0;
    while (gpu_op_at(count)) count++;
    return count;
}

/* Calls that together take most kernels of an operator: wide rows the fast ones, odd ones the general ones. With dropout. */
enum { GPU_VARIANTS = 3 };
spec gpu_variant(const char *op, int variant);

/* Device memory full of a period of the host's, `bytes` long, again and again. NULL, or what went wrong. */
const char *fill_periods(char *data, const void *period, size_t bytes, size_t all);

/* A problem on the device, guards and all, for calls with im->exec and im->args. False, and a failure of the test, where it
 * could not be brought there; image_close it either way. */
bool problem_image(const problem *p, weft_exec exec, image *im);

#endif
