/* SPDX-License-Identifier: Apache-2.0
 *
 * core/gdn_math.h with a thread's float. */
#ifndef WEFT_CUDA_GDN_MATH_CUH
#define WEFT_CUDA_GDN_MATH_CUH

#include <cuda_runtime.h>

/* Within an ulp, and 0 of what is so large that the result would be denormal: one instruction, where a division has ten. */
static __device__ __forceinline__ float reciprocal(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* 1 / sqrt(x) within an ulp, by a step of Newton's method; 0 of infinity. */
static __device__ __forceinline__ float reciprocal_root(float x)
{
    const float r = rsqrtf(x), correction = fmaf(-x * r, r, 1.0f);
    return x < 3e38f ? fmaf(0.5f * r, correction, r) : r;
}

/* exp(-u): as 2^-(u log2 e), whose exponent is u times a constant in two parts, rounded once. That is one rounding of u, of which
 * the convolution leaves one (docs/reference/math.md). Infinite from 2^128 on. */
static __device__ __forceinline__ float exp_of_minus(float u)
{
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(fmaf(u, -1.44269502f, u * -1.92596299e-8f)));
    return e;
}

#define real float
#define scalar float
#define GM(name) gm_##name
#define GM_FN static __device__ __forceinline__
#define GM_MOST 1
#define GM_EXP_OF_MINUS(u, e, n) (*(e) = exp_of_minus(*(u)))
#define GM_COMPLEMENT(s, e) __saturatef((e) * (s)) /* 0 where it is not a number: there s is 0 */
#define GM_SET(x) ((float)(x))
#define GM_EXP(x) expf(x)
#define GM_LOG1P(x) log1pf(x)
#define GM_RECIPROCAL(x) reciprocal(x)
#define GM_QUOTIENT(u, x, r) ((u) * (r))
#define GM_FMA(a, b, c) fmaf(a, b, c)
#define GM_GT(a, b, x, y) ((a) > (b) ? (x) : (y))
#include "core/gdn_math.h"
#undef real
#undef scalar

static __device__ __forceinline__ float silu(float u)
{
    gm_silus(&u, 1);
    return u;
}

/* y = silu(u); returns its derivative. */
static __device__ __forceinline__ float silu_slope(float u, float *y)
{
    float slope;
    *y = u;
    gm_silu_slopes(y, &slope, 1);
    return slope;
}

/* The derivative alone, with an exponential of two ulp: for a u that has been rounded, whose error has no room for a rounding more. */
static __device__ __forceinline__ float silu_slope_of_rounded(float u)
{
    float e, s = gm_sigmoid(u, &e);
    return fmaf(u * s, gm_complement(s, e), s);
}

#endif
