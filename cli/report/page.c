/* SPDX-License-Identifier: Apache-2.0 */
#include "report/page.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <weft/weft.h>

#include "report/headline.h"
#include "report/plot.h"

static const char style[] =
    "<style>\n"
    ":root{color-scheme:light dark;--ink:#1d2430;--soft:#596273;--line:#d9dde3;--paper:#fff;--card:#f7f8fa;"
    "--c0:#2f6fde;--c1:#d9603b;--c2:#2a9d6f;--c3:#8b5fbf;--c4:#b58a00;--c5:#c2407d;--c6:#3b8ea5;--c7:#6b7280}\n"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#a3acba;--line:#333a46;--paper:#14181f;"
    "--card:#1b2029;"
    "--c0:#6ea0ff;--c1:#ff8a65;--c2:#5fd0a0;--c3:#b794f4;--c4:#e2b93b;--c5:#f28ab8;--c6:#6fc3d9;--c7:#9ca3af}}\n"
    "*{box-sizing:border-box}body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);"
    "max-width:1340px;margin:1.5rem auto;padding:0 1rem;overflow-wrap:anywhere}\n"
    "h1{font-size:clamp(1.25rem,1rem + 1.6vw,1.9rem);font-weight:500;line-height:1.3;margin:0 0 "
    ".5rem;max-width:56rem}"
    "h1 b{font-weight:700}h2{font-size:1.1rem;margin:1.75rem 0 .5rem}"
    "p{color:var(--soft);margin:.25rem 0 .75rem;max-width:70rem}\n"
    ".grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,390px),1fr));gap:1rem}"
    ".hero{grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}\n"
    ".card{background:var(--card);border:1px solid "
    "var(--line);border-radius:8px;padding:.75rem;margin:0;min-width:0}"
    ".card h3{font-size:.95rem;margin:0}.card p{font-size:.8rem;margin:0 0 .4rem}.scroll{overflow-x:auto}\n"
    "svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font:13px system-ui,sans-serif}"
    "svg .grid{stroke:var(--line)}svg .axis{fill:none;stroke:var(--soft)}\n"
    ".keys{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;margin:.75rem "
    "0;padding:0;list-style:none;font-weight:600}"
    ".key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}\n"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.85rem}"
    "th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:600}tr:last-child "
    "td{border:0}\n"
    ".bar{display:grid;grid-template-columns:minmax(4rem,26%) 1fr;gap:.1rem "
    ".6rem;align-items:center;font-size:.85rem;"
    "margin:.35rem 0}.bar i{display:block;height:1.1em;border-radius:2px;min-width:1px}"
    ".bar small{font-size:1em;color:var(--soft);grid-column:2}\n"
    ".maps{display:flex;flex-wrap:wrap;gap:1rem}.map table{width:auto;font-size:.75rem}"
    ".map td{position:relative;text-align:center;border:1px solid var(--card);width:2.9rem;height:2.3rem;padding:0;"
    "z-index:0}.map td::before{content:'';position:absolute;inset:0;z-index:-1;background:var(--map);"
    "opacity:var(--v)}.map .minus{--map:var(--c7)}.map .many td{width:.9rem;height:.9rem;min-width:0}"
    ".map caption{text-align:left;color:var(--soft);white-space:nowrap}\n"
    "details{margin:1rem 0}summary{cursor:pointer;font-weight:600}</style>\n";

/* ---- values -------------------------------------------------------------------------------------------------------------- */

/* The value as a chart shows it, or a dash. */
static void print_value(FILE *to, const char *format, double value)
{
    enum { MOST_DIGITS = 15 };
    if (!plot_shows(value, 0))
        fputs("\u2013", to);
    else
        fprintf(to, fabs(value) < pow(10, MOST_DIGITS) ? format : "%.3g", value);
}

static void cell(FILE *to, const char *format, double value)
{
    fputs("<td>", to);
    print_value(to, format, value);
    fputs("</td>", to);
}

/* The mean over tokens, and the largest token. */
static void gain_cell(FILE *to, double mean, double token)
{
    fputs("<td>", to);
    print_value(to, "%.4g", mean);
    fputs(" (", to);
    print_value(to, "%.4g", token);
    fputs(")</td>", to);
}

static void key(FILE *to, int kind, const char *name)
{
    fprintf(to, "<span class=\"key\" style=\"background:var(--c%d)\"></span>", kind % PLOT_COLOURS);
    html_text(to, name);
}

static void card_open(FILE *to, const char *title, const char *note)
{
    fprintf(to, "<figure class=\"card\"><h3>%s</h3><p>%s</p>\n", title, note);
}

/* ---- tables -------------------------------------------------------------------------------------------------------------- */

/* "300", "20 of 300", or both where a kind has finished and unfinished runs. */
static void steps_cell(const run_kind *k, FILE *to)
{
    fputs("<td>", to);
    if (k->finished) print_value(to, "%.0f", k->steps.high);
    if (k->finished && k->unfinished.count) fputs("; ", to);
    if (k->unfinished.count) headline_progress(k, to);
    fputs("</td>", to);
}

static void kinds_table(const report *r, FILE *to)
{
    fputs("<div class=\"card scroll\"><table><tr><th>kind</th><th>runs</th><th>steps</th><th>loss</th>"
          "<th>validation</th><th>gain (token)</th><th>backward (token)</th><th>layers</th><th>ms a step</th>"
          "<th>tokens/s</th><th>MiB</th><th>streams</th></tr>\n",
          to);
    for (int i = 0; i < r->num_kinds; i++) {
        const run_kind *k = &r->kinds[i];
        fputs("<tr><td>", to);
        key(to, i, k->name);
        fprintf(to, "</td><td>%d</td>", k->count);
        steps_cell(k, to);
        cell(to, "%.4f", k->loss.mean);
        cell(to, "%.4f", k->validation.mean);
        gain_cell(to, k->gain.high, k->gain_max.high);
        gain_cell(to, k->column_gain.high, k->column_gain_max.high);
        cell(to, "%.3g", k->layers.mean);
        cell(to, "%.1f", 1e3 * k->seconds.mean);
        cell(to, "%.0f", k->tokens_per_s.mean);
        cell(to, "%.1f", 0x1p-20 * k->bytes.mean);
        cell(to, "%.1f", 0x1p-20 * k->stream_bytes.mean);
        fputs("</tr>\n", to);
    }
    fputs("</table></div>\n", to);
}

static void runs_table(const report *r, FILE *to)
{
    static const char *const options[] = {"seed", "rate", "layers", "channels"};
    fputs("<details><summary>Every run</summary><div class=\"card scroll\"><table><tr><th>run</th><th>kind</th>"
          "<th>streams</th><th>seed</th><th>rate</th><th>layers</th><th>channels</th><th>steps</th>"
          "<th>loss, last tenth</th><th>validation</th><th>row gain, largest</th></tr>\n",
          to);
    for (int i = 0; i < r->num_kinds; i++)
        for (int k = 0; k < r->kinds[i].count; k++) {
            report_run *run = r->kinds[i].runs[k];
            const run_kind alone = kind_of_one(&run);
            fputs("<tr><td>", to);
            html_text(to, run->name);
            fputs("</td><td>", to);
            key(to, i, r->kinds[i].name);
            fprintf(to, "</td><td>%d</td>", run_streams(&run->log));
            for (size_t o = 0; o < sizeof options / sizeof *options; o++) {
                char text[64];
                run_option_text(&run->log, options[o], text, sizeof text);
                fputs("<td>", to);
                html_text(to, *text ? text : "\u2013");
                fputs("</td>", to);
            }
            steps_cell(&alone, to);
            cell(to, "%.4f", alone.loss.mean);
            cell(to, "%.4f", alone.validation.mean);
            cell(to, "%.4g", alone.gain.mean);
            fputs("</tr>\n", to);
        }
    fputs("</table></div></details>\n", to);
}

/* ---- charts -------------------------------------------------------------------------------------------------------------- */

typedef struct chart {
    const char *title, *note, *x_label;
    run_column column, second; /* second: in dashes, or RUN_COLUMNS; column RUN_COLUMNS: gradient norms by layer */
    curve_form form;
    int raw; /* the values of a kind's only run are shown behind what is smooth */
} chart;

static int read_curve(curve *c, const run_kind *kind, run_column column, curve_form form)
{
    return column == RUN_COLUMNS ? curve_of_layers(c, kind) : curve_of(c, kind, column, form);
}

/* What a chart of these curves covers; 0 where it would be empty. */
static int cover(const report *r, const chart *ch, double x[2], double y[2])
{
    const run_column columns[2] = {ch->column, ch->second};
    int log_y = ch->form == CURVE_GEOMETRIC;
    x[0] = y[0] = INFINITY, x[1] = y[1] = -INFINITY;
    for (int i = 0; i < r->num_kinds; i++)
        for (int part = 0; part < (ch->second < RUN_COLUMNS ? 2 : 1); part++) {
            curve c;
            /* Of raw values, which reach further than smooth ones. */
            curve_form form = ch->raw && r->kinds[i].count == 1 ? CURVE_MEAN : ch->form;
            if (read_curve(&c, &r->kinds[i], columns[part], form)) {
                plot_cover(&x[0], &x[1], c.x, c.count, 0);
                plot_cover(&y[0], &y[1], c.low, c.count, log_y);
                plot_cover(&y[0], &y[1], c.high, c.count, log_y);
            }
            curve_close(&c);
        }
    return x[0] <= x[1] && y[0] <= y[1];
}

/* A kind of one run as a line, of several as their mean with a band from the least to the largest. */
static void draw(plot *p, const run_kind *kind, const chart *ch, int colour)
{
    curve c;
    int many = kind->count > 1;
    if (!many && ch->raw) {
        if (read_curve(&c, kind, ch->column, CURVE_MEAN))
            plot_line(p, c.x, c.mean, c.count, colour, PLOT_FAINT, kind->name);
        curve_close(&c);
    }
    if (read_curve(&c, kind, ch->column, ch->form)) {
        if (many) plot_band(p, c.x, c.low, c.high, c.count, colour);
        plot_line(p, c.x, c.mean, c.count, colour, ch->column == RUN_COLUMNS ? PLOT_DOTS : PLOT_LINE, kind->name);
    }
    curve_close(&c);
    if (ch->second == RUN_COLUMNS) return;
    if (read_curve(&c, kind, ch->second, ch->form))
        plot_line(p, c.x, c.high, c.count, colour, PLOT_DASHED, kind->name);
    curve_close(&c);
}

/* 0 where no run has what the chart shows. */
static int put_chart(const report *r, const chart *ch, FILE *to)
{
    double x[2], y[2];
    plot p;
    if (!cover(r, ch, x, y)) return 0;
    card_open(to, ch->title, ch->note);
    plot_begin(&p, to, ch->title, ch->x_label, ch->form == CURVE_GEOMETRIC,
               ch->column == RUN_COLUMNS || x[0] < x[1] ? 0 : x[0] - 1, x[1], y[0], y[1]);
    for (int i = 0; i < r->num_kinds; i++) draw(&p, &r->kinds[i], ch, i);
    plot_end(&p);
    fputs("</figure>\n", to);
    return 1;
}

static const chart row_gain = {
    "Gain: how much a signal can grow",
    "row sums of the product of all residual maps, mean over tokens; dashed: largest token; "
    "log axis",
    "step",
    RUN_ROW_GAIN,
    RUN_ROW_GAIN_MAX,
    CURVE_GEOMETRIC,
    0};
static const chart layer_norms = {"Gradient norm by layer",
                                  "at the last measurement; log axis",
                                  "layer",
                                  RUN_COLUMNS,
                                  RUN_COLUMNS,
                                  CURVE_GEOMETRIC,
                                  0};
static const chart others[] = {
    {"Training loss", "nats per byte, smoothed", "step", RUN_LOSS, RUN_COLUMNS, CURVE_SMOOTH, 1},
    {"Validation loss", "nats per byte", "step", RUN_VAL_LOSS, RUN_COLUMNS, CURVE_MEAN, 0},
    {"Gain backward: how much a gradient can grow",
     "column sums of the same product; dashed: largest token; log axis", "step", RUN_COLUMN_GAIN,
     RUN_COLUMN_GAIN_MAX, CURVE_GEOMETRIC, 0},
    {"Gradient norm", "of all parameters, before clipping; log axis", "step", RUN_GRADIENT_NORM, RUN_COLUMNS,
     CURVE_GEOMETRIC, 0},
};

/* ---- bars ---------------------------------------------------------------------------------------------------------------- */

typedef struct bars {
    const char *title, *note, *format;
    double unit;
    size_t figure; /* offset of a spread in run_kind */
} bars;

static const bars all_bars[] = {
    {"Time of a step", "median of a run, mean over runs", "%.1f ms", 1e3, offsetof(run_kind, seconds)},
    {"Memory", "parameters, optimiser and activations", "%.1f MiB", 0x1p-20, offsetof(run_kind, bytes)},
};

static const spread *figure_of(const run_kind *k, const bars *b)
{
    return (const spread *)(const void *)((const char *)k + b->figure);
}

static int put_bars(const report *r, const bars *b, FILE *to)
{
    enum { MOST_PERCENT = 1000000 };
    double most = 0, first = b->unit * figure_of(&r->kinds[0], b)->mean;
    for (int i = 0; i < r->num_kinds; i++) {
        double value = b->unit * figure_of(&r->kinds[i], b)->mean;
        most = plot_shows(value, 0) && value > most ? value : most;
    }
    if (!(most > 0)) return 0;
    card_open(to, b->title, b->note);
    for (int i = 0; i < r->num_kinds; i++) {
        double value = b->unit * figure_of(&r->kinds[i], b)->mean, more = 100 * (value / first - 1);
        int shown = plot_shows(value, 0) && value > 0;
        fputs("<div class=\"bar\"><span>", to);
        html_text(to, r->kinds[i].name);
        fprintf(to, "</span><i style=\"width:%.1f%%;background:var(--c%d)\"></i><small>",
                shown ? 100 * (value / most) : 0, i % PLOT_COLOURS);
        print_value(to, b->format, value);
        if (i > 0 && shown && first > 0 && fabs(more) < MOST_PERCENT) fprintf(to, " (%+.1f %%)", more);
        fputs("</small></div>\n", to);
    }
    fputs("</figure>\n", to);
    return 1;
}

/* ---- residual mixes ------------------------------------------------------------------------------------------------------ */

static void put_map(const double *mix, int n, int site, FILE *to)
{
    enum { WITH_NUMBERS = 8 };
    fprintf(to, "<table%s><caption>layer %d, %s</caption>\n", n > WITH_NUMBERS ? " class=\"many\"" : "", site / 2,
            site % 2 ? "MLP" : "attention");
    for (int i = 0; i < n; i++) {
        fputs("<tr>", to);
        for (int o = 0; o < n; o++) {
            double v = mix[i * n + o];
            fprintf(to, "<td%s style=\"--v:%.3f\" title=\"from stream %d to stream %d\">",
                    plot_shows(v, 0) && v < 0 ? " class=\"minus\"" : "",
                    plot_shows(v, 0) ? 0.75 * fmin(fabs(v), 1) : 0, i, o);
            if (n <= WITH_NUMBERS) print_value(to, "%.2f", v);
            fputs("</td>", to);
        }
        fputs("</tr>", to);
    }
    fputs("</table>\n", to);
}

/* First, middle and last site of a kind's first run that has mixes. */
static int put_maps(const report *r, int index, FILE *to)
{
    const run_kind *kind = &r->kinds[index];
    const run_record *log = NULL;
    for (int i = 0; i < kind->count && !log; i++)
        if (kind->runs[i]->log.num_mixes) log = &kind->runs[i]->log;
    if (!log) return 0;
    const int sites[3] = {0, log->num_mixes / 2, log->num_mixes - 1};
    char seed[64];
    run_option_text(log, "seed", seed, sizeof seed);
    fputs("<figure class=\"card map\" style=\"--map:var(--c", to);
    fprintf(to, "%d)\"><h3>", index % PLOT_COLOURS);
    html_text(to, kind->name);
    if (*seed) {
        fputs(", seed ", to);
        html_text(to, seed);
    }
    fputs("</h3><div class=\"maps\">", to);
    for (int i = 0; i < 3; i++)
        if (i == 0 || sites[i] > sites[i - 1])
            put_map(log->mixes + (size_t)sites[i] * (size_t)(log->streams * log->streams), log->streams, sites[i],
                    to);
    fputs("</div></figure>\n", to);
    return 1;
}

static void all_maps(const report *r, FILE *to)
{
    enum { MOST = 6 };
    int shown = 0, any = 0;
    for (int i = 0; i < r->num_kinds; i++)
        for (int k = 0; k < r->kinds[i].count; k++) any |= r->kinds[i].runs[k]->log.num_mixes > 0;
    if (!any) return;
    fputs("<h2>Residual mix</h2><p>What a stream (row) hands to a stream (column) at a site: mean over the tokens "
          "of the "
          "last measured step. Grey: below zero.</p><div class=\"grid\">\n",
          to);
    for (int i = 0; i < r->num_kinds && shown < MOST; i++) shown += put_maps(r, i, to);
    fputs("</div>\n", to);
}

/* ---- runs that are not as the others -------------------------------------------------------------------------------------- */

static void name_unfinished(const report *r, FILE *to)
{
    int told = 0;
    for (int i = 0; i < r->num_kinds; i++)
        for (int k = r->kinds[i].finished; k < r->kinds[i].count; k++) {
            const report_run *run = r->kinds[i].runs[k];
            fputs(told++ ? ", " : "<p>Unfinished: ", to);
            html_text(to, run->name);
            fprintf(to, " (%.15g of %.15g steps)", run_steps_done(&run->log), run_steps_wanted(&run->log));
        }
    if (told)
        fputs(". Losses and gradient norms by layer are of the finished runs of a kind, where it has one; a kind "
              "without one is not compared.</p>\n",
              to);
}

/* ---- the page ------------------------------------------------------------------------------------------------------------ */

void page_write(const report *r, const char *left_out, FILE *to)
{
    fputs("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
          "content=\"width=device-width,initial-scale=1\"><title>weft: training</title>\n",
          to);
    fputs(style, to);
    fputs("</head><body>\n<h1>", to);
    headline(r, to);
    fputs("</h1>\n<p>", to);
    headline_figures(r, to);
    fputs("</p>\n<p>", to);
    headline_options(r, to);
    fprintf(to, ". weft %s.</p>\n<ul class=\"keys\">", weft_version());
    for (int i = 0; i < r->num_kinds; i++) {
        fputs("<li>", to);
        key(to, i, r->kinds[i].name);
        fputs("</li>", to);
    }
    fputs("</ul>\n<div class=\"grid hero\">\n", to);
    int shown = put_chart(r, &row_gain, to) + put_chart(r, &layer_norms, to);
    fputs("</div>\n", to);
    if (*left_out) {
        fputs("<p>Left out: ", to);
        html_text(to, left_out);
        fputs("</p>\n", to);
    }
    name_unfinished(r, to);
    fputs("<h2>Figures</h2><p>A line is the mean over the runs of a kind, its band reaches from the least to the "
          "largest. In the table losses, times and memory are means over runs, gains the largest of all. loss: "
          "mean of "
          "the last tenth of the steps; gain: mean over tokens, in brackets the largest token; layers: largest by "
          "smallest gradient norm of a layer; MiB: parameters, optimiser and activations, and of it streams.</p>\n",
          to);
    kinds_table(r, to);
    fputs("<h2>Training</h2><div class=\"grid\">\n", to);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) shown += put_chart(r, &others[i], to);
    for (size_t i = 0; i < sizeof all_bars / sizeof *all_bars; i++) shown += put_bars(r, &all_bars[i], to);
    fputs("</div>\n", to);
    if (!shown) fputs("<p>The logs hold no figure that can be shown.</p>\n", to);
    all_maps(r, to);
    runs_table(r, to);
    fputs(
        "<p>Row and column gain: the largest absolute row and column sum of the product of all residual maps, from "
        "the first layer to the last; 1 is what a plain residual has. Times and memory are compared with the "
        "first kind. A figure that is not finite, or beyond 1e100, is left out.</p>\n</body></html>\n",
        to);
}
