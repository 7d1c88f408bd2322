/* SPDX-License-Identifier: Apache-2.0 */
#include "train/corpus.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check/random.h"
#include "common/files.h"
#include "train/fingerprint.h"

enum { VALIDATION_EVERY = 10, MAX_DEPTH = 32, CHUNK = 1 << 16 }; /* CHUNK: bytes read at a time, whole words */

__attribute__((format(printf, 2, 3))) static int fail(corpus *c, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(c->error, sizeof c->error, format, list);
    va_end(list);
    return 0;
}

static int looks_like_text(const char *name)
{
    static const char *const ends[] = {".c",  ".h",  ".cc", ".cu",    ".cuh",   ".def", ".md",   ".txt",
                                       ".py", ".sh", ".in", ".cmake", ".jsonl", ".map", ".toml", NULL};
    const char *dot = strrchr(name, '.');
    for (int i = 0; dot && ends[i]; i++)
        if (!strcmp(dot, ends[i])) return 1;
    return !strcmp(name, "Makefile") || !strcmp(name, "LICENSE");
}

/* ---- files -------------------------------------------------------------------------------------------------------------- */

static void close_slot(corpus_slot *slot)
{
    if (slot->used) close(slot->descriptor);
    slot->used = 0;
}

static void keep_open(corpus *c, size_t file, int descriptor)
{
    corpus_slot *slot = &c->slots[file % CORPUS_OPEN];
    close_slot(slot);
    *slot = (corpus_slot){.used = 1, .descriptor = descriptor, .file = file};
}

/* A number that has become free may be another file's, so the number alone does not tell. */
static int same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* The descriptor of a file, or -1 with the reason in error. */
static int descriptor_of(corpus *c, size_t file)
{
    corpus_file *f = &c->files[file];
    const corpus_slot *slot = &c->slots[file % CORPUS_OPEN];
    struct stat status;
    char why[128];
    if (slot->used && slot->file == file) return slot->descriptor;
    int descriptor = files_open(f->path, &status, why, sizeof why);
    if (descriptor < 0) {
        fail(c, "%s: %s", f->path, why);
    } else if (!same_file(&status, &f->status)) {
        fail(c, "%s: is another file than at the beginning, or was changed", f->path);
        close(descriptor);
        descriptor = -1;
    } else
        keep_open(c, file, descriptor);
    return descriptor;
}

/* So many bytes of one file. */
static int read_file(corpus *c, size_t file, size_t begin, unsigned char *to, size_t bytes)
{
    int descriptor = descriptor_of(c, file);
    if (descriptor < 0) return 0;
    if (files_read_at(descriptor, begin, to, bytes)) return 1;
    return fail(c, "%s: %s", c->files[file].path,
                errno ? strerror(errno) : "has become shorter than at the beginning");
}

/* Whether it holds a zero byte: 1 or 0, or -1 where it cannot be read. */
static int has_zero(int descriptor, size_t size, unsigned char *chunk)
{
    for (size_t at = 0; at < size; at += CHUNK) {
        size_t bytes = size - at < CHUNK ? size - at : CHUNK;
        if (!files_read_at(descriptor, at, chunk, bytes)) return -1;
        if (memchr(chunk, 0, bytes)) return 1;
    }
    return 0;
}

/* asked: named by the user, so that a file which is not text is an error and not passed over. */
static int add_file(corpus *c, const char *path, int asked)
{
    char why[128] = "";
    struct stat status;
    int descriptor = files_open(path, &status, why, sizeof why);
    if (descriptor < 0) return asked ? fail(c, "%s: %s", path, why) : 1;
    size_t size = (size_t)status.st_size;
    int zero = has_zero(descriptor, size, c->text);
    if (zero < 0) snprintf(why, sizeof why, "%s", errno ? strerror(errno) : "became shorter while it was read");
    if (zero > 0) snprintf(why, sizeof why, "holds zero bytes: not text");
    if (size == 0 || zero) {
        close(descriptor);
        return zero && (asked || zero < 0) ? fail(c, "%s: %s", path, why) : 1;
    }
    corpus_file *files = realloc(c->files, (c->num_files + 1) * sizeof *files);
    char *copy = strdup(path);
    if (files) c->files = files;
    if (!files || !copy) {
        free(copy);
        close(descriptor);
        return fail(c, "out of memory");
    }
    files[c->num_files] = (corpus_file){.path = copy, .size = size, .begin = c->bytes, .status = status};
    keep_open(c, c->num_files++, descriptor);
    c->bytes += size;
    return 1;
}

static int visible(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static int add_folder(corpus *c, const char *path, int depth)
{
    struct dirent **entries;
    int count = scandir(path, &entries, visible, alphasort), ok = 1;
    if (count < 0) return fail(c, "%s: %s", path, strerror(errno));
    if (depth > MAX_DEPTH) ok = fail(c, "%s: folders nest more than %d deep", path, MAX_DEPTH);
    for (int i = 0; i < count; i++) {
        const char *name = entries[i]->d_name;
        char inside[FILES_PATH];
        struct stat status;
        if (ok && !files_join(inside, path, name)) ok = fail(c, "%s: a path in it is too long", path);
        if (ok && !lstat(inside, &status)) {
            /* What a build or a run leaves behind is not the project's text. */
            if (S_ISDIR(status.st_mode) && strncmp(name, "build", 5) && strcmp(name, "runs"))
                ok = add_folder(c, inside, depth + 1);
            else if (S_ISREG(status.st_mode) && looks_like_text(name))
                ok = add_file(c, inside, 0);
        }
        free(entries[i]);
    }
    free(entries);
    return ok;
}

static int add(corpus *c, const char *path)
{
    struct stat status;
    if (stat(path, &status)) return fail(c, "%s: %s", path, strerror(errno));
    return S_ISDIR(status.st_mode) ? add_folder(c, path, 0) : add_file(c, path, 1);
}

static int add_all(corpus *c, const char *paths)
{
    char path[FILES_PATH];
    while (*paths) {
        size_t length = strcspn(paths, ",");
        if (length >= sizeof path) return fail(c, "--data: expected paths of at most %d bytes", FILES_PATH - 1);
        memcpy(path, paths, length);
        path[length] = 0;
        if (length && !add(c, path)) return 0;
        paths += length + (paths[length] == ',');
    }
    return 1;
}

static int take_fingerprint(corpus *c)
{
    c->fingerprint = c->bytes;
    for (size_t f = 0; f < c->num_files; f++)
        for (size_t at = 0; at < c->files[f].size; at += CHUNK) {
            size_t left = c->files[f].size - at, bytes = left < CHUNK ? left : CHUNK;
            if (!read_file(c, f, at, c->text, bytes)) return 0;
            c->fingerprint = fingerprint(c->fingerprint, c->text, bytes);
        }
    return 1;
}

int corpus_open(corpus *c, const char *paths, int64_t context)
{
    memset(c, 0, sizeof *c);
    c->text = malloc(context + 1 > CHUNK ? (size_t)context + 1 : CHUNK);
    if (!c->text) return fail(c, "out of memory");
    if (!paths && access("include/weft/weft.h", R_OK))
        return fail(c, "no --data, and this folder is not weft's source tree, which is the text by default");
    if (!add_all(c, paths ? paths : ".")) return 0;
    if (c->bytes == 0) return fail(c, "%s: no text", paths ? paths : ".");
    c->window = context + 1;
    c->block = (int64_t)c->bytes / 20;
    c->block = c->block > 65536 ? 65536 : c->block;
    c->block = c->block < c->window ? c->window : c->block;
    c->num_blocks = (int64_t)c->bytes / c->block;
    if (c->num_blocks < 2)
        return fail(c, "%zu bytes of text are too few for a context of %lld: at least %lld are needed", c->bytes,
                    (long long)context, (long long)(2 * c->window));
    c->num_validation = (c->num_blocks + VALIDATION_EVERY - 1) / VALIDATION_EVERY;
    return take_fingerprint(c);
}

void corpus_close(corpus *c)
{
    for (int i = 0; i < CORPUS_OPEN; i++) close_slot(&c->slots[i]);
    for (size_t i = 0; i < c->num_files; i++) free(c->files[i].path);
    free(c->files);
    free(c->text);
    c->files = NULL;
    c->text = NULL;
    c->num_files = 0;
}

static int window_at(corpus *c, size_t begin, int32_t *tokens, int32_t *targets)
{
    size_t low = 0, high = c->num_files;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (c->files[middle].begin <= begin)
            low = middle;
        else
            high = middle;
    }
    size_t window = (size_t)c->window;
    for (size_t done = 0; done < window; low++) {
        size_t at = begin + done - c->files[low].begin, left = c->files[low].size - at;
        size_t bytes = left < window - done ? left : window - done;
        if (!read_file(c, low, at, c->text + done, bytes)) return 0;
        done += bytes;
    }
    for (size_t i = 0; i + 1 < window; i++) {
        tokens[i] = c->text[i];
        targets[i] = c->text[i + 1];
    }
    return 1;
}

/* Blocks 0, 10, 20 ... are for validation. */
static int64_t train_block(int64_t index)
{
    return index + index / (VALIDATION_EVERY - 1) + 1;
}

int corpus_train(corpus *c, uint64_t seed, uint64_t index, int32_t *tokens, int32_t *targets)
{
    uint64_t draw = random_bits(random_seed(seed, "train"), index);
    int64_t count = c->num_blocks - c->num_validation;
    int64_t block = train_block((int64_t)((draw >> 32) % (uint64_t)count));
    int64_t room = c->block - c->window + 1;
    return window_at(c, (size_t)(block * c->block + (int64_t)((draw & 0xffffffffu) % (uint64_t)room)), tokens,
                     targets);
}

int corpus_validation(corpus *c, uint64_t index, int32_t *tokens, int32_t *targets)
{
    int64_t per_block = c->block / c->window, all = per_block * c->num_validation;
    int64_t i = (int64_t)(index % (uint64_t)all);
    /* One window of each block first, then the next of each: few windows already see all of the text. */
    int64_t block = i % c->num_validation * VALIDATION_EVERY, inside = i / c->num_validation;
    return window_at(c, (size_t)(block * c->block + inside * c->window), tokens, targets);
}
