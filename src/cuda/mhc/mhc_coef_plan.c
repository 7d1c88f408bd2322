/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan of gates and Sinkhorn [M2] [M3] [M4]. */
#include "cuda/mhc/mhc_coef_plan.h"

#include "cuda/mhc/mhc_math_f32.h"

/* For the size of the history only, so that it is written down once. */
#define MM(name) mm_##name
#define MM_FN static inline
#include "core/mhc_math.h"

enum { ROOM_BYTES = 64 << 20 }; /* for rooms in the workspace, unless a single block needs more */

bool weft_cuda_coef_small(int64_t n)
{
    return n == 2 || n == 4 || n == 8;
}

int64_t weft_cuda_coef_history(int64_t n, const weft_mhc_numerics *q)
{
    return mm_sk_history((int)n, q->sinkhorn_iters, (int)q->sinkhorn);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

void weft_cuda_coef_cut(int64_t tokens, int64_t *chunks, int64_t *slots)
{
    *chunks = (tokens + COEF_THREADS - 1) / COEF_THREADS;
    *slots = *chunks <= COEF_GROUPS ? least(*chunks, 1) : least(*chunks, COEF_MOST_SLOTS);
}

static weft_cuda_coef_plan plan_of(int64_t tokens)
{
    weft_cuda_coef_plan p = {.in_registers = true};
    weft_cuda_coef_cut(tokens, &p.chunks, &p.slots);
    p.blocks = p.chunks;
    return p;
}

/* Threads with `room` floats of workspace each. */
static void move_out(weft_cuda_coef_plan *p, int64_t room)
{
    p->in_registers = false;
    p->room = room;
    if (room == 0) return;
    p->blocks = least(p->blocks, COEF_MOST_BLOCKS);
    int64_t fit = ROOM_BYTES / (room * (int64_t)sizeof(float) * COEF_THREADS);
    p->blocks = least(p->blocks, fit > 1 ? fit : 1);
}

weft_cuda_coef_plan weft_cuda_coef_plan_fwd(int64_t tokens, int64_t n, const weft_mhc_numerics *q)
{
    weft_cuda_coef_plan p = plan_of(tokens);
    if (!weft_cuda_coef_small(n)) move_out(&p, q ? n * n : 0);
    return p;
}

weft_cuda_coef_plan weft_cuda_coef_plan_bwd(int64_t tokens, int64_t n, const weft_mhc_numerics *q,
                                            size_t most_shared)
{
    weft_cuda_coef_plan p = plan_of(tokens);
    if (q) p.history = weft_cuda_coef_history(n, q);
    p.shared = (size_t)p.history * sizeof(float) * COEF_THREADS;
    if (!weft_cuda_coef_small(n) || p.shared > most_shared) {
        move_out(&p, q ? 2 * n * n + p.history : 0);
        p.shared = 0;
    }
    return p;
}

int64_t weft_cuda_coef_rooms(const weft_cuda_coef_plan *p)
{
    return p->blocks * COEF_THREADS * p->room;
}

int64_t weft_cuda_coef_partials(const weft_cuda_coef_plan *p, int64_t width)
{
    return p->slots > 1 ? p->slots * width : 0;
}
