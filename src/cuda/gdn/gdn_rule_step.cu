/* SPDX-License-Identifier: Apache-2.0
 *
 * Decoding with the gated delta rule [G8]: a few tokens of each of many requests, whose states lie in the rows of a cache.
 * Bytes per request and value head: the state read and written once, 8 Dk Dv where it is fp32; all else is small.
 *
 * A warp has 4 J columns of a head's state in registers, through all tokens of a request: lane 4 r + c has the columns
 * J c .. J c + J-1 and of these the rows 32 p + 4 r + i, i < 4, for every p. Whichever of rows and columns are neighbours in memory,
 * a lane reads and writes 16 bytes of fp32 at a time. A sum over rows runs over p and i in a lane and then over the eight r as a
 * tree, in all kernels here: rows that there are not add zeros. So neither the memory order of states nor the kernel shows in the
 * bits. */
#include "core/status.h"
#include "cuda/gdn/gdn_cache.cuh"

enum { WARPS = 8, LANES_ACROSS = 4, ROWS_OF_A_STEP = 32, MOST_BLOCKS = 1 << 30 };

/* [rows, Hv, Dk, Dv] as a kernel gets it: dtype WEFT_NONE where it is absent. Strides in elements; `columns`: the columns of a row
 * are neighbours, else the rows of a column. */
struct states {
    char *data;
    weft_dtype dtype;
    bool columns;
    int64_t at, head, row, column;
};

struct step_params {
    sequences seq;
    cache_rows cache;
    int32_t searched; /* requests whose rows are to be compared with one's own */
    rows query, key, value, beta, g, o;
    states state, new_state, token_state;
    int32_t value_heads, heads, repeat; /* heads of query and key; value heads to each of them */
    bool tiled;
    int32_t dk, dv, slices; /* slices of columns of a head, one to a warp */
    uint32_t blocks;        /* of a request */
    float scale;
};

/* Columns of a lane. */
template <int P, int J> struct piece {
    float m[P][4][J];
};

/* Where a warp is. */
struct site {
    int lane_row, column; /* 4 r, and the first of the lane's columns */
};

/* ---- states ------------------------------------------------------------------------------------------------------- */

template <class S, int P, int J, bool ANY>
static __device__ __forceinline__ void get_state(piece<P, J> &x, const states &s, int64_t base, const site &w,
                                                 const step_params &a)
{
    const int64_t first = base + w.lane_row * s.row + w.column * s.column;
    if constexpr (ANY) {
        const view v = {s.data, s.dtype, 0, {0, 0, 0}};
#pragma unroll
        for (int p = 0; p < P; p++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < J; j++) {
                    const int row = ROWS_OF_A_STEP * p + i;
                    const bool there = w.lane_row + row < a.dk && w.column + j < a.dv;
                    x.m[p][i][j] = there ? get(v, first + row * s.row + j * s.column) : 0.0f;
                }
    } else if (s.columns) {
        raw<S, J> r[P][4];
#pragma unroll
        for (int p = 0; p < P; p++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                load_raw_shared(r[p][i], (const S *)s.data + first + (ROWS_OF_A_STEP * p + i) * s.row);
#pragma unroll
        for (int p = 0; p < P; p++)
#pragma unroll
            for (int i = 0; i < 4; i++) unpack(x.m[p][i], r[p][i]);
    } else {
        raw<S, 4> r[P][J];
#pragma unroll
        for (int p = 0; p < P; p++)
#pragma unroll
            for (int j = 0; j < J; j++)
                load_raw_shared(r[p][j], (const S *)s.data + first + ROWS_OF_A_STEP * p + j * s.column);
#pragma unroll
        for (int p = 0; p < P; p++)
#pragma unroll
            for (int j = 0; j < J; j++) {
                float v[4];
                unpack(v, r[p][j]);
#pragma unroll
                for (int i = 0; i < 4; i++) x.m[p][i][j] = v[i];
            }
    }
}

template <class S, int P, int J>
static __device__ __forceinline__ void put_pieces(const piece<P, J> &x, const states &s, int64_t first)
{
    if (s.columns) {
#pragma unroll
        for (int p = 0; p < P; p++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                store<S, J>((S *)s.data + first + (ROWS_OF_A_STEP * p + i) * s.row, x.m[p][i]);
    } else {
#pragma unroll
        for (int p = 0; p < P; p++)
#pragma unroll
            for (int j = 0; j < J; j++) {
                const float v[4] = {x.m[p][0][j], x.m[p][1][j], x.m[p][2][j], x.m[p][3][j]};
                store<S, 4>((S *)s.data + first + ROWS_OF_A_STEP * p + j * s.column, v);
            }
    }
}

/* T is the activation type: a state is that or fp32. */
template <class T, int P, int J, bool ANY>
static __device__ __forceinline__ void put_state(const piece<P, J> &x, const states &s, int64_t base, const site &w,
                                                 const step_params &a)
{
    const int64_t first = base + w.lane_row * s.row + w.column * s.column;
    if constexpr (ANY) {
        const view v = {s.data, s.dtype, 0, {0, 0, 0}};
#pragma unroll
        for (int p = 0; p < P; p++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < J; j++) {
                    const int row = ROWS_OF_A_STEP * p + i;
                    if (w.lane_row + row < a.dk && w.column + j < a.dv)
                        put(v, first + row * s.row + j * s.column, x.m[p][i][j]);
                }
    } else if (s.dtype == WEFT_F32) {
        put_pieces<float>(x, s, first);
    } else {
        put_pieces<T>(x, s, first);
    }
}

/* ---- a token ------------------------------------------------------------------------------------------------------- */

/* What a token brings: of key and query a lane's rows, of value its columns. ANY: gates alone, all else is read where it is used. */
template <class T, int P, int J, bool ANY> struct operands {
    raw<T, 4> k[ANY ? 1 : P], q[ANY ? 1 : P];
    raw<T, J> v;
    uint32_t g, beta; /* words as loaded: to widen one would be to wait for it */
};

static __device__ __forceinline__ uint32_t word_of(const rows &x, int64_t i)
{
    return x.dtype == WEFT_F32 ? __ldg((const uint32_t *)x.data + i) : __ldg((const unsigned short *)x.data + i);
}

static __device__ __forceinline__ float widen_word(const rows &x, uint32_t word)
{
    if (x.dtype == WEFT_F32) return __uint_as_float(word);
    return x.dtype == WEFT_BF16 ? __uint_as_float(word << 16) : widen(__ushort_as_half((unsigned short)word));
}

template <class T, int P, int J, bool ANY>
static __device__ __forceinline__ void fetch(operands<T, P, J, ANY> &x, const step_params &a, const token &t,
                                             int head, int key_head, const site &w)
{
    x.g = word_of(a.g, offset_of(a.g, t) + head * a.g.head);
    x.beta = word_of(a.beta, offset_of(a.beta, t) + head * a.beta.head);
    if constexpr (!ANY) {
        const T *k = (const T *)a.key.data + offset_of(a.key, t) + key_head * a.key.head + w.lane_row;
        const T *q = (const T *)a.query.data + offset_of(a.query, t) + key_head * a.query.head + w.lane_row;
        load_raw(x.v, (const T *)a.value.data + offset_of(a.value, t) + head * a.value.head + w.column);
#pragma unroll
        for (int p = 0; p < P; p++) {
            load_raw(x.k[p], k + ROWS_OF_A_STEP * p);
            load_raw(x.q[p], q + ROWS_OF_A_STEP * p);
        }
    }
}

/* The lane's four rows of step p of a query or a key. */
static __device__ __forceinline__ void get_rows(float (&v)[4], const rows &x, int64_t at, int p, const site &w,
                                                const step_params &a)
{
    const int row = ROWS_OF_A_STEP * p + w.lane_row;
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = row + i < a.dk ? get(x, at + (row + i) * x.channel) : 0.0f;
}

/* Every lane gets the sums over rows of its columns. */
template <int J> static __device__ __forceinline__ void sum_rows(float (&v)[J])
{
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
        for (int j = 0; j < J; j++) v[j] += __shfl_xor_sync(0xffffffffu, v[j], step);
}

/* o of a token, from the lanes that have row 0: all eight have the sums. */
template <class T, int J, bool ANY>
static __device__ __forceinline__ void put_columns(const rows &x, int64_t at, const float (&v)[J], const site &w,
                                                   const step_params &a)
{
    if (w.lane_row) return;
    if constexpr (ANY) {
#pragma unroll
        for (int j = 0; j < J; j++)
            if (w.column + j < a.dv) put(x, at + (w.column + j) * x.channel, v[j]);
    } else {
        store<T, J>((T *)x.data + at + w.column, v);
    }
}

/* M <- exp(g) M;  M <- M + k (beta (v - M^T k))^T;  o = scale M^T q */
template <class T, int P, int J, bool ANY>
static __device__ __forceinline__ void step_token(piece<P, J> &x, const operands<T, P, J, ANY> &in,
                                                  const step_params &a, const token &t, int head, int key_head,
                                                  const site &w)
{
    const int64_t at_k = offset_of(a.key, t) + key_head * a.key.head;
    const int64_t at_q = offset_of(a.query, t) + key_head * a.query.head;
    const int64_t at_v = offset_of(a.value, t) + head * a.value.head;
    const float decay = expf(widen_word(a.g, in.g)), beta = widen_word(a.beta, in.beta);
    float v[J], delta[J] = {}, o[J] = {}, k[4], q[4];
    if constexpr (ANY) {
#pragma unroll
        for (int j = 0; j < J; j++)
            v[j] = w.column + j < a.dv ? get(a.value, at_v + (w.column + j) * a.value.channel) : 0.0f;
    } else {
        unpack(v, in.v);
    }
#pragma unroll
    for (int p = 0; p < P; p++) {
        if constexpr (ANY)
            get_rows(k, a.key, at_k, p, w, a);
        else
            unpack(k, in.k[p]);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < J; j++) delta[j] = fmaf(x.m[p][i][j], k[i], delta[j]);
    }
    sum_rows<J>(delta);
#pragma unroll
    for (int j = 0; j < J; j++) delta[j] = (v[j] - delta[j] * decay) * beta;
#pragma unroll
    for (int p = 0; p < P; p++) {
        if constexpr (ANY) {
            get_rows(k, a.key, at_k, p, w, a);
            get_rows(q, a.query, at_q, p, w, a);
        } else {
            unpack(k, in.k[p]);
            unpack(q, in.q[p]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < J; j++) {
                x.m[p][i][j] = fmaf(k[i], delta[j], x.m[p][i][j] * decay);
                o[j] = fmaf(x.m[p][i][j], q[i], o[j]);
            }
    }
    sum_rows<J>(o);
#pragma unroll
    for (int j = 0; j < J; j++) o[j] = o[j] * a.scale;
    put_columns<T, J, ANY>(a.o, offset_of(a.o, t) + head * a.o.head, o, w, a);
}

/* A dense request's tokens are steps of its own; packed ones, steps of one sequence. */
static __device__ __forceinline__ int64_t token_state_of(const step_params &a, const token &t, int head)
{
    return t.b * a.token_state.at + (t.s * a.value_heads + head) * a.token_state.head;
}

/* ---- kernels --------------------------------------------------------------------------------------------------------- */

/* A warp has a head of a request and a slice of its columns; warps past the last request write zeros for tokens behind the last
 * offset. ANY: any strides and up to 32 P rows, element by element. */
template <class T, class S, int P, int J, bool ANY>
static __global__ void __launch_bounds__(WARPS * 32, P < 8 && (sizeof(T) == 2 || P < 4) ? 2 : 1)
    step_kernel(const step_params a)
{
    const unsigned unit = blockIdx.x % a.blocks * WARPS + (threadIdx.x >> 5);
    const int head = (int)(unit / (unsigned)a.slices), slice = (int)(unit % (unsigned)a.slices);
    const int lane = threadIdx.x & 31;
    let_next_begin();
    wait_for_previous();
    if (head >= a.value_heads) return;
    for (int64_t n = blockIdx.x / a.blocks; n < a.seq.count + (a.seq.cu != NULL); n += gridDim.x / a.blocks) {
        const int key_head = a.tiled ? head % a.heads : head / a.repeat;
        const site w = {lane / LANES_ACROSS * 4, (slice * LANES_ACROSS + lane % LANES_ACROSS) * J};
        const bool request = n < a.seq.count;
        const int64_t named = request ? state_row(a.cache, n) : -1;
        const int64_t start = start_of(a.seq, n), end = request ? start_of(a.seq, n + 1) : a.seq.tokens;
        token t = a.seq.cu ? token{0, start} : token{n, 0};
        operands<T, P, J, ANY> in = {};
        piece<P, J> x = {};
        if (named >= 0 && start < end) fetch(in, a, t, head, key_head, w);
        if (named >= 0) get_state<S, P, J, ANY>(x, a.state, named * a.state.at + head * a.state.head, w, a);
        /* while the load of the state is in flight */
        const int64_t row = named >= 0 && named_again(a.cache, (int)n, named, a.searched) ? -1 : named;
        if (row < 0) {
            const float zero[J] = {};
            x = {};
            for (int64_t i = start; i < end; i++, advance(t, a.seq)) {
                put_columns<T, J, ANY>(a.o, offset_of(a.o, t) + head * a.o.head, zero, w, a);
                if (a.token_state.dtype != WEFT_NONE)
                    put_state<T, P, J, ANY>(x, a.token_state, token_state_of(a, t, head), w, a);
            }
            continue;
        }
#pragma unroll 1
        for (int64_t i = start; i < end; i++) {
            const token now = t;
            step_token<T, P, J, ANY>(x, in, a, now, head, key_head, w);
            advance(t, a.seq);
            if (i + 1 < end) fetch(in, a, t, head, key_head, w);
            if (a.token_state.dtype != WEFT_NONE)
                put_state<T, P, J, ANY>(x, a.token_state, token_state_of(a, now, head), w, a);
        }
        if (a.new_state.dtype != WEFT_NONE)
            put_state<T, P, J, ANY>(x, a.new_state, row * a.new_state.at + head * a.new_state.head, w, a);
    }
}

/* ---- operator -------------------------------------------------------------------------------------------------------- */

static states states_of(const weft_tensor *t)
{
    return {(char *)t->data, t->dtype, t->stride[3] == 1, t->stride[0], t->stride[1], t->stride[2], t->stride[3]};
}

/* Whether four rows of a column or `columns` columns of a row can be read and written at once. */
static bool moves_wide(const weft_tensor *t, int64_t columns)
{
    if (!weft_has(t)) return true;
    const int inner = t->stride[3] == 1 ? 3 : 2;
    const int64_t unit = inner == 3 ? columns : 4, bytes = unit * (int64_t)weft_dtype_size(t->dtype);
    if (t->stride[inner] != 1 || (uintptr_t)t->data % (uintptr_t)(bytes < 16 ? bytes : 16)) return false;
    for (int d = 0; d < 4; d++)
        if (d != inner && t->stride[d] % unit) return false;
    return true;
}

/* Columns of a lane where a kernel for whole heads serves the call, else 0. */
static int columns_of(const weft_call *call, const weft_gdn_rule_step_args *a)
{
    const int columns = call->key_dim == 64 || call->key_dim == 128 ? 4 : call->key_dim == 256 ? 2 : 0;
    if (!columns || call->value_dim % (LANES_ACROSS * columns) || !reads_wide(&a->query, 4) ||
        !reads_wide(&a->key, 4) || !reads_wide(&a->value, columns) || !reads_wide(&a->o, columns))
        return 0;
    const bool wide = moves_wide(&a->state, columns) && moves_wide(&a->new_state, columns) &&
                      moves_wide(&a->token_state, columns);
    return wide ? columns : 0;
}

using step_function = void (*)(step_params);

/* S is the dtype of the states that are read. */
template <class T, class S> static step_function kernel_of_step(const weft_call *call, int columns)
{
    if (!columns) /* dtypes are those of the tensors */
        return call->key_dim <= 128 ? step_kernel<float, float, 4, 1, true>
                                    : step_kernel<float, float, 32, 1, true>;
    return call->key_dim == 64    ? step_kernel<T, S, 2, 4, false>
           : call->key_dim == 128 ? step_kernel<T, S, 4, 4, false>
                                  : step_kernel<T, S, 8, 2, false>;
}

template <class T> static weft_status step(const weft_call *call, const void *args)
{
    const weft_gdn_rule_step_args *a = (const weft_gdn_rule_step_args *)args;
    const int columns = columns_of(call, a), across = LANES_ACROSS * (columns ? columns : 1);
    step_params p = {};
    p.seq = sequences_of(call, &a->cu_seqlens);
    if (p.seq.count == 0 && p.seq.tokens == 0) return WEFT_OK;
    WEFT_TRY(look_at_offsets(call, p.seq));
    p.cache = cache_rows_of(&a->state_index, &a->state);
    WEFT_TRY(find_rows(call, &p.cache, p.seq.count, &p.searched));
    p.query = rows_of(&a->query), p.key = rows_of(&a->key), p.value = rows_of(&a->value);
    p.beta = rows_of(&a->beta), p.g = rows_of(&a->g), p.o = rows_of(&a->o);
    p.state = states_of(&a->state), p.new_state = states_of(&a->new_state);
    p.token_state = states_of(&a->token_state);
    p.value_heads = (int32_t)call->value_heads, p.heads = (int32_t)call->heads;
    p.repeat = p.value_heads / p.heads, p.tiled = a->head_map == WEFT_GDN_TILED;
    p.dk = (int32_t)call->key_dim, p.dv = (int32_t)call->value_dim;
    p.slices = (p.dv + across - 1) / across;
    p.scale = (float)a->scale;
    p.blocks = (uint32_t)((p.value_heads * p.slices + WARPS - 1) / WARPS);
    const int64_t most = MOST_BLOCKS / p.blocks, requests = p.seq.count + (p.seq.cu != NULL);
    return launch(
        call, "decoding",
        a->state.dtype == WEFT_F32 ? kernel_of_step<T, float>(call, columns) : kernel_of_step<T, T>(call, columns),
        {.grid = (unsigned)(requests < most ? requests : most) * p.blocks, .block = WARPS * 32, .order = OVERLAP},
        p);
}

static size_t step_workspace(const weft_call *call, const void *args)
{
    const weft_gdn_rule_step_args *a = (const weft_gdn_rule_step_args *)args;
    return find_rows_workspace(&a->state_index, sequences_of(call, &a->cu_seqlens).count);
}

const weft_kernel weft_cuda_gdn_rule_step[] = {{WEFT_BF16, 0, step<bf16>, step_workspace},
                                               {WEFT_F16, 0, step<f16>, step_workspace},
                                               {WEFT_F32, 0, step<float>, step_workspace},
                                               {}};
