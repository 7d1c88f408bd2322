/* SPDX-License-Identifier: Apache-2.0
 *
 * The one way in: every public operator function passes through `enter`, which validates the call, finds its row in the
 * backend's table and has the row prepare it. Both public functions of each operator are expanded from core/ops.def. */
#include "core/backend.h"
#include "core/check.h"
#include "core/struct_size.h"

#include <string.h>

static const weft_op_desc *const descs[WEFT_OP_COUNT] = {
#define WEFT_OP(name) [WEFT_OP_##name] = &weft_desc_##name,
#include "core/ops.def"
#undef WEFT_OP
};

const char *weft_op_name(weft_op op)
{
    return op < WEFT_OP_COUNT ? descs[op]->info.name : "model"; /* src/core/nn.h has no operators */
}

/* ---- validation ------------------------------------------------------------------------------------------------- */

/* Large enough for the largest args struct. */
typedef union args_copy {
    size_t struct_size;
    double align;
    char bytes[4096];
} args_copy;
#define WEFT_OP(name)                                                                                              \
    _Static_assert(sizeof(weft_##name##_args) <= sizeof(args_copy), "args_copy is too small for " #name);          \
    _Static_assert(offsetof(weft_##name##_args, struct_size) == 0, "struct_size must come first in " #name);
#include "core/ops.def"
#undef WEFT_OP

/* A validated call. exec and args point to the caller's structs, or to the copies where those have another size. */
typedef struct entered {
    weft_call call;
    const void *args;
    const weft_kernel *kernel;
    weft_operands operands;
    weft_exec exec;
    args_copy copy;
} entered;

static weft_status find_kernel(const weft_call *call, const weft_kernel **found)
{
    const weft_kernel *table = call->backend->kernels(call->isa)->op[call->op];
    *found = weft_kernel_for(call, table);
    if (*found) return WEFT_OK;
    if (!weft_kernel_is(table))
        return weft_fail(
            WEFT_ERR_UNSUPPORTED,
            "%s: exec.backend: expected a backend with a kernel for this operator, got %s (ref and cpu "
            "have one)",
            weft_op_name(call->op), weft_backend_name(call->exec->backend));
    return weft_fail(WEFT_ERR_UNSUPPORTED,
                     "%s: expected a case the %s backend has a kernel for, got %s with %lld streams",
                     weft_op_name(call->op), weft_backend_name(call->exec->backend), weft_dtype_name(call->dtype),
                     (long long)call->streams);
}

/* Who asks: a run, weft_op_path, weft_<op>_workspace. */
typedef enum question { RUN, PATH, WORKSPACE } question;

/* Validation, the row, and the row's prepare. */
static weft_status enter(weft_op op, const weft_exec *exec, const void *args, question asked, entered *e,
                         weft_prepared *prepared)
{
    const weft_op_desc *desc = descs[op];
    weft_call *call = &e->call;
    weft_clear_error();
    *call = (weft_call){.op = op, .query = asked != RUN, .any_address = asked == WORKSPACE};
    weft_unbind(call);
    WEFT_TRY(weft_take_exec(desc->info.name, exec, &e->exec, &call->exec));
    if (args == NULL)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: args: expected a pointer, got NULL", desc->info.name);
    const weft_sizes sizes = {desc->first_size, desc->info.args_size, "WEFT_ARGS"};
    WEFT_TRY(weft_take_struct(desc->info.name, "", &sizes, args, &e->copy, &e->args));
    WEFT_TRY(weft_check_exec(call));
    WEFT_TRY(weft_check_reserved(call, &desc->info, e->args, ""));
    e->operands.desc = desc, e->operands.args = e->args;
    call->operands = &e->operands;
    WEFT_TRY(weft_check_tensors(call, &desc->info, e->args, "", &e->operands.shelf));
    if (call->dtype == WEFT_NONE) call->dtype = WEFT_F32;
    WEFT_TRY(desc->check(call, e->args));
    if (call->f64 && call->exec->backend != WEFT_BACKEND_REF)
        return weft_fail(WEFT_ERR_UNSUPPORTED,
                         "%s: expected f32, bf16 or f16 on the %s backend, got f64 (ref serves it)",
                         desc->info.name, weft_backend_name(call->exec->backend));
    const weft_arg_group all = {&desc->info, e->args, -1};
    if (asked == RUN && !e->operands.shelf.apart) WEFT_TRY(weft_check_overlap(call, &all, &all));
    WEFT_TRY(find_kernel(call, &e->kernel));
    weft_prepare(e->kernel, call, e->args, prepared);
    return WEFT_OK;
}

/* Rejects sizes whose workspace no machine can address. */
static weft_status fits_memory(const weft_call *call, size_t need)
{
    if (need <= WEFT_MOST_BYTES) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: expected sizes whose workspace is at most 2^62 bytes, got larger ones",
                     weft_op_name(call->op));
}

/* exec.workspace has `need` bytes in the backend's memory and overlaps no argument. */
static weft_status check_room(const weft_call *call, size_t need)
{
    const weft_exec *exec = call->exec;
    if (need == 0) return WEFT_OK;
    WEFT_TRY(fits_memory(call, need));
    if (exec->workspace == NULL || exec->workspace_bytes < need)
        return weft_fail(WEFT_ERR_WORKSPACE, "%s: exec.workspace: expected at least %zu bytes, got %zu%s",
                         weft_op_name(call->op), need, exec->workspace_bytes, exec->workspace ? "" : " at NULL");
    WEFT_TRY(weft_check_pointer(call, "exec.", "workspace", exec->workspace));
    return weft_check_workspace_apart(call, call->operands, exec->workspace, need);
}

static weft_status run(weft_op op, const weft_exec *exec, const void *args)
{
    entered e;
    weft_prepared prepared;
    int previous = 0;
    WEFT_TRY(enter(op, exec, args, RUN, &e, &prepared));
    WEFT_TRY(check_room(&e.call, prepared.workspace));
    const weft_backend_table *backend = e.call.backend;
    if (backend->enter) WEFT_TRY(backend->enter(&e.call, &previous));
    const weft_status status = weft_run(e.kernel, &e.call, e.args, &prepared);
    if (backend->leave) backend->leave(&e.call, previous);
    return status;
}

static weft_status workspace(weft_op op, const weft_exec *exec, const void *args, size_t *bytes)
{
    entered e;
    weft_prepared prepared;
    weft_clear_error();
    if (bytes == NULL)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: bytes: expected a pointer, got NULL", weft_op_name(op));
    WEFT_TRY(enter(op, exec, args, WORKSPACE, &e, &prepared));
    WEFT_TRY(fits_memory(&e.call, prepared.workspace));
    *bytes = prepared.workspace;
    return WEFT_OK;
}

static weft_status path(weft_op op, const weft_exec *exec, const void *args, const char **text)
{
    entered e;
    weft_prepared prepared;
    weft_clear_error();
    if (text == NULL)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: path: expected a pointer, got NULL", weft_op_name(op));
    WEFT_TRY(enter(op, exec, args, PATH, &e, &prepared));
    *text = prepared.path;
    return WEFT_OK;
}

/* ---- the public functions --------------------------------------------------------------------------------------- */

#define WEFT_OP(name)                                                                                              \
    weft_status weft_##name(const weft_exec *exec, const weft_##name##_args *args)                                 \
    {                                                                                                              \
        return run(WEFT_OP_##name, exec, args);                                                                    \
    }                                                                                                              \
    weft_status weft_##name##_workspace(const weft_exec *exec, const weft_##name##_args *args, size_t *bytes)      \
    {                                                                                                              \
        return workspace(WEFT_OP_##name, exec, args, bytes);                                                       \
    }
#include "core/ops.def"
#undef WEFT_OP

int32_t weft_op_count(void)
{
    return WEFT_OP_COUNT;
}

const weft_op_info *weft_op_at(int32_t index)
{
    return index >= 0 && index < WEFT_OP_COUNT ? &descs[index]->info : NULL;
}

const weft_op_info *weft_op_find(const char *name)
{
    for (int i = 0; name && i < WEFT_OP_COUNT; i++)
        if (strcmp(descs[i]->info.name, name) == 0) return &descs[i]->info;
    return NULL;
}

/* The operator a description belongs to, or -1. */
static int index_of(const weft_op_info *info)
{
    for (int i = 0; i < WEFT_OP_COUNT; i++)
        if (&descs[i]->info == info) return i;
    return -1;
}

int weft_op_has(const weft_op_info *info, weft_backend backend)
{
    int op = index_of(info);
    if (op < 0) return 0;
    const weft_backend_table *b = weft_backend_of(backend);
    return b && weft_kernel_is(b->kernels(WEFT_ISA_BASE)->op[op]);
}

weft_status weft_op_call(const weft_op_info *info, const weft_exec *exec, const void *args)
{
    int op = index_of(info);
    if (op < 0)
        return weft_fail(WEFT_ERR_ARGUMENT, "weft_op_call: op: expected an operator from weft_op_at, got another");
    return run((weft_op)op, exec, args);
}

weft_status weft_op_workspace(const weft_op_info *info, const weft_exec *exec, const void *args, size_t *bytes)
{
    int op = index_of(info);
    if (op < 0)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "weft_op_workspace: op: expected an operator from weft_op_at, got another");
    return workspace((weft_op)op, exec, args, bytes);
}

weft_status weft_op_path(const weft_op_info *info, const weft_exec *exec, const void *args, const char **text)
{
    int op = index_of(info);
    if (op < 0)
        return weft_fail(WEFT_ERR_ARGUMENT, "weft_op_path: op: expected an operator from weft_op_at, got another");
    return path((weft_op)op, exec, args, text);
}
