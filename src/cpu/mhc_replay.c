/* SPDX-License-Identifier: Apache-2.0
 *
 * Multi-layer replay [M12]: a tile of tokens goes through all layers before the next tile starts, so the streams pass from
 * layer to layer in cache. Streams that are not requested live in two scratch tiles of the activation type, rounded as if
 * stored. */
#include "core/struct_size.h"
#include "cpu/common/tiles.h"

typedef struct plan {
    const weft_call *call;
    const weft_mhc_replay_fwd_args *args;
    char *rooms;
    int64_t room_bytes;
} plan;

/* Scratch of one thread. */
typedef struct room {
    char *streams[2], *u;
    float *bias, *weight, *norm;
} room;

static room room_at(char *base, const weft_call *call, int64_t *bytes)
{
    weft_arena arena = {base, 0};
    size_t row = (size_t)call->channels * size_of(call->dtype), ld = (size_t)pad16(call->channels) * 4;
    room r;
    r.streams[0] = weft_arena_take(&arena, TILE * (size_t)call->streams * row);
    r.streams[1] = weft_arena_take(&arena, TILE * (size_t)call->streams * row);
    r.u = weft_arena_take(&arena, TILE * row);
    r.bias = weft_arena_take(&arena, ld);
    r.weight = weft_arena_take(&arena, ld);
    r.norm = weft_arena_take(&arena, 3 * ld);
    if (bytes) *bytes = (int64_t)arena.used;
    return r;
}

static weft_arena lay_out(plan *p, const weft_call *call, const void *args)
{
    weft_arena arena = cpu_arena(call);
    *p = (plan){.call = call, .args = args};
    room_at(NULL, call, &p->room_bytes);
    p->rooms = weft_arena_take(&arena, cpu_rooms(call, p->room_bytes));
    return arena;
}

static void body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_call *call = p->call;
    room r = room_at(p->rooms + thread * p->room_bytes, call, NULL);
    int64_t t0 = item * TILE, m = min64(TILE, call->tokens - t0);
    weft_tensor x = from(&p->args->x, t0);
    for (int32_t l = 0; l < p->args->num_layers; l++) {
        weft_mhc_replay_layer completed;
        const weft_mhc_replay_layer *layer = weft_replay_layer_at(p->args->layers, l, &completed);
        if (weft_has(&layer->u) || weft_has(&layer->v)) {
            weft_tensor u =
                weft_has(&layer->u) ? from(&layer->u, t0) : weft_dense2(r.u, call->dtype, m, call->channels);
            weft_mhc_aggregate_fwd_args aggregate = {.x = x, .pre = from(&layer->pre, t0), .u = u};
            CPU(aggregate_fwd_tile)(&aggregate, 0, m, false);
            if (weft_has(&layer->v)) {
                weft_rmsnorm_fwd_args norm = {.eps = layer->sub_eps, .u = u, .v = from(&layer->v, t0)};
                bool weighted = weft_has(&layer->sub_weight);
                if (weighted) vector_load(r.weight, &layer->sub_weight, call->channels, 1);
                CPU(rmsnorm_fwd_tile)(&norm, weighted ? r.weight : NULL, r.norm, 0, m, false);
            }
        }
        if (!weft_has(&layer->f)) break;
        weft_mhc_post_fwd_args post = {.numerics = p->args->numerics,
                                       .dropout = layer->dropout,
                                       .x = x,
                                       .f = from(&layer->f, t0),
                                       .post = from(&layer->post, t0),
                                       .res = from(&layer->res, t0)};
        post.dropout.token_base += t0;
        post.y = weft_has(&layer->y) ? from(&layer->y, t0)
                                     : weft_dense3(r.streams[l & 1], call->dtype, m, call->streams, call->channels);
        bool biased = weft_has(&layer->bias);
        if (biased) vector_load(r.bias, &layer->bias, call->channels, 0);
        CPU(post_fwd_tile)(&post, biased ? r.bias : NULL, 0, m, false);
        x = post.y;
    }
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_replay_fwd_args *a = args;
    plan p;
    lay_out(&p, call, args);
    cpu_parallel(call, (call->tokens + TILE - 1) / TILE,
                 call->tokens * call->streams * call->channels * a->num_layers, body, &p);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args);
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_replay_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
