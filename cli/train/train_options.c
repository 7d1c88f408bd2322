/* SPDX-License-Identifier: Apache-2.0 */
#include "train/train_options.h"

#include <stdio.h>
#include <string.h>

#include <weft/gdn.h>

static const char *const residuals[] = {"residual", "hc", "mhc", "mhc_single_pass", "independent", NULL};
static const char *const exits[] = {"auto", "mean", "learned", "mix", NULL};
static const char *const first_mixes[] = {"uniform", "identity", NULL};
static const char *const mixers[] = {"attention", "gdn", "hybrid", NULL};
static const char *const presets[] = {"auto",
                                      "transformer_engine",
                                      "deepseek_v4",
                                      "deepseek_v41",
                                      "megatron_main",
                                      "megatron_dev",
                                      "megatron_dsv4",
                                      "liger",
                                      "glm5_next",
                                      "hy_v4",
                                      NULL};
const char *const train_backends[] = {"cpu", "cuda", NULL};
static const char *const dtypes[] = {"auto", "f32", "bf16", NULL};
static const char *const optimizers[] = {"adamw", "muon", NULL};

#define INT(field, word, lowest, highest, text, is_fixed)                                                          \
    {                                                                                                              \
        .name = word, .kind = OPTION_INT, .to = &o->field, .value = "N", .help = text, .min = lowest,              \
        .max = highest, .fixed = is_fixed                                                                          \
    }
#define NUMBER(field, word, lowest, highest, text)                                                                 \
    {                                                                                                              \
        .name = word, .kind = OPTION_NUMBER, .to = &o->field, .value = "X", .help = text, .low = lowest,           \
        .high = highest, .fixed = 1                                                                                \
    }
#define CHOICE(field, word, list, text)                                                                            \
    {                                                                                                              \
        .name = word, .kind = OPTION_CHOICE, .to = &o->field, .help = text, .choices = list, .fixed = 1            \
    }
#define FLAG(field, word, text, is_fixed)                                                                          \
    {                                                                                                              \
        .name = word, .kind = OPTION_FLAG, .to = &o->field, .help = text, .fixed = is_fixed                        \
    }
#define ONCE(field, word, type, what, text)                                                                        \
    {                                                                                                              \
        .name = word, .kind = type, .to = &o->field, .value = what, .help = text, .unsaved = 1                     \
    }

void train_options_open(train_options *o, option table[MAX_TRAIN_OPTIONS])
{
    *o = (train_options){.out = "runs/weft",
                         .residual = WEFT_RESIDUAL_MHC,
                         .streams = 0,
                         .layers = 4,
                         .heads = 4,
                         .channels = 128,
                         .context = 128,
                         .alpha = 0.01,
                         .first_mix = WEFT_FIRST_MIX_IDENTITY,
                         .steps = 200,
                         .batch = 8,
                         .micro = 1,
                         .warmup = -1,
                         .seed = 1,
                         .rate = 1e-3,
                         .rate_end = 1e-4,
                         .decay = 0.1,
                         .clip = 1,
                         .beta1 = 0.9,
                         .beta2 = 0.95,
                         .eps = 1e-8,
                         .muon_rate = 0.02,
                         .momentum = 0.95,
                         .val_every = 25,
                         .val_batches = 4,
                         .save_every = 100,
                         .keep = 3,
                         .gain_every = 5};
    const option rows[] = {
        ONCE(config_file, "config", OPTION_TEXT, "FILE",
             "file of 'name = value' lines with these names; the command line takes precedence"),
        {.name = "data",
         .kind = OPTION_TEXT,
         .to = &o->data,
         .value = "PATHS",
         .help = "text to learn, files and folders separated by commas; default: weft's own sources",
         .local = 1},
        ONCE(out, "out", OPTION_TEXT, "DIR", "folder of the run: log.jsonl and checkpoints"),
        ONCE(resume, "resume", OPTION_FLAG, NULL,
             "go on from the last checkpoint in DIR, or begin where there is none"),
        ONCE(quiet, "quiet", OPTION_FLAG, NULL, "no progress"),
        {.name = "backend",
         .kind = OPTION_CHOICE,
         .to = &o->backend,
         .help = "where the model runs",
         .choices = train_backends},
        {.name = "dtype",
         .kind = OPTION_CHOICE,
         .to = &o->dtype,
         .help = "of activations; auto: bf16 on cuda, f32 on the CPU. Parameters are f32",
         .choices = dtypes},
        {.name = "threads",
         .kind = OPTION_INT,
         .to = &o->threads,
         .value = "N",
         .help = "CPU threads; 0: OpenMP's default",
         .max = 4096,
         .local = 1},
        CHOICE(residual, "residual", residuals, "the residual connection"),
        CHOICE(
            exit, "exit", exits,
            "how streams become one at the end: their mean, weights learnt for it, or the mix that the last site "
            "predicted, which is mhc_single_pass's and no other's; auto: mix there, mean elsewhere"),
        CHOICE(preset, "preset", presets,
               "numerics of mhc, mhc_single_pass and independent; auto: deepseek_v4, deepseek_v41 and hy_v4"),
        INT(streams, "streams", 0, WEFT_MAX_STREAMS, "residual streams; 0: 4, or 1 with the plain residual", 1),
        CHOICE(
            mixer, "mixer", mixers,
            "what mixes tokens in a layer; gdn: Gated DeltaNet; hybrid: three layers of gdn for one of attention"),
        INT(layers, "layers", 1, WEFT_RECOMPUTE_MAX_LAYERS, "transformer layers", 1),
        INT(heads, "heads", 1, 1024, "heads of attention, value heads of gdn", 1),
        INT(key_heads, "key-heads", 0, 1024, "key heads of gdn; 0: half of the heads", 1),
        INT(conv_width, "conv-width", 0, WEFT_GDN_MAX_WIDTH, "taps of gdn's convolution; 0: 4", 1),
        INT(channels, "channels", 1, 1 << 20, "width of the model", 1),
        INT(hidden, "hidden", 0, 1 << 22, "width of the MLP; 0: 8/3 of the model's, to a multiple of 64", 1),
        INT(context, "context", 1, 1 << 20, "tokens (bytes) of a sequence", 1),
        INT(sinkhorn, "sinkhorn", 0, 10000, "Sinkhorn iterations; 0: as the preset says", 1),
        NUMBER(alpha, "alpha", 0, 1e6, "first value of the gates' scale"),
        CHOICE(first_mix, "first-mix", first_mixes,
               "first values of the mix of mhc, mhc_single_pass and independent"),
        NUMBER(dropout, "dropout", 0, 0.999999, "dropout of a sub-layer's output"),
        FLAG(bias, "bias", "biases on the layers' linear maps", 1),
        FLAG(recompute, "recompute", "rebuild streams in backward instead of keeping them", 0),
        INT(group, "recompute-group", 0, WEFT_RECOMPUTE_MAX_LAYERS,
            "layers per recompute group; 0: the best number", 0),
        FLAG(poison, "poison", "fill discarded memory with NaN (a test of recompute)", 0),
        {.name = "steps",
         .kind = OPTION_INT,
         .to = &o->steps,
         .value = "N",
         .help =
             "training steps, with --resume also more than the run was begun with; 0: first values are saved and "
             "nothing is learnt",
         .max = 1 << 30,
         .fixed = 1,
         .grows = 1},
        INT(batch, "batch", 1, 1 << 20, "sequences of a micro-batch", 1),
        INT(micro, "micro-batches", 1, 1 << 20, "micro-batches of a step, per process", 1),
        CHOICE(optimizer, "optimizer", optimizers, "muon: for the layers' matrices, adamw for the rest"),
        NUMBER(rate, "rate", 0, 1e30, "learning rate after warm-up"),
        NUMBER(rate_end, "rate-end", 0, 1e30, "learning rate at the end of the cosine"),
        NUMBER(muon_rate, "muon-rate", 0, 1e30, "the same for muon's matrices"),
        INT(warmup, "warmup", -1, 1 << 30, "steps of linear warm-up; -1: a tenth of all, at most 100", 1),
        NUMBER(decay, "weight-decay", 0, 1e6, "weight decay of matrices"),
        NUMBER(clip, "clip", 0, 1e30, "largest gradient norm; 0: no clipping"),
        NUMBER(beta1, "beta1", 0, 0.999999999, "adamw: decay of the mean of gradients"),
        NUMBER(beta2, "beta2", 0, 0.999999999, "adamw: decay of the mean of their squares"),
        NUMBER(eps, "eps", 1e-30, 1, "adamw: added to the root of that mean"),
        NUMBER(momentum, "momentum", 0, 0.999999999, "muon: decay of the sum of gradients"),
        INT(seed, "seed", 0, INT64_MAX, "of parameters, data and dropout", 1),
        INT(val_every, "val-every", 0, 1 << 30, "steps between validations; 0: none", 0),
        INT(val_batches, "val-batches", 1, 1 << 20, "micro-batches of a validation", 0),
        INT(save_every, "save-every", 0, 1 << 30, "steps between checkpoints; 0: at the end only", 0),
        INT(keep, "keep", 1, 1 << 20, "checkpoints to keep", 0),
        INT(gain_every, "gain-every", 0, 1 << 30, "steps between measurements of the residual map's gain; 0: none",
            0),
        {0}};
    _Static_assert(sizeof rows / sizeof *rows <= MAX_TRAIN_OPTIONS, "MAX_TRAIN_OPTIONS is too small");
    memcpy(table, rows, sizeof rows);
}

int train_options_model(const train_options *o, weft_model_config *c, char *error, size_t size)
{
    int plain = o->residual == WEFT_RESIDUAL_PLAIN;
    int independent = o->residual == WEFT_RESIDUAL_INDEPENDENT;
    int mhc = o->residual == WEFT_RESIDUAL_MHC || o->residual == WEFT_RESIDUAL_MHC_SINGLE_PASS || independent;
    c->struct_size = sizeof *c;
    if (weft_model_defaults((weft_residual)o->residual, c) != WEFT_OK) goto refused;
    int narrow = o->dtype == DTYPE_BF16 || (o->dtype == DTYPE_AUTO && o->backend == ON_CUDA);
    if (narrow && o->backend != ON_CUDA) {
        snprintf(error, size, "--dtype: expected auto or f32 without --backend cuda, got bf16");
        return 0;
    }
    c->dtype = narrow ? WEFT_BF16 : WEFT_F32;
    c->streams = (int32_t)(o->streams ? o->streams : plain ? 1 : 4);
    c->layers = (int32_t)o->layers;
    c->heads = (int32_t)o->heads;
    c->mixer = (weft_mixer)o->mixer;
    c->key_heads = (int32_t)o->key_heads;
    c->conv_width = (int32_t)o->conv_width;
    c->channels = o->channels;
    c->hidden = o->hidden ? o->hidden : (o->channels * 8 / 3 + 63) / 64 * 64;
    c->context = o->context;
    c->bias = o->bias;
    c->dropout = o->dropout;
    c->dropout_seed = (uint64_t)o->seed;
    c->init_alpha = o->alpha;
    if (mhc) c->first_mix = (weft_first_mix)o->first_mix;
    c->recompute = o->recompute;
    c->poison = o->poison;
    if (o->exit) c->exit = (weft_exit)(o->exit - 1);
    if (o->preset && weft_mhc_preset_numerics((weft_mhc_preset)(o->preset - 1), &c->numerics) != WEFT_OK)
        goto refused;
    if (o->sinkhorn) c->numerics.sinkhorn_iters = (int32_t)o->sinkhorn;
    c->group = (int32_t)o->group;
    if (c->recompute && !c->group) c->group = weft_recompute_best_group(c->layers, c->streams);
    /* Options without effect on the chosen residual are rejected. */
    if (!mhc && (o->preset || o->sinkhorn || o->first_mix != WEFT_FIRST_MIX_IDENTITY)) {
        snprintf(error, size,
                 "--%s: rejected with --residual %s, expected --residual mhc, mhc_single_pass or independent",
                 o->preset     ? "preset"
                 : o->sinkhorn ? "sinkhorn"
                               : "first-mix uniform",
                 residuals[o->residual]);
        return 0;
    }
    if (independent && o->sinkhorn) {
        snprintf(error, size, "--sinkhorn: rejected with --residual independent, which has no residual mix");
        return 0;
    }
    if (!o->mixer && (o->key_heads || o->conv_width)) {
        snprintf(error, size, "--%s: rejected with --mixer attention, expected --mixer gdn or hybrid",
                 o->key_heads ? "key-heads" : "conv-width");
        return 0;
    }
    if (o->warmup > o->steps) { /* a run that never reaches its rate */
        snprintf(error, size, "--warmup: expected at most --steps, which is %lld, got %lld", (long long)o->steps,
                 (long long)o->warmup);
        return 0;
    }
    if (weft_model_check(c) == WEFT_OK) return 1;
refused:
    snprintf(error, size, "%s", weft_last_error());
    return 0;
}
