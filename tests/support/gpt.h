/* SPDX-License-Identifier: Apache-2.0
 *
 * A small model with everything around it: parameters away from their first values, a batch, memory of exactly the size
 * that the query tells, between guards. On a GPU, arrays are copied there and back by the calls below. */
#ifndef WEFT_TESTS_GPT_H
#define WEFT_TESTS_GPT_H

#include <stdbool.h>
#include <weft/model.h>

typedef struct gpt {
    weft_exec exec;
    weft_model_config config;
    weft_blas *blas;
    int64_t elements; /* of the parameters */
    void *parameters, *gradients;
    int32_t *tokens, *targets;
    char *block, *memory; /* the backend's, as device.* are where that is a GPU */
    struct {
        char *parameters, *gradients, *tokens, *targets, *step, *loss;
    } device;
    weft_model_bytes bytes;
    weft_model model;
    uint64_t step;
    int training;
} gpt;

/* A model of this kind that is small enough for finite differences. */
weft_model_config gpt_config(weft_residual residual, weft_dtype dtype);
/* Kinds with what goes with them. */
typedef struct gpt_variant {
    const char *name;
    weft_residual residual;
    weft_exit exit;
    int bias;
    double dropout;
    int recompute, group;
    weft_mixer mixer; /* a hybrid has four layers */
} gpt_variant;

enum { GPT_VARIANTS = 13 };
extern const gpt_variant gpt_variants[GPT_VARIANTS];
weft_model_config gpt_variant_config(const gpt_variant *v, weft_dtype dtype);

/* noise: how far parameters are moved from their first values. f64 runs on ref, everything else on the CPU. */
void gpt_open(gpt *g, const weft_model_config *config, int64_t sequences, int64_t length, double noise);
void gpt_open_on(gpt *g, weft_backend backend, const weft_model_config *config, int64_t sequences, int64_t length,
                 double noise);
/* Memory anew, after exec has changed. */
void gpt_bind(gpt *g);
void gpt_close(gpt *g);
/* Mean loss of the batch; gradients as well with backward = 1. Fails the test where a call fails. */
double gpt_loss(gpt *g);
double gpt_step(gpt *g);
/* The model's memory has not been written outside its bytes. */
void gpt_check_guards(const gpt *g);
/* The parameter of a name; false where the model has none of it. */
bool gpt_find(const weft_model_config *config, const char *name, weft_model_param *found);
double gpt_parameter(const gpt *g, int64_t i);
void gpt_set_parameter(gpt *g, int64_t i, double value);
double gpt_gradient(const gpt *g, int64_t i);

#endif
