/* SPDX-License-Identifier: Apache-2.0
 *
 * The gates of the learned head contraction [M9]. */
#include "cuda/mhc/head_gates.h"

#include "cuda/common/launch.cuh"
#include "cuda/mhc/head_gates.cuh"

static gate_numbers head_numbers(double rms_eps, weft_eps_kind kind, double pre_eps)
{
    gate_numbers m = {};
    m.rms_eps = (float)rms_eps;
    m.rms_eps_kind = (int32_t)kind;
    m.pre_eps = (float)pre_eps;
    return m;
}

weft_status weft_cuda_head_gates_fwd(const weft_call *call, const weft_mhc_head_fwd_args *a, const weft_tensor *h,
                                     const weft_tensor *ms, const weft_tensor *gate)
{
    head_gates_params p = {};
    if (call->tokens == 0) return WEFT_OK;
    p.numbers = head_numbers(a->rms_eps, a->rms_eps_kind, a->pre_eps);
    p.streams = (int32_t)call->streams;
    p.tokens = call->tokens;
    p.h = view_of(h);
    p.ms = view_of(ms);
    p.alpha = view_of(&a->alpha);
    p.beta = view_of(&a->beta);
    p.gate = view_of(gate);
    launch_shape shape = {dim3(grid_of((call->tokens * call->streams + 255) / 256)), 256};
    return launch(call, "gates of the head", head_gates_fwd, shape, p);
}

static bool wants_sums(const weft_mhc_head_bwd_args *a)
{
    return weft_has(&a->d_alpha.to) || weft_has(&a->d_beta.to);
}

size_t weft_cuda_head_gates_room(const weft_call *call, const weft_mhc_head_bwd_args *a)
{
    int64_t chunks, slots;
    weft_cuda_coef_cut(call->tokens, &chunks, &slots);
    return wants_sums(a) ? (size_t)(slots * (call->streams + 1)) * sizeof(float) : 0;
}

weft_status weft_cuda_head_gates_bwd(const weft_call *call, const weft_mhc_head_bwd_args *a,
                                     const weft_tensor *d_gate, const weft_tensor *gate_out, const weft_tensor *d_h,
                                     const weft_tensor *d_ms, void *room)
{
    const char *what = "gradient of the head's gates";
    head_gates_params p = {};
    p.numbers = head_numbers(a->rms_eps, a->rms_eps_kind, a->pre_eps);
    p.streams = (int32_t)call->streams;
    p.tokens = call->tokens;
    weft_cuda_coef_cut(call->tokens, &p.chunks, &p.slots);
    p.h = view_of(&a->h);
    p.ms = view_of(&a->ms);
    p.alpha = view_of(&a->alpha);
    p.beta = view_of(&a->beta);
    p.d_gate = view_of(d_gate);
    if (gate_out) p.gate = view_of(gate_out);
    if (d_h) p.d_h = view_of(d_h);
    if (d_ms) p.d_ms = view_of(d_ms);
    p.d_alpha = view_of(&a->d_alpha);
    p.d_beta = view_of(&a->d_beta);
    p.partial = wants_sums(a) ? (float *)room : NULL;
    if (call->tokens == 0) {
        /* Sums without terms are zero; what is added to stays as it is. */
        if (p.d_alpha.add) p.d_alpha.dtype = WEFT_NONE;
        if (p.d_beta.add) p.d_beta.dtype = WEFT_NONE;
        if (!has(p.d_alpha) && !has(p.d_beta)) return WEFT_OK;
    } else {
        launch_shape shape = {dim3(grid_of(p.slots)), COEF_THREADS};
        weft_status status = launch(call, what, head_gates_bwd, shape, p);
        if (status != WEFT_OK) return status;
    }
    if (!wants_sums(a)) return WEFT_OK;
    launch_shape fold = {dim3((unsigned)call->streams + 1), COEF_THREADS};
    return launch(call, what, head_gates_fold, fold, p);
}
