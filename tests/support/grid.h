/* SPDX-License-Identifier: Apache-2.0
 *
 * Every instruction set of the CPU backend against the reference, over the grid of sizes, dtypes and layouts. */
#ifndef WEFT_TESTS_GRID_H
#define WEFT_TESTS_GRID_H

#include "support/problem.h"

/* WEFT_ISA_BASE up to what this machine has; returns how many. */
int grid_isas(weft_isa isas[4]);
bool grid_uses(const char *op, int32_t dim);
/* One problem on all of them: within the bounds of support/truth.h, or bitwise equal to the chain of
 * support/chain.h; and AVX2 and AVX-512 bitwise equal to each other. */
void grid_compare(const spec *s);
/* A problem drawn from the whole space of sizes, layouts, dtypes, options and absent arguments; `absent` is a
 * buffer. */
spec grid_draw(const char *op, rng *r, char *absent, size_t size);

/* The sweeps over an operator. */
void grid_suite(const char *op);
/* Exactly one rounding: a 16-bit output is the rounded fp32 output, and adding adds the fp32 value. */
void grid_rounding(const char *op);
/* Operators made of others, on the reference: bitwise equal to their chain there too (forward). */
void grid_chain_on_ref(const char *op);

#endif
