/* SPDX-License-Identifier: Apache-2.0
 *
 * Running one call with the checks that go with every run, and comparing two runs bit by bit. */
#include "support/problem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#include "check/device.h"
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

/* Guards are poisoned under AddressSanitizer, so looking at a whole block needs them open. */
static void open_guards(const problem *p, bool open)
{
#ifdef WITH_ASAN
    for (int i = 0; i < p->num_args; i++) {
        const arg *a = &p->arg[i];
        if (!a->block) continue;
        ASAN_UNPOISON_MEMORY_REGION(a->block, a->block_bytes);
        if (open) continue;
        ASAN_POISON_MEMORY_REGION(a->block, a->front);
        ASAN_POISON_MEMORY_REGION(a->block + a->block_bytes - GUARD, GUARD);
    }
#else
    (void)p, (void)open;
#endif
}

void problem_seal(problem *p)
{
    open_guards(p, true);
    for (int i = 0; i < p->num_args; i++)
        if (p->arg[i].block) memcpy(p->arg[i].sealed, p->arg[i].block, p->arg[i].block_bytes);
    open_guards(p, false);
}

void problem_reset(problem *p)
{
    open_guards(p, true);
    for (int i = 0; i < p->num_args; i++)
        if (p->arg[i].block) memcpy(p->arg[i].block, p->arg[i].sealed, p->arg[i].block_bytes);
    open_guards(p, false);
}

bool problem_untouched(const problem *p)
{
    bool same = true;
    open_guards(p, true);
    for (int i = 0; i < p->num_args && same; i++) {
        const arg *a = &p->arg[i];
        same = !a->block || memcmp(a->block, a->sealed, a->block_bytes) == 0;
    }
    open_guards(p, false);
    return same;
}

/* Everything but the elements of an output must be as it was. */
static void check_surroundings(const problem *p, const arg *a)
{
    if (!arg_is_output(a)) {
        if (memcmp(a->block, a->sealed, a->block_bytes) != 0)
            test_failed("%s: input %s was written to", problem_text(p), a->name);
        return;
    }
    char *copy = must_alloc(a->block_bytes);
    size_t size = weft_dtype_size(a->view->dtype);
    memcpy(copy, a->block, a->block_bytes);
    cursor c = cursor_open(a->view);
    ptrdiff_t start = a->elements ? (char *)a->view->data - a->block : 0;
    if (c.dense) memcpy(copy + start, a->sealed + start, (size_t)a->elements * size);
    for (int64_t i = 0; !c.dense && i < a->elements; i++, cursor_step(&c))
        memcpy(cursor_data(&c, copy + start), cursor_data(&c, a->sealed + start), size);
    if (memcmp(copy, a->sealed, a->block_bytes) != 0) {
        size_t i = 0;
        while (copy[i] == a->sealed[i]) i++;
        test_failed("%s: %s: byte %lld relative to its data was written and is no element of it", problem_text(p),
                    a->name, (long long)((ptrdiff_t)i - start));
    }
    free(copy);
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
        if (p->arg[i].block)
            around[count++] = (image_range){p->arg[i].name, p->arg[i].block, p->arg[i].block_bytes};
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

static weft_status run_on_host(problem *p, weft_exec exec)
{
    size_t bytes = 0;
    char *work = NULL;
    weft_status status = p->workspace(&exec, p->args, &bytes);
    if (status != WEFT_OK) return status;
    work = must_alloc(bytes + 2 * GUARD);
    fill_pattern(work, bytes + 2 * GUARD);
    exec.workspace = bytes ? work + GUARD : NULL;
    exec.workspace_bytes = bytes;
    ASAN_POISON_MEMORY_REGION(work, GUARD);
    ASAN_POISON_MEMORY_REGION(work + GUARD + bytes, GUARD);
    status = p->call(&exec, p->args);
    ASAN_UNPOISON_MEMORY_REGION(work, bytes + 2 * GUARD);
    for (size_t i = 0; i < GUARD; i++)
        if (work[i] != (char)guard_pattern[i & 1] ||
            work[GUARD + bytes + i] != (char)guard_pattern[(bytes + i) & 1]) {
            test_failed("%s: something was written outside of the workspace", problem_text(p));
            break;
        }
    free(work);
    return status;
}

weft_status problem_run(problem *p, weft_exec exec)
{
    problem_reset(p);
    weft_status status = exec.backend == WEFT_BACKEND_CUDA ? run_on_device(p, exec) : run_on_host(p, exec);
    open_guards(p, true);
    for (int i = 0; i < p->num_args; i++)
        if (p->arg[i].block) check_surroundings(p, &p->arg[i]);
    open_guards(p, false);
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
    fill_pattern(exec.workspace, bytes);
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
        if (p->arg[i].block && arg_is_output(&p->arg[i]))
            k.size += (size_t)p->arg[i].elements * weft_dtype_size(p->arg[i].view->dtype);
    k.bytes = must_alloc(k.size + 64);
    char *at = k.bytes;
    for (int i = 0; i < p->num_args; i++) {
        const arg *a = &p->arg[i];
        if (!a->block || !arg_is_output(a)) continue;
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
        if (!a->block || !arg_is_output(a)) continue;
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
