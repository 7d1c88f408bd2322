/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of the scalar fields that several operators share. Comparisons are written so that NaN fails them. */
#include "core/backend.h"
#include "core/check.h"

weft_status weft_check_eps(const weft_call *call, const char *name, double eps)
{
    if (eps >= 0 && eps < 1e30) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s: expected a finite number of 0 or more, got %g",
                     weft_op_name(call->op), name, eps);
}

weft_status weft_check_enum(const weft_call *call, const char *name, int value, int count)
{
    if (value >= 0 && value < count) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s: expected 0 to %d, got %d", weft_op_name(call->op), name, count - 1,
                     value);
}

weft_status weft_check_reserved(const weft_call *call, const weft_op_info *info, const void *args,
                                const char *prefix)
{
#define RESERVED(type) offsetof(type, reserved), sizeof((type *)NULL)->reserved / sizeof(uint64_t)
    static const struct {
        size_t offset, count;
    } reserved[] = {
        [WEFT_SCALAR_NUMERICS] = {RESERVED(weft_mhc_numerics)},
        [WEFT_SCALAR_DROPOUT] = {RESERVED(weft_dropout)},
        [WEFT_SCALAR_GDN] = {RESERVED(weft_gdn_options)},
    };
#undef RESERVED
    for (const weft_scalar_info *s = info->scalars; s && s->name; s++) {
        const char *at = (const char *)args + s->offset + reserved[s->type].offset;
        const uint64_t *r = (const uint64_t *)(const void *)at;
        uint64_t set = 0;
        for (size_t k = 0; k < reserved[s->type].count; k++) set |= r[k];
        if (set)
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s%s.reserved: expected zeros, got a field that is set",
                             weft_op_name(call->op), prefix, s->name);
    }
    return WEFT_OK;
}

weft_status weft_check_gates(const weft_call *call, const weft_mhc_numerics *numerics)
{
    WEFT_TRY(weft_check_eps(call, "numerics.rms_eps", numerics->rms_eps));
    WEFT_TRY(weft_check_enum(call, "numerics.rms_eps_kind", (int)numerics->rms_eps_kind, 2));
    WEFT_TRY(weft_check_eps(call, "numerics.pre_eps", numerics->pre_eps));
    WEFT_TRY(weft_check_eps(call, "numerics.post_eps", numerics->post_eps));
    if (numerics->post_mult > -1e30 && numerics->post_mult < 1e30) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: numerics.post_mult: expected a finite number, got %g",
                     weft_op_name(call->op), numerics->post_mult);
}

weft_status weft_check_sinkhorn(const weft_call *call, const weft_mhc_numerics *numerics)
{
    WEFT_TRY(weft_check_enum(call, "numerics.sinkhorn", (int)numerics->sinkhorn, 5));
    WEFT_TRY(weft_check_eps(call, "numerics.sinkhorn_eps", numerics->sinkhorn_eps));
    if (numerics->sinkhorn_iters >= 1 && numerics->sinkhorn_iters <= 10000) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: numerics.sinkhorn_iters: expected 1 to 10000, got %d",
                     weft_op_name(call->op), (int)numerics->sinkhorn_iters);
}

weft_status weft_check_apply(const weft_call *call, const weft_mhc_numerics *numerics)
{
    return weft_check_enum(call, "numerics.apply", (int)numerics->apply, 2);
}

weft_status weft_check_no_mix(const weft_call *call, const char *name, const weft_tensor *t)
{
    if (call->scales != 2 || !weft_has(t)) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT,
                     "%s: %s: expected none with an alpha of two scales, which has no residual mix, got a tensor",
                     weft_op_name(call->op), name);
}

weft_status weft_check_dropout(const weft_call *call, const char *prefix, const weft_dropout *dropout)
{
    const char *op = weft_op_name(call->op);
    if (!(dropout->p >= 0 && dropout->p < 1))
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %sdropout.p: expected a number in [0, 1), got %g", op, prefix,
                         dropout->p);
    if (dropout->token_base < 0 || dropout->token_base > WEFT_MOST_TOKEN_BASE)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %sdropout.token_base: expected 0 to 2^62, got %lld", op, prefix,
                         (long long)dropout->token_base);
    if (dropout->shared != 0 && dropout->shared != 1)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %sdropout.shared: expected 0 or 1, got %d", op, prefix,
                         (int)dropout->shared);
    if ((uintptr_t)dropout->step % sizeof(uint64_t))
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %sdropout.step: expected a pointer aligned to 8 bytes, got %p", op,
                         prefix, (const void *)dropout->step);
    if (!dropout->step || call->query) return WEFT_OK;
    return weft_check_pointer(call, prefix, "dropout.step", dropout->step);
}

weft_status weft_check_needs(const weft_call *call, const char *what, const weft_tensor *w, const char *needs,
                             const weft_tensor *n)
{
    if (!weft_has(w) || weft_has(n)) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s: expected %s to be there with it, got none", weft_op_name(call->op),
                     what, needs);
}
