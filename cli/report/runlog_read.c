/* SPDX-License-Identifier: Apache-2.0 */
#include "report/runlog_read.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/files.h"
#include "common/json.h"
#include "common/utf8.h"

enum { MOST_OPTIONS = 128, MOST_STREAMS = 1024 };

static const char *const names[RUN_COLUMNS] = {
    [RUN_STEP] = "step",
    [RUN_LOSS] = "loss",
    [RUN_VAL_LOSS] = "val_loss",
    [RUN_RATE] = "rate",
    [RUN_GRADIENT_NORM] = "gradient_norm",
    [RUN_SECONDS] = "seconds",
    [RUN_TOKENS_PER_S] = "tokens_per_s",
    [RUN_ROW_GAIN] = "row_gain",
    [RUN_ROW_GAIN_MAX] = "row_gain_max",
    [RUN_COLUMN_GAIN] = "column_gain",
    [RUN_COLUMN_GAIN_MAX] = "column_gain_max",
    [RUN_BYTES] = "bytes",
    [RUN_STREAM_BYTES] = "stream_bytes",
    [RUN_PEAK_BYTES] = "peak_bytes",
};

static int add_row(run_record *r)
{
    if (r->count == r->room) {
        size_t room = r->room ? r->room * 2 : 256;
        for (int c = 0; c < RUN_COLUMNS; c++) {
            double *more = realloc(r->column[c], room * sizeof *more);
            if (!more) return 0;
            r->column[c] = more;
        }
        r->room = room;
    }
    for (int c = 0; c < RUN_COLUMNS; c++) r->column[c][r->count] = (double)NAN;
    r->count++;
    return 1;
}

static run_option *find_option(const run_record *r, const char *name)
{
    for (int i = 0; i < r->num_options; i++)
        if (!strcmp(r->options[i].name, name)) return &r->options[i];
    return NULL;
}

const char *run_record_option(const run_record *r, const char *name)
{
    const run_option *o = find_option(r, name);
    return o ? o->value : NULL;
}

/* 0 without memory. */
static int set_option(run_record *r, const char *name, const char *value)
{
    char shortened[sizeof r->options->name];
    utf8_copy(shortened, sizeof shortened, name);
    run_option *o = find_option(r, shortened);
    if (!o) {
        run_option *more = realloc(r->options, (size_t)(r->num_options + 1) * sizeof *more);
        if (!more) return 0;
        r->options = more;
        o = &more[r->num_options++];
        memcpy(o->name, shortened, sizeof shortened);
    }
    utf8_copy(o->value, sizeof o->value, value);
    return 1;
}

/* A later line of options with other steps: the run was made longer, and its schedule is another from there on. */
static int note_longer(run_record *r, const char *steps)
{
    const char *before = run_record_option(r, "steps"), *at = run_record_option(r, RUN_LONGER);
    char text[sizeof r->options->value] = "", part[48];
    if (!before || !r->count || !strcmp(before, steps)) return 1;
    if (at) utf8_copy(text, sizeof text, at);
    size_t used = strlen(text);
    snprintf(part, sizeof part, "%s%.0f", at ? " and " : "", r->column[RUN_STEP][r->count - 1]);
    utf8_copy(text + used, sizeof text - used, part);
    return set_option(r, RUN_LONGER, text);
}

/* What logs mean that are older than a choice. */
static int add_first_choices(run_record *r)
{
    static const struct {
        const char *name, *value;
    } choices[] = {{"mixer", "attention"}, {"key-heads", "0"}, {"conv-width", "0"}, {"first-mix", "uniform"}};
    const char *residual = run_record_option(r, "residual"); /* until an option is added */
    if (!residual) return 1;
    const int mixes = !strncmp(residual, "mhc", 3);
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        if (run_record_option(r, choices[i].name) || (!mixes && !strcmp(choices[i].name, "first-mix"))) continue;
        if (!set_option(r, choices[i].name, choices[i].value)) return 0;
    }
    return 1;
}

/* {"name":"value", ...} */
static int parse_options(run_record *r, json *j, char *key, char *value)
{
    size_t length;
    if (!json_take(j, '{')) return 0;
    if (json_peek(j) == '}') return json_take(j, '}');
    do {
        if (!json_string(j, key, &length) || !json_take(j, ':') || !json_string(j, value, &length)) return 0;
        if (r->num_options >= MOST_OPTIONS) continue;
        if ((!strcmp(key, "steps") && !note_longer(r, value)) || !set_option(r, key, value))
            return json_fail(j, "out of memory");
    } while (json_peek(j) == ',' && json_take(j, ','));
    return json_take(j, '}');
}

/* [number, ...], put behind what the array holds. */
static int parse_numbers(json *j, double **array, int *count)
{
    if (!json_take(j, '[')) return 0;
    if (json_peek(j) == ']') return json_take(j, ']');
    do {
        double *more = *count == INT_MAX ? NULL : realloc(*array, (size_t)(*count + 1) * sizeof *more);
        if (!more) return json_fail(j, "out of memory");
        *array = more;
        if (!json_number(j, &more[(*count)++])) return 0;
    } while (json_peek(j) == ',' && json_take(j, ','));
    return json_take(j, ']');
}

static int parse_norms(run_record *r, json *j)
{
    r->num_layer_norms = 0;
    return parse_numbers(j, &r->layer_norms, &r->num_layer_norms);
}

/* [[number, ...], ...], a square matrix each, all of one size. */
static int parse_mixes(run_record *r, json *j)
{
    int used = 0;
    r->num_mixes = r->streams = 0;
    if (!json_take(j, '[')) return 0;
    if (json_peek(j) == ']') return json_take(j, ']');
    do {
        int before = used, n = r->streams;
        if (!parse_numbers(j, &r->mixes, &used)) return 0;
        while (!r->num_mixes && n * n < used && n < MOST_STREAMS) n++;
        if (n == 0 || used - before != n * n)
            return json_fail(j, "residual mixes that are not square, or not of one size");
        r->streams = n;
        r->num_mixes++;
    } while (json_peek(j) == ',' && json_take(j, ','));
    return json_take(j, ']');
}

static int parse_line(run_record *r, json *j, char *key, char *value)
{
    size_t length;
    int has_row = 0;
    if (!json_take(j, '{')) return 0;
    do {
        double number;
        int c = 0;
        if (!json_string(j, key, &length) || !json_take(j, ':')) return 0;
        if (!strcmp(key, "options")) {
            if (!parse_options(r, j, key, value)) return 0;
            continue;
        }
        if (!strcmp(key, "layer_gradient_norms")) {
            if (!parse_norms(r, j)) return 0;
            continue;
        }
        if (!strcmp(key, "residual_mix")) {
            if (!parse_mixes(r, j)) return 0;
            continue;
        }
        while (c < RUN_COLUMNS && strcmp(key, names[c])) c++;
        if (c == RUN_COLUMNS && has_row) {
            if (!json_skip(j, value)) return 0;
            continue;
        }
        if (!json_number(j, &number)) return 0;
        if (c == RUN_STEP && !(number >= 0 && number <= 0x1p53 && floor(number) == number))
            return json_fail(j, "a step that is not a whole number of at least zero");
        if (!has_row && (c != RUN_STEP || !add_row(r)))
            return json_fail(j, "a line that does not begin with its step");
        has_row = 1;
        if (c < RUN_COLUMNS) r->column[c][r->count - 1] = number;
    } while (json_peek(j) == ',' && json_take(j, ','));
    if (!json_take(j, '}')) return 0;
    (void)json_peek(j); /* a zero byte is not an end */
    return j->at < j->end ? json_fail(j, "something follows the line's object") : 1;
}

int run_record_parse(run_record *r, const char *text, size_t size)
{
    char *key = malloc(size + 1), *value = malloc(size + 1);
    const char *end = text + size;
    int ok = key && value, number = 1;
    memset(r, 0, sizeof *r);
    if (!ok) snprintf(r->error, sizeof r->error, "out of memory");
    for (const char *line = text, *next; ok && line < end; line = next, number++) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) break;
        next = stop + 1;
        json j = {.begin = (const unsigned char *)line,
                  .at = (const unsigned char *)line,
                  .end = (const unsigned char *)stop,
                  .what = "line"};
        ok = parse_line(r, &j, key, value);
        if (!ok) snprintf(r->error, sizeof r->error, "line %d: %s", number, j.error);
    }
    free(key);
    free(value);
    if (ok && !add_first_choices(r)) {
        snprintf(r->error, sizeof r->error, "out of memory");
        return 0;
    }
    if (ok && !r->count) {
        r->stepless = r->num_options > 0;
        snprintf(r->error, sizeof r->error,
                 r->stepless ? "the run ended before its first step"
                             : "not the log of a run: there is no step in it");
        ok = 0;
    }
    return ok;
}

int run_record_open(run_record *r, const char *path)
{
    size_t size;
    memset(r, 0, sizeof *r);
    char *text = files_read(path, SIZE_MAX - 1, &size, r->error, sizeof r->error);
    int ok = text && run_record_parse(r, text, size);
    free(text);
    return ok;
}

void run_record_close(run_record *r)
{
    for (int c = 0; c < RUN_COLUMNS; c++) {
        free(r->column[c]);
        r->column[c] = NULL;
    }
    free(r->layer_norms);
    free(r->mixes);
    free(r->options);
    r->layer_norms = r->mixes = NULL;
    r->options = NULL;
    r->num_layer_norms = r->num_mixes = r->num_options = 0;
    r->count = 0;
}
