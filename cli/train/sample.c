/* SPDX-License-Identifier: Apache-2.0
 *
 * `weft sample`: text from a checkpoint, byte by byte. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/random.h"
#include "commands.h"
#include "train/checkpoint.h"

typedef struct sampler {
    const char *from, *prompt;
    int64_t count, top, seed, threads;
    int backend;
    double temperature;
} sampler;

/* The byte whose share of the probability covers `draw`, among the `top` likeliest. */
static int choose(const float *logits, int64_t vocab, const sampler *o, double draw)
{
    double weight[256], sum = 0, high = -INFINITY;
    int order[256];
    for (int i = 0; i < vocab; i++) {
        int k = i;
        while (k > 0 && logits[order[k - 1]] < logits[i]) order[k] = order[k - 1], k--;
        order[k] = i;
    }
    if (o->temperature == 0) return order[0];
    int64_t count = o->top > 0 && o->top < vocab ? o->top : vocab;
    high = (double)logits[order[0]];
    for (int64_t i = 0; i < count; i++) sum += weight[i] = exp(((double)logits[order[i]] - high) / o->temperature);
    for (int64_t i = 0; i < count; i++)
        if ((draw -= weight[i] / sum) < 0) return order[i];
    return order[count - 1];
}

/* How many tokens a sample looks back on: what there is at its end, as far as the context reaches. The metadata of a file can
 * name any context; memory and time follow what is asked for. */
static int64_t longest(const sampler *o, int64_t context)
{
    int64_t tokens = (int64_t)strlen(o->prompt) + 1 + o->count;
    return tokens < context ? tokens : context;
}

/* Without a cache of keys: each byte is a forward over the bytes before it. Small models can afford it. */
static int generate(trainer *t, const sampler *o)
{
    int64_t length = t->length, vocab = t->config.vocab, known = 0;
    int32_t *tokens = t->host_batch.tokens;
    float logits[256]; /* a byte each */
    const char *start = o->prompt[0] ? o->prompt : "\n";
    for (const char *p = start; *p; p++) {
        if (known == length) memmove(tokens, tokens + 1, (size_t)(--known) * sizeof *tokens);
        tokens[known++] = (unsigned char)*p;
    }
    fputs(o->prompt, stdout);
    for (int64_t i = 0; i < o->count; i++) {
        if (!trainer_predict(t, known, logits)) {
            fprintf(stderr, "weft sample: %s\n", t->error);
            return EXIT_FAILED;
        }
        double draw = (double)random_uniform(random_seed((uint64_t)o->seed, "sample"), (uint64_t)i);
        int next = choose(logits, vocab, o, draw);
        fputc(next, stdout);
        if (known == length) memmove(tokens, tokens + 1, (size_t)(--known) * sizeof *tokens);
        tokens[known++] = next;
    }
    fputc('\n', stdout);
    return fflush(stdout) ? EXIT_FAILED : EXIT_PASSED;
}

int command_sample(int argc, char **argv)
{
    sampler o = {.from = "runs/weft", .prompt = "", .count = 200, .top = 40, .seed = 1, .temperature = 0.8};
    const option options[] = {
        {.name = "from",
         .kind = OPTION_TEXT,
         .to = &o.from,
         .value = "DIR",
         .help = "a run, or one of its checkpoints"},
        {.name = "prompt", .kind = OPTION_TEXT, .to = &o.prompt, .value = "TEXT", .help = "what to go on from"},
        {.name = "count",
         .kind = OPTION_INT,
         .to = &o.count,
         .value = "N",
         .help = "bytes to write",
         .min = 0,
         .max = 1 << 30},
        {.name = "temperature",
         .kind = OPTION_NUMBER,
         .to = &o.temperature,
         .value = "X",
         .help = "0: always the likeliest",
         .low = 0,
         .high = 1e6},
        {.name = "top-k",
         .kind = OPTION_INT,
         .to = &o.top,
         .value = "N",
         .help = "choose among the N likeliest; 0: all",
         .min = 0,
         .max = 256},
        {.name = "seed",
         .kind = OPTION_INT,
         .to = &o.seed,
         .value = "N",
         .help = "of the choice",
         .min = 0,
         .max = INT64_MAX},
        {.name = "backend",
         .kind = OPTION_CHOICE,
         .to = &o.backend,
         .help = "where the model runs",
         .choices = train_backends},
        {.name = "threads",
         .kind = OPTION_INT,
         .to = &o.threads,
         .value = "N",
         .help = "CPU threads",
         .min = 0,
         .max = 4096},
        {0}};
    static char path[FILES_PATH], error[512];
    char *texts = NULL;
    checkpoint_file model;
    static const unsigned char nothing_given[MAX_TRAIN_OPTIONS];
    const ranks alone = {.count = 1};
    train_options run;
    option table[MAX_TRAIN_OPTIONS];
    weft_model_config config;
    trainer t = {0};
    int code = options_parse(argc, argv, options);
    if (code >= 0) return code;
    train_options_open(&run, table);
    int ok = checkpoint_open_last(&model, o.from, path, error, sizeof error) &&
             checkpoint_file_options(&model, table, nothing_given, &texts, error, sizeof error);
    /* The device of sampling is independent of the device of training. */
    run.threads = o.threads, run.backend = o.backend, run.dtype = DTYPE_AUTO;
    ok = ok && train_options_model(&run, &config, error, sizeof error) &&
         checkpoint_fits(&model, path, &config, error, sizeof error);
    if (ok && !trainer_open(&t, &run, &config, NULL, &alone, 1, longest(&o, config.context))) {
        snprintf(error, sizeof error, "%s", t.error);
        ok = 0;
    }
    ok = ok && checkpoint_load(&t, &model, path, error, sizeof error);
    if (ok) checkpoint_warn("sample", &model, path);
    checkpoint_file_close(&model);
    if (!ok) fprintf(stderr, "weft sample: %s\n", error);
    code = ok ? generate(&t, &o) : EXIT_UNUSABLE;
    trainer_close(&t);
    free(texts);
    return code;
}
