/* SPDX-License-Identifier: Apache-2.0 */
#include "train/checkpoint_file.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSOR_NAME = 96, PREFIXES = 2 };

static const struct {
    const char *name;
    const char *prefixes[PREFIXES + 1];
} parts[CHECKPOINT_PARTS] = {
    [CHECKPOINT_MODEL] = {"model.safetensors", {""}},
    [CHECKPOINT_OPTIMIZER] = {"optimizer.safetensors", {"first.", "second."}},
};

__attribute__((format(printf, 3, 4))) static int rejected(char *error, size_t size, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(error, size, format, list);
    va_end(list);
    return 0;
}

const char *checkpoint_file_name(checkpoint_part part)
{
    return parts[part].name;
}

const char *checkpoint_file_prefix(checkpoint_part part, int index)
{
    return index >= 0 && index < PREFIXES ? parts[part].prefixes[index] : NULL;
}

/* A number without sign from the metadata; 0 where there is none. */
static int metadata_number(const safetensors *file, const char *key, int64_t *value)
{
    enum { MOST_DIGITS = 18 };
    const char *text = safetensors_metadata(file, key);
    size_t digits = text ? strspn(text, "0123456789") : 0;
    if (!digits || digits > MOST_DIGITS || text[digits]) return 0;
    *value = strtoll(text, NULL, 10);
    return 1;
}

/* Is what has been parsed one of weft's files, of a format that is known, with the checksum that the format asks for? */
static int read_facts(checkpoint_file *c, char *error, size_t size)
{
    int64_t format;
    const char *text = safetensors_metadata(&c->file, "weft");
    if (!text) return rejected(error, size, "not a checkpoint of weft: its metadata does not say so");
    if (!metadata_number(&c->file, "weft", &format) || format < 1 || format > CHECKPOINT_FORMAT)
        return rejected(error, size, "format %.20s, this program reads 1 to %d", text, CHECKPOINT_FORMAT);
    c->format = (int)format;
    if (c->format > 1 && !c->file.verified)
        return rejected(error, size,
                        "damaged, or written by another program: it has no checksum where its format has one");
    return metadata_number(&c->file, "step", &c->step) || rejected(error, size, "no step in its metadata");
}

int checkpoint_file_parse(checkpoint_file *c, checkpoint_part part, const void *bytes, size_t num_bytes,
                          char *error, size_t size)
{
    *c = (checkpoint_file){.part = part};
    return safetensors_parse(&c->file, bytes, num_bytes) ? read_facts(c, error, size)
                                                         : rejected(error, size, "%s", c->file.error);
}

int checkpoint_file_open(checkpoint_file *c, checkpoint_part part, const char *path, char *error, size_t size)
{
    char why[256] = "";
    *c = (checkpoint_file){.part = part};
    int ok = safetensors_open(&c->file, path) ? read_facts(c, why, sizeof why)
                                              : rejected(why, sizeof why, "%s", c->file.error);
    return ok || rejected(error, size, "%s: %s", path, why);
}

void checkpoint_file_close(checkpoint_file *c)
{
    safetensors_close(&c->file);
}

/* ---- options ------------------------------------------------------------------------------------------------------------- */

static const char *value_of(const checkpoint_file *c, const char *name)
{
    char key[64];
    snprintf(key, sizeof key, "option.%s", name);
    return safetensors_metadata(&c->file, key);
}

/* What an older checkpoint has for an option, which may have gone by another name. Before there was a choice of the first mix mhc
 * began uniform, and before there was one of the mixer it was attention. NULL: nothing. */
static const char *value_before(const checkpoint_file *c, const option *o)
{
    static const struct {
        const char *now, *before;
    } names[] = {{"recompute-group", "group"}, {"micro-batches", "micro"}, {"weight-decay", "decay"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(o->name, names[i].now)) return value_of(c, names[i].before);
    static const struct {
        const char *name, *value;
    } attention[] = {{"mixer", "attention"}, {"key-heads", "0"}, {"conv-width", "0"}};
    for (size_t i = 0; i < sizeof attention / sizeof *attention; i++)
        if (!strcmp(o->name, attention[i].name)) return attention[i].value;
    const char *residual = value_of(c, "residual");
    if (strcmp(o->name, "first-mix") || !residual) return NULL;
    return strncmp(residual, "mhc", 3) ? "identity" : "uniform";
}

static const char *saved_value(const checkpoint_file *c, const option *o)
{
    const char *value = value_of(c, o->name);
    return value ? value : value_before(c, o);
}

/* A fixed option that was given must be what the run was begun with, or more of it where it grows. */
static int same_value(const option *o, const char *saved, char *error, size_t size)
{
    char *now = options_print(o);
    int more = o->grows && *(int64_t *)o->to > strtoll(saved, NULL, 10);
    int ok = now && (!o->fixed || more || !strcmp(now, saved));
    if (!ok && now && o->grows)
        rejected(error, size, "--%s %.60s, but the run has %.60s: expected at least that", o->name, now, saved);
    else if (!ok && now)
        rejected(error, size, "--%s %.60s, but the run was begun with %.60s", o->name, now, saved);
    else if (!ok)
        rejected(error, size, "out of memory");
    free(now);
    return ok;
}

int checkpoint_file_options(const checkpoint_file *c, const option *table, const unsigned char *given, char **texts,
                            char *error, size_t size)
{
    size_t room = 1;
    *texts = NULL;
    for (const option *o = table; o->name; o++) {
        const char *saved = o->unsaved ? "" : saved_value(c, o);
        if (!saved) return rejected(error, size, "the checkpoint does not say what --%s was", o->name);
        room += strlen(saved) + 1;
    }
    char *value = *texts = malloc(room);
    if (!value) return rejected(error, size, "out of memory");
    for (int i = 0; table[i].name; i++) {
        const option *o = &table[i];
        if (o->unsaved) continue;
        const char *saved = saved_value(c, o);
        size_t length = strlen(saved);
        if (given[i]) {
            if (!same_value(o, saved, error, size)) return 0;
            continue;
        }
        memcpy(value, saved, length + 1);
        if (!(c->format == 1 ? options_set(o, value) : options_restore(o, value))) {
            char why[OPTIONS_ERROR];
            options_explain(o, saved, why, sizeof why);
            return rejected(error, size, "--%s in the checkpoint: %s", o->name, why);
        }
        if (o->kind == OPTION_TEXT && !*value) *(const char **)o->to = NULL;
        value += length + 1;
    }
    return 1;
}

/* ---- tensors ------------------------------------------------------------------------------------------------------------- */

static const safetensors_tensor *tensor_of(const checkpoint_file *c, const char *prefix, const weft_model_param *p,
                                           char *error, size_t size)
{
    char name[TENSOR_NAME];
    snprintf(name, sizeof name, "%s%s", prefix, p->name);
    const safetensors_tensor *t = safetensors_find(&c->file, name);
    if (!t)
        rejected(error, size, "tensor '%s' is missing", name);
    else if (t->dtype != SAFETENSORS_F32 || t->ndim != p->ndim || t->shape[0] != p->shape[0] ||
             (p->ndim > 1 && t->shape[1] != p->shape[1])) {
        rejected(error, size, "tensor '%s' has another shape or dtype than the model's", name);
        t = NULL;
    }
    return t;
}

int checkpoint_file_fits(const checkpoint_file *c, const weft_model_config *config, char *error, size_t size)
{
    int32_t tensors, prefixes = 0;
    weft_model_param p;
    if (weft_model_param_count(config, &tensors, NULL) != WEFT_OK)
        return rejected(error, size, "%s", weft_last_error());
    while (checkpoint_file_prefix(c->part, prefixes)) prefixes++;
    size_t expected = (size_t)tensors * (size_t)prefixes;
    if (c->file.num_tensors != expected)
        return rejected(error, size, "%zu tensors, the model has %zu", c->file.num_tensors, expected);
    for (int32_t i = 0; i < tensors; i++) {
        if (weft_model_param_at(config, i, &p) != WEFT_OK) return rejected(error, size, "%s", weft_last_error());
        for (int k = 0; k < prefixes; k++)
            if (!tensor_of(c, checkpoint_file_prefix(c->part, k), &p, error, size)) return 0;
    }
    return 1;
}

int checkpoint_file_take(const checkpoint_file *c, const weft_model_config *config, const char *prefix, float *to,
                         char *error, size_t size)
{
    int32_t tensors;
    weft_model_param p;
    if (weft_model_param_count(config, &tensors, NULL) != WEFT_OK)
        return rejected(error, size, "%s", weft_last_error());
    for (int32_t i = 0; i < tensors; i++) {
        if (weft_model_param_at(config, i, &p) != WEFT_OK) return rejected(error, size, "%s", weft_last_error());
        const safetensors_tensor *t = tensor_of(c, prefix, &p, error, size);
        if (!t) return 0;
        memcpy(to + p.offset, t->data, t->bytes);
        for (int64_t k = 0; k < p.count; k++)
            if (!isfinite(to[p.offset + k]))
                return rejected(error, size, "tensor '%s' holds a value that is not finite", t->name);
    }
    return 1;
}
