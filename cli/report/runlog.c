/* SPDX-License-Identifier: Apache-2.0 */
#include "report/runlog.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/files.h"
#include "common/json.h"

/* How many bytes the lines up to a step have; a last line without an end was cut off by a kill. Options after that step are
 * those of a longer run which never came to a checkpoint. */
static size_t bytes_until(const char *text, size_t bytes, int64_t step)
{
    static const char head[] = "{\"step\":";
    size_t kept = 0;
    const char *line = text, *end;
    for (; (end = memchr(line, '\n', bytes - (size_t)(line - text))); line = end + 1) {
        const int is_step = !strncmp(line, head, sizeof head - 1);
        if (is_step && strtoll(line + sizeof head - 1, NULL, 10) > step) break;
        if (is_step || !kept) kept = (size_t)(end + 1 - text);
    }
    return kept;
}

int runlog_open(runlog *log, const char *folder, int64_t step, char *error, size_t size)
{
    char path[FILES_PATH], temporary[FILES_PATH], why[128], *old = NULL;
    size_t bytes = 0;
    *log = (runlog){0};
    if (!files_join(path, folder, "log.jsonl") || !files_join(temporary, folder, ".log.jsonl")) {
        snprintf(error, size, "%s: too long a path", folder);
        return 0;
    }
    if (step > 0 && !access(path, F_OK) && !(old = files_read(path, SIZE_MAX - 1, &bytes, why, sizeof why))) {
        snprintf(error, size, "%s: %s", path, why);
        return 0;
    }
    size_t kept = old ? bytes_until(old, bytes, step) : 0;
    log->file = files_create(temporary);
    int ok = log->file && fwrite(old ? old : "", 1, kept, log->file) == kept && !fflush(log->file) &&
             !rename(temporary, path);
    if (!ok) snprintf(error, size, "%s: %s", path, strerror(errno));
    free(old);
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

void runlog_options(runlog *log, const option *table)
{
    fputs("{\"options\":{", log->file);
    int first = 1;
    for (const option *o = table; o->name; o++) {
        if (o->unsaved) continue;
        if (!first) fputc(',', log->file);
        first = 0;
        json_put_string(log->file, o->name);
        fputc(':', log->file);
        char *text = options_print(o);
        json_put_string(log->file, text ? text : "");
        if (!text && !log->error) log->error = ENOMEM;
        free(text);
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

static void put_list(FILE *file, const double *values, int count)
{
    fputc('[', file);
    for (int i = 0; i < count; i++) {
        if (i) fputc(',', file);
        put_number(file, values[i]);
    }
    fputc(']', file);
}

void runlog_numbers(runlog *log, const char *name, const double *values, int count)
{
    fprintf(log->file, ",\"%s\":", name);
    put_list(log->file, values, count);
}

void runlog_open_lists(runlog *log, const char *name)
{
    fprintf(log->file, ",\"%s\":[", name);
    log->lists = 0;
}

void runlog_list(runlog *log, const double *values, int count)
{
    if (log->lists++) fputc(',', log->file);
    put_list(log->file, values, count);
}

void runlog_close_lists(runlog *log)
{
    fputc(']', log->file);
}

void runlog_end(runlog *log)
{
    fputs("}\n", log->file);
    if (fflush(log->file) && !log->error) log->error = errno;
}
