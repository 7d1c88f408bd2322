/* SPDX-License-Identifier: Apache-2.0
 *
 * Dropout [D1]: a pure function of its coordinates. With x = 0, post = 1 and f = 1, y is the mask itself. */
#include "support/suite.h"

#include "core/philox.h"

static const double KEEP_SCALE_TOLERANCE = 0x1p-24;

/* ---- the generator ------------------------------------------------------------------------------------------- */

/* The published vectors of Random123 for philox4x32-10. */
static void known_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } table[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        uint32_t got[4];
        weft_philox(got, table[i].counter, table[i].key);
        assert_memory_equal(got, table[i].want, sizeof got);
    }
}

/* ---- masks through the operators ----------------------------------------------------------------------------- */

typedef struct mask {
    int64_t tokens, streams, channels;
    double *value; /* [T, n, C]: 0 or 1/(1-p) */
} mask;

static void set_all(problem *p, const char *name, double value)
{
    arg *a = problem_arg(p, name);
    for (int64_t k = 0; a && k < a->elements; k++) arg_set(a, k, value);
}

static mask draw(const weft_dropout *d, int64_t tokens, int64_t streams, int64_t channels, weft_exec exec)
{
    spec s = {.op = "mhc_post_fwd",
              .tokens = tokens,
              .streams = streams,
              .channels = channels,
              .dropout = *d,
              .absent = " bias "};
    problem *p = problem_make(&s);
    set_all(p, "x", 0);
    set_all(p, "res", 0);
    set_all(p, "f", 1);
    set_all(p, "post", 1);
    problem_seal(p);
    problem_must_run(p, exec);
    mask m = {tokens, streams, channels, arg_values(problem_arg(p, "y"))};
    problem_free(p);
    return m;
}

static int64_t size_of(const mask *m)
{
    return m->tokens * m->streams * m->channels;
}

static double kept(const mask *m)
{
    double sum = 0;
    for (int64_t k = 0; k < size_of(m); k++) sum += m->value[k] != 0;
    return sum / (double)size_of(m);
}

/* Share of elements on which two masks agree. */
static double agreement(const mask *a, const mask *b)
{
    double sum = 0;
    for (int64_t k = 0; k < size_of(a); k++) sum += (a->value[k] != 0) == (b->value[k] != 0);
    return sum / (double)size_of(a);
}

/* The reference, the CPU and the GPU. */
enum { BACKENDS = 3 };
static weft_exec backend(int e)
{
    return e == 0 ? on_ref() : e == 1 ? on_cpu(WEFT_ISA_BEST, 2) : on_cuda(0);
}

static int backends(void)
{
    return test_on_cuda() ? BACKENDS : BACKENDS - 1;
}

static weft_exec best(void)
{
    return backend(backends() - 1);
}

static void rate_and_scale(void **state)
{
    (void)state;
    static const double ps[] = {0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999};
    for (int i = 0; i < 7; i++)
        for (int e = 0; e < backends(); e++) {
            weft_dropout d = {.p = ps[i], .seed = 1234, .site = (uint64_t)i};
            mask m = draw(&d, 64, 4, 130, backend(e));
            double n = (double)size_of(&m), deviation = sqrt(ps[i] * (1 - ps[i]) / n);
            if (!(fabs(kept(&m) - (1 - ps[i])) <= 5 * deviation))
                test_failed("p = %g: kept %g of %g elements", ps[i], kept(&m), n);
            /* 1/(1-p), in the arithmetic's precision; exact where it is a power of two */
            for (int64_t k = 0; k < size_of(&m); k++) {
                double want = 1 / (1 - ps[i]);
                if (m.value[k] != 0 && !(fabs(m.value[k] - want) <= KEEP_SCALE_TOLERANCE * want)) {
                    test_failed("p = %g: a kept element is %.9g", ps[i], m.value[k]);
                    break;
                }
                if (m.value[k] != 0 && (ps[i] == 0.5 || ps[i] == 0.75) && m.value[k] != want) {
                    test_failed("p = %g: the scale %.9g is not exact", ps[i], m.value[k]);
                    break;
                }
            }
            free(m.value);
        }
    test_verdict();
}

/* Neighbours in every direction are independent: they agree as often as chance has it. */
static void independence(void **state)
{
    (void)state;
    weft_dropout d = {.p = 0.5, .seed = 99};
    mask m = draw(&d, 96, 4, 96, best());
    int64_t steps[] = {1, 2, 4, 96, 192, 384, 4 * 384};
    for (int s = 0; s < 7; s++) {
        double same = 0, count = 0;
        for (int64_t k = 0; k + steps[s] < size_of(&m); k++, count++)
            same += (m.value[k] != 0) == (m.value[k + steps[s]] != 0);
        if (!(fabs(same / count - 0.5) <= 5 * 0.5 / sqrt(count)))
            test_failed("elements %d apart agree too often: %g", (int)steps[s], same / count);
    }
    free(m.value);
    test_verdict();
}

static void expect_unrelated(const mask *a, const mask *b, double p, const char *what)
{
    double chance = p * p + (1 - p) * (1 - p), n = (double)size_of(a);
    if (!(fabs(agreement(a, b) - chance) <= 6 * sqrt(chance * (1 - chance) / n)))
        test_failed("another %s: the masks agree on %g of the elements, chance is %g", what, agreement(a, b),
                    chance);
}

/* Each coordinate matters, in its high half too. */
static void every_coordinate_counts(void **state)
{
    (void)state;
    static uint64_t steps[3] = {0, 1, (uint64_t)1 << 40};
    const weft_dropout base = {.p = 0.4, .seed = 10, .site = 20, .step = &steps[0], .token_base = 30};
    for (int e = 0; e < backends(); e++) {
        weft_exec exec = backend(e);
        mask m = draw(&base, 40, 4, 60, exec);
        for (int v = 0; v < 8; v++) {
            weft_dropout d = base;
            static const char *const names[] = {"seed", "seed, high half", "site",       "site, high half",
                                                "step", "step, high half", "token_base", "token_base, high half"};
            switch (v) {
            case 0: d.seed++; break;
            case 1: d.seed += (uint64_t)1 << 33; break;
            case 2: d.site++; break;
            case 3: d.site += (uint64_t)1 << 33; break;
            case 4: d.step = &steps[1]; break;
            case 5: d.step = &steps[2]; break;
            case 6: d.token_base += 1000; break;
            default: d.token_base += (int64_t)1 << 33; break;
            }
            mask other = draw(&d, 40, 4, 60, exec);
            expect_unrelated(&m, &other, 0.4, names[v]);
            free(other.value);
        }
        /* step is read when the operator runs, and NULL counts as 0 */
        weft_dropout d = base;
        d.step = NULL;
        mask none = draw(&d, 40, 4, 60, exec);
        if (agreement(&m, &none) != 1) test_failed("step NULL is not step 0");
        free(none.value);
        free(m.value);
    }
    test_verdict();
}

/* The same mask on every backend, instruction set and thread count. */
static void the_same_everywhere(void **state)
{
    (void)state;
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 2);
    for (int v = 0; v < 12; v++) {
        weft_dropout d = {
            .p = v & 1 ? 0.3 : 0.5, .seed = 3 + (uint64_t)v, .site = 8, .token_base = v * 7, .shared = v / 2 & 1};
        int64_t channels[] = {1, 3, 16, 33, 64, 257}, streams[] = {4, 3, 8};
        mask want = draw(&d, 9, streams[v % 3], channels[v % 6], on_ref());
        for (int e = 0; e < count; e++) {
            if (execs[e].backend == WEFT_BACKEND_CPU) execs[e].threads = 1 + v % 3;
            mask got = draw(&d, 9, streams[v % 3], channels[v % 6], execs[e]);
            if (agreement(&got, &want) != 1)
                test_failed("%s draws another mask than the reference", exec_name(execs[e]));
            free(got.value);
        }
        free(want.value);
    }
    test_verdict();
}

static void shared_masks(void **state)
{
    (void)state;
    weft_dropout d = {.p = 0.5, .seed = 5, .shared = 1};
    for (int e = 0; e < backends(); e++) {
        mask m = draw(&d, 30, 4, 50, backend(e));
        for (int64_t t = 0; t < 30; t++)
            for (int64_t k = 0; k < 200; k++)
                if (m.value[t * 200 + k] != m.value[t * 200 + k % 50]) {
                    test_failed("shared = 1: streams of token %d differ", (int)t);
                    t = 30;
                    break;
                }
        free(m.value);
        d.shared = 0;
        m = draw(&d, 30, 4, 50, backend(e));
        double same = 0;
        for (int64_t t = 0; t < 30; t++)
            for (int64_t k = 50; k < 200; k++) same += m.value[t * 200 + k] == m.value[t * 200 + k % 50];
        if (!(fabs(same / 4500 - 0.5) <= 5 * 0.5 / sqrt(4500)))
            test_failed("shared = 0: streams agree on %g", same / 4500);
        free(m.value);
        d.shared = 1;
    }
    test_verdict();
}

/* A batch cut into shards, each with its token_base, draws what the whole batch draws. */
static void shards(void **state)
{
    (void)state;
    weft_dropout d = {.p = 0.3, .seed = 77, .site = 1, .token_base = 5};
    int64_t row = 4 * 21;
    mask whole = draw(&d, 50, 4, 21, best());
    for (int64_t at = 0; at < 50; at += 10) {
        d.token_base = 5 + at;
        mask part = draw(&d, 10, 4, 21, best());
        if (memcmp(part.value, whole.value + at * row, (size_t)(10 * row) * sizeof(double)) != 0)
            test_failed("tokens %d..%d of a shard differ from the whole batch", (int)at, (int)at + 10);
        free(part.value);
    }
    free(whole.value);
    test_verdict();
}

/* Forward, backward, boundary and replay see one mask. Backward: with d_y = 1 on stream o only, d_f is that
 * stream's mask. */
static void the_same_in_backward_and_replay(void **state)
{
    (void)state;
    const int64_t tokens = 12, n = 4, channels = 37, row = n * channels;
    for (int shared = 0; shared < 2; shared++)
        for (int e = 0; e < backends(); e++) {
            weft_exec exec = backend(e);
            weft_dropout d = {.p = 0.5, .seed = 21, .site = 2, .token_base = 3, .shared = shared};
            mask m = draw(&d, tokens, n, channels, exec);
            for (int64_t o = 0; o < n; o++) {
                spec s = {.op = "mhc_post_bwd", .tokens = tokens, .streams = n, .channels = channels, .dropout = d};
                problem *p = problem_make(&s);
                set_all(p, "post", 1);
                arg *d_y = problem_arg(p, "d_y"), *d_f = problem_arg(p, "d_f");
                for (int64_t k = 0; k < d_y->elements; k++) arg_set(d_y, k, k / channels % n == o);
                problem_seal(p);
                problem_must_run(p, exec);
                for (int64_t k = 0; k < d_f->elements; k++) {
                    double want = m.value[k / channels * row + o * channels + k % channels];
                    if (arg_get(d_f, k) != want) {
                        test_failed("d_f[%d]: got %g, the forward mask has %g", (int)k, arg_get(d_f, k), want);
                        break;
                    }
                }
                problem_free(p);
            }
            /* replay numbers its sites itself only because the test's spec does: layer l has site 2 + l */
            spec s = {.op = "mhc_replay_fwd",
                      .tokens = tokens,
                      .streams = n,
                      .channels = channels,
                      .dropout = d,
                      .layers = 2,
                      .absent = " bias "};
            problem *p = problem_make(&s);
            static const char *const zero[] = {"x", "layers[0].res", "layers[1].res"};
            static const char *const one[] = {"layers[0].f", "layers[1].f", "layers[0].post", "layers[1].post"};
            for (int k = 0; k < 3; k++) set_all(p, zero[k], 0);
            for (int k = 0; k < 4; k++) set_all(p, one[k], 1);
            problem_seal(p);
            problem_must_run(p, exec);
            for (int l = 0; l < 2; l++) {
                weft_dropout at = d;
                at.site += (uint64_t)l;
                mask want = draw(&at, tokens, n, channels, exec);
                const arg *y = problem_arg(p, l ? "layers[1].y" : "layers[0].y");
                for (int64_t k = 0; k < y->elements; k++)
                    if (arg_get(y, k) != want.value[k]) {
                        test_failed("layer %d of replay draws another mask", l);
                        break;
                    }
                free(want.value);
            }
            problem_free(p);
            s = (spec){.op = "mhc_boundary_fwd",
                       .tokens = tokens,
                       .streams = n,
                       .channels = channels,
                       .dropout = d,
                       .absent = " bias "};
            p = problem_make(&s);
            set_all(p, "x", 0);
            set_all(p, "f", 1);
            set_all(p, "post", 1);
            problem_seal(p);
            problem_must_run(p, exec);
            const arg *y = problem_arg(p, "y");
            for (int64_t k = 0; k < y->elements; k++)
                if (arg_get(y, k) != m.value[k]) {
                    test_failed("boundary draws another mask");
                    break;
                }
            problem_free(p);
            free(m.value);
        }
    test_verdict();
}

/* p = 0, whatever the other fields say, is no dropout at all. */
static void off(void **state)
{
    (void)state;
    for (int e = 0; e < backends(); e++) {
        weft_dropout d = {.p = 0, .seed = 5, .site = 6, .token_base = 7, .shared = 1};
        mask m = draw(&d, 8, 4, 40, backend(e));
        if (kept(&m) != 1 || m.value[0] != 1) test_failed("p = 0 drops or scales something");
        free(m.value);
    }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(rate_and_scale),
        cmocka_unit_test(independence),
        cmocka_unit_test(every_coordinate_counts),
        cmocka_unit_test(the_same_everywhere),
        cmocka_unit_test(shared_masks),
        cmocka_unit_test(shards),
        cmocka_unit_test(the_same_in_backward_and_replay),
        cmocka_unit_test(off),
    };
    return suite_run("dropout", tests);
}
