/* SPDX-License-Identifier: Apache-2.0 */
#include "common/options.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "common/utf8.h"

static void print_value(FILE *to, const option *o)
{
    if (o->kind == OPTION_CHOICE)
        for (int i = 0; o->choices[i]; i++) fprintf(to, "%c%s", i ? '|' : ' ', o->choices[i]);
    else if (o->value)
        fprintf(to, " %s", o->value);
}

/* So many options that a line with all of them would not be read. */
static int is_long(const option *options)
{
    enum { MANY = 16 };
    int count = 0;
    while (options[count].name) count++;
    return count > MANY;
}

static void print_allowed(const option *o, char *to, size_t size);

/* "(1 to 256; default 4)", from what the option's variable holds. */
static void print_facts(FILE *to, const option *o)
{
    char allowed[256] = "", value[64] = "";
    int has_range = o->kind == OPTION_INT || o->kind == OPTION_REAL || o->kind == OPTION_NUMBER;
    if (has_range) print_allowed(o, allowed, sizeof allowed);
    switch (o->kind) {
    case OPTION_FLAG:
    case OPTION_WORDS: break;
    case OPTION_TEXT:
        snprintf(value, sizeof value, "%s", *(const char **)o->to ? *(const char **)o->to : "");
        break;
    case OPTION_INT: snprintf(value, sizeof value, "%lld", (long long)*(int64_t *)o->to); break;
    case OPTION_REAL:
    case OPTION_NUMBER: snprintf(value, sizeof value, "%.9g", *(double *)o->to); break;
    case OPTION_CHOICE: snprintf(value, sizeof value, "%s", o->choices[*(int *)o->to]); break;
    }
    if (*allowed || *value)
        fprintf(to, " (%s%s%s%s)", allowed, *allowed && *value ? "; " : "", *value ? "default " : "", value);
}

static void usage(FILE *to, const char *command, const option *options)
{
    int is_list = is_long(options);
    fprintf(to, "usage: weft %s%s", command, is_list ? " [options]" : "");
    for (const option *o = options; o->name && !is_list; o++) {
        fprintf(to, " [--%s", o->name);
        print_value(to, o);
        fputc(']', to);
    }
    fprintf(to, "\n\n");
    for (const option *o = options; o->name; o++) {
        if (is_list) {
            fprintf(to, "  --%s", o->name);
            print_value(to, o);
            fprintf(to, "\n        %s", o->help);
        } else
            fprintf(to, "  --%-10s %s", o->name, o->help);
        print_facts(to, o);
        fputc('\n', to);
    }
}

__attribute__((format(printf, 2, 3))) static int wrong(const char *command, const char *format, ...)
{
    va_list list;
    fprintf(stderr, "weft %s: ", command);
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fprintf(stderr, "\n\nweft %s --help lists the options\n", command);
    return EXIT_UNUSABLE;
}

/* How many letters are to be put in, left out or changed to make one name the other. */
static size_t distance(const char *a, size_t length, const char *b)
{
    enum { MOST = 32 };
    size_t row[MOST + 1], n = strlen(b);
    if (n > MOST) return SIZE_MAX;
    for (size_t k = 0; k <= n; k++) row[k] = k;
    for (size_t i = 1; i <= length; i++) {
        size_t corner = row[0]; /* of the row above */
        row[0] = i;
        for (size_t k = 1; k <= n; k++) {
            size_t change = corner + (a[i - 1] != b[k - 1]),
                   shorter = (row[k] < row[k - 1] ? row[k] : row[k - 1]) + 1;
            corner = row[k];
            row[k] = change < shorter ? change : shorter;
        }
    }
    return row[n];
}

/* The option whose name is within two letters of the word, or NULL. */
static const option *nearest(const option *options, const char *word, size_t length)
{
    const option *best = NULL;
    size_t least = 3;
    for (const option *o = options; o->name; o++) {
        size_t other = strlen(o->name);
        if (other > length + 2 || length > other + 2) continue; /* so many letters away at least */
        size_t d = distance(word, length, o->name);
        if (d >= least || d >= length) continue;
        best = o;
        least = d;
    }
    return best;
}

static const option *find(const option *options, const char *word, size_t length)
{
    while (options->name && (strlen(options->name) != length || strncmp(options->name, word, length))) options++;
    return options->name ? options : NULL;
}

static int set_choice(const option *o, const char *value)
{
    for (int i = 0; o->choices[i]; i++)
        if (!strcmp(value, o->choices[i])) {
            *(int *)o->to = i;
            return 1;
        }
    return 0;
}

/* The values that an option takes, as a message names them after "expected". */
static void print_allowed(const option *o, char *to, size_t size)
{
    size_t used;
    *to = 0;
    switch (o->kind) {
    case OPTION_FLAG: snprintf(to, size, "on or off"); break;
    case OPTION_TEXT: snprintf(to, size, "text"); break;
    case OPTION_WORDS: snprintf(to, size, "one or several of %s", o->value); break;
    case OPTION_INT:
        if (o->max == INT64_MAX)
            snprintf(to, size, "%lld or more", (long long)o->min);
        else
            snprintf(to, size, "%lld to %lld", (long long)o->min, (long long)o->max);
        break;
    case OPTION_REAL: snprintf(to, size, "a number above 0"); break;
    case OPTION_NUMBER: snprintf(to, size, "%.9g to %.9g", o->low, o->high); break;
    case OPTION_CHOICE:
        for (int i = 0; o->choices[i]; i++) {
            used = strlen(to);
            snprintf(to + used, size - used, "%s%s", i ? ", " : "one of ", o->choices[i]);
        }
        break;
    }
}

void options_explain(const option *o, const char *value, char *error, size_t size)
{
    char allowed[256];
    print_allowed(o, allowed, sizeof allowed);
    snprintf(error, size, "expected %s, got '%.60s'", allowed, value);
}

int options_reject(const char *command, const char *name, const char *value, const char *(*word)(int i))
{
    fprintf(stderr, "weft %s: --%s: expected one of ", command, name);
    for (int i = 0; word(i); i++) fprintf(stderr, "%s%s", i ? ", " : "", word(i));
    fprintf(stderr, ", got '%s'\n", value);
    return EXIT_UNUSABLE;
}

/* 1 where the value is one that the option takes. */
static int set(const option *o, const char *value)
{
    char *end;
    errno = 0;
    switch (o->kind) {
    case OPTION_FLAG: *(int *)o->to = 1; return 1;
    case OPTION_TEXT: *(const char **)o->to = value; return 1;
    case OPTION_WORDS: return 0; /* the command line's alone */
    case OPTION_CHOICE: return set_choice(o, value);
    case OPTION_INT: {
        long long v = strtoll(value, &end, 10);
        if (end == value || *end || errno || v < o->min || v > o->max) return 0;
        *(int64_t *)o->to = v;
        return 1;
    }
    case OPTION_REAL: {
        double v = strtod(value, &end);
        if (end == value || *end || !isfinite(v) || v <= 0) return 0;
        *(double *)o->to = v;
        return 1;
    }
    case OPTION_NUMBER: {
        double v = strtod(value, &end);
        if (end == value || *end || !(v >= o->low && v <= o->high)) return 0;
        *(double *)o->to = v;
        return 1;
    }
    }
    return 0;
}

int options_set(const option *o, const char *value)
{
    if (o->kind != OPTION_FLAG) return set(o, value);
    if (strcmp(value, "on") && strcmp(value, "off")) return 0;
    *(int *)o->to = !strcmp(value, "on");
    return 1;
}

static char *print_text(const char *from)
{
    size_t length = strlen(from);
    const char *end = from + length;
    char *text = malloc(length * 3 + 1), *to = text;
    while (text && from < end) {
        size_t bytes = utf8_character(from, end);
        if (!bytes || *from == '%') {
            to += snprintf(to, 4, "%%%02X", (unsigned)(unsigned char)*from++);
            continue;
        }
        memcpy(to, from, bytes);
        to += bytes, from += bytes;
    }
    if (text) *to = 0;
    return text;
}

char *options_print(const option *o)
{
    enum { MOST = 64 }; /* of a number */
    char *text;
    switch (o->kind) {
    case OPTION_FLAG: return strdup(*(int *)o->to ? "on" : "off");
    case OPTION_TEXT: return print_text(*(const char **)o->to ? *(const char **)o->to : "");
    case OPTION_WORDS: return NULL;
    case OPTION_CHOICE: return strdup(o->choices[*(int *)o->to]);
    case OPTION_INT:
        if ((text = malloc(MOST))) snprintf(text, MOST, "%lld", (long long)*(int64_t *)o->to);
        return text;
    case OPTION_REAL:
    case OPTION_NUMBER:
        if ((text = malloc(MOST))) snprintf(text, MOST, "%.17g", *(double *)o->to);
        return text;
    }
    return NULL;
}

static int hex_digit(int c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

int options_restore(const option *o, char *value)
{
    if (o->kind != OPTION_TEXT) return options_set(o, value);
    char *to = value;
    for (const char *from = value; *from;) {
        if (*from != '%') {
            *to++ = *from++;
            continue;
        }
        int high = hex_digit(from[1]), low = high >= 0 ? hex_digit(from[2]) : -1;
        if (low < 0 || high + low == 0) return 0;
        *to++ = (char)(high * 16 + low);
        from += 3;
    }
    *to = 0;
    *(const char **)o->to = *value ? value : NULL;
    return 1;
}

/* The line without white space at its ends and without a comment. */
static char *trim(char *line)
{
    line[strcspn(line, "#")] = 0;
    line += strspn(line, " \t\r");
    size_t length = strlen(line);
    while (length && strchr(" \t\r", line[length - 1])) line[--length] = 0;
    return line;
}

int options_read(char *text, const option *options, unsigned char *given, char *error, size_t size)
{
    enum { FROM_FILE = 2 };
    char why[OPTIONS_ERROR];
    int number = 1;
    for (char *next, *line = text; line; line = next, number++) {
        next = strchr(line, '\n');
        if (next) *next++ = 0;
        line = trim(line);
        if (!*line) continue;
        char *value = strchr(line, '=');
        if (!value) {
            snprintf(error, size, "line %d: expected 'name = value', got '%.40s'", number, line);
            return 0;
        }
        *value++ = 0;
        char *name = trim(line);
        value = trim(value);
        int i = 0;
        while (options[i].name && strcmp(options[i].name, name) != 0) i++;
        if (!options[i].name) {
            const option *meant = nearest(options, name, strlen(name));
            snprintf(error, size, "line %d: unknown option '%.40s'%s%s%s", number, name,
                     meant ? "; did you mean " : "", meant ? meant->name : "", meant ? "?" : "");
            return 0;
        }
        if (given[i] & FROM_FILE) {
            snprintf(error, size, "line %d: %s: expected once, got twice", number, options[i].name);
            return 0;
        }
        if (!given[i] && !options_set(&options[i], value)) {
            options_explain(&options[i], value, why, sizeof why);
            snprintf(error, size, "line %d: %s: %s", number, options[i].name, why);
            return 0;
        }
        given[i] |= FROM_FILE;
    }
    return 1;
}

int options_parse(int argc, char **argv, const option *options)
{
    return options_parse_given(argc, argv, options, NULL);
}

/* Of "--name" or "--name=value". */
static size_t name_length(const char *word)
{
    return strcspn(word + 2, "=");
}

static int is_help(const char *word)
{
    return !strcmp(word, "--help") || !strcmp(word, "-h");
}

/* Is --help among the options, and not the value of one? Asked before any value is taken, so that help shows defaults. */
static int asks_for_help(int argc, char **argv, const option *options)
{
    for (int i = 1; i < argc; i++) {
        if (is_help(argv[i])) return 1;
        if (strncmp(argv[i], "--", 2)) continue;
        size_t length = name_length(argv[i]);
        const option *o = find(options, argv[i] + 2, length);
        if (o && o->kind != OPTION_FLAG && !argv[i][2 + length]) i++;
    }
    return 0;
}

/* Takes a word. What is kept moves to the front of argv, where all words before it have been read. */
static void take_word(const option *o, char **argv, char *word)
{
    option_words *w = o->to;
    w->words = argv + 1;
    w->words[w->count++] = word;
}

int options_parse_given(int argc, char **argv, const option *options, unsigned char *given)
{
    const char *command = argv[0];
    const option *open = NULL; /* takes words until the next option */
    char why[OPTIONS_ERROR];
    if (asks_for_help(argc, argv, options)) {
        usage(stdout, command, options);
        return EXIT_PASSED;
    }
    for (int i = 1; i < argc; i++) {
        char *word = argv[i];
        if (open && strncmp(word, "--", 2)) {
            take_word(open, argv, word);
            continue;
        }
        open = NULL;
        if (strncmp(word, "--", 2)) return wrong(command, "expected an option, got '%s'", word);
        size_t length = name_length(word);
        char *value = word[2 + length] ? word + 3 + length : NULL;
        const option *o = find(options, word + 2, length);
        if (!o) {
            const option *meant = nearest(options, word + 2, length);
            return wrong(command, "unknown option '%.*s'%s%s%s", (int)length + 2, word,
                         meant ? "; did you mean --" : "", meant ? meant->name : "", meant ? "?" : "");
        }
        if (o->kind == OPTION_FLAG && value)
            return wrong(command, "--%s: expected no value, got '%s'", o->name, value);
        if (o->kind != OPTION_FLAG && !value) {
            if (i + 1 == argc || (o->kind == OPTION_WORDS && !strncmp(argv[i + 1], "--", 2))) {
                char allowed[256];
                print_allowed(o, allowed, sizeof allowed);
                return wrong(command, "--%s: expected %s, got nothing", o->name, allowed);
            }
            value = argv[++i];
        }
        if (o->kind == OPTION_WORDS)
            take_word(open = o, argv, value);
        else if (!set(o, value)) {
            options_explain(o, value, why, sizeof why);
            return wrong(command, "--%s: %s", o->name, why);
        }
        if (given) given[o - options] = 1;
    }
    return -1;
}
