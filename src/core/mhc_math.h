/* SPDX-License-Identifier: Apache-2.0
 *
 * Gates and Sinkhorn of one token, forward and backward [M2] [M3] [M4]: the small mathematics that every backend
 * shares. It is written once over a type `real` that the includer chooses: a float, a vector with one token per lane, a
 * CUDA thread's float. Nothing here knows which; a token never sees another lane.
 *
 * The includer defines, before each inclusion:
 *     real, scalar            the type, and the type of constants (float or double) that mixes with it under + - * /
 *     MM(name), MM_FN         the names of these functions, and their qualifiers (static inline ...)
 *     MM_SET(x)               a real from a constant
 *     MM_EXP MM_LOG MM_SQRT MM_MAX(a, b) MM_FMA(a, b, c)
 *     MM_GT(a, b, x, y)       a > b ? x : y, per lane;      MM_EQ(a, b, x, y) likewise
 * Arrays are indexed [a * n + b]; n and rule are constants wherever speed matters. */

/* inv = 1/sqrt(ms + eps) or 1/(sqrt(ms) + eps) */
MM_FN real MM(inv_rms)(real ms, scalar eps, int kind)
{
    return kind == WEFT_EPS_INSIDE ? (scalar)1 / MM_SQRT(ms + eps) : (scalar)1 / (MM_SQRT(ms) + eps);
}

/* d inv / d ms; 0 where the root is not differentiable. */
MM_FN real MM(d_inv_rms)(real ms, real inv, scalar eps, int kind)
{
    real zero = MM_SET(0);
    if (kind == WEFT_EPS_INSIDE) return MM_EQ(ms + eps, zero, zero, (scalar)-0.5 * inv * inv * inv);
    return MM_EQ(ms, zero, zero, (scalar)-0.5 * inv * inv / MM_SQRT(ms));
}

/* *s = sigmoid(z), *t = 1 - sigmoid(z), both without cancellation. */
MM_FN void MM(sigmoid)(real z, real *s, real *t)
{
    real zero = MM_SET(0);
    real e = MM_EXP(MM_GT(z, zero, -z, z)); /* of -|z|; NaN stays */
    real big = (scalar)1 / (e + (scalar)1), small = e * big;
    *s = MM_GT(z, zero, big, small);
    *t = MM_GT(z, zero, small, big);
}

/* z[j] = alpha[g] h[j] inv + beta[j] for the rows of one group. */
MM_FN real MM(gate_logit)(real h, real inv, scalar alpha, scalar beta)
{
    return MM_FMA(h * alpha, inv, MM_SET(beta));
}

/* ---- Sinkhorn --------------------------------------------------------------------------------------------------- */

/* D(s), the divisor that a rule makes of a sum; threshold has none (see sk_half). NaN stays NaN. */
MM_FN real MM(sk_divisor)(real s, scalar eps, int rule)
{
    real e = MM_SET(eps);
    if (rule == WEFT_SINKHORN_CLAMP) return MM_GT(e, s, e, s);
    return rule == WEFT_SINKHORN_THRESHOLD ? s : s + eps;
}

/* r[k] = 1/D[k]. Divisions are what a half-step waits for, so with `shared`, a constant, four divisors share one:
 * 1/a = b (cd) / (abcd). */
MM_FN void MM(sk_reciprocals)(real *r, const real *d, int n, scalar eps, int rule, bool shared)
{
    for (int k = 0; k < (shared ? n / 4 * 4 : 0); k += 4) {
        real ab = d[k] * d[k + 1], cd = d[k + 2] * d[k + 3], all = (scalar)1 / (ab * cd);
        real over_ab = all * cd, over_cd = all * ab;
        r[k] = over_ab * d[k + 1];
        r[k + 1] = over_ab * d[k];
        r[k + 2] = over_cd * d[k + 3];
        r[k + 3] = over_cd * d[k + 2];
    }
    for (int k = shared ? n / 4 * 4 : 0; k < n; k++) {
        r[k] = (scalar)1 / d[k];
        if (rule == WEFT_SINKHORN_THRESHOLD) r[k] = MM_GT(d[k], MM_SET(eps), r[k], MM_SET(0));
    }
}

/* One half-step: axis 1 divides rows (sums over b), axis 0 columns. d[n] receives the divisors. */
MM_FN void MM(sk_half)(real *a, real *d, int n, int axis, scalar eps, int rule, bool shared)
{
    real r[WEFT_MAX_STREAMS];
    for (int k = 0; k < n; k++) {
        int first = axis ? k * n : k, stride = axis ? 1 : n;
        real s = a[first];
        for (int l = 1; l < n; l++) s = s + a[first + l * stride];
        d[k] = MM(sk_divisor)(s, eps, rule);
    }
    MM(sk_reciprocals)(r, d, n, eps, rule, shared);
    for (int k = 0; k < n; k++)
        for (int l = 0; l < n; l++) {
            int i = axis ? k * n + l : l * n + k;
            a[i] = a[i] * r[k];
        }
}

/* Backward of a half-step on G = d * m, the gradient of log m: with y = m/D, G_m = G_y - D' (sum G_y) y. Carrying G rather
 * than d needs no factors and cannot overflow where a divisor is tiny (a column of zeros over eps, again and again). */
MM_FN void MM(sk_half_bwd)(real *g, const real *y, const real *d, int n, int axis, scalar eps, int rule)
{
    for (int k = 0; k < n; k++) {
        int first = axis ? k * n : k, stride = axis ? 1 : n;
        real s = g[first];
        for (int l = 1; l < n; l++) s = s + g[first + l * stride];
        /* An active clamp divides by a constant. */
        if (rule == WEFT_SINKHORN_CLAMP) s = MM_GT(d[k], MM_SET(eps), s, MM_SET(0));
        for (int l = 0; l < n; l++)
            g[first + l * stride] = MM_FMA(-s, y[first + l * stride], g[first + l * stride]);
    }
}

/* Reals that the history keeps of a half-step: the matrix, and where the clamp must be known, the divisors. */
MM_FN int MM(sk_kept)(int n, int rule)
{
    return rule == WEFT_SINKHORN_CLAMP ? n * n + n : n * n;
}

/* Half-steps of the linear rules: softmax+eps begins with columns and lacks the first row step. */
MM_FN int MM(sk_steps)(int iters, int rule)
{
    return rule == WEFT_SINKHORN_SOFTMAX_EPS ? 2 * iters - 1 : 2 * iters;
}

MM_FN void MM(row_max)(const real *z, real *top, int n)
{
    for (int a = 0; a < n; a++) {
        top[a] = z[a * n];
        for (int b = 1; b < n; b++) top[a] = MM_MAX(top[a], z[a * n + b]);
    }
}

/* The matrix the half-steps start from: exp, exp(z - rowmax), or row softmax (without the eps). */
MM_FN void MM(sk_start)(const real *z, real *p, int n, int rule)
{
    for (int a = 0; a < n; a++) {
        real top = z[a * n], s;
        for (int b = 1; b < n; b++) top = MM_MAX(top, z[a * n + b]);
        if (rule == WEFT_SINKHORN_THRESHOLD) top = MM_SET(0);
        for (int b = 0; b < n; b++) p[a * n + b] = MM_EXP(z[a * n + b] - top);
        if (rule != WEFT_SINKHORN_SOFTMAX_EPS) continue;
        s = p[a * n];
        for (int b = 1; b < n; b++) s = s + p[a * n + b];
        s = (scalar)1 / s;
        for (int b = 0; b < n; b++) p[a * n + b] = p[a * n + b] * s;
    }
}

/* -log(sum_l exp(v_l)) of v_l = z + other, along one axis. */
MM_FN real MM(neg_lse)(const real *z, const real *other, int first, int stride, int n)
{
    real top = z[first] + other[0], s = MM_SET(0);
    for (int l = 1; l < n; l++) top = MM_MAX(top, z[first + l * stride] + other[l]);
    for (int l = 0; l < n; l++) s = s + MM_EXP(z[first + l * stride] + other[l] - top);
    return -MM_LOG(s) - top;
}

/* Appends a half-step to the history. */
MM_FN void MM(sk_keep)(real **hist, const real *a, const real *d, int n, int rule)
{
    if (!*hist) return;
    for (int i = 0; i < n * n; i++) (*hist)[i] = a[i];
    for (int i = n * n; i < MM(sk_kept)(n, rule); i++) (*hist)[i] = d[i - n * n];
    *hist += MM(sk_kept)(n, rule);
}

/* All half-steps of a linear rule. */
MM_FN void MM(sk_rounds)(real *z, real *hist, int n, int iters, scalar eps, int rule, bool shared)
{
    real d[WEFT_MAX_STREAMS];
    int softmax = rule == WEFT_SINKHORN_SOFTMAX_EPS;
    if (softmax) {
        for (int i = 0; i < n * n; i++) z[i] = z[i] + eps;
        MM(sk_half)(z, d, n, 0, eps, rule, shared);
        MM(sk_keep)(&hist, z, d, n, rule);
    }
    for (int t = softmax; t < iters; t++) {
        MM(sk_half)(z, d, n, 1, eps, rule, shared);
        MM(sk_keep)(&hist, z, d, n, rule);
        MM(sk_half)(z, d, n, 0, eps, rule, shared);
        MM(sk_keep)(&hist, z, d, n, rule);
    }
}

/* res from logits z; z is overwritten by the result. hist is NULL, or room for sk_history reals. */
MM_FN void MM(sinkhorn_fwd)(real *z, real *hist, int n, int iters, scalar eps, int rule)
{
    real r[WEFT_MAX_STREAMS], g[WEFT_MAX_STREAMS];
    int nn = n * n;
    if (rule == WEFT_SINKHORN_LOG) {
        /* The rule is invariant to a shift of each row; without it, large common offsets would cost precision. */
        MM(row_max)(z, r, n);
        for (int a = 0; a < n; a++)
            for (int b = 0; b < n; b++) z[a * n + b] = z[a * n + b] - r[a];
        for (int b = 0; b < n; b++) g[b] = MM_SET(0);
        for (int t = 0; t < iters; t++) {
            for (int a = 0; a < n; a++) r[a] = MM(neg_lse)(z, g, a * n, 1, n);
            for (int b = 0; b < n; b++) g[b] = MM(neg_lse)(z, r, b, n, n);
            if (hist)
                for (int a = 0; a < n; a++) hist[2 * n * t + a] = r[a], hist[2 * n * t + n + a] = g[a];
        }
        if (hist) { /* backward goes on with the shifted logits */
            for (int i = 0; i < nn; i++) hist[2 * n * iters + i] = z[i];
        }
        for (int a = 0; a < n; a++)
            for (int b = 0; b < n; b++) z[a * n + b] = MM_EXP(r[a] + z[a * n + b] + g[b]);
        return;
    }
    MM(sk_start)(z, z, n, rule);
    if (hist && rule == WEFT_SINKHORN_SOFTMAX_EPS) { /* backward wants the softmax itself */
        for (int i = 0; i < nn; i++) hist[i] = z[i];
        hist += nn;
    }
    /* Sharing a division needs the product of four divisors to stay a normal number. They are at least eps and not much
     * above n, except where threshold has no divisor at all. */
    if (n >= 4 && rule != WEFT_SINKHORN_THRESHOLD && eps >= (scalar)1e-9)
        MM(sk_rounds)(z, hist, n, iters, eps, rule, true);
    else
        MM(sk_rounds)(z, hist, n, iters, eps, rule, false);
}

/* d (upstream of res) becomes the gradient of the logits. z: logits; overwritten. */
MM_FN void MM(sinkhorn_bwd)(real *z, real *d, real *hist, int n, int iters, scalar eps, int rule)
{
    int nn = n * n;
    real top[WEFT_MAX_STREAMS];
    if (rule == WEFT_SINKHORN_LOG) {
        real gg[WEFT_MAX_STREAMS], gf[WEFT_MAX_STREAMS], zero = MM_SET(0);
        MM(sinkhorn_fwd)(z, hist, n, iters, eps, rule);
        const real *shifted = hist + 2 * n * iters;
        for (int i = 0; i < nn; i++) d[i] = d[i] * z[i]; /* gradient of log res */
        for (int b = 0; b < n; b++) {
            gg[b] = d[b];
            for (int a = 1; a < n; a++) gg[b] = gg[b] + d[a * n + b];
        }
        for (int a = 0; a < n; a++) { /* only the last f meets res directly */
            gf[a] = d[a * n];
            for (int b = 1; b < n; b++) gf[a] = gf[a] + d[a * n + b];
        }
        for (int t = iters - 1; t >= 0; t--) {
            const real *f = hist + 2 * n * t, *g = f + n, *before = t > 0 ? f - n : NULL;
            for (int a = 0; a < n; a++)
                for (int b = 0; b < n; b++) {
                    real tg = -gg[b] * MM_EXP(f[a] + shifted[a * n + b] + g[b]);
                    gf[a] = gf[a] + tg;
                    d[a * n + b] = d[a * n + b] + tg;
                }
            for (int b = 0; b < n; b++) gg[b] = zero;
            for (int a = 0; a < n; a++)
                for (int b = 0; b < n; b++) {
                    real v = f[a] + shifted[a * n + b];
                    real tf = -gf[a] * MM_EXP(before ? v + before[b] : v);
                    gg[b] = gg[b] + tf;
                    d[a * n + b] = d[a * n + b] + tf;
                }
            for (int a = 0; a < n; a++) gf[a] = zero;
        }
        return;
    }
    int kept = MM(sk_kept)(n, rule), softmax = rule == WEFT_SINKHORN_SOFTMAX_EPS;
    int64_t steps = MM(sk_steps)(iters, rule);
    const real *first = hist + (softmax ? nn : 0), *h = first + steps * kept;
    real *logits = hist + (softmax ? nn : 0) + steps * kept;
    for (int i = 0; i < nn; i++) logits[i] = z[i];
    MM(sinkhorn_fwd)(z, hist, n, iters, eps, rule);
    for (int i = 0; i < nn; i++) d[i] = d[i] * z[i];
    for (int t = iters; t > softmax; t--) {
        h -= kept;
        MM(sk_half_bwd)(d, h, h + nn, n, 0, eps, rule);
        h -= kept;
        MM(sk_half_bwd)(d, h, h + nn, n, 1, eps, rule);
    }
    if (rule == WEFT_SINKHORN_THRESHOLD) return; /* the start was exp(z): G is the gradient of z */
    if (softmax) {
        MM(sk_half_bwd)(d, first, first + nn, n, 0, eps, rule);
        for (int a = 0; a < n; a++) {
            const real *p = hist + a * n;
            real *g = d + a * n, s = MM_SET(0);
            for (int b = 0; b < n; b++) {
                g[b] = g[b] * (p[b] / (p[b] + eps)); /* from log(p + eps) to log p */
                s = s + g[b];
            }
            for (int b = 0; b < n; b++) g[b] = MM_FMA(-s, p[b], g[b]);
        }
        return;
    }
    /* exp(z - max): the maximum moves with its entry; equal maxima share the term. */
    MM(row_max)(logits, top, n);
    for (int a = 0; a < n; a++) {
        const real *za = logits + a * n;
        real *g = d + a * n, s = MM_SET(0), count = MM_SET(0), zero = MM_SET(0);
        for (int b = 0; b < n; b++) {
            s = s + g[b];
            count = count + MM_EQ(za[b], top[a], MM_SET(1), zero);
        }
        s = s / count;
        for (int b = 0; b < n; b++) g[b] = g[b] - MM_EQ(za[b], top[a], s, zero);
    }
}

/* Reals of history that sinkhorn_bwd needs. */
MM_FN int64_t MM(sk_history)(int n, int iters, int rule)
{
    if (rule == WEFT_SINKHORN_LOG) return 2 * n * (int64_t)iters + n * n;
    return 2 * n * n + (int64_t)MM(sk_steps)(iters, rule) * MM(sk_kept)(n, rule);
}
