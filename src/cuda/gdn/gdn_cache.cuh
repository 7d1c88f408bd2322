/* SPDX-License-Identifier: Apache-2.0
 *
 * Decoding: which row of a cache is whose. */
#ifndef WEFT_CUDA_GDN_CACHE_CUH
#define WEFT_CUDA_GDN_CACHE_CUH

#include "cuda/gdn/gdn_pre_plan.h"
#include "cuda/gdn/gdn_tokens.cuh"

struct cache_rows {
    const void *index; /* NULL: request n has row n */
    bool wide;         /* index is int64 */
    int64_t stride, rows;
};

/* Rows of a cache by index, which may be absent. */
static inline cache_rows cache_rows_of(const weft_tensor *index, const weft_tensor *state)
{
    cache_rows c = {NULL, false, 0, state->shape[0]};
    if (weft_has(index)) c.index = index->data, c.wide = index->dtype == WEFT_I64, c.stride = index->stride[0];
    return c;
}

static __device__ __forceinline__ int64_t index_at(const cache_rows &c, int64_t n)
{
    return c.wide ? ((const int64_t *)c.index)[n * c.stride] : ((const int32_t *)c.index)[n * c.stride];
}

/* The row of a request's state; below 0 where it has none. A row that does not exist counts as none. */
static __device__ __forceinline__ int64_t state_row(const cache_rows &c, int64_t n)
{
    const int64_t row = c.index ? index_at(c, n) : n;
    return row < c.rows ? row : -1;
}

/* Whether another one of `count` requests names the row of request n too. All lanes of a warp ask for the same n. */
template <class I>
static __device__ __forceinline__ bool named_again(const cache_rows &c, I n, int64_t row, I count)
{
    bool again = false;
#pragma unroll 2
    for (I m = (I)(threadIdx.x & 31); m < count; m += 32) again |= (m != n) & (index_at(c, m) == row);
    return __any_sync(0xffffffffu, again);
}

/* The row that is request n's alone; below 0 where it has none and is padding. Two requests that name one row would race for it, so
 * neither gets it. */
template <class I> static __device__ __forceinline__ int64_t own_row(const cache_rows &c, int64_t n, I count)
{
    const int64_t row = state_row(c, n);
    return row >= 0 && named_again(c, (I)n, row, count) ? -1 : row;
}

enum { ROW_WARPS = 8 };

/* The same once for all heads, where there are many requests. */
static __global__ void __launch_bounds__(ROW_WARPS * 32)
    rows_kernel(const cache_rows c, int64_t count, int64_t *own)
{
    wait_for_previous();
    for (int64_t n = (int64_t)blockIdx.x * ROW_WARPS + (threadIdx.x >> 5); n < count;
         n += (int64_t)gridDim.x * ROW_WARPS) {
        const int64_t row = own_row(c, n, count);
        if ((threadIdx.x & 31) == 0) own[n] = row;
    }
}

#ifndef NDEBUG
/* Says which rows own_row takes for padding. */
static __global__ void report_rows(const cache_rows c, int64_t count)
{
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= count) return;
    const int64_t row = index_at(c, n);
    if (row < -1 || row >= c.rows)
        printf("weft: state_index[%lld]: expected -1 to %lld, got %lld\n", (long long)n, (long long)c.rows - 1,
               (long long)row);
    for (int64_t m = 0; m < n && row >= 0; m++)
        if (index_at(c, m) == row)
            printf("weft: state_index[%lld]: expected a row of its own, got %lld like state_index[%lld]\n",
                   (long long)n, (long long)row, (long long)m);
}
#endif

/* Debug builds print rows that the cache does not have and rows named twice, from the device, when the stream comes to it. */
static inline weft_status look_at_rows(const weft_call *call, const cache_rows &c, int64_t count)
{
#ifndef NDEBUG
    if (count > 0)
        return launch(call, "rows", report_rows, {.grid = grid_of((count + 127) / 128), .block = 128}, c, count);
#endif
    (void)call, (void)c, (void)count;
    return WEFT_OK;
}

/* Room for the rows of a call that has them found in front; NULL and none where its kernel finds them. */
static inline int64_t *rows_of_many(weft_arena *arena, bool indexed, int64_t count)
{
    if (!indexed || count <= WEFT_GDN_SEARCHED) return NULL;
    return (int64_t *)weft_arena_take(arena, (size_t)count * sizeof(int64_t));
}

/* What a kernel of decoding is to look through: the index itself and `searched` of its rows, or, of many requests, rows that a
 * launch in front has found, with 0 to search. The workspace holds nothing else. */
static inline weft_status find_rows(const weft_call *call, cache_rows *c, int64_t count, int32_t *searched)
{
    weft_arena arena = cuda_arena(call);
    int64_t *own = rows_of_many(&arena, c->index != NULL, count);
    *searched = c->index && !own ? (int32_t)count : 0;
    if (!c->index) return WEFT_OK;
    WEFT_TRY(look_at_rows(call, *c, count));
    if (!own) return WEFT_OK;
    WEFT_TRY(
        launch(call, "rows", rows_kernel,
               {.grid = grid_of((count + ROW_WARPS - 1) / ROW_WARPS), .block = ROW_WARPS * 32, .order = OVERLAP},
               *c, count, own));
    c->index = own, c->wide = true, c->stride = 1;
    return WEFT_OK;
}

static inline size_t find_rows_workspace(const weft_tensor *index, int64_t count)
{
    weft_arena arena = weft_arena_open(NULL);
    rows_of_many(&arena, weft_has(index), count);
    return weft_arena_bytes(&arena);
}

#endif
