/* SPDX-License-Identifier: Apache-2.0 */
#include "core/kernel.h"

const weft_kernel weft_cuda_mhc_expand_fwd[] = {{}};
const weft_kernel weft_cuda_mhc_expand_bwd[] = {{}};
