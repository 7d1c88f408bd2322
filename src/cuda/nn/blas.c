/* SPDX-License-Identifier: Apache-2.0
 *
 * cuBLASLt, loaded on first use. Its functions and constants are declared here as its ABI has them, so that
 * building needs no headers of it. For each shape the algorithm is chosen once. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "cuda/backend.h"
#include "cuda/nn/blas.h"

enum { MOST_PLANS = 256, ROOM_BYTES = WEFT_CUDA_BLAS_ROOM, ALIGNMENT = 16 };

/* Numbers of the library's enums. */
enum { TYPE_F32 = 0, TYPE_BF16 = 14, COMPUTE_F32 = 68, COMPUTE_TF32 = 77, OP_T = 1 };
enum { DESC_TRANS_A = 3, DESC_TRANS_B = 4, PREFER_ROOM = 1, PREFER_ALIGNMENT_A = 5 };

typedef struct lt_algo {
    uint64_t data[8];
} lt_algo;

typedef struct lt_result {
    lt_algo algo;
    size_t room;
    int state;
    float waves;
    int reserved[4];
} lt_result;

typedef struct lt_functions {
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*desc_create)(void **desc, int compute, int scale);
    int (*desc_destroy)(void *desc);
    int (*desc_set)(void *desc, int attribute, const void *value, size_t bytes);
    int (*layout_create)(void **layout, int type, uint64_t rows, uint64_t columns, int64_t ld);
    int (*layout_destroy)(void *layout);
    int (*prefer_create)(void **prefer);
    int (*prefer_destroy)(void *prefer);
    int (*prefer_set)(void *prefer, int attribute, const void *value, size_t bytes);
    int (*heuristic)(void *handle, void *desc, void *a, void *b, void *c, void *d, void *prefer, int asked,
                     lt_result *results, int *found);
    int (*matmul)(void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b,
                  void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                  const lt_algo *algo, void *room, size_t room_bytes, void *stream);
    size_t (*version)(void);
} lt_functions;

/* What decides the algorithm. */
typedef struct lt_key {
    int64_t m, n, k, lda, ldb, ldc;
    int32_t a_transposed, b_transposed, add, in, out, compute, aligned;
} lt_key;

typedef struct lt_plan {
    lt_key key;
    void *desc, *a, *b, *c;
    lt_algo algo;
    int usable;
} lt_plan;

typedef struct lt_blas {
    weft_blas_device device;
    lt_functions lt;
    void *handle, *prefer[2]; /* for addresses of any alignment, and of ALIGNMENT */
    int32_t count;
    lt_plan plans[MOST_PLANS];
} lt_blas;

/* A function from a library: dlsym returns an object pointer, which C does not convert. */
static int find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

static int find_all(void *library, lt_functions *lt)
{
    return find(library, "cublasLtCreate", &lt->create) && find(library, "cublasLtDestroy", &lt->destroy) &&
           find(library, "cublasLtMatmulDescCreate", &lt->desc_create) &&
           find(library, "cublasLtMatmulDescDestroy", &lt->desc_destroy) &&
           find(library, "cublasLtMatmulDescSetAttribute", &lt->desc_set) &&
           find(library, "cublasLtMatrixLayoutCreate", &lt->layout_create) &&
           find(library, "cublasLtMatrixLayoutDestroy", &lt->layout_destroy) &&
           find(library, "cublasLtMatmulPreferenceCreate", &lt->prefer_create) &&
           find(library, "cublasLtMatmulPreferenceDestroy", &lt->prefer_destroy) &&
           find(library, "cublasLtMatmulPreferenceSetAttribute", &lt->prefer_set) &&
           find(library, "cublasLtMatmulAlgoGetHeuristic", &lt->heuristic) &&
           find(library, "cublasLtMatmul", &lt->matmul) && find(library, "cublasLtGetVersion", &lt->version);
}

static int make_preference(lt_blas *b, int aligned)
{
    size_t room = ROOM_BYTES;
    uint32_t bytes = aligned ? ALIGNMENT : 2;
    if (b->lt.prefer_create(&b->prefer[aligned]) ||
        b->lt.prefer_set(b->prefer[aligned], PREFER_ROOM, &room, sizeof room))
        return 0;
    for (int i = 0; i < 4; i++)
        if (b->lt.prefer_set(b->prefer[aligned], PREFER_ALIGNMENT_A + i, &bytes, sizeof bytes)) return 0;
    return 1;
}

static void close_device(weft_blas *blas)
{
    lt_blas *b = blas->device;
    for (int32_t i = 0; i < b->count; i++) {
        lt_plan *p = &b->plans[i];
        void *const layouts[] = {p->a, p->b, p->c};
        for (int l = 0; l < 3; l++)
            if (layouts[l]) b->lt.layout_destroy(layouts[l]);
        if (p->desc) b->lt.desc_destroy(p->desc);
    }
    for (int i = 0; i < 2; i++)
        if (b->prefer[i]) b->lt.prefer_destroy(b->prefer[i]);
    if (b->handle) b->lt.destroy(b->handle);
    free(b);
    blas->device = NULL;
}

weft_status weft_cuda_blas_open(const weft_exec *exec, const char *path, weft_blas *blas)
{
    static const char *const known[] = {"libcublasLt.so.13",
                                        "libcublasLt.so.12",
                                        "libcublasLt.so",
                                        "/usr/local/cuda/lib64/libcublasLt.so.13",
                                        "/usr/local/cuda/lib64/libcublasLt.so.12",
                                        NULL};
    const char *const asked[] = {path, NULL};
    weft_call call = {.op = WEFT_OP_COUNT, .exec = exec};
    WEFT_TRY(weft_cuda_check_device(&call));
    for (const char *const *name = path ? asked : known; *name; name++) {
        int previous;
        blas->library = dlopen(*name, RTLD_NOW | RTLD_LOCAL);
        lt_blas *b = blas->library ? calloc(1, sizeof *b) : NULL;
        blas->device = b;
        if (b) b->device.close = close_device;
        if (b && find_all(blas->library, &b->lt)) {
            WEFT_TRY(weft_cuda_enter(&call, &previous));
            int ok = !b->lt.create(&b->handle) && make_preference(b, 0) && make_preference(b, 1);
            weft_cuda_leave(&call, previous);
            if (ok) {
                size_t v = b->lt.version();
                snprintf(blas->name, sizeof blas->name, "%s, cuBLASLt %d.%d.%d", *name, (int)(v / 10000),
                         (int)(v / 100 % 100), (int)(v % 100));
                return WEFT_OK;
            }
        } else {
            free(b);
            blas->device = NULL;
        }
        if (blas->device) close_device(blas);
        if (blas->library) dlclose(blas->library);
        *blas = (weft_blas){0};
    }
    return weft_fail(WEFT_ERR_UNSUPPORTED, "blas_open: expected cuBLASLt, got none%s%s", path ? " in " : "",
                     path ? path : " among the system's libraries");
}

/* ---- products ---------------------------------------------------------------------------------------------------------------- */

static int type_of(weft_dtype dtype)
{
    return dtype == WEFT_BF16 ? TYPE_BF16 : TYPE_F32;
}

/* The library counts rows down columns. Seen so, row-major c = op(a) op(b) is c^T = op(b)^T op(a)^T: the factors change
 * places, and nothing is transposed that was not. */
static void make_plan(lt_blas *b, lt_plan *p)
{
    const lt_key *k = &p->key;
    const int32_t t = OP_T;
    lt_result best;
    int found = 0;
    if (b->lt.desc_create(&p->desc, k->compute, TYPE_F32)) return;
    if (k->b_transposed && b->lt.desc_set(p->desc, DESC_TRANS_A, &t, sizeof t)) return;
    if (k->a_transposed && b->lt.desc_set(p->desc, DESC_TRANS_B, &t, sizeof t)) return;
    int64_t b_rows = k->b_transposed ? k->k : k->n, a_rows = k->a_transposed ? k->m : k->k;
    if (b->lt.layout_create(&p->b, k->in, (uint64_t)b_rows, (uint64_t)(k->n + k->k - b_rows), k->ldb) ||
        b->lt.layout_create(&p->a, k->in, (uint64_t)a_rows, (uint64_t)(k->m + k->k - a_rows), k->lda) ||
        b->lt.layout_create(&p->c, k->out, (uint64_t)k->n, (uint64_t)k->m, k->ldc))
        return;
    if (b->lt.heuristic(b->handle, p->desc, p->b, p->a, p->c, p->c, b->prefer[k->aligned], 1, &best, &found) ||
        found < 1 || best.state || best.room > ROOM_BYTES)
        return;
    p->algo = best.algo;
    p->usable = 1;
}

static lt_plan *plan_of(lt_blas *b, const lt_key *key)
{
    for (int32_t i = 0; i < b->count; i++)
        if (!memcmp(&b->plans[i].key, key, sizeof *key)) return &b->plans[i];
    if (b->count == MOST_PLANS) return NULL;
    lt_plan *p = &b->plans[b->count++];
    p->key = *key;
    make_plan(b, p);
    return p;
}

weft_status weft_cuda_blas_product(const weft_call *call, void *blas, const weft_matmul *a, weft_dtype in,
                                   weft_dtype out, void *room)
{
    lt_blas *b = blas;
    lt_key key;
    float alpha = (float)a->scale, beta = a->add ? 1.0f : 0.0f;
    memset(&key, 0, sizeof key); /* keys are compared as bytes */
    key.m = a->m, key.n = a->n, key.k = a->k, key.lda = a->lda, key.ldb = a->ldb, key.ldc = a->ldc;
    key.a_transposed = a->a_transposed != 0, key.b_transposed = a->b_transposed != 0, key.add = a->add != 0;
    key.in = type_of(in), key.out = type_of(out);
    key.compute = in == WEFT_F32 && call->exec->precision == WEFT_PRECISION_TF32 ? COMPUTE_TF32 : COMPUTE_F32;
    key.aligned = ((uintptr_t)a->a | (uintptr_t)a->b | (uintptr_t)a->c) % ALIGNMENT == 0;
    lt_plan *p = plan_of(b, &key);
    if (!p || !p->usable) return WEFT_ERR_UNSUPPORTED; /* the caller has a kernel for it */
    int error = b->lt.matmul(b->handle, p->desc, &alpha, a->b, p->b, a->a, p->a, &beta, a->c, p->c, a->c, p->c,
                             &p->algo, room, ROOM_BYTES, call->exec->stream);
    if (!error) return WEFT_OK;
    return weft_fail(WEFT_ERR_DEVICE, "model: product: cuBLASLt says: error %d for [%lld, %lld] by [%lld, %lld]",
                     error, (long long)a->m, (long long)a->k, (long long)a->k, (long long)a->n);
}
