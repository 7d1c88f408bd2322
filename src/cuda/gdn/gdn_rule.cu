/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated delta rule [G5] [G6]. In chunks: a launch for what chunks need of themselves, then one that goes
 * from chunk to chunk; in backward one that goes back as well, and one for the gradients of all chunks. Token
 * after token in fp32 where the type or the size of heads asks for it. Which of the two follows from types and
 * head sizes, so that layouts, lengths and addresses do not show in a result. */
#include "cuda/gdn/gdn_rule_plan.cuh"

/* ---- forward ------------------------------------------------------------------------------------------------- */

static weft_status fwd_chunks(const weft_call *call, const void *args, const weft_prepared *)
{
    const weft_gdn_rule_fwd_args *a = (const weft_gdn_rule_fwd_args *)args;
    weft_arena arena = cuda_arena(call);
    scan_params p = {};
    p.r = rule_of(call, a);
    p.from = take_chunks(&arena, p.r);
    WEFT_TRY(look_at_offsets(call, p.r.seq));
    WEFT_TRY(zero_rows(call, p.r, &a->o, 0));
    if (p.r.seq.count == 0) return WEFT_OK;
    WEFT_TRY(launch_chunks(call, p.r, p.from, &a->query, &a->key));
    p.o = rows_of(&a->o);
    p.state = states_of(&a->state), p.last = states_of(&a->final_state);
    p.wide_query = reads_wide(&a->query, 8), p.wide_key = reads_wide(&a->key, 8);
    p.wide_value = reads_wide(&a->value, 8), p.wide_o = reads_wide(&a->o, 8);
    const scan_shape s = scan_shape_of(call, p.r, SCAN_OUTPUTS);
    p.stages = s.stages;
    return launch(call, "from chunk to chunk", p.r.key_dim == 64 ? scan_of<64, true>(s) : scan_of<128, true>(s),
                  {.grid = s.blocks, .block = s.threads, .shared = s.shared}, p);
}

static weft_status fwd_tokens(const weft_call *call, const void *args, const weft_prepared *)
{
    const weft_gdn_rule_fwd_args *a = (const weft_gdn_rule_fwd_args *)args;
    any_params p = {};
    p.r = rule_of(call, a);
    p.o = rows_of(&a->o), p.state = states_of(&a->state), p.last = states_of(&a->final_state);
    const int columns = any_columns(p.r.key_dim), across = (p.r.value_dim + columns - 1) / columns;
    p.items = p.r.seq.count * p.r.value_heads * across;
    WEFT_TRY(look_at_offsets(call, p.r.seq));
    WEFT_TRY(zero_rows(call, p.r, &a->o, 0));
    if (p.items == 0) return WEFT_OK;
    return launch(call, "token after token", any_forward_kernel,
                  {.grid = grid_of(p.items),
                   .block = (unsigned)columns * ANY_LANES,
                   .shared = (size_t)(2 * p.r.key_dim + columns * any_step(p.r.key_dim)) * sizeof(float)},
                  p);
}

static void prepare_fwd(const weft_call *call, const void *args, weft_prepared *prepared)
{
    const weft_gdn_rule_fwd_args *a = (const weft_gdn_rule_fwd_args *)args;
    const rule_path path = rule_path_of(call);
    weft_arena arena = weft_arena_open(NULL);
    if (path == RULE_CHUNKS) take_chunks(&arena, rule_of(call, a));
    prepared->workspace = weft_arena_bytes(&arena);
    prepared->path = rule_path_text(path);
    prepared->run = path == RULE_CHUNKS ? fwd_chunks : fwd_tokens;
}

const weft_kernel weft_cuda_gdn_rule_fwd[] = {{WEFT_BF16, 0, NULL, NULL, prepare_fwd},
                                              {WEFT_F16, 0, NULL, NULL, prepare_fwd},
                                              {WEFT_F32, 0, NULL, NULL, prepare_fwd},
                                              {}};

/* ---- backward, token after token ----------------------------------------------------------------------------- */

static unsigned any_blocks(int64_t items)
{
    return (unsigned)(items < (int64_t)ANY_BLOCKS ? items : (int64_t)ANY_BLOCKS);
}

static any_params take_any(weft_arena *arena, const rule &r)
{
    any_params p = {};
    const size_t state = (size_t)any_columns(r.key_dim) * (size_t)r.key_dim * sizeof(float);
    const size_t rows = (size_t)(r.seq.tokens * r.value_heads);
    p.r = r;
    p.items = r.seq.count * r.value_heads;
    p.kept =
        (float *)weft_arena_take(arena, (size_t)((r.seq.tokens / ANY_TILE + r.seq.count) * r.value_heads) * state);
    p.inner = (float *)weft_arena_take(arena, any_blocks(p.items) * (ANY_TILE + 1) * state);
    p.d_keys = (float *)weft_arena_take(arena, rows * 2 * (size_t)r.key_dim * sizeof(float));
    p.d_gates = (float *)weft_arena_take(arena, rows * 2 * sizeof(float));
    return p;
}

static weft_status bwd_tokens(const weft_call *call, const void *args, const weft_prepared *)
{
    const weft_gdn_rule_bwd_args *a = (const weft_gdn_rule_bwd_args *)args;
    weft_arena arena = cuda_arena(call);
    any_params p = take_any(&arena, rule_of(call, a));
    p.d_o = rows_of(&a->d_o), p.d_value = rows_of(&a->d_value);
    p.state = states_of(&a->state), p.d_last = states_of(&a->d_final_state);
    p.d_state = states_of(&a->d_state.to, a->d_state.add);
    WEFT_TRY(look_at_offsets(call, p.r.seq));
    WEFT_TRY(zero_grads(call, p.r, a));
    if (p.items == 0) return WEFT_OK;
    const int columns = any_columns(p.r.key_dim);
    WEFT_TRY(launch(
        call, "token after token", any_backward_kernel,
        {.grid = any_blocks(p.items),
         .block = (unsigned)columns * ANY_LANES,
         .shared = (size_t)(2 * p.r.key_dim + columns * (any_step(p.r.key_dim) + 5 + ANY_TILE)) * sizeof(float)},
        p));
    if (p.r.seq.tokens == 0) return WEFT_OK;
    gather_params g = {
        p.r, p.d_keys, p.d_gates, rows_of(&a->d_query), rows_of(&a->d_key), rows_of(&a->d_beta), rows_of(&a->d_g)};
    return launch(call, "gradients of key heads", any_gather_kernel,
                  {.grid = grid_of(p.r.seq.tokens * p.r.heads), .block = 128}, g);
}

/* ---- backward in chunks -------------------------------------------------------------------------------------- */

/* What the scans leave behind for the gradients, for each slot and value head. */
struct kept_chunks {
    chunks own;
    bf16 *before, *after, *deltas, *d_y;
};

static kept_chunks take_kept(weft_arena *arena, const rule &r)
{
    const size_t count = (size_t)(slots_of(r.seq) * r.value_heads) * (size_t)r.value_dim * sizeof(bf16);
    kept_chunks k;
    k.own = take_chunks(arena, r);
    k.before = (bf16 *)weft_arena_take(arena, count * (size_t)r.key_dim);
    k.after = (bf16 *)weft_arena_take(arena, count * (size_t)r.key_dim);
    k.deltas = (bf16 *)weft_arena_take(arena, count * CHUNK);
    k.d_y = (bf16 *)weft_arena_take(arena, count * CHUNK);
    return k;
}

static size_t grad_shared(int64_t dk, int stages)
{
    return dk == 64 ? (size_t)stages * grad_room<64>::stage + grad_room<64>::rest
                    : (size_t)stages * grad_room<128>::stage + grad_room<128>::rest;
}

static weft_status launch_states(const weft_call *call, const rule &r, const weft_gdn_rule_bwd_args *a,
                                 const kept_chunks &k)
{
    scan_params p = {};
    p.r = r, p.from = k.own, p.state = states_of(&a->state);
    p.before = k.before, p.deltas = k.deltas;
    p.wide_key = reads_wide(&a->key, 8), p.wide_value = reads_wide(&a->value, 8);
    const scan_shape s = scan_shape_of(call, r, SCAN_STATES);
    p.stages = s.stages;
    return launch(call, "states", r.key_dim == 64 ? scan_of<64, false>(s) : scan_of<128, false>(s),
                  {.grid = s.blocks, .block = s.threads, .shared = s.shared}, p);
}

static weft_status launch_back(const weft_call *call, const rule &r, const weft_gdn_rule_bwd_args *a,
                               const kept_chunks &k)
{
    back_params p = {};
    p.r = r, p.from = k.own, p.after = k.after, p.d_y = k.d_y;
    p.d_o = rows_of(&a->d_o), p.d_value = rows_of(&a->d_value);
    p.d_last = states_of(&a->d_final_state), p.d_state = states_of(&a->d_state.to, a->d_state.add);
    p.wide_query = reads_wide(&a->query, 8), p.wide_key = reads_wide(&a->key, 8);
    p.wide_d_o = reads_wide(&a->d_o, 8), p.wide_d_value = reads_wide(&a->d_value.to, 8);
    const scan_shape s = scan_shape_of(call, r, SCAN_BACK);
    p.stages = s.stages;
    return launch(call, "from the last chunk to the first", r.key_dim == 64 ? back_of<64>(s) : back_of<128>(s),
                  {.grid = s.blocks, .block = s.threads, .shared = s.shared}, p);
}

static weft_status bwd_chunks(const weft_call *call, const void *args, const weft_prepared *)
{
    const weft_gdn_rule_bwd_args *a = (const weft_gdn_rule_bwd_args *)args;
    const rule r = rule_of(call, a);
    weft_arena arena = cuda_arena(call);
    const kept_chunks k = take_kept(&arena, r);
    WEFT_TRY(look_at_offsets(call, r.seq));
    WEFT_TRY(zero_grads(call, r, a));
    if (r.seq.count == 0) return WEFT_OK;
    WEFT_TRY(launch_chunks(call, r, k.own, &a->query, &a->key));
    WEFT_TRY(launch_states(call, r, a, k));
    WEFT_TRY(launch_back(call, r, a, k));
    grad_params p = {};
    p.r = r, p.gates = k.own.gates, p.before = k.before, p.after = k.after, p.deltas = k.deltas, p.d_y = k.d_y;
    p.d_o = rows_of(&a->d_o), p.d_query = rows_of(&a->d_query), p.d_key = rows_of(&a->d_key);
    p.d_beta = rows_of(&a->d_beta), p.d_g = rows_of(&a->d_g);
    p.wide_query = reads_wide(&a->query, 8), p.wide_key = reads_wide(&a->key, 8);
    p.wide_value = reads_wide(&a->value, 8), p.wide_d_o = reads_wide(&a->d_o, 8);
    p.wide_d_query = reads_wide(&a->d_query.to, 8), p.wide_d_key = reads_wide(&a->d_key.to, 8);
    if (weft_cuda_has_groups(call->exec->device))
        return launch(call, "gradients", r.key_dim == 64 ? group_grad_kernel<64> : group_grad_kernel<128>,
                      {.grid = grid_of(slots_of(r.seq) * r.heads),
                       .block = GROUP_GRAD_THREADS,
                       .shared = r.key_dim == 64 ? group_grad_room<64>::bytes : group_grad_room<128>::bytes},
                      p);
    p.stages = grad_shared(r.key_dim, 2) <= most_shared(call) ? 2 : 1;
    return launch(call, "gradients", r.key_dim == 64 ? grad_kernel<64> : grad_kernel<128>,
                  {.grid = grid_of(slots_of(r.seq) * r.heads),
                   .block = GRAD_THREADS,
                   .shared = grad_shared(r.key_dim, p.stages)},
                  p);
}

/* ---- backward, one of the two -------------------------------------------------------------------------------- */

static rule_path bwd_path_of(const weft_call *call, const weft_gdn_rule_bwd_args *a)
{
    const rule_path path = rule_path_of(call);
    if (path != RULE_CHUNKS) return path;
    if (a->d_o.dtype != WEFT_BF16) return RULE_UPSTREAM;
    return grad_shared(call->key_dim, 1) > most_shared(call) ? RULE_SHARED : RULE_CHUNKS;
}

static void prepare_bwd(const weft_call *call, const void *args, weft_prepared *prepared)
{
    const weft_gdn_rule_bwd_args *a = (const weft_gdn_rule_bwd_args *)args;
    const rule_path path = bwd_path_of(call, a);
    weft_arena arena = weft_arena_open(NULL);
    if (path == RULE_CHUNKS)
        take_kept(&arena, rule_of(call, a));
    else
        take_any(&arena, rule_of(call, a));
    prepared->workspace = weft_arena_bytes(&arena);
    prepared->path = rule_path_text(path);
    prepared->run = path == RULE_CHUNKS ? bwd_chunks : bwd_tokens;
}

const weft_kernel weft_cuda_gdn_rule_bwd[] = {{WEFT_BF16, 0, NULL, NULL, prepare_bwd},
                                              {WEFT_F16, 0, NULL, NULL, prepare_bwd},
                                              {WEFT_F32, 0, NULL, NULL, prepare_bwd},
                                              {}};
