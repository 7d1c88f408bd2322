/* SPDX-License-Identifier: Apache-2.0
 *
 * Random numbers that come back: every stream is seeded from names and sizes, never from the clock. */
#ifndef WEFT_TESTS_RNG_H
#define WEFT_TESTS_RNG_H

#include <stdint.h>

typedef struct rng {
    uint64_t state;
} rng;

/* splitmix64: any seed is a good one, so hashes of names can be used as they are. */
static inline uint64_t rng_next(rng *r)
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
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

/* Mean 0, variance 1, bounded by 3.5: close enough to a normal and cheap enough for millions of values. */
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
