/* SPDX-License-Identifier: Apache-2.0
 *
 * Any bytes may be called a file of options. The reader must refuse or accept them, never crash; what it accepts must print
 * as text that it takes again, to the same value, and is the library's to judge as a model. */
#include <stdlib.h>
#include <string.h>

#include "train/train_options.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int truth)
{
    if (!truth) abort();
}

/* Printed and read back it must be the same value; `other` belongs to another set of options. */
static void check_round_trip(const option *o, const option *other)
{
    char *printed = options_print(o), *restored = printed ? strdup(printed) : NULL;
    require(restored && options_restore(other, restored));
    char *twice = options_print(other);
    require(twice && !strcmp(printed, twice));
    free(printed);
    free(restored);
    free(twice);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    train_options o, again;
    option table[MAX_TRAIN_OPTIONS], other[MAX_TRAIN_OPTIONS];
    unsigned char given[MAX_TRAIN_OPTIONS] = {0};
    weft_model_config config = {0};
    char error[256] = "", *text = malloc(size + 1);
    if (!text) return 0;
    memcpy(text, data, size);
    text[size] = 0;
    train_options_open(&o, table);
    if (options_read(text, table, given, error, sizeof error)) {
        train_options_open(&again, other);
        for (int i = 0; table[i].name; i++)
            if (given[i]) check_round_trip(&table[i], &other[i]);
        require(error[0] == 0);
        if (train_options_model(&o, &config, error, sizeof error))
            require(config.layers > 0 && config.streams > 0 && config.channels % config.heads == 0);
        else
            require(error[0] != 0);
    } else
        require(error[0] != 0);
    free(text);
    return 0;
}
