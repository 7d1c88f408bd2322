/* SPDX-License-Identifier: Apache-2.0
 *
 * The fields of the args structs that are not tensors, and the public functions by name. */
#ifndef WEFT_TESTS_FIELDS_H
#define WEFT_TESTS_FIELDS_H

#include "support/problem.h"

/* Sets p->call and p->workspace to the operator's own public functions (not to weft_op_call). */
void fields_bind(problem *p);
/* Copies numerics, dropout, eps, kind and layers of the spec into the args struct. */
void fields_set(problem *p);
/* Where the args struct keeps them; NULL where it has none. */
weft_mhc_numerics *fields_numerics(problem *p);
weft_dropout *fields_dropout(problem *p);
/* Shifts the dropout's first token, wherever the operator keeps it: for shards of a batch. */
void fields_token_base(problem *p, int64_t token);

#endif
