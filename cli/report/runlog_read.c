/* SPDX-License-Identifier: Apache-2.0 */
#include "report/runlog_read.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/files.h"
#include "common/json.h"
#include "common/utf8.h"

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

/* {"name":"value", ...}: remembers what a report shows. */
static int parse_options(run_record *r, json *j, char *key, char *value)
{
    static const char *const shown[] = {"layers", "channels", "streams", "context", "batch", "optimizer", NULL};
    size_t length;
    if (!json_take(j, '{')) return 0;
    if (json_peek(j) == '}') return json_take(j, '}');
    do {
        if (!json_string(j, key, &length) || !json_take(j, ':') || !json_string(j, value, &length)) return 0;
        if (!strcmp(key, "residual")) utf8_copy(r->residual, sizeof r->residual, value);
        for (int i = 0; shown[i]; i++)
            if (!strcmp(key, shown[i])) {
                size_t used = strlen(r->summary);
                char part[64], text[24];
                utf8_copy(text, sizeof text, value);
                snprintf(part, sizeof part, "%s%s %s", used ? ", " : "", key, text);
                utf8_copy(r->summary + used, sizeof r->summary - used, part);
            }
    } while (json_peek(j) == ',' && json_take(j, ','));
    return json_take(j, '}');
}

static int parse_norms(run_record *r, json *j)
{
    r->num_layer_norms = 0;
    if (!json_take(j, '[')) return 0;
    if (json_peek(j) == ']') return json_take(j, ']');
    do {
        double *more = realloc(r->layer_norms, (size_t)(r->num_layer_norms + 1) * sizeof *more);
        if (!more) return json_fail(j, "out of memory");
        r->layer_norms = more;
        if (!json_number(j, &more[r->num_layer_norms++])) return 0;
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
        if (!json_number(j, &number)) return 0;
        while (c < RUN_COLUMNS && strcmp(key, names[c])) c++;
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
    if (ok && !r->count) {
        snprintf(r->error, sizeof r->error, "not the log of a run, or of one without a step");
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
    r->layer_norms = NULL;
    r->count = 0;
}
