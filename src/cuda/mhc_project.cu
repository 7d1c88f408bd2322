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

enum { WARPS = 8 };

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

/* A block owns ROWS tokens and the columns of its split, a warp MT * 16 of these tokens. Each warp has a ring of stages of
 * 64 columns of its own x and waits for nobody, with its 16-byte pieces swapped by the row number so that neither the copy
 * nor ldmatrix meets a bank twice. psi is shared: chunks of CHUNK stages, taken apart into the registers' order while the
 * chunk before is multiplied, one barrier a chunk. One 16-byte piece per (step of 16 columns, tile of 8 rows, lane): hi and
 * lo of B's two registers.
 * In lockstep, with a barrier a stage, a stage took 2260 cycles where memory leaves 2090. */
template <class T, int NT, int MT, int STAGES, int CHUNK>
__global__ void __launch_bounds__(WARPS * 32, 1) project_kernel(const project_args p)
{
    constexpr int STEPS = PROJECT_STAGE / 16, ROWS = WARPS * MT * 16, THREADS = WARPS * 32;
    constexpr int STAGE_BYTES = MT * 16 * PROJECT_STAGE * 2, CHUNK_PIECES = CHUNK * STEPS * NT * 32;
    constexpr int OWN = (CHUNK_PIECES + THREADS - 1) / THREADS; /* pieces of a chunk that a thread takes apart */
    constexpr bool AHEAD = NT <= 3;                             /* registers to fetch them ahead */
    extern __shared__ __align__(128) char shared[];

    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int split = (int)(blockIdx.x % (unsigned)p.splits), leaves = PROJECT_LEAVES / p.splits;
    const int64_t token0 = (int64_t)(blockIdx.x / (unsigned)p.splits) * ROWS + warp * MT * 16;
    const int64_t stages = (p.columns + PROJECT_STAGE - 1) / PROJECT_STAGE;
    const int64_t first = weft_project_leaf(stages, leaves * split),
                  last = weft_project_leaf(stages, leaves * (split + 1));
    uint4 *const taken = (uint4 *)(shared + WARPS * STAGES * STAGE_BYTES);
    const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;

    /* Lane l copies piece l % 8 of rows l / 8, l / 8 + 4, ... */
    const T *const x_from = (const T *)p.x + (token0 + (lane >> 3)) * p.x_stride + (lane & 7) * 8;
    const uint32_t x_to[2] = {(uint32_t)(lane >> 3) * 128 + (((lane & 7) ^ (lane >> 3)) << 4),
                              (uint32_t)(lane >> 3) * 128 + (((lane & 7) ^ (lane >> 3) ^ 4) << 4)};
    const int64_t rows_left = p.tokens - token0 - (lane >> 3);
    auto load_x = [&](int64_t stage, int slot) {
        const bool inside = stage * PROJECT_STAGE + (lane & 7) * 8 < p.columns;
        const T *from = x_from + stage * PROJECT_STAGE;
#pragma unroll
        for (int i = 0; i < MT * 4; i++) {
            const bool valid = inside && i * 4 < rows_left;
            copy_async(ring + slot * STAGE_BYTES + i * 512 + x_to[i & 1], valid ? from + i * 4 * p.x_stride : p.x,
                       valid);
        }
    };
    /* The four numbers of a piece: columns 2t, 2t + 1, 2t + 8, 2t + 9 of its step, row g of its tile. */
    auto fetch = [&](float2(&v)[2], int64_t stage, int piece) {
        const int l = piece & 31, row = piece / 32 % NT * 8 + (l >> 2);
        const int64_t column = stage * PROJECT_STAGE + piece / 32 / NT * 16 + 2 * (l & 3);
        const float *from = p.psi + row * p.psi_stride + column;
        v[0] = v[1] = make_float2(0.0f, 0.0f);
        if (row >= p.rows || piece >= CHUNK_PIECES) return;
        if (column < p.columns) v[0] = make_float2(from[0], from[1]);
        if (column + 8 < p.columns) v[1] = make_float2(from[8], from[9]);
    };
    auto take_apart = [&](int buffer, int piece, const float2(&v)[2]) {
        uint4 to;
        split2(to.x, to.z, v[0].x, v[0].y);
        split2(to.y, to.w, v[1].x, v[1].y);
        if (CHUNK_PIECES % THREADS == 0 || piece < CHUNK_PIECES) taken[buffer * CHUNK_PIECES + piece] = to;
    };

    /* x does not depend on the kernel before this one; psi may. */
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (first + s < last) load_x(first + s, s);
        copy_commit();
    }
    wait_for_previous();
    let_next_begin();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        float2 v[2];
        fetch(v, first, i * THREADS + tid);
        take_apart(0, i * THREADS + tid, v);
    }

    /* With many rows the two upper levels, which are rarely touched, live in shared memory. */
    constexpr bool DEEP = NT > 3;
    float *const deep = (float *)(taken + 2 * CHUNK_PIECES) + tid;
    float leaf[MT][NT][4] = {}, four[MT][NT][4] = {}, sixteen_[DEEP ? 1 : MT][DEEP ? 1 : NT][4] = {},
          total_[DEEP ? 1 : MT][DEEP ? 1 : NT][4] = {};
    auto sixteen = [&](int m, int q, int e) -> float & {
        return DEEP ? deep[(q * 4 + e) * THREADS] : sixteen_[DEEP ? 0 : m][DEEP ? 0 : q][e];
    };
    auto total = [&](int m, int q, int e) -> float & {
        return DEEP ? deep[((NT + q) * 4 + e) * THREADS] : total_[DEEP ? 0 : m][DEEP ? 0 : q][e];
    };
    for (int i = 0; i < (DEEP ? 2 * NT * 4 : 0); i++) deep[i * THREADS] = 0.0f;
    float leaf_sq[MT][2] = {}, four_sq[MT][2] = {}, sixteen_sq[MT][2] = {}, total_sq[MT][2] = {};
    int slot = 0, index = leaves * split;
    int64_t leaf_end = weft_project_leaf(stages, index + 1);
    while (leaf_end == first && index < leaves * (split + 1)) leaf_end = weft_project_leaf(stages, ++index + 1);
    for (int64_t chunk = first; chunk < last; chunk += CHUNK) {
        const int buffer = (int)((chunk - first) / CHUNK) & 1;
        const bool more = chunk + CHUNK < last;
        float2 ahead[AHEAD ? OWN : 1][2];
        __syncthreads();
        if (AHEAD && more) {
#pragma unroll
            for (int i = 0; i < OWN; i++) fetch(ahead[AHEAD ? i : 0], chunk + CHUNK, i * THREADS + tid);
        }
#pragma unroll 1
        for (int s = 0; s < CHUNK && chunk + s < last; s++) {
            const int64_t stage = chunk + s;
            copy_wait<STAGES - 2>();
            __syncwarp();
            if (stage + STAGES - 1 < last) load_x(stage + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
            copy_commit();
            const uint4 *psi = taken + buffer * CHUNK_PIECES + s * (STEPS * NT * 32) + lane;
            const uint32_t x_at = ring + slot * STAGE_BYTES + (lane & 15) * 128;
            slot = slot + 1 == STAGES ? 0 : slot + 1;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                uint32_t hi[MT][4], lo[MT][4];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    uint32_t a[4];
                    ldmatrix4(a, x_at + m * 2048 + (((step * 2 + (lane >> 4)) ^ (lane & 7)) << 4));
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
                            if (full4) sixteen(m, q, e) += four[m][q][e], four[m][q][e] = 0.0f;
                            if (full16) total(m, q, e) += sixteen(m, q, e), sixteen(m, q, e) = 0.0f;
                        }
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
                    if (row >= p.rows) continue;
                    const float v = total(m, q, at) + (sixteen(m, q, at) + four[m][q][at]);
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

/* Adds the partial sums of a token in the order that one block would have added them. Four lanes share a sum, each with a
 * quarter of the partial sums on its way at once. */
template <int SPLITS> __global__ void gather_kernel(const project_args p)
{
    constexpr int FOURS = SPLITS >= 16 ? 4 : 1, LEAVES = SPLITS >= 64 ? 4 : 1;
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 4, step = p.tokens * (p.rows + 1);
    const int quarter = threadIdx.x & 3;
    float v[FOURS * LEAVES] = {};
    wait_for_previous();
#pragma unroll
    for (int s = 0; s < FOURS * LEAVES; s++)
        if (i < step) v[s] = p.partial[(quarter * FOURS * LEAVES + s) * step + i];
    float sixteen = 0.0f, total = 0.0f;
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        float four = 0.0f;
#pragma unroll
        for (int l = 0; l < LEAVES; l++) four += v[f * LEAVES + l];
        sixteen += four;
    }
#pragma unroll
    for (int s = 0; s < 4; s++) total += __shfl_sync(0xffffffffu, sixteen, s, 4);
    if (i >= step || quarter) return;
    const int64_t token = i / (p.rows + 1);
    const int row = (int)(i % (p.rows + 1));
    if (row < p.rows)
        put(p.h, token * p.h.stride[0] + row * p.h.stride[1], total);
    else if (has(p.ms))
        put(p.ms, token * p.ms.stride[0], total * p.mean);
}

/* ---- launch ------------------------------------------------------------------------------------------------------------ */

template <class T, int NT, int MT, int STAGES, int CHUNK>
static weft_status launch_project(const weft_call *call, const project_args &p, int64_t blocks)
{
    constexpr size_t x = (size_t)WARPS * STAGES * MT * 16 * PROJECT_STAGE * 2;
    constexpr size_t psi = 2 * CHUNK * PROJECT_STAGE / 16 * NT * 512,
                     deep = NT > 3 ? 2 * NT * 4 * WARPS * 32 * 4 : 0;
    constexpr size_t bytes = x + psi + deep;
    static_assert(bytes <= 227 * 1024, "more shared memory than a block has");
    return launch(
        call, "projection", project_kernel<T, NT, MT, STAGES, CHUNK>,
        {.grid = (unsigned)blocks, .block = WARPS * 32, .shared = bytes, .order = p.psi_is_ready ? AFTER : OVERLAP},
        p);
}

template <class T>
static weft_status launch_tiles(const weft_call *call, const project_args &p, const weft_project_fwd_plan *plan,
                                int32_t row_tiles)
{
    if constexpr (number<T>::dtype == WEFT_BF16) {
        if (plan->tile_tokens == 256 && row_tiles == 1) return launch_project<T, 1, 2, 5, 4>(call, p, plan->blocks);
        if (plan->tile_tokens == 256) return launch_project<T, 3, 2, 5, 4>(call, p, plan->blocks);
    }
    switch (row_tiles) {
    case 1: return launch_project<T, 1, 1, 5, 4>(call, p, plan->blocks);
    case 3: return launch_project<T, 3, 1, 5, 4>(call, p, plan->blocks);
    default: return launch_project<T, 10, 1, 5, 1>(call, p, plan->blocks);
    }
}

static weft_status launch_gather(const weft_call *call, const project_args &p)
{
    const launch_shape shape = {
        .grid = grid_of((p.tokens * (p.rows + 1) * 4 + 127) / 128), .block = 128, .shared = 0, .order = OVERLAP};
    switch (p.splits) {
    case 4: return launch(call, "sums", gather_kernel<4>, shape, p);
    case 16: return launch(call, "sums", gather_kernel<16>, shape, p);
    default: return launch(call, "sums", gather_kernel<64>, shape, p);
    }
}

/* phi can stand for psi: fp32 rows in the order of x's columns, which a copy of 16 bytes can reach. */
static bool phi_is_psi(const weft_tensor *phi, const weft_tensor *norm, stream_layout order)
{
    return phi->dtype == WEFT_F32 && !weft_has(norm) && row_order(phi) == order &&
           (phi->stride[0] % 4 == 0 || phi->shape[0] == 1) && (uintptr_t)phi->data % 16 == 0;
}

/* f16 needs the registers of a second tile of tokens for its lo parts, and 80 rows need them for the sums. */
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
    return launch_gather(call, p);
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
