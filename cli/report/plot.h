/* SPDX-License-Identifier: Apache-2.0
 *
 * Line charts as inline SVG. Colours are CSS variables of the page (--c0 .. --c7), so a chart follows its theme. */
#ifndef WEFT_CLI_PLOT_H
#define WEFT_CLI_PLOT_H

#include <stdio.h>

enum { PLOT_COLOURS = 8 };

typedef struct plot {
    FILE *to;
    int log_y;
    double x0, x1, y0, y1; /* what the frame covers */
} plot;

/* Whether a chart shows the value: up to 1e100 in size and, on a log axis, from 1e-100 on. What lies beyond says no more than
 * infinity or zero would, and sums, ratios and distances of values that are shown stay finite. */
int plot_shows(double value, int log_y);
/* Grows a range by the values that are shown; begin with lowest > highest. */
void plot_cover(double *lowest, double *highest, const double *values, size_t count, int log_y);

/* Frame and axes; the title is for readers of the screen. y is widened to round numbers; on a log axis to at least a factor of
 * four. x0 and x1 are whole numbers. */
void plot_begin(plot *p, FILE *to, const char *title, const char *x_label, int log_y, double x0, double x1,
                double y0, double y1);
typedef enum plot_style { PLOT_LINE, PLOT_FAINT, PLOT_DASHED, PLOT_DOTS } plot_style;
/* Values that are not shown are passed over. A single one is a dot. */
void plot_line(plot *p, const double *x, const double *y, size_t count, int colour, plot_style style,
               const char *name);
/* What lies between two lines of shown values, filled. */
void plot_band(plot *p, const double *x, const double *low, const double *high, size_t count, int colour);
void plot_end(plot *p);

/* Text with the characters of HTML made harmless; a byte that is not UTF-8 is shown as \\xFF. */
void html_text(FILE *to, const char *text);

#endif
