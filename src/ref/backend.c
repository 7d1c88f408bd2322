/* SPDX-License-Identifier: Apache-2.0 */
#include "core/backend.h"
#include "core/nn.h"

#define WEFT_OP(name) extern const weft_kernel weft_ref_##name[];
#include "core/ops.def"
#undef WEFT_OP
extern const weft_nn_table weft_ref_nn;

static const weft_kernel *const ops[WEFT_OP_COUNT] = {
#define WEFT_OP(name) [WEFT_OP_##name] = weft_ref_##name,
#include "core/ops.def"
#undef WEFT_OP
};
static const weft_nn_table *const nn[] = {&weft_ref_nn, NULL};

static const weft_kernel_set *kernels(weft_isa isa)
{
    static const weft_kernel_set set = {ops, nn};
    (void)isa;
    return &set;
}

const weft_backend_table weft_ref_backend = {.check_exec = weft_check_host_exec, .kernels = kernels};
