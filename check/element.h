/* SPDX-License-Identifier: Apache-2.0
 *
 * Single elements of any dtype as double, and tensors as arrays of double. */
#ifndef WEFT_CLI_ELEMENT_H
#define WEFT_CLI_ELEMENT_H

#include <weft/weft.h>

double element_load(const void *data, weft_dtype dtype, int64_t index);
void element_store(void *data, weft_dtype dtype, int64_t index, double value);

/* The nearest value that the dtype has, ties to even: one rounding from double. */
double element_round(weft_dtype dtype, double value);
/* Half an ulp relative to the value (the unit roundoff), and the smallest positive value. */
double element_unit(weft_dtype dtype);
double element_tiny(weft_dtype dtype);
/* Distance between the two values of the dtype that enclose it. */
double element_ulp(weft_dtype dtype, double value);

int64_t tensor_count(const weft_tensor *t);
/* Offset in elements of the index-th element in row-major order of the shape. */
int64_t tensor_offset(const weft_tensor *t, int64_t index);
/* From the first element to one past the last, in elements: what memory must hold. Strides are not negative. */
int64_t tensor_span(const weft_tensor *t);
/* "3,1,17": where an element is, for a message. */
void tensor_coordinates(const weft_tensor *t, int64_t index, char *text, size_t size);

#endif
