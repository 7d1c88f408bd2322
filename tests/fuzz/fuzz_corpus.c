/* SPDX-License-Identifier: Apache-2.0
 *
 * Any bytes may be called text, in many files that may become shorter while they are read. A window must be cut out of their
 * bytes in a row, or there is a sentence why it cannot be; nothing else may come out, and every file must be closed. Files lie in
 * memory, which is faster than a file system by far and lets one shrink between any two reads; so the source is included, with
 * what it asks of the system replaced.
 *
 * Input: context; the read before which a file shrinks (0: never), which file and to how many bytes; the lengths of the first
 * two files; how the list of names is written; then the bytes of the files. */
#define _XOPEN_SOURCE 700 /* S_IFREG */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/files.h"

static int memory_stat(const char *path, struct stat *status);
static int memory_open(const char *path, struct stat *status, char *error, size_t error_size);
static int memory_read_at(int file, size_t begin, void *to, size_t bytes);
static int memory_close(int file);
#define stat(path, status) memory_stat(path, status)
#define close(file) memory_close(file)
#define files_open memory_open
#define files_read_at memory_read_at
#include "train/corpus.c"
#undef stat
#undef close
#undef files_open
#undef files_read_at

/* REPEATS: enough that not all files stay open. */
enum { FILES = 3, CONTROL = 7, WINDOWS = 2, REPEATS = CORPUS_OPEN / FILES + 2, MOST = 4096, MOST_REPEATED = 200 };
enum { LIST_COMMAS = 8, LIST_MISSING = 64, LIST_REPEATED = 128 }; /* and 1, 2, 4: without this file */

static struct {
    const uint8_t *bytes[FILES];
    size_t length[FILES], full[FILES];
    int open, reads, shrink_at, which; /* before read number shrink_at this file is cut */
    size_t to;
} world;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int truth)
{
    if (!truth) abort();
}

/* A file is called by its number. */
static int file_of(const char *path)
{
    return path[0] >= '0' && path[0] < '0' + FILES && !path[1] ? path[0] - '0' : -1;
}

static int memory_stat(const char *path, struct stat *status)
{
    int file = file_of(path);
    errno = ENOENT;
    if (file < 0) return -1;
    *status = (struct stat){.st_mode = S_IFREG, .st_ino = (ino_t)file, .st_size = (off_t)world.length[file]};
    return 0;
}

static int memory_open(const char *path, struct stat *status, char *error, size_t error_size)
{
    if (memory_stat(path, status)) {
        snprintf(error, error_size, "%s", strerror(errno));
        return -1;
    }
    world.open++;
    return file_of(path);
}

static int memory_read_at(int file, size_t begin, void *to, size_t bytes)
{
    if (++world.reads == world.shrink_at) world.length[world.which] = world.to;
    errno = 0;
    require(file >= 0 && file < FILES);
    if (begin > world.length[file] || bytes > world.length[file] - begin) return 0;
    memcpy(to, world.bytes[file] + begin, bytes);
    return 1;
}

static int memory_close(int file)
{
    require(file >= 0 && file < FILES && world.open-- > 0);
    return 0;
}

static void list_names(char *list, size_t room, unsigned style)
{
    size_t used = 0;
    list[0] = 0;
    for (int n = 0; n < (style & LIST_REPEATED ? REPEATS : 1) * FILES; n++) {
        int i = n % FILES;
        if (style & 1u << i) continue;
        used += (size_t)snprintf(list + used, room - used, "%s%d%s", used ? "," : "", i,
                                 style & (unsigned)LIST_COMMAS << i ? "," : "");
    }
    if (style & LIST_MISSING) snprintf(list + used, room - used, ",no such file");
}

/* The row of text that the corpus says it has. A file that was shorter before it was opened is text like any other. */
static void check_files(const corpus *c, unsigned style, uint8_t *row)
{
    size_t at = 0, expected = 0;
    for (size_t k = 0; k < c->num_files; k++) {
        int i = file_of(c->files[k].path);
        size_t size = c->files[k].size;
        require(i >= 0 && c->files[k].begin == at);
        require(size == world.full[i] || (i == world.which && size == world.to && world.reads >= world.shrink_at));
        memcpy(row + at, world.bytes[i], size);
        at += size;
    }
    for (int i = 0; i < FILES; i++)
        if (!(style & 1u << i)) expected += world.full[i] * (style & LIST_REPEATED ? REPEATS : 1);
    require(c->bytes == at && (world.shrink_at || at == expected));
    require(!(style & LIST_MISSING) && !memchr(row, 0, at));
}

/* Only a file that has shrunk is a reason to refuse a window. */
static void check_window(const corpus *c, int ok, const int32_t *tokens, const int32_t *targets, const uint8_t *row)
{
    size_t length = (size_t)c->window;
    int found = 0;
    if (!ok) {
        require(c->error[0] != 0 && world.shrink_at && world.reads >= world.shrink_at);
        return;
    }
    for (size_t i = 0; i + 2 < length; i++) require(targets[i] == tokens[i + 1]);
    for (size_t at = 0; at + length <= c->bytes && !found; at++) {
        size_t same = 0;
        while (same + 1 < length && tokens[same] == row[at + same]) same++;
        found = same + 1 == length && targets[length - 2] == row[at + length - 1];
    }
    require(found);
}

static void check_windows(corpus *c, int64_t context, const uint8_t *row)
{
    size_t bytes = (size_t)context * sizeof(int32_t);
    int32_t *tokens = malloc(bytes), *targets = malloc(bytes);
    for (uint64_t i = 0; tokens && targets && i < WINDOWS; i++) {
        int ok = corpus_train(c, 1, i, tokens, targets);
        check_window(c, ok, tokens, targets, row);
        ok = corpus_validation(c, i, tokens, targets);
        check_window(c, ok, tokens, targets, row);
    }
    free(tokens);
    free(targets);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t row[REPEATS * MOST_REPEATED > MOST ? REPEATS * MOST_REPEATED : MOST];
    char list[REPEATS * FILES * 3 + 32];
    corpus c;
    if (size < CONTROL) return 0;
    int64_t context = data[0] % 64 + 1;
    unsigned style = data[6];
    if (data[0] < 192) style &= ~(unsigned)LIST_REPEATED; /* slow, so seldom */
    size_t left = size - CONTROL;
    if (left > (style & LIST_REPEATED ? MOST_REPEATED : MOST)) return 0;
    memset(&world, 0, sizeof world);
    world.shrink_at = data[1];
    world.which = data[2] % FILES;
    const uint8_t *text = data + CONTROL;
    for (int i = 0; i < FILES; i++) {
        size_t length = i + 1 < FILES && data[4 + i] < left ? data[4 + i] : left;
        world.bytes[i] = text;
        world.length[i] = world.full[i] = length;
        text += length, left -= length;
    }
    world.to = data[3] < world.full[world.which] ? data[3] : world.full[world.which];
    list_names(list, sizeof list, style);
    int ok = corpus_open(&c, list, context);
    require(ok ? c.error[0] == 0 && c.window == context + 1 : c.error[0] != 0);
    if (ok) {
        check_files(&c, style, row);
        check_windows(&c, context, row);
    }
    corpus_close(&c);
    corpus_close(&c);
    require(world.open == 0);
    return 0;
}
