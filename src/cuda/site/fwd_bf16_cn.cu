/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/site/fwd_kernel.cuh"

site_instance weft_cuda_site_bf16_cn(const site_choice &c)
{
    return instance_of<bf16, LAYOUT_CN>(c);
}
