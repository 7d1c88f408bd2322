/* SPDX-License-Identifier: Apache-2.0
 *
 * Projection + mean square, forward [M1]: h[t] = psi x[t]. Bytes per token, bf16: 2nC; 2 * rows * nC flops, which is what
 * costs (AMX tiles aside). Tokens are widened to fp32 a chunk at a time and multiplied in blocks of MT tokens by NT rows,
 * each product a sum in 16 lanes, so that blocking changes no result. */
#include "cpu/common/tiles.h"
#include "cpu/mhc_project_amx.h"

#if WEFT_CPU_LEVEL == 2
enum { MT = 4, NT = 4 };
#else
enum { MT = 2, NT = 2 };
#endif

/* Floats of a token per chunk: MT tokens stay in L1, the rows of psi stream through. */
enum { PART = 1024, ROW_BLOCK = 24 };

INLINE int64_t part_width(int64_t n)
{
    return PART / n / WIDE * WIDE;
}

cpu_psi CPU(psi_take)(weft_arena *arena, const weft_call *call, const weft_tensor *phi, const weft_tensor *norm_weight,
                      const weft_tensor *x, bool panels)
{
    int64_t n = call->streams, channels = call->channels;
    cpu_psi psi = {NULL, NULL, call->rows, n, channels, pad16(channels), panels, NULL};
    bool as_is = phi->dtype == WEFT_F32 && !weft_has(norm_weight) && channels == psi.ld && phi->stride[2] == 1 &&
                 phi->stride[1] == channels && phi->stride[0] == n * channels;
    if (panels) psi.ld = (channels + PANEL - 1) / PANEL * PANEL;
    if (!panels && amx_serves(call, x)) {
        psi.amx = weft_arena_take(arena, amx_bytes(call));
        return psi;
    }
    if (panels || !as_is) psi.room = weft_arena_take(arena, (size_t)(psi.rows * n * psi.ld) * 4);
    psi.data = psi.room ? psi.room : phi->data;
    return psi;
}

typedef struct pack_job {
    const cpu_psi *psi;
    const weft_tensor *phi, *norm_weight;
} pack_job;

/* One row of one stream of psi, in pieces. */
static void pack_body(void *context, int64_t item, int thread)
{
    const pack_job *j = context;
    const cpu_psi *p = j->psi;
    _Alignas(64) float row[CHUNK], gain[CHUNK];
    int64_t r = item / p->n, i = item % p->n;
    (void)thread;
    for (int64_t c = 0; c < p->ld; c += CHUNK) {
        int64_t width = min64(CHUNK, p->ld - c), count = min64(width, p->channels - c);
        memset(row, 0, sizeof row);
        if (count > 0) stream_load(row, j->phi, r, i, c, count);
        if (weft_has(j->norm_weight)) {
            /* norm_weight is [streams, channels]: its streams are the rows here. */
            if (count > 0) row_load(gain, j->norm_weight, i, c, count);
            for (int64_t k = 0; k < count; k++) row[k] *= gain[k];
        }
        if (!p->panels)
            memcpy(p->room + (r * p->n + i) * p->ld + c, row, (size_t)width * 4);
        else
            for (int64_t k = 0; k < width; k += PANEL)
                memcpy(p->room + ((i * (p->ld / PANEL) + (c + k) / PANEL) * p->rows + r) * PANEL, row + k, PANEL * 4);
    }
}

void CPU(psi_pack)(const weft_call *call, const cpu_psi *psi, const weft_tensor *phi, const weft_tensor *norm_weight)
{
    pack_job j = {psi, phi, norm_weight};
    if (psi->amx)
        amx_pack(call, psi, phi, norm_weight);
    else if (psi->room)
        cpu_parallel(call, psi->rows * psi->n, psi->rows * psi->n * psi->channels, pack_body, &j);
}

/* mt tokens times nt rows over a chunk of n streams by `width` channels (a multiple of 16). */
INLINE void micro(const int mt, const int nt, int64_t n, const float *x, int64_t xs, int64_t width, const float *psi,
                  int64_t row_stride, int64_t stream_stride, vf (*acc)[ROW_BLOCK][STEP])
{
    vf s[MT][NT][STEP];
    for (int t = 0; t < mt; t++)
        for (int j = 0; j < nt; j++)
            for (int l = 0; l < STEP; l++) s[t][j][l] = acc[t][j][l];
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < width; c += WIDE)
            for (int l = 0; l < STEP; l++) {
                vf p[NT];
                for (int j = 0; j < nt; j++) p[j] = vf_load(psi + j * row_stride + i * stream_stride + c + l * LANES);
                for (int t = 0; t < mt; t++) {
                    vf v = vf_load(x + t * xs + i * width + c + l * LANES);
                    for (int j = 0; j < nt; j++) s[t][j][l] = vf_fma(v, p[j], s[t][j][l]);
                }
            }
    for (int t = 0; t < mt; t++)
        for (int j = 0; j < nt; j++)
            for (int l = 0; l < STEP; l++) acc[t][j][l] = s[t][j][l];
}

/* The sums of a block of rows for up to TILE tokens; the first block also sums the squares. */
typedef struct tile_sums {
    vf h[TILE][ROW_BLOCK][STEP], square[TILE][STEP];
} tile_sums;

static void add_chunk(tile_sums *sums, const cpu_psi *psi, const weft_tensor *x, int64_t t0, int tokens, int64_t row0,
                      int rows, int64_t c0, int64_t count)
{
    _Alignas(64) float part[MT][PART];
    int64_t n = psi->n, width = pad16(count);
    const float *p = psi->data + row0 * n * psi->ld + c0;
    for (int t = 0; t < tokens; t += MT) {
        int mt = tokens - t < MT ? tokens - t : MT;
        for (int k = 0; k < mt; k++) {
            rows_load(part[k], width, x, t0 + t + k, c0, count);
            if (row0 > 0) continue;
            for (int64_t e = 0; e < n * width; e += WIDE)
                for (int l = 0; l < STEP; l++) {
                    vf v = vf_load(part[k] + e + l * LANES);
                    sums->square[t + k][l] = vf_fma(v, v, sums->square[t + k][l]);
                }
        }
        for (int j = 0; j < rows; j += NT) {
            int nt = rows - j < NT ? rows - j : NT;
            vf(*acc)[ROW_BLOCK][STEP] = (vf(*)[ROW_BLOCK][STEP]) & sums->h[t][j];
            const float *pj = p + j * n * psi->ld;
            if (mt == MT && nt == NT)
                micro(MT, NT, n, part[0], PART, width, pj, n * psi->ld, psi->ld, acc);
            else
                micro(mt, nt, n, part[0], PART, width, pj, n * psi->ld, psi->ld, acc);
        }
    }
}

void CPU(project_fwd_tile)(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *h, const weft_tensor *ms,
                           int64_t t0, int64_t t1)
{
    tile_sums sums;
    int tokens = (int)(t1 - t0);
    int64_t width = part_width(psi->n);
    if (psi->amx) {
        amx_project(psi, x, h, ms, t0, t1);
        return;
    }
    for (int64_t row0 = 0; row0 < psi->rows; row0 += ROW_BLOCK) {
        int rows = (int)min64(ROW_BLOCK, psi->rows - row0);
        memset(&sums, 0, sizeof sums);
        for (int64_t c = 0; c < psi->channels; c += width)
            add_chunk(&sums, psi, x, t0, tokens, row0, rows, c, min64(width, psi->channels - c));
        for (int t = 0; t < tokens; t++) {
            for (int j = 0; j < rows; j++)
                coef_put(h, false, t0 + t, (row0 + j) * h->stride[1], vf_sum16(sums.h[t][j]));
            if (row0 == 0)
                coef_put(ms, false, t0 + t, 0, vf_sum16(sums.square[t]) / (float)(psi->n * psi->channels));
        }
    }
}

/* ---- operator ------------------------------------------------------------------------------------------------------ */

typedef struct plan {
    const weft_call *call;
    const weft_mhc_project_fwd_args *args;
    cpu_psi psi;
} plan;

static weft_arena lay_out(plan *p, const weft_call *call, const weft_mhc_project_fwd_args *a)
{
    weft_arena arena = cpu_arena(call);
    *p = (plan){.call = call, .args = a};
    p->psi = CPU(psi_take)(&arena, call, &a->phi, &a->norm_weight, &a->x, false);
    return arena;
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_project_fwd_args *a = p->args;
    (void)thread;
    CPU(project_fwd_tile)(&p->psi, &a->x, &a->h, &a->ms, item * TILE, min64((item + 1) * TILE, p->call->tokens));
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_project_fwd_args *a = args;
    plan p;
    lay_out(&p, call, a);
    CPU(psi_pack)(call, &p.psi, &a->phi, &a->norm_weight);
    int64_t work = call->tokens * call->streams * call->channels * call->rows;
    cpu_parallel(call, (call->tokens + TILE - 1) / TILE, work, fwd_body, &p);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args);
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_project_fwd)[] = {{WEFT_NONE, 0, fwd, fwd_workspace}, {0}};
