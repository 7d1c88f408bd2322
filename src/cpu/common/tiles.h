/* SPDX-License-Identifier: Apache-2.0
 *
 * What the operators of this backend lend each other: each works on tokens t0 .. t1 of its arguments, on one thread. A
 * single operator is a loop over tiles; a composite (pre, head, boundary, replay) runs several of them on one tile while
 * it is in cache. That is why fused and unfused agree bit for bit: they are the same functions.
 *
 * `stream` allows stores past the caches. */
#ifndef WEFT_CPU_TILES_H
#define WEFT_CPU_TILES_H

#include "cpu/common/parallel.h"
#include "cpu/common/rows.h"

/* Most tokens per tile: what one thread carries through a chain of operators at a time. */
enum { TILE = 64 };
/* Tokens per partial sum of a parameter gradient. A block belongs to one thread; blocks are added in order. */
enum { BLOCK = 32 };

/* Tokens between two reductions over blocks: bounds the workspace, and keeps x in the last-level cache between the pass
 * over tokens (dx) and the pass over columns (dphi). Depends on the shape alone. */
INLINE int64_t macro_tokens(const weft_call *call)
{
    int64_t row = (call->streams > 0 ? call->streams : 1) * call->channels * (int64_t)size_of(call->dtype);
    int64_t tokens = ((int64_t)16 << 20) / row / BLOCK * BLOCK;
    return tokens < 4 * BLOCK ? 4 * BLOCK : tokens > 32 * BLOCK ? 32 * BLOCK : tokens;
}

/* Tokens per tile of a forward pass, which has no sums over tokens and may choose: large tiles read phi less often, small
 * ones keep all threads busy and, with AMX, which takes 16 tokens at a time anyway, stay in L2. */
INLINE int64_t tile_tokens(const weft_call *call)
{
    return call->isa < WEFT_ISA_AMX && call->tokens >= (int64_t)4 * TILE * cpu_threads(call) ? TILE : 16;
}

INLINE int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

INLINE int64_t pad16(int64_t n)
{
    return (n + WIDE - 1) / WIDE * WIDE;
}

/* Partial sums of a parameter gradient: `total` of `width` floats, and a row per block of a macro tile. */
typedef struct cpu_sum {
    float *total, *block;
    int64_t width;
} cpu_sum;

/* Room for `tokens` tokens between two folds. Folding adds block after block, so that number changes no result. */
INLINE cpu_sum sum_take(weft_arena *arena, int64_t tokens, int64_t width, bool wanted)
{
    cpu_sum s = {NULL, NULL, wanted ? width : 0};
    if (!wanted) return s;
    s.total = weft_arena_take(arena, (size_t)pad16(width) * 4);
    s.block = weft_arena_take(arena, (size_t)((tokens + BLOCK - 1) / BLOCK * pad16(width)) * 4);
    return s;
}

INLINE float *sum_block(const cpu_sum *s, int64_t block)
{
    return s->block ? s->block + block * pad16(s->width) : NULL;
}

/* The rows of `blocks` blocks into the total, in order. */
static inline void sum_fold(const cpu_sum *s, int64_t blocks)
{
    if (!s->total) return;
    int64_t w = pad16(s->width);
    for (int64_t c = 0; c < w; c += LANES) {
        vf t = vf_load(s->total + c);
        for (int64_t b = 0; b < blocks; b++) t = t + vf_load(s->block + b * w + c);
        vf_store(s->total + c, t);
    }
}

INLINE void sum_zero(float *row, int64_t width)
{
    if (row) memset(row, 0, (size_t)pad16(width) * 4);
}

/* Part of a finished sum, from `first` on, into a vector gradient. */
static inline void sum_store(const cpu_sum *s, int64_t first, const weft_grad *g)
{
    if (!s->total || !weft_has(&g->to)) return;
    weft_tensor row = as_row(&g->to);
    row_store(&row, g->add, s->total + first, 0, 0, row.shape[1]);
}

/* Tokens between two folds where only a handful of numbers per block is kept. */
enum { SUM_TOKENS = 512 * BLOCK };

/* ---- tiles of the single operators ------------------------------------------------------------------------------- */

void CPU(aggregate_fwd_tile)(const weft_mhc_aggregate_fwd_args *a, int64_t t0, int64_t t1, bool stream);
void CPU(aggregate_bwd_tile)(const weft_mhc_aggregate_bwd_args *a, int64_t t0, int64_t t1, bool stream);

/* bias: a row of C floats, or NULL. */
void CPU(post_fwd_tile)(const weft_mhc_post_fwd_args *a, const float *bias, int64_t t0, int64_t t1, bool stream);
/* d_bias: a row of C floats that the tokens' d_f is added to, or NULL. */
void CPU(post_bwd_tile)(const weft_mhc_post_bwd_args *a, const float *bias, float *d_bias, int64_t t0, int64_t t1,
                        bool stream);

/* weight: a row of C floats, or NULL for 1. d_weight: a row that is added to, or NULL. scratch: 3 rows of pad16(C). */
void CPU(rmsnorm_fwd_tile)(const weft_rmsnorm_fwd_args *a, const float *weight, float *scratch, int64_t t0,
                           int64_t t1, bool stream);
void CPU(rmsnorm_bwd_tile)(const weft_rmsnorm_bwd_args *a, const float *weight, float *d_weight, float *scratch,
                           int64_t t0, int64_t t1, bool stream);

/* Gates of LANES tokens; h, logits and so on hold one token per lane. */
void CPU(gates_fwd)(const weft_mhc_numerics *m, int n, int64_t rows, const float *alpha, const float *beta,
                    const vf *h, vf ms, vf *z);
void CPU(gates_bwd)(const weft_mhc_numerics *m, int n, int64_t rows, const float *alpha, const float *beta,
                    const vf *h, vf ms, vf *dz, vf *dh, vf *dms, vf *dalpha);
void CPU(sinkhorn_lanes_fwd)(const weft_mhc_numerics *m, int n, vf *z);
void CPU(sinkhorn_lanes_bwd)(const weft_mhc_numerics *m, int n, vf *z, vf *d, vf *hist);
/* Bytes of hist. */
int64_t CPU(sinkhorn_history)(const weft_mhc_numerics *m, int64_t n);

/* alpha[S] and beta[N] as floats; sums receives N values of d_beta and S of d_alpha, or is NULL. */
void CPU(coef_fwd_tile)(const weft_call *call, const weft_mhc_coef_fwd_args *a, const float *alpha,
                        const float *beta, int64_t t0, int64_t t1);
void CPU(coef_bwd_tile)(const weft_call *call, const weft_mhc_coef_bwd_args *a, const float *alpha,
                        const float *beta, float *sums, vf *hist, int64_t t0, int64_t t1);

/* ---- projection ---------------------------------------------------------------------------------------------------- */

/* psi = phi * norm_weight as fp32, packed in the order in which it is read: forward [row/NT][stream][C/16][NT][16],
 * backward [stream][C/PANEL][row][PANEL]. Rows of phi lie a power of two apart and would share cache sets. Few tokens read it
 * once or twice, so where phi is psi forward reads it in place. */
enum { PANEL = 32 };
typedef struct cpu_psi {
    const float *data;
    float *room;     /* the same, while it is being packed */
    weft_tensor phi; /* absent where psi is packed */
    int64_t rows, n, channels, ld;
    bool panels;
    void *amx; /* room for bf16 tiles; NULL where AMX does not serve */
} cpu_psi;

/* panels: for backward */
cpu_psi CPU(psi_take)(weft_arena *arena, const weft_call *call, const weft_tensor *x, const weft_tensor *phi,
                      const weft_tensor *norm_weight, bool panels);
void CPU(psi_pack)(const weft_call *call, const cpu_psi *psi, const weft_tensor *phi,
                   const weft_tensor *norm_weight);

/* h and ms of tokens t0 .. t1, at most TILE of them. */
void CPU(project_fwd_tile)(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *h, const weft_tensor *ms,
                           int64_t t0, int64_t t1);
/* d_x of tokens t0 .. t1 from panels: sum_j d_h psi + (2 d_ms / nC) x, added to (base, or what is there, and) pre * d_u, where
 * they are not NULL. d_h and d_ms may be absent. */
void CPU(project_dx_tile)(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *d_h, const weft_tensor *d_ms,
                          const weft_tensor *pre, const weft_tensor *d_u, const weft_tensor *base,
                          const weft_grad *d_x, int64_t t0, int64_t t1, bool stream);

/* dpsi [row][stream][ld], summed over the tokens of one macro tile after the other: token after token per element. */
typedef struct cpu_dpsi {
    float *sum;
    int64_t rows, n, channels, ld;
} cpu_dpsi;

cpu_dpsi CPU(dpsi_take)(weft_arena *arena, const weft_call *call, bool wanted);
void CPU(dpsi_zero)(const weft_call *call, const cpu_dpsi *d);
void CPU(dpsi_add)(const weft_call *call, const cpu_dpsi *d, const weft_tensor *x, const weft_tensor *d_h,
                   int64_t tokens);
void CPU(dpsi_store)(const weft_call *call, const cpu_dpsi *d, const weft_tensor *phi,
                     const weft_tensor *norm_weight, const weft_grad *d_phi, const weft_grad *d_norm_weight);

/* Constant stream counts where they pay. BODY is a statement that uses the constant N. The portable build has one body
 * for all of them: it is there to be right everywhere, and compiles in reasonable time. */
#if WEFT_CPU_LEVEL == 0
#define FOR_STREAMS(n, BODY)                                                                                       \
    do {                                                                                                           \
        const int N = (int)(n);                                                                                    \
        BODY;                                                                                                      \
    } while (0);
#else
#define FOR_STREAMS(n, BODY)                                                                                       \
    switch (n) {                                                                                                   \
    case 2: {                                                                                                      \
        const int N = 2;                                                                                           \
        BODY;                                                                                                      \
    } break;                                                                                                       \
    case 4: {                                                                                                      \
        const int N = 4;                                                                                           \
        BODY;                                                                                                      \
    } break;                                                                                                       \
    case 8: {                                                                                                      \
        const int N = 8;                                                                                           \
        BODY;                                                                                                      \
    } break;                                                                                                       \
    default: {                                                                                                     \
        const int N = (int)(n);                                                                                    \
        BODY;                                                                                                      \
    }                                                                                                              \
    }
#endif

/* The dtypes that kernels meet where they are; see row_direct. */
#define FOR_DTYPE(t, BODY)                                                                                         \
    if ((t) == WEFT_F32) {                                                                                         \
        const weft_dtype T = WEFT_F32;                                                                             \
        BODY;                                                                                                      \
    } else {                                                                                                       \
        const weft_dtype T = WEFT_BF16;                                                                            \
        BODY;                                                                                                      \
    }

#endif
