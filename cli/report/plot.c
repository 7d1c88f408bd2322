/* SPDX-License-Identifier: Apache-2.0 */
#include "report/plot.h"

#include <math.h>
#include <string.h>

#include "common/utf8.h"

/* Small enough that its text can be read where a telephone shows it at 350 pixels. */
enum { MOST_TICKS = 16, WIDTH = 460, HEIGHT = 270, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 40 };

void html_text(FILE *to, const char *text)
{
    const char *end = text + strlen(text);
    for (size_t bytes; text < end; text += bytes ? bytes : 1) {
        bytes = utf8_character(text, end);
        if (!bytes)
            fprintf(to, "\\x%02X", (unsigned)(unsigned char)*text);
        else if (bytes > 1)
            fwrite(text, 1, bytes, to);
        else
            switch (*text) {
            case '<': fputs("&lt;", to); break;
            case '>': fputs("&gt;", to); break;
            case '&': fputs("&amp;", to); break;
            case '"': fputs("&quot;", to); break;
            default: fputc((unsigned char)*text < 0x20 ? ' ' : *text, to);
            }
    }
}

int plot_shows(double value, int log_y)
{
    return fabs(value) <= 1e100 && (!log_y || value >= 1e-100);
}

void plot_cover(double *lowest, double *highest, const double *values, size_t count, int log_y)
{
    for (size_t i = 0; i < count; i++) {
        if (!plot_shows(values[i], log_y)) continue;
        if (values[i] < *lowest) *lowest = values[i];
        if (values[i] > *highest) *highest = values[i];
    }
}

static double across(const plot *p, double x)
{
    return LEFT + (x - p->x0) / (p->x1 - p->x0) * (WIDTH - LEFT - RIGHT);
}

static double down(const plot *p, double y)
{
    double part = p->log_y ? log(y / p->y0) / log(p->y1 / p->y0) : (y - p->y0) / (p->y1 - p->y0);
    return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM);
}

/* 1, 2 or 5 times a power of ten, so that about `count` steps cover the range. */
static double round_step(double range, int count)
{
    double raw = range / count, power = pow(10, floor(log10(raw))), digit = raw / power;
    return power * (digit < 1.5 ? 1 : digit < 3.5 ? 2 : digit < 7.5 ? 5 : 10);
}

static void tick_y(const plot *p, double y)
{
    double at = down(p, y);
    fprintf(p->to, "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>", LEFT, WIDTH - RIGHT, at,
            at);
    fprintf(p->to, "<text class=\"tick\" x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.4g</text>\n", LEFT - 6, at + 4,
            y);
}

static void ticks(const plot *p)
{
    double step = fmax(1, round_step(p->x1 - p->x0, 5)); /* steps and layers are whole */
    double first = ceil(p->x0 / step), x, y;
    for (int i = 0; i < MOST_TICKS && (x = (first + i) * step) <= p->x1; i++)
        fprintf(p->to, "<text class=\"tick\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.6g</text>\n",
                across(p, x), HEIGHT - BOTTOM + 16, x);
    if (!p->log_y) {
        step = round_step(p->y1 - p->y0, 6);
        first = ceil(p->y0 / step - 1e-9);
        for (int i = 0; i < MOST_TICKS && (y = (first + i) * step) <= p->y1 + step * 1e-9; i++) tick_y(p, y);
        return;
    }
    int many = p->y1 / p->y0 > 1e4, few = p->y1 / p->y0 < 10;
    int lowest = (int)floor(log10(p->y0)), highest = (int)floor(log10(p->y1));
    int every = 1 + (highest - lowest) / MOST_TICKS; /* powers of ten */
    for (int power = lowest; power <= highest; power += every) {
        static const double digits[] = {1, 2, 5, 1.5, 3, 4, 7};
        for (int d = 0; d < (many ? 1 : few ? 7 : 3); d++) {
            y = pow(10, power) * digits[d];
            if (y >= p->y0 * 0.999 && y <= p->y1 * 1.001) tick_y(p, y);
        }
    }
}

void plot_begin(plot *p, FILE *to, const char *title, const char *x_label, int log_y, double x0, double x1,
                double y0, double y1)
{
    *p = (plot){to, log_y, x0, x1 > x0 ? x1 : x0 + 1, y0, y1};
    if (!(y0 <= y1)) p->y0 = log_y ? 0.5 : 0, p->y1 = log_y ? 2 : 1; /* nothing to cover */
    if (log_y) {
        p->y0 = p->y0 > 0 ? p->y0 / 1.2 : 1e-6;
        p->y1 = p->y1 * 1.2 > p->y0 ? p->y1 * 1.2 : p->y0 * 4;
        double factor = p->y1 / p->y0 < 4 ? sqrt(4 * p->y0 / p->y1) : 1;
        p->y0 /= factor, p->y1 *= factor;
    } else {
        /* Values that differ in their last digits only are one value, and the axis shows what is around it. */
        double size = fmax(fabs(p->y0), fabs(p->y1)), around = fmax(0.1, 0.1 * size);
        if (p->y1 - p->y0 < 1e-9 * size || p->y1 <= p->y0) p->y0 -= around, p->y1 += around;
        double step = round_step(p->y1 - p->y0, 6);
        p->y0 = floor(p->y0 / step) * step;
        p->y1 = ceil(p->y1 / step) * step;
    }
    fprintf(to, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, HEIGHT);
    html_text(to, title);
    fprintf(to, "\"><text class=\"tick\" x=\"%d\" y=\"%d\" text-anchor=\"end\">", WIDTH - RIGHT, HEIGHT - 6);
    html_text(to, x_label);
    fputs("</text>\n", to);
    ticks(p);
}

static void name_mark(const plot *p, const char *name)
{
    fputs("<title>", p->to);
    html_text(p->to, name);
    fputs("</title>", p->to);
}

void plot_line(plot *p, const double *x, const double *y, size_t count, int colour, plot_style style,
               const char *name)
{
    static const char *const looks[] = {"stroke-width:2", "stroke-width:1;opacity:.35",
                                        "stroke-width:1.5;stroke-dasharray:4 3", "stroke-width:2"};
    size_t shown = 0;
    for (size_t i = 0; i < count; i++) shown += (size_t)plot_shows(y[i], p->log_y);
    if (shown > 1) {
        int open = 0;
        fprintf(p->to, "<path class=\"mark\" style=\"fill:none;stroke:var(--c%d);%s\" d=\"", colour % PLOT_COLOURS,
                looks[style]);
        for (size_t i = 0; i < count; i++) {
            /* No gap: most columns have a value every so many steps only. */
            if (!plot_shows(y[i], p->log_y)) continue;
            fprintf(p->to, "%c%.1f %.1f", open ? 'L' : 'M', across(p, x[i]), down(p, y[i]));
            open = 1;
        }
        fputs("\">", p->to);
        name_mark(p, name);
        fputs("</path>\n", p->to);
    }
    for (size_t i = 0; (style == PLOT_DOTS || shown == 1) && i < count; i++)
        if (plot_shows(y[i], p->log_y))
            fprintf(p->to,
                    "<circle class=\"mark\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"var(--c%d)\"><title>%.6g: "
                    "%.6g</title></circle>\n",
                    across(p, x[i]), down(p, y[i]), colour % PLOT_COLOURS, x[i], y[i]);
}

void plot_band(plot *p, const double *x, const double *low, const double *high, size_t count, int colour)
{
    if (count == 1 && plot_shows(low[0], p->log_y) && plot_shows(high[0], p->log_y))
        fprintf(p->to, "<path style=\"stroke:var(--c%d);stroke-width:8;opacity:.18\" d=\"M%.1f %.1fV%.1f\"/>\n",
                colour % PLOT_COLOURS, across(p, x[0]), down(p, high[0]), down(p, low[0]));
    if (count < 2) return;
    fprintf(p->to, "<path style=\"stroke:none;fill:var(--c%d);opacity:.18\" d=\"", colour % PLOT_COLOURS);
    for (size_t i = 0; i < count; i++)
        fprintf(p->to, "%c%.1f %.1f", i ? 'L' : 'M', across(p, x[i]), down(p, high[i]));
    for (size_t i = count; i-- > 0;) fprintf(p->to, "L%.1f %.1f", across(p, x[i]), down(p, low[i]));
    fputs("Z\"/>\n", p->to);
}

void plot_end(plot *p)
{
    fprintf(p->to, "<path class=\"axis\" d=\"M%d %dV%dH%d\"/></svg>\n", LEFT, TOP, HEIGHT - BOTTOM, WIDTH - RIGHT);
}
