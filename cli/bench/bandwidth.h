/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast this machine copies memory: what every speed is compared with. */
#ifndef WEFT_CLI_BANDWIDTH_H
#define WEFT_CLI_BANDWIDTH_H

/* Bytes read plus bytes written per second, the best of memcpy and of a copy with non-temporal stores, by that many
 * threads; 0 where there is no memory for it. */
double bandwidth_copy(int threads);

/* Seconds since some moment. */
double bandwidth_clock(void);

#endif
