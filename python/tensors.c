/* SPDX-License-Identifier: Apache-2.0
 *
 * From a framework's tensors, through DLPack's exchange interface, to the library's. */
#include "ext.h"

static const char *device_name(dl_device device, char text[32])
{
    const char *type = device.type == DL_CPU ? "cpu" : device.type == DL_CUDA ? "cuda" : "another device";
    if (device.type == DL_CUDA)
        PyOS_snprintf(text, 32, "%s:%d", type, (int)device.index);
    else
        PyOS_snprintf(text, 32, "%s", type);
    return text;
}

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
#define ONE(code, bits) ((code) | (bits) << 8 | 1 << 16)
    switch (dtype.code | dtype.bits << 8 | (uint32_t)dtype.lanes << 16) {
    case ONE(DL_FLOAT, 32): return WEFT_F32;
    case ONE(DL_BFLOAT, 16): return WEFT_BF16;
    case ONE(DL_FLOAT, 16): return WEFT_F16;
    case ONE(DL_FLOAT, 64): return WEFT_F64;
    case ONE(DL_INT, 32): return WEFT_I32;
    case ONE(DL_INT, 64): return WEFT_I64;
    default: return WEFT_NONE;
    }
#undef ONE
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

/* What nearly no tensor needs is apart, so that what each of them passes through stays short. */
static bool no_tensor(const gathered *g, const char *name, PyObject *object)
{
    PyObject *type = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__name__");
    PyErr_Format(PyExc_TypeError, "%s: %s: expected a tensor with DLPack's exchange interface, got %S", g->op, name,
                 type ? type : Py_None);
    Py_XDECREF(type);
    return false;
}

static bool no_view(const gathered *g, const char *name)
{
    if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%s: %s: the tensor cannot be read", g->op, name);
    return false;
}

/* A tensor that is the first, or not on the very device of the first. */
static bool take_device(gathered *g, const char *name, const dl_exchange *exchange, dl_tensor *v)
{
    char want[32], got[32];
    if (v->device.type == DL_CUDA_HOST) v->device.type = DL_CPU;
    if (v->device.type == DL_CPU) v->device.index = 0;
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

static inline bool view_tensor(gathered *g, const char *name, PyObject *object, dl_tensor *v)
{
    const dl_exchange *exchange = find_exchange(g->state, object);
    if (!exchange) return no_tensor(g, name, object);
    if (exchange->view(object, v) != 0) return no_view(g, name);
    if (v->data) v->data = (char *)v->data + v->byte_offset;
    const bool alike = g->any && v->device.type == g->device.type && v->device.index == g->device.index;
    return alike || take_device(g, name, exchange, v);
}

bool ext_view_tensor(gathered *g, const char *name, PyObject *object, dl_tensor *v)
{
    return view_tensor(g, name, object, v);
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

static bool no_dtype(const gathered *g, const weft_arg_info *arg, const dl_tensor *v)
{
    PyErr_Format(PyExc_ValueError,
                 "%s: %s: expected float32, bfloat16, float16 or float64, or int32 or int64 for indices, got "
                 "another dtype of %d bits",
                 g->op, arg->name, (int)v->dtype.bits);
    return false;
}

/* A token that is alone has no stride. It gets the one it would have in a row of its like, so that it goes the way that a token goes
 * among others. */
static int64_t stride_in_a_row(const weft_tensor *t)
{
    int64_t most = 1;
    for (int d = 1; d < t->ndim; d++)
        if (t->shape[d] * t->stride[d] > most) most = t->shape[d] * t->stride[d];
    return most;
}

/* One whose dimensions may have to be joined or unfolded; the dtype is known. */
static bool place_folded(gathered *g, const weft_arg_info *arg, const dl_tensor *v, weft_tensor *t)
{
    char expected[96];
    int first = 0; /* dimensions of t that the leading dimensions of v have filled */
    int lead = 0;  /* and how many dimensions of v these are */
    if (arg->dim[0] == WEFT_DIM_TOKENS) {
        lead = v->ndim - (arg->ndim - 1);
        first = 1;
        if (lead < 0) {
            PyOS_snprintf(expected, sizeof expected, "at least %d dimensions", (int)arg->ndim - 1);
            return wrong_shape(g, arg, v, expected);
        }
        if (!collapse(v, lead, &t->shape[0], &t->stride[0]))
            return wrong_shape(g, arg, v, "leading dimensions that are one run of tokens (call contiguous())");
    }
    if (arg->dim[0] == WEFT_DIM_CONV && arg->dim[1] == WEFT_DIM_WIDTH && v->ndim == 3 && v->shape[1] == 1) {
        t->shape[0] = v->shape[0], t->stride[0] = v->strides[0]; /* [C, 1, W] of a depthwise convolution */
        t->shape[1] = v->shape[2], t->stride[1] = v->strides[2];
        return true;
    }
    int rest = v->ndim - lead, want = arg->ndim - first;
    bool weight = first == 0 && want >= 2 && arg->dim[want - 2] == WEFT_DIM_STREAMS &&
                  arg->dim[want - 1] == WEFT_DIM_CHANNELS;
    if (weight && rest == want - 1 && g->streams > 0 && v->shape[rest - 1] % g->streams == 0) {
        int64_t channels = v->shape[rest - 1] / g->streams, step = v->strides[rest - 1];
        for (int d = 0; d < rest - 1; d++) t->shape[d] = v->shape[d], t->stride[d] = v->strides[d];
        t->shape[want - 2] = g->streams, t->stride[want - 2] = channels * step;
        t->shape[want - 1] = channels, t->stride[want - 1] = step;
        return true;
    }
    if (rest != want) {
        PyOS_snprintf(expected, sizeof expected, "%d dimensions", want);
        return wrong_shape(g, arg, v, expected);
    }
    for (int d = 0; d < rest; d++) {
        t->shape[first + d] = v->shape[lead + d];
        t->stride[first + d] = v->strides[lead + d];
        if (arg->dim[first + d] == WEFT_DIM_STREAMS && g->streams == 0) g->streams = v->shape[lead + d];
    }
    if (first && t->shape[0] == 1) t->stride[0] = stride_in_a_row(t);
    return true;
}

static inline bool place_tensor(gathered *g, const weft_arg_info *arg, const dl_tensor *v, weft_tensor *t)
{
    *t = (weft_tensor){v->data, dtype_of(v->dtype), arg->ndim, {0}, {0}};
    if (t->dtype == WEFT_NONE) return no_dtype(g, arg, v);
    if (v->ndim != arg->ndim || g->streams == 0) return place_folded(g, arg, v, t);
    for (int d = 0; d < v->ndim; d++) t->shape[d] = v->shape[d], t->stride[d] = v->strides[d];
    if (arg->dim[0] == WEFT_DIM_TOKENS && t->shape[0] == 1) t->stride[0] = stride_in_a_row(t);
    return true;
}

bool ext_place_tensor(gathered *g, const weft_arg_info *arg, const dl_tensor *v, weft_tensor *t)
{
    return place_tensor(g, arg, v, t);
}

bool ext_read_tensor(gathered *g, const weft_arg_info *arg, PyObject *object, weft_tensor *t)
{
    dl_tensor v;
    return view_tensor(g, arg->name, object, &v) && place_tensor(g, arg, &v, t);
}

bool ext_place_step(const gathered *g, const dl_tensor *v, const uint64_t **step)
{
    int64_t count = 1;
    for (int d = 0; d < v->ndim; d++) count *= v->shape[d];
    if (v->dtype.bits != 64 || v->dtype.lanes != 1 || count < 1) {
        PyErr_Format(PyExc_ValueError, "%s: step: expected an int64 or uint64 tensor of one element", g->op);
        return false;
    }
    *step = v->data;
    return true;
}
