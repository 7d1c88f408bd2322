/* SPDX-License-Identifier: Apache-2.0
 *
 * One process trains in a folder. The lock is the system's, on the file .lock: it ends with the process, however that ends, and
 * the file that stays behind locks nothing. */
#ifndef WEFT_CLI_LOCK_H
#define WEFT_CLI_LOCK_H

#include <stddef.h>

typedef struct lock {
    int held, file;
} lock;

/* 1, at once where it is held already; 0 with the reason in error, which names the process that has the folder. */
int lock_take(lock *l, const char *folder, char *error, size_t size);
void lock_release(lock *l);

#endif
