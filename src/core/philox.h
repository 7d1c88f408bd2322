/* SPDX-License-Identifier: Apache-2.0
 *
 * Dropout masks as a pure function of their coordinates [D1]. Philox4x32-10 (Salmon et al., SC 2011) turns a 128-bit
 * counter and a 64-bit key into 128 random bits; four neighbouring channels share one draw.
 *
 *     key     = seed, with site and step folded in by one Philox call of their own
 *     counter = (token low, token high, element/4 low, element/4 high), element = stream*C + channel
 *     word    = element % 4;   kept where word >= p * 2^32
 *
 * The same text compiles as CUDA. */
#ifndef WEFT_CORE_PHILOX_H
#define WEFT_CORE_PHILOX_H

#include <stdbool.h>
#include <stdint.h>
#include <weft/mhc.h>

#ifdef __CUDACC__
#define WEFT_HD __host__ __device__
#else
#define WEFT_HD
#endif

WEFT_HD static inline void weft_philox(uint32_t out[4], const uint32_t ctr[4], const uint32_t key[2])
{
    uint32_t c0 = ctr[0], c1 = ctr[1], c2 = ctr[2], c3 = ctr[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

typedef struct weft_mask {
    bool on;
    bool shared;
    uint32_t key[2];
    uint32_t threshold; /* kept where the draw is at least this */
    double scale;       /* of kept elements */
    int64_t token_base, channels;
} weft_mask;

/* Reads *step, so it runs where the mask is used. */
WEFT_HD static inline weft_mask weft_mask_open(const weft_dropout *d, int64_t channels)
{
    weft_mask m = {false, d->shared != 0, {0, 0}, 0, 1.0, d->token_base, channels};
    if (d->p > 0) {
        uint64_t step = d->step ? *d->step : 0;
        uint32_t ctr[4] = {(uint32_t)d->site, (uint32_t)(d->site >> 32), (uint32_t)step, (uint32_t)(step >> 32)};
        uint32_t seed[2] = {(uint32_t)d->seed, (uint32_t)(d->seed >> 32)}, draw[4];
        weft_philox(draw, ctr, seed);
        m.on = true;
        m.key[0] = draw[0];
        m.key[1] = draw[1];
        m.threshold = (uint32_t)(d->p * 4294967296.0);
        m.scale = 1.0 / (1.0 - d->p);
    }
    return m;
}

/* Four draws for elements 4*quad .. 4*quad+3 of a token. */
WEFT_HD static inline void weft_mask_draw(uint32_t out[4], const weft_mask *m, int64_t token, int64_t quad)
{
    uint64_t t = (uint64_t)(m->token_base + token), q = (uint64_t)quad;
    uint32_t ctr[4] = {(uint32_t)t, (uint32_t)(t >> 32), (uint32_t)q, (uint32_t)(q >> 32)};
    weft_philox(out, ctr, m->key);
}

WEFT_HD static inline bool weft_mask_keep(const weft_mask *m, int64_t token, int64_t stream, int64_t channel)
{
    if (!m->on) return true;
    uint32_t draw[4];
    int64_t element = (m->shared ? 0 : stream * m->channels) + channel;
    weft_mask_draw(draw, m, token, element / 4);
    return draw[element % 4] >= m->threshold;
}

#endif
