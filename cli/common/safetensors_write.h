/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes safetensors files: what cli/common/safetensors.h reads. */
#ifndef WEFT_CLI_SAFETENSORS_WRITE_H
#define WEFT_CLI_SAFETENSORS_WRITE_H

#include "common/safetensors.h"

/* Tensors in the order in which they are to lie; name, dtype, ndim, shape, data and bytes of each are used. A checksum joins
 * the metadata. The file is complete and on disk when this returns 1; 0 leaves the reason in error, and no file. */
int safetensors_write(const char *path, const safetensors_tensor *tensors, size_t num_tensors,
                      const safetensors_pair *metadata, size_t num_metadata, char *error, size_t size);

#endif
