/* SPDX-License-Identifier: Apache-2.0
 *
 * The projection of bf16 streams on AMX tiles [M1]: phi as the sum of two bf16 numbers (16 to 17 bits of mantissa), products
 * exact, sums in fp32. Only the AVX-512 build of mhc_project.c links it; the others answer "no". */
#ifndef WEFT_CPU_MHC_PROJECT_AMX_H
#define WEFT_CPU_MHC_PROJECT_AMX_H

#include "cpu/common/tiles.h"

#if WEFT_CPU_LEVEL == 2 && WEFT_HAVE_AMX
bool CPU(amx_serves)(const weft_call *call, const weft_tensor *x);
size_t CPU(amx_bytes)(const weft_call *call);
void CPU(amx_pack)(const weft_call *call, const cpu_psi *psi, const weft_tensor *phi,
                   const weft_tensor *norm_weight);
void CPU(amx_project)(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *h, const weft_tensor *ms,
                      int64_t t0, int64_t t1);
#else
INLINE bool CPU(amx_serves)(const weft_call *call, const weft_tensor *x)
{
    return (void)call, (void)x, false;
}
INLINE size_t CPU(amx_bytes)(const weft_call *call)
{
    return (void)call, 0;
}
INLINE void CPU(amx_pack)(const weft_call *call, const cpu_psi *psi, const weft_tensor *phi,
                          const weft_tensor *norm_weight)
{
    (void)call, (void)psi, (void)phi, (void)norm_weight;
}
INLINE void CPU(amx_project)(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *h, const weft_tensor *ms,
                             int64_t t0, int64_t t1)
{
    (void)psi, (void)x, (void)h, (void)ms, (void)t0, (void)t1;
}
#endif

#endif
