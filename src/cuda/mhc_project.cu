/* SPDX-License-Identifier: Apache-2.0
 *
 * Projection and mean square, forward [M1]. Reads x once (2nC bytes a token in 16 bits), writes 4N + 4 bytes a token.
 *
 * Three launches. `spread` takes psi = phi * norm_weight apart into bf16 hi + lo, in the order in which the lanes of a
 * warp want it. `project` multiplies: x is exact in bf16 (f16 becomes hi + lo too), so two products a tile give sixteen
 * bits of psi, and the squares are summed from the same registers. `gather` adds the partial sums where the columns of a
 * token were split over blocks; a plan without splits does not need it.
 *
 * The order of a token's sum depends on K = n*C alone: 16 groups of columns, each summed by the tensor cores from left
 * to right, 4 groups make a sum, 4 sums make the result. A split hands on whole groups or whole sums. */
#include "cuda/mhc_project.cuh"

/* ---- psi as fragments ------------------------------------------------------------------------------------------------ */

/* One 16-byte piece per (step of 16 columns, tile of 8 rows, lane): hi and lo of B's two registers. */
__global__ void spread_kernel(uint4 *to, weights w, columns k, int32_t row_tiles, int64_t steps)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    let_next_begin();
    if (i >= steps * row_tiles * 32) return;
    const int lane = i & 31;
    const uint32_t row = (uint32_t)(i / 32 % row_tiles) * 8 + (lane >> 2);
    const int64_t first = i / 32 / row_tiles * 16 + 2 * (lane & 3);
    float v[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int64_t column = first + (e & 1) + (e >> 1) * 8;
        uint32_t stream, channel;
        v[e] = 0.0f;
        if (column < k.count && row < (uint32_t)w.rows) {
            column_at(k, (uint32_t)column, stream, channel);
            v[e] = psi_at(w, row, stream, channel);
        }
    }
    uint4 piece;
    split2(piece.x, piece.z, v[0], v[1]);
    split2(piece.y, piece.w, v[2], v[3]);
    to[i] = piece;
}

/* ---- the product ------------------------------------------------------------------------------------------------------ */

struct project_args {
    const void *x;
    const uint4 *psi;
    float *partial; /* [splits][tokens][rows + 1], or NULL: straight to h and ms */
    view h, ms;
    int64_t tokens, x_stride, columns, group_columns;
    int32_t rows, splits;
    float mean; /* 1 / K */
};

/* A block owns ROWS tokens and the columns of its split. Stages of STEPS * 16 columns go round in shared memory: x with
 * its 16-byte pieces swapped by the row number, so that neither the copy nor ldmatrix meets a bank twice. */
template <class T, int NT, int MT, int WARPS, int STEPS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32, 1) project_kernel(const project_args p)
{
    constexpr int ROWS = WARPS * MT * 16, PIECES = STEPS * 2, THREADS = WARPS * 32;
    constexpr int X_BYTES = ROWS * PIECES * 16, PSI_PIECES = STEPS * NT * 32;
    constexpr int STAGE_BYTES = X_BYTES + PSI_PIECES * 16;
    static_assert(PROJECT_UNIT % (STEPS * 16) == 0, "a group is a whole number of stages");
    static_assert(ROWS * PIECES % THREADS == 0 && PIECES % 8 == 0, "every thread copies the same number of pieces");
    extern __shared__ __align__(128) char shared[];

    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int split = (int)(blockIdx.x % (unsigned)p.splits);
    const int64_t token0 = (int64_t)(blockIdx.x / (unsigned)p.splits) * ROWS;
    const int64_t per_group = p.group_columns / (STEPS * 16);
    const int64_t all_stages = (p.columns + STEPS * 16 - 1) / (STEPS * 16);
    const int64_t first = per_group * (PROJECT_GROUPS / p.splits) * split;
    int64_t last = per_group * (PROJECT_GROUPS / p.splits) * (split + 1);
    if (last > all_stages) last = all_stages;

    auto load_x = [&](int64_t stage, int slot) {
        const uint32_t to = shared_address(shared) + slot * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < ROWS * PIECES / THREADS; i++) {
            const int at = i * THREADS + tid, row = at / PIECES, piece = at % PIECES;
            const int64_t token = token0 + row, column = (stage * PIECES + piece) * 8;
            const bool valid = token < p.tokens && column < p.columns;
            const T *from = (const T *)p.x + (valid ? token * p.x_stride + column : 0);
            copy_async(to + (row * PIECES + (piece ^ (row & 7))) * 16, from, valid);
        }
    };
    auto load_psi = [&](int64_t stage, int slot) {
        const uint32_t to = shared_address(shared) + slot * STAGE_BYTES + X_BYTES;
        const uint4 *from = p.psi + stage * PSI_PIECES;
        for (int i = tid; i < PSI_PIECES; i += THREADS) copy_async(to + i * 16, from + i, true);
    };

    /* x does not depend on the kernel before this one, psi does. */
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        if (first + s < last) load_x(first + s, s);
    wait_for_previous();
    let_next_begin();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (first + s < last) load_psi(first + s, s);
        copy_commit();
    }

    float group[MT][NT][4] = {}, sum[MT][NT][4] = {}, total[MT][NT][4] = {};
    float group_sq[MT][2] = {}, sum_sq[MT][2] = {}, total_sq[MT][2] = {};
    int slot = 0;
    int64_t left = per_group, groups_left = PROJECT_SUPER;
    for (int64_t stage = first; stage < last; stage++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        {
            const int64_t next = stage + STAGES - 1;
            const int next_slot = slot == 0 ? STAGES - 1 : slot - 1;
            if (next < last) {
                load_x(next, next_slot);
                load_psi(next, next_slot);
            }
            copy_commit();
        }
        const char *base = shared + slot * STAGE_BYTES;
        const uint4 *psi = (const uint4 *)(base + X_BYTES);
        const uint32_t x_base = shared_address(base);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t hi[MT][4], lo[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const int row = (warp * MT + m) * 16 + (lane & 15), piece = step * 2 + (lane >> 4);
                uint32_t a[4];
                ldmatrix4(a, x_base + (row * PIECES + (piece ^ (row & 7))) * 16);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float v0, v1;
                    widen2(v0, v1, a[e], T());
                    group_sq[m][e & 1] = fmaf(v0, v0, group_sq[m][e & 1]);
                    group_sq[m][e & 1] = fmaf(v1, v1, group_sq[m][e & 1]);
                    split_pair(hi[m][e], lo[m][e], a[e], T());
                }
            }
#pragma unroll
            for (int q = 0; q < NT; q++) {
                const uint4 b = psi[(step * NT + q) * 32 + lane];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma16(group[m][q], hi[m][0], hi[m][1], hi[m][2], hi[m][3], b.x, b.y);
                    mma16(group[m][q], hi[m][0], hi[m][1], hi[m][2], hi[m][3], b.z, b.w);
                    if constexpr (number<T>::dtype == WEFT_F16)
                        mma16(group[m][q], lo[m][0], lo[m][1], lo[m][2], lo[m][3], b.x, b.y);
                }
            }
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (--left > 0 && stage + 1 < last) continue;
        /* The end of a group. */
        left = per_group;
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int q = 0; q < NT; q++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[m][q][e] += group[m][q][e], group[m][q][e] = 0.0f;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float v = group_sq[m][e];
                v += __shfl_xor_sync(0xffffffffu, v, 1);
                v += __shfl_xor_sync(0xffffffffu, v, 2);
                sum_sq[m][e] += v;
                group_sq[m][e] = 0.0f;
            }
        }
        if (--groups_left > 0 && stage + 1 < last) continue;
        groups_left = PROJECT_SUPER;
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int q = 0; q < NT; q++)
#pragma unroll
                for (int e = 0; e < 4; e++) total[m][q][e] += sum[m][q][e], sum[m][q][e] = 0.0f;
#pragma unroll
            for (int e = 0; e < 2; e++) total_sq[m][e] += sum_sq[m][e], sum_sq[m][e] = 0.0f;
        }
    }

#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t token = token0 + (warp * MT + m) * 16 + (lane >> 2) + half * 8;
            if (token >= p.tokens) continue;
            float *out = p.partial ? p.partial + (split * p.tokens + token) * (p.rows + 1) : NULL;
#pragma unroll
            for (int q = 0; q < NT; q++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int row = q * 8 + (lane & 3) * 2 + e;
                    if (row >= p.rows) continue;
                    if (out)
                        out[row] = total[m][q][half * 2 + e];
                    else
                        put(p.h, token * p.h.stride[0] + row * p.h.stride[1], total[m][q][half * 2 + e]);
                }
            if ((lane & 3) == 0) {
                if (out)
                    out[p.rows] = total_sq[m][half];
                else if (has(p.ms))
                    put(p.ms, token * p.ms.stride[0], total_sq[m][half] * p.mean);
            }
        }
}

/* Adds the partial sums of a token in the order the unsplit kernel has: with 16 splits by fours. */
__global__ void gather_kernel(const project_args p)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = p.tokens * (p.rows + 1);
    wait_for_previous();
    if (i >= step) return;
    const int64_t token = i / (p.rows + 1);
    const int row = (int)(i % (p.rows + 1)), in_sum = p.splits / PROJECT_SUPER;
    float total = 0.0f;
    for (int s = 0; s < PROJECT_SUPER; s++) {
        float sum = 0.0f;
        for (int g = 0; g < in_sum; g++) sum += p.partial[(s * in_sum + g) * step + i];
        total += sum;
    }
    if (row < p.rows)
        put(p.h, token * p.h.stride[0] + row * p.h.stride[1], total);
    else if (has(p.ms))
        put(p.ms, token * p.ms.stride[0], total * p.mean);
}

/* ---- launch ------------------------------------------------------------------------------------------------------------ */

template <class T, int NT, int MT, int WARPS, int STEPS, int STAGES>
static weft_status launch_project(const weft_call *call, const project_args &p, int64_t blocks)
{
    constexpr size_t stage = (size_t)WARPS * MT * 16 * STEPS * 32 + (size_t)STEPS * NT * 512;
    static_assert(stage * STAGES <= 227 * 1024, "more shared memory than a block has");
    return launch(call, "projection", project_kernel<T, NT, MT, WARPS, STEPS, STAGES>,
                  {.grid = (unsigned)blocks, .block = WARPS * 32, .shared = stage * STAGES, .order = OVERLAP}, p);
}

template <class T>
static weft_status launch_tiles(const weft_call *call, const project_args &p, const weft_project_fwd_plan *plan,
                                int32_t row_tiles)
{
    switch (row_tiles * 1000 + plan->tile_tokens) {
    case 1256: return launch_project<T, 1, 2, 8, 4, 5>(call, p, plan->blocks);
    case 1128: return launch_project<T, 1, 1, 8, 8, 5>(call, p, plan->blocks);
    case 1032: return launch_project<T, 1, 1, 2, 8, 4>(call, p, plan->blocks);
    case 3256: return launch_project<T, 3, 2, 8, 4, 5>(call, p, plan->blocks);
    case 3128: return launch_project<T, 3, 1, 8, 8, 5>(call, p, plan->blocks);
    case 3032: return launch_project<T, 3, 1, 2, 8, 4>(call, p, plan->blocks);
    case 10128: return launch_project<T, 10, 1, 8, 4, 5>(call, p, plan->blocks);
    default: return launch_project<T, 10, 1, 2, 4, 4>(call, p, plan->blocks);
    }
}

struct fwd_room {
    uint4 *psi;
    float *partial;
};

static fwd_room fwd_lay_out(weft_arena *arena, const weft_call *call, const weft_project_fwd_plan *plan,
                            int32_t tiles)
{
    fwd_room r = {};
    const int64_t k = call->streams * call->channels;
    const int64_t steps = (k + PROJECT_UNIT - 1) / PROJECT_UNIT * (PROJECT_UNIT / 16);
    r.psi = (uint4 *)weft_arena_take(arena, (size_t)(steps * tiles) * 512);
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
    const weft_project_fwd_plan plan = weft_cuda_project_fwd_plan(call->tokens, k.count, tiles, call->sms);
    weft_arena arena = cuda_arena(call);
    const fwd_room room = fwd_lay_out(&arena, call, &plan, tiles);
    const weights w = {view_of(&a->phi), view_of(&a->norm_weight), (int32_t)call->rows};
    const int64_t steps = (k.count + PROJECT_UNIT - 1) / PROJECT_UNIT * (PROJECT_UNIT / 16),
                  pieces = steps * tiles * 32;
    weft_status status = launch(call, "psi", spread_kernel, {.grid = grid_of((pieces + 255) / 256), .block = 256},
                                room.psi, w, k, tiles, steps);
    if (status != WEFT_OK) return status;
    const project_args p = {.x = a->x.data,
                            .psi = room.psi,
                            .partial = room.partial,
                            .h = view_of(&a->h),
                            .ms = view_of(&a->ms),
                            .tokens = call->tokens,
                            .x_stride = a->x.stride[0],
                            .columns = k.count,
                            .group_columns = plan.group_columns,
                            .rows = (int32_t)call->rows,
                            .splits = plan.splits,
                            .mean = 1.0f / (float)k.count};
    status = launch_tiles<T>(call, p, &plan, tiles);
    if (status != WEFT_OK || plan.splits == 1) return status;
    const int64_t sums = call->tokens * (call->rows + 1);
    return launch(call, "sums", gather_kernel,
                  {.grid = grid_of((sums + 255) / 256), .block = 256, .order = OVERLAP}, p);
}

static weft_status fwd_any(const weft_call *call, const void *args)
{
    return call->tokens == 0 ? WEFT_OK : weft_cuda_project_any_fwd(call, (const weft_mhc_project_fwd_args *)args);
}

static size_t fwd_workspace(const weft_call *call, const void *)
{
    const int32_t tiles = weft_cuda_project_row_tiles(call->rows);
    if (tiles == 0) return 0;
    const weft_project_fwd_plan plan =
        weft_cuda_project_fwd_plan(call->tokens, call->streams * call->channels, tiles, call->sms);
    weft_arena arena = cuda_arena(call);
    fwd_lay_out(&arena, call, &plan, tiles);
    return weft_arena_bytes(&arena);
}

const weft_kernel weft_cuda_mhc_project_fwd[] = {{WEFT_BF16, 0, fwd<bf16>, fwd_workspace},
                                                 {WEFT_F16, 0, fwd<f16>, fwd_workspace},
                                                 {WEFT_F32, 0, fwd_any, NULL},
                                                 {}};
