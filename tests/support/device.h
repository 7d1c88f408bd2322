/* SPDX-License-Identifier: Apache-2.0
 *
 * For the tests that look at the device itself. */
#ifndef WEFT_TESTS_DEVICE_H
#define WEFT_TESTS_DEVICE_H

#include "image.h"
#include "support/suite.h"

static inline void need_gpu(void)
{
    if (test_on_cuda()) return;
    fprintf(stderr, "  skipped: no GPU\n");
    skip();
}

/* The blocks of a problem, guards and all, for image_open; at most MAX_ARGS. Returns how many. */
int problem_ranges(const problem *p, image_range *around);

#endif
