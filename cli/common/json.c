/* SPDX-License-Identifier: Apache-2.0 */
#include "common/json.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/utf8.h"

int json_fail(json *j, const char *format, ...)
{
    va_list list;
    int used = snprintf(j->error, sizeof j->error, "%s byte %zu: ", j->what ? j->what : "header",
                        (size_t)(j->at - j->begin));
    va_start(list, format);
    vsnprintf(j->error + used, sizeof j->error - (size_t)used, format, list);
    va_end(list);
    return 0;
}

int json_peek(json *j)
{
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r')) j->at++;
    return j->at < j->end ? *j->at : 0;
}

int json_take(json *j, char c)
{
    int next = json_peek(j);
    if (next != c) {
        if (j->at == j->end) return json_fail(j, "expected '%c', the %s ends", c, j->what ? j->what : "header");
        return json_fail(j, next > 32 && next < 127 ? "expected '%c', got '%c'" : "expected '%c', got byte %d", c,
                         next);
    }
    j->at++;
    return 1;
}

static int hex4(json *j, unsigned *code)
{
    *code = 0;
    if (j->end - j->at < 4) return json_fail(j, "a \\u escape is cut off");
    for (int i = 0; i < 4; i++) {
        unsigned c = *j->at++, digit;
        if (c >= '0' && c <= '9')
            digit = c - '0';
        else if (c >= 'a' && c <= 'f')
            digit = c - 'a' + 10;
        else if (c >= 'A' && c <= 'F')
            digit = c - 'A' + 10;
        else
            return json_fail(j, "a \\u escape needs four hexadecimal digits");
        *code = *code * 16 + digit;
    }
    return 1;
}

static size_t put_utf8(char *out, unsigned code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const unsigned char lead[] = {0, 0xc0, 0xe0, 0xf0};
    out[0] = (char)(lead[more] | code >> 6 * more);
    for (int i = 1; i <= more; i++) out[i] = (char)(0x80 | (code >> 6 * (more - i) & 0x3f));
    return (size_t)more + 1;
}

static int escape(json *j, char *out, size_t *length)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    unsigned code, low;
    if (j->at == j->end) return json_fail(j, "a string is not closed");
    int c = *j->at++;
    for (int i = 0; from[i]; i++)
        if (c == from[i]) {
            out[(*length)++] = to[i];
            return 1;
        }
    if (c != 'u') return json_fail(j, "unknown escape in a string");
    if (!hex4(j, &code)) return 0;
    if (code >= 0xd800 && code < 0xdc00) {
        if (j->end - j->at < 2 || j->at[0] != '\\' || j->at[1] != 'u') return json_fail(j, "half a surrogate pair");
        j->at += 2;
        if (!hex4(j, &low)) return 0;
        if (low < 0xdc00 || low > 0xdfff) return json_fail(j, "half a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code < 0xe000) {
        return json_fail(j, "half a surrogate pair");
    }
    if (code == 0) return json_fail(j, "a string holds a zero character");
    *length += put_utf8(out + *length, code);
    return 1;
}

/* Copies one character that is not ASCII. Strictly, so that two different spellings of one name cannot slip past the search
 * for duplicates. */
static int utf8(json *j, char *out, size_t *length)
{
    size_t bytes = utf8_character((const char *)j->at, (const char *)j->end);
    if (!bytes) return json_fail(j, "a string is not valid UTF-8");
    memcpy(out + *length, j->at, bytes);
    *length += bytes;
    j->at += bytes;
    return 1;
}

int json_string(json *j, char *out, size_t *length)
{
    *length = 0;
    if (!json_take(j, '"')) return 0;
    for (;;) {
        if (j->at == j->end) return json_fail(j, "a string is not closed");
        unsigned c = *j->at;
        if (c == '"') break;
        if (c < 0x20) return json_fail(j, "a control character inside a string");
        if (c >= 0x80) {
            if (!utf8(j, out, length)) return 0;
            continue;
        }
        j->at++;
        if (c == '\\') {
            if (!escape(j, out, length)) return 0;
        } else {
            out[(*length)++] = (char)c;
        }
    }
    j->at++;
    out[*length] = 0;
    return 1;
}

int json_integer(json *j, int64_t *value)
{
    int c = json_peek(j), digits = 0;
    *value = 0;
    while (j->at < j->end && *j->at >= '0' && *j->at <= '9') {
        int digit = *j->at++ - '0';
        if (*value > (INT64_MAX - digit) / 10) return json_fail(j, "an integer is too large");
        *value = *value * 10 + digit;
        digits++;
    }
    if (!digits) return json_fail(j, "expected an integer of at least zero");
    if (c == '0' && digits > 1) return json_fail(j, "an integer with a leading zero");
    if (j->at < j->end && (*j->at == '.' || *j->at == 'e' || *j->at == 'E'))
        return json_fail(j, "expected an integer, got a number with a fraction or an exponent");
    return 1;
}

int json_number(json *j, double *value)
{
    static const char *const words[] = {"null", "nan", "-nan", "inf", "-inf"};
    const double values[] = {NAN, NAN, NAN, INFINITY, -INFINITY};
    char text[64], *end;
    size_t length = 0;
    (void)json_peek(j);
    while (j->at < j->end && length < sizeof text - 1 && *j->at &&
           strchr("+-.0123456789abcdefghijklmnopqrstuvwxyzE", *j->at))
        text[length++] = (char)*j->at++;
    text[length] = 0;
    for (int i = 0; i < 5; i++)
        if (!strcmp(text, words[i])) {
            *value = values[i];
            return 1;
        }
    *value = strtod(text, &end);
    if (!length || *end || text[0] == '+' || strpbrk(text, "xpin")) return json_fail(j, "expected a number");
    return 1;
}

int json_skip(json *j, char *text)
{
    size_t length;
    int depth = 0;
    do {
        int c = json_peek(j);
        if (c == '"') {
            if (!json_string(j, text, &length)) return 0;
            continue;
        }
        int open = c == '[' || c == '{', close = c == ']' || c == '}', between = c == ',' || c == ':';
        if (c < 0x20 || c >= 0x7f || (depth == 0 && (close || between))) return json_fail(j, "expected a value");
        depth += open - close;
        j->at++;
        if (open || close || between) continue;
        while (j->at<j->end && * j->at> 0x20 && *j->at < 0x7f && !strchr("\"[]{},:", *j->at)) j->at++;
    } while (depth > 0);
    return 1;
}

void json_put_string(FILE *to, const char *text)
{
    fputc('"', to);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') fputc('\\', to);
        if ((unsigned char)*text < 0x20)
            fprintf(to, "\\u%04x", (unsigned)*text);
        else
            fputc(*text, to);
    }
    fputc('"', to);
}
