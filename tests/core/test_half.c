/* SPDX-License-Identifier: Apache-2.0
 *
 * 16-bit floats: all 65536 patterns, every tie, denormals, NaN, and doubles that must be rounded once. The oracle
 * below works on the value of a pattern and knows nothing of shifts. */
#include "core/half.h"
#include "support/suite.h"

typedef struct format {
    const char *name;
    weft_dtype dtype;
    int exponent_bits, mantissa_bits;
    float (*widen)(uint16_t h);
    uint16_t (*narrow)(float f);
} format;

static const format formats[] = {
    {"bf16", WEFT_BF16, 8, 7, weft_bf16_to_f32, weft_f32_to_bf16},
    {"f16", WEFT_F16, 5, 10, weft_f16_to_f32, weft_f32_to_f16},
};

/* The value of a finite pattern; NaN and infinity by their exponent. */
static double value_of(const format *t, unsigned pattern)
{
    unsigned mantissa = pattern & ((1u << t->mantissa_bits) - 1);
    int exponent = (int)(pattern >> t->mantissa_bits) & ((1 << t->exponent_bits) - 1);
    int bias = (1 << (t->exponent_bits - 1)) - 1;
    double sign = pattern >> 15 ? -1 : 1;
    if (exponent == (1 << t->exponent_bits) - 1) return mantissa ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0) return sign * ldexp((double)mantissa, 1 - bias - t->mantissa_bits);
    return sign * ldexp((double)mantissa + (double)(1 << t->mantissa_bits), exponent - bias - t->mantissa_bits);
}

static unsigned infinity_of(const format *t)
{
    return ((1u << t->exponent_bits) - 1) << t->mantissa_bits;
}

static void every_pattern_round_trips(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        const format *t = &formats[k];
        for (unsigned p = 0; p < 65536; p++) {
            double want = value_of(t, p);
            float wide = t->widen((uint16_t)p);
            uint16_t back = t->narrow(wide);
            if (isnan(want)) {
                /* a NaN stays a NaN and keeps its sign */
                if (!isnan(wide) || !isnan(t->widen(back)) || (back ^ p) >> 15)
                    test_failed("%s NaN %04x", t->name, p);
                continue;
            }
            if ((double)wide != want || !signbit(wide) != !signbit(want) || back != p)
                test_failed("%s %04x: widened to %.9g, want %.9g, back to %04x", t->name, p, (double)wide, want,
                            back);
        }
    }
    test_verdict();
}

static unsigned narrow_double(const format *t, double x)
{
    return t->narrow(weft_f64_to_f32_odd(x));
}

/* Between each two neighbours: the middle goes to the even one, and anything beside the middle to the nearer one.
 * */
static void ties_go_to_even(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        const format *t = &formats[k];
        unsigned top = infinity_of(t);
        for (unsigned p = 0; p < top; p++)
            for (unsigned sign = 0; sign <= 0x8000; sign += 0x8000) {
                /* the number after the largest one is where infinity would be if the exponent went on */
                double a = value_of(t, p);
                double b = p + 1 == top ? 2 * a - value_of(t, p - 1) : value_of(t, p + 1);
                double s = sign ? -1 : 1, middle = a + (b - a) / 2;
                unsigned even = p & 1 ? p + 1 : p;
                float f = (float)middle; /* exact: one bit more than the format has */
                unsigned got = t->narrow((float)s * f);
                if (got != (even | sign)) test_failed("%s: tie after %04x: got %04x", t->name, p, got);
                unsigned below = t->narrow((float)s * nextafterf(f, 0.0f));
                unsigned above = t->narrow((float)s * nextafterf(f, INFINITY));
                if (below != (p | sign) || above != ((p + 1) | sign))
                    test_failed("%s: beside the tie after %04x: got %04x and %04x", t->name, p, below, above);
                /* A double this close to the tie becomes the tie itself when it is first rounded to float. */
                unsigned down = narrow_double(t, s * middle * (1 - 0x1p-50));
                unsigned up = narrow_double(t, s * middle * (1 + 0x1p-50));
                if (down != (p | sign) || up != ((p + 1) | sign))
                    test_failed("%s: double beside the tie after %04x: got %04x and %04x", t->name, p, down, up);
                if (narrow_double(t, s * middle) != (even | sign)) test_failed("%s: double tie %04x", t->name, p);
            }
    }
    test_verdict();
}

static void far_values(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        const format *t = &formats[k];
        unsigned top = infinity_of(t);
        for (int sign = 0; sign < 2; sign++) {
            float s = sign ? -1.0f : 1.0f;
            unsigned bit = sign ? 0x8000 : 0;
            assert_int_equal(t->narrow(s * INFINITY), top | bit);
            assert_int_equal(t->narrow(s * 3.4028234664e38f), top | bit);
            assert_int_equal(narrow_double(t, (double)s * 1e300), top | bit);
            assert_int_equal(narrow_double(t, (double)s * (double)INFINITY), top | bit);
            assert_int_equal(t->narrow(s * 0.0f), bit);
            assert_int_equal(t->narrow(s * 0x1p-149f), bit); /* far below half of the smallest */
            assert_int_equal(narrow_double(t, (double)s * 1e-300), bit);
            double smallest = value_of(t, 1);
            assert_int_equal(narrow_double(t, (double)s * smallest / 2), bit); /* tie with zero */
            assert_int_equal(narrow_double(t, (double)s * smallest * 0.5000001), 1 | bit);
        }
        assert_true(isnan(t->widen((uint16_t)narrow_double(t, (double)NAN))));
    }
}

/* Random floats against the nearest of the two neighbours, found by search. */
static void random_floats(void **state)
{
    (void)state;
    rng r = {42};
    for (int k = 0; k < 2; k++) {
        const format *t = &formats[k];
        for (int i = 0; i < 300000; i++) {
            uint32_t bits = (uint32_t)rng_next(&r);
            if (i & 1) bits = (bits & 0x807fffffu) | (uint32_t)(95 + bits % 64) << 23; /* near the range of f16 */
            float f;
            memcpy(&f, &bits, 4);
            unsigned got = t->narrow(f);
            if (isnan(f)) {
                if (!isnan(t->widen((uint16_t)got))) test_failed("%s: NaN %08x became %04x", t->name, bits, got);
                continue;
            }
            double x = fabs((double)f);
            unsigned low = 0, high = infinity_of(t); /* value_of(low) <= x < value_of(high), or beyond */
            while (high - low > 1) {
                unsigned middle = (low + high) / 2;
                if (value_of(t, middle) <= x)
                    low = middle;
                else
                    high = middle;
            }
            double a = value_of(t, low),
                   b = high == infinity_of(t) ? 2 * a - value_of(t, low - 1) : value_of(t, high);
            unsigned want = x - a < b - x ? low : x - a > b - x ? high : low & 1 ? high : low;
            if (isinf(f)) want = infinity_of(t);
            if (got != (want | (signbit(f) ? 0x8000u : 0u)))
                test_failed("%s: %.9g: got %04x, want %04x", t->name, (double)f, got, want);
        }
    }
    test_verdict();
}

/* The fast backends convert with their own instructions: every pattern through a copy-like operator, and floats of
 * every exponent through one that only narrows. */
static void kernels_convert_alike(void **state)
{
    (void)state;
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 1);
    for (int k = 0; k < 2; k++)
        for (int e = 0; e < count; e++)
            for (int channels = 256; channels <= 257; channels++) {
                const format *t = &formats[k];
                spec s = {.op = "mhc_contract_fwd",
                          .tokens = 256,
                          .streams = 1,
                          .channels = channels,
                          .act = t->dtype,
                          .contract = WEFT_CONTRACT_SUM};
                problem *p = problem_make(&s);
                arg *x = problem_arg(p, "x"), *u = problem_arg(p, "u");
                uint16_t *data = x->view->data;
                for (int64_t i = 0; i < x->elements; i++) data[i] = (uint16_t)i;
                problem_seal(p);
                problem_must_run(p, execs[e]);
                const uint16_t *out = u->view->data;
                for (int64_t i = 0; i < u->elements; i++) {
                    bool both_nan = isnan(t->widen(data[i])) && isnan(t->widen(out[i]));
                    if (out[i] != data[i] && !both_nan)
                        test_failed("%s on %s: pattern %04x came back as %04x", t->name, exec_name(execs[e]),
                                    data[i], out[i]);
                }
                problem_free(p);

                s = (spec){.op = "mhc_contract_bwd",
                           .tokens = 200,
                           .streams = 1,
                           .channels = channels,
                           .act = t->dtype,
                           .wide = WEFT_F32,
                           .contract = WEFT_CONTRACT_SUM};
                p = problem_make(&s);
                arg *d_u = problem_arg(p, "d_u"), *d_x = problem_arg(p, "d_x");
                arg_rebind(d_x, t->dtype, false);
                float *in = d_u->view->data;
                rng r = {(uint64_t)channels};
                for (int64_t i = 0; i < d_u->elements; i++) {
                    uint32_t bits = (uint32_t)rng_next(&r);
                    if (i % 3 == 1) bits &= k ? 0xfffff000u : 0xffff8000u; /* ties and exact values */
                    if (i % 3 == 2) bits = (bits & 0x807fffffu) | (uint32_t)(96 + bits % 50) << 23;
                    memcpy(&in[i], &bits, 4);
                }
                problem_seal(p);
                problem_must_run(p, execs[e]);
                out = d_x->view->data;
                for (int64_t i = 0; i < d_u->elements; i++) {
                    uint16_t want = t->narrow(in[i]);
                    if (out[i] != want && !(isnan(in[i]) && isnan(t->widen(out[i]))))
                        test_failed("%s on %s: %.9g became %04x, want %04x", t->name, exec_name(execs[e]),
                                    (double)in[i], out[i], want);
                }
                problem_free(p);
            }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pattern_round_trips),
        cmocka_unit_test(ties_go_to_even),
        cmocka_unit_test(far_values),
        cmocka_unit_test(random_floats),
        cmocka_unit_test(kernels_convert_alike),
    };
    return suite_run("half", tests);
}
