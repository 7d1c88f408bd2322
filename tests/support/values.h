/* SPDX-License-Identifier: Apache-2.0
 *
 * Single elements of any dtype, seen as double. Storing rounds once, to nearest even. */
#ifndef WEFT_TESTS_VALUES_H
#define WEFT_TESTS_VALUES_H

#include <weft/weft.h>

#include "core/half.h"

static inline double value_load(const void *p, weft_dtype dtype)
{
    union {
        double d;
        float f;
        uint16_t h;
        int32_t i;
        int64_t l;
    } v;
    switch (dtype) {
    case WEFT_F64: memcpy(&v.d, p, 8); return v.d;
    case WEFT_F32: memcpy(&v.f, p, 4); return (double)v.f;
    case WEFT_I32: memcpy(&v.i, p, 4); return (double)v.i;
    case WEFT_I64: memcpy(&v.l, p, 8); return (double)v.l;
    case WEFT_BF16: memcpy(&v.h, p, 2); return (double)weft_bf16_to_f32(v.h);
    default: memcpy(&v.h, p, 2); return (double)weft_f16_to_f32(v.h);
    }
}

static inline void value_store(void *p, weft_dtype dtype, double x)
{
    float f = (float)x;
    int32_t i = (int32_t)(dtype == WEFT_I32 ? x : 0);
    int64_t l = (int64_t)(dtype == WEFT_I64 ? x : 0);
    uint16_t h;
    switch (dtype) {
    case WEFT_F64: memcpy(p, &x, 8); return;
    case WEFT_F32: memcpy(p, &f, 4); return;
    case WEFT_I32: memcpy(p, &i, 4); return;
    case WEFT_I64: memcpy(p, &l, 8); return;
    case WEFT_BF16: h = weft_f32_to_bf16(weft_f64_to_f32_odd(x)); break;
    default: h = weft_f32_to_f16(weft_f64_to_f32_odd(x)); break;
    }
    memcpy(p, &h, 2);
}

/* The larger one of an error and the worst before it. What is no number stays the worst: fmax would forget it. */
static inline double value_worst(double worst, double error)
{
    return isnan(worst) || error <= worst ? worst : error;
}

/* Unit roundoff of a dtype: half the distance from 1 to the next number. */
static inline double value_unit(weft_dtype dtype)
{
    return dtype == WEFT_F64 ? 0x1p-53 : dtype == WEFT_F32 ? 0x1p-24 : dtype == WEFT_BF16 ? 0x1p-8 : 0x1p-11;
}

/* Half the smallest denormal: what rounding costs near zero. */
static inline double value_tiny(weft_dtype dtype)
{
    return dtype == WEFT_F64 ? 0 : dtype == WEFT_F32 ? 0x1p-150 : dtype == WEFT_BF16 ? 0x1p-134 : 0x1p-25;
}

/* From here on a finite number rounds to infinity. */
static inline double value_limit(weft_dtype dtype)
{
    return dtype == WEFT_F64    ? INFINITY
           : dtype == WEFT_F32  ? 0x1.ffffffp127
           : dtype == WEFT_BF16 ? 0x1.ffp127
                                : 65520.0;
}

#endif
