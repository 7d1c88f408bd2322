/* SPDX-License-Identifier: Apache-2.0
 *
 * Children of fork: OpenMP's threads stay with the parent, and a team that waits for them waits for ever. A child gets its results all
 * the same, with the parent's bits. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/suite.h"

/* Ends a child that hangs. Far beyond what a busy machine takes for calls of milliseconds. */
enum { CHILD_SECONDS = 120 };
enum { THREADS = 3 };

/* Work for several threads: see cpu_parallel. */
static spec work_of(const char *op)
{
    spec s = {.op = op, .tokens = 1301, .streams = 4, .channels = 40, .act = WEFT_BF16, .rows = 24};
    if (grid_uses(op, WEFT_DIM_STEPS))
        s.tokens = 67;
    else if (!grid_uses(op, WEFT_DIM_CHANNELS))
        s.tokens = 5003;
    return s;
}

/* Exit status of a child that runs `body`; a child that a signal ended has 128 + its number. */
static int in_child(int (*body)(void *context), void *context)
{
    fflush(NULL);
    pid_t child = fork();
    if (child < 0) fail_msg("no process");
    if (child == 0) {
        signal(SIGALRM, SIG_DFL);
        alarm(CHILD_SECONDS);
        int status = body(context);
        fflush(NULL);
        _exit(status);
    }
    int status;
    if (waitpid(child, &status, 0) != child) fail_msg("no child to wait for");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

typedef struct expectation {
    problem *p;
    pack want;
} expectation;

/* All operators of the CPU backend with the parent's results, and a grandchild's. */
static int run_all(void *context)
{
    expectation *all = context;
    const int before = test_failures();
    for (int32_t i = 0; i < weft_op_count(); i++) {
        problem_must_run(all[i].p, on_cpu(WEFT_ISA_BEST, THREADS));
        pack got = problem_pack(all[i].p);
        pack_expect_same(all[i].p, &got, &all[i].want, "in a child of fork");
        pack_free(&got);
    }
    return test_failures() != before;
}

static int run_all_and_fork(void *context)
{
    int status = run_all(context);
    return status ? status : in_child(run_all, context);
}

static void expect_child(int status, const char *what)
{
    if (status == 128 + SIGALRM)
        test_failed("%s: not done after %d s", what, CHILD_SECONDS);
    else if (status)
        test_failed("%s: exit status %d", what, status);
}

static void *fork_here(void *context)
{
    expect_child(in_child(run_all, context), "a child of a thread without a team");
    return NULL;
}

static void children_compute_what_the_parent_does(void **state)
{
    (void)state;
    expectation *all = calloc((size_t)weft_op_count(), sizeof *all);
    for (int32_t i = 0; i < weft_op_count(); i++) {
        spec s = work_of(weft_op_at(i)->name);
        all[i].p = problem_make(&s);
    }
    for (int32_t i = 0; i < weft_op_count(); i++) {
        problem_must_run(all[i].p, on_cpu(WEFT_ISA_BEST, THREADS));
        all[i].want = problem_pack(all[i].p);
    }
    expect_child(in_child(run_all_and_fork, all), "a child and its child");
    pthread_t thread;
    if (pthread_create(&thread, NULL, fork_here, all) != 0) fail_msg("no thread");
    pthread_join(thread, NULL);
    expect_child(run_all(all), "the parent after its children");
    for (int32_t i = 0; i < weft_op_count(); i++) {
        pack_free(&all[i].want);
        problem_free(all[i].p);
    }
    free(all);
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(children_compute_what_the_parent_does)};
    return suite_run("fork", tests);
}
