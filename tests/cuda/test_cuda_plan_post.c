/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes of post and replay on the CUDA backend: every channel of every token has one thread, blocks and
 * workspace stay within their limits, and what decides a sum's order does not depend on tokens or the GPU. */
#include "cuda/mhc/mhc_post_plan.h"
#include "support/suite.h"

static const int64_t tokens[] = {1, 2, 7, 127, 128, 131, 132, 133, 1000, 8192, 65537, (int64_t)1 << 40};
static const int64_t channels[] = {1,    8,    9,    32,   64,   100,  128,   512,   1024,
                                   1032, 2048, 2560, 4096, 6656, 7168, 12288, 16384, 50000};
static const int32_t shapes[][2] = {{8, 1}, {4, 1}, {2, 4}, {1, 4}, {1, 2}, {8, 2}, {4, 2}}; /* width, batch */
static const int32_t gpus[] = {1, 46, 108, 132, 148, 4096};

#define EACH(name, array) for (size_t name = 0; name < sizeof(array) / sizeof *(array); name++)

typedef void check(const post_shape *s);

static void for_each_shape(check *one)
{
    EACH(t, tokens)
    EACH(c, channels)
    EACH(w, shapes)
    EACH(g, gpus)
    {
        if (channels[c] % shapes[w][0]) continue; /* such shapes take the kernels for any layout */
        post_shape s = {tokens[t], channels[c], shapes[w][0], shapes[w][1], 80, gpus[g]};
        one(&s);
        s.room = 8 * 320; /* eight layers of eight streams in replay */
        one(&s);
    }
}

static void forward_one(const post_shape *s)
{
    const post_fwd_plan p = weft_post_plan_fwd(s);
    const int64_t tiles = s->channels / s->width;
    assert_in_range(p.block, 32, POST_BLOCK);
    assert_int_equal(p.block % 32, 0);
    assert_true(p.team >= 1 && p.per_block >= 1 && p.team * p.per_block <= p.block);
    assert_true(p.block - p.team * p.per_block < 32);
    assert_true(p.per_block == 1 || p.spans == 1);
    /* all tiles have a thread, and no block is without one */
    assert_true((int64_t)p.spans * s->batch * p.team >= tiles);
    assert_true((int64_t)(p.spans - 1) * s->batch * p.team < tiles);
    assert_true(p.groups >= 1 && p.groups <= (s->tokens + p.per_block - 1) / p.per_block);
    assert_true(p.groups * p.spans <= POST_MOST_GRID);
    assert_true(s->tokens > POST_MOST_GRID / p.spans || p.groups * p.per_block >= s->tokens);
    assert_true(p.shared == p.per_block * s->room && p.shared <= 48 * 1024);
}

static void forward_covers_everything(void **state)
{
    (void)state;
    for_each_shape(forward_one);
}

static void forward_keeps_the_gpu_busy(void **state)
{
    (void)state;
    EACH(t, tokens)
    {
        const post_shape s = {tokens[t], 4096, 8, 1, 80, 132};
        const post_fwd_plan p = weft_post_plan_fwd(&s);
        assert_true(p.groups * p.spans >= 132 || p.block <= 64);
        if (tokens[t] >= 132) assert_int_equal(p.block, POST_BLOCK);
    }
    /* the sizes of public models leave no thread without work */
    static const int64_t usual[] = {2048, 2560, 4096, 5120, 7168, 8192, 12288, 16384};
    EACH(c, usual)
    {
        const post_shape s = {8192, usual[c], 8, 1, 80, 132};
        const post_fwd_plan p = weft_post_plan_fwd(&s);
        assert_int_equal((int64_t)p.spans * p.team * 8, usual[c]);
    }
}

static void backward_one(const post_shape *s)
{
    const post_bwd_plan p = weft_post_plan_bwd(s);
    const int64_t tiles = s->channels / s->width, batch = (int64_t)p.team * s->batch;
    assert_in_range(p.block, 32, POST_BLOCK);
    assert_int_equal(p.team % 32, 0);
    assert_int_equal(p.block, p.team * p.per_block);
    assert_true(p.per_block == 1 || p.team == 32);
    assert_true(p.steps * batch >= tiles && (p.steps - 1) * batch < tiles);
    /* the order of sums: from channels and the kernel's tile alone */
    post_shape other = *s;
    EACH(t, tokens)
    EACH(g, gpus)
    {
        other.tokens = tokens[t];
        other.sms = gpus[g];
        const post_bwd_plan q = weft_post_plan_bwd(&other);
        assert_true(q.team == p.team && q.steps == p.steps);
    }
}

static void backward_covers_everything(void **state)
{
    (void)state;
    for_each_shape(backward_one);
}

static void chunks_cover_tokens_in_bounds(void **state)
{
    (void)state;
    EACH(t, tokens)
    EACH(c, channels)
    {
        const post_chunks k = weft_post_plan_chunks(tokens[t], channels[c]);
        assert_true(k.count >= 1 && k.tokens >= 1);
        assert_true(k.count * k.tokens >= tokens[t] && (k.count - 1) * k.tokens < tokens[t]);
        assert_true(k.count * channels[c] * 4 <= POST_PARTIAL_BYTES);
    }
    assert_int_equal(weft_post_plan_chunks(0, 64).count, 0);
    assert_int_equal(weft_post_plan_chunks(1000, (int64_t)1 << 30).count, 1);
}

static void any_layout(void **state)
{
    (void)state;
    EACH(t, tokens)
    EACH(c, channels)
    for (int64_t n = 1; n <= 32; n++) {
        const post_any_plan p = weft_post_plan_any(tokens[t], n, channels[c]);
        assert_true((int64_t)p.spans * p.count >= channels[c] && (int64_t)(p.spans - 1) * p.count < channels[c]);
        assert_true(p.groups >= 1 && p.groups * p.spans <= POST_MOST_GRID);
        assert_int_equal(p.count, weft_post_plan_any(1, n, 1).count);
        /* backward: three rows for each stream, one more, and the coefficients */
        assert_true(((3 * n + 1) * (p.count + 1) + n * (n + 1)) * 4 <= 48 * 1024);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_covers_everything),
        cmocka_unit_test(forward_keeps_the_gpu_busy),
        cmocka_unit_test(backward_covers_everything),
        cmocka_unit_test(chunks_cover_tokens_in_bounds),
        cmocka_unit_test(any_layout),
    };
    return suite_run("cuda_plan_post", tests);
}
