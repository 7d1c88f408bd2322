/* SPDX-License-Identifier: Apache-2.0
 *
 * Projection and mean square, forward [M1]. Reads x once (2nC bytes a token in 16 bits), writes 4N + 4 bytes a token.
 *
 * `project` multiplies on tensor cores. psi = phi * norm_weight is taken apart into bf16 hi + lo on the way; x is exact in
 * bf16 (f16 becomes hi + lo too), so two products a tile give sixteen bits of psi. The squares are summed from the same
 * registers. `gather` adds the partial sums where the columns of a token were split over blocks. `spread` lays psi out in
 * the order of x's columns where phi itself is not there to be copied: a norm weight, another order, another dtype.
 *
 * The order of a token's sum depends on K = n*C alone: 64 leaves of columns, each summed by the tensor cores from left to
 * right, then by fours three times. A split hands on whole subtrees. */
#include "cuda/mhc_project.cuh"

/* ---- psi as fp32 rows -------------------------------------------------------------------------------------------------- */

__global__ void spread_kernel(float *to, weights w, columns k)
{
    const int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    let_next_begin();
    if (column >= k.count) return;
    uint32_t stream, channel;
    column_at(k, (uint32_t)column, stream, channel);
    to[blockIdx.y * k.count + column] = psi_at(w, blockIdx.y, stream, channel);
}

weft_status weft_cuda_project_spread(const weft_call *call, const weft_tensor *phi, const weft_tensor *norm_weight,
                                     columns k, float *psi)
{
    const weights w = {view_of(phi), view_of(norm_weight), (int32_t)call->rows};
    const dim3 grid((unsigned)((k.count + 255) / 256), (unsigned)call->rows);
    return launch(call, "psi", spread_kernel, {.grid = grid, .block = 256}, psi, w, k);
}

/* ---- the product ------------------------------------------------------------------------------------------------------ */

struct project_args {
    const void *x;
    const float *psi; /* [rows], psi_stride apart */
    float *partial;   /* [splits][tokens][rows + 1], or NULL: straight to h and ms */
    view h, ms;
    int64_t tokens, x_stride, psi_stride, columns;
    int32_t rows, splits;
    bool psi_is_ready; /* by the time this kernel may begin */
    float mean;        /* 1 / K */
};

/* Squares on tensor cores: a fragment of x is also its own transpose, so x x^T costs two products and no arithmetic; its
 * diagonal is what we want. Token g has it in d[0] or d[1] of lane (g, g / 2), token g + 8 in d[2] or d[3]. */
template <class T>
static __device__ __forceinline__ void squares(float (&low)[4], float (&high)[4], const uint32_t (&a)[4])
{
    if constexpr (number<T>::dtype == WEFT_F16) {
        mma16_f16(low, a[0], a[1], a[2], a[3], a[0], a[2]);
        mma16_f16(high, a[0], a[1], a[2], a[3], a[1], a[3]);
    } else {
        mma16(low, a[0], a[1], a[2], a[3], a[0], a[2]);
        mma16(high, a[0], a[1], a[2], a[3], a[1], a[3]);
    }
}

/* A block owns WARPS * MT * 16 tokens and the columns of its split, a warp MT * 16 of these tokens. Each warp has a ring of
 * stages of 64 columns of its own x and waits for nobody, with its 16-byte pieces swapped by the row number so that
 * neither the copy nor ldmatrix meets a bank twice. psi is shared: chunks of CHUNK stages, taken apart into the registers'
 * order while the chunk before is multiplied, one barrier a chunk. One 16-byte piece per (step of 16 columns, tile of 8
 * rows, lane): hi and lo of B's two registers.
 * What counts is instructions: memory leaves 2090 cycles for a stage of 256 tokens. A barrier a stage, address arithmetic
 * in every copy or squares in plain arithmetic (half of the loop) each cost more than that leaves room for. */
template <class T, int NT, int MT, int WARPS, int STAGES, int CHUNK>
__global__ void __launch_bounds__(WARPS * 32, 1) project_kernel(const project_args p)
{
    constexpr int STEPS = PROJECT_STAGE / 16, THREADS = WARPS * 32, STAGE_BYTES = MT * 16 * PROJECT_STAGE * 2;
    constexpr int CHUNK_PIECES = CHUNK * STEPS * NT * 32, OWN = CHUNK_PIECES / THREADS; /* pieces of a thread */
    constexpr bool AHEAD = NT <= 3; /* registers to fetch them ahead */
    static_assert(CHUNK_PIECES % THREADS == 0, "every thread takes the same number of pieces apart");
    extern __shared__ __align__(128) char shared[];

    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int split = (int)(blockIdx.x % (unsigned)p.splits), leaves = PROJECT_LEAVES / p.splits;
    const int64_t token0 = ((int64_t)(blockIdx.x / (unsigned)p.splits) * WARPS + warp) * (MT * 16);
    const int64_t stages = (p.columns + PROJECT_STAGE - 1) / PROJECT_STAGE;
    const int64_t first = weft_project_leaf(stages, leaves * split);
    const int count = (int)(weft_project_leaf(stages, leaves * (split + 1)) - first);
    uint4 *const taken = (uint4 *)(shared + WARPS * STAGES * STAGE_BYTES);
    const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;

    /* Lane l copies piece l % 8 of rows l / 8, l / 8 + 4, ... Rows behind the last token repeat it: a copy must cost no more
     * than the address it adds to. */
    const char *x_from[MT * 4];
#pragma unroll
    for (int i = 0; i < MT * 4; i++) {
        const int64_t token = token0 + i * 4 + (lane >> 3);
        x_from[i] = (const char *)p.x + ((token < p.tokens ? token : p.tokens - 1) * p.x_stride +
                                         first * PROJECT_STAGE + (lane & 7) * 8) *
                                            (int64_t)sizeof(T);
    }
    const uint32_t x_to = ring + (lane >> 3) * 128 + (((lane & 7) ^ (lane >> 3)) << 4);
    const int inside = (int)((p.columns - (lane & 7) * 8 + PROJECT_STAGE - 1) / PROJECT_STAGE - first); /* stages */
    int next = 0; /* stage to load */
    auto load_x = [&](uint32_t slot_offset) {
#pragma unroll
        for (int i = 0; i < MT * 4; i++) {
            copy_async((x_to ^ (i & 1 ? 64 : 0)) + slot_offset + i * 512, x_from[i], next < inside);
            x_from[i] += PROJECT_STAGE * sizeof(T);
        }
        next++;
    };
    /* The four numbers of a piece: columns 2t, 2t + 1, 2t + 8, 2t + 9 of its step, row g of its tile. */
    const int last_column = (int)(p.columns - first * PROJECT_STAGE);
    auto fetch = [&](float2(&v)[2], int stage, int piece) {
        const int row = piece / 32 % NT * 8 + (lane >> 2);
        const int column = stage * PROJECT_STAGE + piece / 32 / NT * 16 + 2 * (lane & 3);
        const float2 *from =
            (const float2 *)(p.psi + first * PROJECT_STAGE + (uint32_t)(row * (int)p.psi_stride + column));
        v[0] = v[1] = make_float2(0.0f, 0.0f);
        if (row < p.rows && column < last_column) v[0] = from[0];
        if (row < p.rows && column + 8 < last_column) v[1] = from[4];
    };
    auto take_apart = [&](int buffer, int piece, const float2(&v)[2]) {
        uint4 to;
        split2(to.x, to.z, v[0].x, v[0].y);
        split2(to.y, to.w, v[1].x, v[1].y);
        taken[buffer * CHUNK_PIECES + piece] = to;
    };

    /* x does not depend on the kernel before this one; psi may. */
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < count) load_x(s * STAGE_BYTES);
        copy_commit();
    }
    wait_for_previous();
    let_next_begin();
    float2 ahead[AHEAD ? OWN : 1][2];
    if constexpr (AHEAD) {
#pragma unroll
        for (int i = 0; i < OWN; i++) fetch(ahead[i], 0, i * THREADS + tid);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (!AHEAD) fetch(ahead[0], 0, i * THREADS + tid);
        take_apart(0, i * THREADS + tid, ahead[AHEAD ? i : 0]);
    }

    /* Four levels of the sum. With 80 rows the upper two, which are hardly touched, lie in shared memory. */
    constexpr bool DEEP = NT > 3;
    float *const deep = (float *)(taken + 2 * CHUNK_PIECES) + tid;
    float leaf[MT][NT][4] = {}, four[MT][NT][4] = {};
    float upper[2][DEEP ? 1 : MT][DEEP ? 1 : NT][4] = {};
    auto high = [&](int level, int m, int q, int e) -> float & {
        return DEEP ? deep[((level * NT + q) * 4 + e) * THREADS] : upper[level][DEEP ? 0 : m][DEEP ? 0 : q][e];
    };
#pragma unroll
    for (int i = 0; i < (DEEP ? 2 * NT * 4 : 0); i++) deep[i * THREADS] = 0.0f;
    float leaf_sq[MT][2][4] = {}, sq[3][MT][2] = {};
    uint32_t slot = 0; /* in bytes */
    int index = leaves * split;
    int leaf_end = (int)(weft_project_leaf(stages, index + 1) - first);
    while (leaf_end == 0 && index < leaves * (split + 1))
        leaf_end = (int)(weft_project_leaf(stages, ++index + 1) - first);
    for (int chunk = 0; chunk < count; chunk += CHUNK) {
        const int buffer = chunk / CHUNK & 1;
        const bool more = chunk + CHUNK < count;
        __syncthreads();
        if (AHEAD && more) {
#pragma unroll
            for (int i = 0; i < OWN; i++) fetch(ahead[AHEAD ? i : 0], chunk + CHUNK, i * THREADS + tid);
        }
#pragma unroll 1
        for (int stage = chunk; stage < chunk + CHUNK && stage < count; stage++) {
            copy_wait<STAGES - 2>();
            __syncwarp();
            if (next < count) load_x(slot == 0 ? (STAGES - 1) * STAGE_BYTES : slot - STAGE_BYTES);
            copy_commit();
            const uint4 *psi = taken + buffer * CHUNK_PIECES + (stage - chunk) * (STEPS * NT * 32) + lane;
            const uint32_t x_at = ring + slot + (lane & 15) * 128;
            slot = slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                uint32_t hi[MT][4], lo[MT][4];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    uint32_t a[4];
                    ldmatrix4(a, x_at + m * 2048 + (((step * 2 + (lane >> 4)) ^ (lane & 7)) << 4));
                    squares<T>(leaf_sq[m][0], leaf_sq[m][1], a);
#pragma unroll
                    for (int e = 0; e < 4; e++) split_pair(hi[m][e], lo[m][e], a[e], T());
                }
#pragma unroll
                for (int q = 0; q < NT; q++) {
                    const uint4 b = psi[(step * NT + q) * 32];
#pragma unroll
                    for (int m = 0; m < MT; m++)
                        mma16(leaf[m][q], hi[m][0], hi[m][1], hi[m][2], hi[m][3], b.x, b.y);
#pragma unroll
                    for (int m = 0; m < MT; m++)
                        mma16(leaf[m][q], hi[m][0], hi[m][1], hi[m][2], hi[m][3], b.z, b.w);
                    if constexpr (number<T>::dtype == WEFT_F16) {
#pragma unroll
                        for (int m = 0; m < MT; m++)
                            mma16(leaf[m][q], lo[m][0], lo[m][1], lo[m][2], lo[m][3], b.x, b.y);
                    }
                }
            }
            /* The end of a leaf, and of the empty ones behind it where there are fewer stages than leaves. */
            while (stage + 1 == leaf_end && index < leaves * (split + 1)) {
                index++;
                leaf_end = (int)(weft_project_leaf(stages, index + 1) - first);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    const bool odd = (lane >> 2) & 1;
                    sq[0][m][0] += odd ? leaf_sq[m][0][1] : leaf_sq[m][0][0];
                    sq[0][m][1] += odd ? leaf_sq[m][1][3] : leaf_sq[m][1][2];
#pragma unroll
                    for (int e = 0; e < 4; e++) leaf_sq[m][0][e] = leaf_sq[m][1][e] = 0.0f;
#pragma unroll
                    for (int q = 0; q < NT; q++)
#pragma unroll
                        for (int e = 0; e < 4; e++) four[m][q][e] += leaf[m][q][e], leaf[m][q][e] = 0.0f;
                }
                if (index % PROJECT_FAN) continue;
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) sq[1][m][e] += sq[0][m][e], sq[0][m][e] = 0.0f;
#pragma unroll
                    for (int q = 0; q < NT; q++)
#pragma unroll
                        for (int e = 0; e < 4; e++) high(0, m, q, e) += four[m][q][e], four[m][q][e] = 0.0f;
                }
                if (index % (PROJECT_FAN * PROJECT_FAN)) continue;
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) sq[2][m][e] += sq[1][m][e], sq[1][m][e] = 0.0f;
#pragma unroll
                    for (int q = 0; q < NT; q++)
#pragma unroll
                        for (int e = 0; e < 4; e++) high(1, m, q, e) += high(0, m, q, e), high(0, m, q, e) = 0.0f;
                }
            }
        }
        if (!more) continue;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (!AHEAD) fetch(ahead[0], chunk + CHUNK, i * THREADS + tid);
            take_apart(buffer ^ 1, i * THREADS + tid, ahead[AHEAD ? i : 0]);
        }
    }

    /* A split holds its subtree at the level it is cut at; the other levels are empty. */
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t token = token0 + m * 16 + (lane >> 2) + half * 8;
            if (token >= p.tokens) continue;
            float *out = p.partial ? p.partial + (split * p.tokens + token) * (p.rows + 1) : NULL;
#pragma unroll
            for (int q = 0; q < NT; q++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int row = q * 8 + (lane & 3) * 2 + e, at = half * 2 + e;
                    const float v = high(1, m, q, at) + (high(0, m, q, at) + four[m][q][at]);
                    if (row >= p.rows) continue;
                    if (out)
                        out[row] = v;
                    else
                        put(p.h, token * p.h.stride[0] + row * p.h.stride[1], v);
                }
            if ((lane & 3) == lane >> 3) { /* the lane of the diagonal */
                const float v = sq[2][m][half] + (sq[1][m][half] + sq[0][m][half]);
                if (out)
                    out[p.rows] = v;
                else if (has(p.ms))
                    put(p.ms, token * p.ms.stride[0], v * p.mean);
            }
        }
}

/* Adds the partial sums of a token in the order that one block would have added them. With many splits four lanes share a
 * sum, each with a quarter of the partial sums on its way at once. */
template <int SPLITS> struct gather_shape {
    static constexpr int lanes = SPLITS > 4 ? 4 : 1;
};

template <int SPLITS> __global__ void gather_kernel(const project_args p)
{
    constexpr int LANES = gather_shape<SPLITS>::lanes, EACH = SPLITS / LANES;
    constexpr int FOURS = SPLITS > 4 ? 4 : 1, LEAVES = EACH / FOURS;
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES, step = p.tokens * (p.rows + 1);
    const int part = threadIdx.x % LANES;
    float v[EACH] = {}, sixteen = 0.0f, total = 0.0f;
    wait_for_previous();
#pragma unroll
    for (int s = 0; s < EACH; s++)
        if (i < step) v[s] = p.partial[(part * EACH + s) * step + i];
    if constexpr (LANES == 1) {
#pragma unroll
        for (int s = 0; s < EACH; s++) total += v[s];
    } else {
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            float four = 0.0f;
#pragma unroll
            for (int l = 0; l < LEAVES; l++) four += v[f * LEAVES + l];
            sixteen += four;
        }
#pragma unroll
        for (int s = 0; s < LANES; s++) total += __shfl_sync(0xffffffffu, sixteen, s, LANES);
    }
    if (i >= step || part) return;
    const int64_t token = i / (p.rows + 1);
    const int row = (int)(i - token * (p.rows + 1));
    if (row < p.rows)
        put(p.h, token * p.h.stride[0] + row * p.h.stride[1], total);
    else if (has(p.ms))
        put(p.ms, token * p.ms.stride[0], total * p.mean);
}

/* ---- launch ------------------------------------------------------------------------------------------------------------ */

template <class T, int NT, int MT, int WARPS, int STAGES, int CHUNK>
static weft_status launch_project(const weft_call *call, const project_args &p, int64_t blocks)
{
    constexpr size_t x = (size_t)WARPS * STAGES * MT * 16 * PROJECT_STAGE * 2;
    constexpr size_t psi = 2 * CHUNK * PROJECT_STAGE / 16 * NT * 512,
                     deep = NT > 3 ? 2 * NT * 4 * WARPS * 32 * 4 : 0;
    static_assert(x + psi + deep <= 227 * 1024, "more shared memory than a block has");
    return launch(call, "projection", project_kernel<T, NT, MT, WARPS, STAGES, CHUNK>,
                  {.grid = (unsigned)blocks,
                   .block = WARPS * 32,
                   .shared = x + psi + deep,
                   .order = p.psi_is_ready ? AFTER : OVERLAP},
                  p);
}

template <class T>
static weft_status launch_tiles(const weft_call *call, const project_args &p, const weft_project_fwd_plan *plan,
                                int32_t row_tiles)
{
    if constexpr (number<T>::dtype == WEFT_BF16) {
        if (plan->tile_tokens == 256 && row_tiles == 1)
            return launch_project<T, 1, 2, 8, 5, 4>(call, p, plan->blocks);
        if (plan->tile_tokens == 256) return launch_project<T, 3, 2, 8, 5, 4>(call, p, plan->blocks);
    }
    switch (row_tiles * 1000 + plan->tile_tokens) {
    case 1128: return launch_project<T, 1, 1, 8, 8, 4>(call, p, plan->blocks);
    case 1032: return launch_project<T, 1, 1, 2, 4, 4>(call, p, plan->blocks);
    case 3128: return launch_project<T, 3, 1, 8, 8, 4>(call, p, plan->blocks);
    case 3032: return launch_project<T, 3, 1, 2, 4, 1>(call, p, plan->blocks);
    default: return launch_project<T, 10, 1, 8, 5, 1>(call, p, plan->blocks);
    }
}

template <int SPLITS> static weft_status launch_gather(const weft_call *call, const project_args &p)
{
    const int64_t threads = p.tokens * (p.rows + 1) * gather_shape<SPLITS>::lanes;
    return launch(call, "sums", gather_kernel<SPLITS>,
                  {.grid = grid_of((threads + 127) / 128), .block = 128, .shared = 0, .order = OVERLAP}, p);
}

/* 80 rows, and the lo parts of f16, leave no registers for two tiles of tokens a warp. */
static weft_project_fwd_plan plan_of(const weft_call *call, int32_t tiles)
{
    return weft_cuda_project_fwd_plan(call->tokens, call->streams * call->channels, tiles,
                                      tiles <= 3 && call->dtype == WEFT_BF16, call->sms);
}

struct fwd_room {
    float *psi;
    float *partial;
};

static fwd_room fwd_lay_out(weft_arena *arena, const weft_call *call, const weft_project_fwd_plan *plan)
{
    fwd_room r = {};
    r.psi = (float *)weft_arena_take(arena, (size_t)(call->rows * call->streams * call->channels) * 4);
    if (plan->splits > 1)
        r.partial = (float *)weft_arena_take(arena, (size_t)(plan->splits * call->tokens * (call->rows + 1)) * 4);
    return r;
}

template <class T> static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_project_fwd_args *a = (const weft_mhc_project_fwd_args *)args;
    const int32_t tiles = weft_cuda_project_row_tiles(call->rows);
    const stream_layout order = row_order(&a->x);
    if (call->tokens == 0) return WEFT_OK;
    if (tiles == 0 || !rows_are_plain(&a->x, order)) return weft_cuda_project_any_fwd(call, a);

    const columns k = columns_of(call, order);
    const weft_project_fwd_plan plan = plan_of(call, tiles);
    weft_arena arena = cuda_arena(call);
    const fwd_room room = fwd_lay_out(&arena, call, &plan);
    project_args p = {.x = a->x.data,
                      .psi = (const float *)a->phi.data,
                      .partial = room.partial,
                      .h = view_of(&a->h),
                      .ms = view_of(&a->ms),
                      .tokens = call->tokens,
                      .x_stride = a->x.stride[0],
                      .psi_stride = a->phi.stride[0],
                      .columns = k.count,
                      .rows = (int32_t)call->rows,
                      .splits = plan.splits,
                      .psi_is_ready = weft_project_phi_is_psi(&a->phi, &a->norm_weight, order),
                      .mean = 1.0f / (float)k.count};
    if (!p.psi_is_ready) {
        p.psi = room.psi, p.psi_stride = k.count;
        const weft_status status = weft_cuda_project_spread(call, &a->phi, &a->norm_weight, k, room.psi);
        if (status != WEFT_OK) return status;
    }
    const weft_status status = launch_tiles<T>(call, p, &plan, tiles);
    if (status != WEFT_OK || plan.splits == 1) return status;
    switch (plan.splits) {
    case 4: return launch_gather<4>(call, p);
    case 16: return launch_gather<16>(call, p);
    default: return launch_gather<64>(call, p);
    }
}

static weft_status fwd_any(const weft_call *call, const void *args)
{
    return call->tokens == 0 ? WEFT_OK : weft_cuda_project_any_fwd(call, (const weft_mhc_project_fwd_args *)args);
}

static size_t fwd_workspace(const weft_call *call, const void *)
{
    const int32_t tiles = weft_cuda_project_row_tiles(call->rows);
    if (tiles == 0) return 0;
    const weft_project_fwd_plan plan = plan_of(call, tiles);
    weft_arena arena = cuda_arena(call);
    fwd_lay_out(&arena, call, &plan);
    return weft_arena_bytes(&arena);
}

const weft_kernel weft_cuda_mhc_project_fwd[] = {{WEFT_BF16, 0, fwd<bf16>, fwd_workspace},
                                                 {WEFT_F16, 0, fwd<f16>, fwd_workspace},
                                                 {WEFT_F32, 0, fwd_any, NULL},
                                                 {}};
