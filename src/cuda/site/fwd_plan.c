/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/site/fwd_plan.h"

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Pairs of steps of each of eight MMA warps. A pair is two steps of 16 columns: half a box of one stream. */
static int64_t pairs_of(int64_t boxes, int64_t streams)
{
    return boxes * streams / 4;
}

/* Chooses the smallest cluster whose blocks hold several tiles beside their psi; the largest cluster may hold more psi. */
static void cut(weft_site_plan *p, int64_t streams, int64_t channels)
{
    const int64_t even = 4 / streams, few = streams == 4 ? SITE_FEW_PAIRS + 1 : SITE_FEW_PAIRS;
    for (p->cluster = 2, p->cluster_log = 1;; p->cluster *= 2, p->cluster_log++) {
        const int64_t boxes = ceil_div(channels, (int64_t)p->cluster * SITE_BOX * even) * even;
        if (pairs_of(boxes, streams) > (p->cluster < SITE_CLUSTER ? few : SITE_MANY_PAIRS)) {
            if (p->cluster < SITE_CLUSTER) continue;
            p->path = WEFT_SITE_TOO_WIDE;
            return;
        }
        p->boxes = (int32_t)boxes;
        p->pairs = (int32_t)pairs_of(boxes, streams);
        if (streams == 4 && p->pairs == SITE_MANY_PAIRS) p->pairs = SITE_WIDE_PAIRS;
        p->mma_warps = site_mma_warps(p->pairs);
        return;
    }
}

static int32_t take(int32_t *at, int64_t bytes)
{
    const int32_t from = *at;
    *at += (int32_t)ceil_div(bytes, 16) * 16;
    return from;
}

/* psi of 64 channels in its memory layout: two boxes of 32 fp32 channels, all rows and streams. */
static int32_t psi_bytes(const weft_site_facts *f)
{
    return (int32_t)(2 * f->rows * f->streams * 128);
}

static void lay_out(weft_site_plan *p, const weft_site_facts *f)
{
    const int64_t n = f->streams, operands = 2 * p->pairs * (f->rows > 8 ? 3 : 1), tile = SITE_TILE;
    const bool once = p->pairs <= SITE_ONCE_PAIRS, apart = site_is_wide(p->pairs) && f->post;
    const int64_t kept = site_kept(p->pairs),
                  spare = (operands > kept ? operands - kept : 0) * p->mma_warps * 32 * 16;
    const int64_t stream = p->boxes * tile * SITE_BOX * 2; /* bytes of one in a tile */
    weft_site_room *r = &p->room;
    int32_t at = 0, end;
    p->slots = (int32_t)ceil_div(p->stages * tile, p->cluster);
    r->f = take(&at, apart ? stream : 0);
    r->tiles = at;
    r->stage = (int32_t)((n + (f->post && !apart)) * stream);
    at += p->stages * r->stage;
    r->psi = end = at;
    at += (int32_t)spare;
    /* Loaded at once, psi may overlap the buffer of its operands, which leaves room for one more tile. */
    if (once) end = at;
    p->psi_boxes = (end - r->tiles - r->stage) / psi_bytes(f);
    if (p->psi_boxes > p->boxes) p->psi_boxes = p->boxes;
    r->first_psi = end - p->psi_boxes * psi_bytes(f);
    p->early = (r->first_psi - r->tiles) / r->stage;
    r->coef = take(&at, f->post ? p->stages * tile * (n + n * n) * 4 : 0);
    r->pre = take(&at, p->stages * tile * n * 4);
    r->sums = take(&at, (p->pairs == SITE_FEW_PAIRS ? 2 : 1) * p->mma_warps * tile * ceil_div(f->rows + 1, 4) * 16);
    r->received = take(&at, (int64_t)p->slots * p->cluster * SITE_ROW * 4);
    r->inverse = take(&at, p->stages * tile * 4);
    r->aside = take(&at, n * 4);
    r->logits = take(&at, site_batches(p->pairs) * site_batch(p->pairs) * n * n * 4);
    r->barriers = take(&at, (6 * p->stages + 2 * p->slots + SITE_PSI_FULL + (once ? p->psi_boxes : 1)) * 8);
    const int64_t weights = (f->post ? 2 : 1) * p->boxes * SITE_BOX * 4;
    r->weights = at + weights <= f->shared ? take(&at, weights) : 0;
    r->bytes = at;
}

weft_site_plan weft_cuda_site_plan(const weft_site_facts *f)
{
    weft_site_plan p = {.path = WEFT_SITE_FUSED};
    const int64_t most = INT32_MAX / 2; /* coordinates of a box are 32-bit numbers */
    if (f->tokens == 0)
        p.path = WEFT_SITE_NO_TOKENS;
    else if (f->capability < SITE_OLDEST || f->capability > SITE_NEWEST)
        p.path = WEFT_SITE_OTHER_GPU;
    else if (!f->half)
        p.path = WEFT_SITE_DTYPE;
    else if (f->streams != 2 && f->streams != 4)
        p.path = WEFT_SITE_STREAMS;
    else if (f->channels % 8)
        p.path = WEFT_SITE_CHANNELS;
    else if (!f->layout)
        p.path = WEFT_SITE_LAYOUT;
    else if (f->tokens > most)
        p.path = WEFT_SITE_SIZE;
    else
        cut(&p, f->streams, f->channels);
    if (p.path == WEFT_SITE_FUSED && f->resident[p.cluster_log] < 1) p.path = WEFT_SITE_OTHER_GPU;
    if (p.path != WEFT_SITE_FUSED) return p;
    for (p.stages = SITE_STAGES;; p.stages--) {
        lay_out(&p, f);
        const int32_t least = p.pairs <= SITE_ONCE_PAIRS ? p.boxes : 1;
        if (p.room.bytes <= f->shared && p.psi_boxes >= least) break;
        if (p.stages == 3 || p.psi_boxes < least) {
            p.path = WEFT_SITE_SMALL_GPU;
            return p;
        }
    }
    p.tiles = (int32_t)ceil_div(f->tokens, SITE_TILE);
    p.clusters = f->resident[p.cluster_log];
    if (p.clusters > f->sms / p.cluster) p.clusters = f->sms / p.cluster;
    if (p.clusters > p.tiles) p.clusters = p.tiles;
    if (p.clusters < 1) p.clusters = 1;
    return p;
}

const char *weft_cuda_site_path_text(weft_site_path path)
{
    static const char *const text[WEFT_SITE_PATHS] = {
        [WEFT_SITE_FUSED] = "fused: one kernel reads each stream once",
        [WEFT_SITE_NO_TOKENS] = "unfused: there are no tokens",
        [WEFT_SITE_DTYPE] =
            "unfused: streams, f, u and v are not bf16 or f16 throughout, or other values are not fp32",
        [WEFT_SITE_STREAMS] = "unfused: there is no kernel for this number of streams",
        [WEFT_SITE_CHANNELS] = "unfused: the number of channels is not a multiple of 8",
        [WEFT_SITE_LAYOUT] = "unfused: rows cannot be copied 16 bytes at a time",
        [WEFT_SITE_TOO_WIDE] = "unfused: psi does not fit the shared memory and registers of a cluster",
        [WEFT_SITE_SIZE] = "unfused: there are more tokens than a 32-bit number counts",
        [WEFT_SITE_SMALL_GPU] = "unfused: a block's shared memory does not hold enough tiles",
        [WEFT_SITE_OTHER_GPU] =
            "unfused: the code for this GPU is not of compute capability 9.0, or the GPU has no such clusters",
    };
    return path >= 0 && path < WEFT_SITE_PATHS ? text[path] : NULL;
}
