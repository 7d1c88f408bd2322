/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimisers over plain arrays: AdamW, Muon, and the norm that clipping needs. Arrays are f32 on cpu and cuda, f64 on
 * ref. A number that one call leaves for the next (a sum, a norm, a factor) is a double in the backend's memory, so a step
 * on a GPU never waits for the host. Arrays are aligned to their elements and have at most 2^48 of them; what a call writes, and
 * its workspace, share no memory with anything else of the call (WEFT_ERR_OVERLAP). Scalars are finite. */
#ifndef WEFT_OPTIM_H
#define WEFT_OPTIM_H

#include <weft/blas.h>

#ifdef __cplusplus
extern "C" {
#endif

/* *sum = sum of squares, in double, in an order fixed by count. */
WEFT_API weft_status weft_sum_squares(const weft_exec *exec, const void *values, int64_t count, double *sum);
WEFT_API weft_status weft_sum_squares_workspace(const weft_exec *exec, int64_t count, size_t *bytes);

/* *norm = sqrt(sums[0] + sums[1] + ...); *factor = min(1, largest / norm), or NaN where the norm or one of `others` (losses,
 * say) is not finite. All pointers are to the backend's memory. */
typedef struct weft_clip_args {
    size_t struct_size;
    const double *sums, *others;
    int32_t count, num_others;
    double largest; /* 0: no limit */
    double *norm, *factor;
} weft_clip_args;
WEFT_API weft_status weft_clip(const weft_exec *exec, const weft_clip_args *args);

/* AdamW, with g = gradient * scale:
 *     m = beta1 m + (1-beta1) g;  v = beta2 v + (1-beta2) g^2
 *     p = p (1 - rate decay) - rate (m / (1-beta1^step)) / (sqrt(v / (1-beta2^step)) + eps) */
typedef struct weft_adamw_args {
    size_t struct_size;
    void *parameter, *first, *second; /* updated; first and second begin as zeros */
    const void *gradient;
    int64_t count, step; /* step counts from 1 */
    double rate, beta1, beta2, eps, decay, scale;
    const double *factor; /* of scale, from weft_clip; where it is not finite, nothing is updated. NULL: 1 */
} weft_adamw_args;
WEFT_API weft_status weft_adamw(const weft_exec *exec, const weft_adamw_args *args);

/* Muon, for a matrix [rows, columns], with g = gradient * scale (on cuda its products are TF32 where exec.precision permits
 * it):
 *     m = momentum m + g;  o = orthogonal part of (g + momentum m), by `iterations` Newton-Schulz steps
 *     p = p (1 - rate decay) - rate sqrt(max(1, rows/columns)) o */
typedef struct weft_muon_args {
    size_t struct_size;
    const weft_blas *blas;
    void *parameter, *moment;
    const void *gradient;
    int64_t rows, columns; /* 1 to 2^31 - 1 */
    int32_t iterations;    /* 0: five; at most 1000 */
    double rate, momentum, decay, scale;
    const double *factor; /* as in weft_adamw_args */
} weft_muon_args;
WEFT_API weft_status weft_muon(const weft_exec *exec, const weft_muon_args *args);
WEFT_API weft_status weft_muon_workspace(const weft_exec *exec, const weft_muon_args *args, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
