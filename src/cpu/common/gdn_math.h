/* SPDX-License-Identifier: Apache-2.0
 *
 * core/gdn_math.h with neighbouring channels or heads in the lanes. */
#ifndef WEFT_CPU_GDN_MATH_H
#define WEFT_CPU_GDN_MATH_H

#include "cpu/common/math.h"

/* log(1 + x) for x from 0 to 1: the rounding of 1 + x is taken back by the factor x / ((1 + x) - 1). */
INLINE vf vf_log1p(vf x)
{
    vf w = x + 1.0f, f = w - 1.0f;
    return vf_eq(f, vf_set1(0), x, vf_log(w) * (x / f));
}

/* 2^(j/16) for the last four bits j of every lane. */
INLINE vf sixteenth_powers(vi bits)
{
    static const float power[16] = {1.0f,        1.04427378f, 1.09050773f, 1.13878863f, 1.18920712f, 1.24185781f,
                                    1.29683955f, 1.35425555f, 1.41421356f, 1.47682615f, 1.54221083f, 1.61049033f,
                                    1.68179283f, 1.75625216f, 1.83400809f, 1.91520656f};
#if WEFT_CPU_LEVEL == 2
    return _mm512_permutexvar_ps((__m512i)bits, vf_load(power));
#elif WEFT_CPU_LEVEL == 1
    vf low = _mm256_permutevar8x32_ps(vf_load(power), (__m256i)bits);
    vf high = _mm256_permutevar8x32_ps(vf_load(power + 8), (__m256i)bits);
    return _mm256_blendv_ps(low, high, (vf)(bits << 28));
#else
    vf v;
    for (int l = 0; l < LANES; l++) v[l] = power[bits[l] & 15];
    return v;
#endif
}

/* e = exp(-u) of n vectors, anything for a NaN. With the powers of 2^(1/16) at hand three terms of the series are enough (about
 * 1 ulp). Step by step as vf_exp_all. */
INLINE void exp_of_minus(const vf *u, vf *e, const int n)
{
    const vf magic = vf_set1(786432.0f); /* 1.5 * 2^19: adding it rounds to sixteenths, its last bits then */
    const vf limit = vf_set1(104.0f);    /* 0 and infinity lie in front of it */
    vf t[EXP_MOST], shifted[EXP_MOST], k[EXP_MOST], power[EXP_MOST];
#if WEFT_CPU_LEVEL == 2
    enum { SMALLER_WITH_SIGN = 2 };
    for (int i = 0; i < n; i++) t[i] = _mm512_range_ps(u[i], limit, SMALLER_WITH_SIGN);
#else
    for (int i = 0; i < n; i++) t[i] = vf_min(limit, vf_max(-limit, u[i]));
#endif
    for (int i = 0; i < n; i++) shifted[i] = vf_fma(t[i], vf_set1(-1.44269504f), magic);
    for (int i = 0; i < n; i++) power[i] = sixteenth_powers((vi)shifted[i]);
    for (int i = 0; i < n; i++) k[i] = shifted[i] - magic;
#if WEFT_CPU_LEVEL > 0
    /* the product is exact in here, and the float next to ln 2 is so near that 0.05 roundings of u are all it costs */
    for (int i = 0; i < n; i++) t[i] = vf_fma(k[i], vf_set1(0.693147182f), t[i]);
#else
    for (int i = 0; i < n; i++) t[i] = k[i] * 0.693359375f + t[i]; /* ln 2 in two parts */
    for (int i = 0; i < n; i++) t[i] = k[i] * -2.12194440e-4f + t[i];
#endif
    for (int i = 0; i < n; i++) e[i] = vf_fma(t[i], vf_set1(-0.16666667f), vf_set1(0.5f));
    for (int i = 0; i < n; i++) e[i] = vf_fma(e[i] * t[i], t[i], -t[i]);
    for (int i = 0; i < n; i++) e[i] = vf_fma(power[i], e[i], power[i]);
#if WEFT_CPU_LEVEL == 2
    for (int i = 0; i < n; i++) e[i] = _mm512_scalef_ps(e[i], k[i]); /* floors k */
#else
    for (int i = 0; i < n; i++) {
        vi j = ((vi)shifted[i] - (vi)magic) >> 4, j1 = j >> 1, j2 = j - j1;
        e[i] = e[i] * (vf)((j1 + 127) << 23) * (vf)((j2 + 127) << 23);
    }
#endif
}

#define real vf
#define scalar float
#define GM(name) gm_##name
#define GM_FN INLINE
#define GM_SET(x) vf_set1((float)(x))
#define GM_EXP vf_exp
#define GM_EXP_OF_MINUS exp_of_minus
#define GM_MOST EXP_MOST
#define GM_LOG1P vf_log1p
#define GM_FMA(a, b, c) vf_fma(a, b, c)
#define GM_RECIPROCAL(x) ((scalar)1 / (x))
#define GM_QUOTIENT(u, x, r) ((u) / (x))
#define GM_GT(a, b, x, y) vf_gt(a, b, x, y)
#include "core/gdn_math.h"
#undef real
#undef scalar

#endif
