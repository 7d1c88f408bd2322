/* SPDX-License-Identifier: Apache-2.0
 *
 * `weft train`: a small language model of bytes, with the residual connection of one's choice. */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check/device.h"
#include "commands.h"
#include "common/files.h"
#include "report/runlog.h"
#include "train/checkpoint.h"
#include "train/lock.h"
#include "train/progress.h"
#include "train/train_facts.h"

/* Set by SIGINT and SIGTERM: the step is finished and saved. mpirun passes SIGUSR1 on and waits, while its SIGTERM is
 * followed by SIGKILL a second later. */
static volatile sig_atomic_t asked_to_stop;

static void stop_soon(int signal_number)
{
    (void)signal_number;
    asked_to_stop = 1;
}

typedef struct session {
    train_options options;
    option table[MAX_TRAIN_OPTIONS];
    unsigned char given[MAX_TRAIN_OPTIONS];
    char *config_text;
    char *texts;            /* of options that came from a checkpoint */
    char saved[FILES_PATH]; /* the last checkpoint; "" where there is none */
    checkpoint_file model;  /* of the checkpoint that the run continues from, until it is loaded */
    char error[AGREE_WHY];
    int64_t begun_with; /* --steps of the run so far; 0 where it is not resumed */
    int together;       /* all processes know that the run cannot begin: none has to end the others */
    weft_model_config config;
    ranks ranks;
    corpus text;
    trainer trainer;
    lock lock; /* of the folder, in process 0 */
    runlog log;
    double *layer_norms;
    double *mixes; /* of all sites, each [in, out]; NULL with one stream */
    double validation;
} session;

static int complain(const session *s, int code)
{
    if (s->ranks.count > 1 && !s->together)
        fprintf(stderr, "weft train: rank %d: %s\n", s->ranks.rank, s->error);
    else if (s->error[0])
        fprintf(stderr, "weft train: %s\n", s->error);
    return code;
}

static int read_config(session *s)
{
    enum { MOST = 1 << 20 };
    char why[OPTIONS_ERROR + 64];
    size_t size;
    if (!s->options.config_file) return 1;
    s->config_text = files_read(s->options.config_file, MOST, &size, why, sizeof why);
    int text = s->config_text && !memchr(s->config_text, 0, size);
    if (s->config_text && !text) snprintf(why, sizeof why, "not text");
    if (text && options_read(s->config_text, s->table, s->given, why, sizeof why)) return 1;
    snprintf(s->error, sizeof s->error, "%s: %s", s->options.config_file, why);
    return 0;
}

/* ---- up to the first step: each returns 1, or 0 with the reason in s->error ------------------------------------------------ */

/* The folder for this run alone; processes of one run share it. */
static int take_folder(session *s)
{
    char now[FILES_PATH];
    if (s->ranks.rank != 0 || s->lock.held) return 1;
    if (!files_make_folder(s->options.out, s->error, sizeof s->error) ||
        !lock_take(&s->lock, s->options.out, s->error, sizeof s->error) ||
        !checkpoint_find(s->options.out, now, s->error, sizeof s->error))
        return 0;
    if (!strcmp(now, s->saved)) return 1;
    snprintf(s->error, sizeof s->error, "%s: another process has trained there meanwhile", s->options.out);
    return 0;
}

/* What run it is, without memory for it and without other processes. */
static int prepare(session *s)
{
    train_options *o = &s->options;
    if (!read_config(s)) return 0;
    /* A folder that is there is locked before it is looked at, a new one is made once nothing else can fail. */
    if (s->ranks.rank == 0 && !access(o->out, F_OK) && !lock_take(&s->lock, o->out, s->error, sizeof s->error))
        return 0;
    if (!checkpoint_find(o->out, s->saved, s->error, sizeof s->error)) return 0;
    if (s->saved[0] && !o->resume) {
        snprintf(s->error, sizeof s->error,
                 "%s holds a run already; --resume continues it, another --out begins one", o->out);
        return 0;
    }
    if (s->saved[0] &&
        (!checkpoint_open(&s->model, s->saved, s->error, sizeof s->error) ||
         !checkpoint_file_options(&s->model, s->table, s->given, &s->texts, s->error, sizeof s->error)))
        return 0;
    const char *steps = s->saved[0] ? safetensors_metadata(&s->model.file, "option.steps") : NULL;
    s->begun_with = steps ? strtoll(steps, NULL, 10) : 0;
    if (!train_options_model(o, &s->config, s->error, sizeof s->error) ||
        (s->saved[0] && !checkpoint_fits(&s->model, s->saved, &s->config, s->error, sizeof s->error)))
        return 0;
    if (corpus_open(&s->text, o->data, o->context)) return 1;
    snprintf(s->error, sizeof s->error, "%s", s->text.error);
    return 0;
}

static void note_run(const session *s, agree_notes *notes)
{
    train_facts_run(notes, s->table, s->saved, &s->text);
}

/* A residual mix to write down. */
static int has_mix(const weft_model_config *c)
{
    return c->residual != WEFT_RESIDUAL_PLAIN && c->residual != WEFT_RESIDUAL_INDEPENDENT;
}

static int open_model(session *s)
{
    train_options *o = &s->options;
    const weft_model_config *c = &s->config;
    size_t entries = (size_t)(2 * c->layers * c->streams * c->streams);
    s->layer_norms = calloc((size_t)c->layers + 1, sizeof *s->layer_norms);
    int memory = s->layer_norms && (!has_mix(c) || (s->mixes = calloc(entries, sizeof *s->mixes)));
    if (!memory || !trainer_open(&s->trainer, o, c, &s->text, &s->ranks, o->batch, o->context)) {
        snprintf(s->error, sizeof s->error, "%s", memory ? s->trainer.error : "out of memory");
        return 0;
    }
    if (s->saved[0] && !checkpoint_load(&s->trainer, &s->model, s->saved, s->error, sizeof s->error)) return 0;
    checkpoint_file_close(&s->model);
    return 1;
}

static void note_trainer(const session *s, agree_notes *notes)
{
    train_facts_model(notes, &s->trainer);
}

static int open_sums(session *s)
{
    if (trainer_connect(&s->trainer)) return 1;
    snprintf(s->error, sizeof s->error, "%s", s->trainer.error);
    return 0;
}

static int is_longer(const session *s)
{
    return s->begun_with && s->begun_with < s->options.steps;
}

static int open_log(session *s)
{
    const train_options *o = &s->options;
    if (s->ranks.rank != 0) return 1;
    checkpoint_warn("train", &s->model, s->saved);
    if (!take_folder(s) || !runlog_open(&s->log, o->out, s->trainer.step, s->error, sizeof s->error)) return 0;
    /* A run that is made longer is another one from here on. */
    if (s->trainer.step == 0 || is_longer(s)) runlog_options(&s->log, s->table);
    return 1;
}

/* Where only some processes train, the others must not wait for them. */
static void stay_away(session *s)
{
    const agree_notes notes = {.error = "its options do not start a run"};
    (void)agree(&s->ranks, &notes, s->error);
    s->together = 1;
}

/* Processes go from one line to the next together, or end together. Nothing is written before all of them agree. */
static int begin(session *s)
{
    static const struct {
        int (*act)(session *);
        void (*note)(const session *, agree_notes *);
    } stages[] = {{prepare, note_run}, {open_model, note_trainer}, {open_sums, NULL}, {open_log, NULL}};
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        agree_notes notes = {0};
        if (!stages[i].act(s))
            snprintf(notes.error, sizeof notes.error, "%.*s", AGREE_ERROR - 1, s->error);
        else if (stages[i].note && s->ranks.count > 1)
            stages[i].note(s, &notes);
        if (agree(&s->ranks, &notes, s->error)) continue;
        s->together = 1;
        return 0;
    }
    return 1;
}

static void introduce(const session *s)
{
    const weft_model_config *c = &s->config;
    const trainer *t = &s->trainer;
    if (s->options.quiet || s->ranks.rank != 0) return;
    printf("%s, %s: %d layers, %lld channels, %d streams; %.2f M parameters; %zu bytes of text in %zu files\n",
           weft_residual_name(c->residual), weft_mixer_name(c->mixer), (int)c->layers, (long long)c->channels,
           (int)c->streams, (double)t->elements * 1e-6, s->text.bytes, s->text.num_files);
    if (t->exec.backend == WEFT_BACKEND_CUDA) {
        device_facts gpu;
        if (device_facts_of(t->exec.device, &gpu))
            printf("on %s, activations in %s\n", gpu.name, weft_dtype_name(c->dtype));
    }
    if (t->blas.library)
        printf("products by %s\n", t->blas.name);
    else
        printf("products by the built-in loop, which is slow: no %s\n",
               t->exec.backend == WEFT_BACKEND_CUDA ? "cuBLASLt was found"
                                                    : "BLAS was found (Debian: libopenblas0)");
    if (s->ranks.count > 1) printf("%d processes\n", s->ranks.count);
    if (t->nccl.library) printf("gradients summed by NCCL\n");
    if (s->saved[0]) printf("continues after step %lld of %s\n", (long long)t->step, s->saved);
    if (is_longer(s))
        printf("%lld steps instead of %lld; the rate is that of a run begun with %lld\n",
               (long long)s->options.steps, (long long)s->begun_with, (long long)s->options.steps);
    fflush(stdout);
}

static int due(int64_t every, int64_t step, int64_t last)
{
    return every > 0 && (step % every == 0 || step == last);
}

static int64_t peak_bytes(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) ? 0 : (int64_t)usage.ru_maxrss * 1024;
}

/* The mean residual mix of every site, where there is one. */
static int measure_mixes(session *s)
{
    const weft_model_config *c = &s->config;
    for (int32_t site = 0; s->mixes && site < 2 * c->layers; site++)
        if (!trainer_mix(&s->trainer, site, s->mixes + (int64_t)site * c->streams * c->streams)) {
            snprintf(s->error, sizeof s->error, "%s", s->trainer.error);
            return 0;
        }
    return 1;
}

static void write_mixes(session *s)
{
    int32_t entries = s->config.streams * s->config.streams;
    runlog_open_lists(&s->log, "residual_mix");
    for (int32_t site = 0; site < 2 * s->config.layers; site++)
        runlog_list(&s->log, s->mixes + (int64_t)site * entries, entries);
    runlog_close_lists(&s->log);
}

/* Writes down a step that has been done; 0 where a measurement or a write failed. */
static int write_down(session *s, const step_figures *f, double seconds)
{
    const train_options *o = &s->options;
    trainer *t = &s->trainer;
    int64_t tokens = o->batch * o->context * o->micro * s->ranks.count;
    weft_model_gains gains;
    int with_gains = due(o->gain_every, t->step, o->steps), with_validation = due(o->val_every, t->step, o->steps);
    int with_mixes = s->mixes && o->gain_every > 0 && (with_validation || t->step == o->steps);
    /* Gains and mixes are those of the step's last forward, so they come before validation. */
    if (with_mixes && !measure_mixes(s)) return 0;
    if (with_gains && weft_model_gain(&t->exec, &t->model, &gains) != WEFT_OK) {
        snprintf(s->error, sizeof s->error, "%s", weft_last_error());
        return 0;
    }
    if (with_validation && !trainer_validate(t, &s->validation)) {
        snprintf(s->error, sizeof s->error, "%s", t->error);
        return 0;
    }
    if (s->ranks.rank != 0) return 1;
    runlog *log = &s->log;
    runlog_begin(log, t->step);
    runlog_number(log, "loss", f->loss);
    if (with_validation) runlog_number(log, "val_loss", s->validation);
    runlog_number(log, "rate", f->rate);
    runlog_number(log, "gradient_norm", f->gradient_norm);
    runlog_number(log, "seconds", seconds);
    runlog_number(log, "tokens_per_s", (double)tokens / seconds);
    if (with_gains) {
        runlog_number(log, "row_gain", gains.row_mean);
        runlog_number(log, "row_gain_max", gains.row_max);
        runlog_number(log, "column_gain", gains.column_mean);
        runlog_number(log, "column_gain_max", gains.column_max);
        runlog_numbers(log, "layer_gradient_norms", f->layer_norms, s->config.layers + 1);
    }
    if (t->step == 1 || with_validation) {
        runlog_number(log, "bytes", (double)t->bytes);
        runlog_number(log, "stream_bytes", (double)t->model.bytes.recompute.total);
        runlog_number(log, "peak_bytes", (double)peak_bytes());
    }
    if (with_mixes) write_mixes(s);
    runlog_end(log);
    if (!log->error) return 1;
    snprintf(s->error, sizeof s->error, "%s/log.jsonl: %s", o->out, strerror(log->error));
    return 0;
}

static int save(session *s)
{
    train_options *o = &s->options;
    if (s->ranks.rank == 0 && !checkpoint_save(&s->trainer, s->table, o->out, o->keep, s->error, sizeof s->error))
        return 0;
    return checkpoint_find(o->out, s->saved, s->error, sizeof s->error);
}

static int train(session *s)
{
    const train_options *o = &s->options;
    trainer *t = &s->trainer;
    step_figures f = {.layer_norms = s->layer_norms};
    progress bar = progress_open(!o->quiet && s->ranks.rank == 0, t->step, o->steps);
    double speed = 0;
    s->validation = (double)NAN;
    while (t->step < o->steps && !agree_to_stop(&s->ranks, asked_to_stop)) {
        double start = progress_now();
        if (!trainer_step(t, &f)) {
            progress_close(&bar);
            char last[FILES_PATH + 64] = "there is no checkpoint yet";
            if (s->saved[0]) snprintf(last, sizeof last, "last good checkpoint: %s", s->saved);
            fprintf(stderr, "weft train: %s; %s\n", t->error, last);
            return EXIT_FAILED;
        }
        double seconds = progress_now() - start;
        double now = (double)(o->batch * o->context * o->micro * s->ranks.count) / seconds;
        speed = speed > 0 ? 0.9 * speed + 0.1 * now : now;
        if (!write_down(s, &f, seconds) || (due(o->save_every, t->step, o->steps) && !save(s))) {
            progress_close(&bar);
            return complain(s, EXIT_UNUSABLE);
        }
        progress_show(&bar, t->step, f.loss, s->validation, speed, t->bytes);
    }
    progress_close(&bar);
    if (!save(s)) return complain(s, EXIT_UNUSABLE);
    if (s->ranks.rank == 0 && !runlog_close(&s->log)) {
        snprintf(s->error, sizeof s->error, "%s/log.jsonl: %s", o->out, strerror(errno));
        return complain(s, EXIT_UNUSABLE);
    }
    if (!o->quiet && s->ranks.rank == 0)
        printf("%s at step %lld: %s\n", t->step < o->steps ? "stopped" : "done", (long long)t->step, s->saved);
    return EXIT_PASSED;
}

int command_train(int argc, char **argv)
{
    session *s = calloc(1, sizeof *s);
    if (!s) return EXIT_UNUSABLE;
    train_options_open(&s->options, s->table);
    int code = options_parse_given(argc, argv, s->table, s->given);
    signal(SIGINT, stop_soon);
    signal(SIGTERM, stop_soon);
    signal(SIGUSR1, stop_soon);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is then an error of the write, like a full disk */
    if (!ranks_open(&s->ranks, s->error, sizeof s->error)) {
        code = complain(s, EXIT_UNUSABLE);
    } else if (code >= 0) {
        stay_away(s);
    } else if (!begin(s)) {
        code = complain(s, EXIT_UNUSABLE);
    } else {
        introduce(s);
        code = train(s);
    }
    if (code != EXIT_PASSED && !s->together) ranks_abort(&s->ranks, code);
    if (s->log.file) runlog_close(&s->log);
    trainer_close(&s->trainer);
    corpus_close(&s->text);
    ranks_close(&s->ranks);
    free(s->layer_norms);
    free(s->mixes);
    free(s->config_text);
    checkpoint_file_close(&s->model);
    lock_release(&s->lock);
    free(s->texts);
    free(s);
    return code;
}
