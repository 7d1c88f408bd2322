/* SPDX-License-Identifier: Apache-2.0
 *
 * Which code runs on a device. The library may hold code for several GPUs, and PTX that the driver compiles for those it has no
 * machine code for: what a kernel contains follows from the architecture it was compiled for, not from the GPU it runs on. */
#ifndef WEFT_CUDA_CODE_H
#define WEFT_CUDA_CODE_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* From here on kernels wait for their predecessor themselves (launch.cuh), and clusters exist. */
enum { CODE_WITH_WAITS = 90 };

/* The virtual architecture (__CUDA_ARCH__ / 10) of the code that the runtime has loaded for a device: 80 on any GPU that runs PTX
 * for 8.0. The same for all kernels, which are compiled for the same list. 0 where the runtime finds none for the device. */
int32_t weft_cuda_code(int32_t device);

/* Whether that code has the instructions of 9.0a: products of four warps (wgmma.cuh). */
bool weft_cuda_has_groups(int32_t device);

#ifdef __cplusplus
}
#endif
#endif
