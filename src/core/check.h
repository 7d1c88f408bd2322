/* SPDX-License-Identifier: Apache-2.0
 *
 * How an operator describes its arguments (src/ops/<stem>.c) and what the shared validator makes of it. */
#ifndef WEFT_CORE_CHECK_H
#define WEFT_CORE_CHECK_H

#include "core/kernel.h"
#include "core/status.h"

/* weft_dtype_size, where a call for every tensor would count. */
static inline size_t weft_element_bytes(weft_dtype dtype)
{
    switch (dtype) {
    case WEFT_BF16:
    case WEFT_F16: return 2;
    case WEFT_F32:
    case WEFT_I32: return 4;
    case WEFT_F64:
    case WEFT_I64: return 8;
    default: return 0;
    }
}

/* A struct of arguments with its table; index is -1, or the layer number for messages. */
typedef struct weft_arg_group {
    const weft_op_info *info;
    const void *args;
    int32_t index;
} weft_arg_group;

/* info is public through weft/ops.h; check looks at what a table of tensors cannot say: scalars, enums, and which
 * optional tensors need each other. It runs after the tensors were checked, with the sizes of the call known. */
typedef struct weft_op_desc {
    weft_op_info info;
    size_t first_size; /* of the args struct in the first release that had it: what the oldest callers pass */
    weft_status (*check)(const weft_call *call, const void *args);
    /* Where the args point to further groups of arguments: the one with this number, completed in `room` where it has to be;
     * false behind the last one. NULL: the args are all. */
    bool (*group)(const void *args, int32_t number, weft_mhc_replay_layer *room, weft_arg_group *to);
} weft_op_desc;

#define WEFT_OP(name) extern const weft_op_desc weft_desc_##name;
#include "core/ops.def"
#undef WEFT_OP

/* Rows of an argument table. The struct is named once, by #define ARGS, in front of each table. */
#define WEFT_DIMS(...) .ndim = sizeof((int[]){__VA_ARGS__}) / sizeof(int), .dim = {__VA_ARGS__}
#define IN(field, t, ...)                                                                                          \
    {                                                                                                              \
        .name = #field, .offset = offsetof(ARGS, field), .kind = WEFT_ARG_IN, .type = WEFT_TYPE_##t,               \
        WEFT_DIMS(__VA_ARGS__)                                                                                     \
    }
#define OPT(field, t, ...)                                                                                         \
    {                                                                                                              \
        .name = #field, .offset = offsetof(ARGS, field), .kind = WEFT_ARG_IN, .type = WEFT_TYPE_##t,               \
        .optional = 1, WEFT_DIMS(__VA_ARGS__)                                                                      \
    }
#define OUT(field, t, ...)                                                                                         \
    {                                                                                                              \
        .name = #field, .offset = offsetof(ARGS, field), .kind = WEFT_ARG_OUT, .type = WEFT_TYPE_##t,              \
        WEFT_DIMS(__VA_ARGS__)                                                                                     \
    }
#define OUT_OPT(field, t, ...)                                                                                     \
    {                                                                                                              \
        .name = #field, .offset = offsetof(ARGS, field), .kind = WEFT_ARG_OUT, .type = WEFT_TYPE_##t,              \
        .optional = 1, WEFT_DIMS(__VA_ARGS__)                                                                      \
    }
#define OUT_OVER_OPT(field, over, t, ...)                                                                          \
    {                                                                                                              \
        .name = #field, .offset = offsetof(ARGS, field), .kind = WEFT_ARG_OUT, .type = WEFT_TYPE_##t,              \
        .optional = 1, .in_place = #over, WEFT_DIMS(__VA_ARGS__)                                                   \
    }
#define OUT_OVER(field, over, t, ...)                                                                              \
    {                                                                                                              \
        .name = #field, .offset = offsetof(ARGS, field), .kind = WEFT_ARG_OUT, .type = WEFT_TYPE_##t,              \
        .in_place = #over, WEFT_DIMS(__VA_ARGS__)                                                                  \
    }
#define GRAD(field, t, ...)                                                                                        \
    {                                                                                                              \
        .name = #field, .offset = offsetof(ARGS, field), .kind = WEFT_ARG_GRAD, .type = WEFT_TYPE_##t,             \
        WEFT_DIMS(__VA_ARGS__)                                                                                     \
    }
#define GRAD_OPT(field, t, ...)                                                                                    \
    {                                                                                                              \
        .name = #field, .offset = offsetof(ARGS, field), .kind = WEFT_ARG_GRAD, .type = WEFT_TYPE_##t,             \
        .optional = 1, WEFT_DIMS(__VA_ARGS__)                                                                      \
    }
#define GRAD_OVER(field, over, opt, t, ...)                                                                        \
    {                                                                                                              \
        .name = #field, .offset = offsetof(ARGS, field), .kind = WEFT_ARG_GRAD, .type = WEFT_TYPE_##t,             \
        .optional = opt, .in_place = #over, WEFT_DIMS(__VA_ARGS__)                                                 \
    }

/* Rows of a table of scalars, which SCALARS_END closes. */
#define SCALAR(field, t)                                                                                           \
    {                                                                                                              \
        .name = #field, .offset = offsetof(ARGS, field), .type = WEFT_SCALAR_##t                                   \
    }
#define SCALARS_END                                                                                                \
    {                                                                                                              \
        .name = NULL                                                                                               \
    }

#define TOKENS WEFT_DIM_TOKENS
#define STREAMS WEFT_DIM_STREAMS
#define CHANNELS WEFT_DIM_CHANNELS
#define GATES WEFT_DIM_GATES
#define ROWS WEFT_DIM_ROWS
#define BATCH WEFT_DIM_BATCH
#define STEPS WEFT_DIM_STEPS
#define KEY_HEADS WEFT_DIM_KEY_HEADS
#define VALUE_HEADS WEFT_DIM_VALUE_HEADS
#define HEADS WEFT_DIM_HEADS
#define KEY_DIM WEFT_DIM_KEY_DIM
#define VALUE_DIM WEFT_DIM_VALUE_DIM
#define CONV WEFT_DIM_CONV
#define WIDTH WEFT_DIM_WIDTH
#define HISTORY WEFT_DIM_HISTORY
#define SEQUENCES WEFT_DIM_SEQUENCES
#define OFFSETS WEFT_DIM_OFFSETS
#define CACHE WEFT_DIM_CACHE
#define STEP_HEADS WEFT_DIM_STEP_HEADS
#define SCALES WEFT_DIM_SCALES

/* Rows that a table of arguments may have. */
enum { WEFT_MAX_ARGS = 64 };
#define WEFT_TABLE_FITS(table)                                                                                     \
    _Static_assert(sizeof(table) / sizeof *(table) <= WEFT_MAX_ARGS, #table " has more rows than WEFT_MAX_ARGS")

/* When a struct grows, its first_size becomes the number it had before. */
#define WEFT_DESC_GROUPS(op, scalars, table, check_fn, group_fn)                                                   \
    WEFT_TABLE_FITS(table);                                                                                        \
    const weft_op_desc weft_desc_##op = {                                                                          \
        .info = {#op, sizeof(weft_##op##_args), (int32_t)(sizeof(table) / sizeof *(table)), table, scalars},       \
        .first_size = sizeof(weft_##op##_args),                                                                    \
        .check = check_fn,                                                                                         \
        .group = group_fn}
#define WEFT_DESC(op, scalars, table, check_fn) WEFT_DESC_GROUPS(op, scalars, table, check_fn, NULL)

/* Resets all sizes of a call; the first tensor with a size binds it. */
void weft_unbind(weft_call *call);
/* Memory spans in address order: a span that overlaps neither neighbour overlaps none. */
typedef struct weft_shelf {
    int32_t count;
    bool
        apart; /* no two meet, so that weft_check_overlap has nothing to find; once two do, none is put there any more */
    uint64_t begin[WEFT_MAX_ARGS + 1], end[WEFT_MAX_ARGS + 1];
} weft_shelf;

/* The arguments of a call, which the workspace must not overlap. */
typedef struct weft_operands {
    const weft_op_desc *desc;
    const void *args;
    weft_shelf shelf;
} weft_operands;

/* Checks the tensors of a table and binds the sizes of the call; `prefix` stands before names in messages. The shelf gets what
 * the call reads and writes; of a query it means nothing. */
weft_status weft_check_tensors(weft_call *call, const weft_op_info *info, const void *args, const char *prefix,
                               weft_shelf *shelf);
/* No output of either group shares memory with another argument of the two (which may be one and the same group). */
weft_status weft_check_overlap(const weft_call *call, const weft_arg_group *a, const weft_arg_group *b);

/* The `bytes` of the workspace that a call uses share nothing with its arguments. */
weft_status weft_check_workspace_apart(const weft_call *call, const weft_operands *operands, const void *workspace,
                                       size_t bytes);

/* Says that it depends on nothing else, so that callers which only need it for an error do not call it before one. */
__attribute__((const)) const char *weft_op_name(weft_op op);

/* Fields of exec; fills in what the call takes from them: instruction set, facts of the device. */
weft_status weft_check_exec(weft_call *call);

/* Scalars that several operators share. */
/* Reserved fields of the scalar structs of a table are zero: a later version may give them a meaning. */
weft_status weft_check_reserved(const weft_call *call, const weft_op_info *info, const void *args,
                                const char *prefix);
weft_status weft_check_eps(const weft_call *call, const char *name, double eps);
weft_status weft_check_enum(const weft_call *call, const char *name, int value, int count);
weft_status weft_check_gates(const weft_call *call, const weft_mhc_numerics *numerics);
weft_status weft_check_sinkhorn(const weft_call *call, const weft_mhc_numerics *numerics);
weft_status weft_check_apply(const weft_call *call, const weft_mhc_numerics *numerics);
/* Something of the residual mix, which a site with two scales does not have. */
weft_status weft_check_no_mix(const weft_call *call, const char *name, const weft_tensor *t);
weft_status weft_check_dropout(const weft_call *call, const char *prefix, const weft_dropout *dropout);
/* Sequences of weft/gdn.h: sizes that fit each other, and on the host the values of offsets and indices, each of -1 to
 * rows - 1 and none but -1 twice. */
weft_status weft_check_sequences(const weft_call *call, const weft_tensor *cu_seqlens);
weft_status weft_check_index(const weft_call *call, const char *name, const weft_tensor *index, int64_t rows);
/* `what` makes no sense unless `needs` is there too. */
weft_status weft_check_needs(const weft_call *call, const char *what, const weft_tensor *w, const char *needs,
                             const weft_tensor *n);

#endif
