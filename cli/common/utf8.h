/* SPDX-License-Identifier: Apache-2.0
 *
 * UTF-8 as it must be: overlong forms, surrogates and values above U+10FFFF are none. */
#ifndef WEFT_CLI_UTF8_H
#define WEFT_CLI_UTF8_H

#include <stddef.h>
#include <string.h>

/* Bytes of the character that begins at `at`; 0 where there is none. */
static inline size_t utf8_character(const char *at, const char *end)
{
    static const unsigned least[] = {0, 0x80, 0x800, 0x10000};
    if (at >= end) return 0;
    unsigned lead = (unsigned char)*at;
    if (lead < 0x80) return 1;
    int more = lead >= 0xf0 && lead < 0xf8   ? 3
               : lead >= 0xe0 && lead < 0xf0 ? 2
               : lead >= 0xc0 && lead < 0xe0 ? 1
                                             : 0;
    unsigned code = lead & (0x3fu >> more);
    if (!more || end - at <= more) return 0;
    for (int i = 1; i <= more; i++) {
        unsigned byte = (unsigned char)at[i];
        if ((byte & 0xc0) != 0x80) return 0;
        code = code << 6 | (byte & 0x3fu);
    }
    return code < least[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : (size_t)more + 1;
}

/* As much of the text as fits, without half a character at its end. */
static inline void utf8_copy(char *to, size_t room, const char *from)
{
    const char *end = from + strlen(from), *at = from;
    while (at < end) {
        size_t bytes = utf8_character(at, end);
        bytes = bytes ? bytes : 1;
        if ((size_t)(at - from) + bytes >= room) break;
        at += bytes;
    }
    memcpy(to, from, (size_t)(at - from));
    to[at - from] = 0;
}

#endif
