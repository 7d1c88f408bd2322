/* SPDX-License-Identifier: Apache-2.0
 *
 * How the reference reads and writes tensors: every element is widened exactly to double, every result is rounded once,
 * when it is stored. Nothing here or in the rest of src/ref is written for speed. */
#ifndef WEFT_REF_COMMON_H
#define WEFT_REF_COMMON_H

#include <math.h>
#include <string.h>

#include "core/half.h"
#include "core/kernel.h"

#define REF_MAX_GATES (2 * WEFT_MAX_STREAMS + WEFT_MAX_STREAMS * WEFT_MAX_STREAMS)

/* ---- one element, by its offset --------------------------------------------------------------------------------- */

static inline double load_at(const weft_tensor *t, int64_t offset)
{
    switch (t->dtype) {
    case WEFT_F64: return ((const double *)t->data)[offset];
    case WEFT_F32: return ((const float *)t->data)[offset];
    case WEFT_BF16: return weft_bf16_to_f32(((const uint16_t *)t->data)[offset]);
    case WEFT_F16: return weft_f16_to_f32(((const uint16_t *)t->data)[offset]);
    default: break; /* absent, or an index */
    }
    return 0.0;
}

static inline void store_at(const weft_tensor *t, int64_t offset, double value)
{
    switch (t->dtype) {
    case WEFT_F64: ((double *)t->data)[offset] = value; break;
    case WEFT_F32: ((float *)t->data)[offset] = (float)value; break;
    case WEFT_BF16: ((uint16_t *)t->data)[offset] = weft_f32_to_bf16(weft_f64_to_f32_odd(value)); break;
    case WEFT_F16: ((uint16_t *)t->data)[offset] = weft_f32_to_f16(weft_f64_to_f32_odd(value)); break;
    default: break; /* absent, or an index */
    }
}

/* The old value plus the unrounded new one, rounded once. Adding zero leaves the memory as it is, even a -0: that is
 * what a call without tokens must do. */
static inline void grad_at(const weft_grad *g, int64_t offset, double value)
{
    if (g->add && value == 0.0) return;
    store_at(&g->to, offset, g->add ? load_at(&g->to, offset) + value : value);
}

/* The value that a reader finds after a store in that dtype. */
static inline double rounded(weft_dtype dtype, double value)
{
    switch (dtype) {
    case WEFT_F32: return (float)value;
    case WEFT_BF16: return weft_bf16_to_f32(weft_f32_to_bf16(weft_f64_to_f32_odd(value)));
    case WEFT_F16: return weft_f16_to_f32(weft_f32_to_f16(weft_f64_to_f32_odd(value)));
    default: return value;
    }
}

static inline void round_all(weft_dtype dtype, int64_t count, double *values)
{
    for (int64_t k = 0; k < count; k++) values[k] = rounded(dtype, values[k]);
}

/* The dtype of h, ms and of coefficients that are not stored. */
static inline weft_dtype full_type(const weft_call *call)
{
    return call->f64 ? WEFT_F64 : WEFT_F32;
}

/* ---- one element, by its index ---------------------------------------------------------------------------------- */

static inline int64_t offset2(const weft_tensor *t, int64_t i, int64_t j)
{
    return i * t->stride[0] + j * t->stride[1];
}

static inline int64_t offset3(const weft_tensor *t, int64_t i, int64_t j, int64_t k)
{
    return i * t->stride[0] + j * t->stride[1] + k * t->stride[2];
}

static inline double get2(const weft_tensor *t, int64_t i, int64_t j)
{
    return load_at(t, offset2(t, i, j));
}

static inline double get3(const weft_tensor *t, int64_t i, int64_t j, int64_t k)
{
    return load_at(t, offset3(t, i, j, k));
}

static inline void put2(const weft_tensor *t, int64_t i, int64_t j, double value)
{
    store_at(t, offset2(t, i, j), value);
}

static inline void put3(const weft_tensor *t, int64_t i, int64_t j, int64_t k, double value)
{
    store_at(t, offset3(t, i, j, k), value);
}

static inline void put_grad2(const weft_grad *g, int64_t i, int64_t j, double value)
{
    grad_at(g, offset2(&g->to, i, j), value);
}

static inline void put_grad3(const weft_grad *g, int64_t i, int64_t j, int64_t k, double value)
{
    grad_at(g, offset3(&g->to, i, j, k), value);
}

/* ---- all elements of a token, or of a parameter, in row-major order --------------------------------------------- */

/* Offset of the k-th element, counted over the dimensions from `first` on. */
static inline int64_t offset_of(const weft_tensor *t, int32_t first, int64_t k)
{
    int64_t offset = 0;
    for (int32_t d = t->ndim - 1; d > first; d--) {
        offset += k % t->shape[d] * t->stride[d];
        k /= t->shape[d];
    }
    return t->ndim > first ? offset + k * t->stride[first] : 0;
}

/* An absent input of a token is an upstream gradient that counts as zero. */
static inline void load_token(const weft_tensor *t, int64_t token, int64_t count, double *to)
{
    for (int64_t k = 0; k < count; k++)
        to[k] = weft_has(t) ? load_at(t, token * t->stride[0] + offset_of(t, 1, k)) : 0.0;
}

/* Absent outputs and gradients are not requested. */
static inline void store_token(const weft_tensor *t, int64_t token, int64_t count, const double *from)
{
    if (!weft_has(t)) return;
    for (int64_t k = 0; k < count; k++) store_at(t, token * t->stride[0] + offset_of(t, 1, k), from[k]);
}

static inline void grad_token(const weft_grad *g, int64_t token, int64_t count, const double *from)
{
    if (!weft_has(&g->to)) return;
    for (int64_t k = 0; k < count; k++) grad_at(g, token * g->to.stride[0] + offset_of(&g->to, 1, k), from[k]);
}

static inline void load_param(const weft_tensor *t, int64_t count, double absent, double *to)
{
    for (int64_t k = 0; k < count; k++) to[k] = weft_has(t) ? load_at(t, offset_of(t, 0, k)) : absent;
}

static inline void grad_param(const weft_grad *g, int64_t count, const double *from)
{
    if (!weft_has(&g->to)) return;
    for (int64_t k = 0; k < count; k++) grad_at(g, offset_of(&g->to, 0, k), from[k]);
}

/* ---- scratch ---------------------------------------------------------------------------------------------------- */

static inline double *take(weft_arena *arena, int64_t count)
{
    return weft_arena_take(arena, (size_t)count * sizeof(double));
}

static inline void clear(int64_t count, double *values)
{
    for (int64_t k = 0; k < count; k++) values[k] = 0.0;
}

#endif
