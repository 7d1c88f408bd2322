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
 * and where the defaults below do not serve:
 *     MM_RECIPROCAL(x)        1/x where x is a positive normal number far from infinity, or NaN
 *     MM_UNROLL               in front of loops over a matrix: unroll it, so that its elements can be registers
 *     MM_SHARED_DIVISION      1: four divisors of Sinkhorn share a division (see sk_reciprocals); 0: each has its own
 *     MM_WALK_BACK            1: Sinkhorn's backward keeps divisors instead of matrices (see sk_walks); 0 by default
 *     MM_HISTORY              handle of the memory in which Sinkhorn's backward keeps its steps: a real *
 *     MM_AT(h, i)             its i-th real, an lvalue;    MM_FROM(h, i)   the handle of what begins there
 * Arrays are indexed [a * n + b]; n and rule are constants wherever speed matters.
 *
 * `rule` is a weft_sinkhorn or MM_LOG_NEAR: the log rule has two ways to the same function, and the includer asks sk_near
 * which one a token takes. */
#ifndef MM_LOG_NEAR
#define MM_LOG_NEAR (-1) /* the log rule without logarithms */
#define MM_NEAR 40       /* how far below its row's maximum a logit may be for it, see sk_near */
#endif
#ifndef MM_RECIPROCAL
#define MM_RECIPROCAL(x) ((scalar)1 / (x))
#endif
#ifndef MM_UNROLL
#define MM_UNROLL
#endif
#ifndef MM_SHARED_DIVISION
#define MM_SHARED_DIVISION 1
#endif
#ifndef MM_WALK_BACK
#define MM_WALK_BACK 0
#endif
#ifndef MM_HISTORY
#define MM_HISTORY real *
#define MM_AT(h, i) (h)[i]
#define MM_FROM(h, i) ((h) + (i))
#endif

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
    real big = MM_RECIPROCAL(e + (scalar)1), small = e * big;
    *s = MM_GT(z, zero, big, small);
    *t = MM_GT(z, zero, small, big);
}

/* z[j] = alpha[g] h[j] inv + beta[j] for the rows of one group. */
MM_FN real MM(gate_logit)(real h, real inv, scalar alpha, scalar beta)
{
    return MM_FMA(h * alpha, inv, MM_SET(beta));
}

/* ---- Sinkhorn --------------------------------------------------------------------------------------------------- */

MM_FN real MM(row_max)(const real *row, int n)
{
    real top = row[0];
    MM_UNROLL for (int b = 1; b < n; b++) top = MM_MAX(top, row[b]);
    return top;
}

/* The log rule's potentials are the logarithms of what a matrix exp(z - rowmax) is scaled by when its rows and columns are
 * divided by their sums in turn. That costs no exponentials, but the matrix must not underflow. With entries of the
 * start in [exp(-S), 1], entries after any half-step lie in [exp(-2 S) / n, 1], whatever the number of iterations, and
 * divisors in [1/n, n], except that the first column's go down to exp(-S) ([M3]). S = 40 keeps all of them normal
 * numbers up to 32 streams, with a factor of 40 to spare for rounding.
 * 1 where that holds, 0 where it does not. A NaN becomes a matrix of NaN either way. */
MM_FN real MM(sk_near)(const real *z, int n)
{
    real spread = MM_SET(0);
    MM_UNROLL for (int a = 0; a < n; a++)
    {
        real top = MM(row_max)(z + a * n, n);
        MM_UNROLL for (int b = 0; b < n; b++) spread = MM_MAX(spread, top - z[a * n + b]);
    }
    return MM_GT(MM_SET(MM_NEAR), spread, MM_SET(1), MM_SET(0));
}

/* D(s), the divisor that a rule makes of a sum; threshold has none (see sk_reciprocals). NaN stays NaN. */
MM_FN real MM(sk_divisor)(real s, scalar eps, int rule)
{
    real e = MM_SET(eps);
    if (rule == WEFT_SINKHORN_CLAMP) return MM_GT(e, s, e, s);
    return rule == WEFT_SINKHORN_THRESHOLD || rule == MM_LOG_NEAR ? s : s + eps;
}

/* r[k] = 1/D[k]. Where divisions are what a half-step waits for, four divisors share one: 1/a = b (cd) / (abcd). For that
 * they must be `bounded`, a constant. */
MM_FN void MM(sk_reciprocals)(real *r, const real *d, int n, scalar eps, int rule, bool bounded)
{
    bool shared = MM_SHARED_DIVISION && bounded, normal = bounded || rule == MM_LOG_NEAR;
    MM_UNROLL for (int k = 0; k < (shared ? n / 4 * 4 : 0); k += 4)
    {
        real ab = d[k] * d[k + 1], cd = d[k + 2] * d[k + 3], all = MM_RECIPROCAL(ab * cd);
        real over_ab = all * cd, over_cd = all * ab;
        r[k] = over_ab * d[k + 1];
        r[k + 1] = over_ab * d[k];
        r[k + 2] = over_cd * d[k + 3];
        r[k + 3] = over_cd * d[k + 2];
    }
    MM_UNROLL for (int k = shared ? n / 4 * 4 : 0; k < n; k++)
    {
        r[k] = normal ? MM_RECIPROCAL(d[k]) : (scalar)1 / d[k];
        if (rule == WEFT_SINKHORN_THRESHOLD) r[k] = MM_GT(d[k], MM_SET(eps), r[k], MM_SET(0));
    }
}

/* The sum of line k: axis 1 means rows, axis 0 columns. */
MM_FN real MM(line_sum)(const real *a, int n, int axis, int k)
{
    int first = axis ? k * n : k, stride = axis ? 1 : n;
    real s = a[first];
    MM_UNROLL for (int l = 1; l < n; l++) s = s + a[first + l * stride];
    return s;
}

/* One half-step: axis 1 divides rows (sums over b), axis 0 columns. d[n] receives the divisors. */
MM_FN void MM(sk_half)(real *a, real *d, int n, int axis, scalar eps, int rule, bool bounded)
{
    real r[WEFT_MAX_STREAMS];
    MM_UNROLL for (int k = 0; k < n; k++) d[k] = MM(sk_divisor)(MM(line_sum)(a, n, axis, k), eps, rule);
    MM(sk_reciprocals)(r, d, n, eps, rule, bounded);
    MM_UNROLL for (int k = 0; k < n; k++)
    {
        MM_UNROLL for (int l = 0; l < n; l++)
        {
            int i = axis ? k * n + l : l * n + k;
            a[i] = a[i] * r[k];
        }
    }
}

/* Backward of a half-step y = m / D needs y. Either the history keeps the matrices, or it keeps the divisors, n instead of
 * n * n reals, and backward finds the matrices again as it goes: m = y D, at the price of a rounding each. The second
 * saves memory, which decides where the history must be small to be near; the first saves n * n multiplications. A line
 * that threshold wiped out cannot be found again, so there it is always the matrices. */
MM_FN bool MM(sk_walks)(int rule)
{
    return MM_WALK_BACK && rule != WEFT_SINKHORN_THRESHOLD;
}

/* Reals that the history keeps of a half-step: divisors; or the matrix, and where the clamp must be known, divisors. */
MM_FN int MM(sk_kept)(int n, int rule)
{
    return MM(sk_walks)(rule) ? n : rule == WEFT_SINKHORN_CLAMP ? n * n + n : n * n;
}

/* Backward of a half-step on G = d * m, the gradient of log m: with y = m/D, G_m = G_y - D' (sum G_y) y. Carrying G rather
 * than d needs no factors and cannot overflow where a divisor is tiny (a column of zeros over eps, again and again).
 * kept: what the half-step left in the history. y: where backward walks, its result, which becomes m. */
MM_FN void MM(sk_half_bwd)(real *g, real *y, MM_HISTORY kept, int n, int axis, scalar eps, int rule)
{
    bool walks = MM(sk_walks)(rule);
    MM_UNROLL for (int k = 0; k < n; k++)
    {
        real s = MM(line_sum)(g, n, axis, k), d = MM_SET(0);
        if (walks) d = MM_AT(kept, k);
        if (rule == WEFT_SINKHORN_CLAMP) { /* an active clamp divides by a constant */
            if (!walks) d = MM_AT(kept, n * n + k);
            s = MM_GT(d, MM_SET(eps), s, MM_SET(0));
        }
        MM_UNROLL for (int l = 0; l < n; l++)
        {
            int i = axis ? k * n + l : l * n + k;
            if (walks) {
                g[i] = MM_FMA(-s, y[i], g[i]);
                y[i] = y[i] * d;
            } else {
                g[i] = MM_FMA(-s, MM_AT(kept, i), g[i]);
            }
        }
    }
}

/* Half-steps of the linear rules: softmax+eps begins with columns and lacks the first row step. */
MM_FN int MM(sk_steps)(int iters, int rule)
{
    return rule == WEFT_SINKHORN_SOFTMAX_EPS ? 2 * iters - 1 : 2 * iters;
}

/* Reals in front of the half-steps: the softmax, or the logits where backward asks for their maxima. */
MM_FN int MM(sk_head)(int n, int rule)
{
    return rule == WEFT_SINKHORN_THRESHOLD || rule == MM_LOG_NEAR ? 0 : n * n;
}

/* The matrix the half-steps start from: exp, exp(z - rowmax), or row softmax (without the eps). */
MM_FN void MM(sk_start)(const real *z, real *p, int n, int rule)
{
    MM_UNROLL for (int a = 0; a < n; a++)
    {
        real top = rule == WEFT_SINKHORN_THRESHOLD ? MM_SET(0) : MM(row_max)(z + a * n, n), s;
        MM_UNROLL for (int b = 0; b < n; b++) p[a * n + b] = MM_EXP(z[a * n + b] - top);
        if (rule == WEFT_SINKHORN_SOFTMAX_EPS) {
            s = p[a * n];
            MM_UNROLL for (int b = 1; b < n; b++) s = s + p[a * n + b];
            s = MM_RECIPROCAL(s);
            MM_UNROLL for (int b = 0; b < n; b++) p[a * n + b] = p[a * n + b] * s;
        }
    }
}

/* -log(sum_l exp(v_l)) of v_l = z + other, along one axis. */
MM_FN real MM(neg_lse)(const real *z, const real *other, int first, int stride, int n)
{
    real top = z[first] + other[0], s = MM_SET(0);
    MM_UNROLL for (int l = 1; l < n; l++) top = MM_MAX(top, z[first + l * stride] + other[l]);
    MM_UNROLL for (int l = 0; l < n; l++) s = s + MM_EXP(z[first + l * stride] + other[l] - top);
    return -MM_LOG(s) - top;
}

/* One half-step of a linear rule, and its place in the history where one is kept. */
MM_FN void MM(sk_step)(real *a, real *d, MM_HISTORY *hist, bool keep, int n, int axis, scalar eps, int rule,
                       bool bounded)
{
    MM(sk_half)(a, d, n, axis, eps, rule, bounded);
    if (keep) {
        int size = MM(sk_walks)(rule) ? 0 : n * n, kept = MM(sk_kept)(n, rule);
        MM_UNROLL for (int i = 0; i < size; i++) MM_AT(*hist, i) = a[i];
        MM_UNROLL for (int i = size; i < kept; i++) MM_AT(*hist, i) = d[i - size];
        *hist = MM_FROM(*hist, kept);
    }
}

/* Is every divisor, and the product of four, a normal number? Divisors are at least eps and at most n + eps, except where
 * threshold has none at all; between 1/n and n in the log rule. */
MM_FN bool MM(sk_bounded)(scalar eps, int rule)
{
    return rule == MM_LOG_NEAR || (rule != WEFT_SINKHORN_THRESHOLD && eps >= (scalar)1e-9 && eps <= (scalar)1e6);
}

/* All half-steps of a linear rule. */
MM_FN void MM(sk_rounds)(real *z, MM_HISTORY hist, bool keep, int n, int iters, scalar eps, int rule, bool bounded)
{
    real d[WEFT_MAX_STREAMS];
    int softmax = rule == WEFT_SINKHORN_SOFTMAX_EPS, near = rule == MM_LOG_NEAR;
    if (softmax) {
        MM_UNROLL for (int i = 0; i < n * n; i++) z[i] = z[i] + eps;
        MM(sk_step)(z, d, &hist, keep, n, 0, eps, rule, bounded);
    }
    if (near) { /* four of the first columns' sums may have a product that underflows */
        MM(sk_step)(z, d, &hist, keep, n, 1, eps, rule, bounded);
        MM(sk_step)(z, d, &hist, keep, n, 0, eps, rule, false);
    }
    for (int t = softmax || near; t < iters; t++) {
        MM(sk_step)(z, d, &hist, keep, n, 1, eps, rule, bounded);
        MM(sk_step)(z, d, &hist, keep, n, 0, eps, rule, bounded);
    }
}

/* The log rule in logarithms, for any logits. hist receives the shifted logits and the potentials of every iteration. */
MM_FN void MM(sk_log_fwd)(real *z, MM_HISTORY hist, bool keep, int n, int iters)
{
    real r[WEFT_MAX_STREAMS], g[WEFT_MAX_STREAMS];
    int nn = n * n;
    /* The rule is invariant to a shift of each row; without it, large common offsets would cost precision. */
    MM_UNROLL for (int a = 0; a < n; a++)
    {
        real top = MM(row_max)(z + a * n, n);
        MM_UNROLL for (int b = 0; b < n; b++) z[a * n + b] = z[a * n + b] - top;
    }
    if (keep) {
        MM_UNROLL for (int i = 0; i < nn; i++) MM_AT(hist, i) = z[i];
        hist = MM_FROM(hist, nn);
    }
    MM_UNROLL for (int k = 0; k < n; k++) r[k] = g[k] = MM_SET(0);
    for (int t = 0; t < iters; t++) {
        MM_UNROLL for (int a = 0; a < n; a++) r[a] = MM(neg_lse)(z, g, a * n, 1, n);
        MM_UNROLL for (int b = 0; b < n; b++) g[b] = MM(neg_lse)(z, r, b, n, n);
        if (keep) {
            MM_UNROLL for (int a = 0; a < n; a++) MM_AT(hist, a) = r[a], MM_AT(hist, n + a) = g[a];
            hist = MM_FROM(hist, 2 * n);
        }
    }
    MM_UNROLL for (int a = 0; a < n; a++)
    {
        MM_UNROLL for (int b = 0; b < n; b++) z[a * n + b] = MM_EXP(r[a] + z[a * n + b] + g[b]);
    }
}

/* res from logits z; z is overwritten by the result. With `keep`, a constant, hist receives sk_history reals. */
MM_FN void MM(sinkhorn_fwd)(real *z, MM_HISTORY hist, bool keep, int n, int iters, scalar eps, int rule)
{
    int nn = n * n;
    if (rule == WEFT_SINKHORN_LOG) {
        MM(sk_log_fwd)(z, hist, keep, n, iters);
        return;
    }
    if (keep && (rule == WEFT_SINKHORN_CLAMP || rule == WEFT_SINKHORN_ADD)) {
        MM_UNROLL for (int i = 0; i < nn; i++) MM_AT(hist, i) = z[i];
    }
    MM(sk_start)(z, z, n, rule);
    if (keep && rule == WEFT_SINKHORN_SOFTMAX_EPS) {
        MM_UNROLL for (int i = 0; i < nn; i++) MM_AT(hist, i) = z[i];
    }
    if (keep) hist = MM_FROM(hist, MM(sk_head)(n, rule));
    if (MM(sk_bounded)(eps, rule))
        MM(sk_rounds)(z, hist, keep, n, iters, eps, rule, true);
    else
        MM(sk_rounds)(z, hist, keep, n, iters, eps, rule, false);
}

/* Backward of the log rule in logarithms: d (upstream of res) becomes the gradient of the logits. */
MM_FN void MM(sk_log_bwd)(real *z, real *d, MM_HISTORY hist, int n, int iters)
{
    real gg[WEFT_MAX_STREAMS], gf[WEFT_MAX_STREAMS];
    int nn = n * n;
    MM(sk_log_fwd)(z, hist, true, n, iters);
    MM_UNROLL for (int i = 0; i < nn; i++)
    {
        d[i] = d[i] * z[i];    /* gradient of log res */
        z[i] = MM_AT(hist, i); /* the shifted logits */
    }
    /* Only the last f meets res directly. */
    MM_UNROLL for (int k = 0; k < n; k++) gg[k] = MM(line_sum)(d, n, 0, k), gf[k] = MM(line_sum)(d, n, 1, k);
    MM_HISTORY at = MM_FROM(hist, nn + 2 * n * (int64_t)iters);
    for (int t = iters - 1; t >= 0; t--) {
        at = MM_FROM(at, -2 * n);
        MM_UNROLL for (int a = 0; a < n; a++)
        {
            real f = MM_AT(at, a);
            MM_UNROLL for (int b = 0; b < n; b++)
            {
                real tg = -gg[b] * MM_EXP(f + z[a * n + b] + MM_AT(at, n + b));
                gf[a] = gf[a] + tg;
                d[a * n + b] = d[a * n + b] + tg;
            }
        }
        MM_UNROLL for (int b = 0; b < n; b++) gg[b] = MM_SET(0);
        MM_UNROLL for (int a = 0; a < n; a++)
        {
            real f = MM_AT(at, a);
            MM_UNROLL for (int b = 0; b < n; b++)
            {
                real v = f + z[a * n + b];
                if (t > 0) v = v + MM_AT(at, b - n); /* g of the iteration before */
                real tf = -gf[a] * MM_EXP(v);
                gg[b] = gg[b] + tf;
                d[a * n + b] = d[a * n + b] + tf;
            }
        }
        MM_UNROLL for (int a = 0; a < n; a++) gf[a] = MM_SET(0);
    }
}

/* d (upstream of res) becomes the gradient of the logits. z: logits; overwritten. */
MM_FN void MM(sinkhorn_bwd)(real *z, real *d, MM_HISTORY hist, int n, int iters, scalar eps, int rule)
{
    int nn = n * n, kept = MM(sk_kept)(n, rule), softmax = rule == WEFT_SINKHORN_SOFTMAX_EPS;
    if (rule == WEFT_SINKHORN_LOG) {
        MM(sk_log_bwd)(z, d, hist, n, iters);
        return;
    }
    MM_HISTORY at = MM_FROM(hist, MM(sk_head)(n, rule) + kept * (int64_t)MM(sk_steps)(iters, rule));
    MM(sinkhorn_fwd)(z, hist, true, n, iters, eps, rule);
    MM_UNROLL for (int i = 0; i < nn; i++) d[i] = d[i] * z[i];
    for (int t = iters; t > softmax; t--) {
        at = MM_FROM(at, -kept);
        MM(sk_half_bwd)(d, z, at, n, 0, eps, rule);
        at = MM_FROM(at, -kept);
        MM(sk_half_bwd)(d, z, at, n, 1, eps, rule);
    }
    /* G is the gradient of z where the start was exp(z), or where a shift of a row cannot be felt. */
    if (rule == WEFT_SINKHORN_THRESHOLD || rule == MM_LOG_NEAR) return;
    if (softmax) MM(sk_half_bwd)(d, z, MM_FROM(at, -kept), n, 0, eps, rule);
    MM_UNROLL for (int a = 0; a < n; a++)
    {
        real *g = d + a * n, s = MM_SET(0), count = MM_SET(0), zero = MM_SET(0);
        MM_HISTORY row = MM_FROM(hist, a * n); /* of the softmax, or of the logits */
        if (softmax) {
            MM_UNROLL for (int b = 0; b < n; b++)
            {
                g[b] = g[b] * (MM_AT(row, b) / (MM_AT(row, b) + eps)); /* from log(p + eps) to log p */
                s = s + g[b];
            }
            MM_UNROLL for (int b = 0; b < n; b++) g[b] = MM_FMA(-s, MM_AT(row, b), g[b]);
        } else {
            /* exp(z - max): the maximum moves with its entry; equal maxima share the term. */
            real top = MM_AT(row, 0);
            MM_UNROLL for (int b = 1; b < n; b++) top = MM_MAX(top, MM_AT(row, b));
            MM_UNROLL for (int b = 0; b < n; b++)
            {
                s = s + g[b];
                count = count + MM_EQ(MM_AT(row, b), top, MM_SET(1), zero);
            }
            s = s / count;
            MM_UNROLL for (int b = 0; b < n; b++) g[b] = g[b] - MM_EQ(MM_AT(row, b), top, s, zero);
        }
    }
}

/* Reals of history that sinkhorn_bwd needs; in the log rule for tokens of either kind. */
MM_FN int64_t MM(sk_history)(int n, int iters, int rule)
{
    int linear = rule == WEFT_SINKHORN_LOG ? MM_LOG_NEAR : rule;
    int64_t size = MM(sk_head)(n, linear) + MM(sk_kept)(n, linear) * (int64_t)MM(sk_steps)(iters, linear);
    int64_t potentials = n * n + 2 * n * (int64_t)iters;
    return rule == WEFT_SINKHORN_LOG && potentials > size ? potentials : size;
}
