/* SPDX-License-Identifier: Apache-2.0
 *
 * The vectors of the CPU backend. A file is compiled once per instruction set (WEFT_CPU_LEVEL 0 portable, 1 AVX2,
 * 2 AVX-512 with its bf16 conversions); vf is the widest float vector there, and + - * / are the compiler's own operators on it.
 *
 * Sums over channels always run in 16 lanes: channel c belongs to lane c % 16, a narrower machine takes STEP vectors
 * for the 16 lanes, and vf_sum16 adds the lanes in one fixed tree. Contraction is off and every fused multiply-add is
 * written as vf_fma, so AVX2 and AVX-512 give the same bits. */
#ifndef WEFT_CPU_VEC_H
#define WEFT_CPU_VEC_H

#include <stdbool.h>
#include <string.h>

#include "core/half.h"
#include "core/kernel.h"

#if WEFT_CPU_LEVEL > 0
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { WIDE = 16 }; /* lanes of a sum */

#if WEFT_CPU_LEVEL == 2
enum { LANES = 16 };
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
#elif WEFT_CPU_LEVEL == 1
enum { LANES = 8 };
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
#else
enum { LANES = 4 };
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
#endif
enum { STEP = WIDE / LANES };

INLINE vf vf_set1(float x)
{
    vf v = {0};
    return v + x;
}

INLINE vf vf_load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void vf_store(float *p, vf v)
{
    memcpy(p, &v, sizeof v);
}

INLINE vf vf_fma(vf a, vf b, vf c)
{
#if WEFT_CPU_LEVEL == 2
    return _mm512_fmadd_ps(a, b, c);
#elif WEFT_CPU_LEVEL == 1
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE vf vf_select(vi mask, vf a, vf b)
{
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
}

/* a > b ? x : y and a == b ? x : y, lane by lane. In the compiler's own operators a mask becomes a vector and back. */
INLINE vf vf_gt(vf a, vf b, vf x, vf y)
{
#if WEFT_CPU_LEVEL == 2
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
#elif WEFT_CPU_LEVEL == 1
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
#else
    return vf_select(a > b, x, y);
#endif
}

INLINE vf vf_eq(vf a, vf b, vf x, vf y)
{
#if WEFT_CPU_LEVEL == 2
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), y, x);
#elif WEFT_CPU_LEVEL == 1
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
#else
    return vf_select(a == b, x, y);
#endif
}

/* The lanes in which a > b, a bit each, and all of them. */
enum { ALL_LANES = (1 << LANES) - 1 };
INLINE int vf_lanes_gt(vf a, vf b)
{
#if WEFT_CPU_LEVEL == 2
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
#elif WEFT_CPU_LEVEL == 1
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ));
#else
    int lanes = 0;
    for (int i = 0; i < LANES; i++) lanes |= (a[i] > b[i]) << i;
    return lanes;
#endif
}

/* a > b ? a : b and a < b ? a : b: b where one of them is NaN. */
INLINE vf vf_max(vf a, vf b)
{
#if WEFT_CPU_LEVEL == 2
    return _mm512_max_ps(a, b);
#elif WEFT_CPU_LEVEL == 1
    return _mm256_max_ps(a, b);
#else
    return vf_select(a > b, a, b);
#endif
}

INLINE vf vf_min(vf a, vf b)
{
#if WEFT_CPU_LEVEL == 2
    return _mm512_min_ps(a, b);
#elif WEFT_CPU_LEVEL == 1
    return _mm256_min_ps(a, b);
#else
    return vf_select(a < b, a, b);
#endif
}

INLINE vf vf_sqrt(vf a)
{
#if WEFT_CPU_LEVEL == 2
    return _mm512_sqrt_ps(a);
#elif WEFT_CPU_LEVEL == 1
    return _mm256_sqrt_ps(a);
#else
    for (int i = 0; i < LANES; i++) a[i] = sqrtf(a[i]);
    return a;
#endif
}

/* ---- 16-bit rows ------------------------------------------------------------------------------------------------ */

INLINE vf vf_load_bf16(const uint16_t *p)
{
#if WEFT_CPU_LEVEL == 2
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p)), 16));
#elif WEFT_CPU_LEVEL == 1
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)), 16));
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = weft_bf16_to_f32(p[i]);
    return v;
#endif
}

INLINE vf vf_load_f16(const uint16_t *p)
{
#if WEFT_CPU_LEVEL == 2
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
#elif WEFT_CPU_LEVEL == 1
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = weft_f16_to_f32(p[i]);
    return v;
#endif
}

/* A vector narrowed to 16 bits, ready to be stored. */
#if WEFT_CPU_LEVEL == 2
typedef __m256i vh;
#elif WEFT_CPU_LEVEL == 1
typedef __m128i vh;
#else
typedef struct vh {
    uint16_t h[LANES];
} vh;
#endif

/* By integers rather than by the bf16 instructions, which flush denormals. */
INLINE vh vf_to_bf16(vf v)
{
#if WEFT_CPU_LEVEL == 2
    __m512i u = _mm512_castps_si512(v);
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)),
                                 _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1)));
    r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#elif WEFT_CPU_LEVEL == 1
    __m256i u = _mm256_castps_si256(v);
    __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)),
                                 _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
    r = _mm256_srli_epi32(r, 16);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08));
#else
    vh h;
    for (int i = 0; i < LANES; i++) h.h[i] = weft_f32_to_bf16(v[i]);
    return h;
#endif
}

INLINE vh vf_to_f16(vf v)
{
#if WEFT_CPU_LEVEL == 2
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif WEFT_CPU_LEVEL == 1
    return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    vh h;
    for (int i = 0; i < LANES; i++) h.h[i] = weft_f32_to_f16(v[i]);
    return h;
#endif
}

/* ---- rows of any 32- or 16-bit dtype; t is a constant wherever speed matters -------------------------------------- */

INLINE size_t size_of(weft_dtype t)
{
    return t == WEFT_F32 ? 4 : 2;
}

INLINE vf vf_get(weft_dtype t, const void *row, int64_t i)
{
    if (t == WEFT_F32) return vf_load((const float *)row + i);
    if (t == WEFT_BF16) return vf_load_bf16((const uint16_t *)row + i);
    return vf_load_f16((const uint16_t *)row + i);
}

/* `stream`: past the caches; the address must then be aligned to the vector. */
INLINE void vf_put(weft_dtype t, void *row, int64_t i, vf v, bool stream)
{
    if (t == WEFT_F32) {
        float *p = (float *)row + i;
#if WEFT_CPU_LEVEL == 2
        if (stream) {
            _mm512_stream_ps(p, v);
            return;
        }
#elif WEFT_CPU_LEVEL == 1
        if (stream) {
            _mm256_stream_ps(p, v);
            return;
        }
#endif
        vf_store(p, v);
        return;
    }
    vh h = t == WEFT_BF16 ? vf_to_bf16(v) : vf_to_f16(v);
    uint16_t *p = (uint16_t *)row + i;
#if WEFT_CPU_LEVEL == 2
    if (stream) {
        _mm256_stream_si256((__m256i *)(void *)p, h);
        return;
    }
#elif WEFT_CPU_LEVEL == 1
    if (stream) {
        _mm_stream_si128((__m128i *)(void *)p, h);
        return;
    }
#endif
    (void)stream;
    memcpy(p, &h, sizeof h);
}

/* ---- lines: what loops over rows advance by ---------------------------------------------------------------------------
 * With AVX-512 a line is 64 bytes of a row, so that a streaming store fills a whole cache line at once: half lines of
 * several rows in turn ran at a third of the speed. Elsewhere it is the 16 channels of a sum. */

#if WEFT_CPU_LEVEL == 2
enum { MAX_LINE = 2 };
#else
enum { MAX_LINE = STEP };
#endif

INLINE int line_vectors(weft_dtype t)
{
    return WEFT_CPU_LEVEL == 2 && t == WEFT_F32 ? 1 : MAX_LINE;
}

/* Do streaming stores of this dtype fill whole cache lines? */
INLINE bool line_streams(weft_dtype t)
{
    return WEFT_CPU_LEVEL == 2 || (WEFT_CPU_LEVEL == 1 && t == WEFT_F32);
}

INLINE int64_t line_channels(weft_dtype t)
{
    return line_vectors(t) * LANES;
}

INLINE void line_get(weft_dtype t, const void *row, int64_t c, vf *v)
{
    for (int h = 0; h < line_vectors(t); h++) v[h] = vf_get(t, row, c + h * LANES);
}

#if WEFT_CPU_LEVEL == 2
/* Rounded to bf16, still in the high halves. */
INLINE __m512i bf16_high(vf v)
{
    __m512i u = _mm512_castps_si512(v);
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)),
                                 _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1)));
    return _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
}

/* The conversion instruction rounds as we do but flushes denormals, so a line that holds one takes the way by integers. */
INLINE __m512i line_pack(weft_dtype t, const vf *v)
{
    enum { DENORMAL = 0x20 };
    if (t == WEFT_F16) return _mm512_inserti64x4(_mm512_castsi256_si512(vf_to_f16(v[0])), vf_to_f16(v[1]), 1);
    __mmask16 odd = (__mmask16)(_mm512_fpclass_ps_mask(v[0], DENORMAL) | _mm512_fpclass_ps_mask(v[1], DENORMAL));
    if (__builtin_expect(odd == 0, 1)) return (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]);
    const __m512i high = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29,
                                          27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(bf16_high(v[0]), high, bf16_high(v[1]));
}
#endif

INLINE void line_put(weft_dtype t, void *row, int64_t c, const vf *v, bool stream)
{
#if WEFT_CPU_LEVEL == 2
    if (t != WEFT_F32) {
        __m512i *p = (__m512i *)(void *)((uint16_t *)row + c);
        if (stream)
            _mm512_stream_si512(p, line_pack(t, v));
        else
            _mm512_storeu_si512(p, line_pack(t, v));
        return;
    }
#endif
    for (int h = 0; h < line_vectors(t); h++) vf_put(t, row, c + h * LANES, v[h], stream);
}

/* Prefetches a line that a later token will read: with this much arithmetic per line the hardware prefetcher falls behind
 * (a fifth of the bandwidth). A hint, never a fault. */
INLINE void line_ask(const void *row, int64_t bytes)
{
    __builtin_prefetch((const char *)row + bytes, 0, 2);
}

/* ---- the fixed tree over 16 lanes ---------------------------------------------------------------------------------- */

/* acc[0..STEP) hold lanes 0..15; pairs (l, l+8), then (l, l+4), (l, l+2), (l, l+1). */
INLINE float vf_sum16(const vf *acc)
{
#if WEFT_CPU_LEVEL == 2
    __m256 a = _mm512_castps512_ps256(acc[0]);
    __m256 b = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(acc[0]), 1));
    __m256 s8 = _mm256_add_ps(a, b);
#elif WEFT_CPU_LEVEL == 1
    __m256 s8 = _mm256_add_ps(acc[0], acc[1]);
#endif
#if WEFT_CPU_LEVEL > 0
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
#else
    vf s8a = acc[0] + acc[2], s8b = acc[1] + acc[3], s4 = s8a + s8b;
    return (s4[0] + s4[2]) + (s4[1] + s4[3]);
#endif
}

/* Orders streaming stores before whatever the caller does next. */
INLINE void stream_fence(void)
{
#if WEFT_CPU_LEVEL > 0
    _mm_sfence();
#endif
}

#define WEFT_CPU_PASTE_(isa, name) weft_cpu_##isa##_##name
#define WEFT_CPU_PASTE(isa, name) WEFT_CPU_PASTE_(isa, name)
/* Symbols of this backend carry the instruction set: CPU(mhc_post_fwd) is weft_cpu_avx2_mhc_post_fwd. */
#define CPU(name) WEFT_CPU_PASTE(WEFT_CPU_ISA, name)

#endif
