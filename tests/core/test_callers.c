/* SPDX-License-Identifier: Apache-2.0
 *
 * 64 threads of the caller's that call different operators at once, each with buffers and a workspace of its own: results are those
 * of one thread, bit by bit. Under ThreadSanitizer this shows what calls share. */
#include <pthread.h>

#include "support/suite.h"

enum { CALLERS = 64, CALLS = 3, MOST_OPS = 64 };

static pack expected[MOST_OPS];
static pthread_barrier_t together;

/* Every other operator has more than 2^15 elements, so that the CPU backend has teams in some calls and none in others. */
static spec problem_of(int32_t op)
{
    const char *name = weft_op_at(op)->name;
    spec s = {.op = name, .tokens = op % 2 ? 9 : 600, .streams = 4, .channels = 16, .rows = 24};
    if (grid_uses(name, WEFT_DIM_STEPS)) s.tokens = op % 2 ? 3 : 40;
    s.dropout = (weft_dropout){.p = 0.2, .seed = 11, .site = 4};
    return s;
}

static void *call_some(void *context)
{
    const int number = *(const int *)context;
    problem *problems[CALLS];
    for (int k = 0; k < CALLS; k++) {
        spec s = problem_of((number + k * 7) % weft_op_count());
        problems[k] = problem_make(&s);
    }
    pthread_barrier_wait(&together);
    for (int k = 0; k < CALLS; k++) {
        problem *p = problems[k];
        problem_must_run(p, on_cpu(WEFT_ISA_BEST, 1 + number % 2));
        pack got = problem_pack(p);
        pack_expect_same(p, &got, &expected[(number + k * 7) % weft_op_count()], "beside 63 other callers");
        weft_exec bad = WEFT_STRUCT(weft_exec, .backend = (weft_backend)77);
        if (p->call(&bad, p->args) != WEFT_ERR_ARGUMENT || !strstr(weft_last_error(), p->op->name))
            test_failed("%s: last error of this thread: %s", p->op->name, weft_last_error());
        pack_free(&got);
        problem_free(p);
    }
    return NULL;
}

static void different_operators_at_once(void **state)
{
    (void)state;
    pthread_t threads[CALLERS];
    int numbers[CALLERS];
    const int32_t ops = weft_op_count();
    assert_true(ops <= MOST_OPS && ops <= CALLERS); /* every operator is somebody's first */
    for (int32_t i = 0; i < ops; i++) {
        spec s = problem_of(i);
        problem *p = problem_make(&s);
        problem_must_run(p, on_cpu(WEFT_ISA_BEST, 1));
        expected[i] = problem_pack(p);
        problem_free(p);
    }
    assert_int_equal(pthread_barrier_init(&together, NULL, CALLERS), 0);
    for (int i = 0; i < CALLERS; i++) {
        numbers[i] = i;
        if (pthread_create(&threads[i], NULL, call_some, &numbers[i]) != 0) fail_msg("no thread");
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&together);
    for (int32_t i = 0; i < ops; i++) pack_free(&expected[i]);
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(different_operators_at_once)};
    return suite_run("callers", tests);
}
