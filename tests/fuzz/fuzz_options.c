/* SPDX-License-Identifier: Apache-2.0
 *
 * Any bytes may be called a file of options. The reader must refuse or accept them, never crash; what it accepts must print
 * as text that it takes again, to the same value. The reader belongs to the program, so its source is included. */
#include "options.c"
#include "train_options.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The model's own rules are tested elsewhere; the target does without the library. */
weft_status weft_model_defaults(weft_residual residual, weft_model_config *config)
{
    (void)residual, (void)config;
    return WEFT_OK;
}
weft_status weft_model_check(const weft_model_config *config)
{
    (void)config;
    return WEFT_OK;
}
weft_status weft_mhc_preset_numerics(weft_mhc_preset preset, weft_mhc_numerics *numerics)
{
    (void)preset, (void)numerics;
    return WEFT_OK;
}
int32_t weft_plan_best_group(int32_t layers, int64_t streams)
{
    return layers > 0 && streams > 0;
}
const char *weft_last_error(void)
{
    return "";
}

static void require(int truth)
{
    if (!truth) abort();
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
    train_options_open(&again, other);
    if (options_read(text, table, given, error, sizeof error)) {
        for (int i = 0; table[i].name; i++) {
            char *printed = options_print(&table[i]), *restored = printed ? strdup(printed) : NULL;
            require(restored && options_restore(&other[i], restored));
            char *twice = options_print(&other[i]);
            require(twice && !strcmp(printed, twice));
            free(printed);
            free(restored);
            free(twice);
        }
        (void)train_options_model(&o, &config, error, sizeof error);
    } else
        require(error[0] != 0);
    free(text);
    return 0;
}
