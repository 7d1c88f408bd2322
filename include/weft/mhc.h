/* SPDX-License-Identifier: Apache-2.0
 *
 * mHC, manifold-constrained hyper-connections (arXiv 2512.24880): `streams` residual streams instead of one.
 *
 * Shapes are logical; memory order is a matter of strides. With T tokens, n streams, C channels, N = 2n + n*n and S = 3:
 *     x, y      [T, n, C]   residual streams. Dense (n,C) and dense (C,n) rows have fast paths on the CPU and CUDA.
 *     f, u, v   [T, C]      sub-layer output, aggregated sub-layer input, the same after the sub-layer's RMSNorm
 *     phi       [N, n, C]   projection weight, rows in the order pre | post | res, res row-major
 *     h, ms     [T, N], [T] raw projection and mean square over the n*C values of a token: all that backward needs
 *     pre, post [T, n]      aggregation and expansion coefficients
 *     res       [T, n, n]   residual mix; its columns sum to one up to the rule's eps; numerics.apply gives the indices
 *                           their meaning
 *     alpha     [S]         scales of the groups of rows pre, post and res; beta [N] their offsets
 *
 * Independent hyper-connections have no residual mix: the streams pass a merge unchanged. Coefficients are those where alpha
 * has S = 2 elements: then N = 2n, phi, h and beta lack the rows of res, and so res, logits and their gradients are absent. A merge
 * (post, boundary, a layer of replay) without `res` takes the identity, and has no gradient for it. Both in one call, or one
 * of them: a boundary may follow a site of the other kind. numerics.sinkhorn and apply then mean nothing where they have
 * nothing to act on, but are checked.
 *
 * Common to all operators
 *   - n is 1..32, C is at least 1, T is 0..2^40. T = 0 succeeds: gradients that are overwritten become zero, gradients
 *     that are added to stay, nothing else is touched.
 *   - Dtypes: see weft_arg_type in weft/ops.h. Arithmetic is fp32 (double on the reference) with one rounding at the
 *     store; coefficients may be stored in 16 bits but are computed in fp32. float64 is served by the reference.
 *   - An absent tensor (dtype WEFT_NONE) is an input that is not there or an output that is not requested. Fields marked
 *     "optional" may be absent. An absent upstream gradient counts as zero.
 *   - Every gradient is a weft_grad: overwritten or added to, as its `add` says, from the unrounded fp32 value.
 *   - Outputs may not overlap other arguments, except where "in place" says that two fields may be the same memory. The
 *     workspace may not overlap any. What dropout.step points to counts as an input.
 *   - Results are bitwise reproducible: they depend neither on the thread count nor on the other tokens of the call
 *     (gradients of parameters are sums over the tokens, in an order that depends on the shape only). On CUDA this holds
 *     for any number of multiprocessors on one kind of GPU; the order of sums depends on the dtype and the memory layout
 *     there, so another layout of the same values may differ in the last bits.
 *   - weft_<op>_workspace tells how many bytes exec.workspace must have for the same exec and args. Tensor data is not
 *     looked at by that function. Where the way a call takes depends on addresses, a call may do with less. A backward is the
 *     exception: NULL stands for data aligned to 16 bytes, and a call with other data may need more, as its error says.
 * Tags such as [M4] refer to docs/reference/math.md. */
#ifndef WEFT_MHC_H
#define WEFT_MHC_H

#include <weft/weft.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_MAX_STREAMS 32

/* How a mean square becomes an inverse root: 1/sqrt(ms + eps) or 1/(sqrt(ms) + eps). */
typedef enum weft_eps_kind { WEFT_EPS_INSIDE = 0, WEFT_EPS_OUTSIDE } weft_eps_kind;

/* The five Sinkhorn rules [M3]; all alternate rows (last index) and columns, and end with columns. Those that multiply
 * exponentials have the range of fp32 on the CPU and CUDA backends: clamp and add agree with the reference for logits up to 80
 * below the maximum of their row, threshold for logits from -40 to 40. Further below entries lose digits and from 104 on are zero,
 * and a column of zeros stays one. */
typedef enum weft_sinkhorn {
    WEFT_SINKHORN_LOG = 0,     /* potentials in log space, no eps */
    WEFT_SINKHORN_SOFTMAX_EPS, /* softmax rows + eps, columns, then iters-1 rounds with sum + eps */
    WEFT_SINKHORN_CLAMP,       /* exp(z - rowmax), divisors max(sum, eps) */
    WEFT_SINKHORN_ADD,         /* exp(z - rowmax), divisors sum + eps */
    WEFT_SINKHORN_THRESHOLD    /* exp(z), factor 1/sum where sum > eps and 0 elsewhere */
} weft_sinkhorn;

/* What res[t, a, b] means when it is applied: y[o] += res[i, o] x[i], or y[o] += res[o, i] x[i]. */
typedef enum weft_apply { WEFT_APPLY_IN_OUT = 0, WEFT_APPLY_OUT_IN } weft_apply;

typedef enum weft_contract { WEFT_CONTRACT_MEAN = 0, WEFT_CONTRACT_SUM } weft_contract;

/* Everything that differs between public implementations and changes the function computed. */
typedef struct weft_mhc_numerics {
    double rms_eps;
    weft_eps_kind rms_eps_kind;
    double pre_eps;   /* pre = sigmoid + pre_eps */
    double post_mult; /* post = post_mult * sigmoid + post_eps */
    weft_sinkhorn sinkhorn;
    double sinkhorn_eps;
    int32_t sinkhorn_iters; /* at least 1 */
    weft_apply apply;
    double post_eps;
    uint64_t reserved[5]; /* zero */
} weft_mhc_numerics;

typedef enum weft_mhc_preset {
    WEFT_PRESET_TRANSFORMER_ENGINE = 0,
    WEFT_PRESET_DEEPSEEK_V4,
    WEFT_PRESET_DEEPSEEK_V41, /* rms eps 1e-20; its shift is wiring: pass pre_in */
    WEFT_PRESET_MEGATRON_MAIN,
    WEFT_PRESET_MEGATRON_DEV,
    WEFT_PRESET_MEGATRON_DSV4,
    WEFT_PRESET_LIGER,
    WEFT_PRESET_GLM5_NEXT,
    WEFT_PRESET_HY_V4, /* of independent hyper-connections: with two scales */
    WEFT_PRESET_COUNT
} weft_mhc_preset;

WEFT_API weft_status weft_mhc_preset_numerics(weft_mhc_preset preset, weft_mhc_numerics *numerics);
/* "deepseek_v4" and so on; NULL where preset is out of range. */
WEFT_API const char *weft_mhc_preset_name(weft_mhc_preset preset);
/* WEFT_PRESET_COUNT where there is no preset of that name. */
WEFT_API weft_mhc_preset weft_mhc_preset_find(const char *name);

/* Dropout without stored masks [D1]: element (token, stream, channel) is kept where a Philox4x32-10 draw, a pure
 * function of seed, site, step, token_base + token and stream*C + channel, is at least p. Forward, backward and replay
 * draw the same mask for the same fields. p = 0 (the zero-initialised struct): no dropout. */
typedef struct weft_dropout {
    double p; /* in [0, 1); kept elements are scaled by 1/(1-p) */
    uint64_t seed;
    uint64_t site;        /* which call of the model: layer and sub-layer */
    const uint64_t *step; /* read when the operator runs, in the backend's memory; NULL = 0 */
    int64_t token_base;   /* global index of token 0, for shards of a batch: 0 to 2^62 */
    int32_t shared;       /* 1: one mask for all streams of a token */
    uint64_t reserved[6]; /* zero */
} weft_dropout;

/* ---- projection + mean square [M1] ------------------------------------------------------------------------------
 *     psi[j,i,c] = phi[j,i,c] * norm_weight[i,c]
 *     h[t,j]     = sum_{i,c} x[t,i,c] * psi[j,i,c]          ms[t] = sum_{i,c} x[t,i,c]^2 / (n*C)
 * The rms eps is applied by the gates, so one projection serves every preset. phi may have any number of rows R >= 1:
 * N here, n in the learned head.
 * Backward: dx = sum_j d_h[j] psi[j] + (2 d_ms / nC) x;  dpsi = sum_t d_h x;  d_phi = dpsi norm_weight;
 * d_norm_weight = sum_j dpsi[j] phi[j]. */
typedef struct weft_mhc_project_fwd_args {
    size_t struct_size;
    weft_tensor x, phi;
    weft_tensor norm_weight; /* [n, C], optional */
    weft_tensor h, ms;       /* out */
} weft_mhc_project_fwd_args;

typedef struct weft_mhc_project_bwd_args {
    size_t struct_size;
    weft_tensor x, phi;
    weft_tensor norm_weight;             /* optional, as in forward */
    weft_tensor d_h, d_ms;               /* upstream, optional */
    weft_grad d_x, d_phi, d_norm_weight; /* optional */
} weft_mhc_project_bwd_args;

WEFT_API weft_status weft_mhc_project_fwd(const weft_exec *exec, const weft_mhc_project_fwd_args *args);
WEFT_API weft_status weft_mhc_project_bwd(const weft_exec *exec, const weft_mhc_project_bwd_args *args);
WEFT_API weft_status weft_mhc_project_fwd_workspace(const weft_exec *exec, const weft_mhc_project_fwd_args *args,
                                                    size_t *bytes);
WEFT_API weft_status weft_mhc_project_bwd_workspace(const weft_exec *exec, const weft_mhc_project_bwd_args *args,
                                                    size_t *bytes);

/* ---- gates ("scale") [M2] -----------------------------------------------------------------------------------------
 *     inv = 1/sqrt(ms + rms_eps) or 1/(sqrt(ms) + rms_eps)
 *     z[j] = alpha[g] * h[j] * inv + beta[j]                g = 0 for pre, 1 for post, 2 for res
 *     pre = sigmoid(z[0..n)) + pre_eps;  post = post_mult * sigmoid(z[n..2n)) + post_eps;  logits = z[2n..)
 * With two scales there are no logits. Uses rms_eps, rms_eps_kind, pre_eps, post_mult and post_eps of numerics. */
typedef struct weft_mhc_scale_fwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_tensor h, ms;
    weft_tensor alpha, beta; /* [S], [N] */
    weft_tensor pre, post;   /* out, [T, n] each */
    weft_tensor logits;      /* out, optional, [T, n, n] */
} weft_mhc_scale_fwd_args;

typedef struct weft_mhc_scale_bwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_tensor h, ms, alpha, beta;
    weft_tensor d_pre, d_post, d_logits;  /* upstream, optional */
    weft_grad d_h, d_ms, d_alpha, d_beta; /* optional */
} weft_mhc_scale_bwd_args;

WEFT_API weft_status weft_mhc_scale_fwd(const weft_exec *exec, const weft_mhc_scale_fwd_args *args);
WEFT_API weft_status weft_mhc_scale_bwd(const weft_exec *exec, const weft_mhc_scale_bwd_args *args);
WEFT_API weft_status weft_mhc_scale_fwd_workspace(const weft_exec *exec, const weft_mhc_scale_fwd_args *args,
                                                  size_t *bytes);
WEFT_API weft_status weft_mhc_scale_bwd_workspace(const weft_exec *exec, const weft_mhc_scale_bwd_args *args,
                                                  size_t *bytes);

/* ---- Sinkhorn [M3] --------------------------------------------------------------------------------------------------
 *     res = sinkhorn(logits)      one n x n matrix per token; uses sinkhorn, sinkhorn_eps, sinkhorn_iters of numerics
 * Backward recomputes the iterations from the logits and is exact for every rule, including the dependence on the row
 * maximum where a rule is not invariant to it (equal maxima share that term evenly).
 * In place: res over logits; d_logits over d_res. */
typedef struct weft_mhc_sinkhorn_fwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_tensor logits;
    weft_tensor res; /* out */
} weft_mhc_sinkhorn_fwd_args;

typedef struct weft_mhc_sinkhorn_bwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_tensor logits;
    weft_tensor d_res; /* upstream */
    weft_grad d_logits;
} weft_mhc_sinkhorn_bwd_args;

WEFT_API weft_status weft_mhc_sinkhorn_fwd(const weft_exec *exec, const weft_mhc_sinkhorn_fwd_args *args);
WEFT_API weft_status weft_mhc_sinkhorn_bwd(const weft_exec *exec, const weft_mhc_sinkhorn_bwd_args *args);
WEFT_API weft_status weft_mhc_sinkhorn_fwd_workspace(const weft_exec *exec, const weft_mhc_sinkhorn_fwd_args *args,
                                                     size_t *bytes);
WEFT_API weft_status weft_mhc_sinkhorn_bwd_workspace(const weft_exec *exec, const weft_mhc_sinkhorn_bwd_args *args,
                                                     size_t *bytes);

/* ---- coefficients: gates + Sinkhorn in one call [M4]; with two scales the gates alone ----------------------------------- */
typedef struct weft_mhc_coef_fwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_tensor h, ms, alpha, beta;
    weft_tensor pre, post, res; /* out, optional */
} weft_mhc_coef_fwd_args;

typedef struct weft_mhc_coef_bwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_tensor h, ms, alpha, beta;
    weft_tensor d_pre, d_post, d_res;     /* upstream, optional */
    weft_grad d_h, d_ms, d_alpha, d_beta; /* optional */
} weft_mhc_coef_bwd_args;

WEFT_API weft_status weft_mhc_coef_fwd(const weft_exec *exec, const weft_mhc_coef_fwd_args *args);
WEFT_API weft_status weft_mhc_coef_bwd(const weft_exec *exec, const weft_mhc_coef_bwd_args *args);
WEFT_API weft_status weft_mhc_coef_fwd_workspace(const weft_exec *exec, const weft_mhc_coef_fwd_args *args,
                                                 size_t *bytes);
WEFT_API weft_status weft_mhc_coef_bwd_workspace(const weft_exec *exec, const weft_mhc_coef_bwd_args *args,
                                                 size_t *bytes);

/* ---- aggregate n -> 1 [M5] ------------------------------------------------------------------------------------------
 *     u[t,c] = sum_i pre[t,i] x[t,i,c]
 * Backward: d_x[i,c] = pre[i] d_u[c];  d_pre[i] = sum_c d_u[c] x[i,c]. */
typedef struct weft_mhc_aggregate_fwd_args {
    size_t struct_size;
    weft_tensor x, pre;
    weft_tensor u; /* out */
} weft_mhc_aggregate_fwd_args;

typedef struct weft_mhc_aggregate_bwd_args {
    size_t struct_size;
    weft_tensor x, pre;
    weft_tensor d_u;      /* upstream */
    weft_grad d_x, d_pre; /* optional */
} weft_mhc_aggregate_bwd_args;

WEFT_API weft_status weft_mhc_aggregate_fwd(const weft_exec *exec, const weft_mhc_aggregate_fwd_args *args);
WEFT_API weft_status weft_mhc_aggregate_bwd(const weft_exec *exec, const weft_mhc_aggregate_bwd_args *args);
WEFT_API weft_status weft_mhc_aggregate_fwd_workspace(const weft_exec *exec,
                                                      const weft_mhc_aggregate_fwd_args *args, size_t *bytes);
WEFT_API weft_status weft_mhc_aggregate_bwd_workspace(const weft_exec *exec,
                                                      const weft_mhc_aggregate_bwd_args *args, size_t *bytes);

/* ---- post: expand the sub-layer's output and mix the streams [M6] ---------------------------------------------------
 *     y[o,c] = D[o,c] post[o] (f[c] + bias[c]) + sum_i W(i,o) x[i,c]      W = res[i,o] (in_out) or res[o,i] (out_in)
 *                                              + x[o,c]                   without res
 * D is the dropout factor, 0 or 1/(1-p). Uses apply of numerics. Without res no stream meets another, so what is not finite in
 * one stays there.
 * Backward: d_f = sum_o d_y D post;  d_bias = sum_t d_f, summed in fp32 from the unrounded d_f;
 * d_post[o] = sum_c d_y D (f + bias);  d_x[i] = sum_o W(i,o) d_y[o];  d_res from sum_c x[i,c] d_y[o,c].
 * In place: y over x; d_x over d_y. */
typedef struct weft_mhc_post_fwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_dropout dropout;
    weft_tensor x, f;
    weft_tensor bias; /* [C], optional */
    weft_tensor post;
    weft_tensor res; /* optional: the identity */
    weft_tensor y;   /* out */
} weft_mhc_post_fwd_args;

typedef struct weft_mhc_post_bwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_dropout dropout;
    weft_tensor x, f;
    weft_tensor bias; /* optional, as in forward */
    weft_tensor post;
    weft_tensor res;                           /* optional, as in forward */
    weft_tensor d_y;                           /* upstream, activation type or f32 */
    weft_grad d_x, d_f, d_bias, d_post, d_res; /* optional; d_res needs res */
} weft_mhc_post_bwd_args;

WEFT_API weft_status weft_mhc_post_fwd(const weft_exec *exec, const weft_mhc_post_fwd_args *args);
WEFT_API weft_status weft_mhc_post_bwd(const weft_exec *exec, const weft_mhc_post_bwd_args *args);
WEFT_API weft_status weft_mhc_post_fwd_workspace(const weft_exec *exec, const weft_mhc_post_fwd_args *args,
                                                 size_t *bytes);
WEFT_API weft_status weft_mhc_post_bwd_workspace(const weft_exec *exec, const weft_mhc_post_bwd_args *args,
                                                 size_t *bytes);

/* ---- expand 1 -> n [M7]: x[t,i,c] = u[t,c]; backward d_u[c] = sum_i d_x[i,c] ---------------------------------------- */
typedef struct weft_mhc_expand_fwd_args {
    size_t struct_size;
    weft_tensor u;
    weft_tensor x; /* out */
} weft_mhc_expand_fwd_args;

typedef struct weft_mhc_expand_bwd_args {
    size_t struct_size;
    weft_tensor d_x; /* upstream, activation type or f32 */
    weft_grad d_u;
} weft_mhc_expand_bwd_args;

WEFT_API weft_status weft_mhc_expand_fwd(const weft_exec *exec, const weft_mhc_expand_fwd_args *args);
WEFT_API weft_status weft_mhc_expand_bwd(const weft_exec *exec, const weft_mhc_expand_bwd_args *args);
WEFT_API weft_status weft_mhc_expand_fwd_workspace(const weft_exec *exec, const weft_mhc_expand_fwd_args *args,
                                                   size_t *bytes);
WEFT_API weft_status weft_mhc_expand_bwd_workspace(const weft_exec *exec, const weft_mhc_expand_bwd_args *args,
                                                   size_t *bytes);

/* ---- contract n -> 1 [M8]: u[t,c] = s sum_i x[t,i,c], s = 1/n (mean) or 1 (sum); backward d_x[i,c] = s d_u[c] -------- */
typedef struct weft_mhc_contract_fwd_args {
    size_t struct_size;
    weft_contract kind;
    weft_tensor x;
    weft_tensor u; /* out */
} weft_mhc_contract_fwd_args;

typedef struct weft_mhc_contract_bwd_args {
    size_t struct_size;
    weft_contract kind;
    weft_tensor d_u; /* upstream */
    weft_grad d_x;
} weft_mhc_contract_bwd_args;

WEFT_API weft_status weft_mhc_contract_fwd(const weft_exec *exec, const weft_mhc_contract_fwd_args *args);
WEFT_API weft_status weft_mhc_contract_bwd(const weft_exec *exec, const weft_mhc_contract_bwd_args *args);
WEFT_API weft_status weft_mhc_contract_fwd_workspace(const weft_exec *exec, const weft_mhc_contract_fwd_args *args,
                                                     size_t *bytes);
WEFT_API weft_status weft_mhc_contract_bwd_workspace(const weft_exec *exec, const weft_mhc_contract_bwd_args *args,
                                                     size_t *bytes);

/* ---- learned head contraction n -> 1 [M9] ---------------------------------------------------------------------------
 *     h[j] = <x, psi[j]>, j < n;  inv from ms and rms_eps;  gate[j] = sigmoid(alpha h[j] inv + beta[j]) + pre_eps
 *     u[c] = sum_j gate[j] x[j,c]
 * x is only read: the n-stream tensor stays the caller's, for multi-token prediction for example. The head's eps are
 * its own. Backward needs h and ms from forward. */
typedef struct weft_mhc_head_fwd_args {
    size_t struct_size;
    double rms_eps;
    weft_eps_kind rms_eps_kind;
    double pre_eps;
    weft_tensor x;
    weft_tensor phi;         /* [n, n, C] */
    weft_tensor norm_weight; /* [n, C], optional */
    weft_tensor alpha, beta; /* [1], [n] */
    weft_tensor u;           /* out */
    weft_tensor h, ms;       /* out, optional: [T, n], [T] */
} weft_mhc_head_fwd_args;

typedef struct weft_mhc_head_bwd_args {
    size_t struct_size;
    double rms_eps;
    weft_eps_kind rms_eps_kind;
    double pre_eps;
    weft_tensor x, phi;
    weft_tensor norm_weight; /* optional, as in forward */
    weft_tensor alpha, beta, h, ms;
    weft_tensor d_u;                                      /* upstream */
    weft_grad d_x, d_phi, d_norm_weight, d_alpha, d_beta; /* optional */
} weft_mhc_head_bwd_args;

WEFT_API weft_status weft_mhc_head_fwd(const weft_exec *exec, const weft_mhc_head_fwd_args *args);
WEFT_API weft_status weft_mhc_head_bwd(const weft_exec *exec, const weft_mhc_head_bwd_args *args);
WEFT_API weft_status weft_mhc_head_fwd_workspace(const weft_exec *exec, const weft_mhc_head_fwd_args *args,
                                                 size_t *bytes);
WEFT_API weft_status weft_mhc_head_bwd_workspace(const weft_exec *exec, const weft_mhc_head_bwd_args *args,
                                                 size_t *bytes);

/* ---- pre: everything in front of a sub-layer in one call [M10] ------------------------------------------------------
 *     (h, ms) = project(x);  (pre, post, res) = coef(h, ms)
 *     u = aggregate(x, pre_in where present, else pre);  v = rmsnorm(u, sub_weight, sub_eps) where v is requested
 * v is computed from the rounded u. pre_in makes the shifted form (mhc_single_pass): u uses the coefficients that the
 * previous site predicted (one-hot on stream 0 at the first site; a token stride of 0 is fine). With two scales there is no res.
 * Backward takes h and ms from forward and recomputes the rest; du = d_u + the norm's part stays in fp32, and so does
 * the sum of the aggregate's and the projection's part of d_x. */
typedef struct weft_mhc_pre_fwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    double sub_eps;
    weft_tensor x, phi;
    weft_tensor norm_weight; /* [n, C], optional */
    weft_tensor alpha, beta;
    weft_tensor pre_in;         /* [T, n], optional */
    weft_tensor sub_weight;     /* [C], optional: gain of the sub-layer's RMSNorm */
    weft_tensor h, ms;          /* out, optional */
    weft_tensor pre, post, res; /* out, optional */
    weft_tensor u, v;           /* out, optional */
} weft_mhc_pre_fwd_args;

typedef struct weft_mhc_pre_bwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    double sub_eps;
    weft_tensor x, phi;
    weft_tensor norm_weight, pre_in, sub_weight; /* optional, as in forward */
    weft_tensor alpha, beta, h, ms;
    weft_tensor d_u, d_v, d_pre, d_post, d_res; /* upstream, optional; d_u, d_v activation type or f32 */
    weft_grad d_x, d_phi, d_norm_weight, d_alpha, d_beta, d_pre_in, d_sub_weight; /* optional */
} weft_mhc_pre_bwd_args;

WEFT_API weft_status weft_mhc_pre_fwd(const weft_exec *exec, const weft_mhc_pre_fwd_args *args);
WEFT_API weft_status weft_mhc_pre_bwd(const weft_exec *exec, const weft_mhc_pre_bwd_args *args);
WEFT_API weft_status weft_mhc_pre_fwd_workspace(const weft_exec *exec, const weft_mhc_pre_fwd_args *args,
                                                size_t *bytes);
WEFT_API weft_status weft_mhc_pre_bwd_workspace(const weft_exec *exec, const weft_mhc_pre_bwd_args *args,
                                                size_t *bytes);

/* ---- boundary: post of one sub-layer and pre of the next in one call [M11] ------------------------------------------
 *     y = post(x, f, bias, post, res, dropout)
 *     (h, ms, pre_out, post_out, res_out, u, v) = pre(y, ...)     with pre_in: the shifted form, as in pre
 * The projection and the aggregate see y as it is stored, rounded, so boundary equals post followed by pre.
 * Backward: dy = d_y + the aggregate's and the projection's parts, kept in fp32; then post's backward of dy. Where y is
 * absent it is rebuilt from x and f; where it is given it must be what forward left there, and a backend may rebuild it
 * all the same. */
typedef struct weft_mhc_boundary_fwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_dropout dropout;
    double sub_eps;
    weft_tensor x, f;
    weft_tensor bias; /* [C], optional */
    weft_tensor post;
    weft_tensor res;         /* optional: the identity */
    weft_tensor phi;         /* of the next site, as all that follows */
    weft_tensor norm_weight; /* optional */
    weft_tensor alpha, beta;
    weft_tensor pre_in, sub_weight;               /* optional */
    weft_tensor y;                                /* out */
    weft_tensor h, ms;                            /* out, optional */
    weft_tensor pre_out, post_out, res_out, u, v; /* out, optional */
} weft_mhc_boundary_fwd_args;

typedef struct weft_mhc_boundary_bwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_dropout dropout;
    double sub_eps;
    weft_tensor x, f;
    weft_tensor bias; /* optional, as in forward */
    weft_tensor post;
    weft_tensor res; /* optional, as in forward */
    weft_tensor y;   /* optional: rebuilt where absent */
    weft_tensor phi;
    weft_tensor norm_weight, pre_in, sub_weight; /* optional, as in forward */
    weft_tensor alpha, beta, h, ms;
    weft_tensor d_y, d_u, d_v, d_pre_out, d_post_out, d_res_out;             /* upstream, optional */
    weft_grad d_x, d_f, d_bias, d_post, d_res;                               /* optional; d_res needs res */
    weft_grad d_phi, d_norm_weight, d_alpha, d_beta, d_pre_in, d_sub_weight; /* optional */
} weft_mhc_boundary_bwd_args;

WEFT_API weft_status weft_mhc_boundary_fwd(const weft_exec *exec, const weft_mhc_boundary_fwd_args *args);
WEFT_API weft_status weft_mhc_boundary_bwd(const weft_exec *exec, const weft_mhc_boundary_bwd_args *args);
WEFT_API weft_status weft_mhc_boundary_fwd_workspace(const weft_exec *exec, const weft_mhc_boundary_fwd_args *args,
                                                     size_t *bytes);
WEFT_API weft_status weft_mhc_boundary_bwd_workspace(const weft_exec *exec, const weft_mhc_boundary_bwd_args *args,
                                                     size_t *bytes);

/* ---- replay: rebuild several layers from the first stream tensor [M12] ----------------------------------------------
 * For l = 0 .. num_layers-1, with x_0 = x:
 *     u_l = aggregate(x_l, pre_l);  v_l = rmsnorm(u_l);  x_{l+1} = y_l = post(x_l, f_l, bias_l, post_l, res_l, dropout_l)
 * Bit-identical to the chain of single operators. Forward only. A layer without res takes the identity. The last layer may
 * lack f, post, res and y: then it ends with u. An output that is not requested is absent; a y that is absent is carried on in
 * fast memory, rounded as if stored.
 * weft/ops.h lists the tensors of the args struct itself; those of a layer are listed by weft_mhc_replay_layer_info. */
typedef struct weft_mhc_replay_layer {
    size_t struct_size;
    weft_dropout dropout;
    double sub_eps;
    weft_tensor pre;                /* optional where neither u nor v is requested */
    weft_tensor f, bias, post, res; /* f, post optional on the last layer; bias, res optional */
    weft_tensor sub_weight;         /* optional */
    weft_tensor u, v, y;            /* out, optional */
} weft_mhc_replay_layer;

typedef struct weft_mhc_replay_fwd_args {
    size_t struct_size;
    weft_mhc_numerics numerics;
    weft_tensor x;
    /* Host memory, read during the call only. An array whose elements lie layers[0].struct_size bytes apart and all have that
     * size: the array of a caller that was compiled with another version is one as well. */
    const weft_mhc_replay_layer *layers;
    int32_t num_layers; /* 1 .. 4096 */
} weft_mhc_replay_fwd_args;

WEFT_API weft_status weft_mhc_replay_fwd(const weft_exec *exec, const weft_mhc_replay_fwd_args *args);
WEFT_API weft_status weft_mhc_replay_fwd_workspace(const weft_exec *exec, const weft_mhc_replay_fwd_args *args,
                                                   size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
