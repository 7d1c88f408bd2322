/* SPDX-License-Identifier: Apache-2.0
 *
 * Error text and the names of the public enums. */
#include "core/check.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

weft_status weft_fail(weft_status status, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    vsnprintf(last_error, sizeof last_error, format, ap);
    va_end(ap);
    return status;
}

void weft_clear_error(void)
{
    last_error[0] = '\0';
}

const char *weft_last_error(void)
{
    return last_error;
}

#define STRING(x) STRING_(x)
#define STRING_(x) #x
const char *weft_version(void)
{
    return STRING(WEFT_VERSION_MAJOR) "." STRING(WEFT_VERSION_MINOR) "." STRING(WEFT_VERSION_PATCH);
}

static const char *name_in(const char *const *names, size_t count, int64_t i)
{
    return i >= 0 && (size_t)i < count && names[i] ? names[i] : "unknown";
}
#define NAME_IN(names, i) name_in(names, sizeof(names) / sizeof *(names), (int64_t)(i))

const char *weft_status_name(weft_status status)
{
    static const char *const names[] = {
        [WEFT_OK] = "ok",
        [WEFT_ERR_ARGUMENT] = "bad argument",
        [WEFT_ERR_OVERLAP] = "overlapping memory",
        [WEFT_ERR_WORKSPACE] = "workspace too small",
        [WEFT_ERR_UNSUPPORTED] = "unsupported",
        [WEFT_ERR_DEVICE] = "device error",
        [WEFT_ERR_STATE] = "call out of order",
    };
    return NAME_IN(names, status);
}

const char *weft_dtype_name(weft_dtype dtype)
{
    static const char *const names[] = {
        [WEFT_NONE] = "none", [WEFT_F32] = "f32", [WEFT_BF16] = "bf16", [WEFT_F16] = "f16",
        [WEFT_F64] = "f64",   [WEFT_I32] = "i32", [WEFT_I64] = "i64"};
    return NAME_IN(names, dtype);
}

size_t weft_dtype_size(weft_dtype dtype)
{
    return weft_element_bytes(dtype);
}

const char *weft_backend_name(weft_backend backend)
{
    static const char *const names[] = {
        [WEFT_BACKEND_REF] = "ref", [WEFT_BACKEND_CPU] = "cpu", [WEFT_BACKEND_CUDA] = "cuda"};
    return NAME_IN(names, backend);
}

const char *weft_isa_name(weft_isa isa)
{
    static const char *const names[] = {[WEFT_ISA_BEST] = "best",
                                        [WEFT_ISA_BASE] = "base",
                                        [WEFT_ISA_AVX2] = "avx2",
                                        [WEFT_ISA_AVX512] = "avx512",
                                        [WEFT_ISA_AMX] = "amx"};
    return NAME_IN(names, isa);
}
