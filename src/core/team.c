/* SPDX-License-Identifier: Apache-2.0
 *
 * Teams of threads and fork. A child has the OpenMP runtime's records of its parent's threads and none of the threads; gcc's
 * runtime waits for ever for such a team. The process that first has a team is kept, and its descendants by fork have none.
 * The system call for every team costs little beside waking one. */
#include "core/kernel.h"

#include <stdatomic.h>
#include <unistd.h>

bool weft_may_team(void)
{
    static _Atomic int first; /* process id; 0: no team yet */
    const int self = (int)getpid();
    int owner = 0;
    return atomic_compare_exchange_strong_explicit(&first, &owner, self, memory_order_relaxed,
                                                   memory_order_relaxed) ||
           owner == self;
}
