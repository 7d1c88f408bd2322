/* SPDX-License-Identifier: Apache-2.0
 *
 * `weft report`: one page that shows what runs did, with everything it needs in it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "common/files.h"
#include "common/options.h"
#include "common/utf8.h"
#include "report/page.h"

typedef struct reading {
    report report;
    char *left_out; /* a line per path that is there and holds no figures of a run; NULL where there is none */
    size_t left_out_size;
    FILE *lines; /* that writes it */
    const char *out;
    struct stat out_file; /* st_ino 0: there is no such file yet */
} reading;

/* The last part of a path, or of the folder where that is a log. */
static void name_run(report_run *run, const char *path)
{
    char text[FILES_PATH];
    snprintf(text, sizeof text, "%s", path);
    size_t length = strlen(text);
    while (length > 1 && text[length - 1] == '/') text[--length] = 0;
    char *slash = strrchr(text, '/');
    if (slash && slash > text && !strcmp(slash, "/log.jsonl")) {
        *slash = 0;
        slash = strrchr(text, '/');
    }
    utf8_copy(run->name, sizeof run->name, slash && slash[1] ? slash + 1 : text);
}

static int complain(const char *path, const char *why)
{
    fprintf(stderr, "weft report: %s: %s\n", path, why);
    return 0;
}

/* What the shell puts in the place of a pattern may be no run, or one that was killed early: it is named and left out. */
static void leave_out(reading *r, const char *path, const char *why)
{
    (void)complain(path, why);
    fprintf(r->lines, "%s%s: %s", ftell(r->lines) > 0 ? "; " : "", path, why);
}

static int is_same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* A path may lead to a log that another has led to, as a link does. */
static int is_read(const report *all, const struct stat *file)
{
    for (int i = 0; i < all->num_runs; i++)
        if (is_same_file(&all->runs[i]->file, file)) return 1;
    return 0;
}

/* Is it a log, if a broken one? An older page that a pattern names is none. */
static int is_log(const report_run *run, int in_folder)
{
    return in_folder || run->log.count > 0 || run->log.num_options > 0;
}

/* Keeps the run, or frees it. */
static int read_log(reading *r, report_run *run, const char *file, int in_folder)
{
    int ok = run_record_open(&run->log, file);
    if (is_log(run, in_folder) && is_same_file(&run->file, &r->out_file)) {
        run_record_close(&run->log);
        free(run);
        return complain(r->out, "expected another file for --out, this is a log that --runs names");
    }
    if (ok) {
        r->report.runs[r->report.num_runs++] = run;
        return 1;
    }
    leave_out(r, file, run->log.error);
    run_record_close(&run->log);
    free(run);
    return 1;
}

static int read_run(reading *r, const char *path)
{
    char file[FILES_PATH];
    struct stat status;
    report *all = &r->report;
    if (stat(path, &status)) return complain(path, strerror(errno));
    int in_folder = S_ISDIR(status.st_mode);
    snprintf(file, sizeof file, "%s", path);
    if (in_folder && (!files_join(file, path, "log.jsonl") || stat(file, &status))) {
        leave_out(r, path, "there is no log.jsonl in it");
        return 1;
    }
    if (is_read(all, &status)) return 1;
    report_run **more = realloc(all->runs, (size_t)(all->num_runs + 1) * sizeof *more);
    report_run *run = calloc(1, sizeof *run);
    if (more) all->runs = more;
    if (!more || !run) {
        free(run);
        return complain(path, "out of memory");
    }
    run->file = status;
    name_run(run, path);
    return read_log(r, run, file, in_folder);
}

/* A word is a path, or paths separated by commas. */
static int read_word(reading *r, char *word)
{
    if (!access(word, F_OK)) return read_run(r, word);
    for (char *at = word; at;) {
        char *comma = strchr(at, ',');
        if (comma) *comma = 0;
        if (strlen(at) >= FILES_PATH) {
            fprintf(stderr, "weft report: --runs: expected paths of at most %d bytes\n", FILES_PATH - 1);
            return 0;
        }
        if (*at && !read_run(r, at)) return 0;
        at = comma ? comma + 1 : NULL;
    }
    return 1;
}

static int read_runs(reading *r, const option_words *words)
{
    for (int i = 0; i < words->count; i++)
        if (!read_word(r, words->words[i])) return 0;
    if (fflush(r->lines)) return complain("--runs", strerror(errno));
    if (!r->report.num_runs && !*r->left_out)
        fprintf(stderr, "weft report: --runs: expected a folder or a log, got none\n");
    else if (!r->report.num_runs)
        fprintf(stderr, "weft report: --runs: expected at least one run with a step, got none\n");
    return r->report.num_runs > 0;
}

static int write_page(const reading *r, const char *path)
{
    char temporary[FILES_PATH];
    struct stat status;
    FILE *to;
    /* rename would put the page in the place of a device or a FIFO. */
    if (!stat(path, &status) && !S_ISREG(status.st_mode)) return complain(path, "not a regular file");
    if (snprintf(temporary, sizeof temporary, "%s.part", path) >= (int)sizeof temporary)
        errno = ENAMETOOLONG;
    else if ((to = files_create(temporary))) {
        page_write(&r->report, r->left_out, to);
        int failed = fflush(to) || ferror(to) || fsync(fileno(to));
        failed |= fclose(to) != 0;
        if (!failed && !rename(temporary, path)) return 1;
        int why = errno;
        unlink(temporary);
        errno = why;
    }
    return complain(path, strerror(errno));
}

int command_report(int argc, char **argv)
{
    static char runs_default[] = "runs/weft";
    char *default_words[] = {runs_default};
    const char *out = "report.html";
    option_words words = {0};
    const option options[] = {
        {.name = "runs",
         .kind = OPTION_WORDS,
         .to = &words,
         .value = "PATH...",
         .help = "folders of runs or their logs, separated by spaces or commas (default runs/weft)"},
        {.name = "out", .kind = OPTION_TEXT, .to = &out, .value = "FILE", .help = "the page to write"},
        {0}};
    int code = options_parse(argc, argv, options);
    if (code >= 0) return code;
    if (!words.count) words = (option_words){default_words, 1};
    reading r = {.out = out};
    if (stat(out, &r.out_file)) r.out_file = (struct stat){0};
    r.lines = open_memstream(&r.left_out, &r.left_out_size);
    if (!r.lines) return EXIT_UNUSABLE;
    int ok = read_runs(&r, &words);
    if (ok && !report_sort(&r.report)) ok = complain("--runs", "out of memory");
    ok = ok && write_page(&r, out);
    if (ok) printf("%s\n", out);
    report_close(&r.report);
    fclose(r.lines);
    free(r.left_out);
    return ok ? EXIT_PASSED : EXIT_UNUSABLE;
}
