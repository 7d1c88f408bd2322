/* SPDX-License-Identifier: Apache-2.0 */
#include "train/trainer.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <weft/optim.h>

#include "check/device.h"

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

static int on_cuda(const trainer *t)
{
    return t->exec.backend == WEFT_BACKEND_CUDA;
}

/* What the device says, or nothing. */
static int well(trainer *t, const char *wrong)
{
    return wrong ? fail(t, "the GPU: %s", wrong) : 1;
}

/* ---- memory ------------------------------------------------------------------------------------------------------------- */

static int uses_muon(const trainer *t, const weft_model_param *p)
{
    return t->options->optimizer == OPTIMIZER_MUON && p->matrix && p->ndim == 2 && p->layer >= 0;
}

static weft_muon_args muon_args(trainer *t, const weft_model_param *p, double rate)
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
                            .scale = 1,
                            .factor = t->figures.factor};
}

static int count_workspace(trainer *t)
{
    size_t bytes;
    for (int32_t i = 0; i < t->num_pieces; i++) {
        if (!must(t, weft_sum_squares_workspace(&t->exec, t->pieces[i].count, &bytes))) return 0;
        if (bytes > t->exec.workspace_bytes) t->exec.workspace_bytes = bytes;
    }
    for (int32_t i = 0; i < t->tensors; i++) {
        const weft_model_param *p = &t->params[i];
        const weft_muon_args a = {.struct_size = sizeof a, .rows = p->shape[0], .columns = p->shape[1]};
        if (!uses_muon(t, p)) continue;
        if (!must(t, weft_muon_workspace(&t->exec, &a, &bytes))) return 0;
        if (bytes > t->exec.workspace_bytes) t->exec.workspace_bytes = bytes;
    }
    return 1;
}

/* Pages, so that arrays begin as they would by themselves. */
static void *take(char *base, size_t *used, size_t bytes)
{
    void *p = base ? base + *used : NULL;
    *used += (bytes + 4095) / 4096 * 4096;
    return p;
}

static trainer_batch batch_at(char *base, int64_t tokens, size_t *bytes)
{
    size_t row = ((size_t)tokens * sizeof(int32_t) + 63) / 64 * 64;
    *bytes = 64 + 2 * row;
    return (trainer_batch){.step = (void *)base,
                           .tokens = base ? (void *)(base + 64) : NULL,
                           .targets = base ? (void *)(base + 64 + row) : NULL};
}

static trainer_figures figures_at(double *base, int64_t micro, int32_t pieces, size_t *bytes)
{
    *bytes = (size_t)(micro + pieces + 2) * sizeof(double);
    if (!base) return (trainer_figures){0};
    double *sums = base + micro;
    return (trainer_figures){base, sums, sums + pieces, sums + pieces + 1};
}

static int64_t micros(const trainer *t)
{
    return t->text ? t->options->micro : 1;
}

/* Everything in a fixed order; without a base it counts. */
static size_t lay_out(trainer *t, char *base, size_t model_bytes, int64_t tokens)
{
    size_t used = 0, array = (size_t)t->elements * sizeof(float);
    t->parameters = take(base, &used, array);
    if (t->text) {
        t->gradients = take(base, &used, array);
        t->first = take(base, &used, array);
        t->second = take(base, &used, array);
        t->exec.workspace = take(base, &used, t->exec.workspace_bytes);
    }
    t->memory = take(base, &used, model_bytes);
    batch_at(NULL, micros(t) * tokens, &t->batch_bytes);
    figures_at(NULL, micros(t), t->num_pieces, &t->figures_bytes);
    t->batch = batch_at(take(base, &used, t->batch_bytes), micros(t) * tokens, &t->batch_bytes);
    t->figures = figures_at(take(base, &used, t->figures_bytes), micros(t), t->num_pieces, &t->figures_bytes);
    return used;
}

static int open_block(trainer *t, size_t model_bytes, int64_t tokens)
{
    t->bytes = lay_out(t, NULL, model_bytes, tokens);
    t->block = on_cuda(t) ? device_alloc(t->bytes) : aligned_alloc(4096, t->bytes);
    size_t host = t->batch_bytes + t->figures_bytes;
    t->host_block = on_cuda(t) ? device_pinned(host) : NULL;
    if (!t->block || (on_cuda(t) && !t->host_block))
        return fail(t, "out of memory: %.1f MiB are needed", (double)t->bytes * 0x1p-20);
    lay_out(t, t->block, model_bytes, tokens);
    t->host_batch = t->batch;
    t->host_figures = t->figures;
    if (!on_cuda(t)) {
        memset(t->block, 0, t->bytes);
        return 1;
    }
    t->host_batch = batch_at(t->host_block, micros(t) * tokens, &t->batch_bytes);
    t->host_figures = figures_at((double *)(void *)((char *)t->host_block + t->batch_bytes), micros(t),
                                 t->num_pieces, &t->figures_bytes);
    return well(t, device_fill(t->block, 0, t->bytes));
}

/* Runs of parameters of one layer; what lies between tensors is zero and stays zero. */
static void find_pieces(trainer *t)
{
    t->num_pieces = 0;
    for (int32_t i = 0; i < t->tensors; i++) {
        const weft_model_param *p = &t->params[i];
        trainer_piece *last = t->num_pieces ? &t->pieces[t->num_pieces - 1] : NULL;
        if (!last || last->layer != p->layer)
            t->pieces[t->num_pieces++] = (trainer_piece){p->offset, p->count, p->layer};
        else
            last->count = p->offset + p->count - last->offset;
    }
}

float *trainer_map(const trainer *t, float *array)
{
    size_t bytes = (size_t)t->elements * sizeof(float);
    if (!on_cuda(t)) return array;
    float *host = malloc(bytes);
    if (host && device_get(host, array, bytes)) {
        free(host);
        host = NULL;
    }
    return host;
}

int trainer_unmap(const trainer *t, float *array, float *host, int changed)
{
    if (host == array || !host) return host != NULL;
    int ok = !changed || !device_put(array, host, (size_t)t->elements * sizeof(float));
    free(host);
    return ok;
}

/* ---- opening --------------------------------------------------------------------------------------------------------------- */

static int open_device(trainer *t)
{
    int devices = device_count();
    if (!weft_backend_available(WEFT_BACKEND_CUDA) || devices < 1)
        return fail(t, "--backend cuda: %s",
                    device_built() ? "there is no GPU that can run it" : "this build has no CUDA backend");
    t->exec.device = t->ranks->local % devices;
    if (!well(t, device_use(t->exec.device))) return 0;
    if (t->config.dtype == WEFT_BF16) t->exec.precision = WEFT_PRECISION_TF32; /* of Muon's products */
    return 1;
}

int trainer_connect(trainer *t)
{
    char why[128] = "processes share a GPU";
    if (!on_cuda(t) || !t->ranks->started) return 1;
    /* Machines may have different numbers of GPUs. */
    if (ranks_all(t->ranks, t->ranks->locals <= device_count()) && nccl_open(&t->nccl, t->ranks, why, sizeof why))
        return 1;
    if (t->ranks->rank == 0) fprintf(stderr, "weft train: gradients are not summed by NCCL: %s\n", why);
    if (t->ranks->count < 2) return 1;
    t->host_sums = malloc((size_t)t->elements * sizeof(float));
    return t->host_sums ? 1 : fail(t, "out of memory");
}

static int first_values(trainer *t)
{
    float *host = trainer_map(t, t->parameters);
    if (!host) return fail(t, "out of memory");
    int ok = must(t, weft_model_init(&t->config, (uint64_t)t->options->seed, host));
    return trainer_unmap(t, t->parameters, host, 1) && ok;
}

int trainer_open(trainer *t, const train_options *options, const weft_model_config *config, corpus *text,
                 const ranks *all, int64_t sequences, int64_t length)
{
    weft_model_bytes bytes;
    *t = (trainer){.options = options, .config = *config, .text = text, .ranks = all};
    t->exec = WEFT_STRUCT(weft_exec, .backend = options->backend == ON_CUDA ? WEFT_BACKEND_CUDA : WEFT_BACKEND_CPU);
    if (!must(t, weft_model_param_count(config, &t->tensors, &t->elements))) return 0;
    if (on_cuda(t) && !open_device(t)) return 0;
    if (!on_cuda(t)) t->exec.threads = (int32_t)options->threads;
    if (weft_blas_open_for(&t->exec, NULL, &t->blas) != WEFT_OK) t->blas.library = NULL; /* the caller says so */
    if (!must(t, weft_model_query(&t->exec, config, sequences, length, &bytes))) return 0;
    t->params = calloc((size_t)t->tensors, sizeof *t->params);
    t->pieces = calloc((size_t)t->tensors, sizeof *t->pieces);
    if (!t->params || !t->pieces) return fail(t, "out of memory");
    for (int32_t i = 0; i < t->tensors; i++)
        if (!must(t, weft_model_param_at(config, i, &t->params[i]))) return 0;
    find_pieces(t);
    t->memory_bytes = bytes.total;
    t->length = length;
    if ((text && !count_workspace(t)) || !open_block(t, bytes.total, sequences * length)) return 0;
    return must(t, weft_model_bind(&t->exec, config, sequences, length, t->memory, bytes.total, &t->model)) &&
           first_values(t);
}

static void release(const trainer *t, char *memory)
{
    if (memory && on_cuda(t)) {
        (void)device_wait();
        device_free(memory);
    } else
        free(memory);
}

void trainer_close(trainer *t)
{
    release(t, t->block);
    release(t, t->state.memory);
    device_pinned_free(t->host_block);
    nccl_close(&t->nccl);
    free(t->host_sums);
    free(t->params);
    free(t->pieces);
    weft_blas_close(&t->blas);
    *t = (trainer){0};
}

/* ---- a step ------------------------------------------------------------------------------------------------------------------- */

static int64_t batch_tokens(const trainer *t)
{
    return t->model.sequences * t->model.length;
}

static weft_model_args args_of(trainer *t, int64_t micro)
{
    return (weft_model_args){.struct_size = sizeof(weft_model_args),
                             .blas = t->blas.library ? &t->blas : NULL,
                             .parameters = t->parameters,
                             .gradients = t->gradients,
                             .tokens = t->batch.tokens + micro * batch_tokens(t),
                             .targets = t->batch.targets + micro * batch_tokens(t),
                             .step = t->batch.step,
                             .loss = &t->figures.losses[micro]};
}

static int send_batch(trainer *t)
{
    return !on_cuda(t) || well(t, device_put_later(t->batch.step, t->host_batch.step, t->batch_bytes));
}

/* Waits for everything before it. */
static int read_figures(trainer *t)
{
    return !on_cuda(t) || well(t, device_get(t->host_figures.losses, t->figures.losses, t->figures_bytes));
}

static int clear(trainer *t, void *p, size_t bytes)
{
    if (on_cuda(t)) return well(t, device_fill_later(p, 0, bytes));
    memset(p, 0, bytes);
    return 1;
}

static int sum_gradients(trainer *t)
{
    size_t bytes = (size_t)t->elements * sizeof(float);
    if (t->nccl.library)
        return nccl_sum(&t->nccl, t->gradients, t->elements, t->exec.stream) || fail(t, "NCCL cannot go on");
    if (!t->host_sums) /* one process, or the CPU */
        return ranks_sum(t->ranks, t->gradients, t->elements) || fail(t, "a process of the run is gone");
    return well(t, device_get(t->host_sums, t->gradients, bytes)) &&
           (ranks_sum(t->ranks, t->host_sums, t->elements) || fail(t, "a process of the run is gone")) &&
           well(t, device_put(t->gradients, t->host_sums, bytes));
}

/* All micro-batches of a step have a number, whoever runs them: two processes see what one with twice as many sees. */
static int accumulate(trainer *t)
{
    int64_t local = t->options->micro, all = local * t->ranks->count;
    uint64_t step = (uint64_t)t->step;
    *t->host_batch.step = step;
    for (int64_t m = 0; m < local; m++)
        for (int64_t s = 0; s < t->model.sequences; s++) {
            uint64_t micro = (uint64_t)(t->ranks->rank * local + m);
            int64_t at = (m * t->model.sequences + s) * t->model.length;
            if (!corpus_train(t->text, (uint64_t)t->options->seed,
                              (step * (uint64_t)all + micro) * (uint64_t)t->model.sequences + (uint64_t)s,
                              t->host_batch.tokens + at, t->host_batch.targets + at))
                return fail(t, "%s", t->text->error);
        }
    if (!send_batch(t) || !clear(t, t->gradients, (size_t)t->elements * sizeof(float)) ||
        !clear(t, t->figures.losses, t->figures_bytes))
        return 0;
    for (int64_t m = 0; m < local; m++) {
        weft_model_args args = args_of(t, m);
        args.training = 1;
        args.token_base = (t->ranks->rank * local + m) * batch_tokens(t);
        args.loss_scale = 1 / (double)(all * batch_tokens(t));
        if (!must(t, weft_model_forward(&t->exec, &t->model, &args))) return 0;
        /* The memory still shows where it began. On a GPU nobody knows yet, and the clip will see it. */
        if (!on_cuda(t) && !isfinite(*args.loss)) break;
        if (!must(t, weft_model_backward(&t->exec, &t->model, &args))) return 0;
    }
    return sum_gradients(t);
}

static int clip(trainer *t)
{
    for (int32_t i = 0; i < t->num_pieces; i++)
        if (!must(t, weft_sum_squares(&t->exec, t->gradients + t->pieces[i].offset, t->pieces[i].count,
                                      &t->figures.sums[i])))
            return 0;
    return must(t, weft_clip(&t->exec, WEFT_ARGS(weft_clip_args, .sums = t->figures.sums, .count = t->num_pieces,
                                                 .others = t->figures.losses, .num_others = (int32_t)micros(t),
                                                 .largest = t->options->clip, .norm = t->figures.norm,
                                                 .factor = t->figures.factor)));
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

/* Elements from tensor `first` on that AdamW takes at once: tensors that follow each other and decay alike, with the zeros between
 * them, which stay zero. `next` is the first tensor after them. */
static int64_t alike(const trainer *t, int32_t first, int32_t *next)
{
    const weft_model_param *p = &t->params[first], *last = p;
    for (*next = first + 1; *next < t->tensors; ++*next) {
        const weft_model_param *q = &t->params[*next];
        if (uses_muon(t, q) || q->matrix != p->matrix) break;
        last = q;
    }
    return last->offset + last->count - p->offset;
}

static int update(trainer *t, double rate)
{
    const train_options *o = t->options;
    double muon_rate = o->rate > 0 ? o->muon_rate * rate / o->rate : 0;
    for (int32_t i = 0, next; i < t->tensors; i = next) {
        const weft_model_param *p = &t->params[i];
        if (uses_muon(t, p)) {
            weft_muon_args m = muon_args(t, p, muon_rate);
            next = i + 1;
            if (!must(t, weft_muon(&t->exec, &m))) return 0;
            continue;
        }
        weft_adamw_args a = {.struct_size = sizeof a,
                             .parameter = t->parameters + p->offset,
                             .first = t->first + p->offset,
                             .second = t->second + p->offset,
                             .gradient = t->gradients + p->offset,
                             .count = alike(t, i, &next),
                             .step = t->step + 1,
                             .rate = rate,
                             .beta1 = o->beta1,
                             .beta2 = o->beta2,
                             .eps = o->eps,
                             .decay = p->matrix ? o->decay : 0,
                             .scale = 1,
                             .factor = t->figures.factor};
        if (!must(t, weft_adamw(&t->exec, &a))) return 0;
    }
    return 1;
}

/* The first tensor whose gradient is not finite, in words. */
static int blame(trainer *t)
{
    for (int32_t i = 0; i < t->tensors; i++) {
        const weft_model_param *p = &t->params[i];
        if (!must(t, weft_sum_squares(&t->exec, t->gradients + p->offset, p->count, t->figures.sums)) ||
            !read_figures(t))
            return 0;
        if (!isfinite(*t->host_figures.sums))
            return fail(t, "step %lld: the gradient of %s is not finite", (long long)t->step + 1, p->name);
    }
    return fail(t, "step %lld: the gradient is not finite", (long long)t->step + 1);
}

static int look_at_figures(trainer *t, step_figures *f)
{
    char name[64];
    int layers = t->config.layers;
    const trainer_figures *g = &t->host_figures;
    f->loss = 0;
    for (int64_t m = 0; m < micros(t); m++) f->loss += g->losses[m];
    if (!ranks_sum_double(t->ranks, &f->loss, 1)) return fail(t, "a process of the run is gone");
    f->loss /= (double)(micros(t) * t->ranks->count * batch_tokens(t));
    if (!isfinite(f->loss)) {
        if (!must(t, weft_model_first_nonfinite(&t->exec, &t->model, name))) return 0;
        return fail(t, "step %lld: the loss is %s; first tensor that is not finite: %s", (long long)t->step + 1,
                    isnan(f->loss) ? "not a number" : "infinite",
                    name[0]               ? name
                    : t->ranks->count > 1 ? "in another process"
                                          : "none, the loss itself");
    }
    f->gradient_norm = *g->norm;
    if (!isfinite(f->gradient_norm)) return blame(t);
    for (int i = 0; i <= layers; i++) f->layer_norms[i] = 0;
    for (int32_t i = 0; i < t->num_pieces; i++)
        f->layer_norms[t->pieces[i].layer < 0 ? layers : t->pieces[i].layer] += g->sums[i];
    for (int i = 0; i <= layers; i++) f->layer_norms[i] = sqrt(f->layer_norms[i]);
    return 1;
}

int trainer_step(trainer *t, step_figures *f)
{
    f->rate = scheduled(t->options, t->step, t->options->rate, t->options->rate_end);
    if (!accumulate(t) || !clip(t) || !update(t, f->rate) || !read_figures(t) || !look_at_figures(t, f)) return 0;
    t->step++;
    return 1;
}

/* ---- without learning ------------------------------------------------------------------------------------------------------------- */

int trainer_validate(trainer *t, double *loss)
{
    int64_t batches = t->options->val_batches;
    *loss = 0;
    for (int64_t b = 0; b < batches; b++) {
        weft_model_args args = args_of(t, 0);
        for (int64_t s = 0; s < t->model.sequences; s++)
            if (!corpus_validation(t->text, (uint64_t)(b * t->model.sequences + s),
                                   t->host_batch.tokens + s * t->model.length,
                                   t->host_batch.targets + s * t->model.length))
                return fail(t, "%s", t->text->error);
        if (!send_batch(t) || !must(t, weft_model_forward(&t->exec, &t->model, &args)) || !read_figures(t))
            return 0;
        *loss += *t->host_figures.losses / (double)(batches * batch_tokens(t));
    }
    return 1;
}

int trainer_mix(trainer *t, int32_t site, double *mix)
{
    weft_tensor res = weft_model_mix(&t->model, site);
    int64_t n = t->config.streams, tokens = res.shape[0];
    int turned = t->config.residual != WEFT_RESIDUAL_HC && t->config.numerics.apply == WEFT_APPLY_OUT_IN;
    size_t bytes = (size_t)(tokens * n * n) * sizeof(float);
    float *host = on_cuda(t) ? malloc(bytes) : res.data;
    if (!host) return fail(t, "out of memory");
    int ok = !on_cuda(t) || well(t, device_get(host, res.data, bytes));
    for (int64_t e = 0; ok && e < n * n; e++) {
        double sum = 0;
        int64_t from = turned ? e % n * n + e / n : e;
        for (int64_t k = 0; k < tokens; k++) sum += (double)host[k * n * n + from];
        mix[e] = sum / (double)tokens;
    }
    if (on_cuda(t)) free(host);
    return ok;
}

/* The model for sequences of at least so many tokens, in few different lengths: a library of products may prepare itself for
 * each. */
static void shorten(trainer *t, int64_t count)
{
    int64_t length = 64;
    while (length < count) length *= 2;
    if (length > t->length) length = t->length;
    if (length == t->model.length) return;
    weft_model other;
    if (weft_model_bind(&t->exec, &t->config, 1, length, t->memory, t->memory_bytes, &other) == WEFT_OK)
        t->model = other;
    else /* the memory is counted for the longest; a shorter one takes less, but that is not promised */
        (void)weft_model_bind(&t->exec, &t->config, 1, t->length, t->memory, t->memory_bytes, &t->model);
}

/* The last row of logits of the pass that has been. */
static int last_logits(trainer *t, int64_t count, float *to)
{
    size_t bytes = (size_t)t->config.vocab * sizeof *to;
    const float *logits = (const float *)weft_model_logits(&t->model).data + (count - 1) * t->config.vocab;
    if (on_cuda(t)) return well(t, device_get(to, logits, bytes));
    memcpy(to, logits, bytes);
    return 1;
}

int trainer_predict(trainer *t, const int32_t *tokens, int64_t count, float *to)
{
    shorten(t, count);
    weft_model_args args = args_of(t, 0);
    args.targets = NULL, args.loss = NULL;
    memcpy(t->host_batch.tokens, tokens, (size_t)count * sizeof *tokens);
    /* Causal: what follows has no influence, but it must be a token. */
    for (int64_t i = count; i < t->model.length; i++) t->host_batch.tokens[i] = 0;
    return send_batch(t) && must(t, weft_model_forward(&t->exec, &t->model, &args)) && last_logits(t, count, to);
}

int trainer_remember(trainer *t, int64_t capacity)
{
    size_t bytes;
    if (!must(t, weft_model_state_query(&t->exec, &t->config, capacity, &bytes))) return 0;
    char *memory = on_cuda(t) ? device_alloc(bytes) : aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!memory)
        return fail(t, "out of memory: %.1f MiB are needed for what is remembered", (double)bytes * 0x1p-20);
    if (must(t, weft_model_state_bind(&t->exec, &t->config, capacity, memory, bytes, &t->state))) return 1;
    release(t, memory);
    return 0;
}

int trainer_go_on(trainer *t, const int32_t *tokens, int64_t count, float *to)
{
    enum { MOST = 64 };
    int64_t piece = 0;
    for (; count > 0; tokens += piece, count -= piece) {
        /* The copy of the piece before reads the host's tokens, and may not have begun. */
        if (piece && on_cuda(t) && !well(t, device_wait())) return 0;
        /* Pieces of few different lengths, as above. */
        for (piece = MOST; piece > count || piece > t->length;) piece /= 2;
        if (piece != t->model.length &&
            !must(t, weft_model_bind(&t->exec, &t->config, 1, piece, t->memory, t->memory_bytes, &t->model)))
            return 0;
        weft_model_args args = args_of(t, 0);
        args.targets = NULL, args.loss = NULL;
        memcpy(t->host_batch.tokens, tokens, (size_t)piece * sizeof *tokens);
        if (!send_batch(t) || !must(t, weft_model_step(&t->exec, &t->model, &t->state, &args))) return 0;
    }
    return piece > 0 && last_logits(t, piece, to);
}
