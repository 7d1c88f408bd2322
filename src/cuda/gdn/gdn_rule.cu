/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated delta rule [G5] [G6]: no kernels yet, so that calls are answered with WEFT_ERR_UNSUPPORTED. */
#include "cuda/common/launch.cuh"

const weft_kernel weft_cuda_gdn_rule_fwd[] = {{}};
const weft_kernel weft_cuda_gdn_rule_bwd[] = {{}};
