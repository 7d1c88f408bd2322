/* SPDX-License-Identifier: Apache-2.0
 *
 * Options as a table: `--name value`, `--name=value` or `--flag`. */
#ifndef WEFT_CLI_OPTIONS_H
#define WEFT_CLI_OPTIONS_H

#include <stdint.h>

typedef enum option_kind {
    OPTION_FLAG,   /* int: becomes 1 */
    OPTION_TEXT,   /* const char * */
    OPTION_INT,    /* int64_t between min and max */
    OPTION_REAL,   /* double, positive */
    OPTION_CHOICE, /* int: index of the word in choices */
} option_kind;

typedef struct option {
    const char *name; /* without the dashes */
    option_kind kind;
    void *to;
    const char *value; /* how the value is called in the help, NULL for a flag or a choice */
    const char *help;
    int64_t min, max;           /* OPTION_INT */
    const char *const *choices; /* OPTION_CHOICE, ends with NULL */
} option;

/* Fills the variables that the options name. -1: go on; otherwise the exit code: --help was asked for and printed,
 * or something was wrong and is on stderr together with the usage. The table ends with an entry without a name. */
int options_parse(int argc, char **argv, const option *options);

#endif
