/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/site/bwd_plan.h"

#include <stddef.h>

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

boundary_bwd_path weft_boundary_bwd_path(const boundary_bwd_facts *f)
{
    /* coordinates of a box are 32-bit numbers, and so are numbers of tiles and of columns */
    const int64_t most = INT32_MAX / 2;
    if (f->tokens == 0) return BOUNDARY_BWD_NO_TOKENS;
    if (f->capability < BOUNDARY_OLDEST || f->capability > BOUNDARY_NEWEST) return BOUNDARY_BWD_OTHER_GPU;
    if (!f->is_16_bit) return BOUNDARY_BWD_DTYPE;
    if (f->streams != 2 && f->streams != 4) return BOUNDARY_BWD_STREAMS;
    if (f->channels % 8) return BOUNDARY_BWD_CHANNELS;
    if (!f->rows_are_wide) return BOUNDARY_BWD_LAYOUT;
    if (!f->gates_on_chip) return BOUNDARY_BWD_GATES;
    if (f->tokens > most || f->channels > most / 80) return BOUNDARY_BWD_SIZE;
    if (weft_boundary_bwd_ring(f->streams, SITE_BOUNDARY).bytes > f->shared) return BOUNDARY_BWD_SMALL_GPU;
    return BOUNDARY_BWD_FUSED;
}

const char *weft_boundary_bwd_path_text(boundary_bwd_path path)
{
    static const char *const text[BOUNDARY_BWD_PATHS] = {
        [BOUNDARY_BWD_FUSED] = "fused: one kernel makes the gradients of the streams",
        [BOUNDARY_BWD_NO_TOKENS] = "unfused: there are no tokens",
        [BOUNDARY_BWD_OTHER_GPU] = "unfused: the code for this GPU is not of compute capability 9.0",
        [BOUNDARY_BWD_SMALL_GPU] = "unfused: a block's shared memory does not hold enough tiles",
        [BOUNDARY_BWD_DTYPE] = "unfused: streams and upstream gradients are not all bf16 or all f16",
        [BOUNDARY_BWD_STREAMS] = "unfused: there is no kernel for this number of streams",
        [BOUNDARY_BWD_CHANNELS] = "unfused: the number of channels is not a multiple of 8",
        [BOUNDARY_BWD_LAYOUT] = "unfused: streams differ in layout, or rows cannot be copied 16 bytes at a time",
        [BOUNDARY_BWD_GATES] = "unfused: shared memory does not hold the history of so many Sinkhorn iterations",
        [BOUNDARY_BWD_SIZE] = "unfused: tokens or columns are more than a 32-bit number counts",
    };
    return path >= 0 && path < BOUNDARY_BWD_PATHS ? text[path] : NULL;
}

/* A record, in pieces of 16 bytes: rows of d_h as bf16 hi and lo, then the mix and post, pre, and four more floats; the number of
 * pieces is odd. */
static int32_t record_bytes(int64_t n, site_kind kind)
{
    const int64_t rows = site_psi_rows(n, kind), mix = kind == SITE_BOUNDARY ? n * n + n : 0;
    return (int32_t)((2 * ceil_div(rows, 8) + ceil_div(mix + n, 4) + 1) | 1) * 16;
}

boundary_bwd_ring weft_boundary_bwd_ring(int64_t streams, site_kind kind)
{
    boundary_bwd_ring r = {0};
    r.row_bytes = BOUNDARY_TILE * BOUNDARY_SLICE * 2;
    r.streams_bytes = (int32_t)streams * r.row_bytes;
    r.tile_bytes = 2 * r.streams_bytes + 2 * r.row_bytes; /* x, d_y; f, d_u */
    r.record_bytes = BOUNDARY_TILE * record_bytes(streams, kind);
    r.bytes =
        1024 + (int64_t)BOUNDARY_STAGES * (r.tile_bytes + r.record_bytes + 3 * 8) + 8 + BOUNDARY_SLICE * 4 + 4096;
    return r;
}

int32_t weft_boundary_bwd_sums(int64_t streams, bool post, bool shifted)
{
    const int64_t n = streams;
    return (int32_t)ceil_div((post ? n + n * n : 0) + (shifted ? n : 0), 4) * 4;
}

/* For a nominal GPU of 132 multiprocessors with a block on each: the pieces decide the result, which must not depend on the
 * GPU at hand. */
boundary_bwd_plan weft_boundary_bwd_plan(int64_t tokens, int64_t channels)
{
    const int64_t at_once = 132;
    boundary_bwd_plan p = {0};
    p.slices = (int32_t)ceil_div(channels, BOUNDARY_SLICE);
    p.tiles = ceil_div(tokens > 0 ? tokens : 1, BOUNDARY_TILE);
    const int64_t steps = p.slices * (p.tiles + BOUNDARY_SWITCH) - BOUNDARY_SWITCH;
    p.steps = ceil_div(steps, at_once);
    p.blocks = (int32_t)ceil_div(steps, p.steps);
    return p;
}
