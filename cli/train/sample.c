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
    int backend, whole;
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

/* The last bytes of a text, as far as a model looks back on them. */
typedef struct window {
    int32_t *tokens;
    int64_t length, known;
    int64_t bytes; /* of the whole text */
} window;

static void push(window *w, int32_t token)
{
    if (w->known == w->length) memmove(w->tokens, w->tokens + 1, (size_t)(--w->known) * sizeof *w->tokens);
    w->tokens[w->known++] = token;
    w->bytes++;
}

/* Does what the trainer remembers reach to the end of the text? Layers of gdn have no end; attention has the context, and past
 * it each byte is a forward over the window. */
static int remembers(const trainer *t, const window *w)
{
    return t->state.memory && (t->config.mixer == WEFT_MIXER_GDN || w->bytes <= t->state.capacity);
}

/* Without a state each byte is a forward over the bytes before it. Small models can afford it. */
static int write_text(trainer *t, const sampler *o, window *w, const int32_t *prompt, int64_t length)
{
    const int64_t vocab = t->config.vocab;
    float logits[256]; /* a byte each */
    int32_t next = 0;
    for (int64_t i = 0; i < length; i++) push(w, prompt[i]);
    fputs(o->prompt, stdout);
    for (int64_t i = 0; i < o->count; i++) {
        const int32_t *fresh = i ? &next : prompt;
        if (!(remembers(t, w) ? trainer_go_on(t, fresh, i ? 1 : length, logits)
                              : trainer_predict(t, w->tokens, w->known, logits))) {
            fprintf(stderr, "weft sample: %s\n", t->error);
            return EXIT_FAILED;
        }
        double draw = (double)random_uniform(random_seed((uint64_t)o->seed, "sample"), (uint64_t)i);
        next = choose(logits, vocab, o, draw);
        fputc(next, stdout);
        push(w, next);
    }
    fputc('\n', stdout);
    return fflush(stdout) ? EXIT_FAILED : EXIT_PASSED;
}

static int generate(trainer *t, const sampler *o, int64_t back)
{
    const char *start = o->prompt[0] ? o->prompt : "\n";
    const size_t length = strlen(start);
    int32_t *prompt = malloc(length * sizeof *prompt);
    window w = {.tokens = malloc((size_t)back * sizeof *w.tokens), .length = back};
    int code = EXIT_UNUSABLE;
    if (t->state.memory && t->config.mixer == WEFT_MIXER_GDN) w.length = 1; /* nothing looks back */
    for (size_t i = 0; prompt && i < length; i++) prompt[i] = (unsigned char)start[i];
    if (prompt && w.tokens)
        code = write_text(t, o, &w, prompt, (int64_t)length);
    else
        fprintf(stderr, "weft sample: out of memory\n");
    free(prompt);
    free(w.tokens);
    return code;
}

/* Without attention the context is no more than what was learnt at once, and the whole of a text is looked back on. */
static void look_far(const sampler *o, weft_model_config *config)
{
    const int64_t most = 1 << 24, text = (int64_t)strlen(o->prompt) + 1 + o->count;
    if (config->mixer == WEFT_MIXER_GDN && config->context < text) config->context = text < most ? text : most;
}

/* A model that remembers what it has read, where it does and was not told otherwise. */
static int open_model(trainer *t, const sampler *o, const train_options *run, const weft_model_config *config,
                      const ranks *alone, char *error, size_t size)
{
    enum { PIECE = 64 }; /* of a text that is remembered: nothing else needs room */
    const int64_t back = longest(o, config->context);
    const int state = config->mixer != WEFT_MIXER_ATTENTION && !o->whole;
    const int64_t room = state && config->mixer == WEFT_MIXER_GDN && back > PIECE ? PIECE : back;
    if (o->whole && config->mixer == WEFT_MIXER_ATTENTION) {
        snprintf(error, size,
                 "--whole: expected a run of --mixer gdn or hybrid, got one of attention, which has no state");
        return 0;
    }
    if (trainer_open(t, run, config, NULL, alone, 1, room) && (!state || trainer_remember(t, back))) return 1;
    snprintf(error, size, "%s", t->error);
    return 0;
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
        {.name = "prompt", .kind = OPTION_TEXT, .to = &o.prompt, .value = "TEXT", .help = "text to continue"},
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
        {.name = "whole",
         .kind = OPTION_FLAG,
         .to = &o.whole,
         .help =
             "compute each byte from those before it, where gdn layers go on from a state (a test of the state)"},
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
    if (ok) look_far(&o, &config);
    ok = ok && open_model(&t, &o, &run, &config, &alone, error, sizeof error) &&
         checkpoint_load(&t, &model, path, error, sizeof error);
    if (ok) checkpoint_warn("sample", &model, path);
    checkpoint_file_close(&model);
    if (!ok) fprintf(stderr, "weft sample: %s\n", error);
    code = ok ? generate(&t, &o, longest(&o, config.context)) : EXIT_UNUSABLE;
    trainer_close(&t);
    free(texts);
    return code;
}
