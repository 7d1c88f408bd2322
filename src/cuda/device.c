/* SPDX-License-Identifier: Apache-2.0
 *
 * What validation must know of a GPU: is it there, is it new enough, can it reach a pointer. Nothing here allocates,
 * synchronises or touches a stream, so all of it is allowed while a stream is being captured. */
#include <cuda_runtime_api.h>
#include <stdatomic.h>

#include "core/check.h"
#include "cuda/backend.h"
#include "cuda/common/status.h"

enum { OLDEST_MAJOR = 8 };

weft_status weft_cuda_status(const weft_call *call, const char *what, cudaError_t error)
{
    if (error == cudaSuccess) return WEFT_OK;
    (void)cudaGetLastError(); /* the caller has it as a status: do not leave it behind for somebody else to find */
    return weft_fail(WEFT_ERR_DEVICE, "%s: %s: the CUDA runtime says: %s", weft_op_name(call->op), what,
                     cudaGetErrorString(error));
}

int weft_cuda_available(void)
{
    int count = 0, major = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        (void)cudaGetLastError();
        return 0;
    }
    for (int i = 0; i < count; i++)
        if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i) == cudaSuccess &&
            major >= OLDEST_MAJOR)
            return 1;
    return 0;
}

/* What a device has. It cannot change while the process lives, so the first answer is kept, as in core/cpuid.c: asking
 * is a good part of what a small call costs. A device is one word, and every thread would write the same one. */
typedef struct device_facts {
    int major, minor, sms, shared;
} device_facts;

enum { KEPT_DEVICES = 64 }; /* the others are asked every time */

static uint64_t pack_facts(device_facts f)
{
    return (uint64_t)f.shared << 32 | (uint64_t)(f.sms & 0xffff) << 16 | (uint64_t)(f.major & 0xff) << 8 |
           (uint64_t)(f.minor & 0xff);
}

static device_facts unpack_facts(uint64_t word)
{
    return (device_facts){word >> 8 & 0xff, word & 0xff, word >> 16 & 0xffff, (int)(word >> 32)};
}

static weft_status ask_device(const weft_call *call, device_facts *f)
{
    const char *op = weft_op_name(call->op);
    int count = 0, device = call->exec->device;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
        (void)cudaGetLastError();
        return weft_fail(WEFT_ERR_UNSUPPORTED, "%s: exec.backend: expected a machine with a GPU, got none (%s)", op,
                         cudaGetErrorString(error));
    }
    if (device < 0 || device >= count)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: exec.device: expected 0 to %d, got %d", op, count - 1, device);
    const struct {
        enum cudaDeviceAttr attribute;
        int *to;
    } facts[] = {{cudaDevAttrComputeCapabilityMajor, &f->major},
                 {cudaDevAttrComputeCapabilityMinor, &f->minor},
                 {cudaDevAttrMultiProcessorCount, &f->sms},
                 {cudaDevAttrMaxSharedMemoryPerBlockOptin, &f->shared}};
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++)
        WEFT_TRY(
            weft_cuda_status(call, "exec.device", cudaDeviceGetAttribute(facts[i].to, facts[i].attribute, device)));
    return WEFT_OK;
}

static weft_status facts_of(const weft_call *call, device_facts *f)
{
    static _Atomic uint64_t known[KEPT_DEVICES]; /* 0: not asked yet */
    const int device = call->exec->device;
    if (device < 0 || device >= KEPT_DEVICES) return ask_device(call, f);
    uint64_t word = atomic_load_explicit(&known[device], memory_order_relaxed);
    if (word == 0) {
        WEFT_TRY(ask_device(call, f));
        word = pack_facts(*f);
        atomic_store_explicit(&known[device], word, memory_order_relaxed);
    }
    *f = unpack_facts(word);
    return WEFT_OK;
}

weft_status weft_cuda_check_device(weft_call *call)
{
    const weft_exec *e = call->exec;
    device_facts f;
    WEFT_TRY(facts_of(call, &f));
    if (f.major < OLDEST_MAJOR)
        return weft_fail(WEFT_ERR_UNSUPPORTED,
                         "%s: exec.device: expected a GPU of compute capability 8.0 or newer, got %d.%d",
                         weft_op_name(call->op), f.major, f.minor);
    call->sms = e->threads > 0 ? e->threads : f.sms;
    call->device_sms = f.sms;
    call->device_shared = f.shared;
    return WEFT_OK;
}

weft_status weft_cuda_check_pointer(const weft_call *call, const char *prefix, const char *name, const void *p)
{
    const char *op = weft_op_name(call->op);
    int device = call->exec->device, pageable = 0;
    struct cudaPointerAttributes at;
    cudaError_t error = cudaPointerGetAttributes(&at, p);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return weft_fail(WEFT_ERR_DEVICE, "%s: %s%s: the CUDA runtime says: %s", op, prefix, name,
                         cudaGetErrorString(error));
    }
    switch (at.type) {
    case cudaMemoryTypeDevice:
        if (at.device == device) return WEFT_OK;
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected memory of device %d, got memory of device %d", op,
                         prefix, name, device, at.device);
    case cudaMemoryTypeManaged: return WEFT_OK;
    case cudaMemoryTypeHost:
        if (at.devicePointer == p) return WEFT_OK; /* pinned: the device reaches it under the same address */
        break;
    default: /* plain host memory; some machines let the device read it */
        if (cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device) == cudaSuccess && pageable)
            return WEFT_OK;
        break;
    }
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s: expected memory that device %d can reach, got host memory at %p",
                     op, prefix, name, device, p);
}

weft_status weft_cuda_enter(const weft_call *call, int *previous)
{
    WEFT_TRY(weft_cuda_status(call, "exec.device", cudaGetDevice(previous)));
    if (*previous == call->exec->device) return WEFT_OK;
    return weft_cuda_status(call, "exec.device", cudaSetDevice(call->exec->device));
}

void weft_cuda_leave(const weft_call *call, int previous)
{
    if (previous != call->exec->device) (void)cudaSetDevice(previous);
}
