/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32C (Castagnoli), by the processor's instruction where it has one. It finds every single flipped bit and every burst of
 * up to 32 bits, at any length. */
#ifndef WEFT_CLI_CHECKSUM_H
#define WEFT_CLI_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of what came before, followed by these bytes; `before` is 0 where nothing came before. */
uint32_t checksum_crc32c(uint32_t before, const void *bytes, size_t size);
/* The same by tables, for any processor. */
uint32_t checksum_crc32c_portable(uint32_t before, const void *bytes, size_t size);

#endif
