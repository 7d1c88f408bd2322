/* SPDX-License-Identifier: Apache-2.0
 *
 * More than every GPU grants a kernel by default: above 48 KiB of shared memory, above 8 blocks a cluster. */
#ifndef WEFT_CUDA_PERMITS_H
#define WEFT_CUDA_PERMITS_H

#include "cuda/common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { WEFT_GRANTED_SHARED = 48 * 1024, WEFT_GRANTED_CLUSTER = 8 };

/* Requests the permit on the call's device, which is current, unless it has been granted before. The runtime keeps a permit
 * with the kernel: it outlives a reset of the device and holds in every context (tests/cuda/test_cuda.c). */
cudaError_t weft_cuda_permit_more(const weft_call *call, const void *kernel, size_t shared, unsigned cluster);

static inline cudaError_t weft_cuda_permit(const weft_call *call, const void *kernel, size_t shared,
                                           unsigned cluster)
{
    const bool more = shared > WEFT_GRANTED_SHARED || cluster > WEFT_GRANTED_CLUSTER;
    return more ? weft_cuda_permit_more(call, kernel, shared, cluster) : cudaSuccess;
}

#ifdef __cplusplus
}
#endif
#endif
