/* SPDX-License-Identifier: Apache-2.0
 *
 * What a model may be: names, defaults, and the first thing that is wrong with a configuration. */
#include <math.h>
#include <string.h>

#include "core/struct_size.h"
#include "model/model.h"

static const char *const residuals[WEFT_RESIDUAL_COUNT] = {[WEFT_RESIDUAL_PLAIN] = "residual",
                                                           [WEFT_RESIDUAL_HC] = "hc",
                                                           [WEFT_RESIDUAL_MHC] = "mhc",
                                                           [WEFT_RESIDUAL_MHC_SINGLE_PASS] = "mhc_single_pass",
                                                           [WEFT_RESIDUAL_INDEPENDENT] = "independent"};
static const char *const exits[WEFT_EXIT_COUNT] = {
    [WEFT_EXIT_MEAN] = "mean", [WEFT_EXIT_LEARNED] = "learned", [WEFT_EXIT_MIX] = "mix"};
static const char *const first_mixes[WEFT_FIRST_MIX_COUNT] = {
    [WEFT_FIRST_MIX_UNIFORM] = "uniform", [WEFT_FIRST_MIX_IDENTITY] = "identity"};

static const char *const mixers[WEFT_MIXER_COUNT] = {
    [WEFT_MIXER_ATTENTION] = "attention", [WEFT_MIXER_GDN] = "gdn", [WEFT_MIXER_HYBRID] = "hybrid"};

const char *weft_residual_name(weft_residual residual)
{
    return residual >= 0 && residual < WEFT_RESIDUAL_COUNT ? residuals[residual] : NULL;
}

weft_residual weft_residual_find(const char *name)
{
    int i = 0;
    while (i < WEFT_RESIDUAL_COUNT && (!name || strcmp(name, residuals[i]) != 0)) i++;
    return (weft_residual)i;
}

const char *weft_exit_name(weft_exit exit)
{
    return exit >= 0 && exit < WEFT_EXIT_COUNT ? exits[exit] : NULL;
}

weft_exit weft_exit_find(const char *name)
{
    int i = 0;
    while (i < WEFT_EXIT_COUNT && (!name || strcmp(name, exits[i]) != 0)) i++;
    return (weft_exit)i;
}

const char *weft_first_mix_name(weft_first_mix mix)
{
    return mix >= 0 && mix < WEFT_FIRST_MIX_COUNT ? first_mixes[mix] : NULL;
}

weft_first_mix weft_first_mix_find(const char *name)
{
    int i = 0;
    while (i < WEFT_FIRST_MIX_COUNT && (!name || strcmp(name, first_mixes[i]) != 0)) i++;
    return (weft_first_mix)i;
}

const char *weft_mixer_name(weft_mixer mixer)
{
    return mixer >= 0 && mixer < WEFT_MIXER_COUNT ? mixers[mixer] : NULL;
}

weft_mixer weft_mixer_find(const char *name)
{
    int i = 0;
    while (i < WEFT_MIXER_COUNT && (!name || strcmp(name, mixers[i]) != 0)) i++;
    return (weft_mixer)i;
}

static const weft_sizes config_sizes = {offsetof(weft_model_config, first_mix), sizeof(weft_model_config),
                                        "WEFT_STRUCT"};

weft_status weft_model_defaults(weft_residual residual, weft_model_config *config)
{
    weft_clear_error();
    if (!config) return weft_fail(WEFT_ERR_ARGUMENT, "model_defaults: config: expected a pointer, got NULL");
    if (!weft_residual_name(residual))
        return weft_fail(WEFT_ERR_ARGUMENT, "model_defaults: residual: expected a weft_residual, got the number %d",
                         (int)residual);
    const size_t size = config->struct_size;
    WEFT_TRY(weft_check_size("model_defaults", "config.", &config_sizes, size));
    bool single = residual == WEFT_RESIDUAL_MHC_SINGLE_PASS;
    weft_model_config c = {.struct_size = size,
                           .dtype = WEFT_F32,
                           .residual = residual,
                           .exit = single ? WEFT_EXIT_MIX : WEFT_EXIT_MEAN,
                           .streams = residual == WEFT_RESIDUAL_PLAIN ? 1 : 4,
                           .layers = 4,
                           .heads = 4,
                           .vocab = 256,
                           .channels = 128,
                           .hidden = 384,
                           .context = 128,
                           .dropout_seed = 1,
                           .norm_eps = 1e-6,
                           .rope_base = 10000,
                           .init_alpha = 0.01};
    if (is_mhc(&c)) c.first_mix = WEFT_FIRST_MIX_IDENTITY;
    WEFT_TRY(weft_mhc_preset_numerics(single               ? WEFT_PRESET_DEEPSEEK_V41
                                      : is_independent(&c) ? WEFT_PRESET_HY_V4
                                                           : WEFT_PRESET_DEEPSEEK_V4,
                                      &c.numerics));
    memcpy(config, &c, size < sizeof c ? size : sizeof c);
    if (size > sizeof c) memset(config + 1, 0, size - sizeof c);
    return WEFT_OK;
}

/* One number of a configuration and where it must lie. */
typedef struct range {
    const char *name;
    int64_t value, low, high;
} range;

static weft_status check_ranges(const weft_model_config *c)
{
    const range ranges[] = {
        {"residual", c->residual, 0, WEFT_RESIDUAL_COUNT - 1},
        {"exit", c->exit, 0, WEFT_EXIT_COUNT - 1},
        {"streams", c->streams, 1, WEFT_MAX_STREAMS},
        {"layers", c->layers, 1, WEFT_RECOMPUTE_MAX_LAYERS},
        {"first_layer", c->first_layer, 0, 1 << 20},
        {"stage", c->stage, 0, WEFT_STAGE_COUNT - 1},
        {"heads", c->heads, 1, 1024},
        {"vocab", c->vocab, 1, 1 << 24},
        {"channels", c->channels, 1, 1 << 20},
        {"hidden", c->hidden, 1, 1 << 22},
        {"context", c->context, 1, 1 << 24},
        {"bias", c->bias, 0, 1},
        {"recompute", c->recompute, 0, 1},
        {"poison", c->poison, 0, 1},
        {"first_mix", c->first_mix, 0, WEFT_FIRST_MIX_COUNT - 1},
        {"separate", c->separate, 0, 1},
        {"mixer", c->mixer, 0, WEFT_MIXER_COUNT - 1},
        {"key_heads", c->key_heads, 0, 1024},
        {"conv_width", c->conv_width, 0, WEFT_GDN_MAX_WIDTH},
        {"reserved", c->reserved, 0, 0},
        {"group", c->group, 0, c->layers},
        {"sinkhorn_iters", c->numerics.sinkhorn_iters, 1, 10000},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (ranges[i].value < ranges[i].low || ranges[i].value > ranges[i].high)
            return weft_fail(WEFT_ERR_ARGUMENT, "model: %s: expected %lld to %lld, got %lld", ranges[i].name,
                             (long long)ranges[i].low, (long long)ranges[i].high, (long long)ranges[i].value);
    return WEFT_OK;
}

static weft_status check_reals(const weft_model_config *c)
{
    if (!(c->dropout >= 0 && c->dropout < 1))
        return weft_fail(WEFT_ERR_ARGUMENT, "model: dropout: expected a number in [0, 1), got %g", c->dropout);
    if (!(c->init_alpha >= 0 && isfinite(c->init_alpha)))
        return weft_fail(WEFT_ERR_ARGUMENT, "model: init_alpha: expected a finite number of at least 0, got %g",
                         c->init_alpha);
    if (!(c->norm_eps >= 0 && isfinite(c->norm_eps)))
        return weft_fail(WEFT_ERR_ARGUMENT, "model: norm_eps: expected a finite number of at least 0, got %g",
                         c->norm_eps);
    if (!(c->rope_base >= 1 && isfinite(c->rope_base)))
        return weft_fail(WEFT_ERR_ARGUMENT, "model: rope_base: expected a finite number of at least 1, got %g",
                         c->rope_base);
    return WEFT_OK;
}

static weft_status check_mixer(const weft_model_config *c)
{
    const bool attention = c->mixer == WEFT_MIXER_ATTENTION;
    if (attention && (c->key_heads || c->conv_width))
        return weft_fail(WEFT_ERR_ARGUMENT, "model: %s: expected 0 with the mixer attention, got %d",
                         c->key_heads ? "key_heads" : "conv_width",
                         (int)(c->key_heads ? c->key_heads : c->conv_width));
    if (attention) return WEFT_OK;
    if (c->mixer == WEFT_MIXER_HYBRID && (c->stage == WEFT_STAGE_WHOLE || c->stage == WEFT_STAGE_BLOCK) &&
        c->layers < HYBRID_PERIOD)
        return weft_fail(
            WEFT_ERR_ARGUMENT,
            "model: layers: expected at least %d with the mixer hybrid, three of gdn and one of attention, got %d",
            HYBRID_PERIOD, (int)c->layers);
    if (!c->key_heads && c->heads % 2)
        return weft_fail(
            WEFT_ERR_ARGUMENT,
            "model: heads: expected an even number with the mixer %s, or key_heads that divide them, got %d",
            mixers[c->mixer], (int)c->heads);
    if (c->key_heads && c->heads % c->key_heads)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "model: key_heads: expected a divisor of the %d heads with the mixer %s, got %d",
                         (int)c->heads, mixers[c->mixer], (int)c->key_heads);
    if (c->channels / c->heads > WEFT_GDN_MAX_DIM)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "model: heads: expected heads of at most %d channels with the mixer %s, got %lld",
                         WEFT_GDN_MAX_DIM, mixers[c->mixer], (long long)(c->channels / c->heads));
    return WEFT_OK;
}

weft_status weft_model_check(const weft_model_config *config)
{
    weft_model_config copy;
    return config_take(config, &copy, &config);
}

weft_status config_take(const weft_model_config *given, weft_model_config *copy, const weft_model_config **taken)
{
    const void *at;
    weft_clear_error();
    if (!given) return weft_fail(WEFT_ERR_ARGUMENT, "model: config: expected a pointer, got NULL");
    WEFT_TRY(weft_take_struct("model", "config.", &config_sizes, given, copy, &at));
    const weft_model_config *c = *taken = at;
    for (size_t i = 0; i < sizeof c->numerics.reserved / sizeof *c->numerics.reserved; i++)
        if (c->numerics.reserved[i])
            return weft_fail(WEFT_ERR_ARGUMENT,
                             "model: numerics.reserved: expected zeros, got a field that is set");
    if (c->dtype != WEFT_F32 && c->dtype != WEFT_BF16 && c->dtype != WEFT_F64)
        return weft_fail(WEFT_ERR_UNSUPPORTED, "model: dtype: expected f32, bf16 or f64, got %s",
                         weft_dtype_name(c->dtype));
    WEFT_TRY(check_ranges(c));
    WEFT_TRY(check_reals(c));
    if (c->channels % c->heads || c->channels / c->heads % 2)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "model: heads: expected channels (%lld) to split into heads of an even size, got %d heads",
                         (long long)c->channels, (int)c->heads);
    WEFT_TRY(check_mixer(c));
    bool plain = c->residual == WEFT_RESIDUAL_PLAIN, single = c->residual == WEFT_RESIDUAL_MHC_SINGLE_PASS;
    if (plain && c->streams != 1)
        return weft_fail(WEFT_ERR_ARGUMENT, "model: streams: expected 1 with the plain residual, got %d",
                         (int)c->streams);
    if (plain && c->recompute)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "model: recompute: expected hc, mhc, mhc_single_pass or independent, got residual: it has "
                         "one stream and nothing to rebuild");
    if (c->first_mix && !is_mhc(c))
        return weft_fail(WEFT_ERR_ARGUMENT, "model: first_mix: expected uniform with %s, got %s",
                         residuals[c->residual], first_mixes[c->first_mix]);
    if ((has_entry(c) || c->stage == WEFT_STAGE_BLOCK) && c->first_layer)
        return weft_fail(WEFT_ERR_ARGUMENT, "model: first_layer: expected 0 at the entry, got %d",
                         (int)c->first_layer);
    if (c->group && !c->recompute)
        return weft_fail(WEFT_ERR_ARGUMENT, "model: group: expected 0 without recompute, got %d", (int)c->group);
    if (c->poison && !c->recompute)
        return weft_fail(WEFT_ERR_ARGUMENT, "model: poison: expected 0 without recompute, got %d", (int)c->poison);
    if (plain ? c->exit != WEFT_EXIT_MEAN : (c->exit == WEFT_EXIT_MIX) != single)
        return weft_fail(WEFT_ERR_ARGUMENT, "model: exit: expected %s with %s, got %s",
                         plain    ? "mean"
                         : single ? "mix"
                                  : "mean or learned",
                         residuals[c->residual], exits[c->exit]);
    return WEFT_OK;
}
