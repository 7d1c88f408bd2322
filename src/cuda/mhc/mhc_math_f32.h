/* SPDX-License-Identifier: Apache-2.0
 *
 * Definitions that core/mhc_math.h needs where a real is one float, in C and in CUDA C: kernels and their plan must agree
 * about it. The includer defines MM and MM_FN and includes core/mhc_math.h itself. */
#ifndef WEFT_CUDA_MHC_MATH_F32_H
#define WEFT_CUDA_MHC_MATH_F32_H

#include <math.h>

#define real float
#define scalar float
#define MM_SET(x) ((float)(x))
#define MM_EXP(x) expf(x)
#define MM_LOG(x) logf(x)
#define MM_SQRT(x) sqrtf(x)
#define MM_MAX(a, b) fmaxf(a, b)
#define MM_FMA(a, b, c) fmaf(a, b, c)
#define MM_GT(a, b, x, y) ((a) > (b) ? (x) : (y))
#define MM_EQ(a, b, x, y) ((a) == (b) ? (x) : (y))
#define MM_SHARED_DIVISION 0 /* a reciprocal is three instructions: four in parallel hide their latency */
#define MM_WALK_BACK 1       /* shared memory holds divisors, not matrices */

#endif
