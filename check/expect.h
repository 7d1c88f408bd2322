/* SPDX-License-Identifier: Apache-2.0
 *
 * What a call must give, and how far from it rounding may take a correct implementation.
 *
 * The inputs are widened to float64 and the reference computes the result from them. Beside each value goes a bound
 * on its error that follows from the arithmetic of the backend, u being half an ulp of float32:
 *   - polynomials in their inputs (project, aggregate, post, expand, contract and their gradients): k u times the
 *     sum of the magnitudes of all terms, which is what the reference computes from the inputs' absolute values; k
 *     counts the roundings on the longest path of the sum (expect.c). Errors of the inputs pass through the same way.
 *   - gates, Sinkhorn, RMSNorm: first-order bounds, derived where they are written (expect_gates.c).
 *   - Gated DeltaNet: values and bounds from the equations themselves (expect_gdn.c, expect_rule.c).
 *   - fused operators: chains of the above (expect_fused.c). Where the backend hands out an intermediate result,
 *     the next stage starts from that very result, so that errors do not pile up and every stage is held to a tight
 *     bound.
 * The result may then be rounded once to the dtype it is stored in. */
#ifndef WEFT_CHECK_EXPECT_H
#define WEFT_CHECK_EXPECT_H

#include <weft/mhc.h>
#include <weft/norm.h>
#include <weft/ops.h>

#define EXPECT_MAX_ARGS 40

/* Values with a bound on the error of each. err NULL: exact. val NULL: absent. */
typedef struct quantity {
    double *val, *err;
} quantity;

/* What a denormal on the way may cost the result, in float32. */
#define EXPECT_UNDERFLOW 0x1p-140

static inline double error_of(quantity q, int64_t i)
{
    return q.err ? q.err[i] : 0;
}

/* What the stages of one expectation share. */
typedef struct expect_scope {
    struct expect_block *blocks; /* all memory, freed together */
    int64_t tokens, streams, channels;
    int64_t scales; /* 3, or 2 without a residual mix */
    weft_dtype act;
    double unit;       /* of the backend's arithmetic: 2^-24, or 2^-52 for the reference */
    double split;      /* relative error of a factor split into two bf16 numbers; 0 where none is */
    double low;        /* what leaving out the product of two low parts costs where both factors are split */
    int exact_phi;     /* phi is bf16 already: nothing to take apart in forward */
    double tensor;     /* units for each term of the projection's sums on tensor cores; 0: one rounding each */
    int64_t chunk;     /* tokens of the gated delta rule that are computed together on tensor cores; 0: one */
    double tree;       /* additions at the end of a sum over channels */
    double sigmoid;    /* roundings of exponential, sum and quotient */
    double root;       /* roundings of an inverse root, the two products with it and the sum that follows */
    double normalize;  /* roundings of a step of Sinkhorn beyond the n of its sum */
    char problem[256]; /* why nothing is expected; "" */
} expect_scope;

/* One operator, its inputs, and what it should give for them. */
typedef struct expect_call {
    expect_scope *scope;
    const weft_op_info *op;
    void *args;                   /* scalars are set; tensors are filled in for each call of the reference */
    int64_t rows;                 /* WEFT_DIM_ROWS */
    quantity q[EXPECT_MAX_ARGS];  /* by index of the argument: inputs, and outputs once evaluated */
    int wanted[EXPECT_MAX_ARGS];  /* outputs */
    double *got[EXPECT_MAX_ARGS]; /* outputs as the backend stored them, for staged evaluation; or NULL */
} expect_call;

/* ---- for the evaluators -------------------------------------------------------------------------------------- */

/* args: the operator's args struct, of which the scalars are taken. NULL is never returned. */
expect_call *expect_open(expect_scope *scope, const char *op, const void *args);
/* By name of the argument, which the operator must have. An absent quantity stays absent. */
void expect_give(expect_call *call, const char *name, quantity q);
void expect_want(expect_call *call, const char *name);
quantity expect_take(const expect_call *call, const char *name);
quantity expect_got(const expect_call *call, const char *name);
int expect_index(const expect_call *call, const char *name);
int64_t expect_length(const expect_call *call, int arg);
void *expect_room(expect_scope *scope, size_t bytes); /* zeros; never NULL */
void expect_free(expect_scope *scope);
double *expect_array(expect_scope *scope, int64_t length); /* zeros */

/* Values of all requested outputs by the reference, with room for their errors. */
void expect_values(expect_call *call);
/* Values and errors. */
void expect_eval(expect_call *call);
void expect_fail(expect_scope *scope, const char *text);

void expect_scale_fwd(expect_call *call);
void expect_scale_bwd(expect_call *call);
void expect_sinkhorn_fwd(expect_call *call);
void expect_sinkhorn_bwd(expect_call *call);
void expect_rmsnorm_fwd(expect_call *call);
void expect_rmsnorm_bwd(expect_call *call);
void expect_coef_fwd(expect_call *call);
void expect_coef_bwd(expect_call *call);
void expect_head_fwd(expect_call *call);
void expect_head_bwd(expect_call *call);
void expect_pre_fwd(expect_call *call);
void expect_pre_bwd(expect_call *call);
void expect_boundary_fwd(expect_call *call);
void expect_boundary_bwd(expect_call *call);
/* expect_gdn.c, expect_rule.c, expect_gdn_norm.c: values by the equations themselves instead of by the reference */
void expect_gdn_pre_fwd(expect_call *call);
void expect_gdn_pre_bwd(expect_call *call);
void expect_gdn_pre_step(expect_call *call);
void expect_gdn_rule_fwd(expect_call *call);
void expect_gdn_rule_bwd(expect_call *call);
void expect_gdn_rule_step(expect_call *call);
void expect_gdn_norm_fwd(expect_call *call);
void expect_gdn_norm_bwd(expect_call *call);

/* The values after a store in that dtype. Where the error reaches across a rounding boundary, the backend may have
 * rounded the other way: the error becomes the distance to that value, and zero elsewhere. */
quantity expect_stored(expect_scope *scope, weft_dtype dtype, quantity q, int64_t length);
/* single: 1 where the operator has bounds of its own. known: 1 also where it is compared with the chain of its parts. */
int expect_is_single(const char *op);
int expect_is_known(const char *op);
/* a + b in float32; either may be absent. */
quantity expect_sum(expect_scope *scope, quantity a, quantity b, int64_t length);

/* ---- for the commands ---------------------------------------------------------------------------------------- */

typedef struct expect_result {
    const char *name;
    const weft_tensor *tensor; /* what the backend wrote */
    double *want, *bound;      /* in row-major order of the tensor's shape */
} expect_result;

typedef struct expectation {
    expect_scope scope;
    const weft_op_info *op;
    const void *args;
    expect_call *call;
    double *old[EXPECT_MAX_ARGS]; /* what a gradient is added to */
    struct expect_layer *layers;  /* replay */
    expect_result *result;
    int num_results;
} expectation;

/* Before the call: copies the inputs. `exec` says which arithmetic is to be expected. */
void expect_begin(expectation *e, const weft_exec *exec, const weft_op_info *op, const void *args);
/* After the call: fills e->result. 0 with a reason in e->scope.problem where that is not possible. */
int expect_finish(expectation *e);
void expect_end(expectation *e);

/* The tensor of an argument in an args struct. */
const weft_tensor *expect_tensor(const weft_arg_info *info, const void *args);
double *expect_read(expect_scope *scope, const weft_tensor *t);

void expect_replay_begin(expectation *e);
void expect_replay_finish(expectation *e);
void expect_add_result(expectation *e, const char *name, const weft_tensor *tensor, quantity q, const double *old);

#endif
