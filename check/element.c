/* SPDX-License-Identifier: Apache-2.0 */
#include "check/element.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Significant bits including the implicit one, and the exponent of the smallest normal number. */
typedef struct format {
    int bits, min_exponent, max_exponent;
} format;

static format format_of(weft_dtype dtype)
{
    switch (dtype) {
    case WEFT_BF16: return (format){8, -126, 127};
    case WEFT_F16: return (format){11, -14, 15};
    case WEFT_F32: return (format){24, -126, 127};
    default: return (format){53, -1022, 1023};
    }
}

double element_unit(weft_dtype dtype)
{
    return ldexp(1, -format_of(dtype).bits);
}

double element_tiny(weft_dtype dtype)
{
    format f = format_of(dtype);
    return ldexp(1, f.min_exponent - f.bits + 1);
}

double element_ulp(weft_dtype dtype, double value)
{
    format f = format_of(dtype);
    int exponent = value == 0 || !isfinite(value) ? f.min_exponent : ilogb(value);
    if (exponent < f.min_exponent) exponent = f.min_exponent;
    return ldexp(1, exponent - f.bits + 1);
}

double element_round(weft_dtype dtype, double value)
{
    if (dtype == WEFT_F64 || dtype == WEFT_I32 || dtype == WEFT_I64 || value == 0 || !isfinite(value)) return value;
    format f = format_of(dtype);
    double quantum = element_ulp(dtype, value);
    double rounded = nearbyint(value / quantum) * quantum;
    return fabs(rounded) >= ldexp(1, f.max_exponent + 1) ? copysign(INFINITY, value) : rounded;
}

static double load_f16(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent == 31 ? (fraction ? NAN : INFINITY)
                   : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                  : ldexp(fraction, -24);
    return bits & 0x8000 ? -value : value;
}

/* value is one that float16 has. */
static uint16_t store_f16(double value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    if (isnan(value)) return 0x7e00;
    if (isinf(value)) return sign | 0x7c00;
    if (size < ldexp(1, -14)) return sign | (uint16_t)ldexp(size, 24);
    int exponent = ilogb(size);
    return sign | (uint16_t)((exponent + 15) << 10) | (uint16_t)(ldexp(size, 10 - exponent) - 1024);
}

double element_load(const void *data, weft_dtype dtype, int64_t index)
{
    switch (dtype) {
    case WEFT_F32: return ((const float *)data)[index];
    case WEFT_F64: return ((const double *)data)[index];
    case WEFT_F16: return load_f16(((const uint16_t *)data)[index]);
    case WEFT_I32: return ((const int32_t *)data)[index];
    case WEFT_I64: return (double)((const int64_t *)data)[index];
    case WEFT_BF16: {
        uint32_t bits = (uint32_t)((const uint16_t *)data)[index] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    default: return NAN;
    }
}

void element_store(void *data, weft_dtype dtype, int64_t index, double value)
{
    double rounded = element_round(dtype, value);
    switch (dtype) {
    case WEFT_F32: ((float *)data)[index] = (float)rounded; break;
    case WEFT_F64: ((double *)data)[index] = rounded; break;
    case WEFT_F16: ((uint16_t *)data)[index] = store_f16(rounded); break;
    case WEFT_I32: ((int32_t *)data)[index] = (int32_t)value; break;
    case WEFT_I64: ((int64_t *)data)[index] = (int64_t)value; break;
    case WEFT_BF16: {
        float single = (float)rounded;
        uint32_t bits;
        memcpy(&bits, &single, sizeof bits);
        ((uint16_t *)data)[index] = (uint16_t)(bits >> 16);
        break;
    }
    default: break;
    }
}

int64_t tensor_count(const weft_tensor *t)
{
    int64_t count = 1;
    for (int i = 0; i < t->ndim; i++) count *= t->shape[i];
    return count;
}

int64_t tensor_offset(const weft_tensor *t, int64_t index)
{
    int64_t offset = 0;
    for (int i = t->ndim - 1; i >= 0; i--) {
        offset += index % t->shape[i] * t->stride[i];
        index /= t->shape[i];
    }
    return offset;
}

int64_t tensor_span(const weft_tensor *t)
{
    int64_t last = 0;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0) return 0;
        last += (t->shape[i] - 1) * t->stride[i];
    }
    return last + 1;
}

void tensor_coordinates(const weft_tensor *t, int64_t index, char *text, size_t size)
{
    int64_t at[WEFT_MAX_DIMS] = {0};
    size_t used = 0;
    for (int i = t->ndim - 1; i >= 0; i--) {
        at[i] = index % t->shape[i];
        index /= t->shape[i];
    }
    text[0] = 0;
    for (int i = 0; i < t->ndim && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? "," : "", (long long)at[i]);
}
