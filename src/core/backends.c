/* SPDX-License-Identifier: Apache-2.0
 *
 * The backends of this build. Nothing else in src/core depends on which there are. */
#include "core/backend.h"
#include "core/check.h"

static const weft_backend_table *const backends[] = {
    [WEFT_BACKEND_REF] = &weft_ref_backend,
    [WEFT_BACKEND_CPU] = &weft_cpu_backend,
#if WEFT_HAVE_CUDA
    [WEFT_BACKEND_CUDA] = &weft_cuda_backend,
#endif
};

const weft_backend_table *weft_backend_of(weft_backend backend)
{
    return (size_t)backend < sizeof backends / sizeof *backends ? backends[backend] : NULL;
}

int weft_backend_available(weft_backend backend)
{
    const weft_backend_table *b = weft_backend_of(backend);
    return b && (!b->available || b->available());
}

weft_status weft_check_exec(weft_call *call)
{
    const weft_exec *e = call->exec;
    const char *op = weft_op_name(call->op);
    if (e->backend < WEFT_BACKEND_REF || e->backend > WEFT_BACKEND_CUDA)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.backend: expected ref, cpu or cuda, got the number %d", op,
                         (int)e->backend);
    if (e->threads < 0 || e->threads > 4096)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.threads: expected 0 to 4096, got %d", op, (int)e->threads);
    if (e->precision < WEFT_PRECISION_FULL || e->precision > WEFT_PRECISION_TF32)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.precision: expected full or tf32, got the number %d", op,
                         (int)e->precision);
    if (e->trust_pointers != 0 && e->trust_pointers != 1)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.trust_pointers: expected 0 or 1, got %d", op,
                         (int)e->trust_pointers);
    call->backend = weft_backend_of(e->backend);
    if (!call->backend)
        return weft_fail(WEFT_ERR_UNSUPPORTED, "%s: exec.backend: expected a backend of this build, got %s", op,
                         weft_backend_name(e->backend));
    return call->backend->check_exec(call);
}

weft_status weft_check_host_exec(weft_call *call)
{
    const weft_exec *e = call->exec;
    const char *op = weft_op_name(call->op);
    if (e->device != 0)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.device: expected 0 on the %s backend, got %d", op,
                         weft_backend_name(e->backend), (int)e->device);
    if (e->isa < WEFT_ISA_BEST || e->isa > WEFT_ISA_AMX)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.isa: expected a weft_isa, got the number %d", op,
                         (int)e->isa);
    if (e->isa > weft_cpu_isa())
        return weft_fail(WEFT_ERR_UNSUPPORTED, "%s: exec.isa: expected at most %s on this machine, got %s", op,
                         weft_isa_name(weft_cpu_isa()), weft_isa_name(e->isa));
    call->isa = e->isa == WEFT_ISA_BEST ? weft_cpu_isa() : e->isa;
    return WEFT_OK;
}
