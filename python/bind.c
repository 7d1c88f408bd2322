/* SPDX-License-Identifier: Apache-2.0
 *
 * Names to offsets: an operator of the framework has arguments and results with names, and so has the library's table
 * (weft/ops.h). The names are compared once, when the operator is registered; a call works with what was found. */
#include "ext.h"

/* ---- registration ----------------------------------------------------------------------------------------------------- */

static const char *text(PyObject *name)
{
    return name && PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
}

/* The place of a name among names, or -1. */
static int place_of(PyObject *names, PyObject *name)
{
    for (Py_ssize_t k = 0; k < PyTuple_Size(names); k++)
        if (PyUnicode_Compare(PyTuple_GetItem(names, k), name) == 0) return (int)k;
    PyErr_Clear();
    return -1;
}

static bool no_name(const binding *b, const char *what, PyObject *name)
{
    if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%s: expected %s, got %R", b->op->name, what, name);
    return false;
}

/* The number of names in a tuple of at most `most`, or -1. */
static int names_in(const binding *b, PyObject *names, const char *what, int most)
{
    bool ok = PyTuple_Check(names) && PyTuple_Size(names) <= most;
    for (Py_ssize_t k = 0; ok && k < PyTuple_Size(names); k++) ok = text(PyTuple_GetItem(names, k)) != NULL;
    if (ok) return (int)PyTuple_Size(names);
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s: %s: expected a tuple of at most %d names", b->op->name, what, most);
    return -1;
}

static const weft_arg_info *find_arg(const weft_op_info *op, PyObject *name)
{
    for (int32_t r = 0; r < op->num_args; r++)
        if (PyUnicode_CompareWithASCIIString(name, op->args[r].name) == 0) return &op->args[r];
    return NULL;
}

static const weft_scalar_info *find_scalar(const weft_op_info *op, PyObject *name)
{
    const weft_scalar_info *s = op->scalars;
    while (s && s->name && PyUnicode_CompareWithASCIIString(name, s->name) != 0) s++;
    return s && s->name ? s : NULL;
}

static void bind_scalars(binding *b, PyObject *scalars)
{
    for (const weft_scalar_info *s = b->op->scalars; s && s->name; s++)
        if (s->type == WEFT_SCALAR_DROPOUT) b->dropout = s->offset;
    for (int k = 0; k < b->scalars; k++) {
        PyObject *name = PyTuple_GetItem(scalars, k);
        bound_scalar *to = &b->scalar[k];
        to->field = find_scalar(b->op, name);
        to->kind = to->field ? SCALAR_FIELD : SCALAR_OWN;
        if (PyUnicode_CompareWithASCIIString(name, "precision") == 0) to->kind = SCALAR_PRECISION;
        if (b->dropout && PyUnicode_CompareWithASCIIString(name, "p") == 0) to->kind = SCALAR_P;
        if (b->dropout && PyUnicode_CompareWithASCIIString(name, "token_base") == 0) to->kind = SCALAR_TOKEN_BASE;
    }
}

/* rows: (row, argument or result, name of a scalar or None, item) each. */
static bool bind_row(binding *b, PyObject *scalars, PyObject *results, PyObject *item, bound_row *to)
{
    PyObject *row, *source, *scalar;
    int which;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "UUOi:row", &row, &source, &scalar, &which))
        return no_name(b, "rows (row, tensor, scalar, item)", item);
    const weft_arg_info *arg = find_arg(b->op, row);
    if (!arg) return no_name(b, "a row of its table", row);
    const bool in = arg->kind == WEFT_ARG_IN;
    int k = place_of(in ? b->names : results, source);
    if (k < 0 && !in) { /* an argument that is written */
        k = place_of(b->names, source);
        if (k < 0) return no_name(b, "a result or an argument", source);
    } else if (k < 0) {
        return no_name(b, "an argument", source);
    } else if (!in) {
        k = ~k;
    }
    *to = (bound_row){arg, (int16_t)k, -1, -1, (int16_t)which};
    if (Py_IsNone(scalar)) return true;
    to->scalar = (int16_t)place_of(scalars, scalar);
    return to->scalar >= 0 || no_name(b, "a scalar argument", scalar);
}

static bool bind_section(binding *b, PyObject *results, PyObject *item, int number)
{
    PyObject *argument, *row;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "UU:section", &argument, &row))
        return no_name(b, "sections (argument, row)", item);
    bound_section *s = &b->section[number];
    *s = (bound_section){(int16_t)place_of(b->names, argument), (int16_t)place_of(results, row),
                         find_arg(b->op, row)};
    if (s->argument < 0 || !s->arg || s->arg->ndim > 4) return no_name(b, "a section of this operator", item);
    for (int r = 0; r < b->rows; r++) {
        const int source = b->row[r].source;
        if (source < 0 ? ~source == s->result : source == s->argument) b->row[r].section = (int16_t)number;
    }
    return true;
}

static bool bind_sections(binding *b, PyObject *scalars, PyObject *results, PyObject *sections)
{
    PyObject *heads, *parts;
    if (Py_IsNone(sections)) return true;
    if (!PyTuple_Check(sections) || !PyArg_ParseTuple(sections, "UO!:sections", &heads, &PyTuple_Type, &parts) ||
        PyTuple_Size(parts) > MAX_SECTIONS)
        return no_name(b, "sections (scalar, ((argument, row), ...))", sections);
    b->heads = place_of(scalars, heads);
    if (b->heads < 0) return no_name(b, "a scalar argument", heads);
    b->sections = (int)PyTuple_Size(parts);
    for (int k = 0; k < b->sections; k++)
        if (!bind_section(b, results, PyTuple_GetItem(parts, k), k)) return false;
    return true;
}

static bool bind_mask(const binding *b, PyObject *names, const char *what, uint32_t *mask)
{
    const int count = names_in(b, names, what, MAX_TENSORS);
    for (int i = 0; i < count; i++) {
        const int k = place_of(b->names, PyTuple_GetItem(names, i));
        if (k < 0) return no_name(b, "an argument", PyTuple_GetItem(names, i));
        *mask |= 1u << k;
    }
    return count >= 0;
}

bool ext_bind(binding *b, const char *op, PyObject *tensors, PyObject *scalars, PyObject *results, PyObject *rows,
              PyObject *needs, PyObject *writes, PyObject *sections)
{
    *b = (binding){.op = weft_op_find(op), .names = tensors, .step = -1, .heads = -1};
    if (!b->op) {
        PyErr_Format(PyExc_ValueError, "Kernel: expected the name of an operator, got '%s'", op);
        return false;
    }
    if (b->op->args_size > MAX_ARGS_SIZE || b->op->num_args > MAX_ROWS) {
        PyErr_Format(PyExc_SystemError, "%s: its arguments do not fit this module", op);
        return false;
    }
    if ((b->tensors = names_in(b, tensors, "tensors", MAX_TENSORS)) < 0 ||
        (b->scalars = names_in(b, scalars, "scalars", MAX_SCALARS)) < 0 ||
        (b->results = names_in(b, results, "results", MAX_RESULTS)) < 0)
        return false;
    for (int k = 0; k < b->tensors; k++) b->name[k] = text(PyTuple_GetItem(tensors, k));
    bind_scalars(b, scalars);
    for (int k = 0; b->dropout && k < b->tensors; k++)
        if (PyUnicode_CompareWithASCIIString(PyTuple_GetItem(tensors, k), "step") == 0) b->step = k;
    if (!PyTuple_Check(rows) || PyTuple_Size(rows) > MAX_ROWS) return no_name(b, "a tuple of rows", rows);
    b->rows = (int)PyTuple_Size(rows);
    for (int r = 0; r < b->rows; r++)
        if (!bind_row(b, scalars, results, PyTuple_GetItem(rows, r), &b->row[r])) return false;
    return bind_sections(b, scalars, results, sections) && bind_mask(b, needs, "needs", &b->needs) &&
           bind_mask(b, writes, "writes", &b->writes);
}

/* ---- scalars ---------------------------------------------------------------------------------------------------------- */

/* A whole number as an int32_t; -1, which no field takes, where it is none of these. */
static int32_t whole(double x)
{
    return x >= INT32_MIN && x <= INT32_MAX ? (int32_t)x : -1;
}

static int32_t narrow(long x)
{
    return x >= INT32_MIN && x <= INT32_MAX ? (int32_t)x : -1;
}

/* Item k of a list or a tuple, borrowed. */
static PyObject *item_of(PyObject *value, Py_ssize_t k)
{
    return PyList_Check(value) ? PyList_GetItem(value, k) : PyTuple_GetItem(value, k);
}

static Py_ssize_t count_of(PyObject *value)
{
    return PyList_Check(value) ? PyList_Size(value) : PyTuple_Check(value) ? PyTuple_Size(value) : -1;
}

static bool read_numbers(const char *op, const char *name, PyObject *value, int count, double *to)
{
    if (count_of(value) != count) {
        PyErr_Format(PyExc_TypeError, "%s: %s: expected %d numbers, got %R", op, name, count, value);
        return false;
    }
    for (int k = 0; k < count; k++) {
        to[k] = PyFloat_AsDouble(item_of(value, k));
        if (to[k] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

/* Enums and counts come as floats: a registered operator has them in one list with the others. */
bool ext_read_numerics(const char *op, PyObject *value, weft_mhc_numerics *n)
{
    double v[9] = {0};
    const int count = count_of(value) == 8 ? 8 : 9; /* graphs of the first release have no post_eps */
    if (!read_numbers(op, "numerics", value, count, v)) return false;
    n->rms_eps = v[0];
    n->rms_eps_kind = (weft_eps_kind)whole(v[1]);
    n->pre_eps = v[2];
    n->post_mult = v[3];
    n->sinkhorn = (weft_sinkhorn)whole(v[4]);
    n->sinkhorn_eps = v[5];
    n->sinkhorn_iters = whole(v[6]);
    n->apply = (weft_apply)whole(v[7]);
    n->post_eps = v[8];
    return true;
}

static bool read_gdn(const char *op, PyObject *value, weft_gdn_options *o)
{
    double v[9];
    if (!read_numbers(op, "options", value, 9, v)) return false;
    o->activation = (weft_gdn_activation)whole(v[0]);
    o->l2norm = whole(v[1]);
    o->l2_eps = v[2];
    o->q_scale = v[3];
    o->beta_scale = v[4];
    o->head_map = (weft_gdn_head_map)whole(v[5]);
    o->rounding = (weft_gdn_rounding)whole(v[6]);
    o->g_chunk = whole(v[7]);
    o->g_log2 = whole(v[8]);
    return true;
}

static bool read_scalar(const char *op, const weft_scalar_info *scalar, PyObject *value, char *args)
{
    void *field = args + scalar->offset;
    switch (scalar->type) {
    case WEFT_SCALAR_REAL: *(double *)field = PyFloat_AsDouble(value); return !PyErr_Occurred();
    case WEFT_SCALAR_INT: *(int32_t *)field = narrow(PyLong_AsLong(value)); return !PyErr_Occurred();
    case WEFT_SCALAR_NUMERICS: return ext_read_numerics(op, value, field);
    case WEFT_SCALAR_GDN: return read_gdn(op, value, field);
    case WEFT_SCALAR_DROPOUT: break; /* its fields are arguments of their own */
    }
    PyErr_Format(PyExc_SystemError, "%s: a kind of scalar this module does not know", scalar->name);
    return false;
}

static bool read_heads(const binding *b, PyObject *value, int64_t *heads)
{
    enum { MOST = 1 << 20 }; /* products of these do not overflow; what a size may be is the library's to say */
    double v[4];
    if (!read_numbers(b->op->name, "heads", value, 4, v)) return false;
    for (int k = 0; k < 4; k++) {
        if (!(v[k] >= 1 && v[k] <= MOST)) {
            PyErr_Format(PyExc_ValueError, "%s: heads: expected numbers from 1 to %d, got %R", b->op->name, MOST,
                         value);
            return false;
        }
        heads[k] = (int64_t)v[k];
    }
    return true;
}

/* Whether the row is there: item `item` of a list is true, or a single scalar is as true as `item`. -1: an error. */
static int is_there(const bound_row *r, PyObject *const *objects)
{
    if (r->scalar < 0) return 1;
    PyObject *value = objects[r->scalar];
    if (count_of(value) < 0) {
        const int truth = PyObject_IsTrue(value);
        return truth < 0 ? -1 : truth == r->item;
    }
    PyObject *item = item_of(value, r->item);
    return item ? PyObject_IsTrue(item) : -1;
}

bool ext_prepare(const binding *b, PyObject *const *objects, prepared *p)
{
    char *args = memset(p->args, 0, b->op->args_size);
    weft_dropout *dropout = (weft_dropout *)(args + b->dropout);
    p->args[0] = b->op->args_size;
    p->rows = 0;
    p->precision = 0;
    for (int k = 0; k < b->scalars; k++) {
        PyObject *value = objects[k];
        switch (b->scalar[k].kind) {
        case SCALAR_OWN: break;
        case SCALAR_FIELD:
            if (!read_scalar(b->op->name, b->scalar[k].field, value, args)) return false;
            break;
        case SCALAR_P: dropout->p = PyFloat_AsDouble(value); break;
        case SCALAR_TOKEN_BASE: dropout->token_base = PyLong_AsLongLong(value); break;
        case SCALAR_PRECISION: p->precision = narrow(PyLong_AsLong(value)); break;
        }
        if (PyErr_Occurred()) return false;
    }
    for (int r = 0; r < b->rows; r++) {
        const int there = is_there(&b->row[r], objects);
        if (there < 0) return false;
        p->rows |= (uint64_t)there << r;
    }
    return b->heads < 0 || read_heads(b, objects[b->heads], p->heads);
}

/* ---- sections --------------------------------------------------------------------------------------------------------- */

/* One section of a part: a view of its columns. */
typedef struct cut_view {
    dl_tensor v; /* rank -1: not there */
    int64_t shape[4], stride[4];
} cut_view;

enum { ROWS_RANK = 3 }; /* [B, S, columns] */

static int64_t size_of(const prepared *p, int32_t dim)
{
    return p->heads[dim == WEFT_DIM_KEY_HEADS     ? 0
                    : dim == WEFT_DIM_VALUE_HEADS ? 1
                    : dim == WEFT_DIM_KEY_DIM     ? 2
                                                  : 3];
}

static int64_t columns_of(const bound_section *s, const prepared *p)
{
    int64_t columns = 1;
    for (int d = 2; d < s->arg->ndim; d++) columns *= size_of(p, s->arg->dim[d]);
    return columns;
}

/* For each section the part that holds it, itself or one before it, or -1; and how many columns a part must have. */
static void find_parts(const binding *b, const prepared *p, const dl_tensor *views, int *part, int64_t *columns)
{
    int base = -1;
    for (int i = 0; i < b->sections; i++) {
        columns[i] = 0;
        const int rank = views[b->section[i].argument].ndim;
        if (rank >= 0) base = i;
        part[i] = base >= 0 && (base == i || views[b->section[base].argument].ndim == ROWS_RANK) ? base : -1;
        if (part[i] >= 0) columns[base] += columns_of(&b->section[i], p);
    }
}

static bool check_part(const binding *b, const gathered *g, int i, const dl_tensor *v, int64_t columns)
{
    const char *name = b->name[b->section[i].argument];
    if (v->ndim != ROWS_RANK && v->ndim != 4) {
        PyErr_Format(PyExc_ValueError,
                     "%s: %s: expected rows [B, S, columns] or a section [B, S, heads, dim], got %d dimensions",
                     g->op, name, (int)v->ndim);
        return false;
    }
    if (v->ndim == ROWS_RANK && v->shape[2] != columns) {
        PyErr_Format(PyExc_ValueError, "%s: %s: expected %lld columns, got %lld", g->op, name, (long long)columns,
                     (long long)v->shape[2]);
        return false;
    }
    return true;
}

/* The columns of a part from `column` on that are section s. */
static void cut_columns(const bound_section *s, const prepared *p, const dl_tensor *v, int64_t column, cut_view *to)
{
    const int rank = s->arg->ndim;
    int64_t step = v->strides[2];
    to->v = *v;
    to->v.data = v->data ? (char *)v->data + column * step * (v->dtype.bits / 8) : NULL;
    to->v.ndim = rank;
    to->v.shape = to->shape;
    to->v.strides = to->stride;
    for (int d = 0; d < 2; d++) to->shape[d] = v->shape[d], to->stride[d] = v->strides[d];
    for (int d = rank - 1; d >= 2; d--) {
        to->shape[d] = size_of(p, s->arg->dim[d]);
        to->stride[d] = step;
        step *= to->shape[d];
    }
}

/* Cuts the parts of a projection into its sections, or tensors that lie like them: `whole` has one for each section,
 * rank -1 where there is none. */
static bool cut(const binding *b, const prepared *p, const gathered *g, const int *part, const int64_t *columns,
                const dl_tensor *whole, cut_view *to)
{
    int64_t column = 0;
    for (int i = 0; i < b->sections; i++) {
        const int base = part[i];
        if (base == i) column = 0;
        to[i].v.ndim = -1;
        if (base < 0 || whole[base].ndim < 0) continue;
        if (base == i && !check_part(b, g, i, &whole[i], columns[i])) return false;
        if (whole[base].ndim == ROWS_RANK)
            cut_columns(&b->section[i], p, &whole[base], column, &to[i]);
        else
            to[i].v = whole[i];
        column += columns_of(&b->section[i], p);
    }
    return true;
}

/* The sections of the arguments, and those of the results that are their gradients. */
static bool cut_all(const binding *b, const prepared *p, gathered *g, const dl_tensor *views,
                    PyObject *const *results, cut_view to[2][MAX_SECTIONS])
{
    int part[MAX_SECTIONS];
    int64_t columns[MAX_SECTIONS];
    dl_tensor whole[2][MAX_SECTIONS];
    find_parts(b, p, views, part, columns);
    for (int i = 0; i < b->sections; i++) {
        whole[0][i] = views[b->section[i].argument];
        whole[1][i].ndim = -1;
    }
    for (int r = 0; r < b->rows;
         r++) { /* whether a gradient is wanted is a matter of its part, not of the section */
        const bound_row *row = &b->row[r];
        if (row->section < 0 || row->source >= 0 || !(p->rows >> r & 1) || part[row->section] != row->section)
            continue;
        if (!ext_view_tensor(g, row->arg->name, results[~row->source], &whole[1][row->section])) return false;
    }
    return cut(b, p, g, part, columns, whole[0], to[0]) && cut(b, p, g, part, columns, whole[1], to[1]);
}

/* ---- placing ---------------------------------------------------------------------------------------------------------- */

/* An optional result that this call does not have: the framework returns a fixed number of tensors, and gives it one of one
 * dimension without elements. `v` is a view of it. */
static bool is_no_result(const bound_row *row, const dl_tensor *v)
{
    return row->arg->kind == WEFT_ARG_OUT && row->arg->optional && row->arg->ndim > 1 && v->ndim == 1 &&
           v->shape[0] == 0;
}

/* The result that holds a section: its own, or the one of a part before it. */
static int holder(const binding *b, const dl_tensor *views, int section)
{
    int i = section;
    while (i > 0 && views[b->section[i].argument].ndim < 0) i--;
    return b->section[i].result;
}

bool ext_place(const binding *b, const prepared *p, gathered *g, PyObject *const *objects, const dl_tensor *views,
               PyObject *const *results, uint64_t add, char *args)
{
    cut_view sections[2][MAX_SECTIONS];
    if (b->sections && !cut_all(b, p, g, views, results, sections)) return false;
    for (int r = 0; r < b->rows; r++) {
        const bound_row *row = &b->row[r];
        const bool out = row->source < 0, section = row->section >= 0;
        if (!(p->rows >> r & 1) && !(section && out)) continue;
        const dl_tensor *v = section ? &sections[out][row->section].v : views && !out ? &views[row->source] : NULL;
        PyObject *object = out ? results[~row->source] : objects[row->source];
        if (v ? v->ndim < 0 : Py_IsNone(object))
            continue; /* a missing one that is needed is the library's to refuse */
        dl_tensor own;
        if (!v && out) {
            if (!ext_view_tensor(g, row->arg->name, object, &own)) return false;
            if (is_no_result(row, &own)) continue;
            v = &own;
        }
        weft_tensor *t = (weft_tensor *)(args + row->arg->offset);
        if (row->arg->kind == WEFT_ARG_GRAD) {
            weft_grad *grad = (weft_grad *)t;
            grad->add = add >> (section ? holder(b, views, row->section) : ~row->source) & 1;
            t = &grad->to;
        }
        if (!(v ? ext_place_tensor(g, row->arg, v, t) : ext_read_tensor(g, row->arg, object, t))) return false;
    }
    dl_tensor step;
    if (b->step < 0 || Py_IsNone(objects[b->step])) return true;
    return ext_view_tensor(g, "step", objects[b->step], &step) &&
           ext_place_step(g, &step, &((weft_dropout *)(args + b->dropout))->step);
}

/* ---- by name at each call --------------------------------------------------------------------------------------------- */

static bool read_dropout(PyObject *value, weft_dropout *d)
{
    long long base;
    if (!PyTuple_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "dropout: expected a tuple (p, token_base)");
        return false;
    }
    if (!PyArg_ParseTuple(value, "dL;dropout: (p, token_base)", &d->p, &base)) return false;
    d->token_base = base;
    return true;
}

static bool read_item(gathered *g, const weft_op_info *op, PyObject *name, PyObject *value, char *args)
{
    const weft_scalar_info *scalar = find_scalar(op, name);
    if (scalar && scalar->type == WEFT_SCALAR_DROPOUT)
        return read_dropout(value, (weft_dropout *)(args + scalar->offset));
    if (scalar) return read_scalar(g->op, scalar, value, args);
    const weft_arg_info *arg = find_arg(op, name);
    if (arg || PyUnicode_CompareWithASCIIString(name, "step") == 0) return true;
    PyErr_Format(PyExc_TypeError, "%s: %s: expected a field of this operator, got %R", g->op, op->name, name);
    return false;
}

bool ext_read_dict(gathered *g, const weft_op_info *op, PyObject *values, char *args)
{
    PyObject *name, *value;
    Py_ssize_t pos = 0;
    dl_tensor v;
    while (PyDict_Next(values, &pos, &name, &value))
        if (!PyUnicode_Check(name) || !read_item(g, op, name, value, args)) return false;
    for (int32_t r = 0; r < op->num_args; r++) {
        const weft_arg_info *arg = &op->args[r];
        value = PyDict_GetItemString(values, arg->name);
        if (!value || Py_IsNone(value)) continue;
        if (!ext_read_tensor(g, arg, value, (weft_tensor *)(args + arg->offset))) return false;
    }
    value = PyDict_GetItemString(values, "step");
    for (const weft_scalar_info *s = op->scalars; value && !Py_IsNone(value) && s && s->name; s++)
        if (s->type == WEFT_SCALAR_DROPOUT)
            return ext_view_tensor(g, "step", value, &v) &&
                   ext_place_step(g, &v, &((weft_dropout *)(args + s->offset))->step);
    return true;
}
