/* SPDX-License-Identifier: Apache-2.0
 *
 * How many threads a team gets. The OpenMP runtime ends the process where it cannot create a thread, and waits for ever in a
 * child of fork for threads that stayed with the parent. Here both are found out before it is asked. */
#include "core/kernel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_THREADS = 1024, STACK_MARGIN = 1 << 20 };

/* A child of fork has the runtime's records of its parent's threads and none of the threads. The process that first has a team
 * is kept, and its descendants by fork have none. The system call for every team costs little beside waking one. */
static bool may_team(void)
{
    static _Atomic int first; /* process id; 0: no team yet */
    const int self = (int)getpid();
    int owner = 0;
    return atomic_compare_exchange_strong_explicit(&first, &owner, self, memory_order_relaxed,
                                                   memory_order_relaxed) ||
           owner == self;
}

/* ---- may so many threads be created? --------------------------------------------------------------------------------- */

typedef struct trial {
    pthread_mutex_t gate; /* shut while threads are counted: all of them exist at once */
    _Atomic int arrived;
    long id[MOST_THREADS];
} trial;

#if defined(__linux__)
static long thread_id(void)
{
    return syscall(SYS_gettid);
}

/* A joined thread counts against the limit until the system has reclaimed it. The wait is bounded, because its id may have been
 * reused by another thread. */
static void wait_until_gone(long id)
{
    for (int i = 0; i < 1000 && syscall(SYS_tgkill, (long)getpid(), id, 0L) == 0; i++) sched_yield();
}
#else
static long thread_id(void)
{
    return 0;
}

static void wait_until_gone(long id)
{
    (void)id;
}
#endif

static void *pass_the_gate(void *context)
{
    trial *t = context;
    t->id[atomic_fetch_add_explicit(&t->arrived, 1, memory_order_relaxed)] = thread_id();
    pthread_mutex_lock(&t->gate);
    pthread_mutex_unlock(&t->gate);
    return NULL;
}

/* Creates `count` threads beside those there are, or as many as the system permits, and lets them go. They take no signals. */
static int create_and_release(int count)
{
    trial t = {.gate = PTHREAD_MUTEX_INITIALIZER};
    pthread_t thread[MOST_THREADS];
    pthread_attr_t attributes;
    size_t stack;
    sigset_t all, before;
    int created = 0;
    if (pthread_attr_init(&attributes)) return 0;
    /* Stacks slightly larger than a runtime asks for, so that it can reuse those which the C library caches. */
    if (!pthread_attr_getstacksize(&attributes, &stack))
        pthread_attr_setstacksize(&attributes, stack + STACK_MARGIN);
    sigfillset(&all);
    pthread_mutex_lock(&t.gate);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (created < count && pthread_create(&thread[created], &attributes, pass_the_gate, &t) == 0) created++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_unlock(&t.gate);
    for (int i = 0; i < created; i++) pthread_join(thread[i], NULL);
    for (int i = 0; i < created; i++) wait_until_gone(t.id[i]);
    pthread_mutex_destroy(&t.gate);
    pthread_attr_destroy(&attributes);
    return created;
}

int weft_team(int wanted)
{
    /* Of this thread, which has a team of its own: threads of the largest so far, of the last one, which the runtime keeps, and
     * of the largest that the system permits (0: has not refused one yet). */
    static _Thread_local int proven = 1, last = 1, most;
    if (wanted > MOST_THREADS) wanted = MOST_THREADS;
    if (most && wanted > most) wanted = most;
    if (wanted <= 1 || !may_team()) return 1;
    if (wanted > proven) {
        const int more = wanted - last, created = create_and_release(more);
        /* Half of what the limit leaves: other threads of the process may need the rest. */
        if (created < more) most = wanted = last + created / 2;
        if (wanted > proven) proven = wanted;
    }
    last = wanted;
    return wanted;
}
