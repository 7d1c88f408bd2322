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

#define real vf
#define scalar float
#define GM(name) gm_##name
#define GM_FN INLINE
#define GM_SET(x) vf_set1((float)(x))
#define GM_EXP vf_exp
#define GM_EXP_ALL vf_exp_all
#define GM_MOST EXP_MOST
#define GM_LOG1P vf_log1p
#define GM_FMA(a, b, c) vf_fma(a, b, c)
#define GM_RECIPROCAL(x) ((scalar)1 / (x))
#define GM_GT(a, b, x, y) vf_gt(a, b, x, y)
#include "core/gdn_math.h"
#undef real
#undef scalar

#endif
