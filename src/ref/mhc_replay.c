/* SPDX-License-Identifier: Apache-2.0
 *
 * Replay: rebuild several layers from the first stream tensor [M12]. Tokens do not meet, so each one walks through all
 * layers by itself; the result that a layer passes on is rounded as if stored. */
#include "core/struct_size.h"
#include "ref/norm.h"
#include "ref/streams.h"

typedef struct work {
    double *x, *y, *u, *v, *f, *bias, *sub_weight; /* [nC], [nC], and [C] each */
} work;

static work work_open(const weft_call *call, weft_arena *arena)
{
    int64_t width = call->streams * call->channels;
    work w;
    w.x = take(arena, width);
    w.y = take(arena, width);
    w.u = take(arena, call->channels);
    w.v = take(arena, call->channels);
    w.f = take(arena, call->channels);
    w.bias = take(arena, call->channels);
    w.sub_weight = take(arena, call->channels);
    return w;
}

static size_t workspace(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    (void)args;
    work_open(call, &arena);
    return weft_arena_bytes(&arena);
}

/* u = aggregate(x, pre);  v = rmsnorm(u) of the rounded u */
static void layer_input(const weft_call *call, const weft_mhc_replay_layer *layer, int64_t token, const work *w)
{
    int64_t n = call->streams, channels = call->channels;
    double pre[WEFT_MAX_STREAMS];
    load_token(&layer->pre, token, n, pre);
    aggregate_forward(n, channels, pre, w->x, w->u);
    store_token(&layer->u, token, channels, w->u);
    round_all(call->dtype, channels, w->u);
    load_param(&layer->sub_weight, channels, 1.0, w->sub_weight);
    rmsnorm_forward(channels, layer->sub_eps, w->u, w->sub_weight, w->v);
    store_token(&layer->v, token, channels, w->v);
}

/* y = post(x, f, bias, post, res, dropout) */
static void layer_output(const weft_call *call, weft_apply apply, const weft_mhc_replay_layer *layer, int64_t token,
                         const work *w)
{
    int64_t n = call->streams, channels = call->channels;
    double post[WEFT_MAX_STREAMS], res[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    weft_mask mask = weft_mask_open(&layer->dropout, channels);
    post_token p = {n, channels, token, apply, &mask, w->f, w->bias, post, weft_has(&layer->res) ? res : NULL};
    load_token(&layer->f, token, channels, w->f);
    load_param(&layer->bias, channels, 0.0, w->bias);
    load_token(&layer->post, token, n, post);
    load_token(&layer->res, token, n * n, res);
    post_forward(&p, w->x, w->y);
    store_token(&layer->y, token, n * channels, w->y);
    round_all(call->dtype, n * channels, w->y);
}

static weft_status run(const weft_call *call, const void *args)
{
    const weft_mhc_replay_fwd_args *a = args;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_open(call, &arena);

    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->x, t, call->streams * call->channels, w.x);
        for (int32_t l = 0; l < a->num_layers; l++) {
            weft_mhc_replay_layer room;
            const weft_mhc_replay_layer *layer = weft_replay_layer_at(a->layers, l, &room);
            double *x = w.x;
            if (weft_has(&layer->pre)) layer_input(call, layer, t, &w);
            if (!weft_has(&layer->f)) break; /* the last layer may end with u */
            layer_output(call, a->numerics.apply, layer, t, &w);
            w.x = w.y;
            w.y = x;
        }
    }
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_replay_fwd[] = {{.run = run, .workspace = workspace}, {0}};
