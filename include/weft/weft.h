/* SPDX-License-Identifier: Apache-2.0
 *
 * weft: fused operators for multi-stream residual connections and for Gated DeltaNet layers.
 *
 * This header holds what every operator shares: status, dtype, tensor, exec. The operators themselves are in
 * weft/mhc.h, weft/norm.h and weft/gdn.h; weft/ops.h lists them for bindings and tools. weft/model.h has a model made of
 * them.
 *
 * The library owns no memory and keeps no state: tensors and workspace belong to the caller, every call may be made
 * from any number of threads at once, and a call that returns an error has written nothing. The one thing the CPU backend
 * does to memory besides writing it: it may ask the system for huge pages, or for pages in advance, under large outputs
 * that have not been touched yet.
 *
 * dlclose leaves the library mapped, because threads of the OpenMP runtime outlive a call. After fork, parent and child may
 * both go on with the reference and the CPU backend and get the same results. A child whose parent used several CPU threads
 * through the library runs every call on one thread: the runtime's threads stay with the parent. The library does not see
 * what other libraries did with the same OpenMP runtime; in a child of such a process, set exec.threads to 1.
 *
 * Structs and later versions: a struct that the caller fills begins with struct_size, sizeof of the struct as the caller
 * was compiled with it (WEFT_STRUCT, WEFT_ARGS and WEFT_EXEC fill it in). Fields are only ever appended. The library
 * completes the struct of an older caller with zeros, and takes that of a later one as long as the fields it does not know
 * are zero (WEFT_ERR_UNSUPPORTED where one is set). A struct that lies by value in another one, or that the library
 * fills, ends with `reserved` fields out of which later ones are made: zero where the caller fills it, and a value there is
 * an error. A struct that is said to be frozen keeps its layout for good. */
#ifndef WEFT_WEFT_H
#define WEFT_WEFT_H

#include <stddef.h>
#include <stdint.h>

#define WEFT_VERSION_MAJOR 0
#define WEFT_VERSION_MINOR 1
#define WEFT_VERSION_PATCH 0

#if defined(__GNUC__)
#define WEFT_API __attribute__((visibility("default")))
#else
#define WEFT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum weft_status {
    WEFT_OK = 0,
    WEFT_ERR_ARGUMENT, /* a value, shape, dtype, stride or pointer that the operator does not take */
    WEFT_ERR_OVERLAP, /* an output or the workspace shares memory with another argument where the header does not allow it */
    WEFT_ERR_WORKSPACE,   /* exec.workspace is smaller than weft_<op>_workspace asks for */
    WEFT_ERR_UNSUPPORTED, /* correct, but this backend or this build has no kernel for it */
    WEFT_ERR_DEVICE,      /* the device or its runtime reported an error */
    WEFT_ERR_STATE        /* a call out of its order: backward before forward, memory that was given up */
} weft_status;

/* Zero means "no dtype": a zero-initialised tensor is an absent one. The integers are for offsets and indices. */
typedef enum weft_dtype { WEFT_NONE = 0, WEFT_F32, WEFT_BF16, WEFT_F16, WEFT_F64, WEFT_I32, WEFT_I64 } weft_dtype;

typedef enum weft_backend {
    WEFT_BACKEND_REF = 1, /* plain loops in double precision: the executable specification */
    WEFT_BACKEND_CPU = 2, /* vectorised and threaded, host memory */
    WEFT_BACKEND_CUDA = 3 /* NVIDIA GPUs from compute capability 8.0 on, device memory, asynchronous */
} weft_backend;

/* Instruction sets of the CPU backend, in ascending order. */
typedef enum weft_isa {
    WEFT_ISA_BEST = 0, /* the best one this machine has */
    WEFT_ISA_BASE,     /* portable C */
    WEFT_ISA_AVX2,
    WEFT_ISA_AVX512, /* F, BW, DQ, VL and BF16: Zen 4, Cooper Lake, Sapphire Rapids and later */
    WEFT_ISA_AMX     /* AVX-512 with AMX tiles in the projection */
} weft_isa;

/* How the projection of f32 activations is computed on the CUDA backend. 16-bit activations are exact on tensor cores
 * either way; the other backends always compute in full. */
typedef enum weft_precision {
    WEFT_PRECISION_FULL = 0, /* fp32 products and sums */
    WEFT_PRECISION_TF32      /* permits factors of 11 bits on tensor cores; no kernel makes use of it yet */
} weft_precision;

#define WEFT_MAX_DIMS 4

/* A view of memory that the caller owns. Frozen. Strides count elements, not bytes, so a stream layout, a padded row or a
 * transposed weight is a matter of strides. dtype WEFT_NONE: the tensor is absent (an input that is not there, an
 * output that is not requested). data may be NULL only where the tensor has no elements. Strides are 0 to 2^48, and a
 * tensor has and spans at most 2^48 elements. Strides of an output reach no element twice; those of an input may (0 repeats
 * it). */
typedef struct weft_tensor {
    void *data;
    weft_dtype dtype;
    int32_t ndim;
    int64_t shape[WEFT_MAX_DIMS];
    int64_t stride[WEFT_MAX_DIMS];
} weft_tensor;

/* Where a gradient goes: overwritten (add = 0) or added to what is there (add = 1). Frozen. */
typedef struct weft_grad {
    weft_tensor to;
    int32_t add;
} weft_grad;

/* How and where a call runs: WEFT_EXEC(.backend = WEFT_BACKEND_CPU), or as a value
 * WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU). */
typedef struct weft_exec {
    size_t struct_size;
    weft_backend backend;
    int32_t device; /* CUDA device; 0 on the CPU */
    /* CPU threads, 0 to 4096, 0 = OpenMP's default. A call takes no more than it has pieces of work, than the process may use
     * processors (or 64, where that is more), and than the system lets it create. CUDA: multiprocessors to plan for, 0 = all of
     * the device. Never changes a result. */
    int32_t threads;
    weft_isa isa; /* CPU: highest instruction set to use; a machine that lacks it is an error */
    void *stream; /* cudaStream_t; NULL on the CPU */
    /* At least weft_<op>_workspace bytes in the backend's memory, any alignment, contents undefined before and after. Memory of
     * its own: the bytes that a call needs share nothing with its tensors, inputs included (WEFT_ERR_OVERLAP); what lies
     * behind them is not touched. */
    void *workspace;
    size_t workspace_bytes;
    weft_precision precision;
    /* CUDA: 1 where the caller knows that all tensors, dropout.step and the workspace lie in memory that the device
     * reaches. Pointers are then taken as they are, which saves a question to the driver for each of them; a wrong one
     * is a fault on the device. 0: every pointer is looked up before the first launch, and a wrong one is an error in
     * words. */
    int32_t trust_pointers;
} weft_exec;

/* A struct that begins with struct_size, filled in, with the rest as designated initialisers; as a value and as a pointer:
 *     weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU, .threads = 8);
 *     weft_mhc_expand_fwd(&exec, WEFT_ARGS(weft_mhc_expand_fwd_args, .u = u, .x = x));
 *     weft_mhc_expand_fwd(WEFT_EXEC(.backend = WEFT_BACKEND_REF), &args);
 * C only; C++ sets struct_size by hand in a zero-initialised struct. */
#ifndef __cplusplus
#define WEFT_STRUCT(type, ...) ((type){.struct_size = sizeof(type), __VA_ARGS__})
#define WEFT_ARGS(type, ...) (&WEFT_STRUCT(type, __VA_ARGS__))
#define WEFT_EXEC(...) WEFT_ARGS(weft_exec, __VA_ARGS__)
#endif

/* The sentence that goes with the last error of this thread: operator, argument, expected, got. "" after success. */
WEFT_API const char *weft_last_error(void);

WEFT_API const char *weft_status_name(weft_status status);
WEFT_API const char *weft_dtype_name(weft_dtype dtype);
WEFT_API size_t weft_dtype_size(weft_dtype dtype);
WEFT_API const char *weft_backend_name(weft_backend backend);
WEFT_API const char *weft_isa_name(weft_isa isa);
WEFT_API const char *weft_version(void);

/* The highest instruction set that this machine has and this build contains. */
WEFT_API weft_isa weft_cpu_isa(void);
/* 1 where this build has the backend and this machine can run it. */
WEFT_API int weft_backend_available(weft_backend backend);

/* A dense row-major tensor; the usual way to make one by hand. */
static inline weft_tensor weft_dense(void *data, weft_dtype dtype, int32_t ndim, const int64_t *shape)
{
    weft_tensor t;
    int64_t step = 1;
    t.data = data;
    t.dtype = dtype;
    t.ndim = ndim;
    for (int i = 0; i < WEFT_MAX_DIMS; i++) t.shape[i] = t.stride[i] = 0;
    for (int i = ndim - 1; i >= 0; i--) {
        t.shape[i] = shape[i];
        t.stride[i] = step;
        step = (int64_t)((uint64_t)step * (uint64_t)shape[i]); /* absurd shapes are for the validator to name */
    }
    return t;
}

static inline weft_tensor weft_dense1(void *data, weft_dtype dtype, int64_t a)
{
    int64_t shape[1] = {a};
    return weft_dense(data, dtype, 1, shape);
}

static inline weft_tensor weft_dense2(void *data, weft_dtype dtype, int64_t a, int64_t b)
{
    int64_t shape[2] = {a, b};
    return weft_dense(data, dtype, 2, shape);
}

static inline weft_tensor weft_dense3(void *data, weft_dtype dtype, int64_t a, int64_t b, int64_t c)
{
    int64_t shape[3] = {a, b, c};
    return weft_dense(data, dtype, 3, shape);
}

/* [a, b, c] whose memory order is (a, c, b): the (C, n) stream layout seen as [tokens, streams, channels]. */
static inline weft_tensor weft_dense3_swapped(void *data, weft_dtype dtype, int64_t a, int64_t b, int64_t c)
{
    weft_tensor t = weft_dense3(data, dtype, a, b, c);
    t.stride[1] = 1;
    t.stride[2] = b;
    return t;
}

#ifdef __cplusplus
}
#endif
#endif
