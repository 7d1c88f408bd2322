/* SPDX-License-Identifier: Apache-2.0
 *
 * Host side of the gated delta rule: which path a call takes, its workspace, and launches that forward and
 * backward share. */
#ifndef WEFT_CUDA_GDN_RULE_PLAN_CUH
#define WEFT_CUDA_GDN_RULE_PLAN_CUH

#include "cuda/gdn/gdn_rule_any.cuh"
#include "cuda/gdn/gdn_rule_grad.cuh"
#include "cuda/gdn/gdn_rule_group.cuh"
#include "cuda/gdn/gdn_rule_group_grad.cuh"
#include "cuda/gdn/gdn_rule_scan.cuh"

enum rule_path { RULE_CHUNKS, RULE_TYPE, RULE_KEYS, RULE_VALUES, RULE_UPSTREAM, RULE_SHARED };

static inline const char *rule_path_text(rule_path path)
{
    static const char *const texts[] = {
        "in chunks: bf16, tensor cores",
        "token after token: the chunked form takes bf16",
        "token after token: the chunked form takes Dk of 64 and 128",
        "token after token: the chunked form takes multiples of 64 up to 256 as Dv",
        "token after token: the chunked form takes a bf16 d_o",
        "token after token: the chunked form has no room in this GPU's shared memory"};
    return texts[path];
}

static inline rule_path rule_path_of(const weft_call *call)
{
    if (call->dtype != WEFT_BF16) return RULE_TYPE;
    if (call->key_dim != 64 && call->key_dim != 128) return RULE_KEYS;
    return call->value_dim % 64 || call->value_dim > 256 ? RULE_VALUES : RULE_CHUNKS;
}

static inline chunks take_chunks(weft_arena *arena, const rule &r)
{
    const size_t count = (size_t)(slots_of(r.seq) * r.value_heads);
    chunks c;
    c.m_hi = (bf16 *)weft_arena_take(arena, count * SQUARE * sizeof(bf16));
    c.m_lo = (bf16 *)weft_arena_take(arena, count * SQUARE * sizeof(bf16));
    c.pairs = (bf16 *)weft_arena_take(arena, count * SQUARE * sizeof(bf16));
    c.gates = (float *)weft_arena_take(arena, count * SCALARS * sizeof(float));
    return c;
}

/* Whether groups of four warps make the scans. Where a sequence has few columns, its chain is shorter with the many narrow blocks of
 * the other form; the number of sequences must not decide, since the bits differ. */
static inline bool by_groups(const weft_call *call, const rule &r)
{
    return r.value_heads * r.value_dim >= 32 * GROUP_COLUMNS && weft_cuda_has_groups(call->exec->device);
}

static inline weft_status launch_chunks(const weft_call *call, const rule &r, const chunks &to,
                                        const weft_tensor *query, const weft_tensor *key)
{
    const chunk_params p = {r, to, !by_groups(call, r), reads_wide(query, 8), reads_wide(key, 8)};
    return launch(call, "chunks", r.key_dim == 64 ? chunk_kernel<64> : chunk_kernel<128>,
                  {.grid = grid_of(slots_of(r.seq) * r.heads), .block = CHUNK_THREADS, .shared = CHUNK_SHARED}, p);
}

/* How a scan is cut, which shows in no result: columns of a block, chunks in shared memory, and threads. groups: by groups of four
 * warps, of which a block has one or two beside the one that brings chunks. */
struct scan_shape {
    int columns, stages, groups;
    unsigned blocks, threads;
    size_t shared;
};

enum scan_kind { SCAN_OUTPUTS, SCAN_STATES, SCAN_BACK };

template <int DK, int C> static size_t scan_bytes(scan_kind kind, int stages)
{
    typedef scan_room<DK, C, true> outputs;
    typedef scan_room<DK, C, false> only_states;
    typedef back_room<DK, C> back;
    if (kind == SCAN_BACK) return (size_t)stages * back::stage + back::rest;
    return (size_t)stages * (kind == SCAN_OUTPUTS ? outputs::stage : only_states::stage) + outputs::rest;
}

template <int DK> static size_t group_bytes(scan_kind kind, int groups)
{
    if (kind == SCAN_STATES) return groups == 1 ? group_room<DK, 1, false>::bytes : group_room<DK, 2, false>::bytes;
    return groups == 1 ? group_room<DK, 1, true>::bytes : group_room<DK, 2, true>::bytes;
}

static inline scan_shape scan_shape_of(const weft_call *call, const rule &r, scan_kind kind)
{
    if (by_groups(call, r)) {
        const int64_t columns = r.seq.count * r.value_heads * r.value_dim;
        scan_shape s = {};
        s.groups = columns > call->sms * (int64_t)GROUP_COLUMNS && r.value_dim % (2 * GROUP_COLUMNS) == 0 ? 2 : 1;
        s.columns = s.groups * GROUP_COLUMNS, s.threads = (unsigned)s.groups * GROUP + GROUP;
        s.blocks = grid_of(columns / s.columns);
        s.shared = r.key_dim == 64 ? group_bytes<64>(kind, s.groups) : group_bytes<128>(kind, s.groups);
        return s;
    }
    const int64_t chains = r.seq.count * r.value_heads * r.value_dim / 32;
    scan_shape s = {2 * chains <= call->sms ? 16 : 32, 2, 0, 0, 0, 0};
    auto bytes = [&] {
        if (r.key_dim == 64)
            return s.columns == 16 ? scan_bytes<64, 16>(kind, s.stages) : scan_bytes<64, 32>(kind, s.stages);
        return s.columns == 16 ? scan_bytes<128, 16>(kind, s.stages) : scan_bytes<128, 32>(kind, s.stages);
    };
    if (bytes() > most_shared(call)) s.stages = 1;
    if (bytes() > most_shared(call)) s.columns = 16;
    s.shared = bytes();
    s.threads = (unsigned)s.columns * 8 + PRODUCERS;
    s.blocks = grid_of(r.seq.count * r.value_heads * (r.value_dim / s.columns));
    return s;
}

typedef void scan_function(scan_params);
typedef void back_function(back_params);

template <int DK, bool OUTPUTS> static scan_function *scan_of(const scan_shape &s)
{
    if (s.groups) return s.groups == 1 ? group_scan_kernel<DK, 1, OUTPUTS> : group_scan_kernel<DK, 2, OUTPUTS>;
    return s.columns == 32 ? scan_kernel<DK, 32, OUTPUTS> : scan_kernel<DK, 16, OUTPUTS>;
}

template <int DK> static back_function *back_of(const scan_shape &s)
{
    if (s.groups) return s.groups == 1 ? group_back_kernel<DK, 1> : group_back_kernel<DK, 2>;
    return s.columns == 32 ? back_kernel<DK, 32> : back_kernel<DK, 16>;
}

/* Rows of an output behind the last sequence, unless they are added to. */
static inline weft_status zero_rows(const weft_call *call, const rule &r, const weft_tensor *to, int add)
{
    if (!r.seq.cu || !weft_has(to) || add || r.seq.tokens == 0) return WEFT_OK;
    const int dim = to->ndim > 3 ? (int)to->shape[3] : 1;
    return launch(call, "rows behind the end", zero_rows_kernel,
                  {.grid = grid_of(r.seq.tokens < 64 ? r.seq.tokens : 64), .block = 128}, rows_of(to),
                  (int)to->shape[2], dim, r.seq);
}

static inline weft_status zero_grads(const weft_call *call, const rule &r, const weft_gdn_rule_bwd_args *a)
{
    const weft_grad *const all[] = {&a->d_query, &a->d_key, &a->d_value, &a->d_beta, &a->d_g};
    for (const weft_grad *g : all) WEFT_TRY(zero_rows(call, r, &g->to, g->add));
    return WEFT_OK;
}

#endif
