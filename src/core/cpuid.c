/* SPDX-License-Identifier: Apache-2.0
 *
 * Which instruction sets this machine runs. The answer cannot change while the process lives, so the first one is kept
 * (asking costs a trap on virtual machines); every thread would write the same value. */
#include "core/kernel.h"

#include <stdatomic.h>

#if WEFT_HAVE_X86
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* AMX state is large, so Linux wants to be asked before a process may use it. */
static bool amx_permitted(void)
{
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

static weft_isa detect(void)
{
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__get_cpuid(1, &a, &b, &c, &d) ||
        !(c & bit_F16C))
        return WEFT_ISA_BASE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512bf16"))
        return WEFT_ISA_AVX2;
    enum { EDX_AMX_BF16 = 1u << 22, EDX_AMX_TILE = 1u << 24 };
    if (!WEFT_HAVE_AMX) return WEFT_ISA_AVX512;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & EDX_AMX_BF16) || !(d & EDX_AMX_TILE) || !amx_permitted())
        return WEFT_ISA_AVX512;
    return WEFT_ISA_AMX;
}
#else
static weft_isa detect(void)
{
    return WEFT_ISA_BASE;
}
#endif

weft_isa weft_cpu_isa(void)
{
    static _Atomic int known; /* 0: not asked yet */
    int isa = atomic_load_explicit(&known, memory_order_relaxed);
    if (isa == 0) {
        isa = detect();
        atomic_store_explicit(&known, isa, memory_order_relaxed);
    }
    return (weft_isa)isa;
}
