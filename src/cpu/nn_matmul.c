/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products [T1], and the table of this instruction set. A product is split into tiles by its shape; each tile is one
 * call of the BLAS on one thread, or the loop below. */
#include "cpu/nn.h"

/* op(b)[k0.., j..] of up to PACK_DEPTH x PACK_WIDTH, row by row and padded with zeros. */
INLINE void pack_b(const weft_matmul *a, int64_t k0, int64_t depth, int64_t j, float *pack)
{
    const float *b = a->b;
    int64_t columns = min64(PACK_WIDTH, a->n - j), row = a->b_transposed ? 1 : a->ldb;
    int64_t column = a->b_transposed ? a->ldb : 1;
    if (columns < PACK_WIDTH) memset(pack, 0, (size_t)(depth * PACK_WIDTH) * sizeof *pack);
    for (int64_t k = 0; k < depth; k++)
        for (int64_t c = 0; c < columns; c++) pack[k * PACK_WIDTH + c] = b[(k0 + k) * row + (j + c) * column];
}

/* `rows` rows of c against the packed columns. */
INLINE void rows_times_pack(const weft_matmul *a, int64_t i, const int rows, int64_t k0, int64_t depth, int64_t j,
                            const float *pack, bool add)
{
    int64_t row = a->a_transposed ? 1 : a->lda, step = a->a_transposed ? a->lda : 1;
    const float *x = (const float *)a->a + i * row + k0 * step;
    float *c = (float *)a->c + i * a->ldc + j, scale = (float)a->scale;
    vf s[4][2] = {{{0}}};
    for (int64_t k = 0; k < depth; k++) {
        vf b0 = vf_load(pack + k * PACK_WIDTH), b1 = vf_load(pack + k * PACK_WIDTH + LANES);
        for (int r = 0; r < rows; r++) {
            vf v = vf_set1(x[r * row + k * step]);
            s[r][0] = vf_fma(v, b0, s[r][0]);
            s[r][1] = vf_fma(v, b1, s[r][1]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++) {
            int64_t left = a->n - j - h * LANES;
            float *to = c + r * a->ldc + h * LANES;
            if (left > 0) part_store(to, s[r][h] * scale + (add ? part_load(to, left, 0) : vf_set1(0)), left);
        }
}

static void product(const weft_matmul *a, float *pack)
{
    for (int64_t k0 = 0; k0 < a->k; k0 += PACK_DEPTH)
        for (int64_t j = 0; j < a->n; j += PACK_WIDTH) {
            int64_t depth = min64(PACK_DEPTH, a->k - k0), i = 0;
            pack_b(a, k0, depth, j, pack);
            for (; i + 4 <= a->m; i += 4) rows_times_pack(a, i, 4, k0, depth, j, pack, a->add || k0);
            for (; i < a->m; i++) rows_times_pack(a, i, 1, k0, depth, j, pack, a->add || k0);
        }
}

void CPU(nn_product)(const weft_nn *nn, const weft_matmul *a, float *pack)
{
    enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };
    if (!nn->blas) {
        product(a, pack);
        return;
    }
    nn->blas->sgemm(ROW_MAJOR, a->a_transposed ? TRANSPOSED : PLAIN, a->b_transposed ? TRANSPOSED : PLAIN,
                    (int)a->m, (int)a->n, (int)a->k, (float)a->scale, a->a, (int)a->lda, a->b, (int)a->ldb,
                    a->add ? 1 : 0, a->c, (int)a->ldc);
}

typedef struct cut {
    const weft_nn *nn;
    const weft_matmul *whole;
    int64_t rows, columns, row_tiles; /* of a tile; tiles along m */
    float *pack;
} cut;

static void tile(void *context, int64_t item, int thread)
{
    const cut *t = context;
    weft_matmul part = *t->whole;
    int64_t i = item % t->row_tiles * t->rows, j = item / t->row_tiles * t->columns;
    part.m = min64(t->rows, part.m - i);
    part.n = min64(t->columns, part.n - j);
    part.a = (const float *)part.a + i * (part.a_transposed ? 1 : part.lda);
    part.b = (const float *)part.b + j * (part.b_transposed ? part.ldb : 1);
    part.c = (float *)part.c + i * part.ldc + j;
    CPU(nn_product)(t->nn, &part, t->pack ? t->pack + thread * nn_pack_floats(t->nn) : NULL);
}

/* Tiles of about 128 rows, an even number of them, so that two threads share a small product evenly; the number of threads
 * itself has no say. */
weft_status CPU(nn_matmul)(weft_nn *nn, const weft_matmul *a)
{
    cut t = {.nn = nn, .whole = a, .columns = 768};
    t.rows = ceil_div(ceil_div(a->m, 2 * ceil_div(a->m, 256)), 16) * 16;
    t.pack = weft_nn_room(nn, (size_t)(nn_threads(nn) * nn_pack_floats(nn)) * sizeof(float));
    if (nn->query || a->m == 0 || a->n == 0) return WEFT_OK;
    t.row_tiles = ceil_div(a->m, t.rows);
    nn_parallel(nn, t.row_tiles * ceil_div(a->n, t.columns), weft_times(a->m * a->n, a->k), tile, &t);
    return WEFT_OK;
}

const weft_nn_table CPU(nn) = {
    .dtype = WEFT_F32,
    .matmul = CPU(nn_matmul),
    .rope_table = CPU(nn_rope_table),
    .rope = CPU(nn_rope),
    .attention_fwd = CPU(nn_attention_fwd),
    .attention_bwd = CPU(nn_attention_bwd),
    .swiglu_fwd = CPU(nn_swiglu_fwd),
    .swiglu_bwd = CPU(nn_swiglu_bwd),
    .embed_fwd = CPU(nn_embed_fwd),
    .embed_bwd = CPU(nn_embed_bwd),
    .loss_fwd = CPU(nn_loss_fwd),
    .loss_bwd = CPU(nn_loss_bwd),
    .hc_gates_fwd = CPU(nn_hc_gates_fwd),
    .hc_gates_bwd = CPU(nn_hc_gates_bwd),
    .bias_fwd = CPU(nn_bias_fwd),
    .bias_bwd = CPU(nn_bias_bwd),
    .compose = CPU(nn_compose),
    .gains = CPU(nn_gains),
    .copy = CPU(nn_copy),
    .fill = CPU(nn_fill),
    .blend = CPU(nn_blend),
    .adam = CPU(nn_adam),
    .sum = CPU(nn_sum),
    .first_bad = CPU(nn_first_bad),
};
