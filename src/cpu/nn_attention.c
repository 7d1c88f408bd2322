/* SPDX-License-Identifier: Apache-2.0
 *
 * Causal attention with rotary positions [T2]. A head of a sequence belongs to one thread, which walks its queries in
 * tiles of 64: the scores of a tile are two products and a softmax in between, and stay in L2. Backward makes them again
 * from the logarithm of their divisor. */
#include <math.h>

#include "cpu/nn.h"

enum { QUERIES = 64 };

weft_status CPU(nn_rope_table)(weft_nn *nn, void *table, int64_t length, int64_t head_dim, double base)
{
    int64_t half = head_dim / 2;
    float *to = table;
    if (nn->query) return WEFT_OK;
    for (int64_t i = 0; i < half; i++) {
        double frequency = pow(base, -(double)i / (double)half);
        for (int64_t p = 0; p < length; p++) {
            to[p * head_dim + i] = (float)cos((double)p * frequency);
            to[p * head_dim + half + i] = (float)sin((double)p * frequency);
        }
    }
    return WEFT_OK;
}

typedef struct turn {
    const weft_attention *a;
    float *qkv;
    float sign;
} turn;

static void turn_rows(void *context, int64_t item, int thread)
{
    const turn *t = context;
    const weft_attention *a = t->a;
    int64_t half = a->head_dim / 2, width = a->heads * a->head_dim, rows = a->sequences * a->length;
    (void)thread;
    for (int64_t r = item * TILE; r < min64((item + 1) * TILE, rows); r++) {
        const float *cosine = (const float *)a->table + r % a->length * a->head_dim, *sine = cosine + half;
        for (int64_t h = 0; h < 2 * a->heads; h++) {
            float *p = t->qkv + r * 3 * width + h * a->head_dim;
            for (int64_t i = 0; i < half; i += LANES) {
                int64_t left = half - i;
                vf x = part_load(p + i, left, 0), y = part_load(p + half + i, left, 0);
                vf c = part_load(cosine + i, left, 0), s = part_load(sine + i, left, 0) * t->sign;
                part_store(p + i, x * c - y * s, left);
                part_store(p + half + i, y * c + x * s, left);
            }
        }
    }
}

weft_status CPU(nn_rope)(weft_nn *nn, const weft_attention *a, void *qkv, int32_t back)
{
    turn t = {a, qkv, back ? -1 : 1};
    int64_t rows = a->sequences * a->length;
    if (!nn->query) nn_parallel(nn, ceil_div(rows, TILE), rows * a->heads * a->head_dim, turn_rows, &t);
    return WEFT_OK;
}

/* ---- one head ----------------------------------------------------------------------------------------------------------- */

typedef struct heads {
    const weft_nn *nn;
    const weft_attention *a;
    float *room;
    int64_t floats, ld; /* of a thread; of a row of scores */
    bool backward;
} heads;

/* The rows of q, k, v, o ... of one head of one sequence. */
typedef struct head {
    const weft_nn *nn;
    int64_t length, d, wide, ld; /* wide: from row to row of qkv */
    float *q, *k, *v, *o, *lse, *d_o, *dq, *dk, *dv;
    int64_t lse_step;
    float *scores, *d_scores, *pack;
    float scale;
} head;

static void multiply(const head *h, weft_matmul a)
{
    CPU(nn_product)(h->nn, &a, h->pack);
}

/* exp(row - shift) over `count` values, zero beyond up to `end`; the sum. */
INLINE float exp_row(float *row, float shift, int64_t count, int64_t end)
{
    vf sum[STEP] = {{0}};
    for (int64_t c = 0; c < end; c += WIDE)
        for (int s = 0; s < STEP; s++) {
            int64_t at = c + s * LANES;
            vf e = vf_exp(part_load(row + at, count - at, -INFINITY) - shift);
            if (count - at < LANES) /* vf_exp has a floor */
                for (int l = 0; l < LANES; l++)
                    if (l >= count - at) e[l] = 0;
            sum[s] = sum[s] + e;
            vf_store(row + at, e);
        }
    return vf_sum16(sum);
}

INLINE float row_top(const float *row, int64_t count)
{
    vf top = vf_set1(-INFINITY);
    for (int64_t c = 0; c < count; c += LANES) top = vf_max(top, part_load(row + c, count - c, -INFINITY));
    float m = top[0];
    for (int l = 1; l < LANES; l++) m = top[l] > m ? top[l] : m;
    return m;
}

/* q k' of these rows, of which row r has keys up to first + r. */
static void score_tile(const head *h, int64_t first, int64_t rows)
{
    multiply(h, (weft_matmul){.a = h->q + first * h->wide,
                              .lda = h->wide,
                              .b = h->k,
                              .ldb = h->wide,
                              .b_transposed = 1,
                              .c = h->scores,
                              .ldc = h->ld,
                              .m = rows,
                              .n = first + rows,
                              .k = h->d,
                              .scale = h->scale});
}

static void forward_tile(const head *h, int64_t first, int64_t rows)
{
    int64_t keys = first + rows;
    float inverse[QUERIES];
    score_tile(h, first, rows);
    for (int64_t r = 0; r < rows; r++) {
        float *row = h->scores + r * h->ld, top = row_top(row, first + r + 1);
        float sum = exp_row(row, top, first + r + 1, keys);
        h->lse[(first + r) * h->lse_step] = top + logf(sum);
        inverse[r] = 1 / sum;
    }
    float *o = h->o + first * h->wide / 3;
    multiply(h, (weft_matmul){.a = h->scores,
                              .lda = h->ld,
                              .b = h->v,
                              .ldb = h->wide,
                              .c = o,
                              .ldc = h->wide / 3,
                              .m = rows,
                              .n = h->d,
                              .k = keys,
                              .scale = 1});
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < h->d; c += LANES) {
            float *to = o + r * h->wide / 3 + c;
            part_store(to, part_load(to, h->d - c, 0) * inverse[r], h->d - c);
        }
}

static void backward_tile(const head *h, int64_t first, int64_t rows)
{
    int64_t keys = first + rows, narrow = h->wide / 3;
    const float *q = h->q + first * h->wide, *g = h->d_o + first * narrow, *o = h->o + first * narrow;
    score_tile(h, first, rows);
    multiply(h, (weft_matmul){.a = g,
                              .lda = narrow,
                              .b = h->v,
                              .ldb = h->wide,
                              .b_transposed = 1,
                              .c = h->d_scores,
                              .ldc = h->ld,
                              .m = rows,
                              .n = keys,
                              .k = h->d,
                              .scale = 1});
    for (int64_t r = 0; r < rows; r++) {
        float *p = h->scores + r * h->ld, *dp = h->d_scores + r * h->ld;
        (void)exp_row(p, h->lse[(first + r) * h->lse_step], first + r + 1, keys);
        vf all[STEP] = {{0}};
        for (int64_t c = 0; c < h->d; c += WIDE)
            for (int s = 0; s < STEP; s++) {
                int64_t at = c + s * LANES, left = h->d - at;
                all[s] = vf_fma(part_load(g + r * narrow + at, left, 0), part_load(o + r * narrow + at, left, 0),
                                all[s]);
            }
        vf mean = vf_set1(vf_sum16(all));
        for (int64_t c = 0; c < keys; c += LANES) {
            vf ds = vf_load(p + c) * (part_load(dp + c, keys - c, 0) - mean) * h->scale;
            vf_store(dp + c, ds);
        }
    }
    multiply(h, (weft_matmul){.a = h->scores,
                              .lda = h->ld,
                              .a_transposed = 1,
                              .b = g,
                              .ldb = narrow,
                              .c = h->dv,
                              .ldc = h->wide,
                              .m = keys,
                              .n = h->d,
                              .k = rows,
                              .add = 1,
                              .scale = 1});
    multiply(h, (weft_matmul){.a = h->d_scores,
                              .lda = h->ld,
                              .b = h->k,
                              .ldb = h->wide,
                              .c = h->dq + first * h->wide,
                              .ldc = h->wide,
                              .m = rows,
                              .n = h->d,
                              .k = keys,
                              .scale = 1});
    multiply(h, (weft_matmul){.a = h->d_scores,
                              .lda = h->ld,
                              .a_transposed = 1,
                              .b = q,
                              .ldb = h->wide,
                              .c = h->dk,
                              .ldc = h->wide,
                              .m = keys,
                              .n = h->d,
                              .k = rows,
                              .add = 1,
                              .scale = 1});
}

static void one_head(void *context, int64_t item, int thread)
{
    const heads *all = context;
    const weft_attention *a = all->a;
    int64_t width = a->heads * a->head_dim, row = item / a->heads * a->length,
            column = item % a->heads * a->head_dim;
    float *qkv = (float *)a->qkv + row * 3 * width + column, *room = all->room + thread * all->floats;
    head h = {.nn = all->nn, .length = a->length, .d = a->head_dim, .wide = 3 * width, .ld = all->ld};
    h.q = qkv, h.k = qkv + width, h.v = qkv + 2 * width;
    h.o = (float *)a->o + row * width + column;
    h.lse = (float *)a->lse + row * a->heads + item % a->heads, h.lse_step = a->heads;
    h.scores = room, h.d_scores = room + QUERIES * all->ld;
    h.pack = room + (all->backward ? 2 : 1) * QUERIES * all->ld;
    h.scale = 1 / sqrtf((float)a->head_dim);
    if (all->backward) {
        h.d_o = (float *)a->d_o + row * width + column;
        h.dq = (float *)a->d_qkv + row * 3 * width + column, h.dk = h.dq + width, h.dv = h.dk + width;
        for (int64_t r = 0; r < a->length; r++) {
            memset(h.dk + r * 3 * width, 0, (size_t)a->head_dim * sizeof(float));
            memset(h.dv + r * 3 * width, 0, (size_t)a->head_dim * sizeof(float));
        }
    }
    for (int64_t first = 0; first < a->length; first += QUERIES)
        (all->backward ? backward_tile : forward_tile)(&h, first, min64(QUERIES, a->length - first));
}

static weft_status attention(weft_nn *nn, const weft_attention *a, bool backward)
{
    heads all = {.nn = nn, .a = a, .ld = pad16(a->length), .backward = backward};
    all.floats = (backward ? 2 : 1) * QUERIES * all.ld + pad16(nn_pack_floats(nn));
    all.room = weft_nn_room(nn, (size_t)(nn_threads(nn) * all.floats) * sizeof(float));
    if (nn->query) return WEFT_OK;
    int64_t items = a->sequences * a->heads;
    nn_parallel(nn, items, weft_times(items * a->length * a->head_dim, a->length), one_head, &all);
    return WEFT_OK;
}

weft_status CPU(nn_attention_fwd)(weft_nn *nn, const weft_attention *a)
{
    return attention(nn, a, false);
}

weft_status CPU(nn_attention_bwd)(weft_nn *nn, const weft_attention *a)
{
    return attention(nn, a, true);
}
