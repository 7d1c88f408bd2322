/* SPDX-License-Identifier: Apache-2.0
 *
 * Single elements of any dtype as double, and tensors as arrays of double. */
#ifndef WEFT_CHECK_ELEMENT_H
#define WEFT_CHECK_ELEMENT_H

#include <weft/weft.h>

/* One element, anywhere. Storing rounds once, to nearest even. */
double value_load(const void *p, weft_dtype dtype);
void value_store(void *p, weft_dtype dtype, double value);
/* One of many. */
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
/* Row-major without gaps: most tensors, and then a walk is a loop. */
int tensor_is_dense(const weft_tensor *t);
/* From the first element to one past the last, in elements: what memory must hold. Strides are not negative. */
int64_t tensor_span(const weft_tensor *t);
/* Walks a tensor in logical order without dividing. */
typedef struct cursor {
    const weft_tensor *t;
    int dense;
    int64_t size, at[WEFT_MAX_DIMS], offset; /* offset: of the element, in elements */
} cursor;
cursor cursor_open(const weft_tensor *t);
void cursor_step(cursor *c);
char *cursor_data(const cursor *c, void *data);
/* "3,1,17": where an element is, for a message. */
void tensor_coordinates(const weft_tensor *t, int64_t index, char *text, size_t size);

#endif
