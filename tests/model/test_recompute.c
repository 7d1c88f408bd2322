/* SPDX-License-Identifier: Apache-2.0
 *
 * Recompute by itself: groups, sizes, states. What it rebuilds is tested with the model. */
#include "support/suite.h"

#include <weft/recompute.h>

#include "support/memory.h"

static weft_recompute_desc desc_of(int32_t layers, int32_t group)
{
    return (weft_recompute_desc){.struct_size = sizeof(weft_recompute_desc),
                                 .layers = layers,
                                 .recompute = 1,
                                 .group = group,
                                 .tokens = 16,
                                 .streams = 4,
                                 .channels = 16,
                                 .dtype = WEFT_F32};
}

static void groups(void **state)
{
    (void)state;
    static const struct {
        int32_t layers, group;
        const char *ends;
    } cases[] = {{4, 0, "0001"}, {4, 2, "0101"}, {5, 2, "01011"}, {5, 3, "00101"}, {3, 1, "111"}, {1, 1, "1"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        weft_recompute_desc d = desc_of(cases[i].layers, cases[i].group);
        weft_recompute_bytes bytes;
        weft_recompute recompute;
        assert_int_equal(weft_recompute_query(&d, &bytes), WEFT_OK);
        void *memory = must_alloc(bytes.total);
        assert_int_equal(weft_recompute_open(&d, memory, bytes.total, &recompute), WEFT_OK);
        int32_t group = 0;
        for (int32_t layer = 0; layer < d.layers; layer++) {
            assert_int_equal(weft_recompute_group_of(&recompute, layer), group);
            assert_int_equal(weft_recompute_ends_group(&recompute, layer), cases[i].ends[layer] == '1');
            group += weft_recompute_ends_group(&recompute, layer);
        }
        assert_int_equal(group, recompute.groups);
        free(memory);
    }
}

/* In units of one token's channels: (groups + 1) n + (2k - 1) n + 2k. */
static void sizes(void **state)
{
    (void)state;
    for (int32_t layers = 1; layers <= 33; layers += 4) {
        size_t least = 0;
        int32_t best = 0;
        for (int32_t k = 1; k <= layers; k++) {
            weft_recompute_desc d = desc_of(layers, k);
            weft_recompute_bytes b;
            const size_t unit = 16 * 16 * sizeof(float), n = 4, g = (size_t)((layers + k - 1) / k);
            assert_int_equal(weft_recompute_query(&d, &b), WEFT_OK);
            assert_int_equal(b.resident, unit * (g + 1) * n);
            assert_int_equal(b.transient, unit * (n * (size_t)(2 * k - 1) + 2 * (size_t)k));
            assert_int_equal(b.total, b.resident + b.transient);
            assert_int_equal(b.keep_all, unit * (n * (size_t)(2 * layers + 1) + 2 * (size_t)layers));
            if (!best || b.total < least) least = b.total, best = k;
        }
        assert_int_equal(weft_recompute_best_group(layers, 4), best);
    }
    assert_int_equal(weft_recompute_best_group(0, 4), 0);
    assert_int_equal(weft_recompute_best_group(4, 0), 0);
}

static void states(void **state)
{
    (void)state;
    weft_recompute_desc d = desc_of(4, 2);
    weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);
    weft_recompute_bytes bytes;
    weft_recompute recompute;
    weft_recompute_site at;
    weft_mhc_replay_layer layers[4];
    for (int i = 0; i < 4; i++) layers[i] = WEFT_STRUCT(weft_mhc_replay_layer, .sub_eps = 1e-6);
    weft_recompute_replay_args args = {.struct_size = sizeof args, .layers = layers, .num_layers = 4};
    weft_recompute_query(&d, &bytes);
    void *memory = must_alloc(bytes.total);
    assert_int_equal(weft_recompute_open(&d, memory, bytes.total, &recompute), WEFT_OK);
    weft_recompute_begin(&recompute);
    assert_int_equal(weft_recompute_close(&recompute, &exec, 0), WEFT_ERR_STATE); /* idle */
    assert_int_equal(weft_recompute_replay(&recompute, &exec, &args), WEFT_ERR_STATE);
    assert_int_equal(weft_recompute_release(&recompute, 0), WEFT_ERR_STATE);
    assert_int_equal(weft_recompute_site_at(&recompute, 1, &at),
                     WEFT_ERR_STATE); /* not the first site of its group */
    assert_int_equal(weft_recompute_site_at(&recompute, 0, &at), WEFT_OK);
    assert_int_equal(weft_recompute_site_at(&recompute, 4, &at),
                     WEFT_ERR_STATE); /* group 0 is open and has the memory */
    assert_int_equal(weft_recompute_replay(&recompute, &exec, &args), WEFT_ERR_STATE);
    assert_int_equal(weft_recompute_release(&recompute, 0), WEFT_ERR_STATE);
    assert_int_equal(weft_recompute_close(&recompute, &exec, 0), WEFT_OK);
    assert_int_equal(weft_recompute_close(&recompute, &exec, 0), WEFT_OK); /* twice is once */
    assert_int_equal(weft_recompute_site_at(&recompute, 0, &at), WEFT_ERR_STATE);
    assert_non_null(strstr(weft_last_error(), "discarded"));
    assert_int_equal(weft_recompute_release(&recompute, 0), WEFT_ERR_STATE);
    assert_int_equal(weft_recompute_site_at(&recompute, 8, &at), WEFT_ERR_ARGUMENT);
    assert_int_equal(weft_recompute_close(&recompute, &exec, 2), WEFT_ERR_ARGUMENT);
    args.num_layers = 3;
    assert_int_equal(weft_recompute_replay(&recompute, &exec, &args), WEFT_ERR_ARGUMENT);
    weft_recompute_begin(&recompute);
    assert_int_equal(weft_recompute_site_at(&recompute, 0, &at), WEFT_OK); /* a new pass */
    free(memory);
}

static void bad_descriptions(void **state)
{
    (void)state;
    const weft_recompute_desc good = desc_of(4, 2);
    weft_recompute_desc d;
    weft_recompute_bytes bytes;
#define BAD(...)                                                                                                   \
    do {                                                                                                           \
        d = good;                                                                                                  \
        __VA_ARGS__;                                                                                               \
        assert_int_equal(weft_recompute_query(&d, &bytes), WEFT_ERR_ARGUMENT);                                     \
    } while (0)
    BAD(d.layers = 0);
    BAD(d.layers = WEFT_RECOMPUTE_MAX_LAYERS + 1);
    BAD(d.group = 5);
    BAD(d.group = -1);
    BAD(d.recompute = 0);
    BAD(d.recompute = d.group = 0, d.poison = 1);
    BAD(d.streams = 0);
    BAD(d.streams = 33);
    BAD(d.channels = 0);
    BAD(d.tokens = -1);
    BAD(d.dtype = WEFT_NONE);
    BAD(d.dtype = WEFT_I32);
    BAD(d.struct_size = 0);
#undef BAD
    weft_recompute recompute;
    assert_int_equal(weft_recompute_open(&good, NULL, 1 << 30, &recompute), WEFT_ERR_WORKSPACE);
    assert_int_equal(weft_recompute_query(NULL, &bytes), WEFT_ERR_ARGUMENT);
    assert_int_equal(weft_recompute_begin(NULL), WEFT_ERR_ARGUMENT);
    assert_int_equal(weft_recompute_site_at(NULL, 0, NULL), WEFT_ERR_ARGUMENT);
    assert_int_equal(weft_recompute_release(NULL, 0), WEFT_ERR_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups),
        cmocka_unit_test(sizes),
        cmocka_unit_test(states),
        cmocka_unit_test(bad_descriptions),
    };
    return suite_run("recompute", tests);
}
