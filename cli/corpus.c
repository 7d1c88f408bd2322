/* SPDX-License-Identifier: Apache-2.0 */
#include "corpus.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"
#include "random.h"

enum { VALIDATION_EVERY = 10, MAX_DEPTH = 32, PATH_BYTES = 4096 };

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

/* asked: named by the user, so that a file which is not text is an error and not passed over. */
static int add_file(corpus *c, const char *path, int asked)
{
    char why[128];
    size_t size;
    int file = files_open(path, &size, why, sizeof why);
    if (file < 0) return asked ? fail(c, "%s: %s", path, why) : 1;
    if (size == 0) {
        close(file);
        return 1;
    }
    void *bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (bytes == MAP_FAILED) return fail(c, "%s: %s", path, strerror(errno));
    if (memchr(bytes, 0, size)) {
        munmap(bytes, size);
        return asked ? fail(c, "%s: holds zero bytes: not text", path) : 1;
    }
    corpus_file *files = realloc(c->files, (c->num_files + 1) * sizeof *files);
    if (!files) {
        munmap(bytes, size);
        return fail(c, "out of memory");
    }
    c->files = files;
    files[c->num_files++] = (corpus_file){bytes, size, c->bytes};
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
        char inside[PATH_BYTES];
        struct stat status;
        int length = snprintf(inside, sizeof inside, "%s/%s", path, name);
        if (ok && length > 0 && length < PATH_BYTES && !lstat(inside, &status)) {
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
    char path[PATH_BYTES];
    while (*paths) {
        size_t length = strcspn(paths, ",");
        if (length >= sizeof path) return fail(c, "a path is longer than %d bytes", PATH_BYTES - 1);
        memcpy(path, paths, length);
        path[length] = 0;
        if (length && !add(c, path)) return 0;
        paths += length + (paths[length] == ',');
    }
    return 1;
}

/* A resumed run must see the same text, and this tells. Eight bytes at a time: the text may be large. */
static uint64_t fingerprint(const corpus *c)
{
    uint64_t hash = c->bytes;
    for (size_t f = 0; f < c->num_files; f++)
        for (size_t i = 0; i < c->files[f].size; i += 8) {
            uint64_t word = 0;
            size_t left = c->files[f].size - i;
            memcpy(&word, c->files[f].bytes + i, left < 8 ? left : 8);
            hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
            hash ^= hash >> 32;
        }
    return hash;
}

int corpus_open(corpus *c, const char *paths, int64_t context)
{
    memset(c, 0, sizeof *c);
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
    c->fingerprint = fingerprint(c);
    return 1;
}

void corpus_close(corpus *c)
{
    for (size_t i = 0; i < c->num_files; i++) munmap((void *)c->files[i].bytes, c->files[i].size);
    free(c->files);
    c->files = NULL;
    c->num_files = 0;
}

static void window_at(const corpus *c, size_t begin, int32_t *tokens, int32_t *targets)
{
    size_t low = 0, high = c->num_files;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (c->files[middle].begin <= begin)
            low = middle;
        else
            high = middle;
    }
    const corpus_file *file = &c->files[low];
    size_t at = begin - file->begin;
    for (int64_t i = 0; i < c->window; i++) {
        while (at == file->size) file++, at = 0;
        int32_t byte = file->bytes[at++];
        if (i < c->window - 1) tokens[i] = byte;
        if (i > 0) targets[i - 1] = byte;
    }
}

/* Blocks 0, 10, 20 ... are for validation. */
static int64_t train_block(int64_t index)
{
    return index + index / (VALIDATION_EVERY - 1) + 1;
}

void corpus_train(const corpus *c, uint64_t seed, uint64_t index, int32_t *tokens, int32_t *targets)
{
    uint64_t draw = random_bits(random_seed(seed, "train"), index);
    int64_t count = c->num_blocks - c->num_validation;
    int64_t block = train_block((int64_t)((draw >> 32) % (uint64_t)count));
    int64_t room = c->block - c->window + 1;
    window_at(c, (size_t)(block * c->block + (int64_t)((draw & 0xffffffffu) % (uint64_t)room)), tokens, targets);
}

void corpus_validation(const corpus *c, uint64_t index, int32_t *tokens, int32_t *targets)
{
    int64_t per_block = c->block / c->window, all = per_block * c->num_validation;
    int64_t i = (int64_t)(index % (uint64_t)all);
    /* One window of each block first, then the next of each: few windows already see all of the text. */
    int64_t block = i % c->num_validation * VALIDATION_EVERY, inside = i / c->num_validation;
    window_at(c, (size_t)(block * c->block + inside * c->window), tokens, targets);
}
