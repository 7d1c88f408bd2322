/* SPDX-License-Identifier: Apache-2.0
 *
 * Text files as one long row of bytes, each byte a token. Files are mapped, not read. The row is cut into blocks, and every
 * tenth block is set aside for validation; a window lies within one block, so no training window sees validation text.
 * Which windows a step gets is a function of the seed and the step alone. */
#ifndef WEFT_CLI_CORPUS_H
#define WEFT_CLI_CORPUS_H

#include <stddef.h>
#include <stdint.h>

typedef struct corpus_file {
    const unsigned char *bytes;
    size_t size, begin; /* begin: where it lies in the row */
} corpus_file;

typedef struct corpus {
    corpus_file *files;
    size_t num_files, bytes;
    int64_t window; /* context + 1 */
    int64_t block, num_blocks, num_validation;
    uint64_t fingerprint; /* of all bytes */
    char error[512];
} corpus;

/* paths: files and folders, separated by commas; NULL: the folder the program runs in, where that is weft's own source
 * tree. Of a folder, the files that look like text by their name. 1, or 0 with the reason in error. corpus_close is due
 * either way. */
int corpus_open(corpus *c, const char *paths, int64_t context);
void corpus_close(corpus *c);

/* Window `index` of a stream of random windows, as tokens and what follows them. */
void corpus_train(const corpus *c, uint64_t seed, uint64_t index, int32_t *tokens, int32_t *targets);
/* The index-th of the validation windows, which go through the validation blocks in order and begin again. */
void corpus_validation(const corpus *c, uint64_t index, int32_t *tokens, int32_t *targets);

#endif
