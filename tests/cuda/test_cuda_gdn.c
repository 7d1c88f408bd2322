/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule on a GPU: a projection of more than 2^32 elements, and offsets and rows of a cache that no
 * caller should give. */
#include "check/device.h"
#include "check/element.h"
#include "support/device.h"

#if WEFT_HAVE_CUDA

#include <string.h>

#include <weft/gdn.h>

#include "check/random.h"

enum { HK = 16, HV = 64, D = 128, W = 4, P = 2 * HK * D + 2 * HV * D + 2 * HV, CONV = 2 * HK * D + HV * D };
enum {
    PERIOD = 67,
    EDGE = 3,
    SLICE = 5,
    WINDOW = SLICE + 2 * EDGE,
    MARGIN = 4096,
    SENTINEL = 0xa5,
    UNWRITTEN = 0xff
};

/* One call of forward and one of backward on T tokens, all in bf16 but for the parameters, with their memory. */
typedef struct layer {
    int64_t tokens;
    char *memory[16];
    size_t bytes[16];
    int count;
    weft_gdn_pre_fwd_args fwd;
    weft_gdn_pre_bwd_args bwd;
} layer;

static void *take(layer *l, size_t bytes)
{
    char *p = device_alloc(bytes + MARGIN);
    if (p && !device_fill(p, UNWRITTEN, bytes) && !device_fill(p + bytes, SENTINEL, MARGIN)) {
        l->memory[l->count] = p;
        l->bytes[l->count++] = bytes;
    }
    return p;
}

static weft_tensor rows_of(layer *l, int64_t heads, int64_t dim, weft_dtype dtype)
{
    const int64_t shape[] = {1, l->tokens, heads, dim};
    size_t bytes = (size_t)(l->tokens * heads * dim) * weft_dtype_size(dtype);
    return weft_dense(take(l, bytes), dtype, dim > 1 ? 4 : 3, shape);
}

/* Random numbers of the period, again and again. */
static const char *fill(weft_tensor *t, int64_t row, int64_t tokens, uint64_t seed)
{
    size_t period = (size_t)(PERIOD * row) * 2, all = (size_t)(tokens * row) * 2;
    uint16_t *host = malloc(period);
    for (int64_t i = 0; i < PERIOD * row; i++) {
        float x = random_normal(seed, (uint64_t)i);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        host[i] = (uint16_t)(bits >> 16);
    }
    const char *wrong = fill_periods(t->data, host, period, all);
    free(host);
    return wrong;
}

static const char *parameters(layer *l)
{
    static float host[CONV * W + 2 * HV];
    for (int i = 0; i < CONV * W + 2 * HV; i++) host[i] = random_normal(9, (uint64_t)i);
    float *at = take(l, sizeof host);
    l->fwd.weight = weft_dense2(at, WEFT_F32, CONV, W);
    l->fwd.a_log = weft_dense1(at + CONV * W, WEFT_F32, HV);
    l->fwd.dt_bias = weft_dense1(at + CONV * W + HV, WEFT_F32, HV);
    return at ? device_put(at, host, sizeof host) : "no memory";
}

static void sections_into(layer *l, const weft_tensor *proj, const weft_tensor *d_proj)
{
    weft_gdn_sections s = weft_gdn_split(proj, HK, D, HV, D), d = weft_gdn_split(d_proj, HK, D, HV, D);
    l->fwd.q = l->bwd.q = s.q, l->fwd.k = l->bwd.k = s.k, l->fwd.v = l->bwd.v = s.v, l->fwd.z = s.z;
    l->fwd.b = l->bwd.b = s.b, l->fwd.a = l->bwd.a = s.a;
    l->bwd.d_q.to = d.q, l->bwd.d_k.to = d.k, l->bwd.d_v.to = d.v, l->bwd.d_z.to = d.z;
    l->bwd.d_b.to = d.b, l->bwd.d_a.to = d.a;
    l->bwd.weight = l->fwd.weight, l->bwd.a_log = l->fwd.a_log, l->bwd.dt_bias = l->fwd.dt_bias;
}

/* Results of forward serve as gradients of backward: they are numbers of a fit size. */
static const char *layer_make(layer *l, int64_t tokens)
{
    *l = (layer){.tokens = tokens,
                 .fwd = {.struct_size = sizeof l->fwd, .options = weft_gdn_defaults()},
                 .bwd = {.struct_size = sizeof l->bwd, .options = weft_gdn_defaults()}};
    const int64_t shape[] = {1, tokens, P};
    weft_tensor proj = weft_dense(take(l, (size_t)(tokens * P) * 2), WEFT_BF16, 3, shape);
    weft_tensor d_proj = weft_dense(take(l, (size_t)(tokens * P) * 2), WEFT_BF16, 3, shape);
    l->bwd.d_query = l->fwd.query = rows_of(l, HK, D, WEFT_BF16);
    l->bwd.d_key = l->fwd.key = rows_of(l, HK, D, WEFT_BF16);
    l->bwd.d_value = l->fwd.value = rows_of(l, HV, D, WEFT_BF16);
    l->bwd.d_gate = l->fwd.gate = rows_of(l, HV, D, WEFT_BF16);
    l->bwd.d_beta = l->fwd.beta = rows_of(l, HV, 1, WEFT_BF16);
    l->bwd.d_g = l->fwd.g = rows_of(l, HV, 1, WEFT_F32);
    const char *wrong = parameters(l);
    if (l->count != 9) wrong = "not enough memory on the device";
    sections_into(l, &proj, &d_proj);
    return wrong ? wrong : fill(&proj, P, tokens, 4);
}

static const char *layer_run(layer *l)
{
    weft_exec exec = on_cuda(0);
    if (weft_gdn_pre_fwd(&exec, &l->fwd) != WEFT_OK || weft_gdn_pre_bwd(&exec, &l->bwd) != WEFT_OK)
        return weft_last_error();
    return device_wait();
}

static void layer_free(layer *l)
{
    for (int i = 0; i < l->count; i++) device_free(l->memory[i]);
}

/* The i-th tensor: its bytes of tokens `first` to first + SLICE. */
static const char *slice_of(const layer *l, int i, int64_t first, void **bytes, size_t *size)
{
    size_t row = l->bytes[i] / (size_t)l->tokens;
    *size = SLICE * row;
    *bytes = malloc(*size);
    return device_get(*bytes, l->memory[i] + (size_t)first * row, *size);
}

/* Memory is full of these bytes before a call. */
static bool is_untouched(const unsigned char *bytes, size_t size)
{
    for (size_t k = 0; k < size; k++)
        if (bytes[k] != UNWRITTEN) return false;
    return true;
}

static void compare_slice(const layer *all, int64_t first)
{
    layer few;
    const char *wrong = layer_make(&few, WINDOW);
    size_t row = (size_t)P * 2;
    if (!wrong) wrong = device_copy(few.memory[0], all->memory[0] + (size_t)(first - EDGE) * row, WINDOW * row);
    if (!wrong) wrong = layer_run(&few);
    for (int i = 1; i < 8 && !wrong; i++) {
        void *got = NULL, *want = NULL;
        size_t size;
        wrong = slice_of(all, i, first, &got, &size);
        if (!wrong) wrong = slice_of(&few, i, EDGE, &want, &size);
        if (!wrong && memcmp(got, want, size) != 0)
            test_failed("tensor %d: tokens from %lld on differ from what they are by themselves", i,
                        (long long)first);
        if (!wrong && is_untouched(want, size)) test_failed("tensor %d was not written", i);
        free(got), free(want);
    }
    if (wrong) test_failed("tokens from %lld on: %s", (long long)first, wrong);
    layer_free(&few);
}

static void more_elements_than_32_bits_count(void **state)
{
    (void)state;
    need_gpu();
    if (test_quick()) {
        fprintf(stderr, "  skipped: WEFT_TEST_QUICK\n");
        skip();
    }
    enum { TOKENS = 262144 };
    const int64_t row = P,
                  firsts[] = {EDGE, (((int64_t)1 << 31) + row - 1) / row, (((int64_t)1 << 32) + row - 1) / row,
                              (((int64_t)1 << 31) + row / 2 - 1) / row - 2, TOKENS - SLICE - EDGE};
    layer all;
    const char *wrong = layer_make(&all, TOKENS);
    if (!wrong) wrong = layer_run(&all);
    if (wrong)
        test_failed("%d tokens: %s", TOKENS, wrong);
    else
        for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++) compare_slice(&all, firsts[i]);
    layer_free(&all);
    test_verdict();
}

static bool margins_are_whole(const layer *l)
{
    unsigned char margin[MARGIN];
    for (int i = 0; i < l->count; i++) {
        if (device_get(margin, l->memory[i] + l->bytes[i], MARGIN)) return false;
        for (int k = 0; k < MARGIN; k++)
            if (margin[k] != SENTINEL) return false;
    }
    return true;
}

/* Offsets on the device are nobody's to check before the kernel runs: whatever they are, nothing beside is touched. */
static void bad_offsets_stay_inside(void **state)
{
    (void)state;
    need_gpu();
    static const int32_t bad[][4] = {
        {0, 9, 4, 40}, {3, 2, 1, 0}, {-5, 7, 1 << 30, 8}, {40, 40, 40, 40}, {0, 0, 0, -1}};
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        layer l;
        const char *wrong = layer_make(&l, 16);
        void *cu = device_alloc(sizeof bad[k]);
        if (!wrong) wrong = cu ? device_put(cu, bad[k], sizeof bad[k]) : "no memory";
        l.fwd.cu_seqlens = l.bwd.cu_seqlens = weft_dense1(cu, WEFT_I32, 4);
        if (!wrong) wrong = layer_run(&l);
        if (wrong) test_failed("offsets %d: %s", (int)k, wrong);
        if (!margins_are_whole(&l)) test_failed("offsets %d: memory beside a tensor was written", (int)k);
        device_free(cu);
        layer_free(&l);
    }
    test_verdict();
}

/* ---- rows of a cache ---------------------------------------------------------------------------------------------------- */

/* Calls that together take all kernels of decoding; `requests` decides whether a launch in front finds the rows. */
enum { STEP_VARIANTS = 10, STEP_SIZES = 3 };
static const int64_t step_sizes[STEP_SIZES] = {7, 70, 600};

static spec step_variant(int variant, int64_t requests)
{
    spec s = {.op = "gdn_pre_step", .tokens = requests, .streams = 4, .channels = 64, .act = WEFT_BF16};
    s.steps = 1 + variant % 2;
    s.history = 3;
    s.wide = s.act;
    s.gdn = weft_gdn_defaults();
    if (variant < 2 || variant == 5) s.absent = " bias "; /* the usual case */
    if (variant == 1) s.act = s.wide = WEFT_F32, s.history = 4;
    if (variant == 2) s.packed = true;
    if (variant == 3) s.gdn.g_chunk = 2, s.wide = WEFT_F32;
    if (variant == 4) s.act = s.wide = WEFT_F16, s.channels = 17, s.param_layout = LAYOUT_LOOSE;
    if (variant == 5) s.width = 3, s.channels = 32;
    if (variant >= 6) { /* whole heads or any, states of 16 bits or fp32 */
        s.op = "gdn_rule_step";
        s.streams = s.key_heads = s.heads = 1;
        s.value_dim = 16;
        s.wide = variant % 2 ? WEFT_F32 : s.act;
        if (variant >= 8) s.channels = 17;
    }
    s.seed = (uint64_t)variant / 2; /* i32, i64 */
    return s;
}

/* Results and states of a call on the GPU, the states in place or in a cache of their own. */
static pack step_on_gpu(problem *p, bool in_place)
{
    const weft_tensor apart = *problem_arg(p, "new_state")->view;
    problem_seal(p);
    if (in_place) *problem_arg(p, "new_state")->view = *problem_arg(p, "state")->view;
    const weft_status status = in_place ? problem_call(p, on_cuda(0)) : problem_run(p, on_cuda(0));
    if (status != WEFT_OK) test_failed("%s: %s", problem_text(p), weft_last_error());
    pack k = problem_pack(p);
    problem_reset(p);
    *problem_arg(p, "new_state")->view = apart;
    return k;
}

/* Rows that the cache does not have and rows that two requests name. */
static void pad_bad_rows(arg *index, double rows)
{
    double *row = arg_values(index);
    for (int64_t n = 0; n < index->elements; n++) {
        bool bad = row[n] < 0 || row[n] >= rows;
        for (int64_t m = 0; m < index->elements; m++) bad = bad || (m != n && row[m] == row[n]);
        if (bad) arg_set(index, n, -1);
    }
    free(row);
}

/* A call with bad rows has the bits of the same call with padding in their place, whose padding is zero and touches no state
 * (test_gdn_promises.c). */
static void expect_padding(const spec *s, const int64_t *at, const double *row, int count, const char *what)
{
    for (int in_place = 0; in_place < 2; in_place++) {
        problem *p = problem_make(s);
        arg *index = problem_arg(p, "state_index");
        for (int i = 0; i < count; i++) arg_set(index, at[i], row[i]);
        pack got = step_on_gpu(p, in_place);
        pad_bad_rows(index, (double)(s->tokens + 2));
        for (int i = 0; i < count; i++)
            if (arg_get(index, at[i]) != -1) test_failed("request %lld was to be padding", (long long)at[i]);
        pack want = step_on_gpu(p, in_place);
        pack_expect_same(p, &got, &want, what);
        pack_free(&want), pack_free(&got);
        problem_free(p);
    }
}

/* Two requests and more with one row: neighbours, far apart, first and last; a row that is another one's, and one that is not. */
static void rows_named_twice_are_padding(void **state)
{
    (void)state;
    need_gpu();
    for (int v = 0; v < STEP_VARIANTS; v++)
        for (int k = 0; k < STEP_SIZES; k++) {
            const spec s = step_variant(v, step_sizes[k]);
            const int64_t last = s.tokens - 1;
            expect_padding(&s, (const int64_t[]){0, 1}, (const double[]){0, 0}, 2, "neighbours with one row");
            expect_padding(&s, (const int64_t[]){0, last}, (const double[]){1, 1}, 2,
                           "first and last with one row");
            expect_padding(&s, (const int64_t[]){last / 2, last, 2, 0}, (const double[]){3, 3, 3, (double)s.tokens},
                           4, "rows of others");
        }
    test_verdict();
}

static void rows_outside_the_cache_are_padding(void **state)
{
    (void)state;
    need_gpu();
    for (int v = 0; v < STEP_VARIANTS; v++)
        for (int k = 0; k < STEP_SIZES; k++) {
            const spec s = step_variant(v, step_sizes[k]);
            const int64_t at[] = {0, 1, 3, s.tokens - 1};
            const bool wide = s.seed % 2;
            const double row[] = {(double)s.tokens + 2, -2, wide ? 0x1p40 : 0x1p30, wide ? -0x1p62 : -0x1p31};
            expect_padding(&s, at, row, 4, "a row outside of the cache");
        }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(more_elements_than_32_bits_count),
        cmocka_unit_test(rows_named_twice_are_padding),
        cmocka_unit_test(rows_outside_the_cache_are_padding),
        cmocka_unit_test(bad_offsets_stay_inside),
    };
    return suite_run("cuda_gdn", tests);
}

#else

int main(void)
{
    return suite_without_cuda("cuda_gdn");
}

#endif
