/* SPDX-License-Identifier: Apache-2.0
 *
 * One sentence per error: weft_fail formats it into this thread's buffer and returns the status to pass on. */
#ifndef WEFT_CORE_STATUS_H
#define WEFT_CORE_STATUS_H

#include <weft/weft.h>

#ifdef __cplusplus
extern "C" {
#endif

weft_status weft_fail(weft_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
void weft_clear_error(void);

#ifdef __cplusplus
}
#endif

#define WEFT_TRY(expr)                                                                                             \
    do {                                                                                                           \
        weft_status try_status_ = (expr);                                                                          \
        if (try_status_ != WEFT_OK) return try_status_;                                                            \
    } while (0)

#endif
