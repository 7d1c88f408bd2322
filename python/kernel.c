/* SPDX-License-Identifier: Apache-2.0
 *
 * A framework's operator that is one call of the library, as a callable:
 *
 *     kernel = _C.Kernel(op, tensors, scalars, results, rows, needs, writes, sections, outputs, record, otherwise)
 *     results = kernel(tensor ..., scalar ...)
 *     kernel.fill(add, result ..., tensor ..., scalar ...)
 *
 * `op` is the library's name of it. `tensors`, `scalars` and `results` are the names of the operator's arguments, tensors or
 * None first, and of its results. `rows` says which argument or result each row of the library's table is, and the scalar
 * that decides whether it is there: (row, name, scalar or None, item). Names become offsets when the kernel is made
 * (bind.c). outputs(argument ...) makes the empty results. A call without one of the arguments in `needs` is not one call
 * of the library; those in `writes` are written. `sections` are arguments that may be views of one row of columns.
 *
 * fill writes into results that exist; bit k of `add` has it add to result k. A call makes them. To do that in Python takes
 * longer than the call itself, so the packed scalars are kept for the next call with the same scalars, and so are the sizes
 * and dtypes of the results for the same shapes: the next call allocates them directly. Neither changes a result.
 * Calls that autograd records go to record(argument ...). Those that somebody else may want to see (subclasses, dispatch
 * modes), and those that look wrong, go to otherwise(argument ...). */
#include "ext.h"

enum {
    MAX_RANK = 8, /* of a tensor whose shape is remembered */
    SHAPES = 4,   /* for each tuple of scalars, the oldest forgotten first */
    PLANS = 16    /* tuples of scalars, likewise */
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

/* A scalar of a call, or an item of a list of them; a list itself is an object NULL and the number of its items. */
typedef struct kept_scalar {
    PyObject *object;
    bool is_float;
    double number;
} kept_scalar;

/* The scalars of a call and what they came to. Another thread may replace it in its kernel while a call uses it, so it
 * counts who has it. */
typedef struct plan {
    int users, kept;
    kept_scalar *scalars;
    remembered shapes[SHAPES];
    int oldest;
    last_run last;
    prepared p; /* the last, since only the front of its args struct is allocated */
} plan;

typedef struct kernel_object {
    PyObject_HEAD binding b;
    module_state *state;
    PyObject *module, *outputs, *record, *otherwise;
    plan *plans[PLANS];
    int recent; /* the plan that was found last */
    int oldest;
} kernel_object;

/* ---- plans ------------------------------------------------------------------------------------------------------------ */

static void plan_release(plan *p)
{
    if (!p || --p->users > 0) return;
    for (int i = 0; i < SHAPES; i++) {
        free(p->shapes[i].arguments);
        Py_XDECREF(p->shapes[i].results);
    }
    for (int i = 0; i < p->kept; i++) Py_XDECREF(p->scalars[i].object);
    free(p->scalars);
    free(p->last.args);
    free(p);
}

/* Items of a list are kept one by one, for whoever has the list may change it. */
static bool keep_scalars(plan *p, PyObject *const *objects, int count)
{
    size_t total = 0;
    for (int i = 0; i < count; i++) total += 1 + (PyList_Check(objects[i]) ? (size_t)PyList_Size(objects[i]) : 0);
    p->scalars = calloc(total ? total : 1, sizeof *p->scalars);
    if (!p->scalars) return false;
    for (int i = 0; i < count; i++) {
        const bool list = PyList_Check(objects[i]);
        const Py_ssize_t items = list ? PyList_Size(objects[i]) : 1;
        if (list) p->scalars[p->kept++] = (kept_scalar){NULL, false, (double)items};
        for (Py_ssize_t k = 0; k < items; k++) {
            PyObject *item = list ? PyList_GetItem(objects[i], k) : objects[i];
            const bool is_float = PyFloat_CheckExact(item);
            Py_INCREF(item);
            p->scalars[p->kept++] = (kept_scalar){item, is_float, is_float ? PyFloat_AsDouble(item) : 0};
        }
    }
    return true;
}

static plan *make_plan(const kernel_object *k, PyObject *const *objects)
{
    plan *p = calloc(1, offsetof(plan, p.args) + k->b.op->args_size);
    if (p) p->users = 1;
    if (!p || !keep_scalars(p, objects, k->b.scalars))
        PyErr_NoMemory();
    else if (ext_prepare(&k->b, objects, &p->p))
        return p;
    plan_release(p);
    return NULL;
}

/* False also where it would take longer to tell. */
static inline bool is_same(const kept_scalar *kept, PyObject *now)
{
    if (kept->object == now) return true;
    if (kept->is_float) return PyFloat_CheckExact(now) && PyFloat_AsDouble(now) == kept->number;
    return kept->object && PyLong_CheckExact(kept->object) && PyLong_CheckExact(now) &&
           PyObject_RichCompareBool(kept->object, now, Py_EQ) == 1;
}

static bool is_plan_of(const kernel_object *k, const plan *p, PyObject *const *objects)
{
    if (!p) return false;
    const kept_scalar *kept = p->scalars;
    for (int i = 0; i < k->b.scalars; i++) {
        if (PyList_Check(objects[i])) {
            const Py_ssize_t items = PyList_Size(objects[i]);
            if (kept->object || kept->number != (double)items) return false;
            kept++;
            for (Py_ssize_t j = 0; j < items; j++)
                if (!is_same(kept++, PyList_GetItem(objects[i], j))) return false;
        } else if (!is_same(kept++, objects[i])) {
            return false;
        }
    }
    return true;
}

/* The plan of a call, to be released; NULL where Python has an error. */
static plan *find_plan(kernel_object *k, PyObject *const *objects)
{
    for (int i = 0; i < PLANS; i++) { /* the one that was found last, and then those before it */
        const int place = (k->recent + PLANS - i) % PLANS;
        if (!is_plan_of(k, k->plans[place], objects)) continue;
        k->recent = place;
        k->plans[place]->users++;
        return k->plans[place];
    }
    plan *p = make_plan(k, objects), *forgotten = k->plans[k->oldest];
    if (!p) return NULL;
    k->plans[k->oldest] = p;
    k->recent = k->oldest;
    k->oldest = (k->oldest + 1) % PLANS;
    p->users++;
    plan_release(forgotten);
    return p;
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
    remembered r = {malloc((size_t)k->b.tensors * sizeof *r.arguments), PyTuple_New(PyTuple_Size(results)), single};
    bool ok = r.arguments && r.results;
    for (int i = 0; ok && i < k->b.tensors; i++) {
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

/* The framework's function that allocates on the device of a call without its dispatcher; NULL where there is none. */
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
    const remembered *r = find_shapes(p, views, k->b.tensors);
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

enum { CALL_PLAIN, CALL_RECORDED, CALL_OTHER };

/* Plain: nobody else wants to see the call, since tensors are plain ones, no dispatch mode is on, and autograd has nothing
 * to record. */
static int kind_of(const kernel_object *k, PyObject *const *objects)
{
    PyObject *const *hook = k->state->hook;
    if (!hook[HOOK_COUNT - 1]) return CALL_OTHER;
    for (int i = 0; i < k->b.tensors; i++) {
        PyObject *a = objects[i], *type = (PyObject *)Py_TYPE(a);
        if (Py_IsNone(a) ? k->b.needs >> i & 1 : type != hook[HOOK_TENSOR] && type != hook[HOOK_PARAMETER])
            return CALL_OTHER;
    }
    PyObject *modes = PyObject_CallNoArgs(hook[HOOK_MODES]);
    const bool none = modes && PyLong_AsLong(modes) == 0;
    Py_XDECREF(modes);
    if (!none) return CALL_OTHER;
    PyObject *grad = PyObject_CallNoArgs(hook[HOOK_GRAD_ENABLED]);
    if (!grad) return CALL_OTHER;
    const bool enabled = Py_IsTrue(grad);
    Py_DECREF(grad);
    int kind = CALL_PLAIN;
    for (int i = 0; enabled && kind == CALL_PLAIN && i < k->b.tensors; i++) {
        if (Py_IsNone(objects[i])) continue;
        PyObject *needs = PyObject_GetAttr(objects[i], k->state->requires_grad);
        kind = !needs ? CALL_OTHER : Py_IsTrue(needs) ? CALL_RECORDED : CALL_PLAIN;
        Py_XDECREF(needs);
    }
    return kind;
}

static bool view_arguments(const kernel_object *k, PyObject *const *objects, gathered *g, dl_tensor *views)
{
    for (int i = 0; i < k->b.tensors; i++) {
        views[i].ndim = -1;
        if (!Py_IsNone(objects[i]) && !ext_view_tensor(g, k->b.name[i], objects[i], &views[i])) return false;
    }
    return true;
}

static int threads_of(const kernel_object *k, const gathered *g)
{
    if (g->device.type != DL_CPU) return 0;
    PyObject *threads = PyObject_CallNoArgs(k->state->hook[HOOK_THREADS]);
    const int count = threads ? (int)PyLong_AsLong(threads) : -1;
    Py_XDECREF(threads);
    return count;
}

/* Autograd must know that an argument was written. */
static bool tell_written(const kernel_object *k, PyObject *const *objects)
{
    for (int i = 0; k->b.writes >> i; i++) {
        if (!(k->b.writes >> i & 1) || Py_IsNone(objects[i])) continue;
        PyObject *done = PyObject_CallFunctionObjArgs(k->state->hook[HOOK_WROTE], objects[i], NULL);
        if (!done) return false;
        Py_DECREF(done);
    }
    return true;
}

static bool run_plan(const kernel_object *k, plan *p, gathered *g, const dl_tensor *views, PyObject *const *results,
                     PyObject *const *objects, uint64_t add)
{
    const weft_op_info *op = k->b.op;
    size_t args[MAX_ARGS_SIZE / sizeof(size_t)];
    memcpy(args, p->p.args, op->args_size);
    if (!ext_place(&k->b, &p->p, g, objects, views, results, add, (char *)args)) return false;
    const int threads = threads_of(k, g);
    return !PyErr_Occurred() && ext_run_call(g, op, args, p->p.precision, threads, &p->last) &&
           tell_written(k, objects);
}

/* The results of a plain call whose arguments have been looked at. */
static PyObject *make_and_fill(kernel_object *k, PyObject *args, PyObject *const *objects, gathered *g,
                               const dl_tensor *views)
{
    PyObject *items[MAX_RESULTS], *made = NULL, *one = NULL;
    bool single = false;
    plan *p = find_plan(k, objects + k->b.tensors);
    PyObject *results = p ? results_of(k, p, args, g, views, &single) : NULL;
    if (results && PyTuple_Size(results) != k->b.results) {
        PyErr_Format(PyExc_TypeError, "%s: outputs: expected %d results, got %zd", g->op, k->b.results,
                     PyTuple_Size(results));
        Py_CLEAR(results);
    }
    for (int i = 0; results && i < k->b.results; i++) items[i] = PyTuple_GetItem(results, i);
    if (results && run_plan(k, p, g, views, items, objects, 0)) {
        one = single ? items[0] : results;
        Py_INCREF(one);
        made = one;
    }
    Py_XDECREF(results);
    plan_release(p);
    return made;
}

static PyObject *kernel_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    kernel_object *k = (kernel_object *)self;
    gathered g = {.state = k->state, .op = k->b.op->name};
    PyObject *objects[MAX_TENSORS + MAX_SCALARS];
    dl_tensor views[MAX_TENSORS];
    const int count = k->b.tensors + k->b.scalars;
    if (!(kwargs && PyDict_Size(kwargs)) && PyTuple_Size(args) == count) {
        for (int i = 0; i < count; i++) objects[i] = PyTuple_GetItem(args, i);
        const int kind = kind_of(k, objects);
        if (kind == CALL_RECORDED) return PyObject_Call(k->record, args, NULL);
        if (kind == CALL_PLAIN && view_arguments(k, objects, &g, views) && g.any)
            return make_and_fill(k, args, objects, &g, views);
    }
    PyErr_Clear();
    return PyObject_Call(k->otherwise, args, kwargs);
}

static PyObject *kernel_fill(PyObject *self, PyObject *const *objects, Py_ssize_t count)
{
    kernel_object *k = (kernel_object *)self;
    gathered g = {.state = k->state, .op = k->b.op->name};
    dl_tensor views[MAX_TENSORS];
    const int expected = 1 + k->b.results + k->b.tensors + k->b.scalars;
    if (count != expected) {
        PyErr_Format(PyExc_TypeError,
                     "%s: fill: expected (add, %d results, %d tensors, %d scalars), got %zd arguments", g.op,
                     k->b.results, k->b.tensors, k->b.scalars, count);
        return NULL;
    }
    PyObject *const *results = objects + 1, *const *arguments = results + k->b.results;
    const uint64_t add = PyLong_AsUnsignedLongLong(objects[0]);
    if (PyErr_Occurred() || (k->b.sections && !view_arguments(k, arguments, &g, views))) return NULL;
    plan *p = find_plan(k, arguments + k->b.tensors);
    const bool ok = p && run_plan(k, p, &g, k->b.sections ? views : NULL, results, arguments, add);
    plan_release(p);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* ---- the type --------------------------------------------------------------------------------------------------------- */

static PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    const char *op;
    PyObject *tensors, *scalars, *results, *rows, *needs, *writes, *sections, *outputs, *record, *otherwise;
    PyObject *module = PyType_GetModule(type);
    if (!module) return NULL;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Kernel takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "sOOOOOOOOOO:Kernel", &op, &tensors, &scalars, &results, &rows, &needs, &writes,
                          &sections, &outputs, &record, &otherwise))
        return NULL;
    kernel_object *k = (kernel_object *)PyType_GenericAlloc(type, 0);
    if (!k) return NULL;
    const bool bound = ext_bind(&k->b, op, tensors, scalars, results, rows, needs, writes, sections);
    k->state = PyModule_GetState(module);
    PyObject **kept[] = {&k->b.names, &k->module, &k->outputs, &k->record, &k->otherwise};
    PyObject *given[] = {tensors, module, outputs, record, otherwise};
    for (int i = 0; i < 5; i++) {
        Py_INCREF(given[i]);
        *kept[i] = given[i];
    }
    if (!bound) Py_CLEAR(k);
    return (PyObject *)k;
}

static void kernel_dealloc(PyObject *object)
{
    kernel_object *k = (kernel_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *held[] = {k->b.names, k->module, k->outputs, k->record, k->otherwise};
    for (int i = 0; i < PLANS; i++) plan_release(k->plans[i]);
    for (int i = 0; i < 5; i++) Py_XDECREF(held[i]);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef kernel_methods[] = {
    {"fill", (PyCFunction)(void (*)(void))kernel_fill, METH_FASTCALL,
     "fill(add, result ..., tensor ..., scalar ...): one call of the library into results that exist"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_new, kernel_new},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_call, kernel_call},
    {Py_tp_methods, kernel_methods},
    {Py_tp_doc,
     "Kernel(op, tensors, scalars, results, rows, needs, writes, sections, outputs, record, otherwise): a "
     "framework's operator as one call of the library"},
    {0, NULL}};
PyType_Spec ext_kernel_spec = {"weft._C.Kernel", sizeof(kernel_object), 0, Py_TPFLAGS_DEFAULT, slots};
