/* SPDX-License-Identifier: Apache-2.0
 *
 * The validator behind every operator: walks an operator's argument table and checks presence, dtype, rank, shape,
 * strides, alignment and overlap. Sizes are bound by the first tensor that shows them and must agree everywhere else. */
#include "core/backend.h"
#include "core/check.h"

#include <stdio.h>
#include <string.h>

#define MAX_TOKENS ((int64_t)1 << 40)

/* Sizes that a name stands for as such, by their number from the first on: where the call keeps them, and what they may be. The
 * other names stand for what follows from these. */
#define SIZES(SIZE)                                                                                                \
    SIZE(TOKENS, tokens, 0, MAX_TOKENS)                                                                            \
    SIZE(STREAMS, streams, 1, WEFT_MAX_STREAMS)                                                                    \
    SIZE(CHANNELS, channels, 1, (int64_t)1 << 31)                                                                  \
    SIZE(ROWS, rows, 1, 4096)                                                                                      \
    SIZE(BATCH, batch, 0, MAX_TOKENS)                                                                              \
    SIZE(STEPS, steps, 0, MAX_TOKENS)                                                                              \
    SIZE(KEY_HEADS, key_heads, 1, WEFT_GDN_MAX_HEADS)                                                              \
    SIZE(VALUE_HEADS, value_heads, 1, WEFT_GDN_MAX_HEADS)                                                          \
    SIZE(HEADS, heads, 1, WEFT_GDN_MAX_HEADS)                                                                      \
    SIZE(KEY_DIM, key_dim, 1, WEFT_GDN_MAX_DIM)                                                                    \
    SIZE(VALUE_DIM, value_dim, 1, WEFT_GDN_MAX_DIM)                                                                \
    SIZE(WIDTH, width, 1, WEFT_GDN_MAX_WIDTH)                                                                      \
    SIZE(HISTORY, history, 0, 64)                                                                                  \
    SIZE(SEQUENCES, sequences, 0, MAX_TOKENS)                                                                      \
    SIZE(CACHE, cache, 0, MAX_TOKENS)                                                                              \
    SIZE(SCALES, scales, 2, 3)

static const struct size_info {
    const char *name; /* NULL: not one of them */
    size_t offset;
    int64_t low, high;
} sizes[] = {
#define SIZE(DIM, field, low, high)                                                                                \
    [WEFT_DIM_##DIM - WEFT_DIM_TOKENS] = {#field, offsetof(weft_call, field), low, high},
    SIZES(SIZE)
#undef SIZE
};

static int64_t *size_at(weft_call *call, const struct size_info *s)
{
    return (int64_t *)(void *)((char *)call + s->offset);
}

void weft_unbind(weft_call *call)
{
#define SIZE(DIM, field, low, high) call->field = -1;
    SIZES(SIZE)
#undef SIZE
}

static const weft_tensor *tensor_of(const weft_arg_info *info, const void *args)
{
    /* weft_grad begins with its tensor, so the offset serves both kinds. */
    return (const weft_tensor *)((const char *)args + info->offset);
}

static bool is_output(const weft_arg_info *info)
{
    return info->kind != WEFT_ARG_IN;
}

static bool is_empty(const weft_tensor *t)
{
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) return true;
    return false;
}

static int64_t elements(const weft_tensor *t)
{
    int64_t n = 1;
    if (is_empty(t)) return 0;
    for (int i = 0; i < t->ndim; i++) n = weft_times(n, t->shape[i]);
    return n;
}

/* ---- dtype ------------------------------------------------------------------------------------------------------ */

static weft_status check_dtype(weft_call *call, const weft_arg_info *info, const weft_tensor *t, const char *prefix,
                               bool first)
{
    weft_dtype got = t->dtype;
    const char *want;
    if (got < WEFT_F32 || got > WEFT_I64)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected a dtype, got the number %d", weft_op_name(call->op),
                         prefix, info->name, (int)got);
    if (info->type == WEFT_TYPE_INDEX) {
        if (got == WEFT_I32 || got == WEFT_I64) return WEFT_OK;
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected i32 or i64, got %s", weft_op_name(call->op), prefix,
                         info->name, weft_dtype_name(got));
    }
    if (got > WEFT_F64)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected a floating-point dtype, got %s",
                         weft_op_name(call->op), prefix, info->name, weft_dtype_name(got));
    if (first) {
        call->f64 = got == WEFT_F64;
        if (call->f64) call->dtype = WEFT_F64;
    }
    if (call->f64 || got == WEFT_F64) {
        if (call->f64 && got == WEFT_F64) return WEFT_OK;
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected %s like the other tensors, got %s",
                         weft_op_name(call->op), prefix, info->name, call->f64 ? "f64" : "no f64",
                         weft_dtype_name(got));
    }
    switch (info->type) {
    case WEFT_TYPE_ACT:
        if (call->dtype == WEFT_NONE) call->dtype = got;
        if (got == call->dtype) return WEFT_OK;
        want = weft_dtype_name(call->dtype);
        break;
    case WEFT_TYPE_WIDE:
        if (got == WEFT_F32) return WEFT_OK;
        if (call->dtype == WEFT_NONE) call->dtype = got; /* an operator on gradients alone */
        if (got == call->dtype) return WEFT_OK;
        want = call->dtype == WEFT_BF16 ? "f32 or bf16" : call->dtype == WEFT_F16 ? "f32 or f16" : "f32";
        break;
    case WEFT_TYPE_FULL:
        if (got == WEFT_F32) return WEFT_OK;
        want = "f32";
        break;
    default: return WEFT_OK; /* coefficients and parameters: any of the three */
    }
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected %s, got %s", weft_op_name(call->op), prefix, info->name,
                     want, weft_dtype_name(got));
}

/* ---- shape ------------------------------------------------------------------------------------------------------ */

static int64_t rows_of_gates(const weft_call *call, int64_t n)
{
    return call->scales == 2 ? 2 * n : 2 * n + n * n;
}

/* The n that has so many rows, or -1. */
static int64_t streams_of_gates(const weft_call *call, int64_t rows)
{
    for (int64_t n = 1; n <= WEFT_MAX_STREAMS; n++)
        if (rows_of_gates(call, n) == rows) return n;
    return -1;
}

static weft_status bind_gates(weft_call *call, const weft_arg_info *info, int axis, int64_t got, const char *prefix)
{
    const char *rows = call->scales == 2 ? "2n" : "2n + n^2", *scales = call->scales == 2   ? " and two scales"
                                                                        : call->scales == 3 ? " and three scales"
                                                                                            : "";
    if (call->streams < 0) call->streams = streams_of_gates(call, got);
    if (call->streams < 0)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: dim %d: expected %s for n from 1 to %d%s, got %lld",
                         weft_op_name(call->op), prefix, info->name, axis, rows, WEFT_MAX_STREAMS, scales,
                         (long long)got);
    call->rows = rows_of_gates(call, call->streams);
    if (got == call->rows) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: dim %d: expected %s = %lld for %lld streams%s, got %lld",
                     weft_op_name(call->op), prefix, info->name, axis, rows, (long long)call->rows,
                     (long long)call->streams, scales, (long long)got);
}

static weft_status bind_size(weft_call *call, const weft_arg_info *info, int axis, int64_t got, const char *prefix,
                             const struct size_info *s)
{
    int64_t *size = size_at(call, s);
    if (*size == got && got >= 0) return WEFT_OK; /* a bound size was checked against the limits */
    if (got < s->low || got > s->high)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: dim %d (%s): expected %lld to %lld, got %lld",
                         weft_op_name(call->op), prefix, info->name, axis, s->name, (long long)s->low,
                         (long long)s->high, (long long)got);
    if (*size < 0) {
        *size = got;
        return WEFT_OK;
    }
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: dim %d (%s): expected %lld like the other tensors, got %lld",
                     weft_op_name(call->op), prefix, info->name, axis, s->name, (long long)*size, (long long)got);
}

static weft_status bind_dim(weft_call *call, const weft_arg_info *info, int axis, int64_t got, const char *prefix)
{
    const int32_t dim = info->dim[axis], size = dim - WEFT_DIM_TOKENS;
    int64_t want;
    if (size >= 0 && size < (int32_t)(sizeof sizes / sizeof *sizes) && sizes[size].name)
        return bind_size(call, info, axis, got, prefix, &sizes[size]);
    switch (dim) {
    case WEFT_DIM_CONV:
        want = 2 * call->key_heads * call->key_dim + call->value_heads * call->value_dim;
        if (got == want) return WEFT_OK;
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "%s: %s%s: dim %d: expected 2 * %lld * %lld + %lld * %lld = %lld channels of q, k and v, "
                         "got %lld",
                         weft_op_name(call->op), prefix, info->name, axis, (long long)call->key_heads,
                         (long long)call->key_dim, (long long)call->value_heads, (long long)call->value_dim,
                         (long long)want, (long long)got);
    case WEFT_DIM_OFFSETS:
        if (got < 1 || got > MAX_TOKENS || (call->sequences >= 0 && got != call->sequences + 1))
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: dim %d: expected the number of sequences + 1, got %lld",
                             weft_op_name(call->op), prefix, info->name, axis, (long long)got);
        call->sequences = got - 1;
        return WEFT_OK;
    case WEFT_DIM_STEP_HEADS:
        want = weft_times(call->steps, call->value_heads);
        if (got == want) return WEFT_OK;
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "%s: %s%s: dim %d: expected %lld steps * %lld value heads = %lld, got %lld",
                         weft_op_name(call->op), prefix, info->name, axis, (long long)call->steps,
                         (long long)call->value_heads, (long long)want, (long long)got);
    case WEFT_DIM_GATES: return bind_gates(call, info, axis, got, prefix);
    default:
        if (got == dim) return WEFT_OK;
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: dim %d: expected %d, got %lld", weft_op_name(call->op),
                         prefix, info->name, axis, (int)dim, (long long)got);
    }
}

/* Elements from the first to the last of a tensor that has some; strides are not negative. */
static int64_t length_of(const weft_tensor *t)
{
    int64_t last = 0;
    for (int i = 0; i < t->ndim; i++) last = weft_plus(last, weft_times(t->shape[i] - 1, t->stride[i]));
    return weft_plus(last, 1);
}

/* No two indices reach the same element: each stride steps over everything that smaller strides can reach. */
static bool writes_once(const weft_tensor *t)
{
    bool used[WEFT_MAX_DIMS] = {false};
    int64_t reach = 1;
    for (int k = 0; k < t->ndim; k++) {
        int best = -1;
        for (int i = 0; i < t->ndim; i++)
            if (!used[i] && (best < 0 || t->stride[i] < t->stride[best] ||
                             (t->stride[i] == t->stride[best] && t->shape[i] < t->shape[best])))
                best = i;
        used[best] = true;
        if (t->shape[best] == 1) continue;
        if (t->stride[best] < reach) return false;
        reach = t->stride[best] * (t->shape[best] - 1) + reach;
    }
    return true;
}

/* Fast check of the usual tensor: not empty, small enough that nothing overflows, strides that decrease. Returns the elements
 * from its first to its last, or 0 where the general check must decide. */
static int64_t usual_length(const weft_tensor *t)
{
    int64_t inner = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        const int64_t shape = t->shape[i], stride = t->stride[i];
        if ((uint64_t)(shape | stride) >> 28 || shape == 0) return 0;
        if (stride < inner && shape != 1) return 0;
        inner += stride * (shape - 1);
    }
    return inner <= WEFT_MOST_ELEMENTS ? inner : 0;
}

static weft_status check_strides(const weft_call *call, const weft_arg_info *info, const weft_tensor *t,
                                 const char *prefix)
{
    const char *op = weft_op_name(call->op);
    for (int i = 0; i < t->ndim; i++)
        if (t->stride[i] < 0 || t->stride[i] > WEFT_MOST_ELEMENTS)
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: stride %d: expected 0 to 2^48, got %lld", op, prefix,
                             info->name, i, (long long)t->stride[i]);
    if (is_empty(t)) return WEFT_OK;
    if (elements(t) > WEFT_MOST_ELEMENTS)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected at most 2^48 elements, got a shape of more", op,
                         prefix, info->name);
    if (length_of(t) > WEFT_MOST_ELEMENTS)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "%s: %s%s: expected a span of at most 2^48 elements, got strides beyond it", op, prefix,
                         info->name);
    if (is_output(info) && !writes_once(t))
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "%s: %s%s: expected strides that write each element once, got overlapping ones", op,
                         prefix, info->name);
    return WEFT_OK;
}

/* length: elements from the first to the last, 0 where there are none. */
static weft_status check_layout(const weft_call *call, const weft_arg_info *info, const weft_tensor *t,
                                const char *prefix, int64_t *length)
{
    *length = usual_length(t);
    if (*length == 0) {
        WEFT_TRY(check_strides(call, info, t, prefix));
        if (is_empty(t)) return WEFT_OK;
        *length = length_of(t);
    }
    if (call->query) return WEFT_OK;
    if (t->data == NULL)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected a pointer to %lld elements, got NULL",
                         weft_op_name(call->op), prefix, info->name, (long long)elements(t));
    /* powers of two: a division for every tensor would be measurable */
    if ((uintptr_t)t->data & (weft_element_bytes(t->dtype) - 1))
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected a pointer aligned to its %d-byte elements, got %p",
                         weft_op_name(call->op), prefix, info->name, (int)weft_element_bytes(t->dtype), t->data);
    return weft_check_pointer(call, prefix, info->name, t->data);
}

static void put_on(weft_shelf *s, const void *data, uint64_t bytes)
{
    const uint64_t begin = (uintptr_t)data, end = begin + bytes;
    int32_t k = s->count;
    if (bytes == 0 || !s->apart) return;
    for (; k > 0 && s->begin[k - 1] > begin; k--) s->begin[k] = s->begin[k - 1], s->end[k] = s->end[k - 1];
    s->apart = (k == 0 || s->end[k - 1] <= begin) && (k == s->count || end <= s->begin[k + 1]);
    s->begin[k] = begin;
    s->end[k] = end;
    s->count++;
}

/* The step of dropout, which is read when the operator runs: an input of 8 bytes. NULL where there is none. */
static const uint64_t *step_of(const weft_op_info *info, const void *args)
{
    for (const weft_scalar_info *s = info->scalars; s && s->name; s++)
        if (s->type == WEFT_SCALAR_DROPOUT) {
            const weft_dropout *d = (const weft_dropout *)(const void *)((const char *)args + s->offset);
            return d->p > 0 ? d->step : NULL;
        }
    return NULL;
}

/* The number of scales says what the rows of gates are made of: 8 are 2n + n^2 of two streams, and 2n of four. So it is known
 * in front of the tensors that have such rows; the tensor itself is checked in its turn. */
static weft_status find_scales(weft_call *call, const weft_op_info *info, const void *args, const char *prefix)
{
    for (int32_t i = 0; i < info->num_args; i++) {
        const weft_tensor *t = tensor_of(&info->args[i], args);
        if (info->args[i].dim[0] != WEFT_DIM_SCALES || t->dtype == WEFT_NONE) continue;
        if (t->ndim != 1) return WEFT_OK; /* rejected with the others */
        if (t->shape[0] != 2 && t->shape[0] != 3)
            return weft_fail(WEFT_ERR_ARGUMENT,
                             "%s: %s%s: dim 0: expected 3, or 2 without a residual mix, got %lld",
                             weft_op_name(call->op), prefix, info->args[i].name, (long long)t->shape[0]);
        call->scales = t->shape[0];
        return WEFT_OK;
    }
    return WEFT_OK;
}

weft_status weft_check_tensors(weft_call *call, const weft_op_info *info, const void *args, const char *prefix,
                               weft_shelf *shelf)
{
    int64_t length;
    WEFT_TRY(find_scales(call, info, args, prefix));
    shelf->count = 0, shelf->apart = true; /* entries are valid up to count only */
    bool first = call->tokens < 0 && call->streams < 0 && call->channels < 0 && call->dtype == WEFT_NONE;
    for (int32_t i = 0; i < info->num_args; i++) {
        const weft_arg_info *a = &info->args[i];
        const weft_tensor *t = tensor_of(a, args);
        if (t->dtype == WEFT_NONE) {
            if (a->optional) continue;
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected a tensor, got none", weft_op_name(call->op),
                             prefix, a->name);
        }
        WEFT_TRY(check_dtype(call, a, t, prefix, first));
        first = false;
        if (t->ndim != a->ndim)
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected %d dimensions, got %d", weft_op_name(call->op),
                             prefix, a->name, (int)a->ndim, (int)t->ndim);
        for (int d = 0; d < a->ndim; d++) WEFT_TRY(bind_dim(call, a, d, t->shape[d], prefix));
        WEFT_TRY(check_layout(call, a, t, prefix, &length));
        put_on(shelf, t->data, (uint64_t)length * weft_element_bytes(t->dtype));
        if (a->kind == WEFT_ARG_GRAD) {
            int32_t add = ((const weft_grad *)t)->add;
            if (add != 0 && add != 1)
                return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s.add: expected 0 or 1, got %d", weft_op_name(call->op),
                                 prefix, a->name, (int)add);
        }
    }
    if (call->streams > 0 && call->channels > 0 && weft_times(call->streams, call->channels) > (int64_t)1 << 31)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: streams * channels: expected at most 2^31, got %lld * %lld",
                         weft_op_name(call->op), (long long)call->streams, (long long)call->channels);
    put_on(shelf, step_of(info, args), step_of(info, args) ? sizeof(uint64_t) : 0);
    return WEFT_OK;
}

/* ---- overlap ---------------------------------------------------------------------------------------------------- */

/* A view as a set of bytes: its strides in bytes in descending order, without dimensions of one element. */
typedef struct reach {
    uintptr_t at;
    int count;
    int64_t shape[WEFT_MAX_DIMS], step[WEFT_MAX_DIMS], element;
} reach;

static reach reach_of_bytes(const void *data, size_t bytes)
{
    return (reach){.at = (uintptr_t)data, .element = (int64_t)bytes};
}

static reach reach_of(const weft_tensor *t)
{
    reach r = {.at = (uintptr_t)t->data, .element = (int64_t)weft_element_bytes(t->dtype)};
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 1 || t->stride[i] == 0) continue;
        int64_t step = t->stride[i] * r.element;
        int k = r.count++;
        for (; k > 0 && r.step[k - 1] < step; k--) r.step[k] = r.step[k - 1], r.shape[k] = r.shape[k - 1];
        r.step[k] = step;
        r.shape[k] = t->shape[i];
    }
    return r;
}

static int64_t reach_bytes(const reach *r, int first)
{
    int64_t bytes = r->element;
    for (int i = first; i < r->count; i++) bytes += (r->shape[i] - 1) * r->step[i];
    return bytes;
}

/* True where two views, from dimension `level` on, share a byte; b begins `offset` bytes after a. */
static bool parts_meet(const reach *a, const reach *b, int level, int64_t offset)
{
    if (reach_bytes(a, level) <= offset || -reach_bytes(b, level) >= offset) return false;
    if (level >= a->count && level >= b->count) return true;
    if (level < a->count && level < b->count && a->step[level] != b->step[level]) return true;
    /* one that has no step left is a row by itself, which may be counted in the steps of the other */
    int64_t step = level < a->count ? a->step[level] : b->step[level], within = (offset % step + step) % step;
    if (reach_bytes(a, level + 1) > step || reach_bytes(b, level + 1) > step) return true;
    /* a row of b begins behind the beginning of a row of a, and may run into the next one */
    return parts_meet(a, b, level + 1, within) || parts_meet(a, b, level + 1, within - step);
}

/* The bytes from the first to the end of the last element; none of a tensor that is absent or has no elements. */
typedef struct span {
    uintptr_t begin, end;
} span;

static span span_of(const weft_tensor *t)
{
    if (t->dtype == WEFT_NONE || is_empty(t)) return (span){0, 0};
    const uintptr_t begin = (uintptr_t)t->data;
    return (span){begin, begin + (uintptr_t)length_of(t) * weft_element_bytes(t->dtype)};
}

static bool same_view(const weft_tensor *a, const weft_tensor *b)
{
    if (a->data != b->data || a->dtype != b->dtype || a->ndim != b->ndim) return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i] || (a->shape[i] > 1 && a->stride[i] != b->stride[i])) return false;
    return true;
}

/* a NULL: the step of dropout. */
static const char *full_name(char *buffer, size_t size, const weft_arg_group *g, const weft_arg_info *a)
{
    const char *name = a ? a->name : "dropout.step";
    if (g->index < 0) return name;
    snprintf(buffer, size, "layers[%d].%s", (int)g->index, name);
    return buffer;
}

/* The byte spans that a group reads and writes; they decide nearly every pair. */
typedef struct spans {
    int32_t count;
    const weft_arg_info *arg[WEFT_MAX_ARGS + 1]; /* NULL: the step of dropout */
    span of[WEFT_MAX_ARGS + 1];
} spans;

static void list_spans(spans *s, const weft_arg_group *g)
{
    s->count = 0;
    for (int32_t i = 0; i < g->info->num_args; i++) {
        const span one = span_of(tensor_of(&g->info->args[i], g->args));
        if (one.begin == one.end) continue;
        s->arg[s->count] = &g->info->args[i];
        s->of[s->count++] = one;
    }
    const uint64_t *step = step_of(g->info, g->args);
    if (!step) return;
    s->arg[s->count] = NULL;
    s->of[s->count++] = (span){(uintptr_t)step, (uintptr_t)step + sizeof *step};
}

static reach reach_of_arg(const weft_arg_group *g, const weft_arg_info *a)
{
    return a ? reach_of(tensor_of(a, g->args)) : reach_of_bytes(step_of(g->info, g->args), sizeof(uint64_t));
}

/* True where two views with overlapping spans share a byte. Exact for views with common row strides (slices of one padded
 * buffer, sections of one row of several sequences), which may interleave; otherwise overlapping spans count as overlap. */
static bool share_memory(const reach *a, const reach *b)
{
    return parts_meet(a, b, 0, (int64_t)(b->at - a->at));
}

/* An output of group a, and what group b has at b, whose span meets its own. */
static weft_status is_apart(const weft_call *call, const weft_arg_group *ga, const weft_arg_info *a,
                            const weft_arg_group *gb, const weft_arg_info *b)
{
    char na[64], nb[64];
    const reach ra = reach_of_arg(ga, a), rb = reach_of_arg(gb, b);
    if ((ga == gb && a == b) || !share_memory(&ra, &rb)) return WEFT_OK;
    if (ga == gb && a->in_place && b && strcmp(a->in_place, b->name) == 0 &&
        same_view(tensor_of(a, ga->args), tensor_of(b, gb->args)))
        return WEFT_OK;
    return weft_fail(WEFT_ERR_OVERLAP, "%s: %s: expected memory of its own%s%s, got memory shared with %s",
                     weft_op_name(call->op), full_name(na, sizeof na, ga, a),
                     a->in_place ? " or exactly that of " : "", a->in_place ? a->in_place : "",
                     full_name(nb, sizeof nb, gb, b));
}

/* Outputs of group a against everything in group b. */
static weft_status outputs_apart(const weft_call *call, const weft_arg_group *ga, const weft_arg_group *gb)
{
    spans first, second;
    const spans *const from = &first, *const all = ga == gb ? &first : &second;
    list_spans(&first, ga);
    if (ga != gb) list_spans(&second, gb);
    for (int32_t i = 0; i < from->count; i++) {
        const span mine = from->of[i];
        const weft_arg_info *a = from->arg[i];
        if (!a || !is_output(a)) continue;
        for (int32_t j = 0; j < all->count; j++)
            if (mine.begin < all->of[j].end && all->of[j].begin < mine.end)
                WEFT_TRY(is_apart(call, ga, a, gb, all->arg[j]));
    }
    return WEFT_OK;
}

weft_status weft_check_overlap(const weft_call *call, const weft_arg_group *a, const weft_arg_group *b)
{
    WEFT_TRY(outputs_apart(call, a, b));
    return a == b ? WEFT_OK : outputs_apart(call, b, a);
}

/* ---- workspace ------------------------------------------------------------------------------------------------ */

static weft_status workspace_apart_from(const weft_call *call, const weft_arg_group *g, const reach *workspace)
{
    char name[64];
    spans all;
    list_spans(&all, g);
    for (int32_t i = 0; i < all.count; i++) {
        const reach one = reach_of_arg(g, all.arg[i]);
        if (share_memory(workspace, &one))
            return weft_fail(WEFT_ERR_OVERLAP,
                             "%s: exec.workspace: expected memory of its own, got memory shared with %s",
                             weft_op_name(call->op), full_name(name, sizeof name, g, all.arg[i]));
    }
    return WEFT_OK;
}

weft_status weft_check_workspace_apart(const weft_call *call, const weft_operands *o, const void *workspace,
                                       size_t bytes)
{
    const uint64_t begin = (uintptr_t)workspace, end = begin + bytes;
    const weft_shelf *s = &o->shelf;
    bool apart = s->apart && !o->desc->group;
    for (int32_t i = 0; apart && i < s->count; i++) apart = s->end[i] <= begin || end <= s->begin[i];
    if (apart) return WEFT_OK;
    const reach used = reach_of_bytes(workspace, bytes);
    weft_mhc_replay_layer room;
    weft_arg_group group = {&o->desc->info, o->args, -1};
    WEFT_TRY(workspace_apart_from(call, &group, &used));
    for (int32_t i = 0; o->desc->group && o->desc->group(o->args, i, &room, &group); i++)
        WEFT_TRY(workspace_apart_from(call, &group, &used));
    return WEFT_OK;
}

/* ---- pages --------------------------------------------------------------------------------------------------- */

/* Bytes of an output that is large and dense, else 0. */
static int64_t large_bytes(const weft_arg_info *info, const weft_tensor *t)
{
    if (!is_output(info) || !weft_has(t) || is_empty(t)) return 0;
    int64_t length = length_of(t), bytes = length * (int64_t)weft_element_bytes(t->dtype);
    return bytes >= WEFT_LARGE_BYTES && length == elements(t) ? bytes : 0;
}

void weft_outputs_ask(const weft_op_info *info, const void *args)
{
    int64_t all = 0;
    for (int32_t i = 0; i < info->num_args; i++)
        all += large_bytes(&info->args[i], tensor_of(&info->args[i], args));
    for (int32_t i = 0; i < info->num_args && all <= WEFT_HUGE_BYTES; i++) {
        const weft_tensor *t = tensor_of(&info->args[i], args);
        size_t bytes = (size_t)large_bytes(&info->args[i], t);
        if (bytes > 0 && !weft_pages_present(t->data, bytes)) weft_pages_huge(t->data, bytes);
    }
}
