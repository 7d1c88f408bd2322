/* SPDX-License-Identifier: Apache-2.0
 *
 * Gated DeltaNet: what stands between the input projection of a layer and the gated delta rule (causal convolution,
 * silu, l2 norm, gates), the rule itself, and the gated norm behind it. Equations with their tags are in docs/reference/math.md.
 *
 * Names: B sequences of S tokens each, or B = 1 and cu_seqlens, which cuts the S tokens into N sequences; Hk key heads of
 * Dk, Hv value heads of Dv, Hv a multiple of Hk; W taps of the convolution; C = 2 Hk Dk + Hv Dv channels that pass through
 * it, in the order q, k, v; L slots of a convolution state, at least W - 1.
 *
 * Layouts are strides. [B, S, H, D] may lie in memory in the order (S, B, H, D) as well, and the six sections of one
 * projection row are six views of it (weft_gdn_sections), or six tensors of their own.
 *
 * Promises, each to the bit: a result depends neither on threads nor on the other sequences of the call; dense sequences
 * and the same ones packed agree, parameter gradients included, as do the two memory orders; a sequence in pieces, with
 * the state carried from one to the next, or token by token through gdn_pre_step, agrees with the whole. Where gdn_rule works in
 * chunks, pieces end where chunks do.
 *
 * cu_seqlens and state_index are in the backend's memory. On the host their values are checked, and a call with bad ones
 * is rejected. A device does not read them before the kernel runs. It takes offsets that pass the end as if they were clamped to
 * what is there, the first as 0, and as padding a request whose row the cache does not have or another request of the call names too:
 * results of zero, no state touched, all other requests as if it were not there. Offsets that decrease make sequences overlap:
 * their results are undefined, nothing outside the tensors is touched. A debug build of the library prints such offsets
 * and rows from the device. */
#ifndef WEFT_GDN_H
#define WEFT_GDN_H

#include <weft/weft.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_GDN_MAX_WIDTH 8
#define WEFT_GDN_MAX_DIM 1024
#define WEFT_GDN_MAX_HEADS 4096
#define WEFT_GDN_MAX_CHUNK 4096

typedef enum weft_gdn_activation { WEFT_GDN_SILU = 0, WEFT_GDN_LINEAR } weft_gdn_activation;

/* Which key head a value head reads, R = Hv / Hk: hv / R (as repeat_interleave does), or hv mod Hk. */
typedef enum weft_gdn_head_map { WEFT_GDN_INTERLEAVED = 0, WEFT_GDN_TILED } weft_gdn_head_map;

/* Where intermediate results are rounded to the activation type. WEFT_GDN_PARITY is for finding out why another
 * implementation differs: it rounds silu's output in front of the norm, exp(a_log) to the type of a_log, and in backward
 * the sum over a group's heads, the gradient between norm and convolution and the argument of silu'. */
typedef enum weft_gdn_rounding { WEFT_GDN_THROUGH = 0, WEFT_GDN_PARITY } weft_gdn_rounding;

/* Begin with weft_gdn_defaults(): a q_scale or beta_scale of 0 is rejected. Backward takes the same struct. */
typedef struct weft_gdn_options {
    weft_gdn_activation activation;
    int32_t l2norm; /* 0 or 1: query and key to unit length */
    double l2_eps;  /* inside the root */
    double q_scale, beta_scale;
    weft_gdn_head_map head_map;
    weft_gdn_rounding rounding;
    int32_t g_chunk; /* 0: g per token; else the inclusive sum of g within chunks of so many tokens of a sequence */
    int32_t g_log2;  /* 0 or 1: g in base 2, that is times 1/ln 2 */
    uint64_t reserved[6]; /* zero */
} weft_gdn_options;

/* silu, l2 norm with eps 1e-6, scales 1, interleaved heads, g per token in natural logarithms. */
static inline weft_gdn_options weft_gdn_defaults(void)
{
    weft_gdn_options o;
    o.activation = WEFT_GDN_SILU;
    o.l2norm = 1;
    o.l2_eps = 1e-6;
    o.q_scale = o.beta_scale = 1;
    o.head_map = WEFT_GDN_INTERLEAVED;
    o.rounding = WEFT_GDN_THROUGH;
    o.g_chunk = o.g_log2 = 0;
    for (int i = 0; i < 6; i++) o.reserved[i] = 0;
    return o;
}

/* ---- in front of the rule [G1] [G2] [G3] [G4] -----------------------------------------------------------------------
 * Per token t of a sequence, x(t) the channels of q, k, v, before its first token those of state, or zero:
 *     u[c] = bias[c] + sum_j weight[c,j] x(t-(W-1)+j)[c];     y = silu(u)
 *     query[h] = q_scale y_q[m(h)] / sqrt(sum y_q[m(h)]^2 + eps), m the head map;     key without the scale
 *     value = y_v;     gate = z;     beta = beta_scale sigmoid(b);     g = -exp(a_log) softplus(a + dt_bias)
 * query and key have Hv heads (repeated) or Hk: their shapes say which. final_state[n] = the last L rows x of a sequence,
 * older rows sliding in from state. Rows past the last offset of cu_seqlens are written as zero.
 * In place: final_state over state. */
typedef struct weft_gdn_pre_fwd_args {
    size_t struct_size;
    weft_gdn_options options;
    weft_tensor q, k;        /* [B, S, Hk, Dk] */
    weft_tensor v;           /* [B, S, Hv, Dv] */
    weft_tensor z;           /* [B, S, Hv, Dv], optional: only gate reads it */
    weft_tensor b, a;        /* [B, S, Hv] */
    weft_tensor weight;      /* [C, W], W from 1 to 8 */
    weft_tensor bias;        /* [C], optional (0) */
    weft_tensor a_log;       /* [Hv] */
    weft_tensor dt_bias;     /* [Hv], optional (0) */
    weft_tensor cu_seqlens;  /* [N + 1] i32 or i64, optional: 0 first, not decreasing, at most S; needs B = 1 */
    weft_tensor state;       /* [N, C, L], optional; activation type or f32. N = B without cu_seqlens */
    weft_tensor query, key;  /* out [B, S, Hk or Hv, Dk] */
    weft_tensor value;       /* out [B, S, Hv, Dv] */
    weft_tensor gate;        /* out [B, S, Hv, Dv], optional: without it the caller uses z itself */
    weft_tensor beta;        /* out [B, S, Hv], activation type or f32 */
    weft_tensor g;           /* out [B, S, Hv], f32 */
    weft_tensor final_state; /* out [N, C, L], optional */
} weft_gdn_pre_fwd_args;

/* Backward recomputes what forward computed; nothing but the projection is kept. Absent upstream gradients are zero.
 * d_query and d_key have Hk or Hv heads, whatever forward had: those of a group are summed. */
typedef struct weft_gdn_pre_bwd_args {
    size_t struct_size;
    weft_gdn_options options;
    weft_tensor q, k, v, b, a; /* as in forward */
    weft_tensor weight, bias, a_log, dt_bias, cu_seqlens, state;
    weft_tensor d_query, d_key, d_value, d_gate, d_beta; /* upstream, optional; activation type or f32 */
    weft_tensor d_g;                                     /* optional, f32 */
    weft_tensor d_final_state;                           /* optional */
    weft_grad d_q, d_k, d_v, d_z, d_b, d_a;              /* optional, all of them, here and below */
    weft_grad d_weight, d_bias, d_a_log, d_dt_bias;
    weft_grad d_state; /* zero where a sequence is so long that its state no longer matters */
} weft_gdn_pre_bwd_args;

/* Decoding: forward of S new tokens for each of B requests (or N of them, with cu_seqlens), whose states are rows of a
 * cache. new_state receives the states after the last token, in the same rows; other rows keep what they have. A request
 * with index -1 is padding: its outputs are zero and no state is touched. No row may be named twice: an error
 * on the host, and on a device all requests that name it are padding.
 * In place: new_state over state, which is the usual way. */
typedef struct weft_gdn_pre_step_args {
    size_t struct_size;
    weft_gdn_options options;
    weft_tensor q, k, v, z, b, a; /* as in forward */
    weft_tensor weight, bias, a_log, dt_bias, cu_seqlens;
    weft_tensor state_index; /* [N] i32 or i64, optional: request n has row n */
    weft_tensor state;       /* [rows, C, L] */
    weft_tensor query, key, value, gate, beta, g;
    weft_tensor new_state; /* out [rows, C, L] */
} weft_gdn_pre_step_args;

WEFT_API weft_status weft_gdn_pre_fwd(const weft_exec *exec, const weft_gdn_pre_fwd_args *args);
WEFT_API weft_status weft_gdn_pre_bwd(const weft_exec *exec, const weft_gdn_pre_bwd_args *args);
WEFT_API weft_status weft_gdn_pre_step(const weft_exec *exec, const weft_gdn_pre_step_args *args);
WEFT_API weft_status weft_gdn_pre_fwd_workspace(const weft_exec *exec, const weft_gdn_pre_fwd_args *args,
                                                size_t *bytes);
WEFT_API weft_status weft_gdn_pre_bwd_workspace(const weft_exec *exec, const weft_gdn_pre_bwd_args *args,
                                                size_t *bytes);
WEFT_API weft_status weft_gdn_pre_step_workspace(const weft_exec *exec, const weft_gdn_pre_step_args *args,
                                                 size_t *bytes);

/* ---- the gated delta rule [G5] [G6] ---------------------------------------------------------------------------------
 * Per sequence and value head, with M [Dk, Dv] = state, or zero, in front of the first token:
 *     M <- exp(g_t) M;     d = beta_t (v_t - M^T k_t);     M <- M + k_t d^T;     o_t = scale M^T q_t
 * query and key have as many heads as value, or a number that divides it. g is per token, in natural logarithms.
 * Rows past the last offset of cu_seqlens are zero.
 *
 * On CUDA bf16 with Dk of 64 or 128 and Dv of 64, 128, 192 or 256 is computed in chunks of WEFT_GDN_RULE_CHUNK tokens of a
 * sequence, on tensor cores; backward too, where d_o is bf16 and, for Dk of 128, a block may have 132 KiB of shared memory. All else
 * is computed token after token in fp32, and is slow; weft_op_path says which and why. Layout, length and addresses do not
 * decide. In chunks, pieces of a sequence agree with the whole where each but the last has a multiple of so many tokens, and
 * a NaN or infinity of a token reaches all tokens of its chunk and those behind it. */
#define WEFT_GDN_RULE_CHUNK 64

typedef struct weft_gdn_rule_fwd_args {
    size_t struct_size;
    double scale; /* usually 1/sqrt(Dk) */
    weft_gdn_head_map head_map;
    /* 0: token after token. Else in chunks of so many tokens, which is the same function: the reference computes it as it
     * is told, to show that the two forms agree; other backends ignore it. */
    int32_t chunk;
    weft_tensor query, key;  /* [B, S, H, Dk] */
    weft_tensor value;       /* [B, S, Hv, Dv] */
    weft_tensor beta;        /* [B, S, Hv], activation type or f32 */
    weft_tensor g;           /* [B, S, Hv], f32 */
    weft_tensor cu_seqlens;  /* [N + 1], optional, as above */
    weft_tensor state;       /* [N, Hv, Dk, Dv], optional, f32 */
    weft_tensor o;           /* out [B, S, Hv, Dv] */
    weft_tensor final_state; /* out [N, Hv, Dk, Dv], optional, f32 */
} weft_gdn_rule_fwd_args;

/* Nothing is kept of forward: backward makes the states again, in workspace. On CUDA in chunks that is, per value head and
 * 64 tokens, 25.25 KiB + Dv (4 Dk + 256) bytes, 121.25 KiB at heads of 128. */
typedef struct weft_gdn_rule_bwd_args {
    size_t struct_size;
    double scale;
    weft_gdn_head_map head_map;
    int32_t chunk;
    weft_tensor query, key, value, beta, g, cu_seqlens, state; /* as in forward */
    weft_tensor d_o;                                           /* upstream, activation type or f32 */
    weft_tensor d_final_state;                                 /* optional */
    weft_grad d_query, d_key, d_value, d_beta, d_g, d_state;   /* optional; shapes of what they are gradients of */
} weft_gdn_rule_bwd_args;

/* Decoding: forward of S new tokens, usually one to eight, for each of B requests (or N of them, with cu_seqlens), whose states are
 * rows of a cache, as those of gdn_pre_step are. The state is carried in fp32 between the tokens of a call and rounded where it is
 * stored. A cache whose rows are [Hv, Dv, Dk] in memory is passed with those strides; the bits are the same.
 *     new_state receives the states after the last token, in the same rows; other rows keep what they have.
 *     token_state receives the state after every token: for speculative decoding, where only some of the tokens will be accepted. In
 * memory it is [B, S, Hv, Dk, Dv]; S and Hv are one dimension of the tensor. Without new_state the cache stays as it is, and the
 * caller copies the accepted one into its row.
 * A request with index -1 is padding: its results are zero, token_state included, and no state is touched; and so it is on a
 * device with requests whose row the cache does not have or another one names too. On the host these are errors.
 * In place: new_state over state, which is the usual way. */
typedef struct weft_gdn_rule_step_args {
    size_t struct_size;
    double scale;
    weft_gdn_head_map head_map;
    weft_tensor query, key, value, beta, g, cu_seqlens; /* as in forward */
    weft_tensor state_index;                            /* [N] i32 or i64, optional: request n has row n */
    weft_tensor state;       /* [rows, Hv, Dk, Dv], activation type or f32, here and below */
    weft_tensor o;           /* out [B, S, Hv, Dv] */
    weft_tensor new_state;   /* out [rows, Hv, Dk, Dv], optional */
    weft_tensor token_state; /* out [B, S Hv, Dk, Dv], optional */
} weft_gdn_rule_step_args;

WEFT_API weft_status weft_gdn_rule_fwd(const weft_exec *exec, const weft_gdn_rule_fwd_args *args);
WEFT_API weft_status weft_gdn_rule_bwd(const weft_exec *exec, const weft_gdn_rule_bwd_args *args);
WEFT_API weft_status weft_gdn_rule_step(const weft_exec *exec, const weft_gdn_rule_step_args *args);
WEFT_API weft_status weft_gdn_rule_step_workspace(const weft_exec *exec, const weft_gdn_rule_step_args *args,
                                                  size_t *bytes);
WEFT_API weft_status weft_gdn_rule_fwd_workspace(const weft_exec *exec, const weft_gdn_rule_fwd_args *args,
                                                 size_t *bytes);
WEFT_API weft_status weft_gdn_rule_bwd_workspace(const weft_exec *exec, const weft_gdn_rule_bwd_args *args,
                                                 size_t *bytes);

/* ---- the gated norm behind the rule [G7] ----------------------------------------------------------------------------
 * Per row of C channels, a head of a token, in fp32 with one rounding at the end:
 *     r = 1/sqrt(mean_c o[c]^2 + eps);     y[c] = o[c] r weight[c] f(z[c]),     f(z) = z sigmoid(z), or sigmoid(z)
 * Backward: p = d_y f(z);  d_z = d_y o r weight f'(z);  d_weight[c] = sum over rows of p o r;
 *     g = p weight;  d_o[c] = r (g[c] - o[c] r^2 mean_c(g o)).
 * z may be a view of the projection's rows, d_z one of the rows of its gradient. In place: y over o. */
typedef enum weft_gdn_gate { WEFT_GDN_GATE_SILU = 0, WEFT_GDN_GATE_SIGMOID } weft_gdn_gate;

typedef struct weft_gdn_norm_fwd_args {
    size_t struct_size;
    double eps; /* inside the root */
    weft_gdn_gate gate;
    weft_tensor o, z;   /* [B, S, H, C] */
    weft_tensor weight; /* [C], optional (1) */
    weft_tensor y;      /* out, [B, S, H, C] */
} weft_gdn_norm_fwd_args;

typedef struct weft_gdn_norm_bwd_args {
    size_t struct_size;
    double eps;
    weft_gdn_gate gate;
    weft_tensor o, z, weight;     /* as in forward */
    weft_tensor d_y;              /* upstream, activation type or f32 */
    weft_grad d_o, d_z, d_weight; /* optional; d_weight needs weight */
} weft_gdn_norm_bwd_args;

WEFT_API weft_status weft_gdn_norm_fwd(const weft_exec *exec, const weft_gdn_norm_fwd_args *args);
WEFT_API weft_status weft_gdn_norm_bwd(const weft_exec *exec, const weft_gdn_norm_bwd_args *args);
WEFT_API weft_status weft_gdn_norm_fwd_workspace(const weft_exec *exec, const weft_gdn_norm_fwd_args *args,
                                                 size_t *bytes);
WEFT_API weft_status weft_gdn_norm_bwd_workspace(const weft_exec *exec, const weft_gdn_norm_bwd_args *args,
                                                 size_t *bytes);

/* ---- views ------------------------------------------------------------------------------------------------------------ */

/* Frozen. */
typedef struct weft_gdn_sections {
    weft_tensor q, k, v, z, b, a;
} weft_gdn_sections;

/* The six sections of projection rows [B, S, P] whose columns are q | k | v | z | b | a, P = 2 Hk Dk + 2 Hv Dv + 2 Hv; with
 * the rows of d_proj, the six gradients. A packed [T, P] is [1, T, P]. The columns must lie side by side. */
static inline weft_gdn_sections weft_gdn_split(const weft_tensor *proj, int64_t key_heads, int64_t key_dim,
                                               int64_t value_heads, int64_t value_dim)
{
    weft_gdn_sections s;
    weft_tensor *const to[6] = {&s.q, &s.k, &s.v, &s.z, &s.b, &s.a};
    int64_t column = 0;
    for (int i = 0; i < 6; i++) {
        int64_t heads = i < 2 ? key_heads : value_heads, dim = i < 2 ? key_dim : i < 4 ? value_dim : 1;
        *to[i] = *proj;
        to[i]->data = (char *)proj->data + column * (int64_t)weft_dtype_size(proj->dtype);
        to[i]->ndim = i < 4 ? 4 : 3;
        to[i]->shape[2] = heads;
        to[i]->stride[2] = dim;
        to[i]->shape[3] = i < 4 ? dim : 0;
        to[i]->stride[3] = i < 4 ? 1 : 0;
        column += heads * dim;
    }
    return s;
}

#ifdef __cplusplus
}
#endif
#endif
