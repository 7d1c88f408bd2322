/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the extension share: the module's state, a prepared call, and the way from tensors to a call. */
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

enum { MAX_ARGS_SIZE = 4096, KNOWN_TYPES = 8 };

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
    HOOK_EMPTY_CPU,    /* (size, strides, dtype) -> tensor; None where there is no short way */
    HOOK_EMPTY_CUDA,   /* the same, on the current device */
    HOOK_CURRENT_GPU,  /* () -> index; None without CUDA */
    HOOK_WORKSPACE,    /* (bytes, device index) -> a tensor in CUDA memory */
    HOOK_COUNT
};

typedef struct module_state {
    PyTypeObject *call_type, *kernel_type;
    PyObject *requires_grad; /* the name of the attribute */
    PyObject *hook[HOOK_COUNT];
    known_type known[KNOWN_TYPES];
    int num_known;
} module_state;

/* The last run of a Call: the same shapes take the same workspace, and the library need not be asked, which would be
 * a second validation of all arguments. */
typedef struct last_run {
    size_t bytes;
    weft_exec exec;
    void *args; /* NULL before the first run; pointers in it mean nothing */
} last_run;

typedef struct call_object {
    PyObject_HEAD const weft_op_info *op;
    size_t dropout; /* offset of the weft_dropout in args, 0 where there is none */
    last_run last;
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

/* ---- tensors.c: functions that return false have set an error ----------------------------------------------------- */

/* Looks at a tensor and checks what the library cannot: that it is one, and that all are on one device. */
bool ext_view_tensor(gathered *g, const char *name, PyObject *object, dl_tensor *v);
/* Fills a tensor of an args struct from a view, with leading dimensions joined and flat weights unfolded. */
bool ext_place_tensor(gathered *g, const weft_arg_info *arg, const dl_tensor *v, weft_tensor *t);
/* Fills the tensors of an args struct from objects in the order of its table; bit k of `add`: argument k is added to. */
bool ext_read_tensors(gathered *g, const weft_op_info *info, char *args, PyObject *const *objects, uint64_t add);
/* The dropout's step: the address of a tensor's first 8 bytes. */
bool ext_place_step(const gathered *g, const dl_tensor *v, const uint64_t **step);
bool ext_read_step(gathered *g, PyObject *object, const uint64_t **step);

/* ---- run.c ---------------------------------------------------------------------------------------------------------- */

/* Calls the library on the device of what was gathered, with workspace; last: NULL for a call that is made once. */
bool ext_run_call(gathered *g, const weft_op_info *op, const void *args, int precision, int threads,
                  last_run *last);

/* ---- kernel.c ------------------------------------------------------------------------------------------------------- */

extern PyType_Spec ext_kernel_spec;

#endif
