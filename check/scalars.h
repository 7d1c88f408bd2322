/* SPDX-License-Identifier: Apache-2.0
 *
 * Fields of an args struct that are not tensors, found through weft_scalar_info. */
#ifndef WEFT_CHECK_SCALARS_H
#define WEFT_CHECK_SCALARS_H

#include <weft/gdn.h>
#include <weft/mhc.h>
#include <weft/ops.h>

/* The first field of that type and, where it is not NULL, of that name; NULL where the operator has none. */
void *scalar_find(const weft_op_info *op, void *args, weft_scalar_type type, const char *name);

/* What the fields of a random call are set to. */
typedef struct scalar_values {
    weft_mhc_numerics numerics;
    weft_dropout dropout;
    weft_gdn_options gdn;
    double eps;    /* of a norm, by any name */
    double scale;  /* of a query */
    int32_t chunk; /* of the rule */
    int32_t kind;  /* weft_contract */
} scalar_values;

/* Sets all of them. A field that none of the values stands for is 0 where it counts or chooses, and 1 where it is real. */
void scalars_set(const weft_op_info *op, void *args, const scalar_values *values);

#endif
