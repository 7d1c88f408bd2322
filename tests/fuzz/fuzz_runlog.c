/* SPDX-License-Identifier: Apache-2.0
 *
 * Any bytes may be called the log of a run. The reader must refuse or accept them, never crash, and what it accepts must
 * have every column at its full length and no zero byte in a line that was read. */
#include <stdlib.h>
#include <string.h>

#include "report/runlog_read.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int truth)
{
    if (!truth) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    run_record r;
    double sum = 0;
    if (run_record_parse(&r, (const char *)data, size)) {
        size_t read = size;
        while (read && data[read - 1] != '\n') read--;
        require(read > 0 && !memchr(data, 0, read));
        require(r.count > 0 && !r.error[0]);
        for (int i = 0; i < r.num_options; i++) {
            const run_option *o = &r.options[i];
            require(memchr(o->name, 0, sizeof o->name) && memchr(o->value, 0, sizeof o->value));
            require(run_record_option(&r, o->name) == o->value);
        }
        for (int i = 0; i < r.num_mixes * r.streams * r.streams; i++) sum += r.mixes[i];
        for (int c = 0; c < RUN_COLUMNS; c++)
            for (size_t i = 0; i < r.count; i++) sum += r.column[c][i];
        for (int i = 0; i < r.num_layer_norms; i++) sum += r.layer_norms[i];
    } else
        require(r.error[0] != 0);
    (void)*(volatile double *)&sum;
    run_record_close(&r);
    run_record_close(&r);
    return 0;
}
