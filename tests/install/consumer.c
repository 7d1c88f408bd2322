/* SPDX-License-Identifier: Apache-2.0
 *
 * One operator through the installed headers and the installed library: four equal streams out of one. */
#include <stdio.h>
#include <string.h>
#include <weft/mhc.h>
#include <weft/norm.h>
#include <weft/ops.h>

enum { TOKENS = 3, STREAMS = 4, CHANNELS = 5 };

int main(void)
{
    float u[TOKENS][CHANNELS], x[TOKENS][STREAMS][CHANNELS];
    for (int t = 0; t < TOKENS; t++)
        for (int c = 0; c < CHANNELS; c++) u[t][c] = (float)(10 * t + c);
    memset(x, 0xff, sizeof x);

    weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);
    weft_status status = weft_mhc_expand_fwd(
        &exec, WEFT_ARGS(weft_mhc_expand_fwd_args, .u = weft_dense2(u, WEFT_F32, TOKENS, CHANNELS),
                         .x = weft_dense3(x, WEFT_F32, TOKENS, STREAMS, CHANNELS)));
    if (status != WEFT_OK) {
        fprintf(stderr, "%s: %s\n", weft_status_name(status), weft_last_error());
        return 1;
    }
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < STREAMS; i++)
            for (int c = 0; c < CHANNELS; c++)
                if (!(x[t][i][c] == u[t][c])) {
                    fprintf(stderr, "x[%d][%d][%d] is %g, expected %g\n", t, i, c, x[t][i][c], u[t][c]);
                    return 1;
                }
    printf("weft %s, %d operators, expand is right\n", weft_version(), (int)weft_op_count());
    return 0;
}
