/* SPDX-License-Identifier: Apache-2.0
 *
 * `weft report`: one page that shows what runs did, with everything it needs in it. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <weft/weft.h>

#include "commands.h"
#include "common/files.h"
#include "common/options.h"
#include "common/utf8.h"
#include "report/plot.h"
#include "report/runlog_read.h"

enum { MAX_RUNS = 16 };

typedef struct report {
    run_record runs[MAX_RUNS];
    char names[MAX_RUNS][64];
    int count;
    FILE *to;
} report;

/* ---- figures of a run -------------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of the values that are shown; NaN where there is none. */
static double median(const double *values, size_t count)
{
    double *sorted = malloc((count ? count : 1) * sizeof *sorted), result = (double)NAN;
    size_t used = 0;
    for (size_t i = 0; sorted && i < count; i++)
        if (plot_shows(values[i], 0)) sorted[used++] = values[i];
    if (used) {
        qsort(sorted, used, sizeof *sorted, by_value);
        result = sorted[used / 2];
    }
    free(sorted);
    return result;
}

/* The last value that is shown. */
static double last(const run_record *r, run_column column)
{
    for (size_t i = r->count; i-- > 0;)
        if (plot_shows(r->column[column][i], 0)) return r->column[column][i];
    return (double)NAN;
}

static double mean_of_last_tenth(const run_record *r, run_column column)
{
    size_t first = r->count - (r->count + 9) / 10, used = 0;
    double sum = 0;
    for (size_t i = first; i < r->count; i++)
        if (plot_shows(r->column[column][i], 0)) sum += r->column[column][i], used++;
    return used ? sum / (double)used : (double)NAN;
}

static double largest(const run_record *r, run_column column)
{
    double low = INFINITY, high = -INFINITY;
    plot_cover(&low, &high, r->column[column], r->count, 0);
    return high;
}

/* ---- the page -------------------------------------------------------------------------------------------------------------- */

static const char style[] =
    "<style>\n"
    ":root{color-scheme:light dark;--ink:#1d2430;--soft:#677080;--line:#d9dde3;--paper:#fff;--card:#f7f8fa;"
    "--c0:#2f6fde;--c1:#d9603b;--c2:#2a9d6f;--c3:#8b5fbf;--c4:#b58a00;--c5:#c2407d;--c6:#3b8ea5;--c7:#6b7280}\n"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa3b2;--line:#333a46;--paper:#14181f;--card:#"
    "1b2029;"
    "--c0:#6ea0ff;--c1:#ff8a65;--c2:#5fd0a0;--c3:#b794f4;--c4:#e2b93b;--c5:#f28ab8;--c6:#6fc3d9;--c7:#9ca3af}}\n"
    "body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1340px;margin:2rem "
    "auto;"
    "padding:0 1rem}\n"
    "h1{font-size:1.5rem;margin:0 0 .25rem}p{color:var(--soft);margin:.25rem 0 1rem}\n"
    ".grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:1rem}\n"
    ".card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.5rem}\n"
    "svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font:12px system-ui,sans-serif}\n"
    "svg .title{fill:var(--ink);font-weight:600;font-size:14px}svg .grid{stroke:var(--line)}"
    "svg .axis{fill:none;stroke:var(--soft)}\n"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}"
    "th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--line)}"
    "th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:600}\n"
    ".key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}.scroll{overflow-x:auto}"
    "\n"
    "</style>\n";

/* The value as a chart shows it, or a dash. */
static int print_value(char *text, size_t size, const char *format, double value)
{
    enum { MOST_DIGITS = 15 };
    if (!plot_shows(value, 0)) return snprintf(text, size, "\u2013");
    return snprintf(text, size, fabs(value) < pow(10, MOST_DIGITS) ? format : "%.3g", value);
}

static void number(FILE *to, const char *format, double value)
{
    char text[48];
    print_value(text, sizeof text, format, value);
    fprintf(to, "<td>%s</td>", text);
}

static void table(const report *r)
{
    fputs("<div class=\"card scroll\"><table><tr><th>run</th><th>steps</th><th>loss, last "
          "tenth</th><th>validation</th>"
          "<th>ms a step</th><th>tokens/s</th><th>memory MiB</th><th>streams MiB</th><th>row "
          "gain</th><th>largest</th>"
          "<th>column gain</th><th>largest</th></tr>\n",
          r->to);
    for (int i = 0; i < r->count; i++) {
        const run_record *run = &r->runs[i];
        fprintf(r->to, "<tr><td><span class=\"key\" style=\"background:var(--c%d)\"></span>", i % PLOT_COLOURS);
        html_text(r->to, r->names[i]);
        fputs("</td>", r->to);
        number(r->to, "%.0f", last(run, RUN_STEP));
        number(r->to, "%.4f", mean_of_last_tenth(run, RUN_LOSS));
        number(r->to, "%.4f", last(run, RUN_VAL_LOSS));
        number(r->to, "%.1f", 1e3 * median(run->column[RUN_SECONDS], run->count));
        number(r->to, "%.0f", median(run->column[RUN_TOKENS_PER_S], run->count));
        number(r->to, "%.1f", last(run, RUN_BYTES) * 0x1p-20);
        number(r->to, "%.1f", last(run, RUN_STREAM_BYTES) * 0x1p-20);
        number(r->to, "%.4g", last(run, RUN_ROW_GAIN));
        number(r->to, "%.4g", largest(run, RUN_ROW_GAIN_MAX));
        number(r->to, "%.4g", last(run, RUN_COLUMN_GAIN));
        number(r->to, "%.4g", largest(run, RUN_COLUMN_GAIN_MAX));
        fputs("</tr>\n", r->to);
    }
    fputs("</table></div>\n", r->to);
}

/* The mean of the values within a fiftieth of the run on either side; NaN where the value itself is none. */
static double mean_around(const double *values, size_t count, size_t at)
{
    size_t reach = count / 50, first = at > reach ? at - reach : 0, used = 0;
    double sum = 0;
    for (size_t i = first; i <= at + reach && i < count; i++)
        if (plot_shows(values[i], 0)) sum += values[i], used++;
    return plot_shows(values[at], 0) ? sum / (double)used : (double)NAN;
}

/* One chart of a column of all runs; `second`: another column in dashes, or RUN_COLUMNS. */
static void chart(const report *r, const char *title, const char *label, run_column column, run_column second,
                  int log_y, plot_style look)
{
    double x0 = INFINITY, x1 = -INFINITY, y0 = INFINITY, y1 = -INFINITY;
    plot p;
    for (int i = 0; i < r->count; i++) {
        const run_record *run = &r->runs[i];
        plot_cover(&x0, &x1, run->column[RUN_STEP], run->count, 0);
        plot_cover(&y0, &y1, run->column[column], run->count, log_y);
        if (second < RUN_COLUMNS) plot_cover(&y0, &y1, run->column[second], run->count, log_y);
    }
    fputs("<div class=\"card\">", r->to);
    plot_begin(&p, r->to, title, "step", label, log_y, x0 < x1 ? 0 : x0 - 1, x1, y0, y1);
    for (int i = 0; i < r->count; i++) {
        const run_record *run = &r->runs[i];
        plot_line(&p, run->column[RUN_STEP], run->column[column], run->count, i, look);
        if (second < RUN_COLUMNS)
            plot_line(&p, run->column[RUN_STEP], run->column[second], run->count, i, PLOT_DASHED);
        if (look != PLOT_FAINT) continue;
        double *smooth = malloc(run->count * sizeof *smooth);
        for (size_t k = 0; smooth && k < run->count; k++)
            smooth[k] = mean_around(run->column[column], run->count, k);
        if (smooth) plot_line(&p, run->column[RUN_STEP], smooth, run->count, i, PLOT_LINE);
        free(smooth);
    }
    plot_end(&p);
    fputs("</div>\n", r->to);
}

static void layer_chart(const report *r)
{
    double y0 = INFINITY, y1 = -INFINITY, x1 = 1;
    plot p;
    for (int i = 0; i < r->count; i++) {
        int layers = r->runs[i].num_layer_norms - 1; /* the last entry is what is outside the layers */
        if (layers > 0) plot_cover(&y0, &y1, r->runs[i].layer_norms, (size_t)layers, 1);
        if (layers - 1 > x1) x1 = layers - 1;
    }
    fputs("<div class=\"card\">", r->to);
    plot_begin(&p, r->to, "Gradient norm by layer, at the last measurement", "layer", "log axis", 1, 0, x1, y0, y1);
    for (int i = 0; i < r->count; i++) {
        int layers = r->runs[i].num_layer_norms - 1;
        double *x = malloc((size_t)(layers > 0 ? layers : 1) * sizeof *x);
        for (int k = 0; x && k < layers; k++) x[k] = k;
        if (x && layers > 0) plot_line(&p, x, r->runs[i].layer_norms, (size_t)layers, i, PLOT_DOTS);
        free(x);
    }
    plot_end(&p);
    fputs("</div>\n", r->to);
}

static void bars(const report *r, const char *title, const char *format, double unit, run_column column,
                 int of_median)
{
    enum { MOST_PERCENT = 1000000 };
    char texts[MAX_RUNS][96];
    const char *labels[MAX_RUNS], *shown[MAX_RUNS];
    double values[MAX_RUNS];
    for (int i = 0; i < r->count; i++) {
        const run_record *run = &r->runs[i];
        values[i] = unit * (of_median ? median(run->column[column], run->count) : last(run, column));
        int used = print_value(texts[i], sizeof texts[i], format, values[i]);
        /* Beside the first run, which is the one to compare with. */
        double more = 100 * (values[i] / values[0] - 1);
        if (i > 0 && plot_shows(values[i], 0) && values[0] > 0 && fabs(more) < MOST_PERCENT)
            snprintf(texts[i] + used, sizeof texts[i] - (size_t)used, " (%+.1f %%)", more);
        labels[i] = r->names[i];
        shown[i] = texts[i];
    }
    fputs("<div class=\"card\">", r->to);
    plot_bars(r->to, title, labels, shown, values, r->count);
    fputs("</div>\n", r->to);
}

static void page(const report *r)
{
    fputs("<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" "
          "content=\"width=device-width\"><title>weft: training</title>\n",
          r->to);
    fputs(style, r->to);
    fputs("<h1>Training with ", r->to);
    for (int i = 0; i < r->count; i++) {
        fputs(i == 0 ? "" : i + 1 == r->count ? " and " : ", ", r->to);
        html_text(r->to, r->names[i]);
    }
    fprintf(r->to, "</h1>\n<p>weft %s. ", weft_version());
    html_text(r->to, r->runs[0].summary);
    fputs(
        ". Loss is in nats per byte. Row and column gain: the largest absolute row and column sum of the product "
        "of all "
        "residual maps, mean over tokens (line) and largest token (dashed); 1 is what a plain residual has.</p>\n",
        r->to);
    table(r);
    fputs("<p></p><div class=\"grid2\">\n", r->to);
    chart(r, "Training loss", "nats per byte", RUN_LOSS, RUN_COLUMNS, 0, PLOT_FAINT);
    chart(r, "Validation loss", "nats per byte", RUN_VAL_LOSS, RUN_COLUMNS, 0, PLOT_DOTS);
    chart(r, "Row gain: how much a signal can grow", "log axis", RUN_ROW_GAIN, RUN_ROW_GAIN_MAX, 1, PLOT_LINE);
    chart(r, "Column gain: how much a gradient can grow", "log axis", RUN_COLUMN_GAIN, RUN_COLUMN_GAIN_MAX, 1,
          PLOT_LINE);
    chart(r, "Gradient norm", "log axis", RUN_GRADIENT_NORM, RUN_COLUMNS, 1, PLOT_FAINT);
    layer_chart(r);
    bars(r, "Time of a step (median)", "%.1f ms", 1e3, RUN_SECONDS, 1);
    bars(r, "Memory: parameters, optimiser, activations", "%.1f MiB", 0x1p-20, RUN_BYTES, 0);
    fputs("</div></html>\n", r->to);
}

/* ---- the command ------------------------------------------------------------------------------------------------------------ */

/* A run is called after its residual connection; a second one of the same kind after its folder. */
static void name_run(report *r, const char *path)
{
    run_record *run = &r->runs[r->count];
    int same = !run->residual[0];
    for (int i = 0; i < r->count; i++) same |= !strcmp(r->names[i], run->residual);
    utf8_copy(r->names[r->count], sizeof r->names[0], same ? path : run->residual);
}

static int read_runs(report *r, const char *paths)
{
    while (*paths) {
        char path[FILES_PATH], file[FILES_PATH];
        size_t length = strcspn(paths, ",");
        if (length >= sizeof path) {
            fprintf(stderr, "weft report: --runs: expected paths of at most %d bytes\n", FILES_PATH - 1);
            return 0;
        }
        memcpy(path, paths, length);
        path[length] = 0;
        paths += length + (paths[length] == ',');
        if (!length) continue;
        if (r->count == MAX_RUNS) {
            fprintf(stderr, "weft report: --runs: expected at most %d runs\n", MAX_RUNS);
            return 0;
        }
        if (!files_join(file, path, "log.jsonl") || access(file, F_OK)) snprintf(file, sizeof file, "%s", path);
        int ok = run_record_open(&r->runs[r->count], file);
        if (ok) name_run(r, path);
        r->count++;
        if (!ok) {
            fprintf(stderr, "weft report: %s: %s\n", file, r->runs[r->count - 1].error);
            return 0;
        }
    }
    if (!r->count) fprintf(stderr, "weft report: --runs: expected a folder or a log, got none\n");
    return r->count > 0;
}

static int write_page(report *r, const char *path)
{
    char temporary[FILES_PATH];
    struct stat status;
    /* rename would put the page in the place of a device or a FIFO. */
    if (!stat(path, &status) && !S_ISREG(status.st_mode)) {
        fprintf(stderr, "weft report: %s: not a regular file\n", path);
        return 0;
    }
    if (snprintf(temporary, sizeof temporary, "%s.part", path) >= (int)sizeof temporary)
        errno = ENAMETOOLONG;
    else if ((r->to = files_create(temporary))) {
        page(r);
        int failed = fflush(r->to) || ferror(r->to) || fsync(fileno(r->to));
        failed |= fclose(r->to) != 0;
        if (!failed && !rename(temporary, path)) return 1;
        int why = errno;
        unlink(temporary);
        errno = why;
    }
    fprintf(stderr, "weft report: %s: %s\n", path, strerror(errno));
    return 0;
}

int command_report(int argc, char **argv)
{
    const char *runs = "runs/weft", *out = "report.html";
    const option options[] = {
        {.name = "runs",
         .kind = OPTION_TEXT,
         .to = &runs,
         .value = "PATHS",
         .help = "folders of runs or their logs, separated by commas; the first is what others are compared with"},
        {.name = "out", .kind = OPTION_TEXT, .to = &out, .value = "FILE", .help = "the page to write"},
        {0}};
    int code = options_parse(argc, argv, options);
    if (code >= 0) return code;
    report *r = calloc(1, sizeof *r);
    if (!r) return EXIT_UNUSABLE;
    code = read_runs(r, runs) && write_page(r, out) ? EXIT_PASSED : EXIT_UNUSABLE;
    if (code == EXIT_PASSED) printf("%s\n", out);
    for (int i = 0; i < r->count; i++) run_record_close(&r->runs[i]);
    free(r);
    return code;
}
