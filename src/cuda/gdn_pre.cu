/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule [G1] [G2] [G3] [G4]: no kernels yet, so that calls are answered with
 * WEFT_ERR_UNSUPPORTED. */
#include "cuda/common/launch.cuh"

const weft_kernel weft_cuda_gdn_pre_fwd[] = {{}};
const weft_kernel weft_cuda_gdn_pre_bwd[] = {{}};
const weft_kernel weft_cuda_gdn_pre_step[] = {{}};
