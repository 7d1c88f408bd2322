/* SPDX-License-Identifier: Apache-2.0 */
#include "check/element.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Significant bits including the implicit one, the smallest normal number and the largest number's successor. */
typedef struct format {
    int bits, min_exponent;
    double normal, limit;
} format;

static format format_of(weft_dtype dtype)
{
    switch (dtype) {
    case WEFT_BF16: return (format){8, -126, 0x1p-126, 0x1p128};
    case WEFT_F16: return (format){11, -14, 0x1p-14, 0x1p16};
    case WEFT_F32: return (format){24, -126, 0x1p-126, 0x1p128};
    default: return (format){53, -1022, 0x1p-1022, INFINITY};
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

/* To so many bits, ties to even; not for denormals of the format. */
static double round_bits(double value, int bits)
{
    const int drop = 53 - bits;
    uint64_t b;
    memcpy(&b, &value, sizeof b);
    b += (((uint64_t)1 << (drop - 1)) - 1) + (b >> drop & 1);
    b &= ~(((uint64_t)1 << drop) - 1);
    memcpy(&value, &b, sizeof b);
    return value;
}

double element_round(weft_dtype dtype, double value)
{
    if (dtype == WEFT_F64 || dtype == WEFT_I32 || dtype == WEFT_I64 || value == 0 || !isfinite(value)) return value;
    if (dtype == WEFT_F32) return (double)(float)value;
    format f = format_of(dtype);
    double rounded;
    if (fabs(value) < f.normal) {
        double quantum = element_tiny(dtype);
        rounded = nearbyint(value / quantum) * quantum;
    } else {
        rounded = round_bits(value, f.bits);
    }
    return fabs(rounded) >= f.limit ? copysign(INFINITY, value) : rounded;
}

static double load_f16(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value;
    if (exponent == 0) {
        value = fraction * 0x1p-24;
    } else if (exponent == 31) {
        value = fraction ? NAN : INFINITY;
    } else {
        uint64_t b = (uint64_t)(exponent + 1008) << 52 | (uint64_t)fraction << 42;
        memcpy(&value, &b, sizeof b);
    }
    return bits & 0x8000 ? -value : value;
}

/* value is one that float16 has. */
static uint16_t store_f16(double value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    uint64_t b;
    if (isnan(value)) return 0x7e00;
    if (isinf(value)) return sign | 0x7c00;
    if (size < 0x1p-14) return sign | (uint16_t)(size * 0x1p24);
    memcpy(&b, &size, sizeof b);
    return sign | (uint16_t)((b >> 42) - ((uint64_t)1008 << 10));
}

double value_load(const void *p, weft_dtype dtype)
{
    union {
        double d;
        float f;
        uint32_t w;
        uint16_t h;
        int32_t i;
        int64_t l;
    } v;
    switch (dtype) {
    case WEFT_F64: memcpy(&v.d, p, 8); return v.d;
    case WEFT_F32: memcpy(&v.f, p, 4); return (double)v.f;
    case WEFT_I32: memcpy(&v.i, p, 4); return (double)v.i;
    case WEFT_I64: memcpy(&v.l, p, 8); return (double)v.l;
    case WEFT_F16: memcpy(&v.h, p, 2); return load_f16(v.h);
    case WEFT_BF16:
        memcpy(&v.h, p, 2);
        v.w = (uint32_t)v.h << 16;
        return (double)v.f;
    default: return NAN;
    }
}

void value_store(void *p, weft_dtype dtype, double value)
{
    double rounded = element_round(dtype, value);
    float single = (float)rounded;
    int32_t i = dtype == WEFT_I32 ? (int32_t)value : 0;
    int64_t l = dtype == WEFT_I64 ? (int64_t)value : 0;
    uint32_t w;
    uint16_t h;
    memcpy(&w, &single, sizeof w);
    switch (dtype) {
    case WEFT_F64: memcpy(p, &value, 8); return;
    case WEFT_F32: memcpy(p, &single, 4); return;
    case WEFT_I32: memcpy(p, &i, 4); return;
    case WEFT_I64: memcpy(p, &l, 8); return;
    case WEFT_F16: h = store_f16(rounded); break;
    case WEFT_BF16: h = (uint16_t)(w >> 16); break;
    default: return;
    }
    memcpy(p, &h, 2);
}

double element_load(const void *data, weft_dtype dtype, int64_t index)
{
    return value_load((const char *)data + index * (int64_t)weft_dtype_size(dtype), dtype);
}

void element_store(void *data, weft_dtype dtype, int64_t index, double value)
{
    value_store((char *)data + index * (int64_t)weft_dtype_size(dtype), dtype, value);
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

int tensor_is_dense(const weft_tensor *t)
{
    int64_t step = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (t->stride[d] != step) return 0;
        step *= t->shape[d];
    }
    return 1;
}

cursor cursor_open(const weft_tensor *t)
{
    return (cursor){.t = t, .dense = tensor_is_dense(t), .size = (int64_t)weft_dtype_size(t->dtype)};
}

void cursor_step(cursor *c)
{
    if (c->dense) {
        c->offset++;
        return;
    }
    for (int d = c->t->ndim - 1; d >= 0; d--) {
        c->offset += c->t->stride[d];
        if (++c->at[d] < c->t->shape[d]) return;
        c->offset -= c->t->stride[d] * c->t->shape[d];
        c->at[d] = 0;
    }
}

char *cursor_data(const cursor *c, void *data)
{
    return (char *)data + c->offset * c->size;
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
