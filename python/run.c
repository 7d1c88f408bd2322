/* SPDX-License-Identifier: Apache-2.0
 *
 * A call of the library: where it runs, its workspace, its errors. */
#include "ext.h"

static void raise_status(weft_status status)
{
    PyObject *type = status == WEFT_ERR_UNSUPPORTED                              ? PyExc_NotImplementedError
                     : status == WEFT_ERR_ARGUMENT || status == WEFT_ERR_OVERLAP ? PyExc_ValueError
                                                                                 : PyExc_RuntimeError;
    PyErr_SetString(type, weft_last_error());
}

/* Workspace on the host comes from malloc, on a device from the framework's allocator, which knows the stream. */
static bool take_workspace(gathered *g, weft_exec *exec, size_t bytes, void **host, PyObject **tensor)
{
    exec->workspace_bytes = bytes;
    if (bytes == 0) return true;
    if (exec->backend != WEFT_BACKEND_CUDA) {
        exec->workspace = *host = malloc(bytes);
        if (!*host) PyErr_NoMemory();
        return *host != NULL;
    }
    if (!g->state->hook[HOOK_WORKSPACE]) {
        PyErr_SetString(PyExc_RuntimeError, "no allocator for device memory is set: import weft.torch");
        return false;
    }
    *tensor = PyObject_CallFunction(g->state->hook[HOOK_WORKSPACE], "ni", (Py_ssize_t)bytes, (int)exec->device);
    if (!*tensor) return false;
    dl_tensor v;
    if (!ext_view_tensor(g, "workspace", *tensor, &v)) return false;
    exec->workspace = v.data;
    return true;
}

static weft_status call_unlocked(const weft_op_info *op, const weft_exec *exec, const void *args)
{
    PyThreadState *thread = PyEval_SaveThread();
    weft_status status = weft_op_call(op, exec, args);
    PyEval_RestoreThread(thread);
    return status;
}

static bool fill_exec(const gathered *g, int precision, int threads, weft_exec *exec)
{
    *exec = WEFT_STRUCT(weft_exec, .backend = g->dtype == WEFT_F64 ? WEFT_BACKEND_REF : WEFT_BACKEND_CPU,
                        .precision = (weft_precision)precision, .threads = threads);
    if (g->device.type != DL_CUDA) return true;
    exec->backend = WEFT_BACKEND_CUDA;
    exec->device = g->device.index;
    exec->threads = 0;
    exec->trust_pointers = 1; /* DLPack names the device of every tensor, and view_tensor has compared them */
    if (g->exchange->stream(DL_CUDA, g->device.index, &exec->stream) == 0) return true;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "%s: no current stream", g->op);
    return false;
}

/* All that a workspace depends on is as it was. */
static bool like_last(const last_run *last, const weft_op_info *op, const weft_exec *exec, const char *args)
{
    const weft_exec *e = &last->exec;
    if (!last->args || e->backend != exec->backend || e->device != exec->device || e->threads != exec->threads ||
        e->precision != exec->precision)
        return false;
    const size_t shape = offsetof(weft_tensor, dtype);
    for (int32_t k = 0; k < op->num_args; k++) {
        const weft_arg_info *arg = &op->args[k];
        const char *now = args + arg->offset, *then = (const char *)last->args + arg->offset;
        if (memcmp(now + shape, then + shape, sizeof(weft_tensor) - shape) != 0) return false;
        if (arg->kind == WEFT_ARG_GRAD && ((const weft_grad *)now)->add != ((const weft_grad *)then)->add)
            return false;
    }
    return true;
}

static void keep_last(last_run *last, const weft_op_info *op, const weft_exec *exec, const void *args, size_t bytes)
{
    if (!last->args) last->args = malloc(op->args_size);
    if (!last->args) return; /* the next run asks again */
    memcpy(last->args, args, op->args_size);
    last->exec = *exec;
    last->bytes = bytes;
}

/* One try with `bytes` of workspace; false where Python has an error. */
static bool try_call(gathered *g, const weft_op_info *op, weft_exec *exec, const void *args, size_t bytes,
                     weft_status *status)
{
    void *host = NULL;
    PyObject *tensor = NULL;
    bool ok = take_workspace(g, exec, bytes, &host, &tensor);
    if (ok) *status = call_unlocked(op, exec, args);
    free(host);
    Py_XDECREF(tensor);
    return ok;
}

bool ext_run_call(gathered *g, const weft_op_info *op, const void *args, int precision, int threads, last_run *last)
{
    weft_exec exec;
    if (!fill_exec(g, precision, threads, &exec)) return false;
    /* Where the last run took none, other shapes will hardly take any: to try is cheaper than to ask, and to compare. The first
     * time too: what the library says beforehand is enough for any address, and this one's may need less. */
    const bool none = last && last->bytes == 0, known = last && !none && like_last(last, op, &exec, args);
    size_t bytes = known ? last->bytes : 0;
    weft_status status = WEFT_ERR_WORKSPACE;
    if ((none || known) && !try_call(g, op, &exec, args, bytes, &status)) return false;
    if (status == WEFT_ERR_WORKSPACE) {
        status = weft_op_workspace(op, &exec, args, &bytes);
        if (status == WEFT_OK && !try_call(g, op, &exec, args, bytes, &status)) return false;
    }
    if (status != WEFT_OK) {
        raise_status(status);
        return false;
    }
    if (last && !known && !(none && bytes == 0)) keep_last(last, op, &exec, args, bytes);
    return true;
}
