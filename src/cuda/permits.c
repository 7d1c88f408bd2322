/* SPDX-License-Identifier: Apache-2.0
 *
 * A query of the CUDA runtime is a large part of the cost of a small launch, so granted permits are kept. Every thread
 * requests the same: all the shared memory that a block can have. A size that depended on the call could take away what
 * another thread was just granted. */
#include "cuda/permits.h"

#include "cuda/permits_table.h"

static cudaError_t ask(const void *kernel, int device, weft_permit what)
{
    struct cudaFuncAttributes code;
    int most = 0;
    cudaError_t error;
    if (what == WEFT_PERMIT_CLUSTER)
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    error = cudaFuncGetAttributes(&code, kernel);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                most - (int)code.sharedSizeBytes);
}

static cudaError_t permit(const void *kernel, int device, weft_permit what)
{
    static weft_permits known;
    const uint64_t word = weft_permit_word(kernel, device, what);
    if (weft_permit_kept(&known, word)) return cudaSuccess;
    const cudaError_t error = ask(kernel, device, what);
    if (error == cudaSuccess) weft_permit_keep(&known, word);
    return error;
}

cudaError_t weft_cuda_permit_more(const weft_call *call, const void *kernel, size_t shared, unsigned cluster)
{
    const int device = call->exec->device;
    cudaError_t error = cudaSuccess;
    if (shared > WEFT_GRANTED_SHARED) error = permit(kernel, device, WEFT_PERMIT_SHARED);
    if (error == cudaSuccess && cluster > WEFT_GRANTED_CLUSTER) error = permit(kernel, device, WEFT_PERMIT_CLUSTER);
    return error;
}
