/* SPDX-License-Identifier: Apache-2.0
 *
 * Has memory been touched yet? Only ever a hint for speed: a page that the kernel is about to hand out arrives zeroed in
 * the cache, and stores past the caches would first have to push it out again. */
#include "core/kernel.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

static bool page_present(uintptr_t address, uintptr_t page)
{
    unsigned char present = 0;
    return mincore((void *)(address / page * page), page, &present) != 0 || (present & 1);
}

/* Looks at three pages: the system hands out memory in the order of first use, so these speak for the rest. */
bool weft_pages_present(const void *data, size_t bytes)
{
    long size = sysconf(_SC_PAGESIZE);
    uintptr_t first = (uintptr_t)data, page = size > 0 ? (uintptr_t)size : 4096;
    return bytes == 0 || (page_present(first, page) && page_present(first + bytes / 2, page) &&
                          page_present(first + bytes - 1, page));
}
#else
bool weft_pages_present(const void *data, size_t bytes)
{
    (void)data, (void)bytes;
    return true;
}
#endif
