/* SPDX-License-Identifier: Apache-2.0
 *
 * weft._C: libweft for Python, on CPython's stable ABI. It knows no operator by name: argument tables come from
 * weft/ops.h, tensors come through DLPack's exchange interface, and every error is the library's own sentence.
 *
 *     call = _C.Call("mhc_post_fwd", {"numerics": (...), "dropout": (p, seed, site, token_base, shared)})
 *     _C.run(call, add, precision, threads, step, x, f, bias, post, res, y)
 *
 * A Call holds an args struct with its scalars filled in. run fills in the tensors, in the order of the table, None where
 * one is absent; bit k of `add` says that argument k is added to rather than overwritten; `step` is the tensor whose first
 * element is the dropout's step, or None. Tensors may have any number of leading dimensions that collapse to one token
 * stride, and a weight may be given flat, as [.., n*C]. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <weft/gdn.h>
#include <weft/mhc.h>
#include <weft/norm.h>
#include <weft/ops.h>

#include "dlpack.h"

enum { MAX_ARGS_SIZE = 4096, KNOWN_TYPES = 8 };

/* Tensor types whose exchange table has been looked up. Types are kept alive by the references here. */
typedef struct known_type {
    PyTypeObject *type;
    const dl_exchange *exchange;
} known_type;

typedef struct module_state {
    PyTypeObject *call_type;
    PyObject *allocate; /* allocate(bytes, device index) -> a tensor in CUDA memory, or NULL */
    known_type known[KNOWN_TYPES];
    int num_known;
} module_state;

typedef struct call_object {
    PyObject_HEAD const weft_op_info *op;
    size_t dropout; /* offset of the weft_dropout in args, 0 where there is none */
    bool frugal;    /* the last run needed no workspace: the next one tries without asking */
    void *args;
} call_object;

/* What a call gathers from its tensors. */
typedef struct gathered {
    const char *op;
    module_state *state;
    bool any; /* a tensor was seen: device, dtype and exchange are those of the first one */
    dl_device device;
    weft_dtype dtype;
    const dl_exchange *exchange;
    const char *first;
    int64_t streams;
} gathered;

/* ---- errors ---------------------------------------------------------------------------------------------------------- */

static PyObject *raise_status(weft_status status)
{
    PyObject *type = status == WEFT_ERR_UNSUPPORTED                              ? PyExc_NotImplementedError
                     : status == WEFT_ERR_ARGUMENT || status == WEFT_ERR_OVERLAP ? PyExc_ValueError
                                                                                 : PyExc_RuntimeError;
    PyErr_SetString(type, weft_last_error());
    return NULL;
}

static const char *device_name(dl_device device, char text[32])
{
    const char *type = device.type == DL_CPU ? "cpu" : device.type == DL_CUDA ? "cuda" : "another device";
    if (device.type == DL_CUDA)
        PyOS_snprintf(text, 32, "%s:%d", type, (int)device.index);
    else
        PyOS_snprintf(text, 32, "%s", type);
    return text;
}

/* ---- tensors --------------------------------------------------------------------------------------------------------- */

static const dl_exchange *find_exchange(module_state *state, PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < state->num_known; i++)
        if (state->known[i].type == type) return state->known[i].exchange;

    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    if (!capsule) {
        PyErr_Clear();
        return NULL;
    }
    const dl_exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule); /* the table is static: the interface asks for that */
    if (!exchange) PyErr_Clear();
    const dl_header *header = exchange ? &exchange->header : NULL;
    while (header && header->major > DL_MAJOR) header = header->older;
    exchange = header && header->major == DL_MAJOR ? (const dl_exchange *)header : NULL;
    if (!exchange || !exchange->view) return NULL;
    if (state->num_known < KNOWN_TYPES) {
        Py_INCREF(type);
        state->known[state->num_known++] = (known_type){type, exchange};
    }
    return exchange;
}

static weft_dtype dtype_of(dl_dtype dtype)
{
    if (dtype.lanes != 1) return WEFT_NONE;
    if (dtype.code == DL_BFLOAT && dtype.bits == 16) return WEFT_BF16;
    if (dtype.code == DL_INT) return dtype.bits == 32 ? WEFT_I32 : dtype.bits == 64 ? WEFT_I64 : WEFT_NONE;
    if (dtype.code != DL_FLOAT) return WEFT_NONE;
    return dtype.bits == 16 ? WEFT_F16 : dtype.bits == 32 ? WEFT_F32 : dtype.bits == 64 ? WEFT_F64 : WEFT_NONE;
}

/* Joins the dimensions [0, count) of v into one. */
static bool collapse(const dl_tensor *v, int count, int64_t *size, int64_t *stride)
{
    int64_t next = 0; /* stride that the next outer dimension must have; 0 before the first one of more than one */
    *size = 1;
    *stride = 0;
    for (int d = 0; d < count; d++)
        if (v->shape[d] == 0) {
            *size = 0;
            return true;
        }
    for (int d = count - 1; d >= 0; d--) {
        if (v->shape[d] == 1) continue;
        if (*size > 1 && v->strides[d] != next) return false;
        if (*size == 1) *stride = v->strides[d];
        *size *= v->shape[d];
        next = v->strides[d] * v->shape[d];
    }
    return true;
}

/* Looks at a tensor and checks what the library cannot: that it is one, and that all are on one device. */
static bool view_tensor(gathered *g, const char *name, PyObject *object, dl_tensor *v)
{
    const dl_exchange *exchange = find_exchange(g->state, object);
    if (!exchange) {
        PyObject *type = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__name__");
        PyErr_Format(PyExc_TypeError, "%s: %s: expected a tensor with DLPack's exchange interface, got %S", g->op,
                     name, type ? type : Py_None);
        Py_XDECREF(type);
        return false;
    }
    if (exchange->view(object, v) != 0) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%s: %s: the tensor cannot be read", g->op, name);
        return false;
    }
    v->data = v->data ? (char *)v->data + v->byte_offset : NULL;
    if (v->device.type == DL_CUDA_HOST) v->device.type = DL_CPU;
    if (v->device.type == DL_CPU) v->device.index = 0;
    char want[32], got[32];
    if (v->device.type != DL_CPU && v->device.type != DL_CUDA) {
        PyErr_Format(PyExc_ValueError, "%s: %s: expected a tensor on cpu or cuda, got one on %s", g->op, name,
                     device_name(v->device, got));
        return false;
    }
    if (!g->any) {
        *g = (gathered){g->op, g->state, true, v->device, dtype_of(v->dtype), exchange, name, g->streams};
    } else if (v->device.type != g->device.type || v->device.index != g->device.index) {
        PyErr_Format(PyExc_ValueError, "%s: %s: expected a tensor on %s like %s, got one on %s", g->op, name,
                     device_name(g->device, want), g->first, device_name(v->device, got));
        return false;
    }
    return true;
}

static bool wrong_shape(const gathered *g, const weft_arg_info *arg, const dl_tensor *v, const char *expected)
{
    char text[128] = "";
    for (int d = 0; d < v->ndim && strlen(text) < 96; d++)
        PyOS_snprintf(text + strlen(text), sizeof text - strlen(text), "%s%lld", d ? ", " : "",
                      (long long)v->shape[d]);
    PyErr_Format(PyExc_ValueError, "%s: %s: expected %s, got shape [%s]", g->op, arg->name, expected, text);
    return false;
}

static bool read_tensor(gathered *g, const weft_arg_info *arg, PyObject *object, weft_tensor *t)
{
    dl_tensor v;
    if (!view_tensor(g, arg->name, object, &v)) return false;
    *t = (weft_tensor){v.data, dtype_of(v.dtype), arg->ndim, {0}, {0}};
    if (t->dtype == WEFT_NONE) {
        PyErr_Format(PyExc_ValueError,
                     "%s: %s: expected float32, bfloat16, float16 or float64, or int32 or int64 for indices, got "
                     "another dtype of %d bits",
                     g->op, arg->name, (int)v.dtype.bits);
        return false;
    }
    char expected[96];
    int first = 0; /* dimensions of t that the leading dimensions of v have filled */
    int lead = 0;  /* and how many dimensions of v these are */
    if (arg->dim[0] == WEFT_DIM_TOKENS) {
        lead = v.ndim - (arg->ndim - 1);
        first = 1;
        if (lead < 0) {
            PyOS_snprintf(expected, sizeof expected, "at least %d dimensions", (int)arg->ndim - 1);
            return wrong_shape(g, arg, &v, expected);
        }
        if (!collapse(&v, lead, &t->shape[0], &t->stride[0]))
            return wrong_shape(g, arg, &v, "leading dimensions that are one run of tokens (call contiguous())");
    }
    int rest = v.ndim - lead, want = arg->ndim - first;
    bool weight = first == 0 && want >= 2 && arg->dim[want - 2] == WEFT_DIM_STREAMS &&
                  arg->dim[want - 1] == WEFT_DIM_CHANNELS;
    if (weight && rest == want - 1 && g->streams > 0 && v.shape[rest - 1] % g->streams == 0) {
        int64_t channels = v.shape[rest - 1] / g->streams, step = v.strides[rest - 1];
        for (int d = 0; d < rest - 1; d++) t->shape[d] = v.shape[d], t->stride[d] = v.strides[d];
        t->shape[want - 2] = g->streams, t->stride[want - 2] = channels * step;
        t->shape[want - 1] = channels, t->stride[want - 1] = step;
        return true;
    }
    if (rest != want) {
        PyOS_snprintf(expected, sizeof expected, "%d dimensions", want);
        return wrong_shape(g, arg, &v, expected);
    }
    for (int d = 0; d < rest; d++) {
        t->shape[first + d] = v.shape[lead + d];
        t->stride[first + d] = v.strides[lead + d];
        if (arg->dim[first + d] == WEFT_DIM_STREAMS && g->streams == 0) g->streams = v.shape[lead + d];
    }
    return true;
}

/* Fills the tensors of an args struct from `count` objects in the order of its table. */
static bool read_tensors(gathered *g, const weft_op_info *info, char *args, PyObject *const *objects, uint64_t add)
{
    for (int32_t k = 0; k < info->num_args; k++) {
        const weft_arg_info *arg = &info->args[k];
        if (Py_IsNone(objects[k])) continue; /* a missing one that is needed is the library's to refuse */
        weft_tensor *t = (weft_tensor *)(args + arg->offset);
        if (arg->kind == WEFT_ARG_GRAD) {
            weft_grad *grad = (weft_grad *)t;
            grad->add = add >> k & 1;
            t = &grad->to;
        }
        if (!read_tensor(g, arg, objects[k], t)) return false;
    }
    return true;
}

/* The dropout's step: the address of a tensor's first 8 bytes. */
static bool read_step(gathered *g, PyObject *object, const uint64_t **step)
{
    *step = NULL;
    if (Py_IsNone(object)) return true;
    dl_tensor v;
    if (!view_tensor(g, "step", object, &v)) return false;
    int64_t count = 1;
    for (int d = 0; d < v.ndim; d++) count *= v.shape[d];
    if (v.dtype.bits != 64 || v.dtype.lanes != 1 || count < 1) {
        PyErr_Format(PyExc_ValueError, "%s: step: expected an int64 or uint64 tensor of one element", g->op);
        return false;
    }
    *step = v.data;
    return true;
}

/* ---- scalars --------------------------------------------------------------------------------------------------------- */

static bool read_numerics(PyObject *value, weft_mhc_numerics *n)
{
    double kind, rule, iters, apply; /* whole numbers, as floats: a registered operator has them in one list */
    if (!PyTuple_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "numerics: expected a tuple of eight numbers");
        return false;
    }
    if (!PyArg_ParseTuple(value, "dddddddd;numerics: eight numbers", &n->rms_eps, &kind, &n->pre_eps, &n->post_mult,
                          &rule, &n->sinkhorn_eps, &iters, &apply))
        return false;
    n->rms_eps_kind = (weft_eps_kind)kind;
    n->sinkhorn = (weft_sinkhorn)rule;
    n->sinkhorn_iters = iters >= INT32_MIN && iters <= INT32_MAX ? (int32_t)iters : 0;
    n->apply = (weft_apply)apply;
    return true;
}

static bool read_dropout(PyObject *value, weft_dropout *d)
{
    unsigned long long seed, site;
    long long base;
    if (!PyTuple_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "dropout: expected a tuple (p, seed, site, token_base, shared)");
        return false;
    }
    if (!PyArg_ParseTuple(value, "dKKLi;dropout: (p, seed, site, token_base, shared)", &d->p, &seed, &site, &base,
                          &d->shared))
        return false;
    d->seed = seed;
    d->site = site;
    d->token_base = base;
    return true;
}

static bool read_gdn(PyObject *value, weft_gdn_options *o)
{
    double activation, l2norm, map, rounding, chunk, log2; /* whole numbers, as in numerics */
    if (!PyTuple_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "options: expected a tuple of nine numbers");
        return false;
    }
    if (!PyArg_ParseTuple(value, "ddddddddd;options: nine numbers", &activation, &l2norm, &o->l2_eps, &o->q_scale,
                          &o->beta_scale, &map, &rounding, &chunk, &log2))
        return false;
    o->activation = (weft_gdn_activation)activation;
    o->l2norm = (int32_t)l2norm;
    o->head_map = (weft_gdn_head_map)map;
    o->rounding = (weft_gdn_rounding)rounding;
    o->g_chunk = chunk >= INT32_MIN && chunk <= INT32_MAX ? (int32_t)chunk : -1;
    o->g_log2 = (int32_t)log2;
    return true;
}

static bool read_scalar(const weft_scalar_info *scalar, PyObject *value, void *field)
{
    switch (scalar->type) {
    case WEFT_SCALAR_REAL: *(double *)field = PyFloat_AsDouble(value); return !PyErr_Occurred();
    case WEFT_SCALAR_INT: *(int32_t *)field = (int32_t)PyLong_AsLong(value); return !PyErr_Occurred();
    case WEFT_SCALAR_NUMERICS: return read_numerics(value, field);
    case WEFT_SCALAR_DROPOUT: return read_dropout(value, field);
    case WEFT_SCALAR_GDN: return read_gdn(value, field);
    }
    PyErr_Format(PyExc_SystemError, "%s: a kind of scalar this module does not know", scalar->name);
    return false;
}

/* Fills scalars from a dict; a name that the operator does not have is an error. */
static bool read_scalars(const weft_op_info *info, PyObject *values, char *args)
{
    PyObject *key, *value;
    Py_ssize_t pos = 0;
    while (PyDict_Next(values, &pos, &key, &value)) {
        const weft_scalar_info *s = info->scalars;
        while (s && s->name && !(PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, s->name) == 0)) s++;
        if (!s || !s->name) {
            PyErr_Format(PyExc_TypeError, "%s: expected a scalar of this operator, got %R", info->name, key);
            return false;
        }
        if (!read_scalar(s, value, args + s->offset)) return false;
    }
    return true;
}

/* ---- Call ------------------------------------------------------------------------------------------------------------ */

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    const char *name;
    PyObject *scalars = NULL;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Call takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "s|O!:Call", &name, &PyDict_Type, &scalars)) return NULL;
    const weft_op_info *op = weft_op_find(name);
    if (!op) {
        PyErr_Format(PyExc_ValueError, "Call: expected the name of an operator, got '%s'", name);
        return NULL;
    }
    if (op->args_size > MAX_ARGS_SIZE) {
        PyErr_Format(PyExc_SystemError, "%s: its arguments do not fit this module", name);
        return NULL;
    }
    call_object *self = (call_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->op = op;
    self->args = calloc(1, op->args_size);
    if (!self->args) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    *(size_t *)self->args = op->args_size;
    for (const weft_scalar_info *s = op->scalars; s && s->name; s++)
        if (s->type == WEFT_SCALAR_DROPOUT) self->dropout = s->offset;
    if (scalars && !read_scalars(op, scalars, self->args)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void call_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    free(((call_object *)object)->args);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyType_Slot call_slots[] = {{Py_tp_new, call_new},
                                   {Py_tp_dealloc, call_dealloc},
                                   {Py_tp_doc, "Call(name, scalars={}): an operator with its scalars"},
                                   {0, NULL}};
static PyType_Spec call_spec = {"weft._C.Call", sizeof(call_object), 0, Py_TPFLAGS_DEFAULT, call_slots};

/* ---- running ---------------------------------------------------------------------------------------------------------- */

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
    if (!g->state->allocate) {
        PyErr_SetString(PyExc_RuntimeError, "no allocator for device memory is set: import weft.torch");
        return false;
    }
    *tensor = PyObject_CallFunction(g->state->allocate, "ni", (Py_ssize_t)bytes, (int)exec->device);
    if (!*tensor) return false;
    dl_tensor v;
    if (!view_tensor(g, "workspace", *tensor, &v)) return false;
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
    *exec = (weft_exec){.backend = g->dtype == WEFT_F64 ? WEFT_BACKEND_REF : WEFT_BACKEND_CPU,
                        .precision = (weft_precision)precision,
                        .threads = threads};
    if (g->device.type != DL_CUDA) return true;
    exec->backend = WEFT_BACKEND_CUDA;
    exec->device = g->device.index;
    exec->threads = 0;
    if (g->exchange->stream(DL_CUDA, g->device.index, &exec->stream) == 0) return true;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "%s: no current stream", g->op);
    return false;
}

/* `frugal` spares most small operators a second validation, which is a good part of what they cost on a GPU. */
static bool run_call(gathered *g, const weft_op_info *op, void *args, int precision, int threads, bool *frugal)
{
    weft_exec exec;
    if (!fill_exec(g, precision, threads, &exec)) return false;
    weft_status status = WEFT_ERR_WORKSPACE;
    if (*frugal) status = call_unlocked(op, &exec, args);
    *frugal = status == WEFT_OK;
    if (status == WEFT_OK) return true;

    size_t bytes = 0;
    void *host = NULL;
    PyObject *tensor = NULL;
    if (status == WEFT_ERR_WORKSPACE) status = weft_op_workspace(op, &exec, args, &bytes);
    if (status != WEFT_OK) {
        raise_status(status);
        return false;
    }
    *frugal = bytes == 0;
    bool ok = take_workspace(g, &exec, bytes, &host, &tensor);
    if (ok) {
        status = call_unlocked(op, &exec, args);
        ok = status == WEFT_OK;
        if (!ok) raise_status(status);
    }
    free(host);
    Py_XDECREF(tensor);
    return ok;
}

enum { RUN_CALL, RUN_ADD, RUN_PRECISION, RUN_THREADS, RUN_STEP, RUN_TENSORS };

static PyObject *run(PyObject *module, PyObject *const *objects, Py_ssize_t count)
{
    module_state *state = PyModule_GetState(module);
    if (count < RUN_TENSORS || Py_TYPE(objects[RUN_CALL]) != state->call_type) {
        PyErr_SetString(PyExc_TypeError, "run: expected (call, add, precision, threads, step, tensor ...)");
        return NULL;
    }
    call_object *call = (call_object *)objects[RUN_CALL];
    const weft_op_info *op = call->op;
    if (count - RUN_TENSORS != op->num_args) {
        PyErr_Format(PyExc_TypeError, "%s: expected %d tensors, got %zd", op->name, (int)op->num_args,
                     count - RUN_TENSORS);
        return NULL;
    }
    uint64_t add = PyLong_AsUnsignedLongLong(objects[RUN_ADD]);
    long precision = PyLong_AsLong(objects[RUN_PRECISION]), threads = PyLong_AsLong(objects[RUN_THREADS]);
    if (PyErr_Occurred()) return NULL;

    size_t args[MAX_ARGS_SIZE / sizeof(size_t)];
    memcpy(args, call->args, op->args_size);
    gathered g = {.op = op->name, .state = state};
    if (!read_tensors(&g, op, (char *)args, objects + RUN_TENSORS, add)) return NULL;
    if (call->dropout) {
        weft_dropout *dropout = (weft_dropout *)((char *)args + call->dropout);
        if (!read_step(&g, objects[RUN_STEP], &dropout->step)) return NULL;
    }
    if (!run_call(&g, op, args, (int)precision, (int)threads, &call->frugal)) return NULL;
    Py_RETURN_NONE;
}

/* One layer of a replay: a tuple (scalars dict, step, tensor ...). */
static bool read_layer(gathered *g, PyObject *object, weft_mhc_replay_layer *layer)
{
    const weft_op_info *info = weft_mhc_replay_layer_info();
    PyObject *items[64];
    if (!PyTuple_Check(object) || PyTuple_Size(object) != info->num_args + 2 || info->num_args + 2 > 64 ||
        !PyDict_Check(PyTuple_GetItem(object, 0))) {
        PyErr_Format(PyExc_TypeError, "%s: layers: expected tuples (scalars, step, %d tensors)", g->op,
                     (int)info->num_args);
        return false;
    }
    for (int32_t k = 0; k < info->num_args + 2; k++) items[k] = PyTuple_GetItem(object, k);
    return read_scalars(info, items[0], (char *)layer) && read_tensors(g, info, (char *)layer, items + 2, 0) &&
           read_step(g, items[1], &layer->dropout.step);
}

static PyObject *replay(PyObject *module, PyObject *tuple)
{
    PyObject *numerics, *x, *list;
    int threads;
    if (!PyArg_ParseTuple(tuple, "OiOO!:replay", &numerics, &threads, &x, &PyList_Type, &list)) return NULL;
    const weft_op_info *op = weft_op_find("mhc_replay_fwd");
    weft_mhc_replay_fwd_args args = {.struct_size = sizeof args};
    gathered g = {.op = op->name, .state = PyModule_GetState(module)};
    if (!read_numerics(numerics, &args.numerics) || !read_tensors(&g, op, (char *)&args, &x, 0)) return NULL;
    Py_ssize_t count = PyList_Size(list);
    weft_mhc_replay_layer *layers = calloc(count ? (size_t)count : 1, sizeof *layers);
    if (!layers) return PyErr_NoMemory();
    bool ok = true, frugal = false;
    for (Py_ssize_t l = 0; ok && l < count; l++) ok = read_layer(&g, PyList_GetItem(list, l), &layers[l]);
    args.layers = layers;
    args.num_layers = count > INT32_MAX ? INT32_MAX : (int32_t)count;
    ok = ok && run_call(&g, op, &args, 0, threads, &frugal);
    free(layers);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* ---- the rest of the module -------------------------------------------------------------------------------------------- */

static PyObject *set_allocator(PyObject *module, PyObject *function)
{
    module_state *state = PyModule_GetState(module);
    Py_INCREF(function);
    Py_XDECREF(state->allocate);
    state->allocate = function;
    Py_RETURN_NONE;
}

static PyObject *preset(PyObject *module, PyObject *name)
{
    (void)module;
    PyObject *bytes = PyUnicode_AsUTF8String(name);
    if (!bytes) return NULL;
    weft_mhc_numerics n;
    weft_mhc_preset found = weft_mhc_preset_find(PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    if (found == WEFT_PRESET_COUNT || weft_mhc_preset_numerics(found, &n) != WEFT_OK) {
        PyErr_Format(PyExc_ValueError, "preset: expected one of weft's presets, got %R", name);
        return NULL;
    }
    return Py_BuildValue("diddidii", n.rms_eps, (int)n.rms_eps_kind, n.pre_eps, n.post_mult, (int)n.sinkhorn,
                         n.sinkhorn_eps, (int)n.sinkhorn_iters, (int)n.apply);
}

static PyObject *presets(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
    for (int p = 0; list && p < WEFT_PRESET_COUNT; p++) {
        PyObject *name = PyUnicode_FromString(weft_mhc_preset_name((weft_mhc_preset)p));
        if (!name || PyList_Append(list, name) != 0) Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *describe(const weft_op_info *op)
{
    static const char *const kinds[] = {"in", "out", "grad"};
    PyObject *list = PyList_New(0);
    for (int32_t k = 0; list && k < op->num_args; k++) {
        const weft_arg_info *a = &op->args[k];
        PyObject *row = Py_BuildValue("ssi", a->name, kinds[a->kind], (int)a->optional);
        if (!row || PyList_Append(list, row) != 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

/* ops(): a dict of operators, each a list of (name, kind, optional). */
static PyObject *ops(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *dict = PyDict_New();
    for (int32_t i = 0; dict && i < weft_op_count(); i++) {
        PyObject *rows = describe(weft_op_at(i));
        if (!rows || PyDict_SetItemString(dict, weft_op_at(i)->name, rows) != 0) Py_CLEAR(dict);
        Py_XDECREF(rows);
    }
    return dict;
}

/* has(op, backend): whether this build has kernels of that backend ("ref", "cpu", "cuda") for the operator. */
static PyObject *has(PyObject *module, PyObject *args)
{
    static const struct {
        const char *name;
        weft_backend backend;
    } known[] = {{"ref", WEFT_BACKEND_REF}, {"cpu", WEFT_BACKEND_CPU}, {"cuda", WEFT_BACKEND_CUDA}};
    (void)module;
    const char *name, *backend;
    if (!PyArg_ParseTuple(args, "ss:has", &name, &backend)) return NULL;
    const weft_op_info *op = weft_op_find(name);
    for (size_t k = 0; op && k < sizeof known / sizeof *known; k++)
        if (strcmp(backend, known[k].name) == 0) return PyBool_FromLong(weft_op_has(op, known[k].backend));
    PyErr_Format(PyExc_ValueError, "has: expected an operator and ref, cpu or cuda, got '%s' and '%s'", name,
                 backend);
    return NULL;
}

static PyObject *info(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return Py_BuildValue("{s:s,s:s,s:O}", "version", weft_version(), "isa", weft_isa_name(weft_cpu_isa()), "cuda",
                         weft_backend_available(WEFT_BACKEND_CUDA) ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(call, add, precision, threads, step, tensor ...)"},
    {"replay", replay, METH_VARARGS, "replay(numerics, threads, x, [(scalars, step, tensor ...), ...])"},
    {"set_allocator", set_allocator, METH_O, "set_allocator(f): f(bytes, device) returns a tensor on that GPU"},
    {"preset", preset, METH_O, "preset(name): its numerics as a tuple of eight numbers"},
    {"presets", presets, METH_NOARGS, "presets(): their names"},
    {"ops", ops, METH_NOARGS, "ops(): {operator: [(argument, kind, optional), ...]}"},
    {"has", has, METH_VARARGS, "has(operator, backend): whether this build has kernels for it"},
    {"info", info, METH_NOARGS, "info(): version, instruction set, whether a GPU can be used"},
    {NULL, NULL, 0, NULL}};

static int module_exec(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    state->call_type = (PyTypeObject *)PyType_FromSpec(&call_spec);
    if (!state->call_type) return -1;
    return PyModule_AddObjectRef(module, "Call", (PyObject *)state->call_type);
}

static int module_clear(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    if (!state) return 0;
    for (int i = 0; i < state->num_known; i++) Py_CLEAR(state->known[i].type);
    state->num_known = 0;
    Py_CLEAR(state->allocate);
    Py_CLEAR(state->call_type);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};
static struct PyModuleDef module_def = {.m_base = PyModuleDef_HEAD_INIT,
                                        .m_name = "weft._C",
                                        .m_doc = "libweft: its operators, called by their argument tables",
                                        .m_size = sizeof(module_state),
                                        .m_methods = methods,
                                        .m_slots = module_slots,
                                        .m_clear = module_clear,
                                        .m_free = module_free};

PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&module_def);
}
