/* SPDX-License-Identifier: Apache-2.0 */
#include "support/suite.h"

#include "check/device.h"
#include "check/random.h"
#include "support/gpt.h"
#include "support/memory.h"

weft_model_config gpt_config(weft_residual residual, weft_dtype dtype)
{
    weft_model_config c = {.struct_size = sizeof c};
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

bool gpt_find(const weft_model_config *config, const char *name, weft_model_param *found)
{
    int32_t tensors;
    assert_int_equal(weft_model_param_count(config, &tensors, NULL), WEFT_OK);
    for (int32_t t = 0; t < tensors; t++) {
        assert_int_equal(weft_model_param_at(config, t, found), WEFT_OK);
        if (!strcmp(found->name, name)) return true;
    }
    return false;
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

static int runs_on_cuda(const gpt *g)
{
    return g->exec.backend == WEFT_BACKEND_CUDA;
}

static void well(const char *wrong)
{
    if (wrong) fail_msg("the GPU: %s", wrong);
}

static size_t array_bytes(const gpt *g)
{
    return (size_t)g->elements * (g->config.dtype == WEFT_F64 ? sizeof(double) : sizeof(float));
}

static size_t batch_bytes(const gpt *g)
{
    return (size_t)(g->model.sequences * g->model.length) * sizeof(int32_t);
}

static char *must_device(size_t bytes)
{
    char *p = device_alloc(bytes);
    if (!p) fail_msg("no device memory");
    return p;
}

static void open_device(gpt *g)
{
    g->device.parameters = must_device(array_bytes(g));
    g->device.gradients = must_device(array_bytes(g));
    g->device.tokens = must_device(batch_bytes(g));
    g->device.targets = must_device(batch_bytes(g));
    g->device.step = must_device(sizeof g->step);
    g->device.loss = must_device(sizeof(double));
}

void gpt_open(gpt *g, const weft_model_config *config, int64_t sequences, int64_t length, double noise)
{
    gpt_open_on(g, config->dtype == WEFT_F64 ? WEFT_BACKEND_REF : WEFT_BACKEND_CPU, config, sequences, length,
                noise);
}

void gpt_open_on(gpt *g, weft_backend backend, const weft_model_config *config, int64_t sequences, int64_t length,
                 double noise)
{
    rng random = {rng_name(7, "gpt")};
    int32_t tensors;
    *g = (gpt){.config = *config, .step = 3, .training = 1};
    g->exec = WEFT_STRUCT(weft_exec, .backend = backend);
    assert_int_equal(weft_model_param_count(config, &tensors, &g->elements), WEFT_OK);
    g->parameters = must_alloc(array_bytes(g));
    g->gradients = must_alloc(array_bytes(g));
    assert_int_equal(weft_model_init(config, 5, g->parameters), WEFT_OK);
    for (int32_t k = 0; k < tensors && noise > 0; k++) {
        weft_model_param p;
        assert_int_equal(weft_model_param_at(config, k, &p), WEFT_OK);
        for (int64_t i = p.offset; i < p.offset + p.count; i++)
            gpt_set_parameter(g, i, gpt_parameter(g, i) + noise * rng_normal(&random));
    }
    g->model.sequences = sequences, g->model.length = length;
    g->tokens = must_alloc(batch_bytes(g));
    g->targets = must_alloc(batch_bytes(g));
    for (int64_t t = 0; t < sequences * length; t++) {
        g->tokens[t] = (int32_t)rng_below(&random, config->vocab);
        g->targets[t] = (int32_t)rng_below(&random, config->vocab);
    }
    if (runs_on_cuda(g)) open_device(g);
    gpt_bind(g);
}

static void drop_block(gpt *g)
{
    if (runs_on_cuda(g))
        device_free(g->block);
    else
        free(g->block);
}

void gpt_bind(gpt *g)
{
    int64_t sequences = g->model.sequences, length = g->model.length;
    drop_block(g);
    if (weft_model_query(&g->exec, &g->config, sequences, length, &g->bytes) != WEFT_OK)
        fail_msg("%s", weft_last_error());
    size_t bytes = g->bytes.total + 2 * GUARD;
    char *pattern = must_alloc(bytes);
    guard_fill(pattern, bytes);
    g->block = runs_on_cuda(g) ? must_device(bytes) : pattern;
    if (runs_on_cuda(g)) {
        well(device_put(g->block, pattern, bytes));
        free(pattern);
    }
    g->memory = g->block + GUARD;
    assert_int_equal(weft_model_bind(&g->exec, &g->config, sequences, length, g->memory, g->bytes.total, &g->model),
                     WEFT_OK);
}

static void check_guard(const gpt *g, size_t from)
{
    unsigned char edge[GUARD];
    if (runs_on_cuda(g))
        well(device_get(edge, g->block + from, GUARD));
    else
        memcpy(edge, g->block + from, GUARD);
    for (size_t i = 0; i < GUARD; i++) assert_int_equal(edge[i], guard_pattern[(from + i) & 1]);
}

void gpt_check_guards(const gpt *g)
{
    check_guard(g, 0);
    check_guard(g, GUARD + g->bytes.total);
}

void gpt_close(gpt *g)
{
    gpt_check_guards(g);
    drop_block(g);
    void *const all[] = {g->parameters, g->gradients, g->tokens, g->targets};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    void *const there[] = {g->device.parameters, g->device.gradients, g->device.tokens,
                           g->device.targets,    g->device.step,      g->device.loss};
    for (size_t i = 0; i < sizeof there / sizeof *there; i++) device_free(there[i]);
}

static weft_model_args args_of(gpt *g, double *loss)
{
    weft_model_args a = {.struct_size = sizeof(weft_model_args),
                         .blas = g->blas,
                         .parameters = g->parameters,
                         .gradients = g->gradients,
                         .tokens = g->tokens,
                         .targets = g->targets,
                         .training = g->training,
                         .step = &g->step,
                         .loss = loss};
    if (!runs_on_cuda(g)) return a;
    well(device_put(g->device.parameters, g->parameters, array_bytes(g)));
    well(device_put(g->device.tokens, g->tokens, batch_bytes(g)));
    well(device_put(g->device.targets, g->targets, batch_bytes(g)));
    well(device_put(g->device.step, &g->step, sizeof g->step));
    a.parameters = g->device.parameters, a.gradients = g->device.gradients;
    a.tokens = (int32_t *)(void *)g->device.tokens, a.targets = (int32_t *)(void *)g->device.targets;
    a.step = (uint64_t *)(void *)g->device.step;
    if (loss) a.loss = (double *)(void *)g->device.loss;
    return a;
}

double gpt_loss(gpt *g)
{
    double loss = 0;
    weft_model_args args = args_of(g, &loss);
    if (weft_model_forward(&g->exec, &g->model, &args) != WEFT_OK) fail_msg("%s", weft_last_error());
    if (runs_on_cuda(g)) well(device_get(&loss, g->device.loss, sizeof loss));
    return loss / (double)(g->model.sequences * g->model.length);
}

double gpt_step(gpt *g)
{
    double loss = gpt_loss(g);
    weft_model_args args = args_of(g, NULL);
    memset(g->gradients, 0, array_bytes(g));
    if (runs_on_cuda(g)) well(device_fill(g->device.gradients, 0, array_bytes(g)));
    if (weft_model_backward(&g->exec, &g->model, &args) != WEFT_OK) fail_msg("%s", weft_last_error());
    if (runs_on_cuda(g)) well(device_get(g->gradients, g->device.gradients, array_bytes(g)));
    return loss;
}

const gpt_variant gpt_variants[GPT_VARIANTS] = {
    {"residual", WEFT_RESIDUAL_PLAIN, WEFT_EXIT_MEAN, 0, 0, 0, 0, WEFT_MIXER_ATTENTION},
    {"residual, bias, dropout", WEFT_RESIDUAL_PLAIN, WEFT_EXIT_MEAN, 1, 0.3, 0, 0, WEFT_MIXER_ATTENTION},
    {"hc", WEFT_RESIDUAL_HC, WEFT_EXIT_MEAN, 0, 0, 0, 0, WEFT_MIXER_ATTENTION},
    {"hc, learned exit, bias, dropout", WEFT_RESIDUAL_HC, WEFT_EXIT_LEARNED, 1, 0.3, 1, 1, WEFT_MIXER_ATTENTION},
    {"mhc", WEFT_RESIDUAL_MHC, WEFT_EXIT_MEAN, 0, 0, 0, 0, WEFT_MIXER_ATTENTION},
    {"mhc, learned exit, bias, dropout", WEFT_RESIDUAL_MHC, WEFT_EXIT_LEARNED, 1, 0.3, 1, 1, WEFT_MIXER_ATTENTION},
    {"mhc_single_pass", WEFT_RESIDUAL_MHC_SINGLE_PASS, WEFT_EXIT_MIX, 0, 0, 0, 0, WEFT_MIXER_ATTENTION},
    {"mhc_single_pass, bias, dropout", WEFT_RESIDUAL_MHC_SINGLE_PASS, WEFT_EXIT_MIX, 1, 0.3, 1, 0,
     WEFT_MIXER_ATTENTION},
    {"independent", WEFT_RESIDUAL_INDEPENDENT, WEFT_EXIT_MEAN, 0, 0, 0, 0, WEFT_MIXER_ATTENTION},
    {"independent, learned exit, bias, dropout", WEFT_RESIDUAL_INDEPENDENT, WEFT_EXIT_LEARNED, 1, 0.3, 1, 1,
     WEFT_MIXER_ATTENTION},
    {"gdn", WEFT_RESIDUAL_PLAIN, WEFT_EXIT_MEAN, 0, 0, 0, 0, WEFT_MIXER_GDN},
    {"gdn, mhc, learned exit, bias, dropout", WEFT_RESIDUAL_MHC, WEFT_EXIT_LEARNED, 1, 0.3, 1, 1, WEFT_MIXER_GDN},
    {"hybrid, mhc", WEFT_RESIDUAL_MHC, WEFT_EXIT_MEAN, 0, 0, 1, 3, WEFT_MIXER_HYBRID},
};

weft_model_config gpt_variant_config(const gpt_variant *v, weft_dtype dtype)
{
    weft_model_config c = gpt_config(v->residual, dtype);
    c.exit = v->exit, c.bias = v->bias, c.dropout = v->dropout, c.recompute = v->recompute, c.group = v->group;
    c.mixer = v->mixer;
    if (c.mixer == WEFT_MIXER_HYBRID) c.layers = 4, c.key_heads = 2, c.conv_width = 3;
    return c;
}
