/* SPDX-License-Identifier: Apache-2.0
 *
 * The list of operators as data: names, arguments, shapes. Bindings, the command line and the tests are loops over
 * this list, so an operator's arguments are written down in one place (src/ops/<stem>.c). */
#ifndef WEFT_OPS_H
#define WEFT_OPS_H

#include <weft/weft.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum weft_arg_kind { WEFT_ARG_IN = 0, WEFT_ARG_OUT, WEFT_ARG_GRAD } weft_arg_kind;

/* Which dtypes an argument takes. Once any tensor of a call is float64, all of them must be (reference only). */
typedef enum weft_arg_type {
    WEFT_TYPE_ACT = 0, /* the activation type of the call: f32, bf16 or f16, the same for all of these */
    WEFT_TYPE_WIDE,    /* f32 or the activation type: stream gradients */
    WEFT_TYPE_COEF,    /* f32, bf16 or f16: coefficients and their gradients */
    WEFT_TYPE_PARAM,   /* f32, bf16 or f16: parameters and their gradients */
    WEFT_TYPE_FULL,    /* f32: the raw projection and the mean square */
    WEFT_TYPE_INDEX    /* i32 or i64, beside float64 too: offsets and indices */
} weft_arg_type;

/* Sizes a dimension can stand for; a positive number below WEFT_DIM_TOKENS is that number itself. */
typedef enum weft_arg_dim {
    WEFT_DIM_TOKENS = 100,
    WEFT_DIM_STREAMS,
    WEFT_DIM_CHANNELS,
    WEFT_DIM_GATES, /* rows of the projection, in the order pre | post | res: 2 * streams + streams^2 with three scales, 2 *
                       streams with two */
    WEFT_DIM_ROWS, /* rows of a projection by itself: any number from 1 to 4096 */
    /* weft/gdn.h */
    WEFT_DIM_BATCH, /* sequences of equal length; 1 where offsets cut the steps into sequences */
    WEFT_DIM_STEPS, /* tokens of each of them */
    WEFT_DIM_KEY_HEADS,
    WEFT_DIM_VALUE_HEADS,
    WEFT_DIM_HEADS,   /* of query and key: divides the value heads */
    WEFT_DIM_KEY_DIM, /* 1 to WEFT_GDN_MAX_DIM */
    WEFT_DIM_VALUE_DIM,
    WEFT_DIM_CONV,       /* 2 * key_heads * key_dim + value_heads * value_dim */
    WEFT_DIM_WIDTH,      /* taps of a convolution: 1 to WEFT_GDN_MAX_WIDTH */
    WEFT_DIM_HISTORY,    /* slots of a convolution state: width - 1 to 64 */
    WEFT_DIM_SEQUENCES,  /* what the offsets delimit; batch where there are none */
    WEFT_DIM_OFFSETS,    /* sequences + 1 */
    WEFT_DIM_CACHE,      /* rows of a cache of states */
    WEFT_DIM_STEP_HEADS, /* steps * value_heads */
    /* weft/mhc.h */
    WEFT_DIM_SCALES /* of the groups of rows of the projection: 3, or 2 where there is no residual mix */
} weft_arg_dim;

/* Frozen, as weft_scalar_info is: callers walk through arrays of them. */
typedef struct weft_arg_info {
    const char *name;
    size_t offset; /* of the weft_tensor (in, out) or weft_grad (grad) in the args struct */
    weft_arg_kind kind;
    weft_arg_type type;
    int32_t optional;
    int32_t ndim;
    int32_t dim[WEFT_MAX_DIMS];
    const char *in_place; /* argument whose very memory this output may use, or NULL */
} weft_arg_info;

/* What a scalar field of an args struct is. */
typedef enum weft_scalar_type {
    WEFT_SCALAR_REAL = 0, /* double */
    WEFT_SCALAR_INT,      /* int32_t, or an enum of that size */
    WEFT_SCALAR_NUMERICS, /* weft_mhc_numerics */
    WEFT_SCALAR_DROPOUT,  /* weft_dropout */
    WEFT_SCALAR_GDN       /* weft_gdn_options */
} weft_scalar_type;

typedef struct weft_scalar_info {
    const char *name;
    size_t offset;
    weft_scalar_type type;
} weft_scalar_info;

/* The library's own; fields can be appended. */
typedef struct weft_op_info {
    const char *name; /* "mhc_post_fwd" */
    size_t args_size;
    int32_t num_args;
    const weft_arg_info *args;
    const weft_scalar_info *scalars; /* closed by a row whose name is NULL; NULL where there are none */
} weft_op_info;

WEFT_API int32_t weft_op_count(void);
/* NULL where index is out of range. */
WEFT_API const weft_op_info *weft_op_at(int32_t index);
WEFT_API const weft_op_info *weft_op_find(const char *name);
/* 1 where this build has kernels of that backend for the operator; whether this machine can run them is another matter. */
WEFT_API int weft_op_has(const weft_op_info *op, weft_backend backend);
/* The tensors of one weft_mhc_replay_layer, in the same form; not an operator and not in the list. */
WEFT_API const weft_op_info *weft_mhc_replay_layer_info(void);

/* Calls an operator through its description; args is the operator's own args struct. */
WEFT_API weft_status weft_op_call(const weft_op_info *op, const weft_exec *exec, const void *args);
WEFT_API weft_status weft_op_workspace(const weft_op_info *op, const weft_exec *exec, const void *args,
                                       size_t *bytes);
/* Which path this call takes where a backend has several for the operator, and why: "fused: one kernel reads each stream
 * once", or "unfused: there is no kernel for this number of streams" where it falls back to the unfused kernels; for the gated
 * delta rule "in chunks: ..." or "token after token: ..." and the reason. A sentence without a full stop that lives as long as the
 * library. Of tensor data only addresses are looked at; NULL stands for data aligned to 16 bytes. */
WEFT_API weft_status weft_op_path(const weft_op_info *op, const weft_exec *exec, const void *args,
                                  const char **path);

#ifdef __cplusplus
}
#endif
#endif
