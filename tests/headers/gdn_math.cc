/* SPDX-License-Identifier: Apache-2.0
 *
 * The mathematics of one element is written once, for vectors and for CUDA: it must stay valid C++17 as well. */
#include <cmath>

#define real float
#define scalar float
#define GM(name) gm_##name
#define GM_FN [[maybe_unused]] static inline
#define GM_MOST 8
#define GM_SET(x) ((float)(x))
#define GM_EXP(x) std::exp(x)
#define GM_EXP_ALL(x, n) for (int k = 0; k < (n); k++) (x)[k] = std::exp((x)[k])
#define GM_RECIPROCAL(x) (1 / (x))
#define GM_QUOTIENT(u, x, r) ((u) / (x))
#define GM_LOG1P(x) std::log1p(x)
#define GM_FMA(a, b, c) std::fma(a, b, c)
#define GM_GT(a, b, x, y) ((a) > (b) ? (x) : (y))
#include "core/gdn_math.h"
