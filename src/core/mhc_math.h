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

/* 1/D(s) for a divisor of the rule; threshold answers 0 below eps. NaN stays NaN. */
MM_FN real MM(sk_factor)(real s, scalar eps, int rule)
{
    real e = MM_SET(eps);
    if (rule == WEFT_SINKHORN_CLAMP) return (scalar)1 / MM_GT(e, s, e, s);
    if (rule == WEFT_SINKHORN_THRESHOLD) return MM_GT(s, e, (scalar)1 / s, MM_SET(0));
    return (scalar)1 / (s + eps);
}

/* One half-step: axis 1 divides rows (sums over b), axis 0 columns. r[n] receives the factors. */
MM_FN void MM(sk_half)(real *a, real *r, int n, int axis, scalar eps, int rule)
{
    for (int k = 0; k < n; k++) {
        int first = axis ? k * n : k, stride = axis ? 1 : n;
        real s = a[first];
        for (int l = 1; l < n; l++) s = s + a[first + l * stride];
        r[k] = MM(sk_factor)(s, eps, rule);
        for (int l = 0; l < n; l++) a[first + l * stride] = a[first + l * stride] * r[k];
    }
}

/* dm from dy, in place: y = m r with r = 1/D(sum m), so dm = (dy - D' sum(dy y)) r. */
MM_FN void MM(sk_half_bwd)(real *d, const real *y, const real *r, int n, int axis, scalar eps, int rule)
{
    for (int k = 0; k < n; k++) {
        int first = axis ? k * n : k, stride = axis ? 1 : n;
        real s = d[first] * y[first];
        for (int l = 1; l < n; l++) s = MM_FMA(d[first + l * stride], y[first + l * stride], s);
        /* An active clamp divides by a constant. */
        if (rule == WEFT_SINKHORN_CLAMP) s = MM_GT(MM_SET(1 / eps), r[k], s, MM_SET(0));
        for (int l = 0; l < n; l++) d[first + l * stride] = (d[first + l * stride] - s) * r[k];
    }
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
    int steps = MM(sk_steps)(iters, rule), axis = rule != WEFT_SINKHORN_SOFTMAX_EPS;
    MM(sk_start)(z, z, n, rule);
    if (hist)
        for (int i = 0; i < nn; i++) hist[i] = z[i];
    if (rule == WEFT_SINKHORN_SOFTMAX_EPS)
        for (int i = 0; i < nn; i++) z[i] = z[i] + eps;
    for (int k = 0; k < steps; k++, axis = !axis) {
        MM(sk_half)(z, r, n, axis, eps, rule);
        if (hist) {
            real *h = hist + nn + (int64_t)k * (nn + n);
            for (int i = 0; i < nn; i++) h[i] = z[i];
            for (int i = 0; i < n; i++) h[nn + i] = r[i];
        }
    }
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
    int steps = MM(sk_steps)(iters, rule), axis = 0; /* every rule ends with columns */
    MM(row_max)(z, top, n);
    for (int i = 0; i < nn; i++) hist[nn + (int64_t)steps * (nn + n) + i] = z[i];
    MM(sinkhorn_fwd)(z, hist, n, iters, eps, rule);
    for (int k = steps - 1; k >= 0; k--, axis = !axis) {
        const real *h = hist + nn + (int64_t)k * (nn + n);
        MM(sk_half_bwd)(d, h, h + nn, n, axis, eps, rule);
    }
    const real *logits = hist + nn + (int64_t)steps * (nn + n);
    for (int a = 0; a < n; a++) {
        const real *p = hist + a * n;
        real *da = d + a * n, s, count, share, zero = MM_SET(0);
        s = da[0] * p[0];
        for (int b = 1; b < n; b++) s = MM_FMA(da[b], p[b], s);
        if (rule == WEFT_SINKHORN_SOFTMAX_EPS) {
            for (int b = 0; b < n; b++) da[b] = p[b] * (da[b] - s);
            continue;
        }
        for (int b = 0; b < n; b++) da[b] = da[b] * p[b];
        if (rule == WEFT_SINKHORN_THRESHOLD) continue;
        /* exp(z - max): the maximum moves with its entry; equal maxima share the term. */
        count = zero;
        for (int b = 0; b < n; b++) count = count + MM_EQ(logits[a * n + b], top[a], MM_SET(1), zero);
        share = s / count;
        for (int b = 0; b < n; b++) da[b] = da[b] - MM_EQ(logits[a * n + b], top[a], share, zero);
    }
}

/* Reals of history that sinkhorn_bwd needs. */
MM_FN int64_t MM(sk_history)(int n, int iters, int rule)
{
    if (rule == WEFT_SINKHORN_LOG) return 2 * n * (int64_t)iters + n * n;
    return 2 * n * n + (int64_t)MM(sk_steps)(iters, rule) * (n * n + n);
}
