/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend; compiled once, as everything else here is once for each instruction set. */
#include "core/backend.h"
#include "core/check.h"

extern const weft_kernel_set weft_cpu_base_kernels, weft_cpu_avx2_kernels, weft_cpu_avx512_kernels;

static const weft_kernel_set *kernels(weft_isa isa)
{
#if WEFT_HAVE_X86
    if (isa >= WEFT_ISA_AVX512) return &weft_cpu_avx512_kernels; /* AMX is a branch inside the projection */
    if (isa == WEFT_ISA_AVX2) return &weft_cpu_avx2_kernels;
#endif
    (void)isa;
    return &weft_cpu_base_kernels;
}

static weft_status enter(const weft_call *call, int *previous)
{
    (void)previous;
    weft_outputs_ask(&call->operands->desc->info, call->operands->args);
    return WEFT_OK;
}

const weft_backend_table weft_cpu_backend = {
    .check_exec = weft_check_host_exec, .kernels = kernels, .enter = enter};
