/* SPDX-License-Identifier: Apache-2.0
 *
 * Activation and gates of Gated DeltaNet [G1] [G3], forward and backward, one element at a time: the mathematics that the
 * fast backends share. Written once over a type `real` as core/mhc_math.h is: a vector of channels, a CUDA thread's float.
 *
 * The includer defines, before each inclusion:
 *     real, scalar             the type, and the type of constants that mixes with it under + - * /
 *     GM(name), GM_FN          the names of these functions, and their qualifiers
 *     GM_SET(x) GM_EXP(x) GM_LOG1P(x) GM_FMA(a, b, c) GM_GT(a, b, x, y), which is a > b ? x : y
 * GM_LOG1P takes 0 to 1 and keeps the relative precision of small arguments. */

/* s = sigmoid(u). Far below zero exp(-u) is infinite and s is 0; nothing here is NaN for a finite u. */
GM_FN real GM(sigmoid)(real u, real *e)
{
    *e = GM_EXP(-u);
    return (scalar)1 / (*e + (scalar)1);
}

/* 1 - s without cancellation, from e = exp(-u). */
GM_FN real GM(complement)(real s, real e)
{
    return GM_GT(e, GM_SET(1e30f), GM_SET(1), e * s);
}

GM_FN real GM(silu)(real u)
{
    real e, s = GM(sigmoid)(u, &e);
    return u * s;
}

/* y = silu(u); returns its derivative, s (1 + u (1 - s)) = s + y (1 - s). */
GM_FN real GM(silu_slope)(real u, real *y)
{
    real e, s = GM(sigmoid)(u, &e);
    *y = u * s;
    return GM_FMA(*y, GM(complement)(s, e), s);
}

/* scale * sigmoid(b), and scale * sigmoid(b) * (1 - sigmoid(b)). */
GM_FN real GM(beta)(real b, scalar scale)
{
    real e, s = GM(sigmoid)(b, &e);
    return s * scale;
}

GM_FN real GM(beta_slope)(real b, scalar scale)
{
    real e, s = GM(sigmoid)(b, &e);
    return s * GM(complement)(s, e) * scale;
}

/* The decay of a token: exp(A) softplus(x), and its derivative by x, exp(A) sigmoid(x). `half` is exp(A/2): applied
 * twice, a product that is a number does not pass through infinity. Far below zero both functions are exp(x) to within
 * rounding, and the product is the square of exp(A/2) exp(x/2), which does not pass through zero either. */
GM_FN real GM(decay_below)(real x, real half)
{
    real p = GM_EXP(x * (scalar)0.5) * half;
    return p * p;
}

GM_FN real GM(decay)(real x, real half)
{
    real zero = GM_SET(0), size = GM_GT(x, zero, x, -x);
    real soft = GM_GT(x, zero, x, zero) + GM_LOG1P(GM_EXP(-size));
    return GM_GT(GM_SET(-17), x, GM(decay_below)(x, half), soft * half * half);
}

GM_FN real GM(decay_slope)(real x, real half)
{
    real e, s = GM(sigmoid)(x, &e);
    return GM_GT(GM_SET(-17), x, GM(decay_below)(x, half), s * half * half);
}
