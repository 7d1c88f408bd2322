/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels were permitted, as the CUDA backend keeps it. No GPU is needed. */
#include "cuda/permits_table.h"
#include "support/suite.h"

static const void *kernel(uint64_t number)
{
    return (const void *)(uintptr_t)(0x7f0012340000u + 16 * number);
}

static void a_permit_is_for_one_kernel_and_device(void **state)
{
    static weft_permits all;
    const uint64_t word = weft_permit_word(kernel(1), 3, WEFT_PERMIT_SHARED);
    (void)state;
    assert_false(weft_permit_kept(&all, word));
    weft_permit_keep(&all, word);
    weft_permit_keep(&all, word);
    assert_true(weft_permit_kept(&all, word));
    assert_false(weft_permit_kept(&all, weft_permit_word(kernel(2), 3, WEFT_PERMIT_SHARED)));
    assert_false(weft_permit_kept(&all, weft_permit_word(kernel(1), 2, WEFT_PERMIT_SHARED)));
    assert_false(weft_permit_kept(&all, weft_permit_word(kernel(1), 3, WEFT_PERMIT_CLUSTER)));
    int used = 0;
    for (int i = 0; i < PERMIT_SLOTS; i++) used += all.slot[i] != 0;
    assert_int_equal(used, 1);
}

static void what_does_not_fit_a_word_is_not_kept(void **state)
{
    static weft_permits all;
    (void)state;
    assert_int_equal(weft_permit_word(kernel(1), PERMIT_DEVICES, WEFT_PERMIT_SHARED), 0);
    assert_int_equal(weft_permit_word(kernel(1), -1, WEFT_PERMIT_SHARED), 0);
    assert_int_equal(weft_permit_word((const void *)~(uintptr_t)0, 0, WEFT_PERMIT_SHARED), 0);
    weft_permit_keep(&all, 0);
    assert_false(weft_permit_kept(&all, 0));
}

/* As many as the library has kernels are all kept; far more are not, and none is taken for another. */
static void a_full_set_forgets_nothing(void **state)
{
    static weft_permits all;
    enum { FEW = 512, MANY = 3 * PERMIT_SLOTS };
    static bool kept[MANY];
    (void)state;
    for (int i = 0; i < MANY; i++) {
        const uint64_t word = weft_permit_word(kernel((uint64_t)i), 0, WEFT_PERMIT_SHARED);
        assert_false(weft_permit_kept(&all, word));
        weft_permit_keep(&all, word);
        kept[i] = weft_permit_kept(&all, word);
        if (i < FEW) assert_true(kept[i]);
    }
    int count = 0;
    for (int i = 0; i < MANY; i++) {
        assert_int_equal(weft_permit_kept(&all, weft_permit_word(kernel((uint64_t)i), 0, WEFT_PERMIT_SHARED)),
                         kept[i]);
        count += kept[i];
    }
    assert_in_range(count, FEW, PERMIT_SLOTS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_permit_is_for_one_kernel_and_device),
        cmocka_unit_test(what_does_not_fit_a_word_is_not_kept),
        cmocka_unit_test(a_full_set_forgets_nothing),
    };
    return suite_run("cuda_permits", tests);
}
