/* SPDX-License-Identifier: Apache-2.0
 *
 * core/mhc_math.h with one token per lane: exp and log of a vector (about 1 ulp), then the inclusion. The coefficients are
 * Chebyshev fits of (exp(r) - 1 - r)/r^2 and (log(1+f) - f + f^2/2)/f^3. */
#ifndef WEFT_CPU_MATH_H
#define WEFT_CPU_MATH_H

#include "cpu/common/vec.h"

enum { EXP_MOST = 8 }; /* vectors that take the exponential together */

/* exp of n vectors, step by step: n chains in the order in which a machine can run them side by side. */
INLINE void vf_exp_all(vf *x, const int n)
{
    const vf magic = vf_set1(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted[EXP_MOST], k[EXP_MOST], p[EXP_MOST];
    for (int i = 0; i < n; i++) x[i] = vf_min(vf_set1(89.0f), vf_max(vf_set1(-104.0f), x[i])); /* NaN passes both */
    for (int i = 0; i < n; i++) shifted[i] = vf_fma(x[i], vf_set1(1.44269504f), magic);
    for (int i = 0; i < n; i++) k[i] = shifted[i] - magic;
    for (int i = 0; i < n; i++)
        x[i] = vf_fma(k[i], vf_set1(-0.693359375f),
                      x[i]); /* ln 2 in two parts, the first with few bits: exact products */
    for (int i = 0; i < n; i++) x[i] = vf_fma(k[i], vf_set1(2.12194440e-4f), x[i]);
    for (int i = 0; i < n; i++) p[i] = vf_fma(vf_set1(0.001392617612f), x[i], vf_set1(0.008363173075f));
    for (int i = 0; i < n; i++) p[i] = vf_fma(p[i], x[i], vf_set1(0.04166655466f));
    for (int i = 0; i < n; i++) p[i] = vf_fma(p[i], x[i], vf_set1(0.1666657703f));
    for (int i = 0; i < n; i++) p[i] = vf_fma(p[i], x[i], vf_set1(0.5f));
    for (int i = 0; i < n; i++) p[i] = vf_fma(p[i] * x[i], x[i], x[i]);
    for (int i = 0; i < n; i++) p[i] = p[i] + 1.0f;
#if WEFT_CPU_LEVEL == 2
    /* the same bits as below: one rounding, and only where the result is denormal */
    for (int i = 0; i < n; i++) x[i] = _mm512_scalef_ps(p[i], k[i]);
#else
    /* 2^k in two factors, so that k may reach past the exponent range on both sides. */
    for (int i = 0; i < n; i++) {
        vi j = (vi)shifted[i] - (vi)magic, j1 = j >> 1, j2 = j - j1;
        x[i] = p[i] * (vf)((j1 + 127) << 23) * (vf)((j2 + 127) << 23);
    }
#endif
}

INLINE vf vf_exp(vf x)
{
    vf_exp_all(&x, 1);
    return x;
}

/* Natural log of positive normal numbers; NaN stays, 0 gives -inf. */
INLINE vf vf_log(vf x)
{
    vi u = (vi)x, e = (u - 0x3f3504f3) >> 23; /* mantissa in [sqrt(1/2), sqrt(2)) */
    vf m = (vf)(u - (e << 23));
    vf f = m - 1.0f, ef = __builtin_convertvector(e, vf);
    vf p = vf_set1(0.06971611471f);
    p = vf_fma(p, f, vf_set1(-0.1147973385f));
    p = vf_fma(p, f, vf_set1(0.1168541992f));
    p = vf_fma(p, f, vf_set1(-0.1242568733f));
    p = vf_fma(p, f, vf_set1(0.1424905765f));
    p = vf_fma(p, f, vf_set1(-0.1666780232f));
    p = vf_fma(p, f, vf_set1(0.2000071575f));
    p = vf_fma(p, f, vf_set1(-0.2499999696f));
    p = vf_fma(p, f, vf_set1(0.3333333118f));
    p = vf_fma(p * f, f * f, f * f * -0.5f);
    vf y = vf_fma(ef, vf_set1(-2.12194440e-4f), p) + f;
    y = vf_fma(ef, vf_set1(0.693359375f), y);
    y = vf_select(x > 0.0f, y, vf_select(x == 0.0f, vf_set1(-INFINITY), vf_set1(NAN)));
    return vf_select(x == vf_set1(INFINITY), x, y);
}

#define real vf
#define scalar float
#define MM(name) mm_##name
#define MM_FN INLINE
#define MM_SET(x) vf_set1((float)(x))
#define MM_EXP vf_exp
#define MM_LOG vf_log
#define MM_SQRT vf_sqrt
#define MM_MAX vf_max
#define MM_FMA(a, b, c) vf_fma(a, b, c)
#define MM_GT(a, b, x, y) vf_gt(a, b, x, y)
#define MM_EQ(a, b, x, y) vf_eq(a, b, x, y)
#include "core/mhc_math.h"
#undef real
#undef scalar

#endif
