/* SPDX-License-Identifier: Apache-2.0
 *
 * Comparison with golden files: inputs, outputs and gradients of other implementations in safetensors files, one
 * convention per file-name prefix. */
#ifndef WEFT_CLI_GOLDEN_H
#define WEFT_CLI_GOLDEN_H

#include <weft/weft.h>

typedef struct golden_counts {
    int64_t passed, failed, not_compared;
} golden_counts;

/* Every *.safetensors in the folder, on one backend. Returns an exit code: EXIT_UNUSABLE where a file could not be
 * read or does not follow its convention; the other files are compared nevertheless. */
int golden_check(const char *folder, const weft_exec *exec, golden_counts *counts);

#endif
