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

/* A block owns ROWS tokens and the columns of its split. Stages of 64 columns go round in shared memory: x with its 16-byte
 * pieces swapped by the row number, so that neither the copy nor ldmatrix meets a bank twice, and psi as it is. While a
 * stage is multiplied, the psi of the next one is taken apart into the registers' order: one 16-byte piece per (step of 16
 * columns, tile of 8 rows, lane), hi and lo of B's two registers. */
template <class T, int NT, int MT, int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32, 1) project_kernel(const project_args p)
{
    constexpr int STEPS = PROJECT_STAGE / 16, ROWS = WARPS * MT * 16, PIECES = STEPS * 2, THREADS = WARPS * 32;
    constexpr int X_BYTES = ROWS * PIECES * 16;
    constexpr int PSI_PITCH = PROJECT_STAGE * 4 + 32; /* four rows of eight bytes a lane in 32 different banks */
    constexpr int STAGE_BYTES = X_BYTES + NT * 8 * PSI_PITCH, SPLIT_BYTES = STEPS * NT * 512;
    static_assert(ROWS * PIECES % THREADS == 0 && PIECES == 8, "every thread copies the same number of pieces");
    extern __shared__ __align__(128) char shared[];

    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int split = (int)(blockIdx.x % (unsigned)p.splits), leaves = PROJECT_LEAVES / p.splits;
    const int64_t token0 = (int64_t)(blockIdx.x / (unsigned)p.splits) * ROWS;
    const int64_t stages = (p.columns + PROJECT_STAGE - 1) / PROJECT_STAGE;
    const int64_t first = weft_project_leaf(stages, leaves * split),
                  last = weft_project_leaf(stages, leaves * (split + 1));
    char *const taken = shared + STAGES * STAGE_BYTES;

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
        for (int i = tid; i < NT * 8 * 16; i += THREADS) {
            const int row = i / 16, piece = i % 16;
            const int64_t column = stage * PROJECT_STAGE + piece * 4;
            const bool valid = row < p.rows && column < p.columns;
            copy_async(to + row * PSI_PITCH + piece * 16, p.psi + (valid ? row * p.psi_stride + column : 0), valid);
        }
    };
    auto take_apart = [&](int slot, int buffer) {
        const char *from = shared + slot * STAGE_BYTES + X_BYTES;
        uint4 *to = (uint4 *)(taken + buffer * SPLIT_BYTES);
        for (int i = tid; i < STEPS * NT * 32; i += THREADS) {
            const int l = i & 31, row = i / 32 % NT * 8 + (l >> 2), step = i / 32 / NT;
            const float2 *v = (const float2 *)(from + row * PSI_PITCH + (step * 16 + 2 * (l & 3)) * 4);
            const float2 a = v[0], b = v[4];
            uint4 piece;
            split2(piece.x, piece.z, a.x, a.y);
            split2(piece.y, piece.w, b.x, b.y);
            to[i] = piece;
        }
    };

    /* x does not depend on the kernel before this one; psi may. */
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (first + s < last) {
            load_x(first + s, s);
            if (p.psi_is_ready) load_psi(first + s, s);
        }
        if (p.psi_is_ready) copy_commit();
    }
    wait_for_previous();
    let_next_begin();
    if (!p.psi_is_ready) {
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            if (first + s < last) load_psi(first + s, s);
            copy_commit();
        }
    }
    copy_wait<STAGES - 2>();
    __syncthreads();
    if (first < last) take_apart(0, 0);

    float leaf[MT][NT][4] = {}, four[MT][NT][4] = {}, sixteen[MT][NT][4] = {}, total[MT][NT][4] = {};
    float leaf_sq[MT][2] = {}, four_sq[MT][2] = {}, sixteen_sq[MT][2] = {}, total_sq[MT][2] = {};
    int slot = 0, index = leaves * split;
    int64_t leaf_end = weft_project_leaf(stages, index + 1);
    while (leaf_end == first && index < leaves * (split + 1)) leaf_end = weft_project_leaf(stages, ++index + 1);
    for (int64_t stage = first; stage < last; stage++) {
        /* Stage + 1 must be there too, for its psi. */
        copy_wait<STAGES - 3>();
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
        const int buffer = (int)(stage - first) & 1;
        const uint4 *psi = (const uint4 *)(taken + buffer * SPLIT_BYTES);
        const uint32_t x_base = shared_address(shared) + slot * STAGE_BYTES;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (stage + 1 < last) take_apart(slot, buffer ^ 1);
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
                    leaf_sq[m][e & 1] = fmaf(v0, v0, leaf_sq[m][e & 1]);
                    leaf_sq[m][e & 1] = fmaf(v1, v1, leaf_sq[m][e & 1]);
                    split_pair(hi[m][e], lo[m][e], a[e], T());
                }
            }
#pragma unroll
            for (int q = 0; q < NT; q++) {
                const uint4 b = psi[(step * NT + q) * 32 + lane];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma16(leaf[m][q], hi[m][0], hi[m][1], hi[m][2], hi[m][3], b.x, b.y);
                    mma16(leaf[m][q], hi[m][0], hi[m][1], hi[m][2], hi[m][3], b.z, b.w);
                    if constexpr (number<T>::dtype == WEFT_F16)
                        mma16(leaf[m][q], lo[m][0], lo[m][1], lo[m][2], lo[m][3], b.x, b.y);
                }
            }
        }
        /* The end of a leaf, and of the empty ones behind it where there are fewer stages than leaves. */
        while (stage + 1 == leaf_end && index < leaves * (split + 1)) {
            index++;
            leaf_end = weft_project_leaf(stages, index + 1);
            const bool full4 = index % PROJECT_FAN == 0, full16 = index % (PROJECT_FAN * PROJECT_FAN) == 0;
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float v = leaf_sq[m][e];
                    v += __shfl_xor_sync(0xffffffffu, v, 1);
                    v += __shfl_xor_sync(0xffffffffu, v, 2);
                    four_sq[m][e] += v, leaf_sq[m][e] = 0.0f;
                    if (full4) sixteen_sq[m][e] += four_sq[m][e], four_sq[m][e] = 0.0f;
                    if (full16) total_sq[m][e] += sixteen_sq[m][e], sixteen_sq[m][e] = 0.0f;
                }
#pragma unroll
                for (int q = 0; q < NT; q++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        four[m][q][e] += leaf[m][q][e], leaf[m][q][e] = 0.0f;
                        if (full4) sixteen[m][q][e] += four[m][q][e], four[m][q][e] = 0.0f;
                        if (full16) total[m][q][e] += sixteen[m][q][e], sixteen[m][q][e] = 0.0f;
                    }
            }
        }
    }

    /* A split holds its subtree at the level it is cut at; the other levels are empty. */
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
                    const int row = q * 8 + (lane & 3) * 2 + e, at = half * 2 + e;
                    if (row >= p.rows) continue;
                    const float v = total[m][q][at] + (sixteen[m][q][at] + four[m][q][at]);
                    if (out)
                        out[row] = v;
                    else
                        put(p.h, token * p.h.stride[0] + row * p.h.stride[1], v);
                }
            if ((lane & 3) == 0) {
                const float v = total_sq[m][half] + (sixteen_sq[m][half] + four_sq[m][half]);
                if (out)
                    out[p.rows] = v;
                else if (has(p.ms))
                    put(p.ms, token * p.ms.stride[0], v * p.mean);
            }
        }
}

/* Adds the partial sums of a token in the order that one block would have added them. */
__global__ void gather_kernel(const project_args p)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = p.tokens * (p.rows + 1);
    wait_for_previous();
    if (i >= step) return;
    const int64_t token = i / (p.rows + 1);
    const int row = (int)(i % (p.rows + 1)), fours = p.splits >= 16 ? 4 : 1, leaves = p.splits >= 64 ? 4 : 1;
    const float *from = p.partial + i;
    float total = 0.0f;
    for (int s = 0; s < 4; s++) {
        float sixteen = 0.0f;
        for (int f = 0; f < fours; f++) {
            float four = 0.0f;
#pragma unroll 4
            for (int l = 0; l < leaves; l++, from += step) four += *from;
            sixteen += four;
        }
        total += sixteen;
    }
    if (row < p.rows)
        put(p.h, token * p.h.stride[0] + row * p.h.stride[1], total);
    else if (has(p.ms))
        put(p.ms, token * p.ms.stride[0], total * p.mean);
}

/* ---- launch ------------------------------------------------------------------------------------------------------------ */

template <class T, int NT, int MT, int WARPS, int STAGES>
static weft_status launch_project(const weft_call *call, const project_args &p, int64_t blocks)
{
    constexpr size_t stage = (size_t)WARPS * MT * 16 * PROJECT_STAGE * 2 + NT * 8 * (PROJECT_STAGE * 4 + 32);
    constexpr size_t bytes = stage * STAGES + 2 * PROJECT_STAGE / 16 * NT * 512;
    static_assert(bytes <= 227 * 1024, "more shared memory than a block has");
    return launch(
        call, "projection", project_kernel<T, NT, MT, WARPS, STAGES>,
        {.grid = (unsigned)blocks, .block = WARPS * 32, .shared = bytes, .order = p.psi_is_ready ? AFTER : OVERLAP},
        p);
}

template <class T>
static weft_status launch_tiles(const weft_call *call, const project_args &p, const weft_project_fwd_plan *plan,
                                int32_t row_tiles)
{
    switch (row_tiles * 1000 + plan->tile_tokens) {
    case 1256: return launch_project<T, 1, 2, 8, 5>(call, p, plan->blocks);
    case 1128: return launch_project<T, 1, 1, 8, 5>(call, p, plan->blocks);
    case 1032: return launch_project<T, 1, 1, 2, 5>(call, p, plan->blocks);
    case 3256: return launch_project<T, 3, 2, 8, 5>(call, p, plan->blocks);
    case 3128: return launch_project<T, 3, 1, 8, 5>(call, p, plan->blocks);
    case 3032: return launch_project<T, 3, 1, 2, 5>(call, p, plan->blocks);
    case 10128: return launch_project<T, 10, 1, 8, 4>(call, p, plan->blocks);
    default: return launch_project<T, 10, 1, 2, 4>(call, p, plan->blocks);
    }
}

/* phi can stand for psi: fp32 rows in the order of x's columns, which a copy of 16 bytes can reach. */
static bool phi_is_psi(const weft_tensor *phi, const weft_tensor *norm, stream_layout order)
{
    return phi->dtype == WEFT_F32 && !weft_has(norm) && row_order(phi) == order &&
           (phi->stride[0] % 4 == 0 || phi->shape[0] == 1) && (uintptr_t)phi->data % 16 == 0;
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
    const weft_project_fwd_plan plan = weft_cuda_project_fwd_plan(call->tokens, k.count, tiles, call->sms);
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
                      .psi_is_ready = phi_is_psi(&a->phi, &a->norm_weight, order),
                      .mean = 1.0f / (float)k.count};
    if (!p.psi_is_ready) {
        const weights w = {view_of(&a->phi), view_of(&a->norm_weight), (int32_t)call->rows};
        const dim3 grid((unsigned)((k.count + 255) / 256), (unsigned)call->rows);
        p.psi = room.psi, p.psi_stride = k.count;
        const weft_status status = launch(call, "psi", spread_kernel, {.grid = grid, .block = 256}, room.psi, w, k);
        if (status != WEFT_OK) return status;
    }
    const weft_status status = launch_tiles<T>(call, p, &plan, tiles);
    if (status != WEFT_OK || plan.splits == 1) return status;
    const int64_t sums = call->tokens * (call->rows + 1);
    return launch(call, "sums", gather_kernel,
                  {.grid = grid_of((sums + 127) / 128), .block = 128, .order = OVERLAP}, p);
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
    fwd_lay_out(&arena, call, &plan);
    return weft_arena_bytes(&arena);
}

const weft_kernel weft_cuda_mhc_project_fwd[] = {{WEFT_BF16, 0, fwd<bf16>, fwd_workspace},
                                                 {WEFT_F16, 0, fwd<f16>, fwd_workspace},
                                                 {WEFT_F32, 0, fwd_any, NULL},
                                                 {}};
