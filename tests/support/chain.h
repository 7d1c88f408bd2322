/* SPDX-License-Identifier: Apache-2.0
 *
 * Operators that are made of others, as the chain of those others: head, pre, boundary, replay. Forward, a fused
 * call and the chain round at the same points; backward they do where the chain's gradient buffers are fp32. So
 * the results must agree bit by bit on the same backend. Where a GPU takes the fused kernel, whose sums have another order,
 * they agree given equal h and ms. */
#ifndef WEFT_TESTS_CHAIN_H
#define WEFT_TESTS_CHAIN_H

#include "support/problem.h"

bool chain_knows(const char *op);
/* "fused: ...", as opposed to "unfused: <reason>": a path of weft_op_path. */
bool path_is_fused(const char *path);
/* The call takes the fused path on CUDA: bounds have to tell what the chain no longer does. */
bool chain_sums_apart(const problem *p, weft_exec exec);
/* Runs p's operator on exec, and its chain on a copy of p, and compares all outputs. */
void chain_compare(problem *p, weft_exec exec);

#endif
