/* SPDX-License-Identifier: Apache-2.0
 *
 * Builds a random call of any operator from its description in weft/ops.h: tensors (shape.h), values, scalars
 * (scalars.h). A new operator needs no line here. */
#ifndef WEFT_CHECK_PROBLEM_H
#define WEFT_CHECK_PROBLEM_H

#include <weft/gdn.h>
#include <weft/mhc.h>
#include <weft/ops.h>

typedef enum problem_optional {
    PROBLEM_ALL = 0, /* every optional tensor is there */
    PROBLEM_NONE, /* optional inputs are not, res aside; all outputs are requested, as far as they can be had without */
    PROBLEM_SOME /* a coin per tensor, from the seed */
} problem_optional;

typedef struct problem_spec {
    int64_t tokens, channels, streams, rows;
    weft_dtype act, wide, coef, param; /* WEFT_TYPE_FULL is f32, or f64 where act is */
    int swapped;                       /* streams innermost: the (C, n) layout, for parameters too */
    int64_t pad;                       /* unused elements behind the row of each token */
    int add;                           /* gradients are added to what is there */
    problem_optional optional;
    int independent;            /* no residual mix: two scales, merges without res */
    const char *const *without; /* names of optional tensors to leave out, ends with NULL; may be NULL */
    weft_mhc_numerics numerics;
    weft_contract contract;
    double dropout;
    int dropout_shared;
    int32_t layers; /* replay */
    /* weft/gdn.h; steps 0: all of it from tokens (all of them), streams (value heads) and channels */
    int64_t batch, steps, sequences, key_heads, value_heads, key_dim, value_dim, width, history;
    int packed, repeat; /* cu_seqlens; query and key with the heads of value */
    int even;           /* packed sequences are equally long and leave no token out */
    weft_gdn_options gdn;
    uint64_t seed;
} problem_spec;

typedef struct problem_arg {
    const weft_arg_info *info;
    weft_tensor *tensor; /* in the args struct or in a layer of replay */
    int add;
} problem_arg;

typedef struct problem {
    const weft_op_info *op;
    problem_spec spec;
    void *args; /* the operator's args struct */
    weft_mhc_replay_layer *layers;
    problem_arg *arg; /* the tensors that are there */
    int num_args;
} problem;

/* 1, or 0 where there is no memory. Tensors have no data yet: the caller gives them some and then fills the
 * inputs. */
int problem_make(problem *p, const weft_op_info *op, const problem_spec *spec);
void problem_free(problem *p);

/* Bytes from the first element to the end of the last. */
size_t problem_bytes(const problem_arg *arg);
/* Random values of a size that suits the argument's name. */
void problem_fill(const problem *p, const problem_arg *arg);
/* The same into `count` elements of host memory, in the argument's dtype. */
void problem_fill_block(const problem *p, const problem_arg *arg, void *data, int64_t count);
/* 1 where those values are plain normal numbers, so that one buffer can serve for another. */
int problem_is_normal(const problem *p, const problem_arg *arg);
/* Changes the number of tokens of the call, in host memory; at most what it was made with. */
void problem_slice(problem *p, int64_t tokens);

#endif
