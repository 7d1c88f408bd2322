/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32C of the program's checkpoints: the values of RFC 3720, appendix B.4, and both ways of computing it. */
#include "common/checksum.h"

#include "support/suite.h"

static void known_values(void **state)
{
    unsigned char bytes[32];
    (void)state;
    static uint32_t (*const ways[])(uint32_t, const void *, size_t) = {checksum_crc32c, checksum_crc32c_portable};
    for (int way = 0; way < 2; way++) {
        assert_int_equal(ways[way](0, "", 0), 0);
        assert_int_equal(ways[way](0, "123456789", 9), 0xe3069283u);
        memset(bytes, 0, sizeof bytes);
        assert_int_equal(ways[way](0, bytes, sizeof bytes), 0x8a9136aau);
        memset(bytes, 0xff, sizeof bytes);
        assert_int_equal(ways[way](0, bytes, sizeof bytes), 0x62a8ab43u);
        for (int i = 0; i < 32; i++) bytes[i] = (unsigned char)i;
        assert_int_equal(ways[way](0, bytes, sizeof bytes), 0x46dd794eu);
        for (int i = 0; i < 32; i++) bytes[i] = (unsigned char)(31 - i);
        assert_int_equal(ways[way](0, bytes, sizeof bytes), 0x113fdb5cu);
    }
}

/* Any length, any alignment, in one piece or in two. */
static void ways_agree(void **state)
{
    enum { SIZE = 200 };
    unsigned char bytes[SIZE];
    uint32_t random = 1;
    (void)state;
    for (int i = 0; i < SIZE; i++) bytes[i] = (unsigned char)((random = random * 1664525u + 1013904223u) >> 24);
    for (size_t begin = 0; begin < 16; begin++)
        for (size_t size = 0; begin + size <= SIZE; size++) {
            uint32_t whole = checksum_crc32c_portable(0, bytes + begin, size);
            size_t first = size / 3;
            assert_int_equal(checksum_crc32c(0, bytes + begin, size), whole);
            uint32_t part = checksum_crc32c(0, bytes + begin, first);
            assert_int_equal(checksum_crc32c(part, bytes + begin + first, size - first), whole);
            part = checksum_crc32c_portable(0, bytes + begin, first);
            assert_int_equal(checksum_crc32c_portable(part, bytes + begin + first, size - first), whole);
        }
}

static void every_flipped_bit_shows(void **state)
{
    enum { SIZE = 512 };
    unsigned char bytes[SIZE] = {1, 2, 3};
    (void)state;
    uint32_t whole = checksum_crc32c(0, bytes, SIZE);
    for (int bit = 0; bit < SIZE * 8; bit++) {
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        assert_int_not_equal(checksum_crc32c(0, bytes, SIZE), whole);
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_values),
        cmocka_unit_test(ways_agree),
        cmocka_unit_test(every_flipped_bit_shows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
