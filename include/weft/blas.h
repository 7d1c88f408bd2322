/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products of weft/model.h go through a BLAS that is loaded on first use, so neither the library nor a
 * program links one: OpenBLAS or another CBLAS on the CPU, cuBLASLt on CUDA. Without it the backend's own loop serves: the
 * same function, slower. */
#ifndef WEFT_BLAS_H
#define WEFT_BLAS_H

#include <weft/weft.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Functions of a loaded library, filled by the functions below. Zero-initialised: none. */
typedef struct weft_blas {
    void *library;
    void (*sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                  const float *b, int ldb, float beta, float *c, int ldc);
    void (*dgemm)(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda,
                  const double *b, int ldb, double beta, double *c, int ldc);
    void *
        device; /* cuda: the library's handle, and the algorithm chosen for each shape so far; one thread at a time */
    char name[160]; /* for people: file and what the library says of itself */
    void *reserved[8];
} weft_blas;

/* Loads `path`, or with NULL the first of OpenBLAS and any CBLAS that the system finds. WEFT_ERR_UNSUPPORTED where there
 * is none. weft cuts a product into tiles by its shape and hands them to its own threads, so the library is told to use
 * one thread per call: results then do not depend on the number of threads. */
WEFT_API weft_status weft_blas_open(const char *path, weft_blas *blas);
/* The one for exec's backend: as above on cpu and ref, cuBLASLt on cuda. There the first product of a shape asks the library
 * which algorithm to use, and the others use the same: results are the same bits from run to run on one kind of GPU. */
WEFT_API weft_status weft_blas_open_for(const weft_exec *exec, const char *path, weft_blas *blas);
WEFT_API void weft_blas_close(weft_blas *blas);

#ifdef __cplusplus
}
#endif
#endif
