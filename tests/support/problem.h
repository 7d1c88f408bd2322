/* SPDX-License-Identifier: Apache-2.0
 *
 * One call of any operator, built from its description in weft/ops.h: random inputs, guarded buffers, a run and the
 * checks that go with every run. The tests never spell an operator's arguments out where the description can.
 *
 * Every buffer lies between guards. Guards, the gaps of strided views and outputs before the call are filled with
 * bit patterns that are NaN in every dtype, so what is read by mistake shows in the results and what is written by
 * mistake shows in the guards.
 *
 * Memory is always the host's. For the CUDA backend a run sends it to the device, guards and all, and fetches it back
 * (image.h of the program). */
#ifndef WEFT_TESTS_PROBLEM_H
#define WEFT_TESTS_PROBLEM_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <weft/gdn.h>
#include <weft/mhc.h>
#include <weft/norm.h>
#include <weft/ops.h>

#include "check/compare.h"
#include "check/element.h"
#include "check/guard.h"
#include "check/random.h"
#include "check/shape.h"

/* What to build. Zero means the plain choice everywhere, so that a test only writes down what it is about. */
typedef struct spec {
    const char *op; /* "mhc_post_fwd" */
    int64_t tokens, streams, channels;
    int64_t rows;                 /* of a projection by itself; 0: 2n + n^2 */
    weft_dtype act;               /* 0: f32 */
    weft_dtype wide, coef, param; /* 0: f32; f64 where act is */
    layout stream_layout, param_layout;
    int64_t pad;      /* elements between one token and the next */
    int misalign;     /* elements by which every pointer is off its 64-byte boundary */
    bool broadcast;   /* coefficient inputs have token stride 0 */
    bool add;         /* gradients are added to, not written */
    bool independent; /* no residual mix: two scales, merges without res */
    bool mix;         /* every argument draws its own dtype, layout, padding, misalignment and add */
    const char
        *absent; /* names of optional arguments to leave out, each between spaces; "*" leaves out all of them */
    weft_mhc_numerics numerics; /* all zero: the deepseek_v4 preset */
    weft_dropout dropout;
    double sub_eps; /* 0: 1e-5; also eps of rmsnorm */
    weft_contract contract;
    int layers;      /* replay: 0 means 3 */
    bool open_ended; /* replay: the last layer ends with u */
    double scale;    /* of the activations; 0: 1 */
    /* weft/gdn.h: `tokens` counts sequences, `streams` value heads, `channels` the dim of heads; 0: a choice of its own */
    int64_t steps, key_heads, heads, key_dim, value_dim, width, history;
    bool packed;            /* sequences of random lengths, up to twice `steps`, with cu_seqlens */
    const int64_t *lengths; /* packed: of these lengths, one for each of `tokens` */
    int64_t padding;        /* packed: tokens behind the last sequence; 0: 3, -1: none */
    weft_gdn_options gdn;   /* q_scale 0: the defaults */
    int rule_chunk;
    uint64_t seed; /* another draw of the same problem */
} spec;

typedef struct arg {
    const weft_arg_info *info;
    bool
        by_token; /* the first dimension is tokens, or sequences of one length: items that do not know each other */
    char name[40]; /* info->name, or "layers[2].f" */
    int layer;     /* -1: of the args struct itself */
    weft_tensor *view;
    guard guard; /* its block is NULL where the argument is absent */
    int64_t elements;
} arg;

enum { MAX_LAYERS = 6, MAX_ARGS = 72 };

typedef struct problem {
    spec spec;
    const weft_op_info *op;
    weft_status (*call)(const weft_exec *exec, const void *args);
    weft_status (*workspace)(const weft_exec *exec, const void *args, size_t *bytes);
    void *args; /* the operator's args struct */
    weft_mhc_replay_layer layers[MAX_LAYERS];
    uint64_t step; /* what dropout.step points to */
    uint64_t seed; /* printed with every failure */
    int num_args;
    arg arg[MAX_ARGS];
} problem;

/* An exec for the reference, one for the CPU backend, one for the GPU that plans for so many multiprocessors. */
weft_exec on_ref(void);
weft_exec on_cpu(weft_isa isa, int threads);
weft_exec on_cuda(int multiprocessors);
/* "cpu/avx2", "cuda": for messages. */
const char *exec_name(weft_exec exec);
/* Is there a GPU, and does WEFT_TEST_BACKENDS ("cpu", "cuda" or both, the default) not leave it out? */
bool test_on_cuda(void);
bool test_on_cpu(void);

problem *problem_make(const spec *s);
void problem_free(problem *p);
/* The same call in float64 and dense, from the values the inputs have after rounding. */
problem *problem_twin(const problem *p);

arg *problem_arg(problem *p, const char *name);
/* Makes an argument absent. */
void arg_drop(arg *a);
/* Leaves out what has lost a partner it needs: a gradient without its tensor, a norm's weight without the norm. */
void problem_settle(problem *p);
/* Gives an output another dtype and add, with what was there before converted; dense and aligned. */
void arg_rebind(arg *a, weft_dtype dtype, bool add);
static inline bool arg_is_output(const arg *a)
{
    return a->info->kind != WEFT_ARG_IN;
}
/* Offsets and indices: no data that a test may put anything into. */
static inline bool arg_is_index(const arg *a)
{
    return a->info->type == WEFT_TYPE_INDEX;
}
static inline bool arg_adds(const arg *a)
{
    return a->info->kind == WEFT_ARG_GRAD && ((const weft_grad *)(const void *)a->view)->add;
}
static inline bool arg_by_token(const arg *a)
{
    return a->by_token;
}

/* Elements in logical order, whatever the strides. Call problem_seal after changing inputs. */
void *arg_at(const arg *a, int64_t index);
double arg_get(const arg *a, int64_t index);
void arg_set(arg *a, int64_t index, double value);
double *arg_values(const arg *a); /* all of them; free() it */
void arg_fill(arg *a, const double *values);
/* "[3, 0, 17]" */
const char *arg_coordinate(const arg *a, int64_t index, char *text, size_t size);

/* Remembers all bytes: run starts from them and compares with them. problem_make has done it once. */
void problem_seal(problem *p);
void problem_reset(problem *p); /* back to the sealed state */
/* Runs from the sealed state with a guarded workspace of just the size asked for, full of NaN, and checks that
 * nothing but the elements of outputs has changed. */
weft_status problem_run(problem *p, weft_exec exec);
/* The same, and anything but WEFT_OK is a failure of the test. */
void problem_must_run(problem *p, weft_exec exec);
/* Calls an operator by name with a workspace of its own; anything but WEFT_OK is a failure of the test. */
void run_plain(const char *op, weft_exec exec, const void *args);
/* Calls with whatever pointers the args hold, without the checks of problem_run. */
weft_status problem_call(problem *p, weft_exec exec);
/* True where no byte of any argument differs from the sealed state. */
bool problem_untouched(const problem *p);

/* The elements of all outputs, packed; two packs of one problem can be compared bit by bit (NaN equals NaN). */
typedef struct pack {
    char *bytes;
    size_t size;
} pack;
pack problem_pack(const problem *p);
void pack_free(pack *k);
void pack_expect_same(const problem *p, const pack *got, const pack *want, const char *what);

/* Failures are counted, so that one run of a grid shows all that is wrong, and a test ends with test_verdict. The
 * first few are printed in full. */
void test_failed(const char *format, ...) __attribute__((format(printf, 1, 2)));
int test_failures(void);
void test_verdict(void);
/* "mhc_post_fwd tokens=3 streams=4 ... seed=..." for messages; a static buffer per thread. */
const char *problem_text(const problem *p);

/* WEFT_TEST_QUICK=1 thins the grids, for builds that run many times slower. */
bool test_quick(void);

#endif
