/* SPDX-License-Identifier: Apache-2.0
 *
 * What a backend sees of the rest of the library: the validated call, its table row, and the workspace arena. */
#ifndef WEFT_CORE_KERNEL_H
#define WEFT_CORE_KERNEL_H

#include <stdbool.h>
#include <weft/gdn.h>
#include <weft/mhc.h>
#include <weft/norm.h>
#include <weft/ops.h>

#include "core/size.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum weft_op {
#define WEFT_OP(name) WEFT_OP_##name,
#include "core/ops.def"
#undef WEFT_OP
    WEFT_OP_COUNT
} weft_op;

/* A validated call: backends do not check shapes again. No tensor has, spans or steps over more than WEFT_MOST_ELEMENTS, so
 * offsets and products of the sizes of a tensor fit. */
typedef struct weft_call {
    weft_op op;
    const weft_exec *exec;
    const struct weft_backend_table *backend;
    const struct weft_operands *operands; /* as the caller gave them */
    weft_isa isa;                         /* CPU: the instruction set chosen for this call */
    int32_t sms;                          /* CUDA: multiprocessors to plan for; never changes a result */
    /* CUDA: what the device has: multiprocessors, bytes of shared memory that a block may ask for */
    int32_t device_sms, device_shared;
    weft_dtype dtype; /* activation type, or f32/f64 for operators without activations */
    bool f64;         /* every tensor is float64 */
    bool query;       /* nothing runs: there is no workspace, and data may be NULL, which counts as aligned */
    bool any_address; /* a query for workspace that must do wherever the data will lie */
    int64_t tokens, streams, channels;
    int64_t rows;   /* rows of the projection where the operator has one */
    int64_t scales; /* elements of alpha of a site's gates: 3, or 2 without a residual mix; elsewhere -1 */
    /* weft/gdn.h; heads are those of query and key, or of their gradients */
    int64_t batch, steps, key_heads, value_heads, heads, key_dim, value_dim, width, history, sequences, cache;
} weft_call;

/* The decisions of a row about one call: filled by prepare, read by run. `plan` belongs to the row and is not cleared. */
enum { WEFT_PLAN_BYTES = 4096 };
typedef struct weft_prepared {
    size_t workspace; /* bytes of exec.workspace that the call needs */
    const char *path; /* which path it takes and why: "fused: ...", "unfused: <reason>" */
    weft_status (*run)(const weft_call *call, const void *args, const struct weft_prepared *prepared);
    union {
        void *pointer; /* aligns */
        double number;
        char bytes[WEFT_PLAN_BYTES];
    } plan;
} weft_prepared;

/* One row of a backend's table. `args` is the operator's args struct, complete (fields the caller's older struct did
 * not have are zero). A row has either
 *   - one path: `run`, and `workspace`, which is asked with call->query and may be NULL: none needed; or
 *   - several: `prepare` decides on one for this call and fills in all of `prepared`. It looks at no data, launches nothing
 *     and cannot fail; of a call that will run, it may compute addresses in exec.workspace before its size is checked.
 * A table ends with a row that has neither. */
typedef struct weft_kernel {
    weft_dtype dtype; /* WEFT_NONE: any */
    int32_t streams;  /* 0: any */
    weft_status (*run)(const weft_call *call, const void *args);
    size_t (*workspace)(const weft_call *call, const void *args);
    void (*prepare)(const weft_call *call, const void *args, weft_prepared *prepared);
} weft_kernel;

static inline bool weft_kernel_is(const weft_kernel *k)
{
    return k->run || k->prepare;
}

/* The first row of a table that serves the call, or NULL. */
static inline const weft_kernel *weft_kernel_for(const weft_call *call, const weft_kernel *table)
{
    for (const weft_kernel *k = table; weft_kernel_is(k); k++)
        if ((k->dtype == WEFT_NONE || k->dtype == call->dtype) && (k->streams == 0 || k->streams == call->streams))
            return k;
    return NULL;
}

/* Everything that is asked about a call is answered here, once: how much workspace, which path, how to run it. */
static inline void weft_prepare(const weft_kernel *k, const weft_call *call, const void *args,
                                weft_prepared *prepared)
{
    if (k->prepare) {
        k->prepare(call, args, prepared);
        return;
    }
    prepared->path = "the only path of this backend";
    prepared->workspace = 0;
    if (!k->workspace) return;
    weft_call query = *call;
    query.query = true;
    prepared->workspace = k->workspace(&query, args);
}

static inline weft_status weft_run(const weft_kernel *k, const weft_call *call, const void *args,
                                   const weft_prepared *prepared)
{
    return k->run ? k->run(call, args) : prepared->run(call, args, prepared);
}

/* Outputs of this size or more do not stay in a cache. */
enum { WEFT_LARGE_BYTES = 8 << 20 };
/* Huge pages are requested for untouched outputs up to this total. A virtual machine may have to get free huge pages back from
 * its host, which for many of them takes longer than small pages do. */
enum { WEFT_HUGE_BYTES = 64 << 20 };

/* Threads of a team that is about to start, at most `wanted`: as many as the system lets this process create; 1 in a child of fork
 * whose parent had a team (src/core/team.c). */
int weft_team(int wanted);

/* False where memory has not been touched since the system handed it out (src/core/pages.c). */
bool weft_pages_present(const void *data, size_t bytes);
/* Asks for huge pages where whole pages of this memory will be written. */
void weft_pages_huge(void *data, size_t bytes);
/* Populates the whole pages of this memory at once instead of one fault at a time. */
void weft_pages_fill(void *data, size_t bytes);
/* Asks for huge pages for the large outputs of a call, as far as they are dense and untouched. */
void weft_outputs_ask(const weft_op_info *info, const void *args);

static inline bool weft_has(const weft_tensor *t)
{
    return t->dtype != WEFT_NONE;
}

/* Hands out aligned pieces of exec.workspace. With a NULL base it only counts, so the code that asks for the size and
 * the code that uses the memory are the same code. */
typedef struct weft_arena {
    char *base;
    size_t used;
} weft_arena;

#define WEFT_ARENA_ALIGN 64

/* Rounds up to the arena's alignment; saturates on overflow. */
static inline size_t weft_round_up(size_t bytes)
{
    return weft_bytes_plus(bytes, WEFT_ARENA_ALIGN - 1) & ~(size_t)(WEFT_ARENA_ALIGN - 1);
}

static inline weft_arena weft_arena_open(void *workspace)
{
    uintptr_t p = (uintptr_t)workspace;
    weft_arena a = {workspace ? (char *)((p + WEFT_ARENA_ALIGN - 1) & ~(uintptr_t)(WEFT_ARENA_ALIGN - 1)) : NULL,
                    0};
    return a;
}

static inline void *weft_arena_take(weft_arena *a, size_t bytes)
{
    void *p = a->base ? a->base + a->used : NULL;
    a->used = weft_bytes_plus(a->used, weft_round_up(bytes));
    return p;
}

/* Bytes to ask the caller for: what was taken plus room to align the base. */
static inline size_t weft_arena_bytes(const weft_arena *a)
{
    return a->used ? weft_bytes_plus(a->used, WEFT_ARENA_ALIGN - 1) : 0;
}

#ifdef __cplusplus
}
#endif
#endif
