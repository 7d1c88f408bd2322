/* SPDX-License-Identifier: Apache-2.0
 *
 * Any bytes may be called the log of a run. The reader must refuse or accept them, never crash, and what it accepts must
 * have every column at its full length. The reader belongs to the program, so its source is included. */
#include "files.c"
#include "json.c"
#include "runlog_read.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    run_record r;
    double sum = 0;
    if (run_record_parse(&r, (const char *)data, size)) {
        if (!r.count || r.error[0]) abort();
        for (int c = 0; c < RUN_COLUMNS; c++)
            for (size_t i = 0; i < r.count; i++) sum += r.column[c][i];
        for (int i = 0; i < r.num_layer_norms; i++) sum += r.layer_norms[i];
    } else if (!r.error[0])
        abort();
    (void)*(volatile double *)&sum;
    run_record_close(&r);
    run_record_close(&r);
    return 0;
}
