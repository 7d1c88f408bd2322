/* SPDX-License-Identifier: Apache-2.0
 *
 * One file of a checkpoint as it is read: whether it is weft's and undamaged, its options, its tensors. Nothing of it is used
 * before the checksum has been verified, and no memory is asked for by what its options say before its tensors agree with
 * them. Functions return 1, or 0 with the reason in error. */
#ifndef WEFT_CLI_CHECKPOINT_FILE_H
#define WEFT_CLI_CHECKPOINT_FILE_H

#include <weft/model.h>

#include "common/options.h"
#include "common/safetensors.h"

/* Changes when an older program could misread a newer file. Format 1 has no checksum, and its texts are not escaped. */
enum { CHECKPOINT_FORMAT = 2 };

typedef enum checkpoint_part { CHECKPOINT_MODEL, CHECKPOINT_OPTIMIZER, CHECKPOINT_PARTS } checkpoint_part;

typedef struct checkpoint_file {
    safetensors file;
    checkpoint_part part;
    int format; /* 1: damage would not be noticed */
    int64_t step;
} checkpoint_file;

/* "model.safetensors" */
const char *checkpoint_file_name(checkpoint_part part);
/* What comes before the name of a parameter in this part: prefix `index`, or NULL after the last. */
const char *checkpoint_file_prefix(checkpoint_part part, int index);

/* checkpoint_file_close must follow either and may be repeated. */
int checkpoint_file_open(checkpoint_file *c, checkpoint_part part, const char *path, char *error, size_t size);
/* The bytes stay the caller's and must outlive it. */
int checkpoint_file_parse(checkpoint_file *c, checkpoint_part part, const void *bytes, size_t num_bytes,
                          char *error, size_t size);
void checkpoint_file_close(checkpoint_file *c);

/* Options that the checkpoint was made with, except those in given; a fixed option that is given and differs is an error,
 * except that one that grows may be larger.
 * *texts holds the texts among them and is the caller's to free, after an error too. */
int checkpoint_file_options(const checkpoint_file *c, const option *table, const unsigned char *given, char **texts,
                            char *error, size_t size);
/* Has it the tensors of this model, each in its shape, and no others? */
int checkpoint_file_fits(const checkpoint_file *c, const weft_model_config *config, char *error, size_t size);
/* The tensors of one prefix into an array of all parameters; the file must fit. A value that is not finite is an error. */
int checkpoint_file_take(const checkpoint_file *c, const weft_model_config *config, const char *prefix, float *to,
                         char *error, size_t size);

#endif
