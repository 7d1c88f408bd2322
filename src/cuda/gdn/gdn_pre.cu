/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule, forward and decoding [G1] [G2] [G3] [G4], in one launch, and one more where g is summed within
 * chunks. Every warp has a part (heads of q, k or v, heads of z to copy, or the gates) and a range of tokens, or in decoding a
 * sequence. Reads and writes everything once, but for the W - 1 rows in front of a range.
 *
 * V = 0 stands for any width, any head and any alignment: rows are read again for every token, element by element. */
#include "cuda/gdn/gdn_pre_step.cuh"

/* ---- kernels -------------------------------------------------------------------------------------------------------------- */

template <class T, int W, int V, bool PLAIN>
__global__ void __launch_bounds__(WARPS * 32, 4) fwd_kernel(const fwd_params p)
{
    const int units = p.first_unit[PARTS], across = (units + WARPS - 1) / WARPS;
    int unit = (int)(blockIdx.x % (unsigned)across) * WARPS + (threadIdx.x >> 5);
    int64_t t0 = (int64_t)(blockIdx.x / (unsigned)across) * p.range, t1 = t0 + p.range;
    if (unit >= units) return;
    const int part = part_of(p, unit);
    if (part == PART_GATES) t0 += unit * p.gate_tokens, t1 = t0 + p.gate_tokens < t1 ? t0 + p.gate_tokens : t1;
    if (t1 > p.seq.tokens) t1 = p.seq.tokens;
    if (t0 >= t1) return;
    if (part == PART_Z)
        copy_heads<T, V>(p, unit, t0, t1, end_of(p.seq));
    else if (part == PART_GATES)
        forward_each_gate<T>(p, t0, t1, end_of(p.seq));
    else if constexpr (V == 0)
        forward_any<T>(p, part, unit, t0, t1, place_of(p.seq, t0));
    else
        forward_heads<T, W, V, PLAIN>(p, part, unit, t0, t1, place_of(p.seq, t0));
}

/* beta and g where g is summed within chunks: for calls that are rare, in a kernel of its own, because it would be half of the code of
 * some of the others. A warp has GATE_TOKENS tokens. */
template <class T> __global__ void chunk_gates_kernel(const fwd_params p)
{
    const int64_t t0 = ((int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5)) * GATE_TOKENS, t1 = t0 + GATE_TOKENS;
    if (t0 < p.seq.tokens) forward_gates<T>(p, t0, t1 < p.seq.tokens ? t1 : p.seq.tokens, place_of(p.seq, t0));
}

/* The states after forward, once all threads have read the previous ones. */
template <class T> __global__ void final_kernel(const fwd_params p)
{
    const int units = p.first_unit[PART_Z], across = (units + WARPS - 1) / WARPS;
    int unit = (int)(blockIdx.x % (unsigned)across) * WARPS + (threadIdx.x >> 5);
    const int64_t n = blockIdx.x / (unsigned)across;
    if (unit >= units) return;
    const int part = part_of(p, unit);
    store_state<T, 0>(p, part, unit, {n, start_of(p.seq, n), start_of(p.seq, n + 1)}, n);
}

/* ---- launch --------------------------------------------------------------------------------------------------------------- */

/* What forward and decoding have in common: their structs have the same fields. */
template <class Args> static fwd_params params_of(const weft_call *call, const Args *a, int vec)
{
    const weft_gdn_options &o = a->options;
    const weft_tensor *const in[4] = {&a->q, &a->k, &a->v, &a->z};
    const weft_tensor *const out[4] = {&a->query, &a->key, &a->value, &a->gate};
    const int64_t keys = call->key_heads * call->key_dim, first[4] = {0, keys, 2 * keys, 0};
    fwd_params p = {};
    p.seq = sequences_of(call, &a->cu_seqlens);
    p.conv = convolution_of(call, &a->weight, &a->bias, &a->state, &o);
    for (int i = 0; i < 4; i++) {
        const bool wanted = weft_has(out[i]) && weft_has(in[i]);
        if (!wanted) {
            p.first_unit[i + 1] = p.first_unit[i];
            continue;
        }
        p.in[i] = section_of(in[i], first[i], vec ? vec : GROUP);
        p.out[i] = rows_of(out[i]);
        p.repeat[i] = (int32_t)(out[i]->shape[2] / in[i]->shape[2]);
        p.head_step[i] = p.repeat[i] > 1 && o.head_map == WEFT_GDN_TILED ? p.in[i].heads : 1;
        p.first_unit[i + 1] = p.first_unit[i] + units_of(p.in[i]);
    }
    p.b = rows_of(&a->b), p.beta = rows_of(&a->beta), p.g = rows_of(&a->g);
    p.decay.a = rows_of(&a->a), p.decay.a_log = view_of(&a->a_log), p.decay.dt_bias = view_of(&a->dt_bias);
    p.decay.parity = o.rounding == WEFT_GDN_PARITY;
    p.l2_eps = (float)o.l2_eps, p.q_scale = (float)o.q_scale, p.beta_scale = (float)o.beta_scale;
    p.g_factor = o.g_log2 ? 1.4426950408889634f : 1.0f;
    p.l2norm = o.l2norm, p.g_chunk = o.g_chunk, p.parity = o.rounding == WEFT_GDN_PARITY;
    p.value_heads = (int32_t)call->value_heads;
    return p;
}

using fwd_function = void (*)(fwd_params);

template <class T, class Args> static int vec_of(const weft_call *call, const Args *a)
{
    const weft_tensor *const all[] = {&a->q, &a->k, &a->v, &a->z, &a->query, &a->key, &a->value, &a->gate};
    return widest<T>(call, all, 16 / (int)sizeof(T));
}

/* By channels of a lane and width; `widest` knows which there are. */
template <class T> static fwd_function fwd_of(int vec, int64_t width, bool plain)
{
    enum { FULL = 16 / sizeof(T) };
    static constexpr fwd_function all[] = {fwd_kernel<T, 2, FULL, true>, fwd_kernel<T, 3, FULL, true>,
                                           fwd_kernel<T, 4, FULL, true>};
    if (vec == FULL && plain) return all[width - 2];
    if (vec == FULL && width == 4) return fwd_kernel<T, 4, FULL, false>;
    return vec == 4 && width == 4 ? fwd_kernel<T, 4, 4, false> : fwd_kernel<T, 0, 0, false>;
}

template <class T> static fwd_function step_of(int vec, int64_t width, bool plain)
{
    enum { FULL = 16 / sizeof(T) };
    static constexpr fwd_function all[] = {step_kernel<T, 2, FULL, true>, step_kernel<T, 3, FULL, true>,
                                           step_kernel<T, 4, FULL, true>};
    if (vec == FULL && plain) return all[width - 2];
    if (vec == FULL && width == 4) return step_kernel<T, 4, FULL, false>;
    return vec == 4 && width == 4 ? step_kernel<T, 4, 4, false> : step_kernel<T, 0, 0, false>;
}

/* The usual kernels of decoding, by the type of taps and the slots of a state; NULL where the call is not one of them. */
template <class T>
static fwd_function plain_step_of(const weft_call *call, const weft_gdn_pre_step_args *a, const fwd_params &p,
                                  int vec)
{
    const bool same = a->weight.dtype == number<T>::dtype;
    const section &k = p.in[PART_K], &v = p.in[PART_V];
    if (vec != number<T>::per_vector || call->width != 4 || p.seq.cu || p.g_chunk ||
        !is_usual(&a->options, &a->bias) || !has(p.out[PART_Q]) || !has(p.out[PART_K]) || !has(p.out[PART_V]) ||
        k.lanes * vec != k.dim || v.lanes * vec != v.dim || !p.conv.wide_weight || !p.conv.wide_state ||
        !p.wide_new_state || p.conv.state.dtype != number<T>::dtype || p.new_state.dtype != number<T>::dtype ||
        !(same || a->weight.dtype == WEFT_F32) || p.conv.history < 3 || p.conv.history > 4)
        return NULL;
    if (same) return p.conv.history == 3 ? step_plain_kernel<T, T, 3> : step_plain_kernel<T, T, 4>;
    return p.conv.history == 3 ? step_plain_kernel<T, float, 3> : step_plain_kernel<T, float, 4>;
}

static unsigned blocks_of(int32_t units, int64_t times)
{
    return grid_of((units + WARPS - 1) / WARPS * times);
}

template <class T> static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_gdn_pre_fwd_args *a = (const weft_gdn_pre_fwd_args *)args;
    const bool plain = is_usual(&a->options, &a->bias);
    const int vec = plain || call->width == 4 ? vec_of<T>(call, a) : 0;
    fwd_params p = params_of(call, a, vec);
    WEFT_TRY(look_at_offsets(call, p.seq));
    if (p.seq.tokens > 0) {
        const weft_gdn_ranges r = weft_gdn_fwd_ranges(p.seq.tokens, p.first_unit[PART_GATES], call->sms);
        p.range = r.tokens;
        p.gate_tokens = GATE_TOKENS * (32 / gate_lanes(p.value_heads));
        p.first_unit[PARTS] = p.first_unit[PART_GATES];
        if (p.g_chunk)
            WEFT_TRY(launch(call, "gates", chunk_gates_kernel<T>,
                            {.grid = blocks_of(1, (p.seq.tokens + WARPS * GATE_TOKENS - 1) / (WARPS * GATE_TOKENS)),
                             .block = WARPS * 32},
                            p));
        else
            p.first_unit[PARTS] += (int32_t)((r.tokens + p.gate_tokens - 1) / p.gate_tokens);
        WEFT_TRY(launch(call, "forward", fwd_of<T>(vec, call->width, plain),
                        {.grid = blocks_of(p.first_unit[PARTS], r.count),
                         .block = WARPS * 32,
                         .shared = (size_t)WARPS * SLOTS * 32 * (size_t)vec * sizeof(T)},
                        p));
    }
    if (!weft_has(&a->final_state) || p.seq.count == 0) return WEFT_OK;
    fwd_params f = params_of(call, a, 0);
    f.new_state = view_of(&a->final_state);
    return launch(call, "final states", final_kernel<T>,
                  {.grid = blocks_of(f.first_unit[PART_Z], f.seq.count), .block = WARPS * 32}, f);
}

template <class T> static weft_status step(const weft_call *call, const void *args)
{
    const weft_gdn_pre_step_args *a = (const weft_gdn_pre_step_args *)args;
    const bool plain = is_usual(&a->options, &a->bias);
    const int vec = plain || call->width == 4 ? vec_of<T>(call, a) : 0;
    fwd_params p = params_of(call, a, vec);
    if (p.seq.count == 0 && p.seq.tokens == 0) return WEFT_OK;
    WEFT_TRY(look_at_offsets(call, p.seq));
    p.conv.cache = cache_rows_of(&a->state_index, &a->state);
    WEFT_TRY(find_rows(call, &p.conv.cache, p.seq.count, &p.searched));
    p.new_state = view_of(&a->new_state);
    p.wide_new_state = lies_side_by_side(&a->new_state, 1, p.conv.history);
    if (const fwd_function kernel = plain_step_of<T>(call, a, p, vec)) {
        p.first_unit[PART_GATES] = p.first_unit[PART_Z];
        p.first_unit[PARTS] = p.first_unit[PART_GATES] + 1;
        const int64_t warps = (int64_t)p.first_unit[PARTS] * WARPS;
        const int64_t groups = weft_gdn_step_groups((p.seq.count + WARPS - 1) / WARPS, warps, call->sms);
        p.apart = groups * WARPS;
        return launch(call, "decoding", kernel,
                      {.grid = grid_of(p.first_unit[PARTS] * groups), .block = WARPS * 32, .order = OVERLAP}, p);
    }
    p.first_unit[PARTS] = p.first_unit[PART_GATES] + (p.g_chunk ? 0 : 1);
    if (p.g_chunk)
        WEFT_TRY(launch(call, "gates", step_chunk_gates_kernel<T>,
                        {.grid = grid_of((p.seq.count + WARPS) / WARPS), .block = WARPS * 32}, p));
    p.apart = weft_gdn_step_groups(p.seq.count + (p.seq.cu != NULL), p.first_unit[PARTS], call->sms);
    return launch(call, "decoding", step_of<T>(vec, call->width, plain),
                  {.grid = blocks_of(p.first_unit[PARTS], p.apart), .block = WARPS * 32, .order = OVERLAP}, p);
}

static size_t step_workspace(const weft_call *call, const void *args)
{
    const weft_gdn_pre_step_args *a = (const weft_gdn_pre_step_args *)args;
    return find_rows_workspace(&a->state_index, sequences_of(call, &a->cu_seqlens).count);
}

const weft_kernel weft_cuda_gdn_pre_fwd[] = {
    {WEFT_BF16, 0, fwd<bf16>, NULL}, {WEFT_F16, 0, fwd<f16>, NULL}, {WEFT_F32, 0, fwd<float>, NULL}, {}};
const weft_kernel weft_cuda_gdn_pre_step[] = {{WEFT_BF16, 0, step<bf16>, step_workspace},
                                              {WEFT_F16, 0, step<f16>, step_workspace},
                                              {WEFT_F32, 0, step<float>, step_workspace},
                                              {}};
