/* SPDX-License-Identifier: Apache-2.0
 *
 * 16-bit floats by hand: exact widening, round-to-nearest-even narrowing, NaN stays NaN, denormals kept. */
#ifndef WEFT_CORE_HALF_H
#define WEFT_CORE_HALF_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float weft_bf16_to_f32(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint16_t weft_f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float weft_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = (h >> 10) & 0x1fu, man = h & 0x3ffu, u;
    float f;
    if (exp == 0) { /* zero or denormal: man * 2^-24 is exact */
        f = (float)man * 0x1p-24f;
        memcpy(&u, &f, sizeof u);
        u |= sign;
    } else if (exp == 31) {
        u = sign | 0x7f800000u | (man << 13);
    } else {
        u = sign | ((exp + 112u) << 23) | (man << 13);
    }
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint16_t weft_f32_to_f16(float f)
{
    uint32_t u, sign, a;
    memcpy(&u, &f, sizeof u);
    sign = (u >> 16) & 0x8000u;
    a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 65536 or beyond */
    if (a < 0x38800000u) {                                   /* below 2^-14: a multiple of 2^-24 */
        float m;
        memcpy(&m, &a, sizeof m);
        /* Adding 0.5 puts the rounding point at 2^-24; the sum's low bits are the result. */
        m += 0.5f;
        memcpy(&a, &m, sizeof a);
        return (uint16_t)(sign | (a - 0x3f000000u));
    }
    a += 0xfffu + ((a >> 13) & 1u);
    return (uint16_t)(sign | ((a - 0x38000000u) >> 13));
}

/* Narrowing a double through float would round twice: a value just beside a 16-bit tie can land on the tie. Rounding to
 * odd in the first step keeps that information, so the second step is a correct single rounding. */
static inline float weft_f64_to_f32_odd(double d)
{
    float f = (float)d;
    uint32_t u;
    if (isnan(d) || (double)f == d) return f;
    if (isinf(f)) return d > 0 ? 0x1.fffffep127f : -0x1.fffffep127f; /* an odd mantissa */
    memcpy(&u, &f, sizeof u);
    return u & 1u ? f : nextafterf(f, (double)f < d ? INFINITY : -INFINITY);
}

#endif
