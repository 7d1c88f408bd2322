/* SPDX-License-Identifier: Apache-2.0
 *
 * Has memory been touched yet? Only ever a matter of speed. A page that the system is about to hand out arrives zeroed in
 * the cache, and stores past the caches would first have to push it out again. And to hand it out costs more than to fill
 * it, unless it comes in a huge page, or at least with many others. */
#include "core/kernel.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

static bool page_present(uintptr_t address, uintptr_t page)
{
    unsigned char present = 0;
    return mincore((void *)(address / page * page), page, &present) != 0 || (present & 1);
}

/* Samples three pages: the system maps memory in the order of first use, so these stand for the rest. */
bool weft_pages_present(const void *data, size_t bytes)
{
    long size = sysconf(_SC_PAGESIZE);
    uintptr_t first = (uintptr_t)data, page = size > 0 ? (uintptr_t)size : 4096;
    return bytes == 0 || (page_present(first, page) && page_present(first + bytes / 2, page) &&
                          page_present(first + bytes - 1, page));
}

/* Advice for the pages that lie wholly inside; an older system ignores advice that it does not know. */
static void advise(void *data, size_t bytes, int advice)
{
    long size = sysconf(_SC_PAGESIZE);
    uintptr_t page = size > 0 ? (uintptr_t)size : 4096, first = ((uintptr_t)data + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)data + bytes) / page * page;
    if (first < end) (void)madvise((void *)first, end - first, advice);
}

void weft_pages_huge(void *data, size_t bytes)
{
    advise(data, bytes, MADV_HUGEPAGE);
}

void weft_pages_fill(void *data, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    advise(data, bytes, MADV_POPULATE_WRITE);
#else
    (void)data, (void)bytes;
#endif
}
#else
void weft_pages_huge(void *data, size_t bytes)
{
    (void)data, (void)bytes;
}

void weft_pages_fill(void *data, size_t bytes)
{
    (void)data, (void)bytes;
}

bool weft_pages_present(const void *data, size_t bytes)
{
    (void)data, (void)bytes;
    return true;
}
#endif
