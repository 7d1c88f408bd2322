/* SPDX-License-Identifier: Apache-2.0
 *
 * The projection on AMX tiles. A tile of A is 16 tokens by 32 channels, loaded from x in memory order. psi is split
 * into hi + lo, both added to the same sums; a block of 24 rows takes a tile of 16 columns and one of 8. A token's sums never
 * meet another token's, so a short last group changes nothing. */
#include "cpu/mhc_project_amx.h"

/* STEP_HALVES: bf16 numbers of psi in a k-step of 32 channels: hi and lo of 24 rows, in the order in which they are read. */
enum { ROWS = 24, WIDE_COLS = 16, NARROW_COLS = 8, K = 32, GROUP = 16, STEP_HALVES = 2 * ROWS * K };

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
    return (size_t)(blocks_of(call->rows) * steps * STEP_HALVES) * 2;
}

typedef struct pack_job {
    const cpu_psi *psi;
    const weft_tensor *phi, *norm_weight;
} pack_job;

/* hi is psi rounded to bf16 (kept finite where psi is), lo what is left of it. */
static void split(vf v, vh *hi, vh *lo)
{
    const vf largest = vf_set1(0x1.fep127f), inf = vf_set1(INFINITY);
    vf c = vf_select((v > largest) & (v < inf), largest, v);
    c = vf_select((c < -largest) & (c > -inf), -largest, c);
    *hi = vf_to_bf16(c);
    uint16_t h[LANES];
    memcpy(h, hi, sizeof h);
    vf rest = v - vf_load_bf16(h);
    *lo = vf_to_bf16(vf_select(rest == rest, rest, vf_set1(0))); /* inf - inf: nothing is left */
}

/* Row r of a part (hi or lo) of a k-step: 16 pairs of channels, one in each row of the tile. */
static void put_pairs(uint16_t *part, int64_t r, const vh half[2])
{
    uint32_t pairs[K / 2];
    int64_t cols = r < WIDE_COLS ? WIDE_COLS : NARROW_COLS, col = r % WIDE_COLS;
    uint16_t *tile = r < WIDE_COLS ? part : part + WIDE_COLS * K;
    memcpy(pairs, half, sizeof pairs);
    for (int p = 0; p < K / 2; p++) memcpy(tile + (p * cols + col) * 2, &pairs[p], 4);
}

/* One k-step of one block. */
static void pack_body(void *context, int64_t item, int thread)
{
    const pack_job *j = context;
    const cpu_psi *p = j->psi;
    int64_t per_stream = p->channels / K, steps = p->n * per_stream;
    int64_t block = item / steps, step = item % steps, i = step / per_stream, c = step % per_stream * K;
    uint16_t *out = (uint16_t *)p->amx + item * STEP_HALVES;
    float gain[K], row[K];
    (void)thread;
    if (weft_has(j->norm_weight)) row_load(gain, j->norm_weight, i, c, K);
    memset(out, 0, STEP_HALVES * 2);
    for (int64_t r = 0; r < ROWS && block * ROWS + r < p->rows; r++) {
        vh hi[2], lo[2];
        stream_load(row, j->phi, block * ROWS + r, i, c, K);
        for (int k = 0; k < K && weft_has(j->norm_weight); k++) row[k] *= gain[k];
        split(vf_load(row), &hi[0], &lo[0]);
        split(vf_load(row + LANES), &hi[1], &lo[1]);
        put_pairs(out, r, hi);
        put_pairs(out + ROWS * K, r, lo);
    }
}

void CPU(amx_pack)(const weft_call *call, const cpu_psi *psi, const weft_tensor *phi,
                   const weft_tensor *norm_weight)
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

/* Palette 1: tiles 0, 1 sums (16 and 8 columns), 2 tokens, 3, 4 psi. */
static void configure(int tokens)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t colsb[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 5; t++) {
        config.colsb[t] = (uint16_t)(t == 1 || t == 4 ? NARROW_COLS * 4 : 64);
        config.rows[t] = (uint8_t)(t < 3 ? tokens : K / 2);
    }
    _tile_loadconfig(&config);
}

/* h of up to 16 tokens. */
static void project_group(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *h, int64_t t0, int tokens)
{
    _Alignas(64) float wide[GROUP][WIDE_COLS], narrow[GROUP][NARROW_COLS];
    const int64_t per_stream = psi->channels / K, stride = x->stride[0] * 2;
    for (int64_t block = 0; block < blocks_of(psi->rows); block++) {
        const uint16_t *b = (const uint16_t *)psi->amx + block * psi->n * per_stream * STEP_HALVES;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t i = 0; i < psi->n; i++) {
            const char *a = at(x, t0) + i * x->stride[1] * 2;
            for (int64_t s = 0; s < per_stream; s++, a += K * 2) {
                /* The same line of the next tokens: the products hide the latency. */
                for (int64_t t = 0; block == 0 && t < GROUP; t++) line_ask(a, (GROUP + t) * stride);
                _tile_loadd(2, a, stride);
                for (int part = 0; part < 2; part++, b += ROWS * K) {
                    _tile_loadd(3, b, 64);
                    _tile_dpbf16ps(0, 2, 3);
                    _tile_loadd(4, b + WIDE_COLS * K, NARROW_COLS * 4);
                    _tile_dpbf16ps(1, 2, 4);
                }
            }
        }
        _tile_stored(0, wide, 64);
        _tile_stored(1, narrow, NARROW_COLS * 4);
        for (int t = 0; t < tokens; t++)
            for (int64_t r = 0; r < ROWS && block * ROWS + r < psi->rows; r++)
                coef_put(h, false, t0 + t, (block * ROWS + r) * h->stride[1],
                         r < WIDE_COLS ? wide[t][r] : narrow[t][r - WIDE_COLS]);
    }
}

void CPU(amx_project)(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *h, const weft_tensor *ms,
                      int64_t t0, int64_t t1)
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
