/* SPDX-License-Identifier: Apache-2.0
 *
 * A 64-bit fingerprint of bytes: tells two texts or two sets of parameters apart, not a checksum against an attacker. Eight
 * bytes at a time, because both may be large. Values are in checkpoints, so the function stays as it is. */
#ifndef WEFT_CLI_FINGERPRINT_H
#define WEFT_CLI_FINGERPRINT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* `so_far`: the fingerprint of what comes before, or any first value. It matters where data is cut, except between words. */
static inline uint64_t fingerprint(uint64_t so_far, const void *data, size_t size)
{
    const unsigned char *bytes = data;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + i, size - i < 8 ? size - i : 8);
        so_far = (so_far ^ word) * 0x9e3779b97f4a7c15u;
        so_far ^= so_far >> 32;
    }
    return so_far;
}

#endif
