/* SPDX-License-Identifier: Apache-2.0
 *
 * OpenMP where the build has it. */
#ifndef WEFT_CHECK_PARALLEL_H
#define WEFT_CHECK_PARALLEL_H

#ifdef _OPENMP
#include <omp.h>
#define PARALLEL_FOR _Pragma("omp parallel for")
#define PARALLEL_FOR_THREADS(count) PARALLEL_PRAGMA(omp parallel for num_threads(count))
#define PARALLEL_PRAGMA(text) _Pragma(#text)
static inline int parallel_threads(void)
{
    return omp_get_max_threads();
}
#else
#define PARALLEL_FOR
#define PARALLEL_FOR_THREADS(count)
static inline int parallel_threads(void)
{
    return 1;
}
#endif

#endif
