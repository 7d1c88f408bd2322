/* SPDX-License-Identifier: Apache-2.0
 *
 * Projection and mean square, forward [M1]. Reads x once (2nC bytes a token in 16 bits), writes 4N + 4 bytes a token.
 *
 * `project` multiplies on tensor cores. psi = phi * norm_weight is split into bf16 hi + lo on the way, or before by
 * `pack`; x is exact in bf16 (f16 becomes hi + lo too), so two products a tile give sixteen bits of psi. The squares are
 * summed from the same registers. `gather` adds the partial sums where the columns of a token were split over blocks.
 * `spread` lays psi out in the order of x's columns where phi itself is not there to be copied: a norm weight, another
 * order, another dtype.
 *
 * The order of a token's sum depends on K = n*C alone: 64 leaves of columns, each summed by the tensor cores from left to
 * right, then by fours three times. A split hands on whole subtrees. */
#include "cuda/mhc/mhc_project_sums.cuh"

/* ---- psi as fp32 rows, and split ------------------------------------------------------------------------------ */

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

/* psi split, in the order of the registers that multiply it: a piece of 16 bytes per (step of 16 columns, tile of 8
 * rows, lane) with hi and lo of B's two registers. The four numbers of a piece are columns 2t, 2t + 1, 2t + 8, 2t + 9 of its
 * step, row g of its tile; zeros after the last row and column. */
static __device__ __forceinline__ uint4 taken_apart(const float2 (&v)[2])
{
    uint4 to;
    split2(to.x, to.z, v[0].x, v[0].y);
    split2(to.y, to.w, v[1].x, v[1].y);
    return to;
}

__global__ void pack_kernel(uint4 *to, const float *psi, int64_t psi_stride, weights w, columns k, uint32_t tiles,
                            uint32_t pieces)
{
    const uint32_t piece = blockIdx.x * blockDim.x + threadIdx.x, lane = piece & 31;
    const uint32_t step = piece / 32 / tiles, tile = piece / 32 - step * tiles;
    const uint32_t row = tile * 8 + (lane >> 2);
    let_next_begin();
    if (piece >= pieces) return;
    float2 v[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t column = step * 16 + half * 8 + 2 * (lane & 3);
        v[half] = make_float2(0.0f, 0.0f);
        if (row >= (uint32_t)w.rows || column >= k.count) continue;
        if (psi) {
            v[half] = *(const float2 *)(psi + row * psi_stride + column);
        } else {
            uint32_t stream, channel;
            column_at(k, column, stream, channel);
            v[half].x = psi_at(w, row, stream, channel);
            column_at(k, column + 1, stream, channel);
            v[half].y = psi_at(w, row, stream, channel);
        }
    }
    to[piece] = taken_apart(v);
}

/* ---- the product ------------------------------------------------------------------------------------------------------ */

/* The four numbers of a piece of psi: columns 2t, 2t + 1, 2t + 8, 2t + 9 of its step of 16, row g of its tile of 8. A piece
 * becomes 16 bytes, hi and lo of B's two registers. */
template <int NT>
static __device__ __forceinline__ void fetch_piece(float2 (&v)[2], const project_args &p, const split_range &r,
                                                   int stage, int piece, int lane)
{
    const int row = piece / 32 % NT * 8 + (lane >> 2), last = (int)(p.columns - r.first * PROJECT_STAGE);
    const int column = stage * PROJECT_STAGE + piece / 32 / NT * 16 + 2 * (lane & 3);
    const float2 *from =
        (const float2 *)(p.psi + r.first * PROJECT_STAGE + (uint32_t)(row * (int)p.psi_stride + column));
    v[0] = v[1] = make_float2(0.0f, 0.0f);
    if (row < p.rows && column < last) v[0] = from[0];
    if (row < p.rows && column + 8 < last) v[1] = from[4];
}

/* A block owns WARPS * MT * 16 tokens and the columns of its split, a warp MT * 16 of these tokens. Each warp has a ring of
 * stages of 64 columns of its own x and waits for no other warp, with its 16-byte pieces swapped by the row number so that
 * neither the copy nor ldmatrix meets a bank twice. psi is shared: chunks of CHUNK stages, split into the registers'
 * order while the chunk before is multiplied, one barrier a chunk.
 *
 * What counts is how fast a multiprocessor could go. Memory leaves 2090 cycles for a stage of 256 tokens on average, but it
 * does not serve all alike: some finish a tenth earlier, and then the others have to catch up. A barrier a stage, or squares
 * in plain arithmetic (half of the loop), would each cost more than that leaves room for. */
template <class T, int NT, int MT, int WARPS, int STAGES, int CHUNK>
__global__ void __launch_bounds__(WARPS * 32, 1) project_kernel(const project_args p)
{
    constexpr int STEPS = PROJECT_STAGE / 16, THREADS = WARPS * 32, STAGE_BYTES = MT * 16 * PROJECT_STAGE * 2;
    constexpr int CHUNK_PIECES = CHUNK * STEPS * NT * 32, OWN = CHUNK_PIECES / THREADS; /* pieces of a thread */
    constexpr bool AHEAD = NT <= 3; /* registers to fetch them ahead */
    static_assert(CHUNK_PIECES % THREADS == 0, "every thread takes the same number of pieces apart");
    static_assert(STAGES * STAGE_BYTES >= MT * 16 * (NT * 8 + 1) * 4, "the sums go through the ring");
    extern __shared__ __align__(128) char shared[];

    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int split = (int)(blockIdx.x % (unsigned)p.splits);
    const int64_t token0 = ((int64_t)(blockIdx.x / (unsigned)p.splits) * WARPS + warp) * (MT * 16);
    const int64_t stages = (p.columns + PROJECT_STAGE - 1) / PROJECT_STAGE;
    const split_range r = range_of(stages, p.splits, split);
    uint4 *const taken = (uint4 *)(shared + WARPS * STAGES * STAGE_BYTES);
    const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;

    /* Lane l copies piece l % 8 of rows l / 8, l / 8 + 4, ... Rows after the last token repeat it: a copy must cost no more
     * than the address it adds to. */
    const char *x_from[MT * 4];
#pragma unroll
    for (int i = 0; i < MT * 4; i++) {
        const int64_t token = token0 + i * 4 + (lane >> 3);
        x_from[i] = (const char *)p.x + ((token < p.tokens ? token : p.tokens - 1) * p.x_stride +
                                         r.first * PROJECT_STAGE + (lane & 7) * 8) *
                                            (int64_t)sizeof(T);
    }
    const uint32_t x_to = ring + (lane >> 3) * 128 + (((lane & 7) ^ (lane >> 3)) << 4);
    const int inside =
        (int)((p.columns - (lane & 7) * 8 + PROJECT_STAGE - 1) / PROJECT_STAGE - r.first); /* stages */
    int next = 0;                                                                          /* stage to load */
    auto copy_x = [&](uint32_t slot_offset) {
#pragma unroll
        for (int i = 0; i < MT * 4; i++) {
            copy_async((x_to ^ (i & 1 ? 64 : 0)) + slot_offset + i * 512, x_from[i], next < inside);
            x_from[i] += PROJECT_STAGE * sizeof(T);
        }
        next++;
    };
    float2 ahead[AHEAD ? OWN : 1][2];
    auto fetch_ahead = [&](int stage) {
#pragma unroll
        for (int i = 0; i < (AHEAD ? OWN : 0); i++)
            fetch_piece<NT>(ahead[AHEAD ? i : 0], p, r, stage, i * THREADS + tid, lane);
    };
    auto take_apart = [&](int buffer, int stage) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (!AHEAD) fetch_piece<NT>(ahead[0], p, r, stage, i * THREADS + tid, lane);
            taken[buffer * CHUNK_PIECES + i * THREADS + tid] = taken_apart(ahead[AHEAD ? i : 0]);
        }
    };

    /* psi first, since nothing can begin without it and it would wait behind all of x. Where a kernel before this one lays
     * it out, x need not wait for that. */
    if (p.psi_is_ready) fetch_ahead(0);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < r.count) copy_x(s * STAGE_BYTES);
        copy_commit();
    }
    wait_for_previous();
    let_next_begin();
    if (!p.psi_is_ready) fetch_ahead(0);
    take_apart(0, 0);

    /* With 80 rows the upper two levels of the sum, which are hardly touched, lie in shared memory. */
    constexpr bool DEEP = NT > 3;
    float *const deep = (float *)(taken + 2 * CHUNK_PIECES) + tid;
    float upper[2][DEEP ? 1 : MT][DEEP ? 1 : NT][4] = {};
    low_sums<NT, MT> sums;
    auto high = [&](int level, int m, int q, int e) -> float & {
        return DEEP ? deep[((level * NT + q) * 4 + e) * THREADS] : upper[level][DEEP ? 0 : m][DEEP ? 0 : q][e];
    };
#pragma unroll
    for (int i = 0; i < (DEEP ? 2 * NT * 4 : 0); i++) deep[i * THREADS] = 0.0f;
    uint32_t slot = 0; /* in bytes */
    int index = r.leaf, leaf_end = first_leaf_end(stages, r, index);
    for (int chunk = 0; chunk < r.count; chunk += CHUNK) {
        const int buffer = chunk / CHUNK & 1;
        const bool more = chunk + CHUNK < r.count;
        __syncthreads();
        if (more) fetch_ahead(chunk + CHUNK);
#pragma unroll 1
        for (int stage = chunk; stage < chunk + CHUNK && stage < r.count; stage++) {
            copy_wait<STAGES - 2>();
            __syncwarp();
            if (next < r.count) copy_x(slot == 0 ? (STAGES - 1) * STAGE_BYTES : slot - STAGE_BYTES);
            copy_commit();
            const uint4 *const psi = taken + buffer * CHUNK_PIECES + (stage - chunk) * (STEPS * NT * 32);
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                fragments<NT, MT> f;
                load_x(f, ring + slot, step, lane);
                load_psi(f, psi, step, lane);
                multiply<T>(sums, f);
            }
            slot = slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
            /* The end of a leaf, and of the empty ones behind it where there are fewer stages than leaves. */
            while (stage + 1 == leaf_end && index < r.leaf + r.leaves) {
                index++;
                leaf_end = (int)(weft_project_leaf(stages, index + 1) - r.first);
                end_leaf(sums, index, lane, high);
            }
        }
        if (more) take_apart(buffer ^ 1, chunk + CHUNK);
    }
    __syncwarp();
    store_sums(p, sums, (float *)(shared + warp * STAGES * STAGE_BYTES), token0, split, lane, high);
}

/* Index and parity in a ring. */
template <int SIZE> struct ring_place {
    int at = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void step()
    {
        if (++at == SIZE) at = 0, parity ^= 1;
    }
};

/* Tiles of 128 and 192 tokens, for which psi comes split (`pack`): it is the same work for fewer tokens. The rings of
 * x are those of project_kernel; psi has a ring too, of BUFFERS chunks of CHUNK stages.
 *
 * Nothing waits within a stage: fragments are loaded a step ahead, and on a barrier every thread arrives stages before any
 * waits. Every thread arrives for itself, which costs no more than one for its warp and which racecheck can follow. */
template <int NT, int WARPS, int STAGES> struct stream_shape {
    static constexpr int chunk = 2; /* stages */
    /* Chunks in flight, as far ahead as x; one more has arrived, one is multiplied, and one may still be multiplied by
     * other warps. */
    static constexpr int lead = (STAGES - 1 + chunk - 1) / chunk, buffers = lead + 3;
    static constexpr int stage_bytes = 16 * PROJECT_STAGE * 2, pieces = chunk * PROJECT_STAGE / 16 * NT * 32;
    static constexpr int x_bytes = WARPS * STAGES * stage_bytes, psi_bytes = buffers * pieces * 16;
    static constexpr int bytes = x_bytes + psi_bytes + 2 * buffers * 8;
};

template <class T, int NT, int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32, 1) project_stream_kernel(const project_args p)
{
    using shape = stream_shape<NT, WARPS, STAGES>;
    constexpr int STEPS = PROJECT_STAGE / 16, STAGE_BYTES = shape::stage_bytes;
    constexpr int CHUNK = shape::chunk, LEAD = shape::lead, BUFFERS = shape::buffers, PIECES = shape::pieces;
    constexpr int OWN = PIECES / (WARPS * 32); /* pieces of a thread */
    static_assert(PIECES % (WARPS * 32) == 0, "every thread copies the same number of pieces");
    static_assert(STAGES * STAGE_BYTES >= 16 * (NT * 8 + 1) * 4, "the sums go through the ring");
    extern __shared__ __align__(128) char shared[];

    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int split = (int)(blockIdx.x % (unsigned)p.splits);
    const int64_t token0 = ((int64_t)(blockIdx.x / (unsigned)p.splits) * WARPS + warp) * 16;
    const int64_t stages = (p.columns + PROJECT_STAGE - 1) / PROJECT_STAGE;
    const split_range r = range_of(stages, p.splits, split);
    const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;
    uint4 *const taken = (uint4 *)(shared + shape::x_bytes);
    const uint32_t full = shared_address(taken) + shape::psi_bytes, empty = full + BUFFERS * 8;
    if (lane == 0)
        for (int k = warp; k < 2 * BUFFERS; k += WARPS) barrier_init(full + k * 8, WARPS * 32);

    const uint4 *psi_from = p.packed + r.first * (PIECES / CHUNK) + tid;
    const uint4 *const psi_end = p.packed + stages * (PIECES / CHUNK);
    auto copy_psi = [&](int buffer) {
        const uint32_t to = shared_address(taken + buffer * PIECES + tid);
#pragma unroll
        for (int i = 0; i < OWN; i++)
            copy_async(to + i * WARPS * 512, psi_from + i * WARPS * 32, psi_from + i * WARPS * 32 < psi_end);
        psi_from += PIECES;
    };
    /* x: lane l copies piece l % 8 of rows l / 8, l / 8 + 4, ... */
    const int64_t token = token0 + (lane >> 3), x_step = 4 * p.x_stride * (int64_t)sizeof(T);
    const char *x_from =
        (const char *)p.x + (token * p.x_stride + r.first * PROJECT_STAGE + (lane & 7) * 8) * (int64_t)sizeof(T);
    const int x_rows = (int)(p.tokens - token < 16 ? p.tokens - token : 16);
    const uint32_t x_to = ring + (lane >> 3) * 128 + (((lane & 7) ^ (lane >> 3)) << 4);
    const int x_end =
        (int)((p.columns - (lane & 7) * 8 + PROJECT_STAGE - 1) / PROJECT_STAGE - r.first); /* in stages */
    const int x_stages = x_end < r.count ? x_end : r.count;
    auto copy_row = [&](uint32_t slot, int stage, int i) {
        copy_async((x_to ^ (i & 1 ? 64 : 0)) + slot + i * 512, x_from + i * x_step,
                   stage < x_stages && i * 4 < x_rows);
    };
    auto copy_x = [&](int stage) {
#pragma unroll
        for (int i = 0; i < 4; i++) copy_row(stage * STAGE_BYTES, stage, i);
        copy_commit();
        x_from += PROJECT_STAGE * sizeof(T);
    };

    /* x need not wait until psi is packed, and psi should not wait for all of x. */
    copy_x(0);
    copy_x(1);
    wait_for_previous();
    let_next_begin();
#pragma unroll 1
    for (int chunk = 0; chunk <= LEAD; chunk++) copy_psi(chunk);
    copy_commit();
#pragma unroll 1
    for (int s = 2; s < STAGES - 1; s++) copy_x(s);
    copy_wait<STAGES - 3>();
    __syncthreads(); /* the barriers exist */
    barrier_arrive(full);

    float upper[2][1][NT][4] = {};
    low_sums<NT, 1> sums;
    auto high = [&](int level, int m, int q, int e) -> float & { return upper[level][m][q][e]; };
    uint32_t slot = 0, last_slot = (STAGES - 1) * STAGE_BYTES; /* in bytes: of this stage, of the one before */
    int index = r.leaf, leaf_end = first_leaf_end(stages, r, index);
    ring_place<BUFFERS> now, next, later; /* chunks: multiplied, arrived, copied */
    next.at = 1, later.at = LEAD + 1;
    int in_chunk = 0;
#pragma unroll 1
    for (int stage = 0; stage < r.count; stage++) {
        if (in_chunk == 0) barrier_wait(full + now.at * 8, now.parity);
        copy_wait<STAGES - 2>();
        __syncwarp();
        const uint4 *const psi = taken + now.at * PIECES + in_chunk * (STEPS * NT * 32);
        fragments<NT, 1> f[2];
        load_x(f[0], ring + slot, 0, lane);
        load_psi(f[0], psi, 0, lane);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (step + 1 < STEPS) {
                load_x(f[(step + 1) & 1], ring + slot, step + 1, lane);
                load_psi(f[(step + 1) & 1], psi, step + 1, lane);
            }
#pragma unroll
            for (int i = 0; i < (step == 0 ? 4 : 0); i++) copy_row(last_slot, stage + STAGES - 1, i);
            multiply<T>(sums, f[step & 1]);
        }
        x_from += PROJECT_STAGE * sizeof(T);
        last_slot = slot;
        slot = slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
        if (in_chunk == 0) {
            if (stage + (LEAD + 1) * CHUNK < r.count) {
                barrier_wait(empty + later.at * 8, later.parity ^ 1);
                copy_psi(later.at);
                later.step();
            }
            barrier_arrive(full + next.at * 8); /* this thread's part of the chunk has arrived */
            next.step();
        }
        copy_commit();
        if (++in_chunk == CHUNK) {
            barrier_arrive(empty + now.at * 8);
            in_chunk = 0;
            now.step();
        }
        /* The end of a leaf, and of the empty ones behind it where there are fewer stages than leaves. */
        while (stage + 1 == leaf_end && index < r.leaf + r.leaves) {
            index++;
            leaf_end = (int)(weft_project_leaf(stages, index + 1) - r.first);
            end_leaf(sums, index, lane, high);
        }
    }
    copy_wait<0>();
    __syncwarp();
    store_sums(p, sums, (float *)(shared + warp * STAGES * STAGE_BYTES), token0, split, lane, high);
}

/* Adds the partial sums of a token in the order that one block would have added them. With many splits four lanes share a
 * sum, each with a quarter of the partial sums in flight at once. */
template <int SPLITS> struct gather_shape {
    static constexpr int lanes = SPLITS > 4 ? 4 : 1;
};

template <int SPLITS> __global__ void gather_kernel(const project_args p)
{
    constexpr int LANES = gather_shape<SPLITS>::lanes, EACH = SPLITS / LANES;
    constexpr int FOURS = SPLITS > 4 ? 4 : 1, LEAVES = EACH / FOURS;
    /* All partial sums are 16 MiB at most. */
    const uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, width = p.rows + 1;
    const uint32_t step = (uint32_t)p.tokens * width;
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
    const uint32_t token = i / width, row = i - token * width;
    if (row + 1 < width)
        put(p.h, token * p.h.stride[0] + row * p.h.stride[1], total);
    else if (has(p.ms))
        put(p.ms, token * p.ms.stride[0], total * p.mean);
}

/* ---- launch ------------------------------------------------------------------------------------------------------------ */

template <class T, int NT, int MT, int WARPS, int STAGES, int CHUNK>
static weft_status launch_project(const weft_call *call, const project_args &p)
{
    constexpr size_t x = (size_t)WARPS * STAGES * MT * 16 * PROJECT_STAGE * 2;
    constexpr size_t psi = 2 * CHUNK * PROJECT_STAGE / 16 * NT * 512,
                     deep = NT > 3 ? 2 * NT * 4 * WARPS * 32 * 4 : 0;
    static_assert(x + psi + deep <= 227 * 1024, "more shared memory than a block has");
    return launch(call, "projection", project_kernel<T, NT, MT, WARPS, STAGES, CHUNK>,
                  {.grid = (unsigned)p.units,
                   .block = WARPS * 32,
                   .shared = x + psi + deep,
                   .order = p.psi_is_ready ? AFTER : OVERLAP},
                  p);
}

template <class T, int NT, int WARPS, int STAGES>
static weft_status launch_stream(const weft_call *call, const project_args &p)
{
    using shape = stream_shape<NT, WARPS, STAGES>;
    static_assert(shape::bytes <= 227 * 1024, "more shared memory than a block has");
    return launch(call, "projection", project_stream_kernel<T, NT, WARPS, STAGES>,
                  {.grid = (unsigned)p.units, .block = WARPS * 32, .shared = shape::bytes, .order = OVERLAP}, p);
}

template <class T>
static weft_status launch_tiles(const weft_call *call, const project_args &p, const weft_project_fwd_plan *plan,
                                int32_t row_tiles)
{
    const int kind = row_tiles * 1000 + plan->tile_tokens;
    if constexpr (number<T>::dtype == WEFT_BF16) {
        if (kind == 1256) return launch_project<T, 1, 2, 8, 5, 4>(call, p);
        if (kind == 3256) return launch_project<T, 3, 2, 8, 5, 4>(call, p);
    }
    switch (kind) {
    case 1128: return launch_stream<T, 1, 8, 8>(call, p);
    case 3192: return launch_stream<T, 3, 12, 6>(call, p);
    case 3128: return launch_stream<T, 3, 8, 8>(call, p);
    case 1032: return launch_project<T, 1, 1, 2, 4, 4>(call, p);
    case 3032: return launch_project<T, 3, 1, 2, 4, 1>(call, p);
    default: return launch_project<T, 10, 1, 8, 5, 1>(call, p);
    }
}

template <int SPLITS> static weft_status launch_gather(const weft_call *call, const project_args &p)
{
    const int64_t threads = p.tokens * (p.rows + 1) * gather_shape<SPLITS>::lanes;
    return launch(call, "sums", gather_kernel<SPLITS>,
                  {.grid = grid_of((threads + 127) / 128), .block = 128, .shared = 0, .order = OVERLAP}, p);
}

/* 80 rows, and the lo parts of f16, leave no registers for tiles of 256 tokens, where a warp has 32. */
static weft_project_fwd_plan plan_of(const weft_call *call, int32_t tiles)
{
    return weft_cuda_project_fwd_plan(call->tokens, call->streams * call->channels, tiles,
                                      tiles <= 3 && call->dtype == WEFT_BF16, call->sms);
}

static int64_t packed_pieces(int64_t columns, int32_t tiles)
{
    return (columns + PROJECT_STAGE - 1) / PROJECT_STAGE * (PROJECT_STAGE / 16) * tiles * 32;
}

struct fwd_room {
    void *psi; /* rows of fp32, or pieces */
    float *partial;
};

static fwd_room fwd_lay_out(weft_arena *arena, const weft_call *call, const weft_project_fwd_plan *plan)
{
    fwd_room r = {};
    const int64_t columns = call->streams * call->channels;
    r.psi = weft_arena_take(
        arena, (size_t)(plan->packed ? packed_pieces(columns, weft_cuda_project_row_tiles(call->rows)) * 16
                                     : call->rows * columns * 4));
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
                      .units = plan.blocks,
                      .rows = (int32_t)call->rows,
                      .splits = plan.splits,
                      .psi_is_ready = weft_project_phi_is_psi(&a->phi, &a->norm_weight, order),
                      .mean = 1.0f / (float)k.count};
    if (plan.packed) {
        const uint32_t pieces = (uint32_t)packed_pieces(k.count, tiles);
        const weights w = {view_of(&a->phi), view_of(&a->norm_weight), (int32_t)call->rows};
        p.packed = (const uint4 *)room.psi;
        const weft_status status =
            launch(call, "psi", pack_kernel, {.grid = (pieces + 127) / 128, .block = 128}, (uint4 *)room.psi,
                   p.psi_is_ready ? p.psi : NULL, p.psi_stride, w, k, (uint32_t)tiles, pieces);
        if (status != WEFT_OK) return status;
    } else if (!p.psi_is_ready) {
        p.psi = (const float *)room.psi, p.psi_stride = k.count;
        const weft_status status = weft_cuda_project_spread(call, &a->phi, &a->norm_weight, k, (float *)room.psi);
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
