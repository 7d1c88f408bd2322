/* SPDX-License-Identifier: Apache-2.0
 *
 * Three processes under mpirun compare notes, and all of them get the same answer: also about what the program cannot be made
 * to do, like versions that know other options. */
#include <stdio.h>
#include <string.h>

#include "train/agree.h"

static ranks all;
static int failures;

/* All processes: whether they agree, and the reason that each of them gets. */
static void expect(const char *name, const agree_notes *mine, const char *reason)
{
    char why[AGREE_WHY];
    int yes = agree(&all, mine, why);
    if (yes == !reason && !strcmp(why, reason ? reason : "")) return;
    fprintf(stderr, "rank %d, %s: %d, '%s', expected '%s'\n", all.rank, name, yes, why, reason ? reason : "");
    failures++;
}

static agree_notes notes_of(const char *name, const char *const values[3])
{
    agree_notes notes = {0};
    agree_note(&notes, "first", "1");
    if (values[all.rank]) agree_note(&notes, name, values[all.rank]);
    agree_note(&notes, "last", "2");
    return notes;
}

static agree_notes errors_of(const char *const errors[3])
{
    agree_notes notes = {0};
    agree_note(&notes, "seed", all.rank ? "1" : "2"); /* an error outweighs it */
    snprintf(notes.error, sizeof notes.error, "%s", errors[all.rank]);
    return notes;
}

static void facts(void)
{
#define DIFFER "the processes of the run differ: "
    static const struct {
        const char *name, *values[3], *reason;
    } table[] = {
        {"version", {"1", "1", "1"}, NULL},
        {"version", {"1", "2", "1"}, DIFFER "version is 1 (ranks 0, 2), 2 (rank 1)"},
        {"version", {"1", "2", "2"}, DIFFER "version is 1 (rank 0), 2 (ranks 1-2)"},
        {"version", {"1", "2", "3"}, DIFFER "version is 1 (rank 0), 2 (rank 1), 3 (rank 2)"},
        {"version", {"1", "", "1"}, DIFFER "version is 1 (ranks 0, 2),  (rank 1)"},
        /* An option that only some versions have, be it that rank 0 has it or another. */
        {"--new", {"1", NULL, NULL}, DIFFER "--new is 1 (rank 0), unknown (ranks 1-2)"},
        {"--new", {NULL, NULL, "1"}, DIFFER "--new is unknown (ranks 0-1), 1 (rank 2)"},
        {"--new", {NULL, "1", "1"}, DIFFER "--new is unknown (rank 0), 1 (ranks 1-2)"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        agree_notes notes = notes_of(table[i].name, table[i].values);
        expect(table[i].name, &notes, table[i].reason);
    }
    agree_notes notes = {0};
    agree_note(&notes, "seed", all.rank < 2 ? "1" : "0");
    agree_note(&notes, "steps", all.rank > 0 ? "1" : "0");
    expect("two facts", &notes, DIFFER "seed is 1 (ranks 0-1), 0 (rank 2); steps is 0 (rank 0), 1 (ranks 1-2)");
}

static void errors(void)
{
    static const struct {
        const char *errors[3], *reason;
    } table[] = {
        {{"", "no text", ""}, "rank 1: no text"},
        {{"no text", "no text", ""}, "ranks 0-1: no text"},
        {{"no text", "no GPU", "no text"}, "ranks 0, 2: no text; rank 1: no GPU"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        agree_notes notes = errors_of(table[i].errors);
        expect("errors", &notes, table[i].reason);
    }
    agree_notes notes = {.error = "no text"};
    char why[AGREE_WHY];
    int yes = agree(&all, &notes, why);
    if (yes || strcmp(why, all.rank ? "" : "no text")) failures++, fprintf(stderr, "common error: '%s'\n", why);
}

/* Values and lists that do not fit are cut, and still tell what differs. */
static void too_long(void)
{
    agree_notes notes = {0}, full = {0};
    char value[200], why[AGREE_WHY];
    memset(value, 'x', sizeof value - 1);
    value[sizeof value - 1] = 0;
    agree_note(&notes, "blas", value);
    expect("long and the same", &notes, NULL);
    notes = (agree_notes){0};
    value[sizeof value - 2] = all.rank == 1 ? 'y' : 'x';
    agree_note(&notes, "blas", value);
    int yes = agree(&all, &notes, why);
    if (yes || !strstr(why, "(ranks 0, 2)") || !strstr(why, "(rank 1)"))
        failures++, fprintf(stderr, "long values: %d '%s'\n", yes, why);
    for (int i = 0; i <= AGREE_FACTS; i++) {
        char name[AGREE_NAME];
        if (full.error[0]) failures++, fprintf(stderr, "full after %d facts\n", i);
        snprintf(name, sizeof name, "fact %d", i);
        agree_note(&full, name, value + all.rank);
    }
    if (!full.error[0]) failures++, fprintf(stderr, "one fact too many is no error\n");
    full.error[0] = 0;
    yes = agree(&all, &full, why);
    if (yes || strlen(why) != AGREE_WHY - 1) failures++, fprintf(stderr, "long reason: %d '%s'\n", yes, why);
}

static void stop(void)
{
    for (int rank = -1; rank < 3; rank++)
        if (agree_to_stop(&all, all.rank == rank) != (rank >= 0))
            failures++, fprintf(stderr, "rank %d: a stop of rank %d\n", all.rank, rank);
}

int main(void)
{
    enum { SKIPPED = 77 };
    char error[256];
    if (!ranks_open(&all, error, sizeof error)) {
        fprintf(stderr, "%s\n", error);
        return SKIPPED;
    }
    if (all.count != 3) {
        fprintf(stderr, "skipped: for mpirun -np 3\n");
        return SKIPPED;
    }
    facts();
    errors();
    too_long();
    stop();
    if (failures) ranks_abort(&all, 1);
    ranks_close(&all);
    return failures != 0;
}
