/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients of the reference against central finite differences of its forward, all in float64. */
#ifndef WEFT_TESTS_FD_H
#define WEFT_TESTS_FD_H

#include "support/problem.h"

/* s->op is the stem: "mhc_post". Runs <stem>_fwd and <stem>_bwd with random upstream gradients. */
void fd_check(const spec *s);
/* All that applies to a stem: streams, presets, rules, eps kinds, index conventions, optional arguments. */
void fd_suite(const char *stem);

#endif
