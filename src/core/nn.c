/* SPDX-License-Identifier: Apache-2.0
 *
 * Which table of src/core/nn.h serves a call. */
#include "core/nn.h"
#include "core/backend.h"
#include "core/check.h"

weft_status weft_nn_open(weft_nn *nn, const weft_exec *exec, weft_dtype dtype, const weft_blas *blas)
{
    weft_call call = {.op = WEFT_OP_COUNT, .exec = exec};
    *nn = (weft_nn){.exec = exec, .blas = blas};
    WEFT_TRY(weft_check_exec(&call));
    const weft_nn_table *const *table = call.backend->kernels(call.isa)->nn;
    for (int i = 0; table[i] && !nn->table; i++)
        if (table[i]->dtype == dtype) nn->table = table[i];
    if (nn->table) return WEFT_OK;
    return weft_fail(WEFT_ERR_UNSUPPORTED, "model: dtype: expected %s%s%s on the %s backend, got %s",
                     weft_dtype_name(table[0]->dtype), table[1] ? " or " : "",
                     table[1] ? weft_dtype_name(table[1]->dtype) : "", weft_backend_name(exec->backend),
                     weft_dtype_name(dtype));
}
