/* SPDX-License-Identifier: Apache-2.0
 *
 * Dropout factors of a run of channels: core/philox.h for many draws at a time. */
#ifndef WEFT_CPU_MASK_H
#define WEFT_CPU_MASK_H

#include "core/philox.h"
#include "cpu/common/vec.h"

enum { DRAWS = LANES };
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

/* High and low halves of a * m, lane by lane. */
INLINE void mul_wide(vu a, uint32_t m, vu *high, vu *low)
{
#if WEFT_CPU_LEVEL == 2
    __m512i k = _mm512_set1_epi32((int)m), v = (__m512i)a;
    __m512i even = _mm512_mul_epu32(v, k), odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), k);
    *high = (vu)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    *low = (vu)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif WEFT_CPU_LEVEL == 1
    __m256i k = _mm256_set1_epi32((int)m), v = (__m256i)a;
    __m256i even = _mm256_mul_epu32(v, k), odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), k);
    *high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
    for (int i = 0; i < LANES; i++) {
        uint64_t p = (uint64_t)a[i] * m;
        (*high)[i] = (uint32_t)(p >> 32);
        (*low)[i] = (uint32_t)p;
    }
#endif
}

/* Factors of the elements of DRAWS consecutive quads, one quad per lane. */
static inline void factors_of(float out[DRAWS * 4], const weft_mask *m, int64_t token, int64_t quad)
{
    uint64_t t = (uint64_t)(m->token_base + token);
    uint32_t k0 = m->key[0], k1 = m->key[1];
    vu zero = {0}, c0 = zero + (uint32_t)t, c1 = zero + (uint32_t)(t >> 32), c2 = zero, c3 = zero, h0 = zero,
       l0 = zero, h1 = zero, l1 = zero;
    for (int i = 0; i < DRAWS; i++) {
        uint64_t q = (uint64_t)quad + (uint64_t)i;
        c2[i] = (uint32_t)q, c3[i] = (uint32_t)(q >> 32);
    }
    for (int round = 0; round < 10; round++) {
        mul_wide(c0, 0xD2511F53u, &h0, &l0);
        mul_wide(c2, 0xCD9E8D57u, &h1, &l1);
        c0 = h1 ^ c1 ^ k0;
        c2 = h0 ^ c3 ^ k1;
        c1 = l1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    vf scale = vf_set1((float)m->scale), none = vf_set1(0), f[4];
    vu least = zero + m->threshold;
    f[0] = vf_select((vi)(c0 >= least), scale, none);
    f[1] = vf_select((vi)(c1 >= least), scale, none);
    f[2] = vf_select((vi)(c2 >= least), scale, none);
    f[3] = vf_select((vi)(c3 >= least), scale, none);
    const float *w = (const float *)f;
    for (int i = 0; i < DRAWS; i++)
        for (int k = 0; k < 4; k++) out[4 * i + k] = w[k * LANES + i];
}

/* dst[i * ld + c] = 0 or 1/(1-p) for channels c0 .. c0+count of every stream of a token, and 0 up to the next multiple of
 * 16. */
static inline void mask_fill(float *dst, int64_t ld, const weft_mask *m, int64_t token, int n, int64_t c0,
                             int64_t count)
{
    float factors[DRAWS * 4];
    for (int i = 0; i < n; i++) {
        if (m->shared && i > 0) {
            memcpy(dst + i * ld, dst, (size_t)((count + WIDE - 1) / WIDE * WIDE) * 4);
            continue;
        }
        int64_t first = i * m->channels + c0;
        for (int64_t done = 0; done < count;) {
            int64_t e = first + done, skip = e % 4, part = DRAWS * 4 - skip;
            if (part > count - done) part = count - done;
            factors_of(factors, m, token, e / 4);
            memcpy(dst + i * ld + done, factors + skip, (size_t)part * 4);
            done += part;
        }
        for (int64_t c = count; c % WIDE; c++) dst[i * ld + c] = 0;
    }
}

#endif
