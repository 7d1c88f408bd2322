/* SPDX-License-Identifier: Apache-2.0
 *
 * Every instruction set of the CPU backend, and the GPU, against the reference, over the grid of sizes, dtypes and layouts. */
#ifndef WEFT_TESTS_GRID_H
#define WEFT_TESTS_GRID_H

#include "support/problem.h"

/* WEFT_ISA_BASE up to what this machine has; returns how many. */
int grid_isas(weft_isa isas[4]);
/* The same with that many threads each, and the GPU at the end where there is one; returns how many. */
enum { GRID_EXECS = 5 };
int grid_execs(weft_exec execs[GRID_EXECS], int threads);
bool grid_uses(const char *op, int32_t dim);
/* One problem on all of them: within the bounds of check/expect.h, or bitwise equal to the chain of
 * support/chain.h; and AVX2 and AVX-512 bitwise equal to each other. Fused gradients on the GPU need not round where
 * the chain does: they are held to bounds. */
void grid_compare(const spec *s);
/* The same for a problem of the caller's, from its sealed state. */
void grid_compare_problem(problem *p);
/* A problem against its bounds on one backend, from its sealed state. */
void grid_compare_expectation(problem *p, weft_exec exec);
/* The largest error/bound per operator and tensor seen by this process: near 1 is tight, far below 1 is a loose
 * bound. */
void grid_print_ratios(void);
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
