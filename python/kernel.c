/* SPDX-License-Identifier: Apache-2.0
 *
 * A framework's operator that is one call of the library, as a callable:
 *
 *     kernel = _C.Kernel(tensors, needs, prepare, outputs, otherwise)
 *     results = kernel(tensor ..., scalar ...)
 *
 * The first `tensors` arguments are tensors or None. prepare(scalar ...) returns (call, precision, step, order): a Call,
 * the argument that is the dropout's step or -1, and for every tensor of the library's table the argument k that it is,
 * ~j for result j, or None. outputs(argument ...) makes the empty results. Where argument `needs` (-1: none) is None,
 * prepare does not apply.
 *
 * To do this in Python takes longer than the call itself. So what prepare says is kept for these scalars, and what
 * outputs made is kept for these shapes: the next call with both makes the like of it by the framework's short way.
 * Neither changes a result. Calls that somebody else may want to see (autograd, subclasses, dispatch modes), and calls
 * that look wrong, go to otherwise(argument ...), which does the same in Python and has the words for what is wrong. */
#include "ext.h"

enum {
    MAX_TENSORS = 32, /* arguments that are tensors */
    MAX_ROWS = 64,    /* of the library's table */
    MAX_RANK = 8,     /* of a tensor whose shape is remembered */
    SHAPES = 4,       /* remembered for each tuple of scalars, the oldest forgotten first */
    MOST_PLANS = 512, /* tuples of scalars, all forgotten together */
    ABSENT = INT8_MAX
};

/* What results depend on of an argument; rank -1 where it is None. */
typedef struct seen {
    dl_device device;
    dl_dtype dtype;
    int32_t rank;
    int64_t shape[MAX_RANK], stride[MAX_RANK];
} seen;

typedef struct remembered {
    seen *arguments;
    PyObject *results; /* tuple of (size, strides, dtype); NULL: nothing here */
    bool single;       /* outputs returned one tensor and not a tuple */
} remembered;

/* An operator with its scalars. */
typedef struct plan {
    PyObject *scalars;
    call_object *call;
    int precision, step;
    int8_t order[MAX_ROWS]; /* argument, ~result or ABSENT */
    remembered shapes[SHAPES];
    int oldest;
} plan;

typedef struct kernel_object {
    PyObject_HEAD int tensors, needs;
    module_state *state;
    PyObject *module, *prepare, *outputs, *otherwise;
    PyObject *plans;  /* {scalars: capsule of a plan} */
    PyObject *recent; /* the capsule that was found last, or NULL */
} kernel_object;

static const char *const PLAN = "weft._C.plan";

/* ---- plans ------------------------------------------------------------------------------------------------------------ */

static void plan_free(plan *p)
{
    for (int i = 0; i < SHAPES; i++) {
        free(p->shapes[i].arguments);
        Py_XDECREF(p->shapes[i].results);
    }
    Py_XDECREF(p->call);
    Py_XDECREF(p->scalars);
    free(p);
}

static void capsule_free(PyObject *capsule)
{
    plan_free(PyCapsule_GetPointer(capsule, PLAN));
}

static bool read_order(const kernel_object *k, PyObject *order, plan *p)
{
    const int32_t rows = p->call->op->num_args;
    if (PyTuple_Size(order) != rows || rows > MAX_ROWS) {
        PyErr_Format(PyExc_TypeError, "%s: order: expected %d items", p->call->op->name, (int)rows);
        return false;
    }
    for (int32_t r = 0; r < rows; r++) {
        PyObject *item = PyTuple_GetItem(order, r);
        long at = Py_IsNone(item) ? ABSENT : PyLong_AsLong(item);
        if (PyErr_Occurred()) return false;
        if (at != ABSENT && (at >= k->tensors || at < -MAX_ROWS)) {
            PyErr_Format(PyExc_ValueError, "%s: order: expected arguments or results, got %ld", p->call->op->name,
                         at);
            return false;
        }
        p->order[r] = (int8_t)at;
    }
    return true;
}

static PyObject *make_plan(kernel_object *k, PyObject *scalars)
{
    PyObject *order, *call, *said = PyObject_CallObject(k->prepare, scalars), *capsule = NULL;
    plan *p = said ? calloc(1, sizeof *p) : NULL;
    if (p && PyTuple_Check(said) &&
        PyArg_ParseTuple(said, "O!iiO!:prepare", k->state->call_type, &call, &p->precision, &p->step, &PyTuple_Type,
                         &order)) {
        Py_INCREF(call);
        Py_INCREF(scalars);
        p->call = (call_object *)call;
        p->scalars = scalars;
        if (read_order(k, order, p) && p->step < k->tensors) capsule = PyCapsule_New(p, PLAN, capsule_free);
    }
    if (p && !capsule) plan_free(p);
    Py_XDECREF(said);
    return capsule;
}

/* The scalars of a call as a key: lists, which have no hash, as tuples. */
static PyObject *scalars_of(const kernel_object *k, PyObject *args)
{
    const Py_ssize_t count = PyTuple_Size(args) - k->tensors;
    PyObject *key = PyTuple_New(count);
    for (Py_ssize_t i = 0; key && i < count; i++) {
        PyObject *item = PyTuple_GetItem(args, k->tensors + i);
        if (PyList_Check(item))
            item = PyList_AsTuple(item);
        else
            Py_INCREF(item);
        if (!item || PyTuple_SetItem(key, i, item) != 0) Py_CLEAR(key);
    }
    return key;
}

/* False also where it would take longer to tell. */
static bool is_same(PyObject *a, PyObject *b)
{
    return a == b || (PyFloat_CheckExact(a) && PyFloat_CheckExact(b) && PyFloat_AsDouble(a) == PyFloat_AsDouble(b));
}

static bool are_same(PyObject *list, PyObject *tuple)
{
    const Py_ssize_t count = PyList_Size(list);
    if (!PyTuple_CheckExact(tuple) || PyTuple_Size(tuple) != count) return false;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!is_same(PyList_GetItem(list, i), PyTuple_GetItem(tuple, i))) return false;
    return true;
}

/* The scalars of a call are those that a key was made of. */
static bool is_key(const kernel_object *k, PyObject *args, PyObject *key)
{
    const Py_ssize_t count = PyTuple_Size(key);
    if (PyTuple_Size(args) - k->tensors != count) return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(args, k->tensors + i), *kept = PyTuple_GetItem(key, i);
        if (!(PyList_CheckExact(item) ? are_same(item, kept) : is_same(item, kept))) return false;
    }
    return true;
}

/* A new reference to the capsule of the plan, which another thread may drop from the table meanwhile; or NULL. */
static PyObject *find_plan(kernel_object *k, PyObject *args)
{
    if (k->recent && is_key(k, args, ((plan *)PyCapsule_GetPointer(k->recent, PLAN))->scalars)) {
        Py_INCREF(k->recent);
        return k->recent;
    }
    PyObject *key = scalars_of(k, args), *capsule = NULL;
    if (!key) return NULL;
    capsule = PyDict_GetItemWithError(k->plans, key);
    Py_XINCREF(capsule);
    if (!capsule && !PyErr_Occurred()) {
        capsule = make_plan(k, key);
        if (capsule && PyDict_Size(k->plans) >= MOST_PLANS) PyDict_Clear(k->plans);
        if (capsule && PyDict_SetItem(k->plans, key, capsule) != 0) Py_CLEAR(capsule);
    }
    Py_DECREF(key);
    if (capsule) {
        PyObject *before = k->recent;
        Py_INCREF(capsule);
        k->recent = capsule;
        Py_XDECREF(before);
    }
    return capsule;
}

/* ---- results ---------------------------------------------------------------------------------------------------------- */

static bool is_as_seen(const seen *s, const dl_tensor *v)
{
    if (s->rank != v->ndim) return false;
    if (v->ndim < 0) return true;
    const size_t bytes = (size_t)v->ndim * sizeof *v->shape;
    return memcmp(&s->device, &v->device, sizeof s->device) == 0 &&
           memcmp(&s->dtype, &v->dtype, sizeof s->dtype) == 0 && memcmp(s->shape, v->shape, bytes) == 0 &&
           memcmp(s->stride, v->strides, bytes) == 0;
}

static const remembered *find_shapes(const plan *p, const dl_tensor *views, int count)
{
    for (int i = 0; i < SHAPES; i++) {
        int k = 0;
        if (!p->shapes[i].results) continue;
        while (k < count && is_as_seen(&p->shapes[i].arguments[k], &views[k])) k++;
        if (k == count) return &p->shapes[i];
    }
    return NULL;
}

/* Remembers what outputs made of these arguments. Nothing is lost where that fails. */
static void remember(const kernel_object *k, plan *p, const dl_tensor *views, PyObject *results, bool single)
{
    remembered r = {malloc((size_t)k->tensors * sizeof *r.arguments), PyTuple_New(PyTuple_Size(results)), single};
    bool ok = r.arguments && r.results;
    for (int i = 0; ok && i < k->tensors; i++) {
        seen *s = &r.arguments[i];
        s->rank = views[i].ndim;
        if (s->rank < 0) continue;
        ok = s->rank <= MAX_RANK;
        if (!ok) break;
        s->device = views[i].device;
        s->dtype = views[i].dtype;
        memcpy(s->shape, views[i].shape, (size_t)s->rank * sizeof *s->shape);
        memcpy(s->stride, views[i].strides, (size_t)s->rank * sizeof *s->stride);
    }
    for (Py_ssize_t i = 0; ok && i < PyTuple_Size(results); i++) {
        PyObject *one = PyTuple_GetItem(results, i);
        PyObject *shape = PyObject_CallFunctionObjArgs(k->state->hook[HOOK_DESCRIBE], one, NULL);
        ok = shape && PyTuple_Check(shape) && PyTuple_SetItem(r.results, i, shape) == 0;
    }
    PyErr_Clear();
    remembered *to = &p->shapes[p->oldest];
    if (ok) {
        const remembered forgotten = *to;
        *to = r;
        r = forgotten;
        p->oldest = (p->oldest + 1) % SHAPES;
    }
    free(r.arguments);
    Py_XDECREF(r.results);
}

/* The framework's short way to memory of the device of a call; NULL where there is none. */
static PyObject *short_way(const kernel_object *k, dl_device device)
{
    PyObject *const *hook = k->state->hook;
    if (device.type == DL_CPU) return Py_IsNone(hook[HOOK_EMPTY_CPU]) ? NULL : hook[HOOK_EMPTY_CPU];
    if (Py_IsNone(hook[HOOK_EMPTY_CUDA]) || Py_IsNone(hook[HOOK_CURRENT_GPU])) return NULL;
    PyObject *current = PyObject_CallNoArgs(hook[HOOK_CURRENT_GPU]);
    const bool here = current && PyLong_AsLong(current) == device.index;
    Py_XDECREF(current);
    return here ? hook[HOOK_EMPTY_CUDA] : NULL;
}

/* A tuple of tensors, each made by `empty` from its item of `shapes`. */
static PyObject *make_results(PyObject *empty, PyObject *shapes)
{
    const Py_ssize_t count = PyTuple_Size(shapes);
    PyObject *results = PyTuple_New(count);
    for (Py_ssize_t i = 0; results && i < count; i++) {
        PyObject *one = PyObject_Call(empty, PyTuple_GetItem(shapes, i), NULL);
        if (!one || PyTuple_SetItem(results, i, one) != 0) Py_CLEAR(results);
    }
    return results;
}

/* The empty results of a call as a tuple. */
static PyObject *results_of(const kernel_object *k, plan *p, PyObject *args, const gathered *g,
                            const dl_tensor *views, bool *single)
{
    const remembered *r = find_shapes(p, views, k->tensors);
    PyObject *empty = r ? short_way(k, g->device) : NULL, *results;
    if (empty) {
        PyObject *shapes = r->results;
        *single = r->single;
        Py_INCREF(shapes); /* memory may take a while, and another thread replace them */
        results = make_results(empty, shapes);
        Py_DECREF(shapes);
        return results;
    }
    if (PyErr_Occurred()) return NULL;
    PyObject *made = PyObject_CallObject(k->outputs, args);
    if (!made) return NULL;
    *single = !PyTuple_Check(made);
    results = *single ? PyTuple_Pack(1, made) : made;
    if (*single) Py_DECREF(made);
    if (results && !r) remember(k, p, views, results, *single);
    return results;
}

/* ---- the call --------------------------------------------------------------------------------------------------------- */

/* Nobody else wants to see the call: tensors are plain ones, no dispatch mode is on, autograd has nothing to record. */
static bool is_plain(const kernel_object *k, PyObject *args)
{
    PyObject *const *hook = k->state->hook;
    if (!hook[HOOK_COUNT - 1] || PyTuple_Size(args) < k->tensors) return false;
    if (k->needs >= 0 && Py_IsNone(PyTuple_GetItem(args, k->needs))) return false;
    for (int i = 0; i < k->tensors; i++) {
        PyObject *a = PyTuple_GetItem(args, i), *type = (PyObject *)Py_TYPE(a);
        if (!Py_IsNone(a) && type != hook[HOOK_TENSOR] && type != hook[HOOK_PARAMETER]) return false;
    }
    PyObject *modes = PyObject_CallNoArgs(hook[HOOK_MODES]);
    const bool none = modes && PyLong_AsLong(modes) == 0;
    Py_XDECREF(modes);
    if (!none) return false;
    PyObject *grad = PyObject_CallNoArgs(hook[HOOK_GRAD_ENABLED]);
    bool plain = grad != NULL;
    const bool enabled = plain && Py_IsTrue(grad);
    Py_XDECREF(grad);
    for (int i = 0; enabled && plain && i < k->tensors; i++) {
        PyObject *a = PyTuple_GetItem(args, i);
        if (Py_IsNone(a)) continue;
        PyObject *needs = PyObject_GetAttr(a, k->state->requires_grad);
        plain = needs && !Py_IsTrue(needs);
        Py_XDECREF(needs);
    }
    return plain;
}

static bool view_arguments(const kernel_object *k, PyObject *args, gathered *g, dl_tensor *views)
{
    for (int i = 0; i < k->tensors; i++) {
        PyObject *a = PyTuple_GetItem(args, i);
        if (Py_IsNone(a))
            views[i].ndim = -1;
        else if (!ext_view_tensor(g, "argument", a, &views[i]))
            return false;
    }
    return g->any;
}

/* Fills the args struct from arguments and results; false where Python has an error. */
static bool place_all(const plan *p, gathered *g, const dl_tensor *views, PyObject *results, char *args)
{
    const weft_op_info *op = p->call->op;
    for (int32_t r = 0; r < op->num_args; r++) {
        const weft_arg_info *arg = &op->args[r];
        const int at = p->order[r];
        dl_tensor result;
        if (at == ABSENT) continue;
        if (at < 0) {
            PyObject *one = PyTuple_GetItem(results, ~at);
            if (!one || !ext_view_tensor(g, arg->name, one, &result)) return false;
        }
        const dl_tensor *v = at < 0 ? &result : &views[at];
        /* weft_grad begins with its tensor, and is to be overwritten: the Call's own says so */
        if (v->ndim >= 0 && !ext_place_tensor(g, arg, v, (weft_tensor *)(args + arg->offset))) return false;
    }
    if (!p->call->dropout || p->step < 0 || views[p->step].ndim < 0) return true;
    return ext_place_step(g, &views[p->step], &((weft_dropout *)(args + p->call->dropout))->step);
}

static int threads_of(const kernel_object *k, const gathered *g)
{
    if (g->device.type != DL_CPU) return 0;
    PyObject *threads = PyObject_CallNoArgs(k->state->hook[HOOK_THREADS]);
    const int count = threads ? (int)PyLong_AsLong(threads) : -1;
    Py_XDECREF(threads);
    return count;
}

static PyObject *run_plan(kernel_object *k, plan *p, PyObject *arguments, gathered *g, const dl_tensor *views)
{
    const weft_op_info *op = p->call->op;
    size_t args[MAX_ARGS_SIZE / sizeof(size_t)];
    bool single = false;
    g->op = op->name;
    memcpy(args, p->call->args, op->args_size);
    PyObject *results = results_of(k, p, arguments, g, views, &single);
    if (!results) return NULL;
    const int threads = threads_of(k, g);
    if (PyErr_Occurred() || !place_all(p, g, views, results, (char *)args) ||
        !ext_run_call(g, op, args, p->precision, threads, &p->call->last)) {
        Py_DECREF(results);
        return NULL;
    }
    if (!single) return results;
    PyObject *one = PyTuple_GetItem(results, 0);
    Py_INCREF(one);
    Py_DECREF(results);
    return one;
}

static PyObject *kernel_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    kernel_object *k = (kernel_object *)self;
    gathered g = {.state = k->state, .op = "Kernel"};
    dl_tensor views[MAX_TENSORS];
    if (!(kwargs && PyDict_Size(kwargs)) && is_plain(k, args) && view_arguments(k, args, &g, views)) {
        PyObject *capsule = find_plan(k, args);
        if (capsule) {
            PyObject *results = run_plan(k, PyCapsule_GetPointer(capsule, PLAN), args, &g, views);
            Py_DECREF(capsule);
            return results;
        }
    }
    PyErr_Clear();
    return PyObject_Call(k->otherwise, args, kwargs);
}

/* ---- the type --------------------------------------------------------------------------------------------------------- */

static PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int tensors, needs;
    PyObject *prepare, *outputs, *otherwise, *module = PyType_GetModule(type);
    if (!module) return NULL;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Kernel takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "iiOOO:Kernel", &tensors, &needs, &prepare, &outputs, &otherwise)) return NULL;
    if (tensors < 1 || tensors > MAX_TENSORS) {
        PyErr_Format(PyExc_ValueError, "Kernel: tensors: expected 1 to %d, got %d", MAX_TENSORS, tensors);
        return NULL;
    }
    if (needs < -1 || needs >= tensors) {
        PyErr_Format(PyExc_ValueError, "Kernel: needs: expected -1 to %d, got %d", tensors - 1, needs);
        return NULL;
    }
    kernel_object *k = (kernel_object *)PyType_GenericAlloc(type, 0);
    if (!k) return NULL;
    k->tensors = tensors;
    k->needs = needs;
    k->state = PyModule_GetState(module);
    PyObject **kept[] = {&k->module, &k->prepare, &k->outputs, &k->otherwise};
    PyObject *given[] = {module, prepare, outputs, otherwise};
    for (int i = 0; i < 4; i++) {
        Py_INCREF(given[i]);
        *kept[i] = given[i];
    }
    k->plans = PyDict_New();
    if (!k->plans) Py_CLEAR(k);
    return (PyObject *)k;
}

static void kernel_dealloc(PyObject *object)
{
    kernel_object *k = (kernel_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *held[] = {k->recent, k->plans, k->otherwise, k->outputs, k->prepare, k->module};
    for (int i = 0; i < 6; i++) Py_XDECREF(held[i]);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_new, kernel_new},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_call, kernel_call},
    {Py_tp_doc,
     "Kernel(tensors, needs, prepare, outputs, otherwise): a framework's operator as one call of the library"},
    {0, NULL}};
PyType_Spec ext_kernel_spec = {"weft._C.Kernel", sizeof(kernel_object), 0, Py_TPFLAGS_DEFAULT, slots};
