/* SPDX-License-Identifier: Apache-2.0
 *
 * Running one call with the checks that go with every run, and comparing two runs bit by bit. */
#include "support/problem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#include "check/device.h"
#include "check/run.h"
#include "support/device.h"
#include "support/memory.h"

/* ---- failures ------------------------------------------------------------------------------------------------ */

static _Atomic int failures; /* tests may run operators in threads */

void test_failed(const char *format, ...)
{
    enum { SHOWN = 25 };
    va_list ap;
    if (failures++ >= SHOWN) return;
    va_start(ap, format);
    fprintf(stderr, "  FAILED ");
    vfprintf(stderr, format, ap);
    fprintf(stderr, "\n%s", failures == SHOWN ? "  (further failures are only counted)\n" : "");
    va_end(ap);
}

int test_failures(void)
{
    return failures;
}

void test_verdict(void)
{
    int count = failures;
    failures = 0;
    if (count) fail_msg("%d failures", count);
}

bool test_quick(void)
{
    const char *text = getenv("WEFT_TEST_QUICK");
    return text && *text && *text != '0';
}

/* ---- running ------------------------------------------------------------------------------------------------- */

weft_exec on_ref(void)
{
    return WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_REF);
}

weft_exec on_cpu(weft_isa isa, int threads)
{
    return WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU, .isa = isa, .threads = threads);
}

weft_exec on_cuda(int multiprocessors)
{
    return WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CUDA, .threads = multiprocessors);
}

const char *exec_name(weft_exec exec)
{
    static _Thread_local char text[32];
    if (exec.backend != WEFT_BACKEND_CPU) return weft_backend_name(exec.backend);
    snprintf(text, sizeof text, "%s/%s", weft_backend_name(exec.backend), weft_isa_name(exec.isa));
    return text;
}

static bool wanted(const char *backend)
{
    const char *list = getenv("WEFT_TEST_BACKENDS");
    return !list || !*list || strstr(list, backend);
}

bool test_on_cpu(void)
{
    return wanted("cpu");
}

bool test_on_cuda(void)
{
    return wanted("cuda") && weft_backend_available(WEFT_BACKEND_CUDA);
}

void problem_seal(problem *p)
{
    for (int i = 0; i < p->num_args; i++)
        if (p->arg[i].guard.block && !guard_seal(&p->arg[i].guard)) fail_msg("out of memory");
}

void problem_reset(problem *p)
{
    for (int i = 0; i < p->num_args; i++)
        if (p->arg[i].guard.block) guard_reset(&p->arg[i].guard);
}

bool problem_untouched(const problem *p)
{
    bool same = true;
    for (int i = 0; i < p->num_args && same; i++)
        same = !p->arg[i].guard.block || guard_untouched(&p->arg[i].guard);
    return same;
}

/* From host memory to host memory on the device; what went wrong beside the call is a failure of the test. */
static weft_status call_on_device(const char *text, const weft_op_info *op, weft_exec exec, const void *args,
                                  const image_range *around, int num_around)
{
    char wrong[200];
    weft_status status = image_call(op, &exec, args, around, num_around, wrong, sizeof wrong);
    if (wrong[0]) test_failed("%s on %s: %s", text, exec_name(exec), wrong);
    return status;
}

/* The blocks of a problem, at most MAX_ARGS. */
static int ranges_of(const problem *p, image_range *around)
{
    int count = 0;
    for (int i = 0; i < p->num_args; i++)
        if (p->arg[i].guard.block)
            around[count++] = (image_range){p->arg[i].name, p->arg[i].guard.block, p->arg[i].guard.block_bytes};
    return count;
}

static weft_status run_on_device(problem *p, weft_exec exec)
{
    image_range around[MAX_ARGS];
    int count = ranges_of(p, around);
    return call_on_device(problem_text(p), p->op, exec, p->args, around, count);
}

bool problem_image(const problem *p, weft_exec exec, image *im)
{
    image_range around[MAX_ARGS];
    weft_status status = image_open(im, p->op, &exec, p->args, around, ranges_of(p, around));
    if (status == WEFT_OK && !im->wrong[0]) return true;
    test_failed("%s: %s", problem_text(p), status != WEFT_OK ? weft_last_error() : im->wrong);
    return false;
}

const char *fill_periods(char *data, const void *period, size_t bytes, size_t all)
{
    const char *wrong = device_put(data, period, bytes < all ? bytes : all);
    for (size_t done = bytes; done < all && !wrong;) { /* whole periods each time */
        size_t more = all - done < done ? all - done : done;
        wrong = device_copy(data + done, data, more);
        done += more;
    }
    return wrong;
}

spec gpu_variant(const char *op, int variant)
{
    static const spec variants[GPU_VARIANTS] = {
        {.tokens = 37, .streams = 4, .channels = 256, .act = WEFT_F32, .wide = WEFT_F32},
        {.tokens = 70,
         .streams = 4,
         .channels = 1024,
         .act = WEFT_BF16,
         .wide = WEFT_BF16,
         .stream_layout = LAYOUT_CN,
         .param_layout = LAYOUT_CN},
        {.tokens = 37, .streams = 3, .channels = 50, .act = WEFT_F16, .wide = WEFT_F16},
    };
    static const uint64_t step = 5;
    spec s = variants[variant];
    s.op = op;
    s.dropout = (weft_dropout){.p = 0.25, .seed = 8, .site = 3, .step = &step, .token_base = 40};
    return s;
}

static weft_status run_between_guards(problem *p, weft_exec exec)
{
    const char *wrong;
    const run_functions functions = {.call = p->call, .workspace = p->workspace};
    weft_status status = run_guarded(&exec, &functions, p->args, &wrong);
    if (wrong) test_failed("%s: %s", problem_text(p), wrong);
    return status;
}

weft_status problem_run(problem *p, weft_exec exec)
{
    problem_reset(p);
    weft_status status = exec.backend == WEFT_BACKEND_CUDA ? run_on_device(p, exec) : run_between_guards(p, exec);
    for (int i = 0; i < p->num_args; i++) {
        const arg *a = &p->arg[i];
        const char *wrong = a->guard.block ? guard_check(&a->guard, arg_is_output(a) ? a->view : NULL) : NULL;
        if (wrong) test_failed("%s: %s: %s", problem_text(p), a->name, wrong);
    }
    return status;
}

void problem_must_run(problem *p, weft_exec exec)
{
    weft_status status = problem_run(p, exec);
    if (status != WEFT_OK)
        test_failed("%s on %s: %s: %s", problem_text(p), exec_name(exec), weft_status_name(status),
                    weft_last_error());
    else if (weft_last_error()[0] != '\0')
        test_failed("%s: success left the error \"%s\"", problem_text(p), weft_last_error());
}

static weft_status call_plain(const char *text, const weft_op_info *op, weft_exec exec, const void *args)
{
    size_t bytes = 0;
    if (exec.backend == WEFT_BACKEND_CUDA) return call_on_device(text, op, exec, args, NULL, 0);
    weft_status status = weft_op_workspace(op, &exec, args, &bytes);
    exec.workspace = must_alloc(bytes + 1);
    exec.workspace_bytes = bytes;
    guard_fill(exec.workspace, bytes);
    if (status == WEFT_OK) status = weft_op_call(op, &exec, args);
    free(exec.workspace);
    return status;
}

void run_plain(const char *op, weft_exec exec, const void *args)
{
    weft_status status = call_plain(op, weft_op_find(op), exec, args);
    if (status != WEFT_OK) test_failed("%s on %s: %s", op, exec_name(exec), weft_last_error());
}

weft_status problem_call(problem *p, weft_exec exec)
{
    return call_plain(problem_text(p), p->op, exec, p->args);
}

/* ---- bitwise comparison -------------------------------------------------------------------------------------- */

pack problem_pack(const problem *p)
{
    pack k = {0};
    for (int i = 0; i < p->num_args; i++)
        if (p->arg[i].guard.block && arg_is_output(&p->arg[i]))
            k.size += (size_t)p->arg[i].elements * weft_dtype_size(p->arg[i].view->dtype);
    k.bytes = must_alloc(k.size + 64);
    char *at = k.bytes;
    for (int i = 0; i < p->num_args; i++) {
        const arg *a = &p->arg[i];
        if (!a->guard.block || !arg_is_output(a)) continue;
        size_t size = weft_dtype_size(a->view->dtype);
        cursor c = cursor_open(a->view);
        for (int64_t e = 0; e < a->elements; e++, cursor_step(&c), at += size)
            memcpy(at, cursor_data(&c, a->view->data), size);
    }
    return k;
}

void pack_free(pack *k)
{
    free(k->bytes);
    k->bytes = NULL;
}

void pack_expect_same(const problem *p, const pack *got, const pack *want, const char *what)
{
    char where[80];
    size_t at = 0;
    for (int i = 0; i < p->num_args; i++) {
        const arg *a = &p->arg[i];
        if (!a->guard.block || !arg_is_output(a)) continue;
        size_t size = weft_dtype_size(a->view->dtype);
        for (int64_t e = 0; e < a->elements; e++, at += size) {
            if (memcmp(got->bytes + at, want->bytes + at, size) == 0) continue;
            double g = value_load(got->bytes + at, a->view->dtype),
                   w = value_load(want->bytes + at, a->view->dtype);
            if (isnan(g) && isnan(w)) continue;
            test_failed("%s: %s: %s%s: got %.9g, want the same bits as %.9g", problem_text(p), what, a->name,
                        arg_coordinate(a, e, where, sizeof where), g, w);
            return;
        }
    }
}
