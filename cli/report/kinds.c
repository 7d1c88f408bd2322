/* SPDX-License-Identifier: Apache-2.0 */
#include "report/kinds.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/utf8.h"
#include "report/plot.h"

/* ---- options of a run ---------------------------------------------------------------------------------------------------- */

/* What may differ between runs of one kind: what they draw at random, how fast they are, and what they write down. */
static const char *const of_the_run[] = {"seed", "threads", "val-every",  "val-batches", "save-every",
                                         "keep", "poison",  "gain-every", NULL};

static int is_of_the_run(const char *name)
{
    for (int i = 0; of_the_run[i]; i++)
        if (!strcmp(of_the_run[i], name)) return 1;
    return 0;
}

static const char *residual_of(const run_record *r)
{
    const char *residual = run_record_option(r, "residual");
    return residual ? residual : "";
}

int run_streams(const run_record *r)
{
    const char *text = run_record_option(r, "streams");
    long streams = text ? strtol(text, NULL, 10) : 0;
    if (r->num_mixes) return r->streams;
    if (streams > 0 && streams < 1000) return (int)streams;
    return strcmp(residual_of(r), "residual") ? 4 : 1;
}

double run_steps_done(const run_record *r)
{
    return r->column[RUN_STEP][r->count - 1];
}

double run_steps_wanted(const run_record *r)
{
    const char *text = run_record_option(r, "steps");
    double steps = text ? strtod(text, NULL) : 0;
    return plot_shows(steps, 0) ? steps : 0;
}

static int is_finished(const run_record *r)
{
    return run_steps_done(r) >= run_steps_wanted(r);
}

int run_has_seed_of(const run_record *a, const run_record *b)
{
    const char *one = run_record_option(a, "seed"), *other = run_record_option(b, "seed");
    return one && other ? !strcmp(one, other) : one == other;
}

void run_option_text(const run_record *r, const char *name, char *text, size_t size)
{
    const char *value = run_record_option(r, name);
    char *end, used[16];
    if (value && !strcmp(name, "streams")) {
        snprintf(used, sizeof used, "%d", run_streams(r));
        value = used;
    }
    double number = value ? strtod(value, &end) : 0;
    if (value && *value && !*end && strspn(value, "+-.0123456789e") == strlen(value))
        snprintf(text, size, "%.6g", number);
    else
        utf8_copy(text, size, value ? value : "");
}

int report_common(const report *r, const char *name, char *text, size_t size)
{
    const char *first = run_record_option(&r->runs[0]->log, name);
    for (int i = 1; first && i < r->num_runs; i++) {
        const char *other = run_record_option(&r->runs[i]->log, name);
        if (!other || strcmp(first, other) != 0) return 0;
    }
    if (first) run_option_text(&r->runs[0]->log, name, text, size);
    return first != NULL;
}

/* Have both runs the option, with one value, or no use for it? Streams as they are used. */
static int is_shared(const run_record *a, const run_record *b, const char *name)
{
    const char *one = run_record_option(a, name), *other = run_record_option(b, name);
    /* Other connections have no first mix to choose, and their older logs do not name it. */
    const int first_mix = !strncmp(residual_of(a), "mhc", 3) || !strcmp(residual_of(a), "independent");
    if (!strcmp(name, "first-mix") && !first_mix) return 1;
    if (!one || !other) return 0;
    return !strcmp(name, "streams") ? run_streams(a) == run_streams(b) : !strcmp(one, other);
}

/* Has b every option of a, with its value? */
static int covers(const run_record *a, const run_record *b)
{
    for (int i = 0; i < a->num_options; i++)
        if (!is_of_the_run(a->options[i].name) && !is_shared(a, b, a->options[i].name)) return 0;
    return 1;
}

/* A log without options says nothing about its kind. */
static int is_same_kind(const run_record *a, const run_record *b)
{
    return a->num_options > 0 && b->num_options > 0 && covers(a, b) && covers(b, a);
}

/* ---- figures ------------------------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of the values that are shown; NaN where there is none. */
static double median(const run_record *r, run_column column)
{
    double *sorted = malloc((r->count ? r->count : 1) * sizeof *sorted), result = (double)NAN;
    size_t used = 0;
    for (size_t i = 0; sorted && i < r->count; i++)
        if (plot_shows(r->column[column][i], 0)) sorted[used++] = r->column[column][i];
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
    plot_cover(&low, &high, r->column[column], r->count, 1); /* a gain is above zero */
    return high;
}

/* The last entry of the norms is what lies outside the layers. */
static int num_layers(const run_record *r)
{
    return r->num_layer_norms > 0 ? r->num_layer_norms - 1 : 0;
}

static double layer_spread(const run_record *r, run_column unused)
{
    double low = INFINITY, high = -INFINITY;
    (void)unused;
    plot_cover(&low, &high, r->layer_norms, (size_t)num_layers(r), 1);
    return low <= high ? high / low : (double)NAN;
}

typedef double figure(const run_record *r, run_column column);

/* The figure over the runs of a kind from the first to before the last. */
static spread spread_between(const run_kind *kind, int first, int end, figure *f, run_column column)
{
    spread s = {.low = INFINITY, .high = -INFINITY};
    for (int i = first; i < end; i++) {
        double value = f(&kind->runs[i]->log, column);
        if (!plot_shows(value, 0)) continue;
        s.mean += (value - s.mean) / ++s.count;
        s.low = fmin(s.low, value);
        s.high = fmax(s.high, value);
    }
    if (!s.count) s.mean = s.low = s.high = (double)NAN;
    return s;
}

static spread spread_of(const run_kind *k, figure *f, run_column column)
{
    return spread_between(k, 0, k->count, f, column);
}

/* How many runs of a kind say how it ends. */
static int num_telling(const run_kind *k)
{
    return k->finished ? k->finished : k->count;
}

static spread spread_at_end(const run_kind *k, figure *f, run_column column)
{
    return spread_between(k, 0, num_telling(k), f, column);
}

/* Is there a run before the index with that seed and the figure? */
static int is_seed_again(const run_kind *k, int index, figure *f, run_column column)
{
    for (int i = 0; i < index; i++)
        if (run_has_seed_of(&k->runs[i]->log, &k->runs[index]->log) && plot_shows(f(&k->runs[i]->log, column), 0))
            return 1;
    return 0;
}

static spread loss_at_end(const run_kind *k, figure *f, run_column column)
{
    spread s = spread_at_end(k, f, column);
    for (int i = 0; i < num_telling(k); i++)
        s.seeds += plot_shows(f(&k->runs[i]->log, column), 0) && !is_seed_again(k, i, f, column);
    return s;
}

static spread gain_of(const run_kind *k, run_column column)
{
    spread all = spread_of(k, largest, column), end = spread_at_end(k, largest, column);
    if (end.count) all.low = end.low;
    return all;
}

/* Finished runs to the front, in their order. */
static void put_finished_first(run_kind *k)
{
    for (int i = 0; i < k->count; i++) {
        report_run *run = k->runs[i];
        if (!is_finished(&run->log)) continue;
        memmove(k->runs + k->finished + 1, k->runs + k->finished, (size_t)(i - k->finished) * sizeof *k->runs);
        k->runs[k->finished++] = run;
    }
}

static void measure(run_kind *k)
{
    put_finished_first(k);
    k->unfinished = spread_between(k, k->finished, k->count, last, RUN_STEP);
    k->steps = spread_at_end(k, last, RUN_STEP);
    k->loss = loss_at_end(k, mean_of_last_tenth, RUN_LOSS);
    k->validation = loss_at_end(k, last, RUN_VAL_LOSS);
    k->gain = gain_of(k, RUN_ROW_GAIN);
    k->gain_max = gain_of(k, RUN_ROW_GAIN_MAX);
    k->column_gain = gain_of(k, RUN_COLUMN_GAIN);
    k->column_gain_max = gain_of(k, RUN_COLUMN_GAIN_MAX);
    k->layers = spread_at_end(k, layer_spread, RUN_COLUMNS);
    k->seconds = spread_of(k, median, RUN_SECONDS);
    k->tokens_per_s = spread_of(k, median, RUN_TOKENS_PER_S);
    k->bytes = spread_of(k, last, RUN_BYTES);
    k->stream_bytes = spread_of(k, last, RUN_STREAM_BYTES);
}

run_kind kind_of_one(report_run **run)
{
    run_kind k = {.runs = run, .count = 1};
    measure(&k);
    return k;
}

/* ---- kinds --------------------------------------------------------------------------------------------------------------- */

static int rank_of(const run_kind *k)
{
    static const char *const order[] = {"residual", "hc", "independent", "mhc", "mhc_single_pass"};
    enum { KNOWN = sizeof order / sizeof *order };
    int rank = 0;
    while (rank < KNOWN && strcmp(order[rank], residual_of(&k->runs[0]->log)) != 0) rank++;
    return rank;
}

/* By insertion, which keeps the order of equals. */
static void put_in_order(report *r)
{
    for (int i = 1; i < r->num_kinds; i++) {
        run_kind k = r->kinds[i];
        int at = i;
        for (; at > 0 && rank_of(&r->kinds[at - 1]) > rank_of(&k); at--) r->kinds[at] = r->kinds[at - 1];
        r->kinds[at] = k;
    }
}

/* The residual connection, and the options in which another kind with the same connection differs. */
static void name_kind(report *r, int index)
{
    run_kind *k = &r->kinds[index];
    const run_record *mine = &k->runs[0]->log;
    utf8_copy(k->name, sizeof k->name, *residual_of(mine) ? residual_of(mine) : k->runs[0]->name);
    for (int i = 0; i < mine->num_options; i++) {
        const char *name = mine->options[i].name;
        int differs = 0;
        for (int other = 0; other < r->num_kinds; other++) {
            const run_record *log = &r->kinds[other].runs[0]->log;
            if (other != index && !strcmp(residual_of(log), residual_of(mine)) && !is_of_the_run(name))
                differs |= !is_shared(log, mine, name);
        }
        char value[64], part[128];
        run_option_text(mine, name, value, sizeof value);
        size_t used = strlen(k->name);
        snprintf(part, sizeof part, ", %s %s", name, value);
        if (differs) utf8_copy(k->name + used, sizeof k->name - used, part);
    }
    for (int other = 0; other < index; other++)
        if (!strcmp(r->kinds[other].name, k->name) && *residual_of(mine)) {
            size_t used = strlen(k->name);
            char part[96];
            snprintf(part, sizeof part, ", %s", k->runs[0]->name);
            utf8_copy(k->name + used, sizeof k->name - used, part);
            break;
        }
}

int report_sort(report *r)
{
    r->kinds = calloc((size_t)r->num_runs, sizeof *r->kinds);
    if (!r->kinds) return 0;
    for (int i = 0; i < r->num_runs; i++) {
        int at = 0;
        while (at < r->num_kinds && !is_same_kind(&r->kinds[at].runs[0]->log, &r->runs[i]->log)) at++;
        run_kind *k = &r->kinds[at];
        report_run **more = realloc(k->runs, (size_t)(k->count + 1) * sizeof *more);
        if (!more) return 0;
        k->runs = more;
        k->runs[k->count++] = r->runs[i];
        if (at == r->num_kinds) r->num_kinds++;
    }
    put_in_order(r);
    for (int i = 0; i < r->num_kinds; i++) {
        name_kind(r, i);
        measure(&r->kinds[i]);
    }
    return 1;
}

void report_close(report *r)
{
    for (int i = 0; r->kinds && i < r->num_kinds; i++) free(r->kinds[i].runs);
    for (int i = 0; i < r->num_runs; i++) {
        run_record_close(&r->runs[i]->log);
        free(r->runs[i]);
    }
    free(r->runs);
    free(r->kinds);
    *r = (report){0};
}

/* ---- curves -------------------------------------------------------------------------------------------------------------- */

typedef struct point {
    double x, y;
} point;

static int by_x(const void *a, const void *b)
{
    double x = ((const point *)a)->x, y = ((const point *)b)->x;
    return (x > y) - (x < y);
}

/* Points of all runs, sorted by x, become at most so many of a curve. */
static int gather(curve *c, point *points, size_t count, int geometric)
{
    enum { MOST = 600 };
    size_t places = 0;
    qsort(points, count, sizeof *points, by_x);
    for (size_t i = 0; i < count; i++) places += i == 0 || points[i].x > points[i - 1].x;
    size_t together = (places + MOST - 1) / MOST, room = count ? count : 1;
    c->x = malloc(room * sizeof *c->x);
    c->mean = malloc(room * sizeof *c->mean);
    c->low = malloc(room * sizeof *c->low);
    c->high = malloc(room * sizeof *c->high);
    if (!c->x || !c->mean || !c->low || !c->high) return 0;
    for (size_t i = 0; i < count;) {
        double mean = 0, low = INFINITY, high = -INFINITY;
        size_t used = 0, seen = 0;
        for (; i < count; i++) {
            if (used == 0 || points[i].x > points[i - 1].x) seen++;
            if (seen > together) break;
            double y = geometric ? log(points[i].y) : points[i].y;
            mean += (y - mean) / (double)++used;
            low = fmin(low, points[i].y);
            high = fmax(high, points[i].y);
        }
        c->x[c->count] = points[i - 1].x;
        /* Rounding must not take the mean out of the band. */
        c->mean[c->count] = fmin(fmax(geometric ? exp(mean) : mean, low), high);
        c->low[c->count] = low;
        c->high[c->count++] = high;
    }
    return 1;
}

/* The values within a fiftieth of the run on either side of a place that moves on. What their running sum loses to rounding is
 * little against the largest of all values, and that is what the axis covers. */
typedef struct window {
    const double *values;
    size_t count, first, end, used; /* used: values that are shown, of those from first to before end */
    double sum;
} window;

static double window_mean(window *w, size_t at)
{
    size_t reach = w->count / 50;
    for (; w->end < w->count && w->end <= at + reach; w->end++)
        if (plot_shows(w->values[w->end], 0)) w->sum += w->values[w->end], w->used++;
    for (; w->first + reach < at; w->first++)
        if (plot_shows(w->values[w->first], 0)) w->sum -= w->values[w->first], w->used--;
    return w->sum / (double)w->used;
}

int curve_of(curve *c, const run_kind *kind, run_column column, curve_form form)
{
    size_t room = 1, count = 0;
    int log_y = form == CURVE_GEOMETRIC;
    *c = (curve){0};
    for (int i = 0; i < kind->count; i++) room += kind->runs[i]->log.count;
    point *points = malloc(room * sizeof *points);
    for (int i = 0; points && i < kind->count; i++) {
        const run_record *r = &kind->runs[i]->log;
        window w = {.values = r->column[column], .count = r->count};
        for (size_t k = 0; k < r->count; k++) {
            double y = r->column[column][k];
            if (!plot_shows(y, log_y)) continue;
            if (form == CURVE_SMOOTH) y = window_mean(&w, k);
            points[count++] = (point){r->column[RUN_STEP][k], y};
        }
    }
    int ok = points && gather(c, points, count, log_y);
    free(points);
    return ok;
}

int curve_of_layers(curve *c, const run_kind *kind)
{
    size_t room = 1, count = 0;
    *c = (curve){0};
    for (int i = 0; i < num_telling(kind); i++) room += (size_t)num_layers(&kind->runs[i]->log);
    point *points = malloc(room * sizeof *points);
    for (int i = 0; points && i < num_telling(kind); i++) {
        const run_record *r = &kind->runs[i]->log;
        for (int k = 0; k < num_layers(r); k++)
            if (plot_shows(r->layer_norms[k], 1)) points[count++] = (point){k, r->layer_norms[k]};
    }
    int ok = points && gather(c, points, count, 1);
    free(points);
    return ok;
}

void curve_close(curve *c)
{
    free(c->x);
    free(c->mean);
    free(c->low);
    free(c->high);
    *c = (curve){0};
}
