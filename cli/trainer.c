/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <weft/optim.h>

__attribute__((format(printf, 2, 3))) static int fail(trainer *t, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(t->error, sizeof t->error, format, list);
    va_end(list);
    return 0;
}

static int must(trainer *t, weft_status status)
{
    return status == WEFT_OK ? 1 : fail(t, "%s", weft_last_error());
}

/* Zeroed, and counted. */
static void *take(trainer *t, size_t bytes)
{
    size_t rounded = (bytes + 4095) / 4096 * 4096 + 4096;
    void *p = aligned_alloc(4096, rounded);
    if (p) memset(p, 0, rounded);
    t->bytes += rounded;
    return p;
}

static int uses_muon(const trainer *t, const weft_model_param *p)
{
    return t->options->optimizer == OPTIMIZER_MUON && p->matrix && p->ndim == 2 && p->layer >= 0;
}

static weft_muon_args muon_args(trainer *t, const weft_model_param *p, double rate, double scale)
{
    const train_options *o = t->options;
    return (weft_muon_args){.struct_size = sizeof(weft_muon_args),
                            .blas = t->blas.library ? &t->blas : NULL,
                            .parameter = t->parameters + p->offset,
                            .moment = t->first + p->offset,
                            .gradient = t->gradients + p->offset,
                            .rows = p->shape[0],
                            .columns = p->shape[1],
                            .rate = rate,
                            .momentum = o->momentum,
                            .decay = o->decay,
                            .scale = scale};
}

static int take_workspace(trainer *t)
{
    for (int32_t i = 0; i < t->tensors; i++) {
        size_t bytes;
        weft_muon_args a = muon_args(t, &t->params[i], 0, 1);
        if (!uses_muon(t, &t->params[i])) continue;
        if (!must(t, weft_muon_workspace(&t->exec, &a, &bytes))) return 0;
        if (bytes > t->workspace_bytes) t->workspace_bytes = bytes;
    }
    t->workspace = t->workspace_bytes ? take(t, t->workspace_bytes) : NULL;
    return 1;
}

int trainer_open(trainer *t, const train_options *options, const weft_model_config *config, const corpus *text,
                 const ranks *all, int64_t sequences, int64_t length)
{
    weft_model_bytes bytes;
    *t = (trainer){.options = options, .config = *config, .text = text, .ranks = all};
    t->exec = (weft_exec){.backend = WEFT_BACKEND_CPU, .threads = (int32_t)options->threads};
    if (weft_blas_open(NULL, &t->blas) != WEFT_OK) t->blas.library = NULL; /* the caller says so */
    if (!must(t, weft_model_param_count(config, &t->tensors, &t->elements)) ||
        !must(t, weft_model_query(&t->exec, config, sequences, length, &bytes)))
        return 0;
    size_t array = (size_t)t->elements * sizeof(float), batch = (size_t)(sequences * length) * sizeof(int32_t);
    t->params = take(t, (size_t)t->tensors * sizeof *t->params);
    t->parameters = take(t, array);
    t->gradients = text ? take(t, array) : NULL;
    t->first = text ? take(t, array) : NULL;
    t->second = text ? take(t, array) : NULL;
    t->memory = take(t, bytes.total);
    t->tokens = take(t, batch);
    t->targets = take(t, batch);
    if (!t->params || !t->parameters || !t->memory || !t->tokens || !t->targets ||
        (text && (!t->gradients || !t->first || !t->second)))
        return fail(t, "out of memory: %.1f MiB are needed", (double)t->bytes * 0x1p-20);
    for (int32_t i = 0; i < t->tensors; i++)
        if (!must(t, weft_model_param_at(config, i, &t->params[i]))) return 0;
    if (text && !take_workspace(t)) return 0;
    return must(t, weft_model_bind(&t->exec, config, sequences, length, t->memory, bytes.total, &t->model)) &&
           must(t, weft_model_init(config, (uint64_t)options->seed, t->parameters));
}

void trainer_close(trainer *t)
{
    void *const all[] = {t->params, t->parameters, t->gradients, t->first,    t->second,
                         t->memory, t->tokens,     t->targets,   t->workspace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    weft_blas_close(&t->blas);
    *t = (trainer){0};
}

static weft_model_args args_of(trainer *t, const uint64_t *step, double *loss)
{
    return (weft_model_args){.struct_size = sizeof(weft_model_args),
                             .blas = t->blas.library ? &t->blas : NULL,
                             .parameters = t->parameters,
                             .gradients = t->gradients,
                             .tokens = t->tokens,
                             .targets = t->targets,
                             .step = step,
                             .loss = loss};
}

static int64_t batch_tokens(const trainer *t)
{
    return t->model.sequences * t->model.length;
}

/* All micro-batches of a step have a number, whoever runs them: two processes see what one with twice as many sees. */
static int accumulate(trainer *t, double *loss)
{
    int64_t local = t->options->micro, all = local * t->ranks->count;
    uint64_t step = (uint64_t)t->step;
    *loss = 0;
    memset(t->gradients, 0, (size_t)t->elements * sizeof(float));
    for (int64_t m = 0; m < local; m++) {
        double sum;
        int64_t micro = t->ranks->rank * local + m;
        weft_model_args args = args_of(t, &step, &sum);
        args.training = 1;
        args.token_base = micro * batch_tokens(t);
        args.loss_scale = 1 / (double)(all * batch_tokens(t));
        for (int64_t s = 0; s < t->model.sequences; s++)
            corpus_train(t->text, (uint64_t)t->options->seed,
                         (step * (uint64_t)all + (uint64_t)micro) * (uint64_t)t->model.sequences + (uint64_t)s,
                         t->tokens + s * t->model.length, t->targets + s * t->model.length);
        if (!must(t, weft_model_forward(&t->exec, &t->model, &args))) return 0;
        *loss += sum;
        if (!isfinite(sum)) break; /* the memory still shows where it began */
        if (!must(t, weft_model_backward(&t->exec, &t->model, &args))) return 0;
    }
    if (!ranks_sum_double(t->ranks, loss, 1) || !ranks_sum(t->ranks, t->gradients, t->elements))
        return fail(t, "a process of the run is gone");
    *loss /= (double)(all * batch_tokens(t));
    return 1;
}

static int norms(trainer *t, step_figures *f)
{
    double all = 0;
    for (int i = 0; i <= t->config.layers; i++) f->layer_norms[i] = 0;
    for (int32_t i = 0; i < t->tensors; i++) {
        const weft_model_param *p = &t->params[i];
        double sum;
        if (!must(t, weft_sum_squares(&t->exec, t->gradients + p->offset, p->count, &sum))) return 0;
        if (!isfinite(sum))
            return fail(t, "step %lld: the gradient of %s is not finite", (long long)t->step + 1, p->name);
        f->layer_norms[p->layer < 0 ? t->config.layers : p->layer] += sum;
        all += sum;
    }
    for (int i = 0; i <= t->config.layers; i++) f->layer_norms[i] = sqrt(f->layer_norms[i]);
    f->gradient_norm = sqrt(all);
    return 1;
}

/* Linear warm-up, then half a cosine from `high` to `low`. */
static double scheduled(const train_options *o, int64_t step, double high, double low)
{
    const double pi = 3.14159265358979323846;
    int64_t tenth = o->steps / 10 < 100 ? o->steps / 10 : 100, warmup = o->warmup < 0 ? tenth : o->warmup;
    if (step < warmup) return high * (double)(step + 1) / (double)warmup;
    int64_t rest = o->steps - warmup;
    double part = rest > 0 ? (double)(step - warmup) / (double)rest : 1;
    part = part > 1 ? 1 : part;
    return low + (high - low) * 0.5 * (1 + cos(pi * part));
}

static int update(trainer *t, step_figures *f)
{
    const train_options *o = t->options;
    weft_exec exec = t->exec;
    exec.workspace = t->workspace;
    exec.workspace_bytes = t->workspace_bytes;
    f->rate = scheduled(o, t->step, o->rate, o->rate_end);
    f->clipped = o->clip > 0 && f->gradient_norm > o->clip ? o->clip / f->gradient_norm : 1;
    double muon_rate = o->rate > 0 ? o->muon_rate * f->rate / o->rate : 0;
    for (int32_t i = 0; i < t->tensors; i++) {
        const weft_model_param *p = &t->params[i];
        weft_muon_args m = muon_args(t, p, muon_rate, f->clipped);
        weft_adamw_args a = {.struct_size = sizeof a,
                             .parameter = t->parameters + p->offset,
                             .first = t->first + p->offset,
                             .second = t->second + p->offset,
                             .gradient = t->gradients + p->offset,
                             .count = p->count,
                             .step = t->step + 1,
                             .rate = f->rate,
                             .beta1 = o->beta1,
                             .beta2 = o->beta2,
                             .eps = o->eps,
                             .decay = p->matrix ? o->decay : 0,
                             .scale = f->clipped};
        if (!must(t, uses_muon(t, p) ? weft_muon(&exec, &m) : weft_adamw(&exec, &a))) return 0;
    }
    return 1;
}

int trainer_step(trainer *t, step_figures *f)
{
    char name[64];
    if (!accumulate(t, &f->loss)) return 0;
    if (!isfinite(f->loss)) {
        if (!must(t, weft_model_first_bad(&t->exec, &t->model, name))) return 0;
        return fail(t, "step %lld: the loss is %s; first tensor that is not finite: %s", (long long)t->step + 1,
                    isnan(f->loss) ? "not a number" : "infinite",
                    name[0]               ? name
                    : t->ranks->count > 1 ? "in another process"
                                          : "none, the loss itself");
    }
    if (!norms(t, f) || !update(t, f)) return 0;
    t->step++;
    return 1;
}

int trainer_validate(trainer *t, double *loss)
{
    int64_t batches = t->options->val_batches;
    *loss = 0;
    for (int64_t b = 0; b < batches; b++) {
        double sum;
        weft_model_args args = args_of(t, NULL, &sum);
        for (int64_t s = 0; s < t->model.sequences; s++)
            corpus_validation(t->text, (uint64_t)(b * t->model.sequences + s), t->tokens + s * t->model.length,
                              t->targets + s * t->model.length);
        if (!must(t, weft_model_forward(&t->exec, &t->model, &args))) return 0;
        *loss += sum / (double)(batches * batch_tokens(t));
    }
    return 1;
}
