/* SPDX-License-Identifier: Apache-2.0
 *
 * Multi-layer replay [M12]: arguments of the call and of each layer. */
#include "core/check.h"
#include "core/struct_size.h"

#include <stdio.h>

enum { MAX_LAYERS = 4096 };

#define ARGS weft_mhc_replay_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALARS_END};
static const weft_arg_info fwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS)};
#undef ARGS

#define ARGS weft_mhc_replay_layer
static const weft_scalar_info layer_scalars[] = {SCALAR(dropout, DROPOUT), SCALAR(sub_eps, REAL), SCALARS_END};
static const weft_arg_info layer_args[] = {OPT(pre, COEF, TOKENS, STREAMS),
                                           OPT(f, ACT, TOKENS, CHANNELS),
                                           OPT(bias, PARAM, CHANNELS),
                                           OPT(post, COEF, TOKENS, STREAMS),
                                           OPT(res, COEF, TOKENS, STREAMS, STREAMS),
                                           OPT(sub_weight, PARAM, CHANNELS),
                                           OUT_OPT(u, ACT, TOKENS, CHANNELS),
                                           OUT_OPT(v, ACT, TOKENS, CHANNELS),
                                           OUT_OPT(y, ACT, TOKENS, STREAMS, CHANNELS)};
#undef ARGS

WEFT_TABLE_FITS(layer_args);
static const weft_op_info layer_info = {"mhc_replay_layer", sizeof(weft_mhc_replay_layer),
                                        (int32_t)(sizeof layer_args / sizeof *layer_args), layer_args,
                                        layer_scalars};

const weft_op_info *weft_mhc_replay_layer_info(void)
{
    return &layer_info;
}

static weft_status missing(const weft_call *call, int32_t l, const char *name, const char *why)
{
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: layers[%d].%s: expected a tensor %s, got none", weft_op_name(call->op),
                     (int)l, name, why);
}

static weft_status check_layer(weft_call *call, const weft_mhc_replay_layer *layer, int32_t l, bool last)
{
    char prefix[32], name[48];
    weft_shelf shelf; /* of one layer: all layers are compared below */
    snprintf(prefix, sizeof prefix, "layers[%d].", (int)l);
    WEFT_TRY(weft_check_reserved(call, &layer_info, layer, prefix));
    WEFT_TRY(weft_check_tensors(call, &layer_info, layer, prefix, &shelf));
    WEFT_TRY(weft_check_dropout(call, prefix, &layer->dropout));
    snprintf(name, sizeof name, "%ssub_eps", prefix);
    WEFT_TRY(weft_check_eps(call, name, layer->sub_eps));
    if ((weft_has(&layer->u) || weft_has(&layer->v)) && !weft_has(&layer->pre))
        return missing(call, l, "pre", "for u or v");
    if (weft_has(&layer->sub_weight) && !weft_has(&layer->v)) return missing(call, l, "v", "for sub_weight");
    bool any = weft_has(&layer->f) || weft_has(&layer->post) || weft_has(&layer->res) || weft_has(&layer->y) ||
               weft_has(&layer->bias);
    if (any || !last) {
        const char *why = last ? "with the other tensors of post" : "on every layer but the last";
        if (!weft_has(&layer->f)) return missing(call, l, "f", why);
        if (!weft_has(&layer->post)) return missing(call, l, "post", why);
    }
    return WEFT_OK;
}

static bool layer_group(const void *args, int32_t number, weft_mhc_replay_layer *room, weft_arg_group *to)
{
    const weft_mhc_replay_fwd_args *a = args;
    if (number >= a->num_layers) return false;
    *to = (weft_arg_group){&layer_info, weft_replay_layer_at(a->layers, number, room), number};
    return true;
}

static weft_status check_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_replay_fwd_args *a = args;
    const char *op = weft_op_name(call->op);
    weft_call sizes = *call;
    WEFT_TRY(weft_check_apply(call, &a->numerics));
    if (a->num_layers < 1 || a->num_layers > MAX_LAYERS)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: num_layers: expected 1 to %d, got %d", op, MAX_LAYERS,
                         (int)a->num_layers);
    if (a->layers == NULL) return weft_fail(WEFT_ERR_ARGUMENT, "%s: layers: expected a pointer, got NULL", op);
    weft_mhc_replay_layer room, other;
    weft_arg_group one, before;
    WEFT_TRY(weft_check_replay_layers(op, a->layers, a->num_layers));
    for (int32_t l = 0; l < a->num_layers; l++)
        WEFT_TRY(check_layer(&sizes, weft_replay_layer_at(a->layers, l, &room), l, l == a->num_layers - 1));
    if (call->query) return WEFT_OK;
    const weft_arg_group all = {&weft_desc_mhc_replay_fwd.info, args, -1};
    for (int32_t l = 0; l < a->num_layers; l++) {
        layer_group(args, l, &room, &one);
        WEFT_TRY(weft_check_overlap(call, &one, &all));
        WEFT_TRY(weft_check_overlap(call, &one, &one));
        for (int32_t m = 0; m < l; m++) {
            layer_group(args, m, &other, &before);
            WEFT_TRY(weft_check_overlap(call, &one, &before));
        }
    }
    return WEFT_OK;
}

WEFT_DESC_GROUPS(mhc_replay_fwd, fwd_scalars, fwd_args, check_fwd, layer_group);
