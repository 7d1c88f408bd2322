/* SPDX-License-Identifier: Apache-2.0
 *
 * A scanner for the JSON found in files from outside: strings, numbers and punctuation. There is
 * no tree and no recursion: the caller knows the structure it accepts and asks for its pieces in turn. Every
 * function returns 1, or 0 with the reason in `error`; nothing is read beyond `end`. */
#ifndef WEFT_CLI_JSON_H
#define WEFT_CLI_JSON_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct json {
    const unsigned char *begin, *at, *end;
    char error[160];
    const char *what; /* for messages; NULL: a header */
} json;

__attribute__((format(printf, 2, 3))) int json_fail(json *j, const char *format, ...);

/* Skips white space; the next character, or 0 at the end. */
int json_peek(json *j);
/* Takes one punctuation character. */
int json_take(json *j, char c);
/* Takes a string and writes it to `out`, decoded and closed with a zero. `out` must have room for the remaining text:
 * decoding never makes a string longer. A string that holds a zero itself is rejected. */
int json_string(json *j, char *out, size_t *length);
/* Takes an integer without sign, fraction or exponent, at most INT64_MAX. */
int json_integer(json *j, int64_t *value);
/* Takes any number, or one of the words nan, inf, -inf and null (NaN), which logs of runs that went wrong hold. */
int json_number(json *j, double *value);

/* Passes over any value. Brackets must match in number and strings must be strings; nothing else is asked of it. `text` is for
 * strings, as in json_string. */
int json_skip(json *j, char *text);

/* Writes text, which must be UTF-8, as a string that json_string takes back. */
void json_put_string(FILE *to, const char *text);

#endif
