/* SPDX-License-Identifier: Apache-2.0 */
#include "train/progress.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

double progress_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

progress progress_open(int on, int64_t done, int64_t total)
{
    return (progress){.on = on, .terminal = isatty(2), .first = done, .total = total, .started = progress_now()};
}

void progress_show(progress *p, int64_t done, double loss, double validation, double tokens_per_s, size_t bytes)
{
    enum { BAR = 20 };
    double now = progress_now();
    int last = done == p->total;
    /* A terminal ten times a second; a file ten times a run. */
    int64_t tenth = p->total / 10 > 0 ? p->total / 10 : 1;
    if (!p->on || (p->terminal ? now - p->shown < 0.1 && !last : done % tenth != 0 && !last)) return;
    p->shown = now;
    char bar[BAR + 1], line[256], val[32] = "";
    int full = (int)(BAR * done / p->total);
    memset(bar, '.', BAR);
    memset(bar, '#', (size_t)full);
    bar[BAR] = 0;
    if (isfinite(validation)) snprintf(val, sizeof val, "  val %.4f", validation);
    double left = done > p->first ? (now - p->started) / (double)(done - p->first) * (double)(p->total - done) : 0;
    int width = snprintf(line, sizeof line, "[%s] %lld/%lld  loss %.4f%s  %.1fk tok/s  %.0f MiB  %d:%02d left", bar,
                         (long long)done, (long long)p->total, loss, val, tokens_per_s * 1e-3,
                         (double)bytes * 0x1p-20, (int)left / 60, (int)left % 60);
    if (p->terminal)
        fprintf(stderr, "\r%s%*s", line, p->width > width ? p->width - width : 0, "");
    else
        fprintf(stderr, "%s\n", line);
    p->width = width;
}

void progress_close(progress *p)
{
    if (p->on && p->terminal && p->width) fputc('\n', stderr);
    p->width = 0;
}
