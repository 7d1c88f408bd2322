/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory layout: everything is taken from an arena in a fixed order, and an arena without a base counts. */
#include "model/model.h"

static void *take(weft_arena *arena, const weft_model_config *c, int64_t elements)
{
    return weft_arena_take(arena, weft_bytes_times((size_t)elements, weft_dtype_size(c->dtype)));
}

static void *full(weft_arena *arena, const weft_model_config *c, int64_t elements)
{
    return weft_arena_take(arena, weft_bytes_times((size_t)elements, weft_dtype_size(weft_nn_full(c->dtype))));
}

int64_t no_streams_count(const weft_model_config *c, int64_t tokens)
{
    int64_t narrow = (int64_t)(weft_dtype_size(weft_nn_full(c->dtype)) / weft_dtype_size(c->dtype));
    return (tokens * c->streams * NO_STREAMS_UNIT + c->channels + narrow - 1) / narrow;
}

void whole_take(weft_arena *arena, const weft_model_config *c, int64_t tokens, int64_t length, whole *w)
{
    bool learned = c->exit == WEFT_EXIT_LEARNED && contracts(c);
    *w = (whole){.rope = attends(c) ? full(arena, c, length * (c->channels / c->heads)) : NULL,
                 .ones = full(arena, c, c->streams),
                 .one_hot = full(arena, c, c->streams)};
    if (is_shifted(c) && hops_in(c)) w->mix_in = full(arena, c, tokens * c->streams);
    if (joins_entry(c)) {
        w->no_streams = full(arena, c, no_streams_count(c, tokens));
        w->no_mix = full(arena, c, c->streams * c->streams);
    }
    if (is_narrow(c)) w->weights = take(arena, c, param_elements(c));
    if (contracts(c)) w->z = take(arena, c, tokens * c->channels);
    if (has_exit(c)) {
        w->zn = take(arena, c, tokens * c->channels);
        w->logits = full(arena, c, tokens * c->vocab);
        w->d_logits = is_narrow(c) ? take(arena, c, tokens * c->vocab) : w->logits;
        w->losses = full(arena, c, tokens);
    }
    w->exit_h = learned ? full(arena, c, tokens * c->streams) : NULL;
    w->exit_ms = learned ? full(arena, c, tokens) : NULL;
}

void site_take(weft_arena *arena, const weft_model_config *c, int64_t tokens, int32_t index, site_memory *s)
{
    int64_t n = c->streams;
    bool streams = c->residual != WEFT_RESIDUAL_PLAIN, hc = c->residual == WEFT_RESIDUAL_HC;
    *s = (site_memory){.f = take(arena, c, tokens * c->channels)};
    if (streams) {
        s->h = full(arena, c, tokens * gates_of(c));
        s->ms = full(arena, c, hc ? tokens * n : tokens);
        s->pre = full(arena, c, tokens * n);
        s->post = full(arena, c, tokens * n);
        if (!is_independent(c)) s->res = full(arena, c, tokens * n * n);
    }
    if (index % SITES == 0) {
        s->qkv = take(arena, c, tokens * mixer_row(c, index / SITES));
        s->o = take(arena, c, tokens * c->channels);
        if (!is_gdn(c, index / SITES)) s->lse = full(arena, c, tokens * c->heads);
    } else
        s->gate_up = take(arena, c, tokens * 2 * c->hidden);
}

void scratch_take(weft_arena *arena, const weft_model_config *c, int64_t tokens, scratch *s)
{
    int64_t n = c->streams, wide = 2 * c->hidden;
    if (attends(c) && 3 * c->channels > wide) wide = 3 * c->channels;
    if (has_gdn(c) && gdn_sizes_of(c).row > wide) wide = gdn_sizes_of(c).row;
    bool streams = c->residual != WEFT_RESIDUAL_PLAIN, hc = c->residual == WEFT_RESIDUAL_HC;
    *s = (scratch){.d_x = take(arena, c, tokens * n * c->channels),
                   .row_a = take(arena, c, tokens * c->channels),
                   .row_b = take(arena, c, tokens * c->channels),
                   .row_c = take(arena, c, tokens * c->channels),
                   .wide = take(arena, c, tokens * wide),
                   .act = take(arena, c, tokens * c->hidden),
                   .d_act = take(arena, c, tokens * c->hidden)};
    if (streams) {
        s->d_pre[0] = full(arena, c, tokens * n);
        s->d_pre[1] = full(arena, c, tokens * n);
        for (int i = 0; i < (joins(c) ? 2 : 1); i++) {
            s->d_post[i] = full(arena, c, tokens * n);
            if (!is_independent(c)) s->d_res[i] = full(arena, c, tokens * n * n);
        }
        if (!joins(c)) s->d_post[1] = s->d_post[0], s->d_res[1] = s->d_res[0];
    }
    if (has_gdn(c)) {
        const gdn_sizes z = gdn_sizes_of(c);
        s->query = take(arena, c, tokens * z.keys), s->d_query = take(arena, c, tokens * z.keys);
        s->key = take(arena, c, tokens * z.keys), s->d_key = take(arena, c, tokens * z.keys);
        s->value = take(arena, c, tokens * c->channels), s->d_value = take(arena, c, tokens * c->channels);
        s->beta = full(arena, c, tokens * z.heads), s->d_beta = full(arena, c, tokens * z.heads);
        s->g = full(arena, c, tokens * z.heads), s->d_g = full(arena, c, tokens * z.heads);
        s->d_o = take(arena, c, tokens * c->channels);
    }
    if (joins(c)) s->d_y = take(arena, c, tokens * n * c->channels);
    if (hc) {
        s->d_h = full(arena, c, tokens * n * (n + 2));
        s->d_ms = full(arena, c, tokens * n);
    }
}

void state_take(weft_arena *arena, const weft_model_config *c, int64_t capacity, int32_t layer, state_memory *s)
{
    const bool attention = attends(c);
    const int64_t dim = c->channels / c->heads;
    *s = (state_memory){0};
    for (int32_t k = 0; k < c->layers; k++) {
        void *parts[2] = {NULL};
        if (is_gdn(c, k)) {
            const gdn_sizes z = gdn_sizes_of(c);
            parts[0] = take(arena, c, z.conv * z.history);
            parts[1] = full(arena, c, z.heads * dim * dim);
        } else
            parts[0] = take(arena, c, capacity * 3 * c->channels);
        if (k != layer) continue;
        s->taps = s->qkv = parts[0];
        s->rule = parts[1];
    }
    if (attention) {
        s->rope = full(arena, c, capacity * dim);
        s->o = take(arena, c, capacity * c->channels);
        s->lse = full(arena, c, capacity * c->heads);
    }
    s->end = weft_arena_take(arena, 0);
}
