/* SPDX-License-Identifier: Apache-2.0
 *
 * From a call of mhc_scale or mhc_coef to a launch [M2] [M4]: workspace, parameters of the kernels, shape of the grid. */
#ifndef WEFT_CUDA_GATES_RUN_CUH
#define WEFT_CUDA_GATES_RUN_CUH

#include "core/status.h"
#include "cuda/common/launch.cuh"
#include "cuda/mhc/gates_bwd.cuh"
#include "cuda/mhc/gates_fwd.cuh"

/* The arguments of mhc_scale and mhc_coef, which differ in the third tensor only. */
struct gates_fwd_call {
    const weft_mhc_numerics *numerics;
    const weft_tensor *h, *ms, *alpha, *beta, *pre, *post, *third;
};

struct gates_bwd_call {
    const weft_mhc_numerics *numerics;
    const weft_tensor *h, *ms, *alpha, *beta, *d_pre, *d_post, *d_third;
    const weft_grad *d_h, *d_ms, *d_alpha, *d_beta;
};

/* Without a residual mix there is nothing to keep beside the rows, and nothing for kernels that keep it in registers. */
static inline void gates_unmixed(const weft_call *call, weft_cuda_coef_plan *plan)
{
    plan->in_registers = plan->in_registers && call->scales != 2;
}

template <bool SINKHORN>
static weft_arena gates_fwd_lay_out(const weft_call *call, const gates_fwd_call &a, weft_cuda_coef_plan *plan,
                                    float **rooms)
{
    weft_arena arena = cuda_arena(call);
    *plan =
        weft_cuda_coef_plan_fwd(call->tokens, call->streams, SINKHORN && call->scales != 2 ? a.numerics : nullptr);
    gates_unmixed(call, plan);
    *rooms = (float *)weft_arena_take(&arena, (size_t)weft_cuda_coef_rooms(plan) * sizeof(float));
    return arena;
}

template <bool SINKHORN> static size_t gates_fwd_workspace(const weft_call *call, const gates_fwd_call &a)
{
    weft_cuda_coef_plan plan;
    float *rooms;
    weft_arena arena = gates_fwd_lay_out<SINKHORN>(call, a, &plan, &rooms);
    return weft_arena_bytes(&arena);
}

template <bool SINKHORN>
static weft_status gates_fwd_run(const weft_call *call, const char *what, const gates_fwd_call &a)
{
    weft_cuda_coef_plan plan;
    gates_fwd_params p = {};
    gates_fwd_lay_out<SINKHORN>(call, a, &plan, &p.rooms);
    if (call->tokens == 0) return WEFT_OK;
    p.numbers = numbers_of(a.numerics);
    p.streams = (int32_t)call->streams;
    p.groups = (int32_t)call->scales;
    p.tokens = call->tokens;
    p.h = rows_of(a.h);
    p.ms = view_of(a.ms);
    p.alpha = view_of(a.alpha);
    p.beta = view_of(a.beta);
    p.pre = rows_of(a.pre);
    p.post = rows_of(a.post);
    p.third = rows_of(a.third);
    p.room = plan.room;
    if (!has(p.pre.v) && !has(p.post.v) && !has(p.third.v)) return WEFT_OK;
    launch_shape shape = {dim3(grid_of(plan.blocks)), COEF_THREADS, 0, OVERLAP};
    if (!plan.in_registers) {
        shape.shared = (size_t)(call->rows + call->scales) * sizeof(float);
        return launch(call, what, gates_fwd_any<SINKHORN>, shape, p);
    }
    const kernel_of<gates_fwd_params> small[] = {gates_fwd_small<2, SINKHORN>, gates_fwd_small<4, SINKHORN>,
                                                 gates_fwd_small<8, SINKHORN>};
    return launch(call, what, by_streams(small, p.streams), shape, p);
}

template <bool SINKHORN>
static weft_arena gates_bwd_lay_out(const weft_call *call, const gates_bwd_call &a, weft_cuda_coef_plan *plan,
                                    float **rooms, float **partial)
{
    weft_arena arena = cuda_arena(call);
    const bool sums = weft_has(&a.d_alpha->to) || weft_has(&a.d_beta->to);
    *plan = weft_cuda_coef_plan_bwd(call->tokens, call->streams,
                                    SINKHORN && call->scales != 2 ? a.numerics : nullptr, most_shared(call));
    gates_unmixed(call, plan);
    *rooms = (float *)weft_arena_take(&arena, (size_t)weft_cuda_coef_rooms(plan) * sizeof(float));
    *partial = (float *)weft_arena_take(
        &arena, sums ? (size_t)weft_cuda_coef_partials(plan, call->rows + call->scales) * sizeof(float) : 0);
    return arena;
}

template <bool SINKHORN> static size_t gates_bwd_workspace(const weft_call *call, const gates_bwd_call &a)
{
    weft_cuda_coef_plan plan;
    float *rooms, *partial;
    weft_arena arena = gates_bwd_lay_out<SINKHORN>(call, a, &plan, &rooms, &partial);
    return weft_arena_bytes(&arena);
}

/* One launch. Where sums over tokens span several slots, its blocks wait for each other before they add them up. */
static inline weft_status gates_bwd_launch(const weft_call *call, const char *what,
                                           kernel_of<gates_bwd_params> kernel, launch_shape shape,
                                           const gates_bwd_params &p)
{
    if ((has(p.d_alpha) || has(p.d_beta)) && p.slots > 1)
        WEFT_TRY(keep_together(call, what, (const void *)kernel, &shape));
    return launch(call, what, kernel, shape, p);
}

template <bool SINKHORN>
static gates_bwd_params gates_bwd_params_of(const weft_call *call, const gates_bwd_call &a,
                                            weft_cuda_coef_plan *plan)
{
    gates_bwd_params p = {};
    gates_bwd_lay_out<SINKHORN>(call, a, plan, &p.rooms, &p.partial);
    p.numbers = numbers_of(a.numerics);
    p.streams = (int32_t)call->streams;
    p.groups = (int32_t)call->scales;
    p.tokens = call->tokens;
    p.chunks = plan->chunks;
    p.slots = plan->slots;
    p.h = rows_of(a.h);
    p.ms = view_of(a.ms);
    p.alpha = view_of(a.alpha);
    p.beta = view_of(a.beta);
    p.d_pre = rows_of(a.d_pre);
    p.d_post = rows_of(a.d_post);
    p.d_third = rows_of(a.d_third);
    p.d_h = rows_of(a.d_h);
    p.d_ms = view_of(a.d_ms);
    p.d_alpha = view_of(a.d_alpha);
    p.d_beta = view_of(a.d_beta);
    p.room = plan->room;
    return p;
}

/* Of the kernels that keep matrices in registers. Without sums every chunk may as well be a slot of its own. */
static inline launch_shape gates_bwd_shape(const weft_call *call, const weft_cuda_coef_plan *plan,
                                           gates_bwd_params *p)
{
    launch_shape shape = {dim3(1), COEF_THREADS};
    if (!has(p->d_alpha) && !has(p->d_beta)) p->slots = p->chunks;
    shape.grid = dim3(grid_of(p->slots));
    shape.shared = plan->shared;
    p->history = (int64_t)(plan->shared / sizeof(float));
    if (p->slots < p->chunks && p->chunks <= COEF_GROUPS && COEF_GROUPS * plan->shared <= most_shared(call))
        shape.block *= COEF_GROUPS, shape.shared *= COEF_GROUPS;
    return shape;
}

template <bool SINKHORN>
static weft_status gates_bwd_run(const weft_call *call, const char *what, const gates_bwd_call &a)
{
    weft_cuda_coef_plan plan;
    gates_bwd_params p = gates_bwd_params_of<SINKHORN>(call, a, &plan);
    if (call->tokens == 0) {
        /* One slot without tokens writes zeros; what is added to stays as it is. */
        if (p.d_alpha.add) p.d_alpha.dtype = WEFT_NONE;
        if (p.d_beta.add) p.d_beta.dtype = WEFT_NONE;
        if (!has(p.d_alpha) && !has(p.d_beta)) return WEFT_OK;
        p.slots = plan.blocks = 1;
    }
    const bool sums = has(p.d_alpha) || has(p.d_beta);
    if (!sums && !has(p.d_h.v) && !has(p.d_ms)) return WEFT_OK;
    if (!plan.in_registers) {
        launch_shape shape = {dim3(grid_of(plan.blocks < p.slots ? plan.blocks : p.slots)), COEF_THREADS};
        shape.shared = 4 * (size_t)(call->rows + call->scales) * sizeof(float);
        return gates_bwd_launch(call, what, gates_bwd_any<SINKHORN>, shape, p);
    }
    const launch_shape shape = gates_bwd_shape(call, &plan, &p);
    const kernel_of<gates_bwd_params> small[] = {gates_bwd_small<2, SINKHORN>, gates_bwd_small<4, SINKHORN>,
                                                 gates_bwd_small<8, SINKHORN>};
    return gates_bwd_launch(call, what, by_streams(small, p.streams), shape, p);
}

#endif
