/* SPDX-License-Identifier: Apache-2.0
 *
 * No operator allocates, and no pass of the model: this executable puts itself between the library and malloc and counts. */
#include "support/gpt.h"
#include "support/suite.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OWN_MALLOC 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define OWN_MALLOC 1
#endif
#endif

static _Atomic int counting, calls;

#if defined(__GLIBC__) && !defined(OWN_MALLOC)
#define CAN_COUNT 1

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *p, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void *malloc(size_t size);
void *calloc(size_t count, size_t size);
void *realloc(void *p, size_t size);
void *aligned_alloc(size_t alignment, size_t size);
void *memalign(size_t alignment, size_t size);
int posix_memalign(void **p, size_t alignment, size_t size);

void *malloc(size_t size)
{
    calls += counting;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    calls += counting;
    return __libc_calloc(count, size);
}

void *realloc(void *p, size_t size)
{
    calls += counting;
    return __libc_realloc(p, size);
}

void *memalign(size_t alignment, size_t size)
{
    calls += counting;
    return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return memalign(alignment, size);
}

int posix_memalign(void **p, size_t alignment, size_t size)
{
    *p = memalign(alignment, size);
    return *p ? 0 : 12;
}
#endif

static void operators_allocate_nothing(void **state)
{
    (void)state;
#ifndef CAN_COUNT
    fprintf(stderr, "  allocations cannot be counted in this build: skipped\n");
    skip();
#endif
    void *volatile probe; /* or the compiler drops the pair */
    counting = 1;
    probe = malloc(1);
    counting = 0;
    free(probe);
    if (calls != 1) fail_msg("the counter does not count");
    static const weft_dtype acts[] = {WEFT_F32, WEFT_BF16, WEFT_F16};
    for (int32_t i = 0; i < weft_op_count(); i++)
        for (int v = 0; v < 6; v++) {
            /* large enough that a kernel which blocks or packs would want memory; odd enough for every fallback */
            spec s = {.op = weft_op_at(i)->name,
                      .tokens = v < 3 ? 200 : 11,
                      .streams = v < 3 ? 4 : 13,
                      .channels = v < 3 ? 96 : 35,
                      .act = acts[v % 3],
                      .mix = v >= 3};
            problem *p = problem_make(&s);
            for (int e = 0; e < 2; e++) {
                weft_exec exec = e ? on_cpu(WEFT_ISA_BEST, 1) : on_ref();
                size_t bytes = 0;
                problem_must_run(p, exec); /* the first use of anything may allocate once */
                problem_reset(p);
                calls = 0;
                counting = 1;
                weft_status asked = p->workspace(&exec, p->args, &bytes);
                counting = 0;
                exec.workspace = malloc(bytes + 1);
                exec.workspace_bytes = bytes;
                counting = 1;
                weft_status status = p->call(&exec, p->args);
                counting = 0;
                if (asked != WEFT_OK || status != WEFT_OK) test_failed("%s", weft_last_error());
                if (calls)
                    test_failed("%s on %s: %d allocations", problem_text(p), weft_backend_name(exec.backend),
                                calls);
                free(exec.workspace);
            }
            problem_free(p);
        }
    test_verdict();
}

static void a_step_allocates_nothing(void **state)
{
    (void)state;
#ifndef CAN_COUNT
    skip();
#endif
    for (int k = 0; k < WEFT_RESIDUAL_COUNT; k++)
        for (int e = 0; e < 2; e++) {
            weft_model_config c = gpt_config((weft_residual)k, e ? WEFT_F32 : WEFT_F64);
            gpt g;
            c.bias = 1, c.dropout = 0.1, c.recompute = k != WEFT_RESIDUAL_PLAIN;
            gpt_open(&g, &c, 2, 8, 0.1);
            g.exec.threads = 1;
            gpt_bind(&g);
            gpt_step(&g);
            calls = 0;
            counting = 1;
            gpt_step(&g);
            counting = 0;
            if (calls)
                fail_msg("%s on %s: %d allocations", weft_residual_name(c.residual),
                         weft_backend_name(g.exec.backend), calls);
            gpt_close(&g);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(operators_allocate_nothing),
                                       cmocka_unit_test(a_step_allocates_nothing)};
    return suite_run("alloc", tests);
}
