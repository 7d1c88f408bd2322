/* SPDX-License-Identifier: Apache-2.0
 *
 * The one way in: every public operator function passes through `enter`, which validates, and `find_kernel`, which
 * looks the call up in a table. Both public functions of each operator are expanded from core/ops.def. */
#include "core/check.h"
#include "core/struct_size.h"

#include <string.h>

static const weft_op_desc *const descs[WEFT_OP_COUNT] = {
#define WEFT_OP(name) [WEFT_OP_##name] = &weft_desc_##name,
#include "core/ops.def"
#undef WEFT_OP
};

/* Tables of a backend, one per operator. The CPU backend has a set per instruction set. */
static const weft_kernel *const ref_tables[WEFT_OP_COUNT] = {
#define WEFT_OP(name) [WEFT_OP_##name] = weft_ref_##name,
#include "core/ops.def"
#undef WEFT_OP
};
static const weft_kernel *const cpu_base_tables[WEFT_OP_COUNT] = {
#define WEFT_OP(name) [WEFT_OP_##name] = weft_cpu_base_##name,
#include "core/ops.def"
#undef WEFT_OP
};
#if WEFT_HAVE_X86
static const weft_kernel *const cpu_avx2_tables[WEFT_OP_COUNT] = {
#define WEFT_OP(name) [WEFT_OP_##name] = weft_cpu_avx2_##name,
#include "core/ops.def"
#undef WEFT_OP
};
static const weft_kernel *const cpu_avx512_tables[WEFT_OP_COUNT] = {
#define WEFT_OP(name) [WEFT_OP_##name] = weft_cpu_avx512_##name,
#include "core/ops.def"
#undef WEFT_OP
};
#endif
#if WEFT_HAVE_CUDA
static const weft_kernel *const cuda_tables[WEFT_OP_COUNT] = {
#define WEFT_OP(name) [WEFT_OP_##name] = weft_cuda_##name,
#include "core/ops.def"
#undef WEFT_OP
};
#endif

/* Operators whose calls take different ways, and what tells which. */
typedef const char *plan_text(const weft_call *call, const void *args);
static plan_text *const cuda_plans[WEFT_OP_COUNT] = {
#if WEFT_HAVE_CUDA
    [WEFT_OP_mhc_pre_fwd] = weft_cuda_mhc_pre_fwd_plan,
    [WEFT_OP_mhc_pre_bwd] = weft_cuda_mhc_pre_bwd_plan,
    [WEFT_OP_mhc_boundary_fwd] = weft_cuda_mhc_boundary_fwd_plan,
    [WEFT_OP_mhc_boundary_bwd] = weft_cuda_mhc_boundary_bwd_plan,
    [WEFT_OP_mhc_head_fwd] = weft_cuda_mhc_head_fwd_plan,
    [WEFT_OP_mhc_head_bwd] = weft_cuda_mhc_head_bwd_plan,
#else
    [0] = NULL, /* C wants one */
#endif
};

/* Operators that look for themselves whether the workspace has room (weft_check_room): to know what they need is to plan the call, and
 * they had better do so once. */
static const bool cuda_checks_room[WEFT_OP_COUNT] = {
    [WEFT_OP_mhc_pre_fwd] = true,
    [WEFT_OP_mhc_boundary_fwd] = true,
    [WEFT_OP_mhc_head_fwd] = true,
};

static const weft_kernel *const *tables_of(const weft_call *call)
{
    if (call->exec->backend == WEFT_BACKEND_REF) return ref_tables;
#if WEFT_HAVE_CUDA
    if (call->exec->backend == WEFT_BACKEND_CUDA) return cuda_tables;
#endif
#if WEFT_HAVE_X86
    if (call->isa >= WEFT_ISA_AVX512) return cpu_avx512_tables; /* AMX is a branch inside the projection */
    if (call->isa == WEFT_ISA_AVX2) return cpu_avx2_tables;
#endif
    return cpu_base_tables;
}

const char *weft_op_name(weft_op op)
{
    return op < WEFT_OP_COUNT ? descs[op]->info.name : "model"; /* src/core/nn.h has no operators */
}

int weft_backend_available(weft_backend backend)
{
#if WEFT_HAVE_CUDA
    if (backend == WEFT_BACKEND_CUDA) return weft_cuda_available();
#endif
    return backend == WEFT_BACKEND_REF || backend == WEFT_BACKEND_CPU;
}

/* ---- validation ------------------------------------------------------------------------------------------------- */

weft_status weft_check_exec(weft_call *call)
{
    const weft_exec *e = call->exec;
    const char *op = weft_op_name(call->op);
    if (e->backend < WEFT_BACKEND_REF || e->backend > WEFT_BACKEND_CUDA)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.backend: expected ref, cpu or cuda, got the number %d", op,
                         (int)e->backend);
    if (e->threads < 0 || e->threads > 4096)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.threads: expected 0 to 4096, got %d", op, (int)e->threads);
    if (e->precision < WEFT_PRECISION_FULL || e->precision > WEFT_PRECISION_TF32)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.precision: expected full or tf32, got the number %d", op,
                         (int)e->precision);
    if (e->trust_pointers != 0 && e->trust_pointers != 1)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.trust_pointers: expected 0 or 1, got %d", op,
                         (int)e->trust_pointers);
    if (e->backend == WEFT_BACKEND_CUDA) {
#if WEFT_HAVE_CUDA
        return weft_cuda_check_device(call);
#else
        return weft_fail(WEFT_ERR_UNSUPPORTED, "%s: exec.backend: expected a backend of this build, got cuda", op);
#endif
    }
    if (e->device != 0)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.device: expected 0 on the %s backend, got %d", op,
                         weft_backend_name(e->backend), (int)e->device);
    if (e->isa < WEFT_ISA_BEST || e->isa > WEFT_ISA_AMX)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.isa: expected a weft_isa, got the number %d", op,
                         (int)e->isa);
    if (e->isa > weft_cpu_isa())
        return weft_fail(WEFT_ERR_UNSUPPORTED, "%s: exec.isa: expected at most %s on this machine, got %s", op,
                         weft_isa_name(weft_cpu_isa()), weft_isa_name(e->isa));
    call->isa = e->isa == WEFT_ISA_BEST ? weft_cpu_isa() : e->isa;
    return WEFT_OK;
}

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

/* A call that may run: its exec and its arguments are the caller's or lie in the copies. */
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
    for (const weft_kernel *k = tables_of(call)[call->op]; k->run; k++)
        if ((k->dtype == WEFT_NONE || k->dtype == call->dtype) &&
            (k->streams == 0 || k->streams == call->streams)) {
            *found = k;
            return WEFT_OK;
        }
    if (!tables_of(call)[call->op]->run)
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

/* Everything up to the launch. */
static weft_status enter(weft_op op, const weft_exec *exec, const void *args, bool query, entered *e)
{
    const weft_op_desc *desc = descs[op];
    weft_call *call = &e->call;
    weft_clear_error();
    *call = (weft_call){.op = op, .query = query};
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
    if (!query && !e->operands.shelf.apart) WEFT_TRY(weft_check_overlap(call, &all, &all));
    return find_kernel(call, &e->kernel);
}

static size_t workspace_of(const entered *e)
{
    if (!e->kernel->workspace) return 0;
    weft_call query = e->call;
    query.exact = !query.query;
    query.query = true;
    return e->kernel->workspace(&query, e->args);
}

/* A workspace that a caller can have at all. */
static weft_status fits_memory(const weft_call *call, size_t need)
{
    if (need <= WEFT_MOST_BYTES) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: expected sizes whose workspace is at most 2^62 bytes, got larger ones",
                     weft_op_name(call->op));
}

weft_status weft_check_room(const weft_call *call, size_t need)
{
    const weft_exec *exec = call->exec;
    if (need == 0) return WEFT_OK;
    WEFT_TRY(fits_memory(call, need));
    if (exec->workspace == NULL || exec->workspace_bytes < need)
        return weft_fail(WEFT_ERR_WORKSPACE, "%s: exec.workspace: expected at least %zu bytes, got %zu%s",
                         weft_op_name(call->op), need, exec->workspace_bytes, exec->workspace ? "" : " at NULL");
#if WEFT_HAVE_CUDA
    if (exec->backend == WEFT_BACKEND_CUDA)
        WEFT_TRY(weft_cuda_check_pointer(call, "exec.", "workspace", exec->workspace));
#endif
    return weft_check_workspace_apart(call, call->operands, exec->workspace, need);
}

static weft_status run(weft_op op, const weft_exec *exec, const void *args)
{
    entered e;
    WEFT_TRY(enter(op, exec, args, false, &e));
    const weft_backend backend = e.call.exec->backend;
    const bool checks_room = backend == WEFT_BACKEND_CUDA && cuda_checks_room[op];
    if (!checks_room) WEFT_TRY(weft_check_room(&e.call, workspace_of(&e)));
#if WEFT_HAVE_CUDA
    if (backend == WEFT_BACKEND_CUDA) {
        int previous;
        WEFT_TRY(weft_cuda_enter(&e.call, &previous));
        weft_status status = e.kernel->run(&e.call, e.args);
        weft_cuda_leave(&e.call, previous);
        return status;
    }
#endif
    if (backend == WEFT_BACKEND_CPU) weft_outputs_ask(&descs[op]->info, e.args);
    return e.kernel->run(&e.call, e.args);
}

static weft_status workspace(weft_op op, const weft_exec *exec, const void *args, size_t *bytes)
{
    entered e;
    weft_clear_error();
    if (bytes == NULL)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: bytes: expected a pointer, got NULL", weft_op_name(op));
    WEFT_TRY(enter(op, exec, args, true, &e));
    const size_t need = workspace_of(&e);
    WEFT_TRY(fits_memory(&e.call, need));
    *bytes = need;
    return WEFT_OK;
}

static weft_status plan(weft_op op, const weft_exec *exec, const void *args, const char **text)
{
    entered e;
    weft_clear_error();
    if (text == NULL)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: path: expected a pointer, got NULL", weft_op_name(op));
    WEFT_TRY(enter(op, exec, args, true, &e));
    e.call.exact = true;
    plan_text *tell = e.call.exec->backend == WEFT_BACKEND_CUDA ? cuda_plans[op] : NULL;
    *text = tell ? tell(&e.call, e.args) : "the only way that this backend has";
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
#if WEFT_HAVE_CUDA
    if (backend == WEFT_BACKEND_CUDA) return cuda_tables[op]->run != NULL;
#endif
    return (backend == WEFT_BACKEND_REF && ref_tables[op]->run) ||
           (backend == WEFT_BACKEND_CPU && cpu_base_tables[op]->run);
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
    return plan((weft_op)op, exec, args, text);
}
