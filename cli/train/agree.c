/* SPDX-License-Identifier: Apache-2.0 */
#include "train/agree.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "train/fingerprint.h"

_Static_assert(sizeof(agree_notes) == 512 + 80 * (32 + 96), "processes of all versions exchange notes of one size");

void agree_note(agree_notes *notes, const char *name, const char *value)
{
    agree_fact *fact = notes->facts;
    size_t length = strlen(value);
    while (fact < notes->facts + AGREE_FACTS && fact->name[0]) fact++;
    if (fact == notes->facts + AGREE_FACTS) {
        snprintf(notes->error, sizeof notes->error, "more than %d facts to compare", AGREE_FACTS);
        return;
    }
    snprintf(fact->name, sizeof fact->name, "%s", name);
    if (length < sizeof fact->value)
        memcpy(fact->value, value, length + 1);
    else
        snprintf(fact->value, sizeof fact->value, "%.50s... with fingerprint %016" PRIx64, value,
                 fingerprint(0, value, length));
}

typedef struct writer {
    char *text;
    size_t size, used;
} writer;

/* What does not fit is cut off. */
__attribute__((format(printf, 2, 3))) static void put(writer *w, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    int length = vsnprintf(w->text + w->used, w->size - w->used, format, list);
    va_end(list);
    w->used += length > 0 ? (size_t)length : 0;
    if (w->used >= w->size) w->used = w->size - 1;
}

/* The value of a fact in every process: notes of `count` processes, looked up by name. NULL stands for their errors. */
typedef struct column {
    const agree_notes *notes;
    int count;
    const char *name;
} column;

static const char *value_in(const column *c, int rank)
{
    const agree_notes *notes = &c->notes[rank];
    if (!c->name) return notes->error;
    for (int i = 0; i < AGREE_FACTS; i++)
        if (!strcmp(notes->facts[i].name, c->name)) return notes->facts[i].value;
    return "unknown"; /* to a version that has no such option */
}

static int alike(const column *c)
{
    for (int r = 1; r < c->count; r++)
        if (strcmp(value_in(c, r), value_in(c, 0))) return 0;
    return 1;
}

static int is_first_with_its_value(const column *c, int rank)
{
    for (int r = 0; r < rank; r++)
        if (!strcmp(value_in(c, r), value_in(c, rank))) return 0;
    return 1;
}

/* "rank 2" or "ranks 0, 3-7": those that have the value of `first`, the lowest of them. */
static void put_ranks(writer *w, const column *c, int first)
{
    const char *value = value_in(c, first);
    writer list = {(char[256]){0}, 256, 0};
    int members = 0;
    for (int r = first; r < c->count; r++) {
        int end = r;
        while (end < c->count && !strcmp(value_in(c, end), value)) end++;
        if (end == r) continue;
        put(&list, "%s%d", members ? ", " : "", r);
        if (end > r + 1) put(&list, "-%d", end - 1);
        members += end - r;
        r = end;
    }
    put(w, "%s %s", members > 1 ? "ranks" : "rank", list.text);
}

static int some_fail(writer *w, const agree_notes *notes, const ranks *all)
{
    const column errors = {notes, all->count, NULL};
    const char *between = "";
    if (alike(&errors)) {
        if (all->rank == 0) put(w, "%s", notes[0].error);
        return notes[0].error[0] != 0;
    }
    for (int r = 0; r < all->count; r++) {
        if (!notes[r].error[0] || !is_first_with_its_value(&errors, r)) continue;
        put(w, "%s", between);
        put_ranks(w, &errors, r);
        put(w, ": %s", notes[r].error);
        between = "; ";
    }
    return 1;
}

static int some_differ(writer *w, const agree_notes *notes, const ranks *all)
{
    int differences = 0;
    for (int r = 0; r < all->count; r++)
        for (int i = 0; i < AGREE_FACTS && notes[r].facts[i].name[0]; i++) {
            const column facts = {notes, all->count, notes[r].facts[i].name};
            int seen = 0;
            for (int before = 0; before < r && !seen; before++)
                for (int k = 0; k < AGREE_FACTS && !seen; k++)
                    seen = !strcmp(notes[before].facts[k].name, facts.name);
            if (seen || alike(&facts)) continue;
            put(w, "%s%s is ", differences++ ? "; " : "the processes of the run differ: ", facts.name);
            const char *between = "";
            for (int k = 0; k < all->count; k++) {
                if (!is_first_with_its_value(&facts, k)) continue;
                put(w, "%s%s (", between, value_in(&facts, k));
                put_ranks(w, &facts, k);
                put(w, ")");
                between = ", ";
            }
        }
    return differences > 0;
}

int agree(const ranks *all, const agree_notes *mine, char why[AGREE_WHY])
{
    agree_notes *notes = calloc((size_t)all->count, sizeof *notes);
    writer w = {why, AGREE_WHY, 0};
    why[0] = 0;
    if (!notes || !ranks_gather(all, mine, notes, sizeof *mine)) {
        /* The others wait for these notes. */
        fprintf(stderr, "weft: rank %d: %s\n", all->rank, notes ? "a process of the run is gone" : "out of memory");
        ranks_abort(all, EXIT_UNUSABLE);
        exit(EXIT_UNUSABLE);
    }
    for (int r = 0; r < all->count; r++) { /* of another program, they might not end */
        notes[r].error[AGREE_ERROR - 1] = 0;
        for (int i = 0; i < AGREE_FACTS; i++)
            notes[r].facts[i].name[AGREE_NAME - 1] = notes[r].facts[i].value[AGREE_VALUE - 1] = 0;
    }
    int ok = !some_fail(&w, notes, all) && !some_differ(&w, notes, all);
    free(notes);
    return ok;
}

int agree_to_stop(const ranks *all, int asked)
{
    return !ranks_all(all, !asked);
}
