/* SPDX-License-Identifier: Apache-2.0
 *
 * Activation and gates of Gated DeltaNet [G1] [G3], forward and backward, one element at a time: the mathematics that the
 * fast backends share. Written once over a type `real` as core/mhc_math.h is: a vector of channels, a CUDA thread's float.
 *
 * The includer defines, before each inclusion:
 *     real, scalar             the type, and the type of constants that mixes with it under + - * /
 *     GM(name), GM_FN          the names of these functions, and their qualifiers
 *     GM_MOST                  how many elements it takes at a time, and one of the two:
 *     GM_EXP_ALL(x, n)         exp of n elements, in place
 *     GM_EXP_OF_MINUS(u, e, n) e = exp(-u) of n elements; anything for a NaN
 *     GM_SET(x) GM_EXP(x) GM_LOG1P(x) GM_FMA(a, b, c) GM_GT(a, b, x, y), which is a > b ? x : y
 *     GM_RECIPROCAL(x)         1 / x for x from 1 to infinity, within an ulp
 *     GM_QUOTIENT(u, x, r)     u / x, r being GM_RECIPROCAL(x)
 *     GM_COMPLEMENT(s, e)      1 - s as e s, any number where s is 0; optional, for silu_slopes
 * GM_LOG1P takes 0 to 1 and keeps the relative precision of small arguments. */

/* e = exp(-u) and d = 1 + e of n elements, n a constant; sigmoid(u) is 1 / d. Far below zero both are infinite; nothing here is
 * NaN for a finite u, and for a NaN they are anything: what is made of them is multiplied by u. Step by step, because each
 * step waits for the one before it and n of them need not. */
GM_FN void GM(divisors)(const real *u, real *d, real *e, const int n)
{
#ifdef GM_EXP_OF_MINUS
    GM_EXP_OF_MINUS(u, e, n);
#else
    for (int i = 0; i < n; i++) e[i] = -u[i];
    GM_EXP_ALL(e, n);
#endif
    for (int i = 0; i < n; i++) d[i] = e[i] + (scalar)1;
}

/* s = sigmoid(u) and e = exp(-u) of one element; NaN stays NaN. */
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

/* u becomes silu(u), for n elements. */
GM_FN void GM(silus)(real *u, const int n)
{
    real d[GM_MOST], e[GM_MOST];
    GM(divisors)(u, d, e, n);
    for (int i = 0; i < n; i++) u[i] = GM_QUOTIENT(u[i], d[i], GM_RECIPROCAL(d[i]));
}

/* u becomes silu(u), slope its derivative, s (1 + u (1 - s)) = s + y (1 - s). */
GM_FN void GM(silu_slopes)(real *u, real *slope, const int n)
{
    real d[GM_MOST], s[GM_MOST], e[GM_MOST];
    GM(divisors)(u, d, e, n);
    for (int i = 0; i < n; i++) s[i] = GM_RECIPROCAL(d[i]);
#ifdef GM_COMPLEMENT
    for (int i = 0; i < n; i++) e[i] = GM_COMPLEMENT(s[i], e[i]);
#else
    for (int i = 0; i < n; i++) e[i] = GM(complement)(s[i], e[i]);
#endif
    for (int i = 0; i < n; i++) u[i] = GM_QUOTIENT(u[i], d[i], s[i]);
    for (int i = 0; i < n; i++) slope[i] = GM_FMA(u[i], e[i], s[i]);
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

/* d times the decay of a token, exp(A) softplus(x), and d times its derivative by x, exp(A) sigmoid(x). `half` is exp(A/2):
 * applied twice, and d first, a product that is a number does not pass through infinity. Far below zero both functions are
 * exp(x) to within rounding, and the product is the square of exp(A/2) exp(x/2), which does not pass through zero either. */
GM_FN real GM(decay_below)(real x, real half, real d)
{
    real p = GM_EXP(x * (scalar)0.5) * half;
    return p * d * p;
}

GM_FN real GM(decay)(real x, real half, real d)
{
    real zero = GM_SET(0), size = GM_GT(x, zero, x, -x);
    real soft = GM_GT(x, zero, x, zero) + GM_LOG1P(GM_EXP(-size));
    return GM_GT(GM_SET(-17), x, GM(decay_below)(x, half, d), soft * d * half * half);
}

GM_FN real GM(decay_slope)(real x, real half, real d)
{
    real e, s = GM(sigmoid)(x, &e);
    return GM_GT(GM_SET(-17), x, GM(decay_below)(x, half, d), s * d * half * half);
}
