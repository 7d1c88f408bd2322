/* SPDX-License-Identifier: Apache-2.0
 *
 * The benchmark on a GPU. A call is captured as a graph and replayed, so that what is timed is the device and not the
 * host: large problems one run at a time with an empty L2, small ones many in a row as a model at inference would. */
#include "bench/bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <weft/mhc.h>
#include <weft/ops.h>

#include "check/compare.h"
#include "check/element.h"
#include "check/expect.h"
#include "check/random.h"
#include "check/run.h"

enum {
    CHECKED_TOKENS = 9,
    SMALL_TOKENS =
        512, /* up to here a call is mostly latency, and its data come from the layer before, in the L2 */
    CALLS_PER_GRAPH = 20,
    MIN_TIMES = 20,
    MAX_TIMES = 300
};

static const size_t evict_least = (size_t)64 << 20;
static const size_t random_bytes = (size_t)8 << 20; /* of a tensor; the rest repeats them */
static const size_t copy_bytes = (size_t)1 << 30;

static size_t evict_bytes(const bench *b)
{
    return 2 * b->gpu.l2 > evict_least ? 2 * b->gpu.l2 : evict_least;
}

/* Reads the buffer that evicts the L2 with an operator that writes sixteen bytes for every 32 KiB it reads. */
static const char *read_buffer(void *context)
{
    enum { STREAMS = 4, CHANNELS = 4096 };
    bench *b = context;
    void *data = device_timer_buffer(b->timer);
    int64_t tokens = (int64_t)(evict_bytes(b) / (STREAMS * CHANNELS * 2));
    weft_tensor x = weft_dense3(data, WEFT_BF16, tokens, STREAMS, CHANNELS), d_u, pre;
    d_u = weft_dense2(data, WEFT_BF16, tokens, CHANNELS);
    pre = weft_dense2(data, WEFT_F32, tokens, STREAMS);
    d_u.stride[0] = pre.stride[0] = 0;
    weft_mhc_aggregate_bwd_args args = {
        .struct_size = sizeof args,
        .x = x,
        .pre = pre,
        .d_u = d_u,
        .d_pre = {.to = weft_dense2(b->scrap, WEFT_F32, tokens, STREAMS)},
    };
    weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CUDA, .stream = device_timer_stream(b->timer));
    return weft_mhc_aggregate_bwd(&exec, &args) == WEFT_OK ? NULL : weft_last_error();
}

const char *bench_device_open(bench *b)
{
    if (!device_facts_of(0, &b->gpu)) return "the device does not answer";
    b->timer = device_timer_open(evict_bytes(b));
    b->scrap = device_alloc(evict_bytes(b) / 1024);
    if (!b->timer || !b->scrap) return "the device gives no stream or no memory";
    device_timer_reader(b->timer, read_buffer, b);
    return NULL;
}

void bench_device_close(bench *b)
{
    device_timer_close(b->timer);
    device_free(b->workspace);
    device_free(b->scrap);
    b->workspace = b->scrap = NULL;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* One block of random values from the host, doubled on the device until the tensor is full. */
const char *bench_device_fill(const problem *p, const problem_arg *arg)
{
    size_t size = weft_dtype_size(arg->tensor->dtype), bytes = problem_bytes(arg);
    size_t first = bytes < random_bytes ? bytes : random_bytes;
    char *data = arg->tensor->data, *host = malloc(first + 1);
    if (!host) return "not enough memory";
    problem_fill_block(p, arg, host, (int64_t)(first / size));
    const char *wrong = device_put(data, host, first);
    free(host);
    for (size_t done = first; done < bytes && !wrong;) {
        size_t more = bytes - done < done ? bytes - done : done;
        wrong = device_copy(data + done, data, more);
        done += more;
    }
    return wrong ? wrong : device_wait();
}

/* ---- copy bandwidth ---------------------------------------------------------------------------------------------- */

double bench_device_copy(bench *b)
{
    double times[MIN_TIMES], rate = 0;
    char *from = device_alloc(copy_bytes), *to = device_alloc(copy_bytes);
    uint64_t *host = malloc(random_bytes);
    const char *wrong = from && to && host ? NULL : "not enough memory";
    for (size_t i = 0; !wrong && i < random_bytes / sizeof *host; i++) host[i] = random_bits(1, i);
    for (size_t done = 0; !wrong && done < copy_bytes; done += random_bytes)
        wrong = device_put(from + done, host, random_bytes);
    for (int warm = 0; !wrong && warm < 3; warm++)
        wrong = device_timer_copy(b->timer, to, from, copy_bytes, &times[0]);
    for (int i = 0; !wrong && i < MIN_TIMES; i++)
        wrong = device_timer_copy(b->timer, to, from, copy_bytes, &times[i]);
    if (!wrong) rate = 2 * (double)copy_bytes / bench_median(times, MIN_TIMES);
    if (wrong) fprintf(stderr, "weft bench: copy bandwidth: %s\n", wrong);
    device_free(from);
    device_free(to);
    free(host);
    return rate;
}

/* ---- correctness ------------------------------------------------------------------------------------------------- */

/* Some neighbouring tokens of a call, as a call of their own. Where a convolution reaches from token to token, those at an
 * edge of the window that is none of the sequence come out otherwise. */
typedef struct window {
    int64_t all, tokens; /* of the call, of the window */
    int64_t margin;      /* tokens at such an edge */
    int requests;        /* tokens are requests, with rows of a cache */
    int steps; /* of check: by itself, first, last. A window that depends on tokens outside of it is not judged */
} window;

static window window_of(const problem *p)
{
    const problem_spec *s = &p->spec;
    window w = {.all = s->tokens, .tokens = CHECKED_TOKENS, .steps = 3};
    if (!strncmp(p->op->name, "gdn_rule", 8)) {
        int backward = !strcmp(p->op->name + strlen(p->op->name) - 3, "bwd");
        w.all = s->steps;
        w.tokens = s->packed && s->steps / s->sequences < 2 * CHECKED_TOKENS ? 1 : 2 * CHECKED_TOKENS;
        if (w.tokens > w.all) w.tokens = w.all;
        w.steps = backward ? 1 : 2;
        return w;
    }
    if (!strncmp(p->op->name, "gdn", 3)) {
        w.requests = s->batch > 1 || s->steps == 1;
        w.all = w.requests  ? s->batch
                : s->packed ? s->steps - 1
                            : s->steps; /* the last one of packed ones is padding */
        w.margin = w.requests ? 0 : s->width - 1;
    }
    w.tokens += 2 * w.margin;
    if (w.tokens > w.all) w.tokens = w.all;
    return w;
}

/* Which axis of an argument counts tokens; -1: none does. What is before it is 1. */
static int token_axis(const window *w, const problem_arg *arg)
{
    switch (arg->info->dim[0]) {
    case WEFT_DIM_TOKENS: return 0;
    case WEFT_DIM_BATCH: return w->requests ? 0 : 1;
    case WEFT_DIM_CACHE: return w->requests ? 0 : -1;
    default: return -1;
    }
}

static int make_small(problem *small, const problem *p, const window *w)
{
    problem_spec spec = p->spec;
    spec.tokens = w->tokens;
    if (spec.steps) {
        spec.batch = spec.sequences = w->requests ? w->tokens : 1;
        spec.steps = w->requests ? 1 : w->tokens;
        spec.packed = 0;
    }
    return problem_make(small, p->op, &spec);
}

/* Tokens from `first` on of the problem on the device, as a problem in host memory: its inputs, or its outputs. */
static const char *fetch(const problem *p, const problem *small, const window *w, int64_t first, int outputs)
{
    const char *wrong = NULL;
    for (int i = 0, k = 0; i < p->num_args && !wrong; i++) {
        const problem_arg *from = &p->arg[i];
        if (k == small->num_args || small->arg[k].info != from->info) continue; /* offsets */
        const problem_arg *to = &small->arg[k++];
        int axis = token_axis(w, from);
        if ((from->info->kind != WEFT_ARG_IN) != outputs) continue;
        if (outputs && axis < 0) continue;
        size_t skip = axis < 0 ? 0 : (size_t)(first * from->tensor->stride[axis]);
        wrong =
            device_get(to->tensor->data, (char *)from->tensor->data + skip * weft_dtype_size(from->tensor->dtype),
                       problem_bytes(to));
    }
    return wrong;
}

/* The results of tokens `low` to `high` of the window. */
static const char *judge(const problem *small, const expectation *e, const window *w, int64_t low, int64_t high,
                         const char *what, char *text, size_t size)
{
    for (int i = 0; i < e->num_results; i++) {
        const expect_result *r = &e->result[i];
        int axis = -1, whole = low == 0 && high == w->tokens;
        for (int k = 0; k < small->num_args; k++)
            if (small->arg[k].tensor == r->tensor) axis = token_axis(w, &small->arg[k]);
        if (axis < 0 && what) continue;
        weft_tensor t = *r->tensor;
        int64_t skip = 0;
        if (axis >= 0 && !whole) {
            t.shape[axis] = high - low;
            t.data = (char *)t.data + (size_t)(low * t.stride[axis]) * weft_dtype_size(t.dtype);
            skip = low * (tensor_count(&t) / (high - low));
        }
        comparison c = compare(&t, r->want + skip, r->bound + skip);
        if (!c.failed) continue;
        snprintf(text, size, "wrong result: %s, %s: %lld of %lld elements, got %.9g, want %.9g, bound %.3g",
                 what ? what : "a few tokens", r->name, (long long)c.failed, (long long)c.count, c.got, c.want,
                 c.bound);
        return text;
    }
    return NULL;
}

/* A few tokens by themselves, with all results; then the whole call on the buffers that are about to be timed, its first
 * and its last tokens. */
static const char *check(bench *b, problem *p, char *text, size_t size)
{
    window w = window_of(p);
    problem small;
    if (!make_small(&small, p, &w)) return "not enough memory";
    const char *wrong = NULL;
    for (int i = 0; i < small.num_args && !wrong; i++)
        if (!(small.arg[i].tensor->data = malloc(problem_bytes(&small.arg[i]) + 1))) wrong = "not enough memory";
    for (int step = 0; step < w.steps && !wrong; step++) {
        static const char *const what[] = {NULL, "first tokens", "last tokens"};
        expectation e = {0};
        int64_t first = step == 2 ? w.all - w.tokens : 0;
        int cut = w.all > w.tokens;
        int64_t low = step == 2 && cut ? w.margin : 0, high = w.tokens - (step == 1 && cut ? w.margin : 0);
        wrong = fetch(p, &small, &w, first, 0);
        if (!wrong) expect_begin(&e, &b->exec, p->op, small.args);
        if (!wrong && step == 0) wrong = run_call(&b->exec, p->op, small.args);
        if (!wrong && step == 1) wrong = run_resident(&b->exec, p->op, p->args);
        if (!wrong && step > 0) wrong = fetch(p, &small, &w, first, 1);
        if (!wrong && !expect_finish(&e)) wrong = e.scope.problem;
        if (!wrong) wrong = judge(&small, &e, &w, low, high, what[step], text, size);
        if (wrong && wrong != text) snprintf(text, size, "%s", wrong);
        if (wrong) wrong = text;
        expect_end(&e);
    }
    for (int i = 0; i < small.num_args; i++) free(small.arg[i].tensor->data);
    problem_free(&small);
    return wrong;
}

/* ---- time -------------------------------------------------------------------------------------------------------- */

typedef struct captured {
    weft_exec exec;
    const problem *p;
} captured;

static const char *call(void *context)
{
    const captured *c = context;
    return weft_op_call(c->p->op, &c->exec, c->p->args) == WEFT_OK ? NULL : weft_last_error();
}

static int64_t problem_tokens(const problem *p)
{
    return !strncmp(p->op->name, "gdn", 3) ? p->spec.batch * p->spec.steps : p->spec.tokens;
}

static const char *measure(bench *b, problem *p, timing *t)
{
    captured c = {.exec = b->exec, .p = p};
    int small = problem_tokens(p) <= SMALL_TOKENS, calls = small ? CALLS_PER_GRAPH : 1, replays = 1, count;
    double times[MAX_TIMES], one = 0;
    if (weft_op_workspace(p->op, &c.exec, p->args, &c.exec.workspace_bytes) != WEFT_OK) return weft_last_error();
    if (c.exec.workspace_bytes > b->workspace_bytes || !b->workspace) {
        device_free(b->workspace);
        b->workspace = device_alloc(b->workspace_bytes = c.exec.workspace_bytes);
    }
    if (!b->workspace) return "not enough memory for the workspace on the device";
    c.exec.workspace = b->workspace;
    c.exec.stream = device_timer_stream(b->timer);
    const char *wrong = device_timer_capture(b->timer, call, &c, calls);
    for (int warm = 0; warm < 3 && !wrong; warm++) wrong = device_timer_run(b->timer, 1, !small, &one);
    if (small && one > 0) replays = (int)fmin(500, fmax(1, 2e-3 / one));
    count = (int)fmin(MAX_TIMES, fmax(MIN_TIMES, b->seconds / (one > 0 ? one * replays : 1)));
    for (int i = 0; i < count && !wrong; i++) {
        wrong = device_timer_run(b->timer, replays, !small, &times[i]);
        times[i] /= (double)calls * replays;
    }
    if (wrong) return wrong;
    /* As many as copy is measured by, and then the others: by that time a GPU that may not draw more power has lowered its clock. */
    int later = count - MIN_TIMES;
    t->seconds = bench_median(times, MIN_TIMES);
    t->best = times[0];
    t->sustained = later >= MIN_TIMES ? bench_median(times + MIN_TIMES, later) : 0;
    if (t->sustained > 0) t->best = fmin(t->best, times[MIN_TIMES]);
    t->cache = small ? "warm" : "flushed";
    return NULL;
}

const char *bench_device_run(bench *b, problem *p, timing *t)
{
    const char *wrong = run_prepare(&b->exec, p->op, p->args, run_resident);
    if (!wrong) wrong = check(b, p, t->problem, sizeof t->problem);
    return wrong ? wrong : measure(b, p, t);
}
