/* SPDX-License-Identifier: Apache-2.0
 *
 * Random numbers by counter: element i of a stream is a pure function of its seed and i, so a tensor has the same
 * values however many threads fill it, and a failure is reproducible. */
#ifndef WEFT_CHECK_RANDOM_H
#define WEFT_CHECK_RANDOM_H

#include <stdint.h>

static inline uint64_t random_bits(uint64_t seed, uint64_t index)
{
    uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Between 0 and 1, neither of them. */
static inline float random_uniform(uint64_t seed, uint64_t index)
{
    return ((float)(random_bits(seed, index) >> 41) + 0.5f) * 0x1p-23f;
}

/* Mean 0, variance 1, within +-3.5: the sum of four uniform numbers from one draw. */
static inline float random_normal(uint64_t seed, uint64_t index)
{
    uint64_t bits = random_bits(seed, index);
    int32_t sum = (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff) + (int32_t)(bits >> 32 & 0xffff) +
                  (int32_t)(bits >> 48);
    return (float)(sum - 131070) * (1.7320508f / 65536);
}

/* A seed for a named stream of another seed. */
static inline uint64_t random_seed(uint64_t seed, const char *name)
{
    for (uint64_t i = 0; name[i]; i++) seed = random_bits(seed ^ (unsigned char)name[i], i);
    return seed;
}

/* ---- one after the other: the elements of a stream from the first on --------------------------------------------- */

typedef struct rng {
    uint64_t state;
} rng;

static inline uint64_t rng_next(rng *r)
{
    uint64_t bits = random_bits(r->state, 0);
    r->state += 0x9e3779b97f4a7c15u;
    return bits;
}

/* [0, 1) */
static inline double rng_uniform(rng *r)
{
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

/* 0 .. count-1 */
static inline int64_t rng_below(rng *r, int64_t count)
{
    return (int64_t)(rng_next(r) % (uint64_t)count);
}

/* Mean 0, variance 1, bounded by 3.5, with all the bits of a double. */
static inline double rng_normal(rng *r)
{
    uint64_t a = rng_next(r), b = rng_next(r);
    double sum = (double)(a & 0xffffffffu) + (double)(a >> 32) + (double)(b & 0xffffffffu) + (double)(b >> 32);
    return (sum * 0x1p-32 - 2.0) * 1.7320508075688772;
}

static inline uint64_t rng_mix(uint64_t seed, uint64_t value)
{
    rng r = {seed ^ (value * 0xff51afd7ed558ccdu)};
    return rng_next(&r);
}

static inline uint64_t rng_name(uint64_t seed, const char *name)
{
    for (; *name; name++) seed = (seed ^ (uint64_t)(unsigned char)*name) * 0x100000001b3u;
    return rng_mix(seed, 1);
}

#endif
