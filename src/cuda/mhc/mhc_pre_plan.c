/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/mhc/mhc_pre_plan.h"

weft_pre_plan weft_cuda_pre_plan(const weft_pre_facts *f)
{
    weft_pre_plan p = {.path = WEFT_PRE_ONE_LAUNCH};
    const int64_t tiles = (f->rows + PRE_ONE_ROWS - 1) / PRE_ONE_ROWS;
    const int64_t clusters = (f->tokens + PRE_ONE_TOKENS - 1) / PRE_ONE_TOKENS;
    if (!f->f32)
        p.path = WEFT_PRE_DTYPE;
    else if (f->tokens == 0)
        p.path = WEFT_PRE_NO_TOKENS;
    else if (f->unmixed)
        p.path = WEFT_PRE_UNMIXED;
    else if (f->streams != 2 && f->streams != 4)
        p.path = WEFT_PRE_STREAMS;
    else if (!f->layout)
        p.path = WEFT_PRE_LAYOUT;
    else if (clusters > PRE_ONE_MOST || f->columns > PRE_ONE_COLUMNS)
        p.path = WEFT_PRE_LONG;
    else if (f->capability < PRE_ONE_CAPABILITY)
        p.path = WEFT_PRE_OTHER_GPU;
    if (p.path != WEFT_PRE_ONE_LAUNCH) return p;
    p.cluster = (int32_t)(tiles < PRE_ONE_CLUSTER ? tiles : PRE_ONE_CLUSTER);
    p.clusters = (int32_t)clusters;
    return p;
}

const char *weft_cuda_pre_path_text(weft_pre_path path)
{
    static const char *const text[WEFT_PRE_PATHS] = {
        [WEFT_PRE_ONE_LAUNCH] = "unfused: projection, coefficients and aggregate in one launch",
        [WEFT_PRE_DTYPE] = "unfused: streams are not fp32",
        [WEFT_PRE_NO_TOKENS] = "unfused: there are no tokens",
        [WEFT_PRE_UNMIXED] = "unfused: there is no kernel of one launch without a residual mix",
        [WEFT_PRE_STREAMS] = "unfused: there is no kernel for this number of streams",
        [WEFT_PRE_LAYOUT] =
            "unfused: phi or its norm weight are not fp32, or channels cannot be moved 16 bytes at a time",
        [WEFT_PRE_LONG] = "unfused: with so many tokens launches do not count",
        [WEFT_PRE_OTHER_GPU] = "unfused: the code for this GPU is older than compute capability 9.0",
    };
    return path >= 0 && path < WEFT_PRE_PATHS ? text[path] : NULL;
}
