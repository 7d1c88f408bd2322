/* SPDX-License-Identifier: Apache-2.0
 *
 * A backend as core sees it: a table of functions, and sets of kernels. src/core/backends.c lists those of this build. */
#ifndef WEFT_CORE_BACKEND_H
#define WEFT_CORE_BACKEND_H

#include <weft/blas.h>

#include "core/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kernels that serve a call together: those of a backend, or of one of its instruction sets. */
typedef struct weft_kernel_set {
    const weft_kernel *const *op;          /* the rows of each operator, by weft_op */
    const struct weft_nn_table *const *nn; /* for each dtype (src/core/nn.h), closed by NULL */
} weft_kernel_set;

typedef struct weft_backend_table {
    /* 1 where this machine can run it. NULL: every machine can. */
    int (*available)(void);
    /* Fields of exec that are the backend's own; fills in what the call takes from them. */
    weft_status (*check_exec)(weft_call *call);
    /* The device of the call reaches the memory at p. NULL: the backend works on the host's memory. */
    weft_status (*check_pointer)(const weft_call *call, const char *prefix, const char *name, const void *p);
    const weft_kernel_set *(*kernels)(weft_isa isa);
    /* Called before and after the run of a validated call; NULL: nothing to do. enter fills `previous` for leave. */
    weft_status (*enter)(const weft_call *call, int *previous);
    void (*leave)(const weft_call *call, int previous);
    /* Of its device. NULL: products run on the host. */
    weft_status (*blas_open)(const weft_exec *exec, const char *path, weft_blas *blas);
} weft_backend_table;

/* Each defined in its backend's folder; a build may lack the last. */
extern const weft_backend_table weft_ref_backend, weft_cpu_backend, weft_cuda_backend;

/* NULL where this build has no such backend. */
const weft_backend_table *weft_backend_of(weft_backend backend);

/* For backends on the host: device and instruction set. */
weft_status weft_check_host_exec(weft_call *call);

/* Rejects a pointer that the call's backend cannot reach, unless exec.trust_pointers is set. */
static inline weft_status weft_check_pointer(const weft_call *call, const char *prefix, const char *name,
                                             const void *p)
{
    const weft_backend_table *b = call->backend;
    return !b->check_pointer || call->exec->trust_pointers ? WEFT_OK : b->check_pointer(call, prefix, name, p);
}

/* What weft_blas.device points to begins with this. */
typedef struct weft_blas_device {
    void (*close)(weft_blas *blas);
} weft_blas_device;

#ifdef __cplusplus
}
#endif
#endif
