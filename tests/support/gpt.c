/* SPDX-License-Identifier: Apache-2.0 */
#include "support/suite.h"

#include "support/gpt.h"
#include "support/memory.h"
#include "support/rng.h"

weft_model_config gpt_config(weft_residual residual, weft_dtype dtype)
{
    weft_model_config c;
    assert_int_equal(weft_model_defaults(residual, &c), WEFT_OK);
    c.dtype = dtype;
    c.layers = 2;
    c.heads = 2;
    c.vocab = 11;
    c.channels = 12;
    c.hidden = 10;
    c.context = 8;
    if (residual != WEFT_RESIDUAL_PLAIN) c.streams = 3;
    return c;
}

double gpt_parameter(const gpt *g, int64_t i)
{
    return g->config.dtype == WEFT_F64 ? ((double *)g->parameters)[i] : (double)((float *)g->parameters)[i];
}

void gpt_set_parameter(gpt *g, int64_t i, double value)
{
    if (g->config.dtype == WEFT_F64)
        ((double *)g->parameters)[i] = value;
    else
        ((float *)g->parameters)[i] = (float)value;
}

double gpt_gradient(const gpt *g, int64_t i)
{
    return g->config.dtype == WEFT_F64 ? ((double *)g->gradients)[i] : (double)((float *)g->gradients)[i];
}

void gpt_open(gpt *g, const weft_model_config *config, int64_t sequences, int64_t length, double noise)
{
    rng random = {rng_name(7, "gpt")};
    int32_t tensors;
    size_t size = weft_dtype_size(config->dtype);
    *g = (gpt){.config = *config, .step = 3, .training = 1};
    g->exec.backend = config->dtype == WEFT_F64 ? WEFT_BACKEND_REF : WEFT_BACKEND_CPU;
    assert_int_equal(weft_model_param_count(config, &tensors, &g->elements), WEFT_OK);
    g->parameters = must_alloc((size_t)g->elements * size);
    g->gradients = must_alloc((size_t)g->elements * size);
    assert_int_equal(weft_model_init(config, 5, g->parameters), WEFT_OK);
    for (int32_t k = 0; k < tensors && noise > 0; k++) {
        weft_model_param p;
        assert_int_equal(weft_model_param_at(config, k, &p), WEFT_OK);
        for (int64_t i = p.offset; i < p.offset + p.count; i++)
            gpt_set_parameter(g, i, gpt_parameter(g, i) + noise * rng_normal(&random));
    }
    g->tokens = must_alloc((size_t)(sequences * length) * sizeof *g->tokens);
    g->targets = must_alloc((size_t)(sequences * length) * sizeof *g->targets);
    for (int64_t t = 0; t < sequences * length; t++) {
        g->tokens[t] = (int32_t)rng_below(&random, config->vocab);
        g->targets[t] = (int32_t)rng_below(&random, config->vocab);
    }
    g->model.sequences = sequences, g->model.length = length;
    gpt_bind(g);
}

void gpt_bind(gpt *g)
{
    int64_t sequences = g->model.sequences, length = g->model.length;
    free(g->block);
    assert_int_equal(weft_model_query(&g->exec, &g->config, sequences, length, &g->bytes), WEFT_OK);
    g->block = must_alloc(g->bytes.total + 2 * GUARD);
    g->memory = g->block + GUARD;
    fill_pattern(g->block, g->bytes.total + 2 * GUARD);
    assert_int_equal(weft_model_bind(&g->exec, &g->config, sequences, length, g->memory, g->bytes.total, &g->model),
                     WEFT_OK);
}

void gpt_check_guards(const gpt *g)
{
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal((unsigned char)g->block[i], guard_pattern[i & 1]);
        size_t k = GUARD + g->bytes.total + i;
        assert_int_equal((unsigned char)g->block[k], guard_pattern[k & 1]);
    }
}

void gpt_close(gpt *g)
{
    gpt_check_guards(g);
    void *const all[] = {g->parameters, g->gradients, g->tokens, g->targets, g->block};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static weft_model_args args_of(gpt *g, double *loss)
{
    return (weft_model_args){.struct_size = sizeof(weft_model_args),
                             .blas = g->blas,
                             .parameters = g->parameters,
                             .gradients = g->gradients,
                             .tokens = g->tokens,
                             .targets = g->targets,
                             .training = g->training,
                             .step = &g->step,
                             .loss = loss};
}

double gpt_loss(gpt *g)
{
    double loss = 0;
    weft_model_args args = args_of(g, &loss);
    if (weft_model_forward(&g->exec, &g->model, &args) != WEFT_OK) fail_msg("%s", weft_last_error());
    return loss / (double)(g->model.sequences * g->model.length);
}

double gpt_step(gpt *g)
{
    double loss = gpt_loss(g);
    weft_model_args args = args_of(g, NULL);
    memset(g->gradients, 0, (size_t)g->elements * weft_dtype_size(g->config.dtype));
    if (weft_model_backward(&g->exec, &g->model, &args) != WEFT_OK) fail_msg("%s", weft_last_error());
    return loss;
}
