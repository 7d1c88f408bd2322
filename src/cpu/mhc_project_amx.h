/* SPDX-License-Identifier: Apache-2.0
 *
 * The projection on AMX tiles (src/cpu/mhc_project_amx.c); on the other instruction sets these answer "no". */
#ifndef WEFT_CPU_MHC_PROJECT_AMX_H
#define WEFT_CPU_MHC_PROJECT_AMX_H

#include "cpu/common/tiles.h"

INLINE bool amx_serves(const weft_call *call, const weft_tensor *x)
{
    (void)call, (void)x;
    return false;
}

INLINE size_t amx_bytes(const weft_call *call)
{
    (void)call;
    return 0;
}

INLINE void amx_pack(const weft_call *call, const cpu_psi *psi, const weft_tensor *phi, const weft_tensor *norm_weight)
{
    (void)call, (void)psi, (void)phi, (void)norm_weight;
}

INLINE void amx_project(const cpu_psi *psi, const weft_tensor *x, const weft_tensor *h, const weft_tensor *ms, int64_t t0,
                        int64_t t1)
{
    (void)psi, (void)x, (void)h, (void)ms, (void)t0, (void)t1;
}

#endif
