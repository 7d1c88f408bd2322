/* SPDX-License-Identifier: Apache-2.0 */
#include "report/headline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "report/plot.h"

void headline_factor(FILE *to, double factor)
{
    if (factor < 10)
        fprintf(to, "%.2f", factor);
    else if (factor < 100)
        fprintf(to, "%.1f", factor);
    else if (factor < 1e5)
        fprintf(to, "%.0f", factor);
    else {
        int power = (int)floor(log10(factor));
        fprintf(to, "%.1f\u00b710<sup>%d</sup>", factor / pow(10, power), power);
    }
}

/* "686", or "240 to 1949" where runs differ in what is shown of them. */
static void factor_range(FILE *to, const spread *s)
{
    headline_factor(to, s->low);
    if (!(s->high > 1.005 * s->low)) return;
    fputs(" to ", to);
    headline_factor(to, s->high);
}

static void bold(FILE *to, const char *name)
{
    fputs("<b>", to);
    html_text(to, name);
    fputs("</b>", to);
}

void headline_progress(const run_kind *k, FILE *to)
{
    fprintf(to, "%.15g", k->unfinished.low);
    if (k->unfinished.high > k->unfinished.low) fprintf(to, " to %.15g", k->unfinished.high);
    fprintf(to, " of %.15g", run_steps_wanted(&k->runs[k->finished]->log));
}

/* The name of a kind, and how far its runs are where none is finished. */
static void kind_so_far(FILE *to, const run_kind *k)
{
    bold(to, k->name);
    if (k->finished) return;
    fputs(" (", to);
    headline_progress(k, to);
    fputs(" steps)", to);
}

/* "a, b and c" */
static const char *between(int index, int count)
{
    return index == 0 ? "" : index + 1 == count ? " and " : ", ";
}

/* ---- losses -------------------------------------------------------------------------------------------------------------- */

/* Only what is finished is compared. */
static int is_compared(const report *r, int kind)
{
    return r->kinds[kind].finished > 0;
}

/* Validation where all kinds have it that are compared, or all where fewer than two are, else the last tenth of training. */
static const spread *loss_of(const report *r, int kind)
{
    int validated = 1, compared = 0;
    for (int i = 0; i < r->num_kinds; i++) compared += is_compared(r, i);
    for (int i = 0; i < r->num_kinds; i++)
        if (compared < 2 || is_compared(r, i)) validated &= r->kinds[i].validation.count > 0;
    return validated ? &r->kinds[kind].validation : &r->kinds[kind].loss;
}

static const char *loss_name(const report *r)
{
    return loss_of(r, 0) == &r->kinds[0].validation ? "validation loss" : "training loss, last tenth";
}

typedef struct ranking {
    int best, second; /* kinds with the lowest and the next lowest mean loss; -1: there is none */
    int least_seeds;  /* of the two */
    double width;     /* the larger of the two ranges over seeds */
    double gap;       /* from the one mean to the other */
} ranking;

static ranking rank_losses(const report *r)
{
    ranking k = {.best = -1, .second = -1};
    for (int i = 0; i < r->num_kinds; i++) {
        const spread *s = loss_of(r, i);
        if (!s->count || !is_compared(r, i)) continue;
        if (k.best < 0 || s->mean < loss_of(r, k.best)->mean)
            k.second = k.best, k.best = i;
        else if (k.second < 0 || s->mean < loss_of(r, k.second)->mean)
            k.second = i;
    }
    if (k.second < 0) return k;
    const spread *one = loss_of(r, k.best), *two = loss_of(r, k.second);
    k.gap = two->mean - one->mean;
    k.width = fmax(one->high - one->low, two->high - two->low);
    k.least_seeds = one->seeds < two->seeds ? one->seeds : two->seeds;
    return k;
}

static void tell_losses(const report *r, FILE *to)
{
    ranking k = rank_losses(r);
    if (k.second < 0) return;
    bold(to, r->kinds[k.best].name);
    fprintf(to, " ends with the lowest loss");
    if (k.least_seeds < 2)
        fputs(", with one seed", to);
    else if (k.gap <= k.width) {
        fputs(", but no lower than ", to);
        bold(to, r->kinds[k.second].name);
        fputs(" by more than seeds differ", to);
    }
}

/* ---- gains --------------------------------------------------------------------------------------------------------------- */

/* The kinds with several streams whose gain is the largest and the smallest; 0 where they are about one. */
static int extremes(const report *r, int *most, int *least)
{
    *most = *least = -1;
    for (int i = 0; i < r->num_kinds; i++) {
        const run_kind *k = &r->kinds[i];
        if (!k->gain.count || run_streams(&k->runs[0]->log) < 2) continue;
        if (*most < 0 || k->gain.high > r->kinds[*most].gain.high) *most = i;
        if (*least < 0 || k->gain.high < r->kinds[*least].gain.high) *least = i;
    }
    return *most >= 0 && r->kinds[*most].gain.high > 1.05 * r->kinds[*least].gain.high;
}

static int common_layers(const report *r, char *text, size_t size)
{
    return report_common(r, "layers", text, size) && *text;
}

static void tell_gains(const report *r, int most, int least, FILE *to)
{
    char layers[64];
    fputs("Through ", to);
    if (common_layers(r, layers, sizeof layers)) {
        html_text(to, layers);
        fputs(strcmp(layers, "1") ? " layers" : " layer", to);
    } else
        fputs("all layers", to);
    fputs(" a signal can grow ", to);
    factor_range(to, &r->kinds[most].gain);
    fputs("-fold with ", to);
    kind_so_far(to, &r->kinds[most]);
    fputs(" and ", to);
    factor_range(to, &r->kinds[least].gain);
    fputs("-fold with ", to);
    kind_so_far(to, &r->kinds[least]);
}

void headline(const report *r, FILE *to)
{
    int most, least;
    ranking losses = rank_losses(r);
    if (extremes(r, &most, &least)) {
        tell_gains(r, most, least, to);
        if (losses.second >= 0) fputs("; ", to);
        tell_losses(r, to);
    } else if (losses.second >= 0) {
        tell_losses(r, to);
    } else {
        for (int i = 0; i < r->num_kinds; i++) {
            const run_kind *k = &r->kinds[i];
            fputs(between(i, r->num_kinds), to);
            kind_so_far(to, k);
            if (loss_of(r, i)->count)
                fprintf(to, " %s at a %s of %.4g", k->finished ? "ends" : "is", loss_name(r), loss_of(r, i)->mean);
        }
    }
    fputc('.', to);
}

void headline_figures(const report *r, FILE *to)
{
    int told = 0;
    ranking losses = rank_losses(r);
    for (int i = 0; i < r->num_kinds; i++) told += r->kinds[i].layers.count > 0;
    if (told) fputs("The largest gradient norm of a layer is ", to);
    for (int i = 0, k = 0; i < r->num_kinds; i++) {
        if (!r->kinds[i].layers.count) continue;
        fputs(between(k++, told), to);
        factor_range(to, &r->kinds[i].layers);
        fputs(" times the smallest with ", to);
        html_text(to, r->kinds[i].name);
    }
    if (told) fputs(". ", to);
    if (losses.second < 0) return;
    fprintf(to, "Mean %s: ", loss_name(r));
    for (int i = 0, k = 0; i < r->num_kinds; i++) {
        const spread *s = loss_of(r, i);
        if (!s->count || !is_compared(r, i)) continue;
        fputs(k++ ? ", " : "", to);
        html_text(to, r->kinds[i].name);
        fprintf(to, " %.4f", s->mean);
        if (s->count > 1) fprintf(to, " (%.4f to %.4f, %d runs)", s->low, s->high, s->count);
    }
    fputs(". ", to);
}

/* ---- options ------------------------------------------------------------------------------------------------------------- */

/* Is it the first of the runs with its seed? */
static int shows_seed(const report *r, int index)
{
    const run_record *log = &r->runs[index]->log;
    for (int i = 0; i < index; i++)
        if (run_has_seed_of(&r->runs[i]->log, log)) return 0;
    return run_record_option(log, "seed") != NULL;
}

/* Seeds in the order of the runs, each once. */
static void tell_seeds(const report *r, FILE *to)
{
    enum { MOST = 12 };
    int count = 0, told = 0;
    for (int i = 0; i < r->num_runs; i++) count += shows_seed(r, i);
    for (int i = 0; i < r->num_runs; i++) {
        if (!shows_seed(r, i)) continue;
        if (++told > MOST) {
            fputs(", \u2026", to);
            return;
        }
        fputs(told > 1 ? ", " : count > 1 ? "; seeds " : "; seed ", to);
        html_text(to, run_record_option(&r->runs[i]->log, "seed"));
    }
}

void headline_options(const report *r, FILE *to)
{
    static const struct {
        const char *option, *before, *behind;
    } parts[] = {{"layers", "", " layers"},    {"channels", "", " channels"}, {"context", "context ", ""},
                 {"batch", "batch ", ""},      {"steps", "", " steps"},       {"rate", "rate ", ""},
                 {"rate-end", "down to ", ""}, {"mixer", "mixer ", ""},       {"optimizer", "", ""},
                 {"backend", "on ", ""}};
    char text[64], rate[64] = "";
    int told = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!report_common(r, parts[i].option, text, sizeof text) || !*text) continue;
        if (!strcmp(parts[i].option, "rate-end") && !strcmp(text, rate)) continue; /* a constant rate */
        if (!strcmp(parts[i].option, "rate")) memcpy(rate, text, sizeof rate);
        fprintf(to, "%s%s", told++ ? ", " : "", parts[i].before);
        html_text(to, text);
        fputs(parts[i].behind, to);
    }
    for (int i = 0; i < r->num_kinds; i++) {
        int streams = run_streams(&r->kinds[i].runs[0]->log);
        fputs(told++ ? i ? ", " : "; " : "", to);
        html_text(to, r->kinds[i].name);
        fprintf(to, " with %d stream%s", streams, streams == 1 ? "" : "s");
    }
    tell_seeds(r, to);
    fprintf(to, "; %d run%s", r->num_runs, r->num_runs == 1 ? "" : "s");
}
