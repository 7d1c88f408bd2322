/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of one instruction set. */
#include "core/backend.h"
#include "core/nn.h"
#include "cpu/common/vec.h"

#define WEFT_OP(name) extern const weft_kernel CPU(name)[];
#include "core/ops.def"
#undef WEFT_OP
extern const weft_nn_table CPU(nn);

static const weft_kernel *const ops[WEFT_OP_COUNT] = {
#define WEFT_OP(name) [WEFT_OP_##name] = CPU(name),
#include "core/ops.def"
#undef WEFT_OP
};
static const weft_nn_table *const nn[] = {&CPU(nn), NULL};

const weft_kernel_set CPU(kernels) = {ops, nn};
