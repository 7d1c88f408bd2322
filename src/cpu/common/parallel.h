/* SPDX-License-Identifier: Apache-2.0
 *
 * The only place that handles threads. Work is split into items whose number and meaning depend on the problem alone;
 * threads only decide which of them does an item. */
#ifndef WEFT_CPU_PARALLEL_H
#define WEFT_CPU_PARALLEL_H

#include "cpu/common/vec.h"

#ifdef _OPENMP
#include <omp.h>
#endif

typedef void cpu_body(void *context, int64_t item, int thread);

/* Threads a call may use: also the number of per-thread scratch areas in a workspace. No more than there are processors, except for
 * numbers that any machine can serve: that results do not depend on threads shows on small machines too. */
INLINE int cpu_threads(const weft_call *call)
{
#ifdef _OPENMP
    enum { ANYWHERE = 64 };
    const int wanted = call->exec->threads;
    if (wanted <= ANYWHERE) return wanted > 0 ? wanted : omp_get_max_threads();
    const int processors = omp_get_num_procs(), most = processors > ANYWHERE ? processors : ANYWHERE;
    return wanted < most ? wanted : most;
#else
    (void)call;
    return 1;
#endif
}

/* The call's workspace; for a query, an arena that only counts. */
INLINE weft_arena cpu_arena(const weft_call *call)
{
    return weft_arena_open(call->query ? NULL : call->exec->workspace);
}

/* Scratch of so many bytes for each thread. */
INLINE size_t cpu_rooms(const weft_call *call, int64_t bytes)
{
    return (size_t)weft_times(cpu_threads(call), bytes);
}

/* `work` is the number of elements touched by all items together: little work is not worth waking threads for. */
static inline void cpu_parallel(const weft_call *call, int64_t items, int64_t work, cpu_body *body, void *context)
{
#ifdef _OPENMP
    int threads = cpu_threads(call);
    if (items < threads) threads = (int)items;
    threads = work >= 1 << 15 ? weft_team(threads) : 1;
    if (threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t i = 0; i < items; i++) body(context, i, omp_get_thread_num());
        return;
    }
#endif
    (void)call, (void)work;
    for (int64_t i = 0; i < items; i++) body(context, i, 0);
}

#endif
