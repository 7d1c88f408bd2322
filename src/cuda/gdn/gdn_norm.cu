/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated norm behind the gated delta rule [G7]. Bytes per row, bf16: forward 6C; backward 10C. A row is a head of a token.
 *
 * A row is cut into pieces of 16 bytes. A team, the power of two of lanes of a warp that has a lane for each of up to 32 pieces,
 * works on a row; lane l has the pieces l, l + 32, .. A sum over a row runs over a lane's pieces in order and then over the
 * lanes as a tree, in all kernels here, so a row has the same bits wherever it lies. For d_weight a block walks over a chunk of
 * rows and leaves a row of partial sums; a second kernel adds these in order. */
#include "core/status.h"
#include "cuda/common/fold.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/gdn/gdn_math.cuh"

enum {
    BLOCK = 256,
    MOST = 4, /* pieces that a lane holds; longer rows are read again */
    /* Of backward: three rounds of the three blocks that each of 132 multiprocessors has at a time. */
    MOST_CHUNKS = 3 * 3 * 132
};

/* [B, S, H, C] as a kernel gets it: dtype WEFT_NONE where it is absent. */
struct heads {
    view at;                   /* strides of batch, step, head */
    int64_t channel;           /* stride */
    bool wide;                 /* a piece can be read and written at once */
    int32_t batch, step, head; /* the same strides where they are short */
};

struct norm_task {
    heads o, z, y, d_o, d_z; /* y: or the gradient of it */
    view weight, d_weight;
    bool wide_weight, sigmoid;
    float *partial; /* [chunks][channels], NULL where d_weight is not requested */
    int64_t rows, channels, chunk;
    divider by_head, by_step;
    uint32_t heads, head_magic, steps, step_magic;
    bool one_batch; /* steps of all sequences follow each other at one stride */
    bool narrow;    /* rows and strides are 31-bit numbers */
    float eps, per_channel;
    weft_rows_team team;
};

/* ---- rows --------------------------------------------------------------------------------------------------------- */

struct row_place {
    int64_t b, s, h;
};

static __device__ __forceinline__ row_place place_of_row(const norm_task &a, int64_t row)
{
    row_place p = {0, 0, 0};
    p.s = divide(row, a.by_head, &p.h);
    if (!a.one_batch) p.b = divide(p.s, a.by_step, &p.s);
    return p;
}

static __device__ __forceinline__ int64_t offset_of(const heads &x, const row_place &p)
{
    return p.b * x.at.stride[0] + p.s * x.at.stride[1] + p.h * x.at.stride[2];
}

/* The same of a task that is narrow, in few instructions: they are most of a short row's address. */
struct short_place {
    int32_t b, s, h;
};

/* n / by for n below 2^31, as divide(). */
static __device__ __forceinline__ uint32_t short_divide(uint32_t n, uint32_t by, uint32_t magic, uint32_t *rest)
{
    uint32_t q = __umulhi(n, magic), r = n - q * by;
    if (r >= by) q++, r -= by;
    *rest = r;
    return q;
}

static __device__ __forceinline__ short_place short_place_of(const norm_task &a, int64_t row)
{
    uint32_t b = 0, s, h;
    s = short_divide((uint32_t)row, a.heads, a.head_magic, &h);
    if (!a.one_batch) b = short_divide(s, a.steps, a.step_magic, &s);
    return {(int32_t)b, (int32_t)s, (int32_t)h};
}

static __device__ __forceinline__ int64_t offset_of(const heads &x, const short_place &p)
{
    return (int64_t)p.b * x.batch + (int64_t)p.s * x.step + (int64_t)p.h * x.head;
}

/* W elements of a row from c on; zeros behind its end. */
template <class T, int W>
static __device__ __forceinline__ void get_piece(float (&v)[W], const heads &x, int64_t row, int64_t c,
                                                 int64_t channels)
{
    if (x.wide) {
        get_wide<T, W>(v, x.at, row + c);
        return;
    }
#pragma unroll
    for (int k = 0; k < W; k++) v[k] = c + k < channels ? get(x.at, row + (c + k) * x.channel) : 0.0f;
}

template <class T, int W>
static __device__ __forceinline__ void put_piece(const heads &x, int64_t row, int64_t c, int64_t channels,
                                                 float (&v)[W])
{
    if (x.wide) {
        put_wide<T, W>(x.at, row + c, v);
        return;
    }
#pragma unroll
    for (int k = 0; k < W; k++)
        if (c + k < channels) put(x.at, row + (c + k) * x.channel, v[k]);
}

/* 1 where there are none. */
template <int W> static __device__ __forceinline__ void get_weights(float (&w)[W], const norm_task &a, int64_t c)
{
    if (!has(a.weight)) {
#pragma unroll
        for (int k = 0; k < W; k++) w[k] = 1.0f;
    } else if (a.wide_weight) {
        get_param<W>(w, a.weight, c);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) w[k] = c + k < a.channels ? get(a.weight, (c + k) * a.weight.stride[0]) : 0.0f;
    }
}

/* ---- arithmetic of a piece ---------------------------------------------------------------------------------------- */

/* Every lane of a team gets the sum. */
static __device__ __forceinline__ float team_sum(float v, const weft_rows_team &team)
{
    for (int step = team.lanes >> 1; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

static __device__ __forceinline__ float inverse_rms(float squares, const norm_task &a)
{
    return reciprocal_root(fmaf(squares, a.per_channel, a.eps));
}

template <int W> static __device__ __forceinline__ void add_squares(float &sum, const float (&o)[W])
{
#pragma unroll
    for (int k = 0; k < W; k++) sum = fmaf(o[k], o[k], sum);
}

/* z becomes f(z), one factor of which is 1 / (1 + exp(-z)), and the other z or 1. */
template <int W> static __device__ __forceinline__ void gates(float (&z)[W], bool sigmoid)
{
#pragma unroll
    for (int k = 0; k < W; k++) {
        float d, e;
        gm_divisors(&z[k], &d, &e, 1);
        z[k] = (sigmoid ? 1.0f : z[k]) * reciprocal(d);
    }
}

/* z becomes f(z), slope f'(z): f (1 - s), s being the sigmoid, which silu's has in addition. */
template <int W> static __device__ __forceinline__ void gate_slopes(float (&z)[W], float (&slope)[W], bool sigmoid)
{
#pragma unroll
    for (int k = 0; k < W; k++) {
        float d, e;
        gm_divisors(&z[k], &d, &e, 1);
        const float s = reciprocal(d);
        z[k] = (sigmoid ? 1.0f : z[k]) * s;
        slope[k] = fmaf(z[k], GM_COMPLEMENT(s, e), sigmoid ? 0.0f : s);
    }
}

/* o becomes y. */
template <int W>
static __device__ __forceinline__ void finish(float (&o)[W], float (&z)[W], const float (&w)[W], float inverse,
                                              bool sigmoid)
{
    gates<W>(z, sigmoid);
#pragma unroll
    for (int k = 0; k < W; k++) o[k] = o[k] * inverse * w[k] * z[k];
}

/* d becomes g = d f(z) w, z becomes d_z; `sum` gains p o r, p = d f(z), and `dot` g o. */
template <int W>
static __device__ __forceinline__ void pass_gate(float (&d)[W], float (&z)[W], const float (&o)[W],
                                                 const float (&w)[W], float inverse, bool sigmoid, float (&sum)[W],
                                                 float &dot)
{
    float slope[W];
    gate_slopes<W>(z, slope, sigmoid);
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float p = d[k] * z[k], n = o[k] * inverse;
        sum[k] = fmaf(p, n, sum[k]);
        z[k] = d[k] * (n * w[k]) * slope[k];
        d[k] = p * w[k];
        dot = fmaf(d[k], o[k], dot);
    }
}

/* ---- forward ------------------------------------------------------------------------------------------------------ */

/* Blocks on a multiprocessor: as many as threads that it may have, or as leave a thread the registers that it needs. */
template <class T, int K> static constexpr int blocks_of_forward()
{
    return K > 1 ? 1 : std::is_same<T, f16>::value ? 6 : 8;
}

/* Rows whose pieces can be read and written at once, K to a lane; a team has one row. What hides the loads are the other warps: with
 * several rows to a team, or a walk over rows, there were fewer of them or there were spills. y may be o: a thread reads and writes
 * the same elements. */
template <class T, int K>
static __global__ void __launch_bounds__(BLOCK, blocks_of_forward<T, K>()) fwd_kernel(norm_task a)
{
    constexpr int W = number<T>::per_vector;
    const place p = place_of(a.team);
    const int64_t row = (int64_t)blockIdx.x * a.team.per_block + p.slot;
    const short_place at = short_place_of(a, row);
    const int c = p.lane * W, end = row < a.rows ? (int)a.channels : 0;
    const T *from_o = (const T *)a.o.at.data + offset_of(a.o, at) + c;
    const T *from_z = (const T *)a.z.at.data + offset_of(a.z, at) + c;
    raw<T, W> o[K], z[K];
    float squares = 0.0f, x[W], f[W], w[W];
#pragma unroll
    for (int j = 0; j < K; j++) {
        if (c + j * 32 * W >= end) continue;
        load_raw_shared(o[j], from_o + j * 32 * W);
        load_raw_shared(z[j], from_z + j * 32 * W);
    }
#pragma unroll
    for (int j = 0; j < K; j++) {
        if (c + j * 32 * W >= end) continue;
        unpack(x, o[j]);
        add_squares<W>(squares, x);
    }
    const float inverse = inverse_rms(team_sum(squares, a.team), a);
    T *to = (T *)a.y.at.data + offset_of(a.y, at) + c;
#pragma unroll
    for (int j = 0; j < K; j++) {
        if (c + j * 32 * W >= end) continue;
        unpack(x, o[j]);
        unpack(f, z[j]);
        get_weights<W>(w, a, c + j * 32 * W);
        finish<W>(x, f, w, inverse, a.sigmoid);
        store<T, W>(to + j * 32 * W, x);
    }
}

/* Rows of any length and any strides; a warp is a team. */
template <class T> static __global__ void __launch_bounds__(BLOCK) fwd_any_kernel(norm_task a)
{
    constexpr int W = number<T>::per_vector;
    const place p = place_of(a.team);
    const int64_t stride = (int64_t)gridDim.x * a.team.per_block;
    for (int64_t row = (int64_t)blockIdx.x * a.team.per_block + p.slot; row < a.rows; row += stride) {
        const row_place at = place_of_row(a, row);
        float squares = 0.0f, x[W], f[W], w[W];
        for (int64_t c = p.lane * W; c < a.channels; c += 32 * W) {
            get_piece<T, W>(x, a.o, offset_of(a.o, at), c, a.channels);
            add_squares<W>(squares, x);
        }
        const float inverse = inverse_rms(team_sum(squares, a.team), a);
        for (int64_t c = p.lane * W; c < a.channels; c += 32 * W) {
            get_piece<T, W>(x, a.o, offset_of(a.o, at), c, a.channels);
            get_piece<T, W>(f, a.z, offset_of(a.z, at), c, a.channels);
            get_weights<W>(w, a, c);
            finish<W>(x, f, w, inverse, a.sigmoid);
            put_piece<T, W>(a.y, offset_of(a.y, at), c, a.channels, x);
        }
    }
}

/* ---- backward ----------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float mean_term(float dot, float inverse, const norm_task &a)
{
    return dot * a.per_channel * inverse * inverse;
}

/* d_o = r (g - o k), from g. */
template <int W>
static __device__ __forceinline__ void input_gradient(float (&g)[W], const float (&o)[W], float k, float inverse)
{
#pragma unroll
    for (int e = 0; e < W; e++) g[e] = fmaf(o[e], -k, g[e]) * inverse;
}

/* A row of backward: its words, and where its gradients go. */
template <class T, class G, int K> struct back_row {
    raw<T, number<T>::per_vector> o[K], z[K];
    raw<G, number<T>::per_vector> d[K];
    int64_t to_o, to_z;
};

/* Nothing of a row behind the last one. */
template <class T, class G, int K>
static __device__ __forceinline__ void fetch(back_row<T, G, K> &r, const norm_task &a, int64_t row, int64_t last,
                                             int c)
{
    constexpr int W = number<T>::per_vector;
    if (row >= last) return;
    const short_place at = short_place_of(a, row);
    const T *from_o = (const T *)a.o.at.data + offset_of(a.o, at) + c;
    const T *from_z = (const T *)a.z.at.data + offset_of(a.z, at) + c;
    const G *from_d = (const G *)a.y.at.data + offset_of(a.y, at) + c;
    r.to_o = offset_of(a.d_o, at) + c, r.to_z = offset_of(a.d_z, at) + c;
#pragma unroll
    for (int j = 0; j < K; j++) {
        if (c + j * 32 * W >= (int)a.channels) continue;
        load_raw(r.o[j], from_o + j * 32 * W);
        load_raw(r.z[j], from_z + j * 32 * W);
        load_raw(r.d[j], from_d + j * 32 * W);
    }
}

/* Blocks of backward on a multiprocessor, as many as leave a thread the registers that it needs. */
template <class G, int K> static constexpr int blocks_of_backward()
{
    return K > 1 ? 1 : std::is_same<G, bf16>::value ? 3 : 2;
}

/* G is the dtype of d_y. While a team works on a row, the loads of its next one are in flight, as far as registers go. */
template <class T, class G, int K>
static __global__ void __launch_bounds__(BLOCK, blocks_of_backward<G, K>()) bwd_kernel(norm_task a)
{
    constexpr int W = number<T>::per_vector;
    constexpr bool AHEAD = K == 1;
    extern __shared__ float sums[]; /* [teams][channels] */
    const place p = place_of(a.team);
    const int channels = (int)a.channels, c = p.lane * W;
    const int64_t first = blockIdx.x * a.chunk, last = first + a.chunk < a.rows ? first + a.chunk : a.rows;
    back_row<T, G, K> r, next;
    float sum[K][W] = {}, weight[W];
    if (AHEAD) {
        fetch(r, a, first + p.slot, last, c);
        if (c < channels) get_weights<W>(weight, a, c);
    }
    for (int64_t base = first; base < last; base += a.team.per_block) {
        const int64_t row = base + p.slot;
        const int end = row < last ? channels : 0;
        float g[K][W], squares = 0.0f, dot = 0.0f;
        if (AHEAD)
            fetch(next, a, row + a.team.per_block, last, c);
        else
            fetch(r, a, row, last, c);
#pragma unroll
        for (int j = 0; j < K; j++) {
            float x[W];
            if (c + j * 32 * W >= end) continue;
            unpack(x, r.o[j]);
            add_squares<W>(squares, x);
        }
        const float inverse = inverse_rms(team_sum(squares, a.team), a);
#pragma unroll
        for (int j = 0; j < K; j++) {
            float x[W], f[W];
            if (c + j * 32 * W >= end) continue;
            if (!AHEAD) get_weights<W>(weight, a, c + j * 32 * W);
            unpack(x, r.o[j]);
            unpack(f, r.z[j]);
            unpack(g[j], r.d[j]);
            pass_gate<W>(g[j], f, x, weight, inverse, a.sigmoid, sum[j], dot);
            if (has(a.d_z.at)) put_wide<T, W>(a.d_z.at, r.to_z + j * 32 * W, f);
        }
        const float k = mean_term(team_sum(dot, a.team), inverse, a);
#pragma unroll
        for (int j = 0; j < K; j++) {
            float x[W];
            if (c + j * 32 * W >= end || !has(a.d_o.at)) continue;
            unpack(x, r.o[j]);
            input_gradient<W>(g[j], x, k, inverse);
            put_wide<T, W>(a.d_o.at, r.to_o + j * 32 * W, g[j]);
        }
        if (AHEAD) r = next;
    }
    if (!a.partial) return;
#pragma unroll
    for (int j = 0; j < K; j++)
#pragma unroll
        for (int k = 0; k < W; k++)
            if (c + j * 32 * W + k < channels) sums[p.slot * channels + c + j * 32 * W + k] = sum[j][k];
    __syncthreads();
    for (int k = threadIdx.x; k < channels; k += BLOCK) {
        float total = sums[k];
        for (int i = 1; i < a.team.per_block; i++) total += sums[i * channels + k];
        a.partial[blockIdx.x * a.channels + k] = total;
    }
}

/* Rows of any length and any strides. A block is one warp, for the partial sums are in memory; a lane alone has its channels. */
template <class T> static __global__ void __launch_bounds__(32) bwd_any_kernel(norm_task a)
{
    constexpr int W = number<T>::per_vector;
    const int64_t first = blockIdx.x * a.chunk, last = first + a.chunk < a.rows ? first + a.chunk : a.rows;
    float *partial = a.partial + blockIdx.x * a.channels;
    for (int64_t row = first; row < last; row++) {
        const row_place at = place_of_row(a, row);
        float squares = 0.0f, dot = 0.0f, inverse = 0.0f, k = 0.0f;
        for (int pass = 0; pass < 3; pass++) {
            for (int64_t c = threadIdx.x * W; c < a.channels; c += 32 * W) {
                float x[W], f[W], d[W], w[W], n[W] = {};
                get_piece<T, W>(x, a.o, offset_of(a.o, at), c, a.channels);
                if (pass == 0) add_squares<W>(squares, x);
                if (pass == 0) continue;
                float again = 0.0f;
                get_piece<T, W>(f, a.z, offset_of(a.z, at), c, a.channels);
                get_piece<T, W>(d, a.y, offset_of(a.y, at), c, a.channels);
                get_weights<W>(w, a, c);
                pass_gate<W>(d, f, x, w, inverse, a.sigmoid, n, pass == 1 ? dot : again);
                if (pass == 1) continue;
                for (int e = 0; e < W && a.partial; e++)
                    if (c + e < a.channels) partial[c + e] = (row == first ? 0.0f : partial[c + e]) + n[e];
                if (has(a.d_z.at)) put_piece<T, W>(a.d_z, offset_of(a.d_z, at), c, a.channels, f);
                input_gradient<W>(d, x, k, inverse);
                if (has(a.d_o.at)) put_piece<T, W>(a.d_o, offset_of(a.d_o, at), c, a.channels, d);
            }
            if (pass == 0) inverse = inverse_rms(team_sum(squares, a.team), a);
            if (pass == 1) k = mean_term(team_sum(dot, a.team), inverse, a);
        }
    }
}

/* ---- operators ---------------------------------------------------------------------------------------------------- */

/* A piece of `unit` elements can be read at once. Strides count even of a dimension of one: which kernel runs does not depend on how
 * many tokens there are. */
static heads heads_of(const weft_tensor *t, int64_t unit, int add = 0)
{
    heads x = {view_of(t, add),       t->stride[3],          weft_has(t),
               (int32_t)t->stride[0], (int32_t)t->stride[1], (int32_t)t->stride[2]};
    const int64_t bytes = unit * (int64_t)weft_dtype_size(t->dtype), aligned = bytes < 16 ? bytes : 16;
    if (!x.wide) return x;
    x.wide = t->shape[3] % unit == 0 && (t->stride[3] == 1 || t->shape[3] == 1) &&
             (uintptr_t)t->data % (uintptr_t)aligned == 0;
    for (int d = 0; d < 3; d++) x.wide = x.wide && t->stride[d] % unit == 0;
    return x;
}

static bool follow(const weft_tensor *t, int64_t batch, int64_t steps)
{
    return !weft_has(t) || batch == 1 || t->stride[0] == steps * t->stride[1];
}

static bool is_short(const weft_tensor *t)
{
    return !weft_has(t) || (t->stride[0] < INT32_MAX && t->stride[1] < INT32_MAX && t->stride[2] < INT32_MAX);
}

/* What both passes have; y is d_y in backward. */
template <class T, class Args> static norm_task task_of(const weft_call *call, const Args *a, const weft_tensor *y)
{
    constexpr int W = number<T>::per_vector;
    const int64_t pieces = (call->channels + W - 1) / W;
    norm_task task = {};
    task.o = heads_of(&a->o, W), task.z = heads_of(&a->z, W), task.y = heads_of(y, W);
    task.weight = view_of(&a->weight);
    task.wide_weight = weft_has(&a->weight) && call->channels % W == 0 && vector_fits(&a->weight, W);
    task.sigmoid = a->gate == WEFT_GDN_GATE_SIGMOID;
    task.rows = call->batch * call->steps * call->value_heads, task.channels = call->channels;
    task.by_head = divider_of(call->value_heads), task.by_step = divider_of(call->steps > 0 ? call->steps : 1);
    task.one_batch = follow(&a->o, call->batch, call->steps) && follow(&a->z, call->batch, call->steps) &&
                     follow(y, call->batch, call->steps);
    task.heads = (uint32_t)call->value_heads, task.head_magic = UINT32_MAX / task.heads;
    task.steps = call->steps > 0 && task.rows < INT32_MAX ? (uint32_t)call->steps : 1;
    task.step_magic = UINT32_MAX / task.steps;
    task.narrow = task.rows < INT32_MAX && is_short(&a->o) && is_short(&a->z) && is_short(y);
    task.eps = (float)a->eps, task.per_channel = 1.0f / (float)call->channels;
    task.team = {1, 0, BLOCK};
    while (task.team.lanes < 32 && task.team.lanes < pieces) task.team.lanes *= 2, task.team.bits++;
    task.team.per_block = BLOCK / task.team.lanes;
    return task;
}

/* A warp to a row: lanes without a piece add zeros, which leaves the order of the sum as it is. */
static weft_rows_team warps(int block)
{
    return {32, 5, block / 32};
}

template <class T> static weft_status fwd(const weft_call *call, const void *args)
{
    constexpr int W = number<T>::per_vector;
    const weft_gdn_norm_fwd_args *a = (const weft_gdn_norm_fwd_args *)args;
    norm_task task = task_of<T>(call, a, &a->y);
    void (*kernel)(norm_task) = fwd_any_kernel<T>;
    if (task.rows == 0) return WEFT_OK;
    if (task.o.wide && task.z.wide && task.y.wide && task.narrow && call->channels <= 32 * MOST * W) {
        kernel = call->channels <= 32 * W ? fwd_kernel<T, 1> : fwd_kernel<T, MOST>;
    } else {
        task.team = warps(BLOCK);
    }
    return launch(call, "gated norm", kernel,
                  {dim3(grid_of((task.rows + task.team.per_block - 1) / task.team.per_block)), BLOCK}, task);
}

template <class T>
static weft_arena lay_out(const weft_call *call, const weft_gdn_norm_bwd_args *a, norm_task *task,
                          weft_rows_chunks *chunks)
{
    constexpr int W = number<T>::per_vector;
    weft_arena arena = cuda_arena(call);
    *task = task_of<T>(call, a, &a->d_y);
    task->d_o = heads_of(&a->d_o.to, W, a->d_o.add), task->d_z = heads_of(&a->d_z.to, W, a->d_z.add);
    task->d_weight = view_of(&a->d_weight);
    task->one_batch = task->one_batch && follow(&a->d_o.to, call->batch, call->steps) &&
                      follow(&a->d_z.to, call->batch, call->steps);
    *chunks = weft_rows_plan_pieces(task->rows, call->channels, MOST_CHUNKS, task->team.per_block);
    task->chunk = chunks->tokens;
    if (has(task->d_weight) && chunks->chunks > 0)
        task->partial = (float *)weft_arena_take(&arena, (size_t)(chunks->chunks * call->channels) * sizeof(float));
    return arena;
}

template <class T> static size_t bwd_workspace(const weft_call *call, const void *args)
{
    norm_task task;
    weft_rows_chunks chunks;
    const weft_arena arena = lay_out<T>(call, (const weft_gdn_norm_bwd_args *)args, &task, &chunks);
    return weft_arena_bytes(&arena);
}

/* Of rows that can be read at once. */
template <class T, class G>
static weft_status bwd_held(const weft_call *call, const norm_task &task, int64_t chunks)
{
    constexpr int W = number<T>::per_vector;
    const size_t sums = task.partial ? (size_t)(task.team.per_block * call->channels) * sizeof(float) : 0;
    return launch(call, "gradient of the gated norm",
                  call->channels <= 32 * W ? bwd_kernel<T, G, 1> : bwd_kernel<T, G, MOST>,
                  {dim3((unsigned)chunks), BLOCK, sums}, task);
}

template <class T> static weft_status bwd_any(const weft_call *call, norm_task task, int64_t chunks)
{
    task.team = warps(32);
    return launch(call, "gradient of the gated norm", bwd_any_kernel<T>, {dim3((unsigned)chunks), 32}, task);
}

/* Takes what cannot be written at once, or far apart, out of `task` and leaves it alone in `other`. */
static bool set_apart(heads *own, heads *other, const weft_grad *g)
{
    const bool fits = !has(own->at) || (own->wide && is_short(&g->to));
    (fits ? other : own)->at = view{};
    return !fits;
}

template <class T> static weft_status bwd(const weft_call *call, const void *args)
{
    constexpr int W = number<T>::per_vector;
    const weft_gdn_norm_bwd_args *a = (const weft_gdn_norm_bwd_args *)args;
    norm_task task;
    weft_rows_chunks chunks;
    weft_status status = WEFT_OK;
    lay_out<T>(call, a, &task, &chunks);
    const bool fits = task.o.wide && task.z.wide && task.y.wide && task.narrow && call->channels <= 32 * MOST * W;
    if (task.rows > 0 && fits) {
        /* d_weight's order must not depend on where other gradients lie: these take their own way. */
        norm_task other = task;
        other.partial = NULL;
        const bool o_apart = set_apart(&task.d_o, &other.d_o, &a->d_o);
        const bool z_apart = set_apart(&task.d_z, &other.d_z, &a->d_z);
        if (o_apart || z_apart) status = bwd_any<T>(call, other, chunks.chunks);
    }
    if (status == WEFT_OK && task.rows > 0 && (has(task.d_o.at) || has(task.d_z.at) || task.partial))
        status = !fits                                 ? bwd_any<T>(call, task, chunks.chunks)
                 : task.y.at.dtype == number<T>::dtype ? bwd_held<T, T>(call, task, chunks.chunks)
                                                       : bwd_held<T, float>(call, task, chunks.chunks);
    if (status != WEFT_OK || !has(task.d_weight) || (task.rows == 0 && task.d_weight.add)) return status;
    return fold(call, "d_weight of the gated norm", task.d_weight, task.partial, chunks.chunks);
}

const weft_kernel weft_cuda_gdn_norm_fwd[] = {
    {WEFT_BF16, 0, fwd<bf16>, NULL}, {WEFT_F16, 0, fwd<f16>, NULL}, {WEFT_F32, 0, fwd<float>, NULL}, {}};
const weft_kernel weft_cuda_gdn_norm_bwd[] = {{WEFT_BF16, 0, bwd<bf16>, bwd_workspace<bf16>},
                                              {WEFT_F16, 0, bwd<f16>, bwd_workspace<f16>},
                                              {WEFT_F32, 0, bwd<float>, bwd_workspace<float>},
                                              {}};
