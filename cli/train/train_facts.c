/* SPDX-License-Identifier: Apache-2.0 */
#include "train/train_facts.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/device.h"
#include "train/fingerprint.h"

_Static_assert(AGREE_FACTS >= MAX_TRAIN_OPTIONS + 8, "no room for all options");

/* For values that are not texts yet. */
__attribute__((format(printf, 3, 4))) static void note(agree_notes *notes, const char *name, const char *format,
                                                       ...)
{
    char value[AGREE_VALUE];
    va_list list;
    va_start(list, format);
    vsnprintf(value, sizeof value, format, list);
    va_end(list);
    agree_note(notes, name, value);
}

static void note_option(agree_notes *notes, const option *o)
{
    char name[AGREE_NAME];
    char *value = options_print(o);
    snprintf(name, sizeof name, "--%s", o->name);
    if (value)
        agree_note(notes, name, value);
    else
        snprintf(notes->error, sizeof notes->error, "out of memory");
    free(value);
}

void train_facts_run(agree_notes *notes, const option *table, const char *checkpoint, const corpus *text)
{
    const char *last = strrchr(checkpoint, '/');
    note(notes, "the version of the program", "%d.%d.%d", WEFT_VERSION_MAJOR, WEFT_VERSION_MINOR,
         WEFT_VERSION_PATCH);
    agree_note(notes, "the version of the library", weft_version());
    agree_note(notes, "the checkpoint found in --out", last ? last + 1 : checkpoint[0] ? checkpoint : "none");
    for (const option *o = table; o->name; o++)
        if (!o->unsaved && !o->local) note_option(notes, o);
    note(notes, "the text of --data", "%zu bytes with fingerprint %016" PRIx64, text->bytes, text->fingerprint);
}

void train_facts_model(agree_notes *notes, const trainer *t)
{
    float *const arrays[] = {t->parameters, t->first, t->second};
    uint64_t bits = 0;
    device_facts gpu;
    if (t->exec.backend != WEFT_BACKEND_CUDA)
        agree_note(notes, "the instruction set", weft_isa_name(weft_cpu_isa()));
    else
        agree_note(notes, "the GPU", device_facts_of(t->exec.device, &gpu) ? gpu.name : "unknown");
    agree_note(notes, "the BLAS", t->blas.library ? t->blas.name : "none");
    note(notes, "the step", "%" PRId64, t->step);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        float *host = trainer_map(t, arrays[i]);
        if (!host) {
            snprintf(notes->error, sizeof notes->error, "out of memory, or the GPU is gone");
            return;
        }
        bits = fingerprint(bits, host, (size_t)t->elements * sizeof(float));
        (void)trainer_unmap(t, arrays[i], host, 0);
    }
    note(notes, "the state of the model", "%016" PRIx64, bits);
}
