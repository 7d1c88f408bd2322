/* SPDX-License-Identifier: Apache-2.0
 *
 * From a call to a launch on the caller's stream. The launch itself returns its error, so an error left by an earlier call
 * of the application is never reported here. */
#ifndef WEFT_CUDA_LAUNCH_CUH
#define WEFT_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include "cuda/backend.h"
#include "cuda/code.h"
#include "cuda/common/status.h"
#include "cuda/permits.h"

#define CUDA_TRY(call, what, expr)                                                                                 \
    do {                                                                                                           \
        cudaError_t error_ = (expr);                                                                               \
        if (error_ != cudaSuccess) return weft_cuda_status(call, what, error_);                                    \
    } while (0)

static inline cudaStream_t stream_of(const weft_call *call)
{
    return (cudaStream_t)call->exec->stream;
}

/* OVERLAP: the kernel may begin while the one before it on the stream drains; it must call wait_for_previous() before it
 * touches memory that an earlier launch writes or reads. Code in which that does nothing is launched AFTER. */
enum launch_order { AFTER = 0, OVERLAP = 1 };

struct launch_shape {
    dim3 grid;
    unsigned block;
    size_t shared = 0;
    launch_order order = AFTER;
    bool together = false; /* all blocks resident at once, so that they may wait for each other */
    unsigned cluster = 0;  /* blocks that reach each other's shared memory */
    /* Blocks that a multiprocessor's shared memory must have room for; 0: the driver decides, for as many as there can be.
     * What is not shared memory is L1, and it holds the loads in flight of a kernel that runs beside this one. */
    unsigned per_sm = 0;
};

/* The kernel alone says what its parameters are. */
template <class T> struct as_it_is {
    typedef T type;
};

/* Parameters may be a good part of what a call touches: the runtime takes them from where they are. */
template <class... Formal>
static weft_status launch(const weft_call *call, const char *what, void (*kernel)(Formal...), const launch_shape &s,
                          const typename as_it_is<Formal>::type &...args)
{
    void *at[] = {(void *)&args...};
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute[4];
    config.gridDim = s.grid;
    config.blockDim = dim3(s.block);
    config.dynamicSmemBytes = s.shared;
    config.stream = stream_of(call);
    config.attrs = attribute;
    if (s.order == OVERLAP && weft_cuda_code(call->exec->device) >= CODE_WITH_WAITS) {
        attribute[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (s.together) {
        attribute[config.numAttrs].id = cudaLaunchAttributeCooperative;
        attribute[config.numAttrs++].val.cooperative = 1;
    }
    if (s.cluster) {
        attribute[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attribute[config.numAttrs++].val.clusterDim = {s.cluster, 1, 1};
    }
#if CUDART_VERSION >= 12050 /* before, a launch could not say so */
    if (s.per_sm) {
        const size_t each = s.shared + 4096; /* and what the kernel declares, and the driver */
        const size_t percent = (s.per_sm * each * 100 + call->device_shared - 1) / (size_t)call->device_shared;
        attribute[config.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
        attribute[config.numAttrs++].val.sharedMemCarveout = percent < 100 ? (unsigned)percent : 100;
    }
#endif
    CUDA_TRY(call, what, weft_cuda_permit(call, (const void *)kernel, s.shared, s.cluster));
    return weft_cuda_status(call, what, cudaLaunchKernelExC(&config, (const void *)kernel, at));
}

/* Dynamic shared memory that a block may have beside up to 4 KiB that its kernel declares. */
static inline size_t most_shared(const weft_call *call)
{
    return (size_t)call->device_shared - 4096;
}

/* At most as many blocks as are resident at once, so that they may wait for each other. */
static inline weft_status keep_together(const weft_call *call, const char *what, const void *kernel,
                                        launch_shape *s)
{
    int per_sm = 0;
    CUDA_TRY(call, what, weft_cuda_permit(call, kernel, s->shared, s->cluster));
    CUDA_TRY(call, what, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, (int)s->block, s->shared));
    const int sms = call->sms < call->device_sms ? call->sms : call->device_sms;
    const int64_t most = (int64_t)per_sm * sms;
    if (s->grid.x > most) s->grid.x = (unsigned)(most > 0 ? most : 1);
    s->together = true;
    return WEFT_OK;
}

/* Of the kernels for two, four and eight streams, in this order, the one for n. */
template <class Params> using kernel_of = void (*)(Params);
template <class Params> static kernel_of<Params> by_streams(const kernel_of<Params> (&kernels)[3], int n)
{
    return kernels[n == 2 ? 0 : n == 4 ? 1 : 2];
}

/* Blocks for `items` pieces of work, as many as a grid may have; kernels step through the rest. */
static inline unsigned grid_of(int64_t items)
{
    const int64_t most = (int64_t)1 << 30;
    return (unsigned)(items < most ? items : most);
}

static __device__ __forceinline__ void wait_for_previous()
{
#if __CUDA_ARCH__ >= 900 /* CODE_WITH_WAITS */
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next kernel on the stream may be set up from here on; it still waits for all of this one. */
static __device__ __forceinline__ void let_next_begin()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Registers of each thread of a group of four warps from here on, moved between warp groups (setmaxnreg). */
template <int COUNT, bool MORE> static __device__ __forceinline__ void set_registers()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (MORE)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

static inline weft_arena cuda_arena(const weft_call *call)
{
    return weft_arena_open(call->query ? NULL : call->exec->workspace);
}

#endif
