/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated norm behind the gated delta rule [G7]. Bytes per row, bf16: forward 6C; backward 10C. A row is a head of a
 * token. It is read twice in forward and three times in backward, all but the first time from L1: for the sum of squares, for
 * the gates (in backward with the second sum), for the elements. Rows that a kernel cannot use where they are go through
 * fp32 scratch. d_weight is summed over blocks of 32 rows, the blocks in order. */
#include "cpu/common/gdn_math.h"
#include "cpu/common/heads.h"

/* Vectors whose gates are computed together, and the four sets of 16 lanes that a sum over a row runs in. */
enum { SETS = 4, PAIR = 2 * STEP };
_Static_assert((int)PAIR <= (int)EXP_MOST, "gates of a pair of sets at once");

/* z becomes f(z); slope, where it is requested, f'(z). */
INLINE void gates(vf *z, vf *slope, const int n, bool sigmoid)
{
    if (!sigmoid && slope) {
        gm_silu_slopes(z, slope, n);
    } else if (!sigmoid) {
        gm_silus(z, n);
    } else {
        for (int i = 0; i < n; i++) {
            vf e, s = gm_sigmoid(z[i], &e);
            if (slope) slope[i] = s * gm_complement(s, e);
            z[i] = s;
        }
    }
}

INLINE float sets_sum(vf (*sets)[STEP])
{
    for (int s = 0; s < STEP; s++) sets[0][s] = (sets[0][s] + sets[1][s]) + (sets[2][s] + sets[3][s]);
    return vf_sum16(sets[0]);
}

/* 1 / sqrt(mean o^2 + eps); `padded` is what is there of a row of so many channels, a multiple of 16. */
INLINE float inverse_rms(const weft_dtype t, const char *o, int64_t channels, int64_t padded, double eps)
{
    vf squares[SETS][STEP] = {{{0}}};
    for (int64_t c = 0; c < padded; c += SETS * WIDE)
        for (int k = 0; k < SETS; k++)
            for (int s = 0; s < STEP; s++) {
                if (k > 0 && c + k * WIDE >= padded) continue;
                vf a = vf_get(t, o, c + k * WIDE + s * LANES);
                squares[k][s] = vf_fma(a, a, squares[k][s]);
            }
    return 1.0f / sqrtf(sets_sum(squares) / (float)channels + (float)eps);
}

/* ---- forward ------------------------------------------------------------------------------------------------------ */

INLINE void fwd_row(const weft_dtype t, const char *o, const char *z, const float *w, char *y, int64_t channels,
                    int64_t padded, double eps, bool sigmoid, bool stream)
{
    float r = inverse_rms(t, o, channels, padded, eps);
    for (int64_t c = 0; c < padded; c += line_channels(t)) {
        vf a[MAX_LINE], f[MAX_LINE];
        line_get(t, o, c, a);
        line_get(t, z, c, f);
        gates(f, NULL, line_vectors(t), sigmoid);
        for (int h = 0; h < line_vectors(t); h++) {
            a[h] = a[h] * r;
            if (w) a[h] = a[h] * vf_load(w + c + h * LANES);
            a[h] = a[h] * f[h];
        }
        line_put(t, y, c, a, stream);
    }
}

/* ---- backward ----------------------------------------------------------------------------------------------------- */

typedef struct back {
    const char *o, *z, *d_y;
    const float *w;
    float *d_weight, *g, *d_z; /* added to, or NULL; rows of scratch */
} back;

/* g = d_y f(z) w and d_z = d_y o r w f'(z) into scratch; d_weight += d_y f(z) o r; returns sum g o. */
INLINE float gate_row(const weft_dtype t, const back *b, int64_t padded, float r, bool sigmoid)
{
    vf sets[SETS][STEP] = {{{0}}};
    for (int64_t base = 0; base < padded; base += SETS * WIDE)
        for (int k = 0; k < SETS; k += 2) {
            vf f[PAIR], slope[PAIR];
            int64_t c = base + k * WIDE, count = padded - c;
            if (count <= 0) continue;
            for (int i = 0; i < PAIR; i++)
                f[i] = i < STEP || count > WIDE ? vf_get(t, b->z, c + i * LANES) : vf_set1(0);
            gates(f, slope, PAIR, sigmoid);
            for (int i = 0; i < PAIR; i++) {
                int64_t e = c + i * LANES;
                if (i >= STEP && count <= WIDE) continue;
                vf o = vf_get(t, b->o, e), d = vf_get(t, b->d_y, e), p = d * f[i], n = o * r;
                if (b->d_weight) vf_store(b->d_weight + e, vf_fma(p, n, vf_load(b->d_weight + e)));
                if (b->w) {
                    vf w = vf_load(b->w + e);
                    p = p * w;
                    n = n * w;
                }
                vf_store(b->g + e, p);
                vf_store(b->d_z + e, d * n * slope[i]);
                sets[k + i / STEP][i % STEP] = vf_fma(p, o, sets[k + i / STEP][i % STEP]);
            }
        }
    return sets_sum(sets);
}

/* A line of a gradient, added to what is there where `add`. */
INLINE void grad_line(const weft_dtype t, char *to, bool add, int64_t c, vf *v, bool stream)
{
    vf old[MAX_LINE];
    if (add) {
        line_get(t, to, c, old);
        for (int h = 0; h < line_vectors(t); h++) v[h] = old[h] + v[h];
    }
    line_put(t, to, c, v, stream);
}

/* Where a gradient of the row goes; NULL: nowhere. */
typedef struct grad_row {
    char *to;
    bool add, stream;
} grad_row;

INLINE void bwd_row(const weft_dtype t, const back *b, const grad_row *d_o, const grad_row *d_z, int64_t channels,
                    int64_t padded, double eps, bool sigmoid)
{
    float r = inverse_rms(t, b->o, channels, padded, eps);
    float k = gate_row(t, b, padded, r, sigmoid) / (float)channels * r * r;
    for (int64_t c = 0; c < padded; c += line_channels(t)) {
        vf a[MAX_LINE], v[MAX_LINE];
        if (d_o->to) {
            line_get(t, b->o, c, a);
            for (int h = 0; h < line_vectors(t); h++)
                v[h] = vf_fma(a[h], vf_set1(-k), vf_load(b->g + c + h * LANES)) * r;
            grad_line(t, d_o->to, d_o->add, c, v, d_o->stream);
        }
        if (!d_z->to) continue;
        for (int h = 0; h < line_vectors(t); h++) v[h] = vf_load(b->d_z + c + h * LANES);
        grad_line(t, d_z->to, d_z->add, c, v, d_z->stream);
    }
}

/* ---- operators ----------------------------------------------------------------------------------------------------- */

enum { SCRATCH_ROWS = 6 };

typedef struct plan {
    const weft_call *call;
    const void *args;
    float *weight, *scratch;
    int64_t heads, rows, scratch_floats, base; /* rows of all tokens; per thread; first row of the macro tile */
    cpu_sum sum;
    bool direct, stream_o, stream_z; /* of forward: stream_o is y's */
} plan;

/* Rows between two folds of d_weight, whose number changes no result: as many as 4 MiB of partial sums have room for. */
static int64_t macro_rows(const weft_call *call)
{
    int64_t blocks = ((int64_t)1 << 20) / pad16(call->channels);
    return BLOCK * (blocks < 4 ? 4 : min64(blocks, SUM_TOKENS / BLOCK));
}

static weft_arena lay_out(plan *p, const weft_call *call, const void *args, bool weight, bool sum)
{
    weft_arena arena = cpu_arena(call);
    int64_t ld = pad16(call->channels);
    *p = (plan){.call = call, .args = args, .heads = call->value_heads, .scratch_floats = SCRATCH_ROWS * ld};
    p->rows = call->batch * call->steps * call->value_heads;
    p->weight = weight ? weft_arena_take(&arena, (size_t)ld * 4) : NULL;
    p->scratch = weft_arena_take(&arena, cpu_rooms(call, p->scratch_floats * 4));
    p->sum = sum_take(&arena, macro_rows(call), call->channels, sum);
    return arena;
}

/* A row by its number, counted through sequences, tokens and heads. */
typedef struct place {
    int64_t b, s, h;
} place;

static place place_of(const plan *p, int64_t row)
{
    int64_t t = row / p->heads;
    return (place){t / p->call->steps, t % p->call->steps, row % p->heads};
}

INLINE void step_on(const plan *p, place *at)
{
    if (++at->h < p->heads) return;
    at->h = 0;
    if (++at->s < p->call->steps) return;
    at->s = 0;
    at->b++;
}

/* NULL of what is absent. */
INLINE char *row_of(const weft_tensor *x, const place *at)
{
    if (!weft_has(x)) return NULL;
    int64_t offset = at->b * x->stride[0] + at->s * x->stride[1] + at->h * x->stride[2];
    return (char *)x->data + offset * (int64_t)size_of(x->dtype);
}

static bool streams(const weft_call *call, const weft_tensor *x, int64_t rows, bool add)
{
    return !add && stream_pays(call, x, rows * call->channels) &&
           aligned(x->data, x->stride[0] | x->stride[1] | x->stride[2], x->dtype);
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_gdn_norm_fwd_args *a = p->args;
    int64_t channels = p->call->channels, ld = pad16(channels);
    float *o = p->scratch + thread * p->scratch_floats, *z = o + ld, *y = z + ld;
    bool sigmoid = a->gate == WEFT_GDN_GATE_SIGMOID;
    place at = place_of(p, item * TILE);
    for (int64_t m = item * TILE; m < min64((item + 1) * TILE, p->rows); m++, step_on(p, &at)) {
        if (p->direct) {
            FOR_DTYPE(a->y.dtype, fwd_row(T, row_of(&a->o, &at), row_of(&a->z, &at), p->weight, row_of(&a->y, &at),
                                          channels, channels, a->eps, sigmoid, p->stream_o))
        } else {
            head_load(o, &a->o, row_of(&a->o, &at), channels);
            head_load(z, &a->z, row_of(&a->z, &at), channels);
            fwd_row(WEFT_F32, (char *)o, (char *)z, p->weight, (char *)y, channels, ld, a->eps, sigmoid, false);
            head_store(&a->y, false, row_of(&a->y, &at), y, channels);
        }
    }
    stream_fence();
}

static void bwd_one(const plan *p, const place *at, float *sum, float *scratch)
{
    const weft_gdn_norm_bwd_args *a = p->args;
    int64_t channels = p->call->channels, ld = pad16(channels);
    bool sigmoid = a->gate == WEFT_GDN_GATE_SIGMOID;
    float *o = scratch + 2 * ld, *z = o + ld, *d = z + ld;
    char *to_o = row_of(&a->d_o.to, at), *to_z = row_of(&a->d_z.to, at);
    back b = {.w = p->weight, .d_weight = sum, .g = scratch, .d_z = scratch + ld};
    if (p->direct) {
        grad_row d_o = {to_o, a->d_o.add, p->stream_o}, d_z = {to_z, a->d_z.add, p->stream_z};
        b.o = row_of(&a->o, at), b.z = row_of(&a->z, at), b.d_y = row_of(&a->d_y, at);
        FOR_DTYPE(a->o.dtype, bwd_row(T, &b, &d_o, &d_z, channels, channels, a->eps, sigmoid))
        return;
    }
    head_load(o, &a->o, row_of(&a->o, at), channels);
    head_load(z, &a->z, row_of(&a->z, at), channels);
    head_load(d, &a->d_y, row_of(&a->d_y, at), channels);
    b.o = (char *)o, b.z = (char *)z, b.d_y = (char *)d;
    grad_row d_o = {to_o ? (char *)d : NULL, false, false}, none = {0};
    bwd_row(WEFT_F32, &b, &d_o, &none, channels, ld, a->eps, sigmoid);
    if (to_o) head_store(&a->d_o.to, a->d_o.add, to_o, d, channels);
    if (to_z) head_store(&a->d_z.to, a->d_z.add, to_z, b.d_z, channels);
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    float *sum = sum_block(&p->sum, item);
    int64_t first = p->base + item * BLOCK;
    place at = place_of(p, first);
    sum_zero(sum, p->sum.width);
    for (int64_t m = first; m < min64(first + BLOCK, p->rows); m++, step_on(p, &at))
        bwd_one(p, &at, sum, p->scratch + thread * p->scratch_floats);
    stream_fence();
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_gdn_norm_fwd_args *a = args;
    plan p;
    lay_out(&p, call, args, weft_has(&a->weight), false);
    if (p.weight) vector_load(p.weight, &a->weight, call->channels, 1);
    p.direct = row_direct(&a->o, call->dtype) && row_direct(&a->z, call->dtype) && row_direct(&a->y, call->dtype);
    p.stream_o = a->y.data != a->o.data && streams(call, &a->y, p.rows, false);
    cpu_parallel(call, (p.rows + TILE - 1) / TILE, p.rows * call->channels, fwd_body, &p);
    return WEFT_OK;
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_gdn_norm_bwd_args *a = args;
    const weft_tensor *const all[] = {&a->o, &a->z, &a->d_y, &a->d_o.to, &a->d_z.to};
    plan p;
    lay_out(&p, call, args, weft_has(&a->weight), weft_has(&a->d_weight.to));
    if (p.weight) vector_load(p.weight, &a->weight, call->channels, 1);
    p.direct = true;
    for (int i = 0; i < 5; i++) p.direct = p.direct && row_direct(all[i], call->dtype);
    p.stream_o = streams(call, &a->d_o.to, p.rows, a->d_o.add);
    p.stream_z = streams(call, &a->d_z.to, p.rows, a->d_z.add);
    sum_zero(p.sum.total, p.sum.width);
    for (; p.base < p.rows; p.base += macro_rows(call)) {
        int64_t rows = min64(macro_rows(call), p.rows - p.base), blocks = (rows + BLOCK - 1) / BLOCK;
        cpu_parallel(call, blocks, rows * call->channels, bwd_body, &p);
        sum_fold(&p.sum, blocks);
    }
    /* Without rows there is nothing to add, and -0 stays what it is. */
    if (p.rows > 0 || !a->d_weight.add) sum_store(&p.sum, 0, &a->d_weight);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args, weft_has(&((const weft_gdn_norm_fwd_args *)args)->weight), false);
    return weft_arena_bytes(&arena);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    const weft_gdn_norm_bwd_args *a = args;
    plan p;
    weft_arena arena = lay_out(&p, call, args, weft_has(&a->weight), weft_has(&a->d_weight.to));
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(gdn_norm_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel CPU(gdn_norm_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
