/* SPDX-License-Identifier: Apache-2.0
 *
 * RMSNorm of a C-wide row: the norm between the aggregate and a sub-layer, so that the fused operators of weft/mhc.h
 * and their unfused chains have the same parts. Conventions as in weft/mhc.h. */
#ifndef WEFT_NORM_H
#define WEFT_NORM_H

#include <weft/weft.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- RMSNorm [N1] ---------------------------------------------------------------------------------------------------
 *     r = 1/sqrt(mean_c u[c]^2 + eps);   v[c] = u[c] r weight[c]          u, v [T, C]; weight [C], optional (1)
 * Backward: g = d_v weight;  d_u[c] = r (g[c] - u[c] r^2 mean_c(g u));  d_weight[c] = sum_t d_v u r.
 * In place: v over u. */
typedef struct weft_rmsnorm_fwd_args {
    size_t struct_size;
    double eps;
    weft_tensor u;
    weft_tensor weight; /* optional */
    weft_tensor v;      /* out */
} weft_rmsnorm_fwd_args;

typedef struct weft_rmsnorm_bwd_args {
    size_t struct_size;
    double eps;
    weft_tensor u;
    weft_tensor weight;      /* optional, as in forward */
    weft_tensor d_v;         /* upstream, activation type or f32 */
    weft_grad d_u, d_weight; /* optional */
} weft_rmsnorm_bwd_args;

WEFT_API weft_status weft_rmsnorm_fwd(const weft_exec *exec, const weft_rmsnorm_fwd_args *args);
WEFT_API weft_status weft_rmsnorm_bwd(const weft_exec *exec, const weft_rmsnorm_bwd_args *args);
WEFT_API weft_status weft_rmsnorm_fwd_workspace(const weft_exec *exec, const weft_rmsnorm_fwd_args *args,
                                                size_t *bytes);
WEFT_API weft_status weft_rmsnorm_bwd_workspace(const weft_exec *exec, const weft_rmsnorm_bwd_args *args,
                                                size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
