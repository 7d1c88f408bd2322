/* SPDX-License-Identifier: Apache-2.0
 *
 * Any bytes may be called a golden file. The reader must refuse or accept them, never crash, and what it accepts
 * must lie inside the bytes it was given. */
#include <stdlib.h>

#include "common/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int truth)
{
    if (!truth) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    safetensors file;
    if (safetensors_parse(&file, data, size)) {
        unsigned sum = 0;
        size_t bytes = 0;
        for (size_t i = 0; i < file.num_tensors; i++) {
            const safetensors_tensor *t = &file.tensors[i];
            for (size_t k = 0; k < t->bytes; k++) sum += ((const unsigned char *)t->data)[k];
            require(safetensors_find(&file, t->name) == t);
            require(t->bytes == (size_t)t->count * safetensors_dtype_size(t->dtype));
            bytes += t->bytes;
        }
        for (size_t i = 0; i < file.num_metadata; i++)
            require(safetensors_metadata(&file, file.metadata[i].key) == file.metadata[i].value);
        /* The tensors tile the data: everything behind the header belongs to exactly one of them. */
        require(bytes <= size - 8);
        (void)*(volatile unsigned *)&sum;
        require(file.error[0] == 0);
    } else {
        require(file.error[0] != 0);
    }
    safetensors_close(&file);
    safetensors_close(&file);
    return 0;
}
