/* SPDX-License-Identifier: Apache-2.0 */
#include "train/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/files.h"
#include "common/safetensors_write.h"

typedef struct reason {
    char *text;
    size_t size;
} reason;

__attribute__((format(printf, 2, 3))) static int fail(reason r, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(r.text, r.size, format, list);
    va_end(list);
    return 0;
}

/* Removes the folder of a checkpoint and nothing else that is in it; of a link, the link. */
static void discard(const char *path)
{
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0) {
        if (errno != ENOENT) unlink(path);
        return;
    }
    /* The model last: without it a folder is no checkpoint. */
    for (int part = CHECKPOINT_PARTS; part-- > 0;) unlinkat(folder, checkpoint_file_name((checkpoint_part)part), 0);
    close(folder);
    rmdir(path);
}

/* The number in step-00000100, or -1 for another name. */
static int64_t step_of(const char *name)
{
    static const char head[] = "step-";
    enum { MOST_DIGITS = 18 };
    if (strncmp(name, head, sizeof head - 1)) return -1;
    name += sizeof head - 1;
    size_t digits = strspn(name, "0123456789");
    return digits > 0 && digits <= MOST_DIGITS && !name[digits] ? strtoll(name, NULL, 10) : -1;
}

static int is_step(const struct dirent *entry)
{
    return step_of(entry->d_name) >= 0;
}

static int is_temporary(const struct dirent *entry)
{
    return entry->d_name[0] == '.' && step_of(entry->d_name + 1) >= 0;
}

/* The newest first; of two names for one step, the one with all its zeros. */
static int newest_first(const struct dirent **a, const struct dirent **b)
{
    int64_t s = step_of((*a)->d_name), t = step_of((*b)->d_name);
    if (s != t) return s < t ? 1 : -1;
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int has_part(const char *folder, checkpoint_part part)
{
    char path[FILES_PATH];
    struct stat status;
    return files_join(path, folder, checkpoint_file_name(part)) && !stat(path, &status);
}

static int is_link(const char *path)
{
    struct stat status;
    return !lstat(path, &status) && S_ISLNK(status.st_mode);
}

/* ---- saving ------------------------------------------------------------------------------------------------------------ */

typedef struct writer {
    safetensors_tensor *tensors;
    char (*names)[96];
    safetensors_pair *pairs;
    char **values;
    char (*keys)[64];
    size_t num_tensors, num_pairs;
} writer;

static int writer_open(writer *w, size_t tensors, size_t pairs)
{
    *w = (writer){.tensors = calloc(tensors, sizeof *w->tensors),
                  .names = calloc(tensors, sizeof *w->names),
                  .pairs = calloc(pairs, sizeof *w->pairs),
                  .values = calloc(pairs, sizeof *w->values),
                  .keys = calloc(pairs, sizeof *w->keys)};
    return w->tensors && w->names && w->pairs && w->values && w->keys;
}

/* For the next file. */
static void writer_clear(writer *w)
{
    for (size_t i = 0; i < w->num_pairs; i++) free(w->values[i]);
    w->num_tensors = w->num_pairs = 0;
}

static void writer_close(writer *w)
{
    writer_clear(w);
    free(w->tensors), free(w->names), free(w->pairs), free(w->values), free(w->keys);
}

static void add_tensor(writer *w, const char *prefix, const weft_model_param *p, const float *data)
{
    safetensors_tensor *t = &w->tensors[w->num_tensors];
    snprintf(w->names[w->num_tensors], sizeof *w->names, "%s%s", prefix, p->name);
    *t = (safetensors_tensor){.name = w->names[w->num_tensors++],
                              .dtype = SAFETENSORS_F32,
                              .ndim = p->ndim,
                              .shape = {p->shape[0], p->shape[1]},
                              .count = p->count,
                              .data = data + p->offset,
                              .bytes = (size_t)p->count * sizeof(float)};
}

/* Takes the value, which may be NULL for want of memory. */
static int add_pair(writer *w, const char *prefix, const char *key, char *value)
{
    size_t i = w->num_pairs++;
    snprintf(w->keys[i], sizeof *w->keys, "%s%s", prefix, key);
    w->values[i] = value;
    w->pairs[i] = (safetensors_pair){w->keys[i], value};
    return value != NULL;
}

__attribute__((format(printf, 1, 2))) static char *printed(const char *format, ...)
{
    char text[64];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    return strdup(text);
}

static int add_facts(writer *w, const trainer *t, const option *table)
{
    int ok = add_pair(w, "", "format", printed("pt")) & add_pair(w, "", "weft", printed("%d", CHECKPOINT_FORMAT)) &
             add_pair(w, "", "step", printed("%" PRId64, t->step)) &
             add_pair(w, "", "corpus", printed("%016" PRIx64, t->text->fingerprint));
    for (const option *o = table; o->name; o++)
        if (!o->unsaved) ok &= add_pair(w, "option.", o->name, options_print(o));
    return ok;
}

/* What a checkpoint holds, where the host can reach it. */
typedef struct arrays {
    float *parameters, *first, *second;
} arrays;

static int unmap(const trainer *t, const arrays *a, int changed)
{
    int ok = trainer_unmap(t, t->parameters, a->parameters, changed);
    if (t->first) ok = trainer_unmap(t, t->first, a->first, changed) && ok;
    if (t->second) ok = trainer_unmap(t, t->second, a->second, changed) && ok;
    return ok;
}

static int map(const trainer *t, arrays *a, reason r)
{
    *a = (arrays){trainer_map(t, t->parameters), t->first ? trainer_map(t, t->first) : NULL,
                  t->second ? trainer_map(t, t->second) : NULL};
    if (a->parameters && (!t->first || a->first) && (!t->second || a->second)) return 1;
    unmap(t, a, 0);
    return fail(r, "out of memory, or the GPU is gone");
}

static int write_files(const trainer *t, const arrays *a, const option *table, const char *folder, reason r)
{
    writer w;
    char path[FILES_PATH];
    const float *const data[CHECKPOINT_PARTS][2] = {{a->parameters}, {a->first, a->second}};
    int ok = writer_open(&w, 2 * (size_t)t->tensors, MAX_TRAIN_OPTIONS + 8);
    if (!ok) fail(r, "out of memory");
    for (int part = 0; ok && part < CHECKPOINT_PARTS; part++) {
        const char *prefix;
        writer_clear(&w);
        for (int32_t i = 0; i < t->tensors; i++)
            for (int k = 0; (prefix = checkpoint_file_prefix((checkpoint_part)part, k)); k++)
                add_tensor(&w, prefix, &t->params[i], data[part][k]);
        if (!add_facts(&w, t, table))
            ok = fail(r, "out of memory");
        else if (!files_join(path, folder, checkpoint_file_name((checkpoint_part)part)))
            ok = fail(r, "%s: too long a path", folder);
        else
            ok = safetensors_write(path, w.tensors, w.num_tensors, w.pairs, w.num_pairs, r.text, r.size);
    }
    writer_close(&w);
    return ok;
}

/* All but the last `keep` checkpoints up to a step. What cannot be removed stays: each entry is tried once. */
static void drop_old(const char *folder, int64_t step, int64_t keep)
{
    struct dirent **entries;
    char path[FILES_PATH];
    int count = scandir(folder, &entries, is_step, newest_first);
    for (int i = 0; i < count; i++) {
        const char *name = entries[i]->d_name;
        if (step_of(name) <= step && files_join(path, folder, name) && !is_link(path)) {
            if (!has_part(path, CHECKPOINT_MODEL))
                rmdir(path); /* empty: a run was killed while it dropped this one */
            else if (keep-- <= 0)
                discard(path);
        }
        free(entries[i]);
    }
    if (count >= 0) free(entries);
}

/* What a run that was killed while it saved has left behind. */
static void drop_temporary(const char *folder)
{
    struct dirent **entries;
    char path[FILES_PATH];
    int count = scandir(folder, &entries, is_temporary, NULL);
    for (int i = 0; i < count; i++) {
        if (files_join(path, folder, entries[i]->d_name)) discard(path);
        free(entries[i]);
    }
    if (count >= 0) free(entries);
}

static int save_arrays(const trainer *t, const arrays *a, const option *table, const char *folder, int64_t keep,
                       reason r)
{
    char name[64], path[FILES_PATH], temporary[FILES_PATH];
    for (int64_t i = 0; i < t->elements; i++)
        if (!isfinite(a->parameters[i])) return fail(r, "a parameter is not finite: not saved");
    snprintf(name, sizeof name, "step-%08" PRId64, t->step);
    if (!files_join(path, folder, name)) return fail(r, "%s: too long a path", folder);
    snprintf(name, sizeof name, ".step-%08" PRId64, t->step);
    if (!files_join(temporary, folder, name)) return fail(r, "%s: too long a path", folder);
    drop_temporary(folder);
    if (has_part(path, CHECKPOINT_MODEL) &&
        has_part(path, CHECKPOINT_OPTIMIZER)) { /* saved after this step already */
        drop_old(folder, t->step, keep);
        return 1;
    }
    if (mkdir(temporary, 0777)) return fail(r, "%s: %s", temporary, strerror(errno));
    if (!write_files(t, a, table, temporary, r)) {
        discard(temporary);
        return 0;
    }
    if (!files_sync_folder(temporary) || rename(temporary, path) || !files_sync_folder(folder)) {
        fail(r, "%s: %s", path, strerror(errno));
        discard(temporary);
        return 0;
    }
    drop_old(folder, t->step, keep);
    return 1;
}

int checkpoint_save(const trainer *t, const option *table, const char *folder, int64_t keep, char *error,
                    size_t size)
{
    reason r = {error, size};
    arrays a;
    if (!map(t, &a, r)) return 0;
    int ok = save_arrays(t, &a, table, folder, keep, r);
    unmap(t, &a, 0);
    return ok;
}

/* ---- loading ------------------------------------------------------------------------------------------------------------- */

int checkpoint_find(const char *folder, char path[FILES_PATH], char *error, size_t size)
{
    reason r = {error, size};
    struct dirent **entries;
    int found = has_part(folder, CHECKPOINT_MODEL), ok = 1;
    snprintf(path, FILES_PATH, "%s", found ? folder : "");
    if (found) return 1;
    int count = scandir(folder, &entries, is_step, newest_first);
    if (count < 0) return errno == ENOENT ? 1 : fail(r, "%s: %s", folder, strerror(errno));
    for (int i = 0; i < count; i++) {
        if (ok && !found && !(ok = files_join(path, folder, entries[i]->d_name)))
            fail(r, "%s: too long a path", folder);
        found = found || (ok && has_part(path, CHECKPOINT_MODEL));
        free(entries[i]);
    }
    free(entries);
    if (!found) path[0] = 0;
    return ok;
}

int checkpoint_open(checkpoint_file *model, const char *path, char *error, size_t size)
{
    char file[FILES_PATH];
    *model = (checkpoint_file){0};
    return files_join(file, path, checkpoint_file_name(CHECKPOINT_MODEL))
               ? checkpoint_file_open(model, CHECKPOINT_MODEL, file, error, size)
               : fail((reason){error, size}, "%s: too long a path", path);
}

int checkpoint_open_last(checkpoint_file *model, const char *folder, char path[FILES_PATH], char *error,
                         size_t size)
{
    enum { TRIES = 100, EMPTY_TRIES = 10 };
    int empty = 0;
    char before[FILES_PATH] = "";
    *model = (checkpoint_file){0};
    for (int i = 0; i < TRIES; i++) {
        if (!checkpoint_find(folder, path, error, size)) return 0;
        if (!path[0]) {
            /* A listing is no snapshot: it may have passed the place of the new checkpoint before that came, and reach that of the
             * old one after it went. */
            if (++empty < EMPTY_TRIES) continue;
            return fail((reason){error, size}, "%s: no checkpoint there", folder);
        }
        if (checkpoint_open(model, path, error, size)) return 1;
        if (!strcmp(path, before)) return 0;
        /* The run that trains there may have dropped it, in which case there is a newer one. */
        checkpoint_file_close(model);
        snprintf(before, sizeof before, "%s", path);
    }
    return 0;
}

int checkpoint_fits(const checkpoint_file *model, const char *path, const weft_model_config *config, char *error,
                    size_t size)
{
    char why[256] = "";
    return checkpoint_file_fits(model, config, why, sizeof why) ||
           fail((reason){error, size}, "%s/%s: %s", path, checkpoint_file_name(model->part), why);
}

void checkpoint_warn(const char *command, const checkpoint_file *model, const char *path)
{
    if (model->format == 1)
        fprintf(stderr, "weft %s: %s has no checksum, as older versions wrote it: damage in it is not noticed\n",
                command, path);
}

/* One part into its arrays, where it is of this trainer's run and model. */
static int load_part(const trainer *t, const checkpoint_file *c, float *const to[2], reason r)
{
    char now[32] = "";
    const char *corpus_text = safetensors_metadata(&c->file, "corpus"), *prefix;
    if (t->text) snprintf(now, sizeof now, "%016" PRIx64, t->text->fingerprint);
    if (t->text && (!corpus_text || strcmp(corpus_text, now)))
        return fail(r, "the text of --data is not the text of the run");
    if (!checkpoint_file_fits(c, &t->config, r.text, r.size)) return 0;
    for (int k = 0; (prefix = checkpoint_file_prefix(c->part, k)); k++)
        if (!checkpoint_file_take(c, &t->config, prefix, to[k], r.text, r.size)) return 0;
    return 1;
}

/* The optimiser's part, where it belongs to the model's. */
static int take_optimizer(const trainer *t, const arrays *a, const checkpoint_file *model,
                          const checkpoint_file *optimizer, reason r)
{
    if (!load_part(t, optimizer, (float *const[]){a->first, a->second}, r)) return 0;
    if (optimizer->step == model->step && optimizer->format == model->format) return 1;
    return fail(r, "parameters of step %" PRId64 ", format %d, optimiser of step %" PRId64 ", format %d",
                model->step, model->format, optimizer->step, optimizer->format);
}

static int load_optimizer(const trainer *t, const arrays *a, const checkpoint_file *model, const char *path,
                          reason r)
{
    checkpoint_file optimizer = {0};
    char file[FILES_PATH], why[256] = "";
    int ok = files_join(file, path, checkpoint_file_name(CHECKPOINT_OPTIMIZER))
                 ? checkpoint_file_open(&optimizer, CHECKPOINT_OPTIMIZER, file, r.text, r.size)
                 : fail(r, "%s: too long a path", path);
    if (ok && !take_optimizer(t, a, model, &optimizer, (reason){why, sizeof why}))
        ok = fail(r, "%s: %s", file, why);
    checkpoint_file_close(&optimizer);
    return ok;
}

static int load_arrays(const trainer *t, const arrays *a, const checkpoint_file *model, const char *path, reason r)
{
    char why[256] = "";
    const char *name = strrchr(path, '/');
    int64_t named = step_of(name ? name + 1 : path);
    if (!load_part(t, model, (float *const[]){a->parameters, NULL}, (reason){why, sizeof why}))
        return fail(r, "%s/%s: %s", path, checkpoint_file_name(CHECKPOINT_MODEL), why);
    if (!t->gradients) return 1;
    /* A run that continues would drop what it saves as older than this one. */
    if (named >= 0 && named != model->step)
        return fail(r, "%s: holds step %" PRId64 ": a checkpoint is called after its step", path, model->step);
    return load_optimizer(t, a, model, path, r);
}

int checkpoint_load(trainer *t, const checkpoint_file *model, const char *path, char *error, size_t size)
{
    reason r = {error, size};
    arrays a;
    if (!map(t, &a, r)) return 0;
    int ok = load_arrays(t, &a, model, path, r);
    if (!unmap(t, &a, ok) && ok) ok = fail(r, "%s: the GPU did not take it", path);
    if (ok) t->step = model->step;
    return ok;
}
