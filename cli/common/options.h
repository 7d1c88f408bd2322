/* SPDX-License-Identifier: Apache-2.0
 *
 * Options as a table: `--name value`, `--name=value` or `--flag`. */
#ifndef WEFT_CLI_OPTIONS_H
#define WEFT_CLI_OPTIONS_H

#include <stddef.h>
#include <stdint.h>

typedef enum option_kind {
    OPTION_FLAG,   /* int: becomes 1 */
    OPTION_TEXT,   /* const char * */
    OPTION_INT,    /* int64_t between min and max */
    OPTION_REAL,   /* double, positive */
    OPTION_NUMBER, /* double between low and high */
    OPTION_CHOICE, /* int: index of the word in choices */
    OPTION_WORDS, /* option_words: the value and all words after it that are no options; on the command line only */
} option_kind;

/* Words of the command line, which the parser has moved to the front of argv. */
typedef struct option_words {
    char **words;
    int count;
} option_words;

typedef struct option {
    const char *name; /* without the dashes */
    option_kind kind;
    void *to;
    const char *value; /* how the value is called in the help, NULL for a flag or a choice */
    const char *help;
    int64_t min, max;           /* OPTION_INT */
    const char *const *choices; /* OPTION_CHOICE, ends with NULL */
    double low, high;           /* OPTION_NUMBER */
    int fixed;                  /* part of what a run is: a resumed run must have the same value */
    int grows;                  /* OPTION_INT and fixed: a resumed run may have a larger one */
    int unsaved;                /* of this call only: neither in a checkpoint nor in a log */
    int local;                  /* of this process only: others of the same run may have another value */
} option;

/* Fills the variables that the options name. -1: continue; otherwise the exit code: --help was asked for and printed,
 * or something was wrong and is on stderr. The table ends with an entry without a name. */
int options_parse(int argc, char **argv, const option *options);
/* The same; given[i] becomes 1 where option i is on the command line. */
int options_parse_given(int argc, char **argv, const option *options, unsigned char *given);

/* Lines of `name = value` with the same names and values, flags as on and off; # begins a comment. An option may stand
 * there once. Options that are given already keep their value, the others are given afterwards. 1, or 0 with the reason
 * in `error`. `text` is changed, and texts of options point into it. */
int options_read(char *text, const option *options, unsigned char *given, char *error, size_t size);
/* One value from text, as a line of a file would set it; 1 where the option takes it. */
int options_set(const option *o, const char *value);
/* "expected <what the option takes>, got '<value>'", which always fits OPTIONS_ERROR. */
enum { OPTIONS_ERROR = 384 };
void options_explain(const option *o, const char *value, char *error, size_t size);
/* The same on stderr for a word that the command looks up itself: word(i) is what it takes, NULL after the last. Returns
 * the exit code. */
int options_reject(const char *command, const char *name, const char *value, const char *(*word)(int i));

/* A value as UTF-8 that options_restore takes back, to the last bit. In texts the character % and bytes that are not UTF-8
 * are written as % and two hexadecimal digits. The caller frees it; NULL: no memory. */
char *options_print(const option *o);
/* A value from what options_print wrote; 1 where the option takes it. `value` is changed, and texts of options point into it. */
int options_restore(const option *o, char *value);

#endif
