/* SPDX-License-Identifier: Apache-2.0
 *
 * How far a run has come: one line that is rewritten on a terminal, a line now and then elsewhere. */
#ifndef WEFT_CLI_PROGRESS_H
#define WEFT_CLI_PROGRESS_H

#include <stddef.h>
#include <stdint.h>

typedef struct progress {
    int on, terminal;
    int64_t first, total;
    double started, shown;
    int width; /* of the line that is there */
} progress;

double progress_now(void); /* seconds */
progress progress_open(int on, int64_t done, int64_t total);
/* tokens_per_s, bytes and the losses as they are to be shown; NaN: not yet known. */
void progress_show(progress *p, int64_t done, double loss, double validation, double tokens_per_s, size_t bytes);
/* Ends the line. */
void progress_close(progress *p);

#endif
