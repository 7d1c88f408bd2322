/* SPDX-License-Identifier: Apache-2.0 */
#include "core/kernel.h"

const weft_kernel weft_cuda_mhc_boundary_fwd[] = {{}};
const weft_kernel weft_cuda_mhc_boundary_bwd[] = {{}};
