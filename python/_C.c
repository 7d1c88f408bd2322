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
#include "ext.h"

/* ---- scalars --------------------------------------------------------------------------------------------------------- */

/* A whole number as an int32_t; -1, which no field takes, where it is none of these. */
static int32_t whole(double x)
{
    return x >= INT32_MIN && x <= INT32_MAX ? (int32_t)x : -1;
}

static int32_t narrow(long x)
{
    return x >= INT32_MIN && x <= INT32_MAX ? (int32_t)x : -1;
}

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
    n->rms_eps_kind = (weft_eps_kind)whole(kind);
    n->sinkhorn = (weft_sinkhorn)whole(rule);
    n->sinkhorn_iters = whole(iters);
    n->apply = (weft_apply)whole(apply);
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
    o->activation = (weft_gdn_activation)whole(activation);
    o->l2norm = whole(l2norm);
    o->head_map = (weft_gdn_head_map)whole(map);
    o->rounding = (weft_gdn_rounding)whole(rounding);
    o->g_chunk = whole(chunk);
    o->g_log2 = whole(log2);
    return true;
}

static bool read_scalar(const weft_scalar_info *scalar, PyObject *value, void *field)
{
    switch (scalar->type) {
    case WEFT_SCALAR_REAL: *(double *)field = PyFloat_AsDouble(value); return !PyErr_Occurred();
    case WEFT_SCALAR_INT: *(int32_t *)field = narrow(PyLong_AsLong(value)); return !PyErr_Occurred();
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
    free(((call_object *)object)->last.args);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyType_Slot call_slots[] = {{Py_tp_new, call_new},
                                   {Py_tp_dealloc, call_dealloc},
                                   {Py_tp_doc, "Call(name, scalars={}): an operator with its scalars"},
                                   {0, NULL}};
static PyType_Spec call_spec = {"weft._C.Call", sizeof(call_object), 0, Py_TPFLAGS_DEFAULT, call_slots};

/* ---- running ---------------------------------------------------------------------------------------------------------- */

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
    if (!ext_read_tensors(&g, op, (char *)args, objects + RUN_TENSORS, add)) return NULL;
    if (call->dropout) {
        weft_dropout *dropout = (weft_dropout *)((char *)args + call->dropout);
        if (!ext_read_step(&g, objects[RUN_STEP], &dropout->step)) return NULL;
    }
    if (!ext_run_call(&g, op, args, narrow(precision), narrow(threads), &call->last)) return NULL;
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
    layer->struct_size = sizeof *layer;
    return read_scalars(info, items[0], (char *)layer) && ext_read_tensors(g, info, (char *)layer, items + 2, 0) &&
           ext_read_step(g, items[1], &layer->dropout.step);
}

static PyObject *replay(PyObject *module, PyObject *tuple)
{
    PyObject *numerics, *x, *list;
    int threads;
    if (!PyArg_ParseTuple(tuple, "OiOO!:replay", &numerics, &threads, &x, &PyList_Type, &list)) return NULL;
    const weft_op_info *op = weft_op_find("mhc_replay_fwd");
    weft_mhc_replay_fwd_args args = {.struct_size = sizeof args};
    gathered g = {.op = op->name, .state = PyModule_GetState(module)};
    if (!read_numerics(numerics, &args.numerics) || !ext_read_tensors(&g, op, (char *)&args, &x, 0)) return NULL;
    Py_ssize_t count = PyList_Size(list);
    weft_mhc_replay_layer *layers = calloc(count ? (size_t)count : 1, sizeof *layers);
    if (!layers) return PyErr_NoMemory();
    bool ok = true;
    for (Py_ssize_t l = 0; ok && l < count; l++) ok = read_layer(&g, PyList_GetItem(list, l), &layers[l]);
    args.layers = layers;
    args.num_layers = count > INT32_MAX ? INT32_MAX : (int32_t)count;
    ok = ok && ext_run_call(&g, op, &args, 0, threads, NULL);
    free(layers);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* ---- the rest of the module -------------------------------------------------------------------------------------------- */

static PyObject *set_framework(PyObject *module, PyObject *framework)
{
    static const char *const names[HOOK_COUNT] = {
        [HOOK_TENSOR] = "Tensor",
        [HOOK_PARAMETER] = "Parameter",
        [HOOK_MODES] = "modes",
        [HOOK_GRAD_ENABLED] = "grad_enabled",
        [HOOK_THREADS] = "threads",
        [HOOK_DESCRIBE] = "describe",
        [HOOK_EMPTY_CPU] = "empty_cpu",
        [HOOK_EMPTY_CUDA] = "empty_cuda",
        [HOOK_CURRENT_GPU] = "current_gpu",
        [HOOK_WORKSPACE] = "workspace",
    };
    module_state *state = PyModule_GetState(module);
    for (int i = 0; i < HOOK_COUNT; i++) {
        PyObject *hook = PyObject_GetAttrString(framework, names[i]);
        if (!hook) return NULL;
        Py_XDECREF(state->hook[i]);
        state->hook[i] = hook;
    }
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
    {"set_framework", set_framework, METH_O, "set_framework(f): what weft.torch.framework has"},
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
    state->kernel_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ext_kernel_spec, NULL);
    state->requires_grad = PyUnicode_InternFromString("requires_grad");
    if (!state->call_type || !state->kernel_type || !state->requires_grad) return -1;
    if (PyModule_AddObjectRef(module, "Kernel", (PyObject *)state->kernel_type) != 0) return -1;
    return PyModule_AddObjectRef(module, "Call", (PyObject *)state->call_type);
}

static int module_clear(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    if (!state) return 0;
    for (int i = 0; i < state->num_known; i++) Py_CLEAR(state->known[i].type);
    state->num_known = 0;
    for (int i = 0; i < HOOK_COUNT; i++) Py_CLEAR(state->hook[i]);
    Py_CLEAR(state->requires_grad);
    Py_CLEAR(state->call_type);
    Py_CLEAR(state->kernel_type);
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
