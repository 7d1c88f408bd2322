/* SPDX-License-Identifier: Apache-2.0
 *
 * The mathematics of one token is written once, for C, for vectors and for CUDA: it must stay valid C++17 as well. */
#include <algorithm>
#include <cmath>
#include <weft/mhc.h>

#define real float
#define scalar float
#define MM(name) mm_##name
#define MM_FN [[maybe_unused]] static inline
#define MM_SET(x) ((float)(x))
#define MM_EXP(x) std::exp(x)
#define MM_LOG(x) std::log(x)
#define MM_SQRT(x) std::sqrt(x)
#define MM_MAX(a, b) std::max(a, b)
#define MM_FMA(a, b, c) std::fma(a, b, c)
#define MM_GT(a, b, x, y) ((a) > (b) ? (x) : (y))
#define MM_EQ(a, b, x, y) ((a) == (b) ? (x) : (y))
#include "core/mhc_math.h"

/* Once more with a history that is not an array, and, as CUDA has it, of divisors only. */
struct apart {
    float *at;
    int step;
};
#undef MM
#undef MM_WALK_BACK
#undef MM_HISTORY
#undef MM_AT
#undef MM_FROM
#define MM(name) apart_##name
#define MM_WALK_BACK 1
#define MM_HISTORY apart
#define MM_AT(h, i) ((h).at[(i) * (h).step])
#define MM_FROM(h, i) (apart{(h).at + (i) * (int64_t)(h).step, (h).step})
#include "core/mhc_math.h"
