/* SPDX-License-Identifier: Apache-2.0
 *
 * weft._C: libweft for Python, on CPython's stable ABI. It knows no operator by name: argument tables come from
 * weft/ops.h, tensors come through DLPack's exchange interface, and every error is the library's own sentence. Kernel
 * (kernel.c) is the way to call an operator; tensors may have any number of leading dimensions that collapse to one token
 * stride, and a weight may be given flat, as [.., n*C]. */
#include "ext.h"

/* ---- replay ----------------------------------------------------------------------------------------------------------- */

/* replay(numerics, threads, x, [layer, ...]): a layer is a dict of its fields by name, dropout as (p, token_base). */
static PyObject *replay(PyObject *module, PyObject *tuple)
{
    PyObject *numerics, *x, *list;
    int threads;
    if (!PyArg_ParseTuple(tuple, "OiOO!:replay", &numerics, &threads, &x, &PyList_Type, &list)) return NULL;
    const weft_op_info *op = weft_op_find("mhc_replay_fwd");
    weft_mhc_replay_fwd_args args = {.struct_size = sizeof args};
    gathered g = {.op = op->name, .state = PyModule_GetState(module)};
    if (!ext_read_numerics(op->name, numerics, &args.numerics) || !ext_read_tensor(&g, &op->args[0], x, &args.x))
        return NULL;
    Py_ssize_t count = PyList_Size(list);
    weft_mhc_replay_layer *layers = calloc(count ? (size_t)count : 1, sizeof *layers);
    if (!layers) return PyErr_NoMemory();
    bool ok = true;
    for (Py_ssize_t l = 0; ok && l < count; l++) {
        PyObject *layer = PyList_GetItem(list, l);
        ok = PyDict_Check(layer);
        layers[l].struct_size = sizeof *layers;
        if (!ok) PyErr_Format(PyExc_TypeError, "%s: layers: expected dicts, got %R", op->name, layer);
        ok = ok && ext_read_dict(&g, weft_mhc_replay_layer_info(), layer, (char *)&layers[l]);
    }
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
        [HOOK_WROTE] = "wrote",
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
    return Py_BuildValue("diddidiid", n.rms_eps, (int)n.rms_eps_kind, n.pre_eps, n.post_mult, (int)n.sinkhorn,
                         n.sinkhorn_eps, (int)n.sinkhorn_iters, (int)n.apply, n.post_eps);
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

static const char *dim_name(int32_t dim)
{
#define DIM(dim) [WEFT_DIM_##dim - WEFT_DIM_TOKENS]
    static const char *const names[] = {
        DIM(TOKENS) = "tokens",
        DIM(STREAMS) = "streams",
        DIM(CHANNELS) = "channels",
        DIM(GATES) = "gates",
        DIM(ROWS) = "rows",
        DIM(BATCH) = "batch",
        DIM(STEPS) = "steps",
        DIM(KEY_HEADS) = "key_heads",
        DIM(VALUE_HEADS) = "value_heads",
        DIM(HEADS) = "heads",
        DIM(KEY_DIM) = "key_dim",
        DIM(VALUE_DIM) = "value_dim",
        DIM(CONV) = "conv",
        DIM(WIDTH) = "width",
        DIM(HISTORY) = "history",
        DIM(SEQUENCES) = "sequences",
        DIM(OFFSETS) = "offsets",
        DIM(CACHE) = "cache",
        DIM(STEP_HEADS) = "step_heads",
        DIM(SCALES) = "scales",
    };
#undef DIM
    const int k = dim - WEFT_DIM_TOKENS;
    return k >= 0 && k < (int)(sizeof names / sizeof *names) ? names[k] : "?";
}

/* Dimensions as a tuple of names, and of numbers where a size is fixed. */
static PyObject *describe_dims(const weft_arg_info *a)
{
    PyObject *dims = PyTuple_New(a->ndim);
    for (int32_t d = 0; dims && d < a->ndim; d++) {
        PyObject *dim =
            a->dim[d] < WEFT_DIM_TOKENS ? PyLong_FromLong(a->dim[d]) : PyUnicode_FromString(dim_name(a->dim[d]));
        if (!dim || PyTuple_SetItem(dims, d, dim) != 0) Py_CLEAR(dims);
    }
    return dims;
}

/* The table of an operator: its rows, and (name, type) of its scalars. */
static PyObject *describe(const weft_op_info *op)
{
    static const char *const kinds[] = {"in", "out", "grad"};
    static const char *const types[] = {"act", "wide", "coef", "param", "full", "index"};
    static const char *const scalars[] = {"real", "int", "numerics", "dropout", "gdn"};
    PyObject *rows = PyList_New(0), *numbers = PyList_New(0);
    for (int32_t k = 0; rows && k < op->num_args; k++) {
        const weft_arg_info *a = &op->args[k];
        PyObject *row = Py_BuildValue("sssiNz", a->name, kinds[a->kind], types[a->type], (int)a->optional,
                                      describe_dims(a), a->in_place);
        if (!row || PyList_Append(rows, row) != 0) Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    for (const weft_scalar_info *s = op->scalars; numbers && s && s->name; s++) {
        PyObject *one = Py_BuildValue("ss", s->name, scalars[s->type]);
        if (!one || PyList_Append(numbers, one) != 0) Py_CLEAR(numbers);
        Py_XDECREF(one);
    }
    return Py_BuildValue("NN", rows, numbers); /* an error where either is NULL */
}

/* ops(): the tables of all operators. */
static PyObject *ops(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *dict = PyDict_New();
    for (int32_t i = 0; dict && i < weft_op_count(); i++) {
        PyObject *table = describe(weft_op_at(i));
        if (!table || PyDict_SetItemString(dict, weft_op_at(i)->name, table) != 0) Py_CLEAR(dict);
        Py_XDECREF(table);
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
    {"replay", replay, METH_VARARGS, "replay(numerics, threads, x, [{field: value}, ...])"},
    {"set_framework", set_framework, METH_O, "set_framework(f): what weft.torch.framework has"},
    {"preset", preset, METH_O, "preset(name): its numerics as a tuple of eight numbers"},
    {"presets", presets, METH_NOARGS, "presets(): their names"},
    {"ops", ops, METH_NOARGS,
     "ops(): {operator: ([(name, kind, type, optional, dims, in_place), ...], [(scalar, type), ...])}"},
    {"has", has, METH_VARARGS, "has(operator, backend): whether this build has kernels for it"},
    {"info", info, METH_NOARGS, "info(): version, instruction set, whether a GPU can be used"},
    {NULL, NULL, 0, NULL}};

static int module_exec(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    state->kernel_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ext_kernel_spec, NULL);
    state->requires_grad = PyUnicode_InternFromString("requires_grad");
    if (!state->kernel_type || !state->requires_grad) return -1;
    return PyModule_AddObjectRef(module, "Kernel", (PyObject *)state->kernel_type);
}

static int module_clear(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    if (!state) return 0;
    for (int i = 0; i < state->num_known; i++) Py_CLEAR(state->known[i].type);
    state->num_known = 0;
    for (int i = 0; i < HOOK_COUNT; i++) Py_CLEAR(state->hook[i]);
    Py_CLEAR(state->requires_grad);
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
