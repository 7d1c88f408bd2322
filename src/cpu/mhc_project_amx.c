/* SPDX-License-Identifier: Apache-2.0
 *
 * The projection on AMX tiles. A tile of A is 16 tokens by 32 channels, loaded from x as it lies in memory. psi is split
 * into hi + lo; a block of 24 rows becomes 48 columns (24 hi, 24 lo), exactly three tiles, and h = hi part + lo part.
 * A token's sums never meet another token's, so a short last tile changes nothing. */
#include "cpu/mhc_project_amx.h"

enum { ROWS = 24, TILES = 3, K = 32, TILE_HALVES = 16 * 32, GROUP = 16 };

bool CPU(amx_serves)(const weft_call *call, const weft_tensor *x)
{
    return call->isa >= WEFT_ISA_AMX && x->dtype == WEFT_BF16 && x->stride[2] == 1 && call->channels % K == 0;
}

static int64_t blocks_of(int64_t rows)
{
    return (rows + ROWS - 1) / ROWS;
}

size_t CPU(amx_bytes)(const weft_call *call)
{
    int64_t steps = call->streams * call->channels / K;
    return (size_t)(blocks_of(call->rows) * steps * TILES * TILE_HALVES) * 2;
}

typedef struct pack_job {
    const cpu_psi *psi;
    const weft_tensor *phi, *norm_weight;
} pack_job;

/* hi is psi rounded to bf16 (kept finite where psi is), lo what is left of it. */
static void split(float v, uint16_t *hi, uint16_t *lo)
{
    uint16_t h = weft_f32_to_bf16(v);
    if (isfinite(v) && (h & 0x7fff) == 0x7f80) h = (uint16_t)((h & 0x8000) | 0x7f7f);
    *hi = h;
    *lo = isfinite(v) ? weft_f32_to_bf16(v - weft_bf16_to_f32(h)) : 0;
}

/* One k-step of one block: three tiles of 16 pairs of channels by 16 columns. */
static void pack_body(void *context, int64_t item, int thread)
{
    const pack_job *j = context;
    const cpu_psi *p = j->psi;
    int64_t per_stream = p->channels / K, steps = p->n * per_stream;
    int64_t block = item / steps, step = item % steps, i = step / per_stream, c = step % per_stream * K;
    uint16_t *tiles = (uint16_t *)p->amx + item * TILES * TILE_HALVES;
    float gain[K], row[K];
    (void)thread;
    if (weft_has(j->norm_weight)) row_load(gain, j->norm_weight, i, c, K);
    memset(tiles, 0, TILES * TILE_HALVES * 2);
    for (int64_t r = 0; r < ROWS && block * ROWS + r < p->rows; r++) {
        stream_load(row, j->phi, block * ROWS + r, i, c, K);
        for (int k = 0; k < K; k++) {
            uint16_t hi, lo;
            split(weft_has(j->norm_weight) ? row[k] * gain[k] : row[k], &hi, &lo);
            int64_t at_hi = r, at_lo = ROWS + r; /* columns; a tile has 16 of them, each a pair of channels wide */
            tiles[at_hi / 16 * TILE_HALVES + k / 2 * 32 + at_hi % 16 * 2 + k % 2] = hi;
            tiles[at_lo / 16 * TILE_HALVES + k / 2 * 32 + at_lo % 16 * 2 + k % 2] = lo;
        }
    }
}

void CPU(amx_pack)(const weft_call *call, const cpu_psi *psi, const weft_tensor *phi, const weft_tensor *norm_weight)
{
    pack_job j = {psi, phi, norm_weight};
    int64_t items = blocks_of(psi->rows) * (psi->n * psi->channels / K);
    cpu_parallel(call, items, psi->rows * psi->n * psi->channels, pack_body, &j);
}

/* Sum of squares of one token. Even and odd channels are widened by a shift and a mask and summed apart, twice over, so that
 * the sums need not wait for one another. */
static float sum_squares(const weft_tensor *x, int64_t token, int64_t n, int64_t channels)
{
    vf q[4] = {{0}};
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    for (int64_t i = 0; i < n; i++) {
        const char *row = at(x, token) + i * x->stride[1] * 2;
        for (int64_t c = 0; c < channels; c += K) {
            __m512i pair = _mm512_loadu_si512(row + c * 2);
            vf even = (vf)_mm512_slli_epi32(pair, 16), odd = (vf)_mm512_and_si512(pair, high);
            if (c / K & 1) {
                q[2] = vf_fma(even, even, q[2]);
                q[3] = vf_fma(odd, odd, q[3]);
            } else {
                q[0] = vf_fma(even, even, q[0]);
                q[1] = vf_fma(odd, odd, q[1]);
            }
        }
    }
    vf all = (q[0] + q[1]) + (q[2] + q[3]);
    return vf_sum16(&all);
}

/* Palette 1: tiles 0..2 sums, 3 tokens, 4..6 psi. */
static void configure(int tokens)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t colsb[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 7; t++) {
        config.colsb[t] = 64;
        config.rows[t] = (uint8_t)(t < 4 ? tokens : 16);
    }
    _tile_loadconfig(&config);
}

/* Asks for GROUP lines of the tokens to come, in the order in which they lie in memory: a token has as many lines as there
 * are k-steps, and the hardware runs ahead of an ascending walk, but not of one that hops from token to token. */
static void ask_ahead(const weft_tensor *x, int64_t token, int64_t step, int64_t steps, int64_t per_stream)
{
    int64_t first = step * GROUP, s = first % steps;
    const char *p = at(x, token + first / steps);
    for (int k = 0; k < GROUP; k++, s++) {
        if (s == steps) s = 0, p += x->stride[0] * 2;
        line_ask(p, (s / per_stream * x->stride[1] + s % per_stream * K) * 2);
    }
}

/* h of up to 16 tokens. */
static void project_group(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *h, int64_t t0, int tokens)
{
    _Alignas(64) float sums[TILES][GROUP][16];
    int64_t per_stream = psi->channels / K, steps = psi->n * per_stream, stride = x->stride[0] * 2;
    for (int64_t block = 0; block < blocks_of(psi->rows); block++) {
        const uint16_t *b = (const uint16_t *)psi->amx + block * steps * TILES * TILE_HALVES;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        for (int64_t i = 0; i < psi->n; i++) {
            const char *a = at(x, t0) + i * x->stride[1] * 2;
            for (int64_t s = 0; s < per_stream; s++, b += TILES * TILE_HALVES) {
                if (block == 0) ask_ahead(x, t0 + tokens, i * per_stream + s, steps, per_stream);
                _tile_loadd(3, a + s * K * 2, stride);
                _tile_loadd(4, b, 64);
                _tile_dpbf16ps(0, 3, 4);
                _tile_loadd(5, b + TILE_HALVES, 64);
                _tile_dpbf16ps(1, 3, 5);
                _tile_loadd(6, b + 2 * TILE_HALVES, 64);
                _tile_dpbf16ps(2, 3, 6);
            }
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        for (int t = 0; t < tokens; t++)
            for (int64_t r = 0; r < ROWS && block * ROWS + r < psi->rows; r++) {
                int64_t lo = ROWS + r;
                float v = sums[r / 16][t][r % 16] + sums[lo / 16][t][lo % 16];
                coef_put(h, false, t0 + t, (block * ROWS + r) * h->stride[1], v);
            }
    }
}

void CPU(amx_project)(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *h, const weft_tensor *ms, int64_t t0,
                      int64_t t1)
{
    int configured = 0;
    /* The squares first: they pull the tokens into cache row by row, which the strided tile loads would do badly. */
    for (int64_t t = t0; t < t1; t++)
        coef_put(ms, false, t, 0, sum_squares(x, t, psi->n, psi->channels) / (float)(psi->n * psi->channels));
    for (int64_t t = t0; t < t1; t += GROUP) {
        int tokens = (int)min64(GROUP, t1 - t);
        if (tokens != configured) configure(tokens);
        configured = tokens;
        project_group(psi, x, h, t, tokens);
    }
    _tile_release();
}
