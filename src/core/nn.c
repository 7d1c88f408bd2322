/* SPDX-License-Identifier: Apache-2.0
 *
 * Which table of src/core/nn.h serves a call. */
#include "core/nn.h"
#include "core/check.h"

weft_status weft_nn_open(weft_nn *nn, const weft_exec *exec, weft_dtype dtype, const weft_blas *blas)
{
    static const weft_nn_table *const cpu[] = {
#if WEFT_HAVE_X86
        [WEFT_ISA_BASE] = &weft_cpu_base_nn,
        [WEFT_ISA_AVX2] = &weft_cpu_avx2_nn,
        [WEFT_ISA_AVX512] = &weft_cpu_avx512_nn,
        [WEFT_ISA_AMX] = &weft_cpu_avx512_nn,
#else
        [WEFT_ISA_BASE] = &weft_cpu_base_nn,
#endif
    };
    weft_call call = {.op = WEFT_OP_COUNT, .exec = exec};
    *nn = (weft_nn){.exec = exec, .blas = blas};
    WEFT_TRY(weft_check_exec(&call));
    if (exec->backend == WEFT_BACKEND_REF) nn->table = &weft_ref_nn;
    if (exec->backend == WEFT_BACKEND_CPU) nn->table = cpu[call.isa];
#if WEFT_HAVE_CUDA
    if (exec->backend == WEFT_BACKEND_CUDA) nn->table = dtype == WEFT_BF16 ? &weft_cuda_bf16_nn : &weft_cuda_f32_nn;
#endif
    if (nn->table->dtype != dtype)
        return weft_fail(WEFT_ERR_UNSUPPORTED, "model: dtype: expected %s on the %s backend, got %s",
                         exec->backend == WEFT_BACKEND_CUDA ? "f32 or bf16" : weft_dtype_name(nn->table->dtype),
                         weft_backend_name(exec->backend), weft_dtype_name(dtype));
    return WEFT_OK;
}
