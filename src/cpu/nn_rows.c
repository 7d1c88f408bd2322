/* SPDX-License-Identifier: Apache-2.0
 *
 * What a transformer does row by row: SwiGLU [T3], embedding and loss [T4], biases, the gates of the unconstrained
 * connection [T5]. Sums over tokens belong to one thread per chunk of columns and run in the order of the tokens. */
#include <math.h>

#include "cpu/nn.h"

enum { COLUMNS = 64 }; /* columns of a sum over tokens */

/* ---- SwiGLU ------------------------------------------------------------------------------------------------------------ */

static void swiglu_rows(void *context, int64_t item, int thread)
{
    const weft_swiglu *a = context;
    (void)thread;
    for (int64_t t = item * TILE; t < min64((item + 1) * TILE, a->tokens); t++) {
        const float *gate = (const float *)a->gate_up + t * 2 * a->hidden, *up = gate + a->hidden;
        const float *d = a->d_act ? (const float *)a->d_act + t * a->hidden : NULL;
        float *act = (float *)a->act + t * a->hidden, *dg = d ? (float *)a->d_gate_up + t * 2 * a->hidden : NULL;
        for (int64_t i = 0; i < a->hidden; i += LANES) {
            int64_t left = a->hidden - i;
            vf g = part_load(gate + i, left, 0), u = part_load(up + i, left, 0), s, r;
            mm_sigmoid(g, &s, &r);
            if (d) {
                vf e = part_load(d + i, left, 0);
                part_store(dg + i, e * u * s * vf_fma(g, r, vf_set1(1)), left);
                part_store(dg + a->hidden + i, e * g * s, left);
            }
            part_store(act + i, g * s * u, left);
        }
    }
}

weft_status CPU(nn_swiglu_fwd)(weft_nn *nn, const weft_swiglu *a)
{
    weft_swiglu b = *a;
    b.d_act = NULL;
    if (!nn->query) nn_parallel(nn, ceil_div(a->tokens, TILE), a->tokens * a->hidden, swiglu_rows, &b);
    return WEFT_OK;
}

weft_status CPU(nn_swiglu_bwd)(weft_nn *nn, const weft_swiglu *a)
{
    weft_swiglu b = *a;
    if (!nn->query) nn_parallel(nn, ceil_div(a->tokens, TILE), a->tokens * a->hidden, swiglu_rows, &b);
    return WEFT_OK;
}

/* ---- embedding, biases ---------------------------------------------------------------------------------------------------- */

weft_status CPU(nn_embed_fwd)(weft_nn *nn, const weft_embed *a)
{
    size_t row = (size_t)a->channels * sizeof(float);
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < a->count; t++)
        memcpy((char *)a->rows + (size_t)t * row, (const char *)a->weight + (size_t)a->tokens[t] * row, row);
    return WEFT_OK;
}

INLINE void add_row(float *to, const float *from, int64_t count)
{
    for (int64_t c = 0; c < count; c += LANES)
        part_store(to + c, part_load(to + c, count - c, 0) + part_load(from + c, count - c, 0), count - c);
}

static void embed_columns(void *context, int64_t item, int thread)
{
    const weft_embed *a = context;
    int64_t c = item * COLUMNS, count = min64(COLUMNS, a->channels - c);
    (void)thread;
    for (int64_t t = 0; t < a->count; t++)
        add_row((float *)a->d_weight + a->tokens[t] * a->channels + c, (const float *)a->rows + t * a->channels + c,
                count);
}

weft_status CPU(nn_embed_bwd)(weft_nn *nn, const weft_embed *a)
{
    weft_embed b = *a;
    if (!nn->query) nn_parallel(nn, ceil_div(a->channels, COLUMNS), a->count * a->channels, embed_columns, &b);
    return WEFT_OK;
}

typedef struct bias {
    float *rows, *vector;
    int64_t tokens, width;
} bias;

static void bias_rows(void *context, int64_t item, int thread)
{
    const bias *b = context;
    (void)thread;
    for (int64_t t = item * TILE; t < min64((item + 1) * TILE, b->tokens); t++)
        add_row(b->rows + t * b->width, b->vector, b->width);
}

static void bias_columns(void *context, int64_t item, int thread)
{
    const bias *b = context;
    int64_t c = item * COLUMNS;
    (void)thread;
    for (int64_t t = 0; t < b->tokens; t++)
        add_row(b->vector + c, b->rows + t * b->width + c, min64(COLUMNS, b->width - c));
}

weft_status CPU(nn_bias_fwd)(weft_nn *nn, void *rows, const void *vector, int64_t tokens, int64_t width)
{
    bias b = {rows, (float *)vector, tokens, width};
    if (!nn->query) nn_parallel(nn, ceil_div(tokens, TILE), tokens * width, bias_rows, &b);
    return WEFT_OK;
}

weft_status CPU(nn_bias_bwd)(weft_nn *nn, const void *rows, void *vector, int64_t tokens, int64_t width)
{
    bias b = {(float *)rows, vector, tokens, width};
    if (!nn->query) nn_parallel(nn, ceil_div(width, COLUMNS), tokens * width, bias_columns, &b);
    return WEFT_OK;
}

/* ---- loss ------------------------------------------------------------------------------------------------------------------ */

/* The row's largest value, and the sum of exp(row - top). */
INLINE float row_divisor(const float *row, int64_t count, float *top)
{
    vf high = vf_set1(-INFINITY), sum[STEP] = {{0}};
    for (int64_t c = 0; c < count; c += LANES) high = vf_max(part_load(row + c, count - c, -INFINITY), high);
    *top = high[0];
    for (int l = 1; l < LANES; l++) *top = high[l] > *top ? high[l] : *top;
    for (int64_t c = 0; c < count; c += WIDE)
        for (int s = 0; s < STEP; s++) {
            int64_t at = c + s * LANES;
            vf e = vf_exp(part_load(row + at, count - at, -INFINITY) - *top);
            for (int l = 0; l < LANES && count - at < LANES; l++)
                if (l >= count - at) e[l] = 0;
            sum[s] = sum[s] + e;
        }
    return vf_sum16(sum);
}

static void loss_rows(void *context, int64_t item, int thread)
{
    const weft_loss *a = context;
    (void)thread;
    for (int64_t t = item * TILE; t < min64((item + 1) * TILE, a->tokens); t++) {
        const float *row = (const float *)a->logits + t * a->vocab;
        float *to = a->losses ? NULL : (float *)a->d_logits + t * a->vocab, top;
        int32_t target = a->targets[t];
        if (target < 0) {
            if (a->losses) ((float *)a->losses)[t] = 0;
            if (!a->losses) memset(to, 0, (size_t)a->vocab * sizeof *to);
            continue;
        }
        float sum = row_divisor(row, a->vocab, &top);
        if (a->losses) {
            ((float *)a->losses)[t] = top + logf(sum) - row[target];
            continue;
        }
        float factor = (float)(a->scale / sum);
        for (int64_t c = 0; c < a->vocab; c += LANES)
            part_store(to + c, vf_exp(part_load(row + c, a->vocab - c, 0) - top) * factor, a->vocab - c);
        to[target] -= (float)a->scale;
    }
}

weft_status CPU(nn_loss_fwd)(weft_nn *nn, const weft_loss *a)
{
    weft_loss b = *a;
    if (!nn->query) nn_parallel(nn, ceil_div(a->tokens, TILE), a->tokens * a->vocab, loss_rows, &b);
    return WEFT_OK;
}

weft_status CPU(nn_loss_bwd)(weft_nn *nn, const weft_loss *a)
{
    weft_loss b = *a;
    b.losses = NULL;
    if (!nn->query) nn_parallel(nn, ceil_div(a->tokens, TILE), a->tokens * a->vocab, loss_rows, &b);
    return WEFT_OK;
}

/* ---- the unconstrained connection ------------------------------------------------------------------------------------------- */

/* Entry k of a stream's row of h: pre, post, then the n entries of res. */
INLINE float *gate_at(float *pre, float *post, float *res, int64_t n, int64_t row, int64_t k)
{
    return k == 0 ? pre + row : k == 1 ? post + row : res + row * n + k - 2;
}

INLINE int64_t beta_at(int64_t n, int64_t stream, int64_t k)
{
    return k < 2 ? k * n + stream : 2 * n + stream * n + k - 2;
}

static void hc_rows(void *context, int64_t item, int thread)
{
    const weft_hc_gates *a = context;
    const float *alpha = a->alpha, *beta = a->beta;
    int64_t n = a->streams;
    (void)thread;
    for (int64_t r = item * TILE; r < min64((item + 1) * TILE, a->tokens * n); r++) {
        const float *h = (const float *)a->h + r * (n + 2);
        float inv = 1 / sqrtf(((const float *)a->ms)[r] + (float)a->eps), d_inv = 0;
        for (int64_t k = 0; k < n + 2; k++) {
            float th = tanhf(h[k] * inv), factor = alpha[k < 2 ? k : 2];
            if (!a->d_h) {
                *gate_at(a->pre, a->post, a->res, n, r, k) = factor * th + beta[beta_at(n, r % n, k)];
                continue;
            }
            float g = *gate_at((float *)a->d_pre, (float *)a->d_post, (float *)a->d_res, n, r, k);
            float dz = g * factor * (1 - th * th);
            ((float *)a->d_h)[r * (n + 2) + k] = dz * inv;
            d_inv += dz * h[k];
        }
        if (a->d_h) ((float *)a->d_ms)[r] = -0.5f * inv * inv * inv * d_inv;
    }
}

weft_status CPU(nn_hc_gates_fwd)(weft_nn *nn, const weft_hc_gates *a)
{
    weft_hc_gates b = *a;
    int64_t rows = a->tokens * a->streams;
    b.d_h = NULL;
    if (!nn->query) nn_parallel(nn, ceil_div(rows, TILE), rows * (a->streams + 2) * 16, hc_rows, &b);
    return WEFT_OK;
}

/* The sums over tokens are few numbers and stay on one thread. */
weft_status CPU(nn_hc_gates_bwd)(weft_nn *nn, const weft_hc_gates *a)
{
    weft_hc_gates b = *a;
    int64_t n = a->streams, rows = a->tokens * n;
    float *d_alpha = a->d_alpha, *d_beta = a->d_beta;
    if (nn->query) return WEFT_OK;
    nn_parallel(nn, ceil_div(rows, TILE), rows * (n + 2) * 16, hc_rows, &b);
    for (int64_t r = 0; r < rows; r++) {
        float inv = 1 / sqrtf(((const float *)a->ms)[r] + (float)a->eps);
        for (int64_t k = 0; k < n + 2; k++) {
            float g = *gate_at((float *)a->d_pre, (float *)a->d_post, (float *)a->d_res, n, r, k);
            d_alpha[k < 2 ? k : 2] += g * tanhf(((const float *)a->h)[r * (n + 2) + k] * inv);
            d_beta[beta_at(n, r % n, k)] += g;
        }
    }
    return WEFT_OK;
}

weft_status CPU(nn_compose)(weft_nn *nn, const weft_compose *a)
{
    int64_t n = a->streams;
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < a->tokens; t++) {
        const float *w = (const float *)a->res + t * n * n;
        float *to = (float *)a->to + t * n * n, product[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
        for (int64_t o = 0; o < n; o++)
            for (int64_t c = 0; c < n; c++) {
                float s = 0;
                for (int64_t i = 0; i < n; i++)
                    s += (a->in_out ? w[i * n + o] : w[o * n + i]) * (a->first ? (float)(i == c) : to[i * n + c]);
                product[o * n + c] = s;
            }
        memcpy(to, product, (size_t)(n * n) * sizeof *to);
    }
    return WEFT_OK;
}

weft_status CPU(nn_gains)(weft_nn *nn, const void *maps, int64_t tokens, int64_t streams, double to[4])
{
    int64_t n = streams;
    if (nn->query) return WEFT_OK;
    to[0] = to[1] = to[2] = to[3] = 0;
    for (int64_t t = 0; t < tokens; t++)
        for (int side = 0; side < 2; side++) {
            const float *map = (const float *)maps + t * n * n;
            double top = 0;
            for (int64_t i = 0; i < n; i++) {
                double s = 0;
                for (int64_t j = 0; j < n; j++) s += fabs((double)(side ? map[j * n + i] : map[i * n + j]));
                top = s > top || isnan(s) ? s : top;
            }
            to[2 * side] += top / (double)tokens;
            to[2 * side + 1] = top > to[2 * side + 1] || isnan(top) ? top : to[2 * side + 1];
        }
    return WEFT_OK;
}
