/* SPDX-License-Identifier: Apache-2.0
 *
 * Projection + mean square, forward [M1]: h[t] = psi x[t]. Bytes per token, bf16: 2nC; 2 * rows * nC flops, which is the
 * limit (AMX tiles aside). Tokens are widened to fp32 a chunk at a time and multiplied in blocks of MT tokens by NT rows,
 * each product a sum in 16 lanes, so that blocking changes no result. */
#include "cpu/common/tiles.h"
#include "cpu/mhc_project_amx.h"

#if WEFT_CPU_LEVEL == 2
enum { MT = 4, NT = 4 };
#else
enum { MT = 2, NT = 2 };
#endif

/* Floats of a token per chunk: MT tokens stay in L1, the rows of psi stream through. The odd stride keeps the tokens of a
 * chunk out of one another's cache sets. */
enum { PART = 1024, PART_STRIDE = PART + WIDE, ROW_BLOCK = 24 };
/* Up to this many tokens reading psi in place is faster than packing it. */
enum { FEW_TOKENS = 32 };

INLINE int64_t part_width(int64_t n)
{
    return PART / n / WIDE * WIDE;
}

/* Whether phi can be read in place and that is faster than packing. */
static bool psi_is_phi(const weft_call *call, const weft_tensor *phi, const weft_tensor *norm_weight)
{
    return call->tokens <= FEW_TOKENS && phi->stride[2] == 1 && !weft_has(norm_weight) &&
           call->channels % WIDE == 0 && call->rows % NT == 0;
}

cpu_psi CPU(psi_take)(weft_arena *arena, const weft_call *call, const weft_tensor *x, const weft_tensor *phi,
                      const weft_tensor *norm_weight, bool panels)
{
    int64_t n = call->streams, channels = call->channels;
    cpu_psi psi = {.rows = call->rows, .n = n, .channels = channels, .ld = pad16(channels), .panels = panels};
    if (panels) psi.ld = (channels + PANEL - 1) / PANEL * PANEL;
    if (!panels && CPU(amx_serves)(call, x)) {
        psi.amx = weft_arena_take(arena, CPU(amx_bytes)(call));
        return psi;
    }
    if (!panels && psi_is_phi(call, phi, norm_weight)) {
        psi.phi = *phi;
        return psi;
    }
    int64_t rows = panels ? psi.rows : (psi.rows + NT - 1) / NT * NT;
    psi.data = psi.room = weft_arena_take(arena, (size_t)(rows * n * psi.ld) * 4);
    return psi;
}

typedef struct pack_job {
    const cpu_psi *psi;
    const weft_tensor *phi, *norm_weight;
} pack_job;

/* Where 16 (forward) or PANEL (backward) channels of a row begin. */
INLINE float *packed_at(const cpu_psi *p, int64_t row, int64_t i, int64_t c)
{
    if (p->panels) return p->room + ((i * (p->ld / PANEL) + c / PANEL) * p->rows + row) * PANEL;
    return p->room + (((row / NT * p->n + i) * (p->ld / WIDE) + c / WIDE) * NT + row % NT) * WIDE;
}

/* One row of one stream of psi, in pieces; rows past the last one are zero. */
static void pack_body(void *context, int64_t item, int thread)
{
    const pack_job *j = context;
    const cpu_psi *p = j->psi;
    _Alignas(64) float row[CHUNK], gain[CHUNK];
    int64_t r = item / p->n, i = item % p->n, piece = p->panels ? PANEL : WIDE;
    (void)thread;
    for (int64_t c = 0; c < p->ld; c += CHUNK) {
        int64_t width = min64(CHUNK, p->ld - c), count = r < p->rows ? min64(width, p->channels - c) : 0;
        memset(row, 0, sizeof row);
        if (count > 0) stream_load(row, j->phi, r, i, c, count);
        if (count > 0 && weft_has(j->norm_weight)) {
            row_load(gain, j->norm_weight, i, c, count); /* [streams, channels] */
            for (int64_t k = 0; k < count; k++) row[k] *= gain[k];
        }
        for (int64_t k = 0; k < width; k += piece) memcpy(packed_at(p, r, i, c + k), row + k, (size_t)piece * 4);
    }
}

void CPU(psi_pack)(const weft_call *call, const cpu_psi *psi, const weft_tensor *phi,
                   const weft_tensor *norm_weight)
{
    pack_job j = {psi, phi, norm_weight};
    int64_t rows = psi->panels ? psi->rows : (psi->rows + NT - 1) / NT * NT;
    if (psi->amx)
        CPU(amx_pack)(call, psi, phi, norm_weight);
    else if (!weft_has(&psi->phi))
        cpu_parallel(call, rows * psi->n, rows * psi->n * psi->channels, pack_body, &j);
}

/* mt tokens times NT rows over a chunk of n streams by `width` channels (a multiple of 16). psi is that of the first row; from
 * there it is so many elements to the next stream, to the next row and to the next 16 channels. */
INLINE void micro(const int mt, int64_t n, const float *x, int64_t width, weft_dtype type, const void *psi,
                  int64_t stream, int64_t row_step, int64_t step, vf (*acc)[ROW_BLOCK][STEP], const char *ask,
                  const weft_tensor *asked)
{
    const int64_t size = (int64_t)size_of(asked->dtype), ask_stride = asked->stride[1] * size;
    vf s[MT][NT][STEP];
    for (int t = 0; t < mt; t++)
        for (int j = 0; j < NT; j++)
            for (int l = 0; l < STEP; l++) s[t][j][l] = acc[t][j][l];
    for (int64_t i = 0; i < n; i++) {
        const float *xi = x + i * width;
        int64_t at = i * stream;
        for (int64_t c = 0; c < width; c += WIDE, at += step) {
            if (ask && (c * size) % 64 == 0) line_ask(ask + i * ask_stride, c * size);
            for (int l = 0; l < STEP; l++) {
                vf row[NT];
                for (int j = 0; j < NT; j++) row[j] = vf_get(type, psi, at + j * row_step + l * LANES);
                for (int t = 0; t < mt; t++) {
                    vf v = vf_load(xi + t * PART_STRIDE + c + l * LANES);
                    for (int j = 0; j < NT; j++) s[t][j][l] = vf_fma(v, row[j], s[t][j][l]);
                }
            }
        }
    }
    for (int t = 0; t < mt; t++)
        for (int j = 0; j < NT; j++)
            for (int l = 0; l < STEP; l++) acc[t][j][l] = s[t][j][l];
}

/* The same with psi in place, from channel c of the first row on. */
INLINE void micro_phi(const int mt, int64_t n, const float *x, int64_t width, const weft_tensor *phi, int64_t row,
                      int64_t c, vf (*acc)[ROW_BLOCK][STEP], const char *ask, const weft_tensor *asked)
{
    const int64_t stream = phi->stride[1], row_step = phi->stride[0];
    const void *psi = run_at(phi, row, 0, c);
    if (phi->dtype == WEFT_F32)
        micro(mt, n, x, width, WEFT_F32, psi, stream, row_step, WIDE, acc, ask, asked);
    else if (phi->dtype == WEFT_BF16)
        micro(mt, n, x, width, WEFT_BF16, psi, stream, row_step, WIDE, acc, ask, asked);
    else
        micro(mt, n, x, width, WEFT_F16, psi, stream, row_step, WIDE, acc, ask, asked);
}

/* Squares of `count` floats (a multiple of 16) into four sums in turn, so that they need not wait for one another. */
INLINE void add_squares(vf (*square)[STEP], const float *x, int64_t count)
{
    vf q[4][STEP];
    memcpy(q, square, sizeof q);
    int64_t e = 0;
    for (; e + 4 * WIDE <= count; e += 4 * WIDE)
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < STEP; l++) {
                vf v = vf_load(x + e + k * WIDE + l * LANES);
                q[k][l] = vf_fma(v, v, q[k][l]);
            }
    for (int k = 0; e < count; e += WIDE, k++)
        for (int l = 0; l < STEP; l++) {
            vf v = vf_load(x + e + l * LANES);
            q[k][l] = vf_fma(v, v, q[k][l]);
        }
    memcpy(square, q, sizeof q);
}

/* The sums of a block of rows for up to TILE tokens; the first block also sums the squares. */
typedef struct tile_sums {
    vf h[TILE][ROW_BLOCK][STEP], square[TILE][4][STEP];
} tile_sums;

static void add_chunk(tile_sums *sums, const cpu_psi *psi, const weft_tensor *x, int64_t t0, int tokens,
                      int64_t row0, int rows, int64_t c0, int64_t count)
{
    _Alignas(64) float part[MT * PART_STRIDE];
    int64_t n = psi->n, width = pad16(count);
    /* Prefetches the next chunk while this one is multiplied. */
    bool inside = c0 + count < psi->channels;
    int64_t next_c = inside ? c0 + count : 0, next_t = inside ? t0 : t0 + tokens;
    for (int t = 0; t < tokens; t += MT) {
        int mt = tokens - t < MT ? tokens - t : MT;
        for (int k = 0; k < mt; k++) {
            rows_load(part + k * PART_STRIDE, width, x, t0 + t + k, c0, count);
            if (row0 == 0) add_squares(sums->square[t + k], part + k * PART_STRIDE, n * width);
        }
        for (int j = 0; j < rows; j += NT) {
            vf(*acc)[ROW_BLOCK][STEP] = (vf(*)[ROW_BLOCK][STEP]) & sums->h[t][j];
            const char *ask = j / NT < mt ? run_at(x, next_t + t + j / NT, 0, next_c) : NULL;
            if (weft_has(&psi->phi)) {
                micro_phi(mt, n, part, width, &psi->phi, row0 + j, c0, acc, ask, x);
                continue;
            }
            const float *p = packed_at(psi, row0 + j, 0, c0);
            if (mt == MT)
                micro(MT, n, part, width, WEFT_F32, p, psi->ld * NT, WIDE, NT * WIDE, acc, ask, x);
            else
                micro(mt, n, part, width, WEFT_F32, p, psi->ld * NT, WIDE, NT * WIDE, acc, ask, x);
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
        CPU(amx_project)(psi, x, h, ms, t0, t1);
        return;
    }
    for (int64_t row0 = 0; row0 < psi->rows; row0 += ROW_BLOCK) {
        int rows = (int)min64(ROW_BLOCK, psi->rows - row0);
        memset(sums.h, 0, (size_t)tokens * sizeof *sums.h);
        memset(sums.square, 0, (size_t)tokens * sizeof *sums.square);
        for (int64_t c = 0; c < psi->channels; c += width)
            add_chunk(&sums, psi, x, t0, tokens, row0, rows, c, min64(width, psi->channels - c));
        for (int t = 0; t < tokens; t++) {
            for (int j = 0; j < rows; j++)
                coef_put(h, false, t0 + t, (row0 + j) * h->stride[1], vf_sum16(sums.h[t][j]));
            if (row0 > 0) continue;
            vf(*q)[STEP] = sums.square[t], all[STEP];
            for (int l = 0; l < STEP; l++) all[l] = (q[0][l] + q[1][l]) + (q[2][l] + q[3][l]);
            coef_put(ms, false, t0 + t, 0, vf_sum16(all) / (float)(psi->n * psi->channels));
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
    p->psi = CPU(psi_take)(&arena, call, &a->x, &a->phi, &a->norm_weight, false);
    return arena;
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_project_fwd_args *a = p->args;
    int64_t tile = tile_tokens(p->call);
    (void)thread;
    CPU(project_fwd_tile)(&p->psi, &a->x, &a->h, &a->ms, item * tile, min64((item + 1) * tile, p->call->tokens));
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_project_fwd_args *a = args;
    plan p;
    lay_out(&p, call, a);
    CPU(psi_pack)(call, &p.psi, &a->phi, &a->norm_weight);
    int64_t work = call->tokens * call->streams * call->channels * call->rows;
    int64_t tile = tile_tokens(call);
    cpu_parallel(call, (call->tokens + tile - 1) / tile, work, fwd_body, &p);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args);
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_project_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
