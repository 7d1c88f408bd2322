/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/single_pass_plan.h"

static weft_site_path path_of(int64_t tokens, int64_t streams, int64_t channels, weft_dtype dtype, bool layout,
                              weft_site_device device)
{
    if (dtype != WEFT_BF16) return WEFT_SITE_DTYPE;
    if (streams != 2 && streams != 4) return WEFT_SITE_STREAMS;
    if (channels % 8) return WEFT_SITE_CHANNELS;
    if (!layout) return WEFT_SITE_LAYOUT;
    if (device.most_shared < SITE_SHARED) return WEFT_SITE_DEVICE;
    if ((channels + SITE_CHANNELS - 1) / SITE_CHANNELS > device.sms) return WEFT_SITE_TOO_WIDE;
    if (tokens == 0) return WEFT_SITE_NO_TOKENS;
    return WEFT_SITE_SINGLE_PASS;
}

weft_site_plan weft_cuda_site_plan(int64_t tokens, int64_t streams, int64_t channels, weft_dtype dtype, bool layout,
                                   weft_site_device device, int32_t sms)
{
    weft_site_plan p = {.path = path_of(tokens, streams, channels, dtype, layout, device)};
    if (p.path != WEFT_SITE_SINGLE_PASS) return p;
    p.slices = (int32_t)((channels + SITE_CHANNELS - 1) / SITE_CHANNELS);
    p.tiles = (tokens + SITE_TILE - 1) / SITE_TILE;
    p.groups = (sms < device.sms ? sms : device.sms) / p.slices;
    if (p.groups < 1) p.groups = 1;
    if (p.groups > p.tiles) p.groups = (int32_t)p.tiles;
    p.ring_floats = (size_t)p.groups * SITE_RING * (size_t)p.slices * SITE_TILE * SITE_ROW;
    p.counters = (size_t)p.groups * SITE_RING * 2;
    return p;
}

const char *weft_cuda_site_reason(weft_site_path path)
{
    static const char *const reason[WEFT_SITE_PATHS] = {
        [WEFT_SITE_SINGLE_PASS] = "single pass",
        [WEFT_SITE_NO_TOKENS] = "chain: no tokens",
        [WEFT_SITE_DTYPE] = "chain: streams are not bf16",
        [WEFT_SITE_STREAMS] = "chain: neither two nor four streams",
        [WEFT_SITE_CHANNELS] = "chain: channels are no multiple of 8",
        [WEFT_SITE_LAYOUT] = "chain: a tensor does not lie in aligned rows of channels",
        [WEFT_SITE_TOO_WIDE] = "chain: a token has more slices than the GPU has multiprocessors",
        [WEFT_SITE_DEVICE] = "chain: the GPU has too little shared memory",
    };
    return path >= 0 && path < WEFT_SITE_PATHS ? reason[path] : NULL;
}
