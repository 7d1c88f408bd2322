/* SPDX-License-Identifier: Apache-2.0
 *
 * Projection + mean square, backward [M1]. Two passes over a macro tile of tokens that fits the last-level cache: along
 * tokens for d_x, along columns for dpsi. A column's sum over tokens belongs to one thread and runs in token order, so it
 * depends neither on the thread count nor on the tiles. 4 * rows * nC flops per token are the limit. */
#include "cpu/common/tiles.h"

#if WEFT_CPU_LEVEL == 2
enum { MT = 8, ROWS_AT_ONCE = 8 };
#else
enum { MT = 2, ROWS_AT_ONCE = 2 };
#endif
enum { MAX_ROWS = 4096, VP = PANEL / LANES };

/* Channels per chunk, a multiple of PANEL where n allows. */
enum { DX_PART = 1024, DX_STRIDE = DX_PART + WIDE };

INLINE int64_t dx_width(int64_t n)
{
    return DX_PART / n / PANEL * PANEL;
}

/* out[t] of one panel: factor[t] x + sum_j dh[j][t] psi[j]. */
INLINE void dx_panel(const int mt, int64_t rows, const float *panel, const float *dh, const float *x,
                     int64_t x_token, const float *factor, float *out)
{
    vf s[MT][VP];
    for (int t = 0; t < mt; t++)
        for (int v = 0; v < VP; v++) s[t][v] = vf_load(x + t * x_token + v * LANES) * factor[t];
    for (int64_t j = 0; j < rows; j++) {
        vf p[VP];
        for (int v = 0; v < VP; v++) p[v] = vf_load(panel + j * PANEL + v * LANES);
        for (int t = 0; t < mt; t++) {
            vf d = vf_set1(dh[j * MT + t]);
            for (int v = 0; v < VP; v++) s[t][v] = vf_fma(d, p[v], s[t][v]);
        }
    }
    for (int t = 0; t < mt; t++)
        for (int v = 0; v < VP; v++) vf_store(out + t * DX_STRIDE + v * LANES, s[t][v]);
}

/* Rows of a token, one per stream. */
typedef struct lines {
    float *at;
    int64_t ld;
} lines;

/* to = (old +) pre du + value, in that order: what aggregate and projection would leave in an fp32 buffer. */
INLINE void join_aggregate(lines to, lines value, lines old, const float *pre, const float *du, int64_t n,
                           int64_t count)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < count; c += LANES) {
            vf base = old.at ? vf_load(old.at + i * old.ld + c) : vf_set1(0);
            if (pre) base = vf_fma(vf_set1(pre[i]), vf_load(du + c), base);
            vf_store(to.at + i * to.ld + c, base + vf_load(value.at + i * value.ld + c));
        }
}

static lines lines_at(const weft_tensor *t, int64_t m, int64_t c)
{
    return (lines){(float *)(void *)at(t, m) + c, t->stride[1]};
}

/* Can whole panels be read and written where they lie? */
static bool in_place(const weft_tensor *t)
{
    return !t || (row_direct(t, WEFT_F32) && t->shape[t->ndim - 1] % PANEL == 0);
}

/* What dx needs of MT tokens besides x and psi. */
typedef struct dx_group {
    float dh[MAX_ROWS * MT], factor[MT], gate[MT][WEFT_MAX_STREAMS];
} dx_group;

static void load_group(dx_group *g, int64_t rows, const weft_tensor *x, const weft_tensor *d_h,
                       const weft_tensor *d_ms, const weft_tensor *pre, int64_t m, int mt)
{
    float scale = (float)(2.0 / (double)(x->shape[1] * x->shape[2]));
    for (int t = 0; t < mt; t++) {
        for (int64_t j = 0; j < rows; j++)
            g->dh[j * MT + t] = get_f32(WEFT_F32, at(d_h, m + t), j * d_h->stride[1]);
        g->factor[t] = weft_has(d_ms) ? get_f32(WEFT_F32, at(d_ms, m + t), 0) * scale : 0;
        if (pre) coef_load(g->gate[t], pre, m + t);
    }
}

/* Columns first, then tokens: a chunk of psi is read once for all tokens of the tile. */
void CPU(project_dx_tile)(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *d_h, const weft_tensor *d_ms,
                          const weft_tensor *pre, const weft_tensor *d_u, const weft_tensor *base,
                          const weft_grad *d_x, int64_t t0, int64_t t1, bool stream)
{
    _Alignas(64) float part[MT * DX_STRIDE], out[MT * DX_STRIDE], old[CHUNK], du[CHUNK];
    dx_group g;
    int64_t n = psi->n, width = dx_width(n), rows = weft_has(d_h) ? psi->rows : 0;
    const weft_tensor *to = &d_x->to;
    if (!base && d_x->add) base = to;
    const bool x_in_place = in_place(x), base_in_place = in_place(base), to_in_place = in_place(to),
               du_in_place = in_place(pre ? d_u : NULL);
    stream = stream && !d_x->add && row_direct(to, to->dtype) && psi->channels % PANEL == 0 &&
             aligned(to->data, to->stride[0] | to->stride[1], to->dtype);
    for (int64_t c = 0; c < psi->channels; c += width)
        for (int64_t m = t0; m < t1; m += MT) {
            int mt = (int)min64(MT, t1 - m);
            int64_t count = min64(width, psi->channels - c);
            load_group(&g, rows, x, d_h, d_ms, pre, m, mt);
            const lines from = x_in_place ? lines_at(x, m, c) : (lines){part, width};
            const int64_t token = x_in_place ? x->stride[0] : DX_STRIDE;
            for (int t = 0; !x_in_place && t < mt; t++) rows_load(part + t * DX_STRIDE, width, x, m + t, c, count);
            for (int64_t i = 0; i < n; i++)
                for (int64_t k = 0; k < count; k += PANEL) {
                    for (int t = 0; t < MT && m + MT + t < t1; t++) {
                        const char *next = run_at(x, m + MT + t, i, c + k);
                        if (next) line_ask(next, 0);
                    }
                    const float *panel = psi->data + (i * (psi->ld / PANEL) + (c + k) / PANEL) * psi->rows * PANEL;
                    const float *row = from.at + i * from.ld + k;
                    if (mt == MT)
                        dx_panel(MT, rows, panel, g.dh, row, token, g.factor, out + i * width + k);
                    else
                        dx_panel(mt, rows, panel, g.dh, row, token, g.factor, out + i * width + k);
                }
            for (int t = 0; t < mt; t++) {
                const lines value = {out + t * DX_STRIDE, width};
                lines before = {base ? old : NULL, width};
                const float *u = du;
                if (base && base_in_place)
                    before = lines_at(base, m + t, c);
                else if (base)
                    rows_load(old, width, base, m + t, c, count);
                if (pre && du_in_place)
                    u = (const float *)(const void *)at(d_u, m + t) + c;
                else if (pre)
                    row_load(du, d_u, m + t, c, count);
                if ((base || pre) && to_in_place && !stream) {
                    join_aggregate(lines_at(to, m + t, c), value, before, pre ? g.gate[t] : NULL, u, n, count);
                    continue;
                }
                if (base || pre) join_aggregate(value, value, before, pre ? g.gate[t] : NULL, u, n, count);
                for (int64_t i = 0; stream && i < n; i++)
                    run_stream(to->dtype, at(to, m + t) + (i * to->stride[1] + c) * (int64_t)size_of(to->dtype),
                               out + t * DX_STRIDE + i * width, count);
                if (!stream) rows_store(to, false, out + t * DX_STRIDE, width, m + t, c, count);
            }
        }
}

/* ---- dpsi ---------------------------------------------------------------------------------------------------------- */

/* A column block is n streams by column_width channels; TOKENS_AT_ONCE tokens are widened at a time. */
enum { COLUMNS = 512, TOKENS_AT_ONCE = 16 };

INLINE int64_t column_width(int64_t n)
{
    return COLUMNS / n / WIDE * WIDE;
}

cpu_dpsi CPU(dpsi_take)(weft_arena *arena, const weft_call *call, bool wanted)
{
    cpu_dpsi d = {NULL, call->rows, call->streams, call->channels, pad16(call->channels)};
    if (wanted) d.sum = weft_arena_take(arena, (size_t)(d.rows * d.n * d.ld) * 4);
    return d;
}

typedef struct column_job {
    const cpu_dpsi *d;
    const weft_tensor *x, *d_h, *phi, *norm_weight;
    const weft_grad *d_phi, *d_norm_weight;
    int64_t tokens;
} column_job;

static void zero_body(void *context, int64_t item, int thread)
{
    const cpu_dpsi *d = ((column_job *)context)->d;
    (void)thread;
    memset(d->sum + item * d->ld, 0, (size_t)d->ld * 4);
}

void CPU(dpsi_zero)(const weft_call *call, const cpu_dpsi *d)
{
    column_job j = {.d = d};
    if (d->sum) cpu_parallel(call, d->rows * d->n, d->rows * d->n * d->ld, zero_body, &j);
}

/* sum[j] += sum_t dh[t][j] x[t] for nr rows and one or two vectors of 16 channels. */
INLINE void dpsi_block(const int nr, const int wide, float *sum, int64_t row_stride, const float *dh,
                       int64_t dh_stride, const float *x, int64_t xs, int tokens)
{
    enum { V = 2 * STEP };
    vf s[ROWS_AT_ONCE][V];
    for (int j = 0; j < nr; j++)
        for (int v = 0; v < wide * STEP; v++) s[j][v] = vf_load(sum + j * row_stride + v * LANES);
    for (int t = 0; t < tokens; t++) {
        vf xv[V];
        for (int v = 0; v < wide * STEP; v++) xv[v] = vf_load(x + t * xs + v * LANES);
        for (int j = 0; j < nr; j++) {
            vf d = vf_set1(dh[t * dh_stride + j]);
            for (int v = 0; v < wide * STEP; v++) s[j][v] = vf_fma(d, xv[v], s[j][v]);
        }
    }
    for (int j = 0; j < nr; j++)
        for (int v = 0; v < wide * STEP; v++) vf_store(sum + j * row_stride + v * LANES, s[j][v]);
}

static void add_body(void *context, int64_t item, int thread)
{
    const column_job *job = context;
    const cpu_dpsi *d = job->d;
    _Alignas(64) float x[TOKENS_AT_ONCE][COLUMNS];
    float dh[TOKENS_AT_ONCE][ROWS_AT_ONCE];
    int64_t width = column_width(d->n), c0 = item * width, count = min64(width, d->channels - c0);
    int64_t padded = pad16(count), row_stride = d->n * d->ld;
    (void)thread;
    for (int64_t m = 0; m < job->tokens; m += TOKENS_AT_ONCE) {
        int tokens = (int)min64(TOKENS_AT_ONCE, job->tokens - m);
        for (int t = 0; t < tokens; t++) rows_load(x[t], padded, job->x, m + t, c0, count);
        for (int64_t j = 0; j < d->rows; j += ROWS_AT_ONCE) {
            int nr = (int)min64(ROWS_AT_ONCE, d->rows - j);
            for (int t = 0; t < tokens; t++)
                for (int r = 0; r < nr; r++)
                    dh[t][r] = get_f32(WEFT_F32, at(job->d_h, m + t), (j + r) * job->d_h->stride[1]);
            for (int64_t i = 0; i < d->n; i++)
                for (int64_t c = 0; c < padded; c += 2 * WIDE) {
                    for (int t = 0; j == 0 && t < TOKENS_AT_ONCE && m + TOKENS_AT_ONCE + t < job->tokens; t++) {
                        const char *next = run_at(job->x, m + TOKENS_AT_ONCE + t, i, c0 + c);
                        if (next) line_ask(next, 0);
                    }
                    float *sum = d->sum + j * row_stride + i * d->ld + c0 + c;
                    const float *px = &x[0][i * padded + c];
                    if (nr == ROWS_AT_ONCE && padded - c >= 2 * WIDE)
                        dpsi_block(ROWS_AT_ONCE, 2, sum, row_stride, dh[0], ROWS_AT_ONCE, px, COLUMNS, tokens);
                    else
                        dpsi_block(nr, padded - c >= 2 * WIDE ? 2 : 1, sum, row_stride, dh[0], ROWS_AT_ONCE, px,
                                   COLUMNS, tokens);
                }
        }
    }
}

void CPU(dpsi_add)(const weft_call *call, const cpu_dpsi *d, const weft_tensor *x, const weft_tensor *d_h,
                   int64_t tokens)
{
    column_job j = {.d = d, .x = x, .d_h = d_h, .tokens = tokens};
    int64_t width = column_width(d->n);
    if (!d->sum || !weft_has(d_h)) return;
    cpu_parallel(call, (d->channels + width - 1) / width, tokens * d->n * d->channels * d->rows, add_body, &j);
}

/* Column block of d_phi = dpsi w and d_norm_weight = sum_j dpsi phi. */
static void store_body(void *context, int64_t item, int thread)
{
    const column_job *job = context;
    const cpu_dpsi *d = job->d;
    _Alignas(64) float row[COLUMNS], gain[COLUMNS], phi[COLUMNS], total[COLUMNS];
    int64_t width = column_width(d->n), c0 = item * width, count = min64(width, d->channels - c0);
    bool weighted = weft_has(job->norm_weight), want_w = weft_has(&job->d_norm_weight->to);
    (void)thread;
    for (int64_t i = 0; i < d->n; i++) {
        if (weighted) row_load(gain, job->norm_weight, i, c0, count);
        memset(total, 0, sizeof total);
        for (int64_t j = 0; j < d->rows; j++) {
            const float *sum = d->sum + (j * d->n + i) * d->ld + c0;
            if (want_w) {
                stream_load(phi, job->phi, j, i, c0, count);
                for (int64_t c = 0; c < count; c++) total[c] += sum[c] * phi[c];
            }
            if (!weft_has(&job->d_phi->to)) continue;
            for (int64_t c = 0; c < count; c++) row[c] = weighted ? sum[c] * gain[c] : sum[c];
            stream_store(&job->d_phi->to, job->d_phi->add, row, j, i, c0, count);
        }
        if (want_w) row_store(&job->d_norm_weight->to, job->d_norm_weight->add, total, i, c0, count);
    }
}

void CPU(dpsi_store)(const weft_call *call, const cpu_dpsi *d, const weft_tensor *phi,
                     const weft_tensor *norm_weight, const weft_grad *d_phi, const weft_grad *d_norm_weight)
{
    column_job j = {.d = d, .phi = phi, .norm_weight = norm_weight, .d_phi = d_phi, .d_norm_weight = d_norm_weight};
    int64_t width = column_width(d->n);
    if (!d->sum) return;
    cpu_parallel(call, (d->channels + width - 1) / width, d->rows * d->n * d->channels, store_body, &j);
}

/* ---- operator ------------------------------------------------------------------------------------------------------ */

typedef struct plan {
    const weft_call *call;
    const weft_mhc_project_bwd_args *args;
    cpu_psi psi;
    cpu_dpsi dpsi;
    int64_t base;
    bool stream;
} plan;

static weft_arena lay_out(plan *p, const weft_call *call, const weft_mhc_project_bwd_args *a)
{
    weft_arena arena = cpu_arena(call);
    *p = (plan){.call = call, .args = a};
    if (weft_has(&a->d_x.to)) p->psi = CPU(psi_take)(&arena, call, &a->x, &a->phi, &a->norm_weight, true);
    p->dpsi = CPU(dpsi_take)(&arena, call, weft_has(&a->d_phi.to) || weft_has(&a->d_norm_weight.to));
    return arena;
}

static void dx_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_project_bwd_args *a = p->args;
    int64_t t0 = p->base + item * TILE;
    (void)thread;
    CPU(project_dx_tile)
    (&p->psi, &a->x, &a->d_h, &a->d_ms, NULL, NULL, NULL, &a->d_x, t0, min64(t0 + TILE, p->call->tokens),
     p->stream);
    stream_fence();
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_project_bwd_args *a = args;
    int64_t macro = macro_tokens(call);
    plan p;
    lay_out(&p, call, a);
    p.stream = stream_pays(call, &a->d_x.to, call->tokens * call->streams * call->channels);
    if (weft_has(&a->d_x.to)) CPU(psi_pack)(call, &p.psi, &a->phi, &a->norm_weight);
    CPU(dpsi_zero)(call, &p.dpsi);
    for (; p.base < call->tokens; p.base += macro) {
        int64_t tokens = min64(macro, call->tokens - p.base);
        weft_tensor x = from(&a->x, p.base), d_h = from(&a->d_h, p.base);
        if (weft_has(&a->d_x.to))
            cpu_parallel(call, (tokens + TILE - 1) / TILE, tokens * call->streams * call->channels * call->rows,
                         dx_body, &p);
        CPU(dpsi_add)(call, &p.dpsi, &x, &d_h, tokens);
    }
    CPU(dpsi_store)(call, &p.dpsi, &a->phi, &a->norm_weight, &a->d_phi, &a->d_norm_weight);
    return WEFT_OK;
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args);
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_project_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
