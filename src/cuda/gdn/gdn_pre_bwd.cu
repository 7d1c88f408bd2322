/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule, backward [G1] [G2] [G3] [G4]: one pass over the activations, then a small sum.
 *
 * `backward` recomputes a token's head from the projection, takes the gradient back through norm and activation to du, and
 * W - 1 tokens later has all of a row's d_x, which it writes once. A block has a part and a range of tokens, of which each
 * warp walks over a piece, and W - 1 tokens beyond it within the sequence; rows come through a ring in shared memory, past
 * the registers, which are full of taps and sums. The pieces' parameter gradients are added in order, and `finish` adds
 * those of the ranges. How tokens are cut depends on the shapes alone. V = 0 stands for any width, head, alignment and
 * rounding. */
#include "cuda/gdn/gdn_pre_bwd_plain.cuh"

enum { SLICES = 8 /* of the ranges, in `finish` */ };

/* ---- kernels -------------------------------------------------------------------------------------------------------------- */

/* What a block has, and each of its warps. */
struct assignment {
    int part, unit;
    int64_t t0, t1;
    float *partial;
};

static __device__ __forceinline__ assignment assigned(const bwd_params &p)
{
    /* The gates of all ranges first: they are few and each takes long, which must not be at the end. */
    const int units = p.first_unit[PART_GATES];
    const int64_t rest = (int64_t)blockIdx.x - p.gate_blocks;
    const int64_t range = rest < 0 ? (int64_t)blockIdx.x : rest / units;
    assignment a = {PART_Q, rest < 0 ? units : (int)(rest % units), 0, 0, NULL};
    a.t0 = (range * WARPS + (threadIdx.x >> 5)) * p.piece, a.t1 = a.t0 + p.piece;
    if (a.t0 > p.seq.tokens) a.t0 = p.seq.tokens;
    if (a.t1 > p.seq.tokens) a.t1 = p.seq.tokens;
    while (a.part < PART_GATES && a.unit >= p.first_unit[a.part + 1]) a.part++;
    a.unit -= p.first_unit[a.part];
    if (p.partial) a.partial = p.partial + range * partial_size(p.conv.width, p.channels, p.value_heads);
    return a;
}

template <class T, int W, int V>
__global__ void __launch_bounds__(WARPS * 32, V == 0 ? 1 : 2) bwd_kernel(const bwd_params p)
{
    extern __shared__ __align__(16) char shared[];
    const assignment a = assigned(p);
    if (a.part == PART_GATES) {
        backward_each_gate<T>(p, a.t0, a.t1, shared, a.partial);
    } else if constexpr (V == 0) {
        if (a.part == PART_Z)
            backward_gate(p, a.unit, a.t0, a.t1);
        else
            backward_any<T>(p, a.part, a.unit, a.t0, a.t1, shared, a.partial);
    } else {
        if (a.part == PART_Z)
            backward_gate_wide<T, V>(p, a.unit, a.t0, a.t1);
        else
            backward_heads<T, W, V>(p, a.part, a.unit, a.t0, a.t1, shared, a.partial);
    }
}

template <class T, int W, int R>
__global__ void __launch_bounds__(WARPS * 32, 2) bwd_plain_kernel(const bwd_params p)
{
    enum { FULL = number<T>::per_vector };
    extern __shared__ __align__(16) char shared[];
    const assignment a = assigned(p);
    if (a.part < PART_V)
        backward_plain<T, W, R, true>(p, a.part, a.unit, a.t0, a.t1, shared, a.partial);
    else if (a.part == PART_V)
        backward_plain<T, W, 1, false>(p, a.part, a.unit, a.t0, a.t1, shared, a.partial);
    else if (a.part == PART_Z && p.gate_vec == FULL)
        copy_rows<T, FULL>(p.d_out[PART_Z], p.d_in[PART_Z], p.seq, place_in<FULL>(p.in[PART_Z], a.unit), a.t0, a.t1,
                           end_of(p.seq));
    else if (a.part == PART_Z)
        copy_rows<T, 4>(p.d_out[PART_Z], p.d_in[PART_Z], p.seq, place_in<4>(p.in[PART_Z], a.unit), a.t0, a.t1,
                        end_of(p.seq));
    else
        backward_each_gate<T>(p, a.t0, a.t1, shared, a.partial);
}

/* beta and g where g is summed within chunks: for calls that are rare, in a kernel of its own, because it would be a third of the code
 * of the others. Which of the two is a matter of options alone: it decides the order of sums. */
template <class T> __global__ void chunk_gates_kernel(const bwd_params p)
{
    extern __shared__ __align__(16) char shared[];
    const assignment a = assigned(p);
    backward_gates<T>(p, a.t0, a.t1, shared, a.partial);
}

/* Slots of d_state that no token's convolution has read: they were passed through, or belong to padding. */
__global__ void state_kernel(const bwd_params p)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / p.channels;
    const int c = (int)(i - n * p.channels), history = p.conv.history;
    if (n >= p.seq.count) return;
    const int64_t length = start_of(p.seq, n + 1) - start_of(p.seq, n);
    const int end = length > 0 ? history - (p.conv.width - 1) : history;
    for (int slot = 0; slot < end; slot++) {
        const int64_t from = slot - (length > 0 ? length : 0);
        const float v =
            has(p.d_final) && from >= 0
                ? get(p.d_final, n * p.d_final.stride[0] + c * p.d_final.stride[1] + from * p.d_final.stride[2])
                : 0.0f;
        put(p.d_state, n * p.d_state.stride[0] + c * p.d_state.stride[1] + slot * p.d_state.stride[2], v);
    }
}

struct finish_params {
    const float *partial;
    int64_t ranges;
    int32_t width, channels, heads;
    view d_weight, d_bias, d_a_log, d_dt_bias;
};

/* A warp has 32 numbers and a slice of the ranges; in order, in double precision, and so the slices. */
__global__ void __launch_bounds__(SLICES * 32) finish_kernel(const finish_params p)
{
    __shared__ double slices[SLICES][32];
    const int64_t size = partial_size(p.width, p.channels, p.heads), taps = (int64_t)p.width * p.channels;
    const int64_t numbers = numbers_of(p.width, p.channels, p.heads);
    const int lane = threadIdx.x & 31, slice = threadIdx.x >> 5;
    const int64_t i = (int64_t)blockIdx.x * 32 + lane, each = (p.ranges + SLICES - 1) / SLICES;
    const int64_t end = (slice + 1) * each < p.ranges ? (slice + 1) * each : p.ranges;
    const view &to = i < taps                          ? p.d_weight
                     : i < taps + p.channels           ? p.d_bias
                     : i < taps + p.channels + p.heads ? p.d_a_log
                                                       : p.d_dt_bias;
    const bool wanted = i < numbers && has(to); /* absent where it is not requested */
    double sum = 0.0;
    wait_for_previous();
    if (wanted)
#pragma unroll 8
        for (int64_t r = slice * each; r < end; r++) sum += (double)p.partial[r * size + i];
    slices[slice][lane] = sum;
    __syncthreads();
    if (slice || !wanted) return;
    for (int k = 1; k < SLICES; k++) sum += slices[k][lane];
    const float v = (float)sum;
    if (i < taps) {
        const int64_t j = i / p.channels, c = i - j * p.channels;
        put(to, c * to.stride[0] + j * to.stride[1], v);
    } else {
        const int64_t after = i - taps;
        put(to, (after < p.channels ? after : (after - p.channels) % p.heads) * to.stride[0], v);
    }
}

/* ---- launch --------------------------------------------------------------------------------------------------------------- */

using bwd_function = void (*)(bwd_params);

/* Four channels to a lane for any type: with eight there would be half the warps, which is no faster. `widest` knows the widths. */
template <class T> static bwd_function bwd_of(int vec, int64_t width)
{
    return vec == 4 && width == 4 ? bwd_kernel<T, 4, 4> : bwd_kernel<T, 0, 0>;
}

/* The usual kernels, by width and by the heads that come back to one of q or k; of fp32, for which each is 0.22 MB as well, any number. */
template <class T> static bwd_function plain_of(int64_t width, int32_t repeat)
{
    if (width < 4) return width == 2 ? bwd_plain_kernel<T, 2, 0> : bwd_plain_kernel<T, 3, 0>;
    if constexpr (sizeof(T) == 4)
        return bwd_plain_kernel<T, 4, 0>;
    else
        return repeat == 1   ? bwd_plain_kernel<T, 4, 1>
               : repeat == 2 ? bwd_plain_kernel<T, 4, 2>
               : repeat == 4 ? bwd_plain_kernel<T, 4, 4>
                             : bwd_plain_kernel<T, 4, 0>;
}

static bool wants_sums(const weft_gdn_pre_bwd_args *a)
{
    return weft_has(&a->d_weight.to) || weft_has(&a->d_bias.to) || weft_has(&a->d_a_log.to) ||
           weft_has(&a->d_dt_bias.to);
}

static int32_t channels_of(const weft_call *call)
{
    return (int32_t)(2 * call->key_heads * call->key_dim + call->value_heads * call->value_dim);
}

/* The cut of tokens, and with it sums, depends neither on what is requested nor on its address. */
static weft_gdn_ranges ranges_of(const weft_call *call)
{
    return weft_gdn_bwd_ranges(call->batch * call->steps, channels_of(call));
}

static float *lay_out(weft_arena *arena, const weft_call *call, const weft_gdn_pre_bwd_args *a)
{
    if (!wants_sums(a)) return NULL;
    const int64_t size = partial_size(call->width, channels_of(call), call->value_heads);
    return (float *)weft_arena_take(arena, (size_t)(ranges_of(call).count * size) * 4);
}

template <class T> static int vec_of(const weft_call *call, const weft_gdn_pre_bwd_args *a)
{
    const weft_tensor *const all[] = {&a->q,      &a->k,      &a->v,      &a->d_query, &a->d_key, &a->d_value,
                                      &a->d_gate, &a->d_q.to, &a->d_k.to, &a->d_v.to,  &a->d_z.to};
    return a->options.rounding == WEFT_GDN_THROUGH ? widest<T>(call, all, 4) : 0;
}

/* Whether gradients are of the activations' type and rows less than 2 GiB apart. */
template <class T> static bool is_plain(const weft_tensor *t)
{
    return t->dtype == number<T>::dtype && llabs(t->stride[1]) * (int64_t)sizeof(T) < INT32_MAX &&
           llabs(t->stride[2]) * t->shape[2] * (int64_t)sizeof(T) < INT32_MAX;
}

template <class T> static bool is_plain(const weft_gdn_pre_bwd_args *a)
{
    const weft_tensor *const in[] = {&a->q, &a->k, &a->v, &a->d_query, &a->d_key, &a->d_value};
    const weft_grad *const to[] = {&a->d_q, &a->d_k, &a->d_v};
    bool plain = is_usual(&a->options, &a->bias) && !weft_has(&a->d_final_state) && !weft_has(&a->d_state.to);
    for (const weft_tensor *t : in) plain = plain && is_plain<T>(t);
    for (const weft_grad *g : to) plain = plain && is_plain<T>(&g->to) && !g->add;
    if (weft_has(&a->d_z.to)) plain = plain && is_plain<T>(&a->d_gate) && is_plain<T>(&a->d_z.to) && !a->d_z.add;
    return plain && a->q.shape[3] > (FEWEST_LANES / 2) * 4;
}

/* Bytes of shared memory of a block: the warps' rings, later their sums. */
static size_t shared_of(bwd_params &p, int vec, size_t act)
{
    size_t sums = (size_t)WARPS * 32 * 4 * (vec ? (size_t)(p.conv.width + 1) * (size_t)vec : MAX_GROUPS * GROUP);
    if (vec == 0) return sums;
    for (int i = 0; i < 3; i++) {
        const size_t up = p.d_out[i].dtype == WEFT_F32 ? 4 : act;
        const int32_t ring = (int32_t)(SLOTS * 32 * (size_t)vec * (act + (size_t)p.repeat[i] * up));
        if (ring > p.ring) p.ring = ring;
    }
    const size_t rings = (size_t)WARPS * (size_t)p.ring;
    return rings > sums ? rings : sums;
}

template <class T> static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_gdn_pre_bwd_args *a = (const weft_gdn_pre_bwd_args *)args;
    const weft_gdn_options &o = a->options;
    const weft_tensor *const in[4] = {&a->q, &a->k, &a->v, &a->v};
    const weft_tensor *const d_out[4] = {&a->d_query, &a->d_key, &a->d_value, &a->d_gate};
    const weft_grad *const d_in[4] = {&a->d_q, &a->d_k, &a->d_v, &a->d_z};
    const int64_t keys = call->key_heads * call->key_dim, first[4] = {0, keys, 2 * keys, 0};
    const weft_gdn_ranges r = ranges_of(call);
    weft_arena arena = cuda_arena(call);
    bwd_params p = {};
    p.seq = sequences_of(call, &a->cu_seqlens);
    p.conv = convolution_of(call, &a->weight, &a->bias, &a->state, &o);
    p.partial = lay_out(&arena, call, a);
    for (int i = 0; i < 4; i++) {
        p.d_out[i] = rows_of(d_out[i]), p.d_in[i] = rows_of(d_in[i]);
        p.repeat[i] = weft_has(d_out[i]) ? (int32_t)(d_out[i]->shape[2] / in[i]->shape[2]) : 0;
        p.head_step[i] = p.repeat[i] > 1 && o.head_map == WEFT_GDN_TILED ? (int32_t)in[i]->shape[2] : 1;
    }
    bool plain = is_plain<T>(a);
    int vec = plain || call->width == 4 ? vec_of<T>(call, a) : 0;
    size_t shared = shared_of(p, vec, sizeof(T));
    if (shared > most_shared(call)) shared = shared_of(p, vec = 0, sizeof(T));
    plain = plain && vec == 4;
    p.gate_vec = vec;
    if (plain && reads_wide(&a->d_gate, number<T>::per_vector) && reads_wide(&a->d_z.to, number<T>::per_vector))
        p.gate_vec = number<T>::per_vector;
    for (int i = 0; i < 4; i++) {
        const bool wanted = weft_has(&d_in[i]->to) || (i < 3 && (p.partial || weft_has(&a->d_state.to)));
        p.in[i] = section_of(in[i], first[i], !vec ? GROUP : i == PART_Z ? p.gate_vec : vec);
        p.first_unit[i + 1] = p.first_unit[i] + (wanted ? units_of(p.in[i]) : 0);
    }
    p.gate_blocks = r.count;
    p.d_final = view_of(&a->d_final_state), p.d_state = view_of(&a->d_state);
    p.b = rows_of(&a->b), p.d_beta = rows_of(&a->d_beta), p.d_g = rows_of(&a->d_g);
    p.d_b = rows_of(&a->d_b), p.d_a = rows_of(&a->d_a);
    p.decay.a = rows_of(&a->a), p.decay.a_log = view_of(&a->a_log), p.decay.dt_bias = view_of(&a->dt_bias);
    p.decay.parity = o.rounding == WEFT_GDN_PARITY;
    p.l2_eps = (float)o.l2_eps, p.q_scale = (float)o.q_scale, p.beta_scale = (float)o.beta_scale;
    p.g_factor = o.g_log2 ? 1.4426950408889634f : 1.0f;
    p.l2norm = o.l2norm, p.g_chunk = o.g_chunk;
    p.value_heads = (int32_t)call->value_heads, p.channels = channels_of(call);
    p.piece = r.tokens / WARPS, p.ranges = r.count;

    WEFT_TRY(look_at_offsets(call, p.seq));
    if (r.count > 0 && p.g_chunk) {
        WEFT_TRY(launch(call, "gates", chunk_gates_kernel<T>,
                        {.grid = grid_of(r.count), .block = WARPS * 32, .shared = shared}, p));
        p.gate_blocks = 0;
    }
    const int64_t blocks = p.gate_blocks + p.first_unit[PART_GATES] * r.count;
    if (blocks > 0)
        WEFT_TRY(launch(call, "backward",
                        plain ? plain_of<T>(call->width, p.repeat[0] == p.repeat[1] ? p.repeat[0] : 0)
                              : bwd_of<T>(vec, call->width),
                        {.grid = grid_of(blocks), .block = WARPS * 32, .shared = shared}, p));
    if (weft_has(&a->d_state.to) && p.seq.count > 0)
        WEFT_TRY(launch(call, "states", state_kernel,
                        {.grid = grid_of((p.seq.count * p.channels + 127) / 128), .block = 128}, p));
    if (!wants_sums(a)) return WEFT_OK;
    const finish_params f = {p.partial,
                             r.count,
                             p.conv.width,
                             p.channels,
                             p.value_heads,
                             view_of(&a->d_weight),
                             view_of(&a->d_bias),
                             view_of(&a->d_a_log),
                             view_of(&a->d_dt_bias)};
    return launch(call, "sums", finish_kernel,
                  {.grid = grid_of((numbers_of(f.width, f.channels, f.heads) + 31) / 32),
                   .block = SLICES * 32,
                   .order = OVERLAP},
                  f);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    weft_call query = *call;
    query.query = true;
    weft_arena arena = cuda_arena(&query);
    lay_out(&arena, call, (const weft_gdn_pre_bwd_args *)args);
    return weft_arena_bytes(&arena);
}

const weft_kernel weft_cuda_gdn_pre_bwd[] = {{WEFT_BF16, 0, bwd<bf16>, bwd_workspace},
                                             {WEFT_F16, 0, bwd<f16>, bwd_workspace},
                                             {WEFT_F32, 0, bwd<float>, bwd_workspace},
                                             {}};
