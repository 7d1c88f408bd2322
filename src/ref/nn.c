/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of a transformer as plain loops in double precision [T1] [T2] [T3] [T4] [T5] [T6]. */
#include <float.h>
#include <math.h>

#include "core/nn.h"

#define ROW(p, i, width) ((double *)(p) + (i) * (width))
#define CROW(p, i, width) ((const double *)(p) + (i) * (width))

static weft_status matmul(weft_nn *nn, const weft_matmul *a)
{
    const double *x = a->a, *y = a->b;
    double *z = a->c;
    if (nn->query) return WEFT_OK;
    int64_t ar = a->a_transposed ? 1 : a->lda, ac = a->a_transposed ? a->lda : 1;
    int64_t br = a->b_transposed ? 1 : a->ldb, bc = a->b_transposed ? a->ldb : 1;
    for (int64_t i = 0; i < a->m; i++)
        for (int64_t j = 0; j < a->n; j++) {
            double s = 0, *to = &z[i * a->ldc + j];
            for (int64_t k = 0; k < a->k; k++) s += x[i * ar + k * ac] * y[k * br + j * bc];
            *to = (a->add ? *to : 0) + a->scale * s;
        }
    return WEFT_OK;
}

/* ---- attention ------------------------------------------------------------------------------------------------------ */

static weft_status rope_table(weft_nn *nn, void *table, int64_t length, int64_t head_dim, double base)
{
    int64_t half = head_dim / 2;
    if (nn->query) return WEFT_OK;
    for (int64_t p = 0; p < length; p++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)p * pow(base, -(double)i / (double)half);
            ROW(table, p, head_dim)[i] = cos(angle);
            ROW(table, p, head_dim)[half + i] = sin(angle);
        }
    return WEFT_OK;
}

static weft_status rope(weft_nn *nn, const weft_attention *a, void *qkv, int32_t back)
{
    int64_t half = a->head_dim / 2, width = a->heads * a->head_dim;
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < a->sequences * a->length; t++)
        for (int64_t h = 0; h < 2 * a->heads; h++)
            for (int64_t i = 0; i < half; i++) {
                const double *turn = CROW(a->table, t % a->length, a->head_dim) + i;
                double *p = ROW(qkv, t, 3 * width) + h * a->head_dim + i, x = p[0], y = p[half];
                double cosine = turn[0], sine = back ? -turn[half] : turn[half];
                p[0] = x * cosine - y * sine;
                p[half] = y * cosine + x * sine;
            }
    return WEFT_OK;
}

static double dot(const double *a, const double *b, int64_t count)
{
    double s = 0;
    for (int64_t i = 0; i < count; i++) s += a[i] * b[i];
    return s;
}

static void add_scaled(double *to, double s, const double *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++) to[i] += s * from[i];
}

/* One query of one head against the keys 0 .. position of its sequence. */
static void attend(const weft_attention *a, int64_t row, int64_t head)
{
    int64_t d = a->head_dim, width = a->heads * d, first = row / a->length * a->length;
    const double *q = CROW(a->qkv, row, 3 * width) + head * d;
    double *o = ROW(a->o, row, width) + head * d, scale = 1 / sqrt((double)d), top = -DBL_MAX, sum = 0;
    for (int64_t j = first; j <= row; j++)
        top = fmax(top, scale * dot(q, CROW(a->qkv, j, 3 * width) + width + head * d, d));
    for (int64_t c = 0; c < d; c++) o[c] = 0;
    for (int64_t j = first; j <= row; j++) {
        const double *k = CROW(a->qkv, j, 3 * width) + width + head * d;
        double p = exp(scale * dot(q, k, d) - top);
        sum += p;
        add_scaled(o, p, k + width, d);
    }
    for (int64_t c = 0; c < d; c++) o[c] /= sum;
    ROW(a->lse, row, a->heads)[head] = top + log(sum);
}

static weft_status attention_fwd(weft_nn *nn, const weft_attention *a)
{
    if (nn->query) return WEFT_OK;
    for (int64_t row = 0; row < a->sequences * a->length; row++)
        for (int64_t head = 0; head < a->heads; head++) attend(a, row, head);
    return WEFT_OK;
}

static weft_status attention_bwd(weft_nn *nn, const weft_attention *a)
{
    int64_t d = a->head_dim, width = a->heads * d, rows = a->sequences * a->length;
    double scale = 1 / sqrt((double)d);
    if (nn->query) return WEFT_OK;
    for (int64_t i = 0; i < rows * 3 * width; i++) ((double *)a->d_qkv)[i] = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < a->heads; head++) {
            const double *q = CROW(a->qkv, row, 3 * width) + head * d, *g = CROW(a->d_o, row, width) + head * d;
            double *dq = ROW(a->d_qkv, row, 3 * width) + head * d;
            double all = dot(g, CROW(a->o, row, width) + head * d, d), lse = CROW(a->lse, row, a->heads)[head];
            for (int64_t j = row / a->length * a->length; j <= row; j++) {
                const double *k = CROW(a->qkv, j, 3 * width) + width + head * d;
                double *dk = ROW(a->d_qkv, j, 3 * width) + width + head * d;
                double p = exp(scale * dot(q, k, d) - lse), ds = p * (dot(g, k + width, d) - all) * scale;
                add_scaled(dk + width, p, g, d);
                add_scaled(dq, ds, k, d);
                add_scaled(dk, ds, q, d);
            }
        }
    return WEFT_OK;
}

/* ---- rows ----------------------------------------------------------------------------------------------------------- */

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static weft_status swiglu_fwd(weft_nn *nn, const weft_swiglu *a)
{
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < a->tokens; t++)
        for (int64_t i = 0; i < a->hidden; i++) {
            const double *g = CROW(a->gate_up, t, 2 * a->hidden) + i;
            ROW(a->act, t, a->hidden)[i] = g[0] * sigmoid(g[0]) * g[a->hidden];
        }
    return WEFT_OK;
}

static weft_status swiglu_bwd(weft_nn *nn, const weft_swiglu *a)
{
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < a->tokens; t++)
        for (int64_t i = 0; i < a->hidden; i++) {
            const double *g = CROW(a->gate_up, t, 2 * a->hidden) + i, d = CROW(a->d_act, t, a->hidden)[i];
            double *to = ROW(a->d_gate_up, t, 2 * a->hidden) + i, s = sigmoid(g[0]);
            to[0] = d * g[a->hidden] * s * (1 + g[0] * (1 - s));
            to[a->hidden] = d * g[0] * s;
            ROW(a->act, t, a->hidden)[i] = g[0] * s * g[a->hidden];
        }
    return WEFT_OK;
}

static weft_status embed_fwd(weft_nn *nn, const weft_embed *a)
{
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < a->count; t++)
        for (int64_t c = 0; c < a->channels; c++)
            ROW(a->rows, t, a->channels)[c] = CROW(a->weight, a->tokens[t], a->channels)[c];
    return WEFT_OK;
}

static weft_status embed_bwd(weft_nn *nn, const weft_embed *a)
{
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < a->count; t++)
        add_scaled(ROW(a->d_weight, a->tokens[t], a->channels), 1, CROW(a->rows, t, a->channels), a->channels);
    return WEFT_OK;
}

static double log_divisor(const double *row, int64_t count)
{
    double top = -DBL_MAX, sum = 0;
    for (int64_t i = 0; i < count; i++) top = fmax(top, row[i]);
    for (int64_t i = 0; i < count; i++) sum += exp(row[i] - top);
    return top + log(sum);
}

static weft_status loss_fwd(weft_nn *nn, const weft_loss *a)
{
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < a->tokens; t++) {
        const double *row = CROW(a->logits, t, a->vocab);
        ((double *)a->losses)[t] = a->targets[t] < 0 ? 0 : log_divisor(row, a->vocab) - row[a->targets[t]];
    }
    return WEFT_OK;
}

static weft_status loss_bwd(weft_nn *nn, const weft_loss *a)
{
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < a->tokens; t++) {
        const double *row = CROW(a->logits, t, a->vocab);
        double *to = ROW(a->d_logits, t, a->vocab), lse = log_divisor(row, a->vocab);
        for (int64_t i = 0; i < a->vocab; i++)
            to[i] = a->targets[t] < 0 ? 0 : a->scale * (exp(row[i] - lse) - (i == a->targets[t]));
    }
    return WEFT_OK;
}

static weft_status bias_fwd(weft_nn *nn, void *rows, const void *bias, int64_t tokens, int64_t width)
{
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < tokens; t++) add_scaled(ROW(rows, t, width), 1, bias, width);
    return WEFT_OK;
}

static weft_status bias_bwd(weft_nn *nn, const void *rows, void *bias, int64_t tokens, int64_t width)
{
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < tokens; t++) add_scaled(bias, 1, CROW(rows, t, width), width);
    return WEFT_OK;
}

/* ---- the unconstrained connection ------------------------------------------------------------------------------------- */

/* Where entry k of stream j's row of h goes: group (0 pre, 1 post, 2 res), and its place in beta. */
static int64_t hc_place(int64_t n, int64_t j, int64_t k, int *group)
{
    *group = k < 2 ? (int)k : 2;
    return k < 2 ? k * n + j : 2 * n + j * n + k - 2;
}

static weft_status hc_gates_fwd(weft_nn *nn, const weft_hc_gates *a)
{
    int64_t n = a->streams;
    if (nn->query) return WEFT_OK;
    for (int64_t r = 0; r < a->tokens * n; r++)
        for (int64_t k = 0; k < n + 2; k++) {
            int group;
            int64_t t = r / n, place = hc_place(n, r % n, k, &group), in_group = place - group * n;
            double inv = 1 / sqrt(CROW(a->ms, r, 1)[0] + a->eps), z = CROW(a->h, r, n + 2)[k] * inv;
            void *to[3] = {a->pre, a->post, a->res};
            ROW(to[group], t, group < 2 ? n : n * n)
            [in_group] = CROW(a->alpha, group, 1)[0] * tanh(z) + CROW(a->beta, place, 1)[0];
        }
    return WEFT_OK;
}

static weft_status hc_gates_bwd(weft_nn *nn, const weft_hc_gates *a)
{
    int64_t n = a->streams;
    if (nn->query) return WEFT_OK;
    for (int64_t r = 0; r < a->tokens * n; r++) {
        double inv = 1 / sqrt(CROW(a->ms, r, 1)[0] + a->eps), d_inv = 0;
        for (int64_t k = 0; k < n + 2; k++) {
            int group;
            int64_t t = r / n, place = hc_place(n, r % n, k, &group), in_group = place - group * n;
            const void *from[3] = {a->d_pre, a->d_post, a->d_res};
            double g = CROW(from[group], t, group < 2 ? n : n * n)[in_group], h = CROW(a->h, r, n + 2)[k];
            double th = tanh(h * inv), dz = g * CROW(a->alpha, group, 1)[0] * (1 - th * th);
            ROW(a->d_h, r, n + 2)[k] = dz * inv;
            d_inv += dz * h;
            ROW(a->d_alpha, group, 1)[0] += g * th;
            ROW(a->d_beta, place, 1)[0] += g;
        }
        ROW(a->d_ms, r, 1)[0] = -0.5 * inv * inv * inv * d_inv;
    }
    return WEFT_OK;
}

static weft_status compose(weft_nn *nn, const weft_compose *a)
{
    int64_t n = a->streams;
    if (nn->query) return WEFT_OK;
    for (int64_t t = 0; t < a->tokens; t++) {
        const double *w = CROW(a->res, t, n * n);
        double *to = ROW(a->to, t, n * n), product[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
        for (int64_t o = 0; o < n; o++)
            for (int64_t c = 0; c < n; c++) {
                double s = 0;
                for (int64_t i = 0; i < n; i++)
                    s += (a->in_out ? w[i * n + o] : w[o * n + i]) * (a->first ? i == c : to[i * n + c]);
                product[o * n + c] = s;
            }
        for (int64_t i = 0; i < n * n; i++) to[i] = product[i];
    }
    return WEFT_OK;
}

static weft_status gains(weft_nn *nn, const void *maps, int64_t tokens, int64_t streams, double to[4])
{
    int64_t n = streams;
    if (nn->query) return WEFT_OK;
    to[0] = to[1] = to[2] = to[3] = 0;
    for (int64_t t = 0; t < tokens; t++)
        for (int side = 0; side < 2; side++) {
            const double *map = (const double *)maps + t * n * n;
            double top = 0;
            for (int64_t i = 0; i < n; i++) {
                double s = 0;
                for (int64_t j = 0; j < n; j++) s += fabs((side ? map[j * n + i] : map[i * n + j]));
                top = s > top || isnan(s) ? s : top;
            }
            to[2 * side] += top / (double)tokens;
            to[2 * side + 1] = top > to[2 * side + 1] || isnan(top) ? top : to[2 * side + 1];
        }
    return WEFT_OK;
}

/* ---- whole arrays ------------------------------------------------------------------------------------------------------ */

static weft_status fill(weft_nn *nn, void *to, double value, int64_t count)
{
    if (nn->query) return WEFT_OK;
    for (int64_t i = 0; i < count; i++) ((double *)to)[i] = value;
    return WEFT_OK;
}

static weft_status blend(weft_nn *nn, const weft_blend *a)
{
    double *to = a->to;
    if (nn->query) return WEFT_OK;
    for (int64_t i = 0; i < a->count; i++)
        to[i] = (a->a == 0 ? 0 : a->a * to[i]) + a->b * ((const double *)a->from)[i];
    return WEFT_OK;
}

static weft_status copy(weft_nn *nn, void *to, const void *from, int64_t count)
{
    return blend(nn, &(weft_blend){.to = to, .from = from, .b = 1, .count = count});
}

static weft_status adam(weft_nn *nn, const weft_adam *a)
{
    double *p = a->parameter, *m = a->first, *v = a->second;
    if (nn->query) return WEFT_OK;
    for (int64_t i = 0; i < a->count; i++) {
        double g = ((const double *)a->gradient)[i] * a->scale;
        m[i] = a->beta1 * m[i] + (1 - a->beta1) * g;
        v[i] = a->beta2 * v[i] + (1 - a->beta2) * g * g;
        p[i] =
            p[i] * (1 - a->rate * a->decay) - a->rate * (m[i] * a->correct1) / (sqrt(v[i] * a->correct2) + a->eps);
    }
    return WEFT_OK;
}

static weft_status sum(weft_nn *nn, const void *values, int64_t count, int32_t squares, double *to)
{
    if (nn->query) return WEFT_OK;
    *to = 0;
    for (int64_t i = 0; i < count; i++) {
        double v = ((const double *)values)[i];
        *to += squares ? v * v : v;
    }
    return WEFT_OK;
}

static weft_status first_bad(weft_nn *nn, const void *values, weft_dtype dtype, int64_t count, int64_t *index)
{
    (void)dtype;
    *index = -1;
    if (nn->query) return WEFT_OK;
    for (int64_t i = 0; i < count && *index < 0; i++)
        if (!isfinite(((const double *)values)[i])) *index = i;
    return WEFT_OK;
}

const weft_nn_table weft_ref_nn = {
    .dtype = WEFT_F64,
    .matmul = matmul,
    .rope_table = rope_table,
    .rope = rope,
    .attention_fwd = attention_fwd,
    .attention_bwd = attention_bwd,
    .swiglu_fwd = swiglu_fwd,
    .swiglu_bwd = swiglu_bwd,
    .embed_fwd = embed_fwd,
    .embed_bwd = embed_bwd,
    .loss_fwd = loss_fwd,
    .loss_bwd = loss_bwd,
    .hc_gates_fwd = hc_gates_fwd,
    .hc_gates_bwd = hc_gates_bwd,
    .bias_fwd = bias_fwd,
    .bias_bwd = bias_bwd,
    .compose = compose,
    .gains = gains,
    .copy = copy,
    .fill = fill,
    .blend = blend,
    .adam = adam,
    .sum = sum,
    .first_bad = first_bad,
};
