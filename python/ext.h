/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the extension share: the module's state, how an operator's names are bound, and the way from tensors
 * to a call. */
#ifndef WEFT_PYTHON_EXT_H
#define WEFT_PYTHON_EXT_H

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

enum {
    MAX_ARGS_SIZE = 4096,
    MAX_TENSORS = 32, /* arguments of an operator that are tensors */
    MAX_SCALARS = 16, /* and those that are not */
    MAX_RESULTS = 16,
    MAX_ROWS = 64, /* of the library's table */
    MAX_SECTIONS = 6,
    KNOWN_TYPES = 8
};

/* Tensor types whose exchange table has been looked up. Types are kept alive by the references here. */
typedef struct known_type {
    PyTypeObject *type;
    const dl_exchange *exchange;
} known_type;

/* What the module needs of a framework, by name: attributes of the object that set_framework is given. */
enum {
    HOOK_TENSOR,       /* its tensor type */
    HOOK_PARAMETER,    /* and the one of parameters */
    HOOK_MODES,        /* () -> number of active dispatch modes */
    HOOK_GRAD_ENABLED, /* () -> bool */
    HOOK_THREADS,      /* () -> threads for the CPU */
    HOOK_DESCRIBE,     /* (tensor) -> (size, strides, dtype) */
    HOOK_EMPTY_CPU,    /* (size, strides, dtype) -> tensor; None where the framework has none */
    HOOK_EMPTY_CUDA,   /* the same, on the current device */
    HOOK_CURRENT_GPU,  /* () -> index; None without CUDA */
    HOOK_WORKSPACE,    /* (bytes, device index) -> a tensor in CUDA memory */
    HOOK_WROTE,        /* (tensor): its memory has been written */
    HOOK_COUNT
};

typedef struct module_state {
    PyTypeObject *kernel_type;
    PyObject *requires_grad; /* the name of the attribute */
    PyObject *hook[HOOK_COUNT];
    known_type known[KNOWN_TYPES];
    int num_known;
} module_state;

/* The last run of a call: the same shapes take the same workspace, and the library need not be asked, which would be
 * a second validation of all arguments. */
typedef struct last_run {
    size_t bytes;
    weft_exec exec;
    void *args; /* NULL before the first run; pointers in it mean nothing */
} last_run;

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

/* ---- tensors.c: functions that return false have set an error ----------------------------------------------------- */

/* Looks at a tensor and checks what the library cannot: that it is one, and that all are on one device. */
bool ext_view_tensor(gathered *g, const char *name, PyObject *object, dl_tensor *v);
/* Fills a tensor of an args struct from a view, with leading dimensions joined and flat weights unfolded. */
bool ext_place_tensor(gathered *g, const weft_arg_info *arg, const dl_tensor *v, weft_tensor *t);
/* Both. */
bool ext_read_tensor(gathered *g, const weft_arg_info *arg, PyObject *object, weft_tensor *t);
/* The dropout's step: the address of a tensor's first 8 bytes. */
bool ext_place_step(const gathered *g, const dl_tensor *v, const uint64_t **step);

/* ---- bind.c --------------------------------------------------------------------------------------------------------- */

/* A row of the library's table, and the argument that it is, or ~k for result k. */
typedef struct bound_row {
    const weft_arg_info *arg;
    int16_t source, section; /* section -1: the tensor as it is */
    int16_t scalar, item;    /* scalar -1: always there; else see is_there */
} bound_row;

/* Where a scalar argument goes: SCALAR_OWN ones stay in the framework. */
typedef struct bound_scalar {
    enum { SCALAR_OWN, SCALAR_FIELD, SCALAR_P, SCALAR_TOKEN_BASE, SCALAR_PRECISION } kind;
    const weft_scalar_info *field;
} bound_scalar;

/* One of the parts that a row of columns may hold: the argument, the result that is its gradient or -1, its dimensions. */
typedef struct bound_section {
    int16_t argument, result;
    const weft_arg_info *arg;
} bound_section;

/* An operator of the framework, whose names have become offsets. */
typedef struct binding {
    const weft_op_info *op;
    PyObject *names; /* of the tensors; and as text, which lives as long as they do */
    const char *name[MAX_TENSORS];
    int tensors, scalars, results, rows, sections;
    int step, heads;        /* the tensor that is the dropout's step, the scalar that sizes sections; -1: none */
    size_t dropout;         /* offset of the weft_dropout, 0: none */
    uint32_t needs, writes; /* tensors without which it is not one call of the library; those that are written */
    bound_scalar scalar[MAX_SCALARS];
    bound_row row[MAX_ROWS];
    bound_section section[MAX_SECTIONS];
} binding;

/* Scalars as the library takes them. */
typedef struct prepared {
    uint64_t rows;    /* bit r: row r is there */
    int64_t heads[4]; /* key heads, value heads, key dim, value dim */
    int precision;
    size_t args[MAX_ARGS_SIZE / sizeof(size_t)]; /* args_size bytes of it: the args struct without tensors */
} prepared;

/* Resolves names, once for an operator. sections: (name of a scalar, ((argument, row), ...)) or None. */
bool ext_bind(binding *b, const char *op, PyObject *tensors, PyObject *scalars, PyObject *results, PyObject *rows,
              PyObject *needs, PyObject *writes, PyObject *sections);
/* objects: the scalars in the order of the operator's arguments. */
bool ext_prepare(const binding *b, PyObject *const *objects, prepared *p);
/* Fills an args struct from arguments and results; bit k of `add`: result k is added to. views: of the arguments, rank -1
 * where one is absent; NULL: not looked at yet, which an operator with sections does not take. */
bool ext_place(const binding *b, const prepared *p, gathered *g, PyObject *const *objects, const dl_tensor *views,
               PyObject *const *results, uint64_t add, char *args);
/* Fills the fields of an args struct from a dict, its scalars and tensors, and `step`; other names are an error. */
bool ext_read_dict(gathered *g, const weft_op_info *op, PyObject *values, char *args);
bool ext_read_numerics(const char *op, PyObject *value, weft_mhc_numerics *n);

/* ---- run.c ---------------------------------------------------------------------------------------------------------- */

/* Calls the library on the device of what was gathered, with workspace; last: NULL for a call that is made once. */
bool ext_run_call(gathered *g, const weft_op_info *op, const void *args, int precision, int threads,
                  last_run *last);

/* ---- kernel.c ------------------------------------------------------------------------------------------------------- */

extern PyType_Spec ext_kernel_spec;

#endif
