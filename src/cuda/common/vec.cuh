/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers between memory and registers: arithmetic is fp32, memory is f32, bf16 or f16, an access is 16 bytes where the
 * data allows it. Rounding is to nearest even; NaN stays NaN. */
#ifndef WEFT_CUDA_VEC_CUH
#define WEFT_CUDA_VEC_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "core/kernel.h"

typedef __nv_bfloat16 bf16;
typedef __half f16;

/* Prefetches the line of p into the L2. */
static __device__ __forceinline__ void prefetch_line(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

template <class T> struct number;
template <> struct number<float> {
    static constexpr weft_dtype dtype = WEFT_F32;
    static constexpr int per_vector = 4; /* elements in 16 bytes */
};
template <> struct number<bf16> {
    static constexpr weft_dtype dtype = WEFT_BF16;
    static constexpr int per_vector = 8;
};
template <> struct number<f16> {
    static constexpr weft_dtype dtype = WEFT_F16;
    static constexpr int per_vector = 8;
};

static __device__ __forceinline__ float widen(float v)
{
    return v;
}
static __device__ __forceinline__ float widen(bf16 v)
{
    return __bfloat162float(v);
}
static __device__ __forceinline__ float widen(f16 v)
{
    return __half2float(v);
}
template <class T> static __device__ __forceinline__ T narrow(float v);
template <> __device__ __forceinline__ float narrow<float>(float v)
{
    return v;
}
template <> __device__ __forceinline__ bf16 narrow<bf16>(float v)
{
    return __float2bfloat16_rn(v);
}
template <> __device__ __forceinline__ f16 narrow<f16>(float v)
{
    return __float2half_rn(v);
}

/* The value a store of v in T would leave behind. */
template <class T> static __device__ __forceinline__ float rounded(float v)
{
    return widen(narrow<T>(v));
}

/* Two 16-bit numbers as packed in one register. */
static __device__ __forceinline__ void widen2(float &a, float &b, uint32_t pair, bf16)
{
    a = __uint_as_float(pair << 16);
    b = __uint_as_float(pair & 0xffff0000u);
}
static __device__ __forceinline__ void widen2(float &a, float &b, uint32_t pair, f16)
{
    __half2 h;
    memcpy(&h, &pair, 4);
    float2 f = __half22float2(h);
    a = f.x;
    b = f.y;
}
static __device__ __forceinline__ uint32_t narrow2(float a, float b, bf16)
{
    __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    uint32_t pair;
    memcpy(&pair, &h, 4);
    return pair;
}
static __device__ __forceinline__ uint32_t narrow2(float a, float b, f16)
{
    __half2 h = __floats2half2_rn(a, b);
    uint32_t pair;
    memcpy(&pair, &h, 4);
    return pair;
}

/* W neighbouring elements, aligned to their size or to 16 bytes, whichever is less. */
template <class T, int W> struct raw {
    static constexpr int bytes = W * (int)sizeof(T);
    static constexpr int words = bytes >= 4 ? bytes / 4 : 1;
    uint32_t word[words];
};

template <class T, int W> static __device__ __forceinline__ void load_raw(raw<T, W> &r, const T *p)
{
    constexpr int bytes = raw<T, W>::bytes;
    static_assert(bytes == 2 || bytes % 4 == 0, "an access is 2, 4, 8 or 16 bytes, or several of 16");
    if constexpr (bytes % 16 == 0) {
#pragma unroll
        for (int k = 0; k < bytes / 16; k++) {
            uint4 v = __ldg((const uint4 *)p + k);
            r.word[4 * k] = v.x, r.word[4 * k + 1] = v.y, r.word[4 * k + 2] = v.z, r.word[4 * k + 3] = v.w;
        }
    } else if constexpr (bytes == 8) {
        uint2 v = __ldg((const uint2 *)p);
        r.word[0] = v.x, r.word[1] = v.y;
    } else if constexpr (bytes == 4) {
        r.word[0] = __ldg((const uint32_t *)p);
    } else {
        r.word[0] = __ldg((const unsigned short *)p);
    }
}

/* The same for memory that this kernel also writes (in-place use, adding to a gradient). */
template <class T, int W> static __device__ __forceinline__ void load_raw_shared(raw<T, W> &r, const T *p)
{
    constexpr int bytes = raw<T, W>::bytes;
    if constexpr (bytes % 16 == 0) {
#pragma unroll
        for (int k = 0; k < bytes / 16; k++) {
            uint4 v = ((const uint4 *)p)[k];
            r.word[4 * k] = v.x, r.word[4 * k + 1] = v.y, r.word[4 * k + 2] = v.z, r.word[4 * k + 3] = v.w;
        }
    } else if constexpr (bytes == 8) {
        uint2 v = *(const uint2 *)p;
        r.word[0] = v.x, r.word[1] = v.y;
    } else if constexpr (bytes == 4) {
        r.word[0] = *(const uint32_t *)p;
    } else {
        r.word[0] = *(const unsigned short *)p;
    }
}

/* One 16-byte store. An assignment through uint4 is split into four of 4 bytes by the compiler. */
static __device__ __forceinline__ void store_vector(void *p, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

template <class T, int W> static __device__ __forceinline__ void store_raw(T *p, const raw<T, W> &r)
{
    constexpr int bytes = raw<T, W>::bytes;
    if constexpr (bytes % 16 == 0) {
#pragma unroll
        for (int k = 0; k < bytes / 16; k++)
            store_vector((uint4 *)p + k, r.word[4 * k], r.word[4 * k + 1], r.word[4 * k + 2], r.word[4 * k + 3]);
    } else if constexpr (bytes == 8) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(r.word[0]), "r"(r.word[1]) : "memory");
    } else if constexpr (bytes == 4) {
        *(uint32_t *)p = r.word[0];
    } else {
        *(unsigned short *)p = (unsigned short)r.word[0];
    }
}

/* Stores 16 bytes that the L2 evicts first. */
template <class T, int W> static __device__ __forceinline__ void store_once(T *p, const raw<T, W> &r)
{
    static_assert(raw<T, W>::bytes == 16, "one store");
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(r.word[0]), "r"(r.word[1]),
                 "r"(r.word[2]), "r"(r.word[3])
                 : "memory");
}

template <class T, int W> static __device__ __forceinline__ void unpack(float (&v)[W], const raw<T, W> &r)
{
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = __uint_as_float(r.word[k]);
    } else if constexpr (W == 1) {
        float unused;
        widen2(v[0], unused, r.word[0], T());
    } else {
#pragma unroll
        for (int k = 0; k < W / 2; k++) widen2(v[2 * k], v[2 * k + 1], r.word[k], T());
    }
}

template <class T, int W> static __device__ __forceinline__ void pack(raw<T, W> &r, const float (&v)[W])
{
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int k = 0; k < W; k++) r.word[k] = __float_as_uint(v[k]);
    } else if constexpr (W == 1) {
        r.word[0] = narrow2(v[0], 0.0f, T());
    } else {
#pragma unroll
        for (int k = 0; k < W / 2; k++) r.word[k] = narrow2(v[2 * k], v[2 * k + 1], T());
    }
}

template <class T, int W> static __device__ __forceinline__ void load(float (&v)[W], const T *p)
{
    raw<T, W> r;
    load_raw(r, p);
    unpack(v, r);
}

template <class T, int W> static __device__ __forceinline__ void load_shared(float (&v)[W], const T *p)
{
    raw<T, W> r;
    load_raw_shared(r, p);
    unpack(v, r);
}

template <class T, int W> static __device__ __forceinline__ void store(T *p, const float (&v)[W])
{
    raw<T, W> r;
    pack(r, v);
    store_raw(p, r);
}

/* ---- elements of a dtype known at run time ------------------------------------------------------------------------- */

/* A tensor as a kernel gets it: dtype WEFT_NONE where it is absent. */
struct view {
    char *data;
    weft_dtype dtype;
    int32_t add; /* gradients: add to what is there */
    int64_t stride[3];
};

static inline view view_of(const weft_tensor *t, int add = 0)
{
    view v = {(char *)t->data, t->dtype, add, {0, 0, 0}};
    for (int i = 0; i < t->ndim && i < 3; i++) v.stride[i] = t->stride[i];
    return v;
}

static inline view view_of(const weft_grad *g)
{
    return view_of(&g->to, g->add);
}

static __host__ __device__ __forceinline__ bool has(const view &v)
{
    return v.dtype != WEFT_NONE;
}

static __device__ __forceinline__ float get(const view &v, int64_t i)
{
    if (v.dtype == WEFT_F32) return ((const float *)v.data)[i];
    if (v.dtype == WEFT_BF16) return widen(((const bf16 *)v.data)[i]);
    return widen(((const f16 *)v.data)[i]);
}

/* W neighbours of a parameter over the channels, side by side, whose dtype is its own. */
template <int W> static __device__ __forceinline__ void get_param(float (&v)[W], const view &from, int64_t c)
{
    if (from.dtype == WEFT_F32)
        load<float, W>(v, (const float *)from.data + c);
    else if (from.dtype == WEFT_BF16)
        load<bf16, W>(v, (const bf16 *)from.data + c);
    else
        load<f16, W>(v, (const f16 *)from.data + c);
}

static __device__ __forceinline__ void put(const view &v, int64_t i, float value)
{
    if (v.add) value = get(v, i) + value;
    if (v.dtype == WEFT_F32)
        ((float *)v.data)[i] = value;
    else if (v.dtype == WEFT_BF16)
        ((bf16 *)v.data)[i] = narrow<bf16>(value);
    else
        ((f16 *)v.data)[i] = narrow<f16>(value);
}

/* What a tensor keeps of a value. */
static __device__ __forceinline__ float as_stored(const view &to, float v)
{
    return to.dtype == WEFT_BF16 ? rounded<bf16>(v) : to.dtype == WEFT_F16 ? rounded<f16>(v) : v;
}

/* W neighbouring elements of a dtype known at run time: act (T) or f32. p counts elements. */
template <class T, int W>
static __device__ __forceinline__ void get_wide(float (&v)[W], const view &from, int64_t i)
{
    if (sizeof(T) == 4 || from.dtype == WEFT_F32)
        load_shared<float, W>(v, (const float *)from.data + i);
    else
        load_shared<T, W>(v, (const T *)from.data + i);
}

template <class T, int W> static __device__ __forceinline__ void put_wide(const view &to, int64_t i, float (&v)[W])
{
    if (to.add) {
        float old[W];
        get_wide<T, W>(old, to, i);
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = old[k] + v[k];
    }
    if (sizeof(T) == 4 || to.dtype == WEFT_F32)
        store<float, W>((float *)to.data + i, v);
    else
        store<T, W>((T *)to.data + i, v);
}

#endif
