/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint.h"

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

#include "files.h"
#include "safetensors_write.h"

#define MODEL_FILE "model.safetensors"
#define OPTIMIZER_FILE "optimizer.safetensors"
static const char *const files[] = {MODEL_FILE, OPTIMIZER_FILE};
/* Changes when an older program could misread a newer file. */
static const char format_version[] = "1";

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
    unlinkat(folder, OPTIMIZER_FILE, 0);
    unlinkat(folder, MODEL_FILE, 0);
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

static int has_file(const char *folder, const char *name)
{
    char path[FILES_PATH];
    struct stat status;
    return files_join(path, folder, name) && !stat(path, &status);
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
    char (*values)[FILES_PATH];
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

static void writer_close(writer *w)
{
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

static char *add_pair(writer *w, const char *prefix, const char *key)
{
    size_t i = w->num_pairs++;
    snprintf(w->keys[i], sizeof *w->keys, "%s%s", prefix, key);
    w->pairs[i] = (safetensors_pair){w->keys[i], w->values[i]};
    return w->values[i];
}

static void add_facts(writer *w, const trainer *t, const option *table)
{
    snprintf(add_pair(w, "", "format"), FILES_PATH, "pt");
    snprintf(add_pair(w, "", "weft"), FILES_PATH, "%s", format_version);
    snprintf(add_pair(w, "", "step"), FILES_PATH, "%" PRId64, t->step);
    snprintf(add_pair(w, "", "corpus"), FILES_PATH, "%016" PRIx64, t->text->fingerprint);
    for (const option *o = table; o->name; o++)
        if (!o->unsaved) options_print(o, add_pair(w, "option.", o->name), FILES_PATH);
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
    int ok = writer_open(&w, 2 * (size_t)t->tensors, MAX_TRAIN_OPTIONS + 8);
    if (!ok) fail(r, "out of memory");
    for (int file = 0; ok && file < 2; file++) {
        w.num_tensors = w.num_pairs = 0;
        for (int32_t i = 0; i < t->tensors; i++) {
            add_tensor(&w, file ? "first." : "", &t->params[i], file ? a->first : a->parameters);
            if (file) add_tensor(&w, "second.", &t->params[i], a->second);
        }
        add_facts(&w, t, table);
        ok = files_join(path, folder, files[file])
                 ? safetensors_write(path, w.tensors, w.num_tensors, w.pairs, w.num_pairs, r.text, r.size)
                 : fail(r, "%s: too long a path", folder);
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
        if (step_of(name) <= step && files_join(path, folder, name) && !is_link(path) &&
            has_file(path, MODEL_FILE) && keep-- <= 0)
            discard(path);
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
    if (has_file(path, MODEL_FILE) && has_file(path, OPTIMIZER_FILE)) { /* saved after this step already */
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
    int found = has_file(folder, MODEL_FILE), ok = 1;
    snprintf(path, FILES_PATH, "%s", found ? folder : "");
    if (found) return 1;
    int count = scandir(folder, &entries, is_step, newest_first);
    if (count < 0) return errno == ENOENT ? 1 : fail(r, "%s: %s", folder, strerror(errno));
    for (int i = 0; i < count; i++) {
        if (ok && !found && !(ok = files_join(path, folder, entries[i]->d_name)))
            fail(r, "%s: too long a path", folder);
        found = found || (ok && has_file(path, MODEL_FILE));
        free(entries[i]);
    }
    free(entries);
    if (!found) path[0] = 0;
    return ok;
}

/* One file of a checkpoint, if it is one of weft's. */
static int open_file(safetensors *file, const char *folder, int which, reason r)
{
    char path[FILES_PATH];
    if (!files_join(path, folder, files[which])) return fail(r, "%s: too long a path", folder);
    if (!safetensors_open(file, path)) return fail(r, "%s: %s", path, file->error);
    const char *version = safetensors_metadata(file, "weft");
    if (!version) return fail(r, "%s: not a checkpoint of weft: its metadata does not say so", path);
    if (strcmp(version, format_version))
        return fail(r, "%s: format %.20s, this program reads %s", path, version, format_version);
    return 1;
}

static int fill_options(const safetensors *file, const option *table, const unsigned char *given, char *texts,
                        size_t texts_size, reason r)
{
    size_t used = 0;
    for (int i = 0; table[i].name; i++) {
        const option *o = &table[i];
        char key[64], now[FILES_PATH];
        if (o->unsaved) continue;
        snprintf(key, sizeof key, "option.%s", o->name);
        const char *saved = safetensors_metadata(file, key);
        if (!saved) return fail(r, "the checkpoint does not say what --%s was", o->name);
        options_print(o, now, sizeof now);
        if (given[i]) {
            if (o->fixed && strcmp(now, saved))
                return fail(r, "--%s %s, but the run was begun with %.60s", o->name, now, saved);
            continue;
        }
        size_t length = strlen(saved) + 1;
        if (o->kind == OPTION_TEXT) {
            if (length > texts_size - used) return fail(r, "--%s in the checkpoint is too long", o->name);
            memcpy(texts + used, saved, length);
            *(const char **)o->to = length > 1 ? texts + used : NULL;
            used += length;
        } else if (!options_set(o, saved))
            return fail(r, "--%s in the checkpoint does not take '%.60s'", o->name, saved);
    }
    return 1;
}

int checkpoint_options(const char *path, const option *table, const unsigned char *given, char *texts,
                       size_t texts_size, char *error, size_t size)
{
    safetensors file = {0};
    reason r = {error, size};
    int ok = open_file(&file, path, 0, r) && fill_options(&file, table, given, texts, texts_size, r);
    safetensors_close(&file);
    return ok;
}

static int take_tensors(const trainer *t, const safetensors *file, const char *prefix, float *to, reason r)
{
    for (int32_t i = 0; i < t->tensors; i++) {
        const weft_model_param *p = &t->params[i];
        char name[96];
        snprintf(name, sizeof name, "%s%s", prefix, p->name);
        const safetensors_tensor *s = safetensors_find(file, name);
        if (!s) return fail(r, "tensor '%s' is missing", name);
        if (s->dtype != SAFETENSORS_F32 || s->ndim != p->ndim || s->shape[0] != p->shape[0] ||
            (p->ndim > 1 && s->shape[1] != p->shape[1]))
            return fail(r, "tensor '%s' has another shape or dtype than the model's", name);
        memcpy(to + p->offset, s->data, s->bytes);
        for (int64_t k = 0; k < p->count; k++)
            if (!isfinite(to[p->offset + k])) return fail(r, "tensor '%s' holds a value that is not finite", name);
    }
    return 1;
}

static int read_step(const safetensors *file, int64_t *step)
{
    const char *text = safetensors_metadata(file, "step");
    char *end;
    *step = text ? strtoll(text, &end, 10) : -1;
    return text && end != text && !*end && *step >= 0;
}

static int load_file(const trainer *t, const arrays *a, const char *path, int which, int64_t *step, reason r)
{
    safetensors file = {0};
    char why[256] = "";
    reason inner = {why, sizeof why};
    int ok = open_file(&file, path, which, r);
    if (ok) {
        size_t expected = (size_t)t->tensors * (which ? 2 : 1);
        const char *corpus_text = safetensors_metadata(&file, "corpus");
        char now[32] = "";
        if (t->text) snprintf(now, sizeof now, "%016" PRIx64, t->text->fingerprint);
        if (!read_step(&file, step))
            ok = fail(inner, "no step in its metadata");
        else if (file.num_tensors != expected)
            ok = fail(inner, "%zu tensors, the model has %zu", file.num_tensors, expected);
        else if (t->text && (!corpus_text || strcmp(corpus_text, now)))
            ok = fail(inner, "the text of --data is not the text of the run");
        else
            ok = which ? take_tensors(t, &file, "first.", a->first, inner) &&
                             take_tensors(t, &file, "second.", a->second, inner)
                       : take_tensors(t, &file, "", a->parameters, inner);
        if (!ok) fail(r, "%s/%s: %s", path, files[which], why);
    }
    safetensors_close(&file);
    return ok;
}

static int load_arrays(const trainer *t, const arrays *a, const char *path, int64_t *step, reason r)
{
    int64_t other;
    if (!load_file(t, a, path, 0, step, r)) return 0;
    if (!t->gradients) return 1;
    if (!load_file(t, a, path, 1, &other, r)) return 0;
    if (*step == other) return 1;
    return fail(r, "%s: the parameters are of step %" PRId64 ", the optimiser of %" PRId64, path, *step, other);
}

int checkpoint_load(trainer *t, const char *path, char *error, size_t size)
{
    reason r = {error, size};
    arrays a;
    int64_t step;
    if (!map(t, &a, r)) return 0;
    int ok = load_arrays(t, &a, path, &step, r);
    if (!unmap(t, &a, ok) && ok) ok = fail(r, "%s: the GPU did not take it", path);
    if (ok) t->step = step;
    return ok;
}
