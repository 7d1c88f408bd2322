/* SPDX-License-Identifier: Apache-2.0
 *
 * Text files as one long row of bytes, each byte a token. The row is split into blocks, and every tenth block is set aside
 * for validation; a window lies within one block, so no training window sees validation text. Which windows a step gets is
 * a function of the seed and the step alone.
 *
 * Windows are read from the files when they are asked for, so text takes no memory. A file that has become shorter than it was
 * at the beginning is an error of the window that misses it (a mapping would end the process). Some files stay open; one that
 * had to be closed and is another one, or was changed, when it is needed again is an error too. */
#ifndef WEFT_CLI_CORPUS_H
#define WEFT_CLI_CORPUS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

typedef struct corpus_file {
    char *path;
    size_t size, begin; /* begin: where it lies in the row */
    struct stat status; /* which file it is, whatever its path names later */
} corpus_file;

enum { CORPUS_OPEN = 128 }; /* files that stay open at a time */

typedef struct corpus_slot {
    int used, descriptor;
    size_t file;
} corpus_slot;

typedef struct corpus {
    corpus_slot slots[CORPUS_OPEN]; /* file i in slot i mod CORPUS_OPEN */
    unsigned char *text;            /* of a window, or what is read of a file at a time */
    corpus_file *files;
    size_t num_files, bytes;
    int64_t window; /* context + 1 */
    int64_t block, num_blocks, num_validation;
    uint64_t fingerprint; /* of all bytes */
    char error[512];
} corpus;

/* paths: files and folders, separated by commas; NULL: the folder the program runs in, where that is weft's own source
 * tree. Of a folder, the files that look like text by their name. 1, or 0 with the reason in error. corpus_close must
 * follow either way. */
int corpus_open(corpus *c, const char *paths, int64_t context);
void corpus_close(corpus *c);

/* Window `index` of a stream of random windows, as tokens and what follows them. 1, or 0 with the reason in error. */
int corpus_train(corpus *c, uint64_t seed, uint64_t index, int32_t *tokens, int32_t *targets);
/* The index-th of the validation windows, which go through the validation blocks in order and begin again; as above. */
int corpus_validation(corpus *c, uint64_t index, int32_t *tokens, int32_t *targets);

#endif
