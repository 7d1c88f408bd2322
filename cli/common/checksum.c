/* SPDX-License-Identifier: Apache-2.0 */
#include "common/checksum.h"

#include <string.h>

uint32_t checksum_crc32c_portable(uint32_t before, const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    uint32_t table[8][256], crc = ~before; /* table[k][b]: byte b, followed by k zero bytes */
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t rest = b;
        for (int bit = 0; bit < 8; bit++) rest = rest >> 1 ^ (rest & 1 ? 0x82f63b78u : 0);
        table[0][b] = rest;
    }
    for (int k = 1; k < 8; k++)
        for (int b = 0; b < 256; b++) table[k][b] = table[k - 1][b] >> 8 ^ table[0][table[k - 1][b] & 0xff];
    for (; size >= 8; size -= 8, at += 8)
        crc = table[7][at[0] ^ (crc & 0xff)] ^ table[6][at[1] ^ (crc >> 8 & 0xff)] ^
              table[5][at[2] ^ (crc >> 16 & 0xff)] ^ table[4][at[3] ^ crc >> 24] ^ table[3][at[4]] ^
              table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
    for (; size; size--, at++) crc = crc >> 8 ^ table[0][(crc ^ *at) & 0xff];
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t before, const unsigned char *at,
                                                                 size_t size)
{
    unsigned long long crc = ~before;
    for (; size >= 8; size -= 8, at += 8) {
        unsigned long long word;
        memcpy(&word, at, sizeof word);
        crc = __builtin_ia32_crc32di(crc, word);
    }
    for (; size; size--, at++) crc = __builtin_ia32_crc32qi((unsigned)crc, *at);
    return ~(uint32_t)crc;
}

uint32_t checksum_crc32c(uint32_t before, const void *bytes, size_t size)
{
    return __builtin_cpu_supports("sse4.2") ? by_instruction(before, bytes, size)
                                            : checksum_crc32c_portable(before, bytes, size);
}
#else
uint32_t checksum_crc32c(uint32_t before, const void *bytes, size_t size)
{
    return checksum_crc32c_portable(before, bytes, size);
}
#endif
