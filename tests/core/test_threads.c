/* SPDX-License-Identifier: Apache-2.0
 *
 * Threads that the machine does not have or the system does not permit: a call takes those that there are, and the result is the same.
 * Each case is a child process, because limits and the threads of OpenMP stay. */
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/memory.h"
#include "support/suite.h"

#if defined(__SANITIZE_THREAD__)
#define WITH_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define WITH_TSAN 1
#endif
#endif
#ifndef WITH_TSAN
#define WITH_TSAN 0
#endif

enum { CHILD_SECONDS = 300, ANYWHERE = 64, NOT_HERE = 77 };

/* 4096 pieces of work and more: see cpu_parallel. */
static const spec many = {.op = "mhc_scale_fwd", .tokens = 4096 * 32, .streams = 2, .channels = 1};

static int in_child(int (*body)(void))
{
    fflush(NULL);
    pid_t child = fork();
    if (child < 0) fail_msg("no process");
    if (child == 0) {
        signal(SIGALRM, SIG_DFL);
        alarm(CHILD_SECONDS);
        int status = body();
        fflush(NULL);
        _exit(status);
    }
    int status;
    if (waitpid(child, &status, 0) != child) fail_msg("no child to wait for");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Threads of this process; 0 where they cannot be counted: ThreadSanitizer has some of its own. */
static int threads_now(void)
{
    int count = 0;
    if (WITH_TSAN) return 0;
    DIR *tasks = opendir("/proc/self/task");
    if (!tasks) return 0;
    for (const struct dirent *d = readdir(tasks); d; d = readdir(tasks)) count += d->d_name[0] != '.';
    closedir(tasks);
    return count;
}

/* The bits of one thread with `threads` of them; 1 where they differ. */
static int same_bits(int threads)
{
    problem *p = problem_make(&many);
    problem_must_run(p, on_cpu(WEFT_ISA_BEST, 1));
    pack want = problem_pack(p);
    problem_must_run(p, on_cpu(WEFT_ISA_BEST, threads));
    pack got = problem_pack(p);
    pack_expect_same(p, &got, &want, "with other threads");
    pack_free(&want);
    pack_free(&got);
    problem_free(p);
    return test_failures() != 0;
}

static int with_4096_threads(void)
{
    long processors = sysconf(_SC_NPROCESSORS_CONF);
    if (same_bits(4096)) return 2;
    int most = processors > ANYWHERE ? (int)processors : ANYWHERE, now = threads_now();
    if (now <= most) return 0;
    fprintf(stderr, "%d threads where at most %d make sense\n", now, most);
    return 3;
}

/* As many as were asked for where that is a sensible number, on machines with fewer processors too. */
static int with_5_threads(void)
{
    if (same_bits(5)) return 2;
    return threads_now() == 5 || threads_now() == 0 ? 0 : 3;
}

/* A user with a process too many may create no thread. Root has no such limit and becomes another user. */
static int without_more_processes(void)
{
    struct rlimit none = {1, 1};
    problem *warm = problem_make(&many); /* what reads files does so before */
    problem_free(warm);
    if (setrlimit(RLIMIT_NPROC, &none)) return NOT_HERE;
    if (geteuid() == 0 && (setgid(65534) || setuid(65534))) return NOT_HERE;
    if (same_bits(8)) return 2;
    return threads_now() <= 8 ? 0 : 3;
}

/* Address space for a few more stacks only. What the child needs besides is there before the limit. */
static int without_more_memory(void)
{
    spec s = many;
    struct rlimit stack, space;
    long pages = 0;
    size_t bytes = 0, at = 0;
    s.tokens = 128 * ANYWHERE;
    problem *p = problem_make(&s);
    weft_exec exec = on_cpu(WEFT_ISA_BEST, ANYWHERE);
    if (p->workspace(&exec, p->args, &bytes) != WEFT_OK) return 4;
    exec.workspace = malloc(bytes + 1);
    exec.workspace_bytes = bytes;
    exec.threads = 1;
    if (!exec.workspace || p->call(&exec, p->args) != WEFT_OK) return 5;
    pack want = problem_pack(p);
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld", &pages) != 1) return NOT_HERE;
    fclose(f);
    if (getrlimit(RLIMIT_STACK, &stack) || stack.rlim_cur == RLIM_INFINITY) return NOT_HERE;
    space.rlim_cur = space.rlim_max = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + 6 * stack.rlim_cur;
    if (setrlimit(RLIMIT_AS, &space)) return NOT_HERE;
    exec.threads = ANYWHERE;
    if (p->call(&exec, p->args) != WEFT_OK) return 6;
    for (int i = 0; i < p->num_args; i++) {
        const arg *a = &p->arg[i];
        size_t size = weft_dtype_size(a->view->dtype);
        for (int64_t e = 0; arg_is_output(a) && e < a->elements; e++, at += size)
            if (memcmp(arg_at(a, e), want.bytes + at, size) != 0) return 7;
    }
    return threads_now() < ANYWHERE ? 0 : 3;
}

static void expect(int status, const char *what)
{
    static const char *const reasons[] = {
        [2] = "other bits",        [3] = "too many threads", [4] = "the query failed",
        [5] = "one thread failed", [6] = "the call failed",  [7] = "other bits"};
    if (status == NOT_HERE) {
        fprintf(stderr, "  skipped: %s: not possible here\n", what);
        skip();
    }
    if (status)
        fail_msg("%s: exit status %d (%s)", what, status, status > 1 && status < 8 ? reasons[status] : "ended");
}

static void no_more_than_processors(void **state)
{
    (void)state;
    expect(in_child(with_4096_threads), "4096 threads");
}

static void as_many_as_asked_for(void **state)
{
    (void)state;
    expect(in_child(with_5_threads), "5 threads");
}

static void a_limit_of_processes(void **state)
{
    (void)state;
    expect(in_child(without_more_processes), "no more processes");
}

static void a_limit_of_memory(void **state)
{
    (void)state;
#if defined(WITH_ASAN) || WITH_TSAN
    skip(); /* a sanitizer takes address space as it likes */
#endif
    expect(in_child(without_more_memory), "no more address space");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_more_than_processors),
        cmocka_unit_test(as_many_as_asked_for),
        cmocka_unit_test(a_limit_of_processes),
        cmocka_unit_test(a_limit_of_memory),
    };
    return suite_run("threads", tests);
}
