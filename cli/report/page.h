/* SPDX-License-Identifier: Apache-2.0
 *
 * The page of `weft report`: HTML with everything it needs in it, and no script. */
#ifndef WEFT_CLI_PAGE_H
#define WEFT_CLI_PAGE_H

#include <stdio.h>

#include "report/kinds.h"

/* left_out: what else was named and is not shown, line by line, or "". */
void page_write(const report *r, const char *left_out, FILE *to);

#endif
