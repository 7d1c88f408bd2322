/* SPDX-License-Identifier: Apache-2.0 */
#include "runlog.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINE = 1 << 16 };

/* Copies the lines up to a step from one file to another; a last line without an end was cut off by a kill. */
static int copy_until(FILE *from, FILE *to, int64_t step)
{
    char *line = malloc(LINE);
    int ok = line != NULL;
    while (ok && fgets(line, LINE, from)) {
        long long at;
        if (!strchr(line, '\n')) break;
        if (sscanf(line, "{\"step\":%lld", &at) == 1 && at > step) break;
        ok = fputs(line, to) >= 0;
    }
    free(line);
    return ok;
}

int runlog_open(runlog *log, const char *folder, int64_t step, char *error, size_t size)
{
    char path[4096], temporary[4096];
    *log = (runlog){0};
    if (snprintf(path, sizeof path, "%s/log.jsonl", folder) >= (int)sizeof path ||
        snprintf(temporary, sizeof temporary, "%s/.log.jsonl", folder) >= (int)sizeof temporary) {
        snprintf(error, size, "%s: too long a path", folder);
        return 0;
    }
    FILE *old = step > 0 ? fopen(path, "r") : NULL;
    log->file = fopen(temporary, "w");
    int ok =
        log->file && (!old || copy_until(old, log->file, step)) && !fflush(log->file) && !rename(temporary, path);
    if (!ok) snprintf(error, size, "%s: %s", path, strerror(errno));
    if (old) fclose(old);
    if (!ok && log->file) {
        fclose(log->file);
        log->file = NULL;
        unlink(temporary);
    }
    return ok;
}

int runlog_close(runlog *log)
{
    int ok = log->file && !log->error && !fflush(log->file) && !fsync(fileno(log->file));
    if (log->file && fclose(log->file)) ok = 0;
    log->file = NULL;
    return ok;
}

static void put_string(FILE *file, const char *s)
{
    fputc('"', file);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') fputc('\\', file);
        if ((unsigned char)*s < 0x20)
            fprintf(file, "\\u%04x", (unsigned)*s);
        else
            fputc(*s, file);
    }
    fputc('"', file);
}

void runlog_options(runlog *log, const option *table)
{
    char text[4096];
    fputs("{\"options\":{", log->file);
    int first = 1;
    for (const option *o = table; o->name; o++) {
        if (o->unsaved) continue;
        if (!first) fputc(',', log->file);
        first = 0;
        put_string(log->file, o->name);
        fputc(':', log->file);
        options_print(o, text, sizeof text);
        put_string(log->file, text);
    }
    fputc('}', log->file);
    runlog_end(log);
}

static void put_number(FILE *file, double value)
{
    if (isfinite(value))
        fprintf(file, "%.9g", value);
    else
        fputs("null", file);
}

void runlog_begin(runlog *log, int64_t step)
{
    fprintf(log->file, "{\"step\":%lld", (long long)step);
}

void runlog_number(runlog *log, const char *name, double value)
{
    fprintf(log->file, ",\"%s\":", name);
    put_number(log->file, value);
}

void runlog_numbers(runlog *log, const char *name, const double *values, int count)
{
    fprintf(log->file, ",\"%s\":[", name);
    for (int i = 0; i < count; i++) {
        if (i) fputc(',', log->file);
        put_number(log->file, values[i]);
    }
    fputc(']', log->file);
}

void runlog_end(runlog *log)
{
    fputs("}\n", log->file);
    if (fflush(log->file) && !log->error) log->error = errno;
}
