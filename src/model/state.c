/* SPDX-License-Identifier: Apache-2.0
 *
 * What a model remembers of a sequence between calls, and the mixers that go on from it. */
#include <string.h>

#include "core/struct_size.h"
#include "model/model.h"

state_memory state_at(const run *r, int32_t layer)
{
    weft_arena arena = {r->state->memory, 0};
    state_memory s;
    state_take(&arena, r->config, r->state->capacity, layer, &s);
    return s;
}

/* Bytes in front of the room for attention. */
static size_t remembered(const weft_model_config *c, int64_t capacity)
{
    weft_arena arena = {0};
    state_memory s;
    state_take(&arena, c, capacity, 0, &s);
    return arena.used;
}

weft_status state_begin(run *r)
{
    const weft_model_config *c = r->config;
    const size_t bytes = remembered(c, r->state->capacity);
    const state_memory s = state_at(r, 0);
    if (!r->nn.query && r->state->position) return WEFT_OK;
    RUN_NN(r, fill, r->state->memory, 0, (int64_t)(bytes / weft_dtype_size(weft_nn_full(c->dtype))));
    if (attends(c)) RUN_NN(r, rope_table, s.rope, r->state->capacity, c->channels / c->heads, c->rope_base);
    return WEFT_OK;
}

static weft_attention attention_of(const weft_model_config *c, const state_memory *s, int64_t length)
{
    return (weft_attention){.sequences = 1,
                            .length = length,
                            .heads = c->heads,
                            .head_dim = c->channels / c->heads,
                            .qkv = s->qkv,
                            .o = s->o,
                            .lse = s->lse,
                            .table = s->rope};
}

/* Projections of the new tokens join those that are there, and all queries are computed again: the parts of src/core/nn.h
 * have attention of whole sequences alone. */
weft_status attention_step(run *r, int32_t layer, const linear *in, const linear *out, const site_memory *s,
                           const void *v)
{
    const weft_model_config *c = r->config;
    const state_memory kept = state_at(r, layer);
    const int64_t position = r->state->position, before = position * c->channels;
    const size_t narrow = weft_dtype_size(c->dtype), full = weft_dtype_size(weft_nn_full(c->dtype));
    const bool query = r->nn.query;
    void *rows = query ? NULL : (char *)kept.qkv + (size_t)(3 * before) * narrow;
    weft_attention turn = attention_of(c, &kept, r->tokens), all = attention_of(c, &kept, position + r->tokens);
    if (!query) turn.table = (char *)kept.rope + (size_t)(position * turn.head_dim) * full;
    WEFT_TRY(linear_forward(r, in, v, rows));
    RUN_NN(r, rope, &turn, rows, 0);
    if (!query) { /* its room is the state's, and counted there */
        void *const workspace = r->exec.workspace;
        r->exec.workspace = kept.end;
        weft_status status = r->nn.table->attention_fwd(&r->nn, &all);
        r->exec.workspace = workspace;
        WEFT_TRY(status);
    }
    return linear_forward(r, out, query ? NULL : (char *)kept.o + (size_t)before * narrow, s->f);
}

/* Is there the room that attention takes with the threads of this step? */
weft_status state_room(const run *r)
{
    const state_memory none = {0};
    const weft_model_state *s = r->state;
    if (!attends(r->config)) return WEFT_OK;
    weft_nn ask = r->nn;
    ask.query = true, ask.need = 0;
    const weft_attention all = attention_of(r->config, &none, s->position + r->tokens);
    WEFT_TRY(ask.table->attention_fwd(&ask, &all));
    if (ask.need <= s->bytes - remembered(r->config, s->capacity)) return WEFT_OK;
    return weft_fail(WEFT_ERR_WORKSPACE, "model_step: state: expected one that was bound for as many threads");
}

/* ---- public ------------------------------------------------------------------------------------------------------------------------ */

static weft_status shape_state(const weft_exec *exec, const weft_model_config *config, int64_t capacity,
                               weft_model_state *to)
{
    weft_model_config copy;
    weft_exec exec_copy;
    weft_nn nn;
    WEFT_TRY(config_take(config, &copy, &config));
    WEFT_TRY(weft_take_exec("model_state", exec, &exec_copy, &exec));
    WEFT_TRY(weft_nn_open(&nn, exec, config->dtype, NULL));
    if (attends(config) && (capacity < 1 || capacity > config->context))
        return weft_fail(WEFT_ERR_ARGUMENT, "model_state: capacity: expected 1 to the context of %lld, got %lld",
                         (long long)config->context, (long long)capacity);
    *to = (weft_model_state){.capacity = attends(config) ? capacity : 0, .config = *config};
    nn.query = true;
    if (attends(config)) {
        const state_memory none = {0};
        const weft_attention all = attention_of(config, &none, capacity);
        WEFT_TRY(nn.table->attention_fwd(&nn, &all));
    }
    to->bytes = weft_bytes_plus(remembered(config, to->capacity), nn.need);
    if (to->bytes > WEFT_MOST_BYTES)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "model_state: expected sizes whose memory is at most 2^62 bytes, got larger ones");
    return WEFT_OK;
}

weft_status weft_model_state_query(const weft_exec *exec, const weft_model_config *config, int64_t capacity,
                                   size_t *bytes)
{
    weft_model_state s = {0};
    WEFT_TRY(shape_state(exec, config, capacity, &s));
    if (!bytes) return weft_fail(WEFT_ERR_ARGUMENT, "model_state_query: bytes: expected a pointer, got NULL");
    *bytes = s.bytes;
    return WEFT_OK;
}

weft_status weft_model_state_bind(const weft_exec *exec, const weft_model_config *config, int64_t capacity,
                                  void *memory, size_t bytes, weft_model_state *state)
{
    weft_model_state s = {0};
    WEFT_TRY(shape_state(exec, config, capacity, &s));
    if (!state) return weft_fail(WEFT_ERR_ARGUMENT, "model_state_bind: state: expected a pointer, got NULL");
    if (!memory || bytes < s.bytes)
        return weft_fail(WEFT_ERR_WORKSPACE, "model_state_bind: memory: expected at least %zu bytes, got %zu%s",
                         s.bytes, bytes, memory ? "" : " at NULL");
    if ((uintptr_t)memory % WEFT_ARENA_ALIGN)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "model_state_bind: memory: expected an address that is a multiple of %d",
                         WEFT_ARENA_ALIGN);
    s.memory = memory;
    *state = s;
    return WEFT_OK;
}

/* Is the state one of this model, with room for its next tokens? */
weft_status state_check(const weft_model_state *s, const weft_model *model)
{
    const weft_model_config *a = &s->config, *b = &model->config;
    const struct {
        const char *name;
        int64_t state, model;
    } sizes[] = {{"dtype", a->dtype, b->dtype},
                 {"mixer", a->mixer, b->mixer},
                 {"layers", a->layers, b->layers},
                 {"first_layer", a->first_layer, b->first_layer},
                 {"channels", a->channels, b->channels},
                 {"heads", a->heads, b->heads},
                 {"key_heads", gdn_sizes_of(a).key_heads, gdn_sizes_of(b).key_heads},
                 {"conv_width", gdn_sizes_of(a).taps, gdn_sizes_of(b).taps}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].state != sizes[i].model)
            return weft_fail(WEFT_ERR_ARGUMENT,
                             "model_step: state: expected one of this model, with a %s of %lld, got %lld",
                             sizes[i].name, (long long)sizes[i].model, (long long)sizes[i].state);
    if (a->rope_base != b->rope_base)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "model_step: state: expected one of this model, with a rope_base of %g, got %g",
                         b->rope_base, a->rope_base);
    if (model->sequences != 1)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "model_step: model: expected one that is bound with 1 sequence, got %lld",
                         (long long)model->sequences);
    if (s->position < 0)
        return weft_fail(WEFT_ERR_STATE,
                         "model_step: state: expected one whose last step did not fail: bind it again");
    if (attends(b) && s->position + model->length > s->capacity)
        return weft_fail(
            WEFT_ERR_ARGUMENT,
            "model_step: state: expected room for %lld more tokens, got a capacity of %lld with %lld in it",
            (long long)model->length, (long long)s->capacity, (long long)s->position);
    return WEFT_OK;
}
