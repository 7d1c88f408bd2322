/* SPDX-License-Identifier: Apache-2.0
 *
 * What each public implementation computes, as data. Layout and the shift of V4.1 are not numerics: strides and wiring
 * express them. */
#include "core/check.h"

#include <string.h>

static const struct preset {
    const char *name;
    weft_mhc_numerics numerics;
} presets[WEFT_PRESET_COUNT] = {
    [WEFT_PRESET_TRANSFORMER_ENGINE] =
        {"transformer_engine",
         {0x1p-23, WEFT_EPS_INSIDE, 0, 2, WEFT_SINKHORN_LOG, 0, 20, WEFT_APPLY_IN_OUT, 0, {0}}},
    [WEFT_PRESET_DEEPSEEK_V4] =
        {"deepseek_v4",
         {1e-6, WEFT_EPS_INSIDE, 1e-6, 2, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_IN_OUT, 0, {0}}},
    [WEFT_PRESET_DEEPSEEK_V41] =
        {"deepseek_v41",
         {1e-20, WEFT_EPS_INSIDE, 1e-6, 2, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_IN_OUT, 0, {0}}},
    [WEFT_PRESET_MEGATRON_MAIN] =
        {"megatron_main", {1e-6, WEFT_EPS_OUTSIDE, 0, 2, WEFT_SINKHORN_CLAMP, 1e-6, 20, WEFT_APPLY_OUT_IN, 0, {0}}},
    [WEFT_PRESET_MEGATRON_DEV] =
        {"megatron_dev",
         {1e-6, WEFT_EPS_OUTSIDE, 1e-6, 2, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_IN_OUT, 0, {0}}},
    [WEFT_PRESET_MEGATRON_DSV4] =
        {"megatron_dsv4", {1e-6, WEFT_EPS_OUTSIDE, 0, 2, WEFT_SINKHORN_ADD, 1e-6, 20, WEFT_APPLY_OUT_IN, 0, {0}}},
    [WEFT_PRESET_LIGER] =
        {"liger", {1e-6, WEFT_EPS_INSIDE, 0, 2, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_OUT_IN, 0, {0}}},
    [WEFT_PRESET_GLM5_NEXT] =
        {"glm5_next",
         {1e-5, WEFT_EPS_INSIDE, 1e-6, 2, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_IN_OUT, 0, {0}}},
    [WEFT_PRESET_HY_V4] =
        {"hy_v4",
         {1e-5, WEFT_EPS_INSIDE, 1e-6, 2, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_IN_OUT, 1e-6, {0}}},
};

weft_status weft_mhc_preset_numerics(weft_mhc_preset preset, weft_mhc_numerics *numerics)
{
    weft_clear_error();
    if (weft_mhc_preset_name(preset) == NULL)
        return weft_fail(WEFT_ERR_ARGUMENT, "weft_mhc_preset_numerics: preset: expected 0 to %d, got %d",
                         WEFT_PRESET_COUNT - 1, (int)preset);
    if (numerics == NULL)
        return weft_fail(WEFT_ERR_ARGUMENT, "weft_mhc_preset_numerics: numerics: expected a pointer, got NULL");
    *numerics = presets[preset].numerics;
    return WEFT_OK;
}

const char *weft_mhc_preset_name(weft_mhc_preset preset)
{
    return (int)preset >= 0 && preset < WEFT_PRESET_COUNT ? presets[preset].name : NULL;
}

weft_mhc_preset weft_mhc_preset_find(const char *name)
{
    int i = 0;
    while (i < WEFT_PRESET_COUNT && !(name && strcmp(presets[i].name, name) == 0)) i++;
    return (weft_mhc_preset)i;
}
