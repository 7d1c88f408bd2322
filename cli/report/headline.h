/* SPDX-License-Identifier: Apache-2.0
 *
 * What a report says. Every sentence follows from the figures of its runs. */
#ifndef WEFT_CLI_HEADLINE_H
#define WEFT_CLI_HEADLINE_H

#include <stdio.h>

#include "report/kinds.h"

/* One sentence, escaped for HTML: how much a signal can grow and which kind has the lower loss, as far as the runs tell. */
void headline(const report *r, FILE *to);
/* The options that all runs share, the seeds, and how many runs there are. */
void headline_options(const report *r, FILE *to);
/* A paragraph with the figures after the headline: gains, gradients by layer, losses with their spread. */
void headline_figures(const report *r, FILE *to);
/* What the unfinished runs of a kind have done: "20 of 300", or "20 to 100 of 300". */
void headline_progress(const run_kind *k, FILE *to);
/* A gain as a factor: "1.00", "686", "3.1·10^6" with the power raised. */
void headline_factor(FILE *to, double factor);

#endif
