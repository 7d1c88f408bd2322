/* SPDX-License-Identifier: Apache-2.0
 *
 * All that the program and the tests know of the CUDA runtime: memory, copies, and the time that a call takes on the
 * device. A build without CUDA has the same functions and no device. Functions that return a string return NULL, or
 * what went wrong. */
#ifndef WEFT_CHECK_DEVICE_H
#define WEFT_CHECK_DEVICE_H

#include <stddef.h>

int device_built(void);                        /* 1 where this build has the CUDA backend */
const char *device_architectures(void);        /* what it was compiled for: "80 90a", "80 (PTX)" */
int device_count(void);                        /* GPUs of this machine; 0 without a driver */
void device_versions(char *text, size_t size); /* "driver 13.0, runtime 13.0" */

typedef struct device_facts {
    char name[256];
    int major, minor, sms;
    size_t memory, l2; /* bytes */
} device_facts;

int device_facts_of(int device, device_facts *facts); /* 1 where there is such a device */

void *device_alloc(size_t bytes); /* NULL where there is no memory */
void device_free(void *p);
size_t device_room(void);                                          /* bytes that can still be allocated */
const char *device_put(void *to, const void *from, size_t bytes);  /* from the host */
const char *device_get(void *to, const void *from, size_t bytes);  /* to the host */
const char *device_copy(void *to, const void *from, size_t bytes); /* within the device */
const char *device_fill(void *to, int byte, size_t bytes);
const char *device_wait(void); /* for all work on the device */

/* For steps that must not wait: work in the order of the default stream, from host memory that the device can reach. */
void *device_pinned(size_t bytes); /* NULL where there is no memory */
void device_pinned_free(void *p);
const char *device_put_later(void *to, const void *from, size_t bytes);
const char *device_fill_later(void *to, int byte, size_t bytes);
const char *device_use(int device); /* what the functions above speak of, in this thread */

/* ---- time ------------------------------------------------------------------------------------------------------- */

typedef struct device_timer device_timer;

/* A stream with its events, and a buffer that evicts everything else from the L2 when it is written. NULL where the
 * device does not give them. */
device_timer *device_timer_open(size_t evict_bytes);
/* Written lines would have to go back to memory while another call is timed: `read` reads the buffer on the
 * timer's stream, writing next to nothing, so that the L2 is left full of clean lines. */
void device_timer_reader(device_timer *t, const char *(*read)(void *context), void *context);
void *device_timer_buffer(const device_timer *t);
void device_timer_close(device_timer *t);
void *device_timer_stream(const device_timer *t);

/* Captures what `call` puts on the timer's stream, `times` over, as a graph. */
const char *device_timer_capture(device_timer *t, const char *(*call)(void *context), void *context, int times);
/* Device time of `replays` runs of that graph back to back; evict: with nothing of theirs in the L2 at the start. */
const char *device_timer_run(device_timer *t, int replays, int evict, double *seconds);
/* Device time of a copy within the device. */
const char *device_timer_copy(device_timer *t, void *to, const void *from, size_t bytes, double *seconds);

#endif
