/* SPDX-License-Identifier: Apache-2.0
 *
 * What a device and this library's code for it can do. It cannot change while the process lives, so the first answer is kept,
 * as in device.c: the query is a large part of the cost of a small call. An answer is one word, and every thread would
 * write the same one. */
#ifndef WEFT_CUDA_KEPT_H
#define WEFT_CUDA_KEPT_H

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

enum { KEPT_DEVICES = 64 }; /* other devices are queried every time */

/* One for each question; 0: not queried yet. */
struct kept_answers {
    std::atomic<uint64_t> of[KEPT_DEVICES];
};

/* ask() answers for the device that is current then, and never with 0. */
template <class Ask> static inline uint64_t kept_answer(kept_answers &known, int device, Ask ask)
{
    const bool keep = device >= 0 && device < KEPT_DEVICES;
    uint64_t word = keep ? known.of[device].load(std::memory_order_relaxed) : 0;
    if (word) return word;
    int before = device;
    const bool moved =
        cudaGetDevice(&before) == cudaSuccess && before != device && cudaSetDevice(device) == cudaSuccess;
    word = ask();
    if (moved) (void)cudaSetDevice(before);
    if (keep) known.of[device].store(word, std::memory_order_relaxed);
    return word;
}

#endif
