/* SPDX-License-Identifier: Apache-2.0
 *
 * Dropout factors of a run of channels: core/philox.h for many draws at a time. */
#ifndef WEFT_CPU_MASK_H
#define WEFT_CPU_MASK_H

#include "core/philox.h"
#include "cpu/common/vec.h"

enum { DRAWS = 16 };

/* DRAWS consecutive quads, the rounds of all of them in step so that the compiler can vectorise over them. */
static inline void draw_many(uint32_t out[DRAWS][4], const weft_mask *m, int64_t token, int64_t quad)
{
    uint64_t t = (uint64_t)(m->token_base + token);
    uint32_t c0[DRAWS], c1[DRAWS], c2[DRAWS], c3[DRAWS], k0 = m->key[0], k1 = m->key[1];
    for (int i = 0; i < DRAWS; i++) {
        uint64_t q = (uint64_t)quad + (uint64_t)i;
        c0[i] = (uint32_t)t, c1[i] = (uint32_t)(t >> 32), c2[i] = (uint32_t)q, c3[i] = (uint32_t)(q >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < DRAWS; i++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[i], p1 = (uint64_t)0xCD9E8D57u * c2[i];
            uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)p1, c3[i] = (uint32_t)p0, c0[i] = n0, c2[i] = n2;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < DRAWS; i++) out[i][0] = c0[i], out[i][1] = c1[i], out[i][2] = c2[i], out[i][3] = c3[i];
}

/* dst[i * ld + c] = 0 or 1/(1-p) for channels c0 .. c0+count of every stream of a token. */
static inline void mask_fill(float *dst, int64_t ld, const weft_mask *m, int64_t token, int n, int64_t c0, int64_t count)
{
    uint32_t draw[DRAWS][4];
    float scale = (float)m->scale;
    for (int i = 0; i < n; i++) {
        if (m->shared && i > 0) {
            memcpy(dst + i * ld, dst, (size_t)count * 4);
            continue;
        }
        int64_t e = i * m->channels + c0, end = e + count;
        float *row = dst + i * ld - e;
        while (e < end) {
            int64_t quad = e / 4, stop = (quad + DRAWS) * 4 < end ? (quad + DRAWS) * 4 : end;
            draw_many(draw, m, token, quad);
            for (; e < stop; e++) row[e] = draw[e / 4 - quad][e % 4] >= m->threshold ? scale : 0.0f;
        }
    }
}

#endif
