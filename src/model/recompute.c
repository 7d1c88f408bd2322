/* SPDX-License-Identifier: Apache-2.0
 *
 * The recompute recompute. Memory is two rows of equal slots:
 *
 *     resident    x at the start of every group, and the last output        groups + 1 slots of [T, n, C]
 *     transient   one group: the streams between its sites, and every v     2k - 1 slots of [T, n, C], 2k of [T, C]
 *
 * Without recompute all layers are one group, so nothing is ever overwritten and close and replay have nothing to do.
 * Forward writes where backward will read, which is why it needs no memory of its own. */
#include <string.h>

#include <weft/recompute.h>

#include "core/struct_size.h"
#include "model/model.h"

static size_t stream_bytes(const weft_recompute_desc *d)
{
    return weft_round_up((size_t)(d->tokens * d->streams * d->channels) * weft_dtype_size(d->dtype));
}

static size_t row_bytes(const weft_recompute_desc *d)
{
    return weft_round_up((size_t)(d->tokens * d->channels) * weft_dtype_size(d->dtype));
}

/* A description in the current layout, checked: the caller's, or a completed copy. */
static weft_status take(const weft_recompute_desc *given, weft_recompute_desc *copy,
                        const weft_recompute_desc **taken)
{
    static const weft_sizes sizes = WEFT_SIZES(weft_recompute_desc);
    const void *at;
    weft_clear_error();
    if (!given) return weft_fail(WEFT_ERR_ARGUMENT, "recompute: desc: expected a pointer, got NULL");
    WEFT_TRY(weft_take_struct("recompute", "desc.", &sizes, given, copy, &at));
    const weft_recompute_desc *d = *taken = at;
    if (d->layers < 1 || d->layers > WEFT_RECOMPUTE_MAX_LAYERS)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute: layers: expected 1 to %d, got %d",
                         WEFT_RECOMPUTE_MAX_LAYERS, (int)d->layers);
    if (d->group < 0 || d->group > d->layers)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute: group: expected 0 to %d layers, got %d", (int)d->layers,
                         (int)d->group);
    if (d->group && !d->recompute)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute: group: expected 0 without recompute, got %d",
                         (int)d->group);
    if (d->poison && !d->recompute)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute: poison: expected 0 without recompute, got %d",
                         (int)d->poison);
    if (d->streams < 1 || d->streams > WEFT_MAX_STREAMS)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute: streams: expected 1 to %d, got %lld", WEFT_MAX_STREAMS,
                         (long long)d->streams);
    if (d->channels < 1 || d->channels > (int64_t)1 << 24)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute: channels: expected 1 to 2^24, got %lld",
                         (long long)d->channels);
    if (d->tokens < 0 || d->tokens > (int64_t)1 << 32)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute: tokens: expected 0 to 2^32, got %lld",
                         (long long)d->tokens);
    if (weft_times(d->tokens, d->streams * d->channels) > WEFT_MOST_ELEMENTS)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "recompute: tokens * streams * channels: expected at most 2^48, got %lld * %lld * %lld",
                         (long long)d->tokens, (long long)d->streams, (long long)d->channels);
    if (d->dtype < WEFT_F32 || d->dtype > WEFT_F64)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute: dtype: expected f32, bf16, f16 or f64, got the number %d",
                         (int)d->dtype);
    return WEFT_OK;
}

static int32_t per_group(const weft_recompute_desc *d)
{
    return d->recompute && d->group ? d->group : d->layers;
}

static weft_recompute_bytes count(const weft_recompute_desc *d, int32_t k)
{
    size_t groups = (size_t)((d->layers + k - 1) / k), sites = (size_t)(SITES * k);
    weft_recompute_bytes b = {.resident = (groups + 1) * stream_bytes(d),
                              .transient = (sites - 1) * stream_bytes(d) + sites * row_bytes(d)};
    b.total = b.resident + b.transient;
    return b;
}

weft_status weft_recompute_query(const weft_recompute_desc *desc, weft_recompute_bytes *bytes)
{
    weft_recompute_desc copy;
    WEFT_TRY(take(desc, &copy, &desc));
    if (!bytes) return weft_fail(WEFT_ERR_ARGUMENT, "recompute_query: bytes: expected a pointer, got NULL");
    *bytes = count(desc, per_group(desc));
    bytes->keep_all = count(desc, desc->layers).total;
    return WEFT_OK;
}

int32_t weft_recompute_best_group(int32_t layers, int64_t streams)
{
    int32_t best = 0;
    size_t least = 0;
    weft_recompute_desc d = {.layers = layers, .tokens = 16, .streams = streams, .channels = 16, .dtype = WEFT_F32};
    if (layers < 1 || layers > WEFT_RECOMPUTE_MAX_LAYERS || streams < 1 || streams > WEFT_MAX_STREAMS) return 0;
    for (int32_t k = 1; k <= layers; k++) {
        size_t total = count(&d, k).total;
        if (best && total >= least) continue;
        best = k;
        least = total;
    }
    return best;
}

weft_status weft_recompute_open(const weft_recompute_desc *desc, void *memory, size_t bytes,
                                weft_recompute *recompute)
{
    weft_recompute_bytes need;
    weft_recompute_desc copy;
    WEFT_TRY(take(desc, &copy, &desc));
    WEFT_TRY(weft_recompute_query(desc, &need));
    if (!recompute) return weft_fail(WEFT_ERR_ARGUMENT, "recompute_open: recompute: expected a pointer, got NULL");
    if (bytes < need.total || (need.total && !memory))
        return weft_fail(WEFT_ERR_WORKSPACE, "recompute_open: memory: expected at least %zu bytes, got %zu%s",
                         need.total, bytes, memory ? "" : " at NULL");
    if ((uintptr_t)memory % WEFT_ARENA_ALIGN)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "recompute_open: memory: expected an address aligned to %d bytes, got %p",
                         WEFT_ARENA_ALIGN, memory);
    recompute_shape(desc, recompute);
    recompute->resident = memory;
    recompute->transient = (char *)memory + need.resident;
    return WEFT_OK;
}

void recompute_shape(const weft_recompute_desc *desc, weft_recompute *recompute)
{
    *recompute = (weft_recompute){.desc = *desc, .layers_per_group = per_group(desc)};
    recompute->groups = (desc->layers + recompute->layers_per_group - 1) / recompute->layers_per_group;
}

static bool has_layer(const weft_recompute *recompute, int32_t layer)
{
    return recompute && layer >= 0 && layer < recompute->desc.layers;
}

int32_t weft_recompute_group_of(const weft_recompute *recompute, int32_t layer)
{
    return has_layer(recompute, layer) ? layer / recompute->layers_per_group : -1;
}

int32_t weft_recompute_ends_group(const weft_recompute *recompute, int32_t layer)
{
    if (!has_layer(recompute, layer)) return 0;
    return layer + 1 == recompute->desc.layers || (layer + 1) % recompute->layers_per_group == 0;
}

weft_status weft_recompute_begin(weft_recompute *recompute)
{
    weft_clear_error();
    if (!recompute) return weft_fail(WEFT_ERR_ARGUMENT, "recompute_begin: recompute: expected a pointer, got NULL");
    for (int32_t g = 0; g < recompute->groups; g++) recompute->state[g] = WEFT_RECOMPUTE_IDLE;
    return WEFT_OK;
}

/* Layers of a group: the last one may be shorter. */
static int32_t layers_of(const weft_recompute *recompute, int32_t group)
{
    int32_t rest = recompute->desc.layers - group * recompute->layers_per_group;
    return rest < recompute->layers_per_group ? rest : recompute->layers_per_group;
}

/* The streams in front of a site of a group; site = the group's number of sites: its output. */
static weft_tensor streams_at(const weft_recompute *recompute, int32_t group, int32_t site)
{
    const weft_recompute_desc *d = &recompute->desc;
    const bool last = site == SITES * layers_of(recompute, group);
    char *data = NULL; /* in a query for sizes there is no memory */
    if (recompute->resident)
        data = site == 0 || last ? recompute->resident + (size_t)(group + last) * stream_bytes(d)
                                 : recompute->transient + (size_t)(site - 1) * stream_bytes(d);
    return weft_dense3(data, d->dtype, d->tokens, d->streams, d->channels);
}

static weft_tensor input_at(const weft_recompute *recompute, int32_t site)
{
    const weft_recompute_desc *d = &recompute->desc;
    char *first = recompute->transient + (size_t)(SITES * recompute->layers_per_group - 1) * stream_bytes(d);
    return weft_dense2(recompute->resident ? first + (size_t)site * row_bytes(d) : NULL, d->dtype, d->tokens,
                       d->channels);
}

static weft_status check_group(const weft_recompute *recompute, const char *call, int32_t group)
{
    weft_clear_error();
    if (!recompute) return weft_fail(WEFT_ERR_ARGUMENT, "%s: recompute: expected a pointer, got NULL", call);
    if (group < 0 || group >= recompute->groups)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: group: expected 0 to %d, got %d", call, (int)recompute->groups - 1,
                         (int)group);
    return WEFT_OK;
}

static const char *state_name(int state)
{
    static const char *const names[] = {"idle", "open", "discarded", "restored"};
    return names[state];
}

weft_status weft_recompute_site_at(weft_recompute *recompute, int32_t site, weft_recompute_site *to)
{
    weft_clear_error();
    if (!recompute || !to)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "recompute_site_at: expected a weft_recompute and a place for it, got NULL");
    if (site < 0 || site >= SITES * recompute->desc.layers)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute_site_at: site: expected 0 to %d, got %d",
                         (int)(SITES * recompute->desc.layers) - 1, (int)site);
    int32_t group = weft_recompute_group_of(recompute, site / SITES),
            inside = site - group * SITES * recompute->layers_per_group;
    if (recompute->state[group] == WEFT_RECOMPUTE_DISCARDED)
        return weft_fail(WEFT_ERR_STATE, "recompute_site_at: group %d: expected open or restored, got discarded",
                         (int)group);
    if (recompute->state[group] == WEFT_RECOMPUTE_IDLE) {
        if (inside != 0)
            return weft_fail(WEFT_ERR_STATE,
                             "recompute_site_at: group %d: expected its first site, got site %d of it", (int)group,
                             (int)inside);
        /* Its memory is the transient of all groups: an open or restored one would lose what it has. */
        for (int32_t g = 0; g < recompute->groups; g++)
            if (recompute->state[g] == WEFT_RECOMPUTE_OPEN || recompute->state[g] == WEFT_RECOMPUTE_RESTORED)
                return weft_fail(WEFT_ERR_STATE, "recompute_site_at: group %d: expected group %d closed, got %s",
                                 (int)group, (int)g, state_name(recompute->state[g]));
        recompute->state[group] = WEFT_RECOMPUTE_OPEN;
    }
    *to = (weft_recompute_site){streams_at(recompute, group, inside), input_at(recompute, inside),
                                streams_at(recompute, group, inside + 1)};
    return WEFT_OK;
}

weft_tensor weft_recompute_output(const weft_recompute *recompute)
{
    if (!recompute || recompute->groups < 1) return (weft_tensor){0};
    int32_t group = recompute->groups - 1;
    return streams_at(recompute, group, SITES * layers_of(recompute, group));
}

/* Fills what a group gives up with a NaN of every dtype. */
static weft_status poison(const weft_recompute *recompute, const weft_exec *exec)
{
    size_t bytes = count(&recompute->desc, recompute->layers_per_group).transient;
    const uint32_t bits = 0x7fff7fff; /* two of bf16, or one of f32 */
    float value;
    weft_nn nn;
    weft_exec copy;
    WEFT_TRY(weft_take_exec("recompute_close", exec, &copy, &exec));
    if (exec->backend != WEFT_BACKEND_CUDA) {
        memset(recompute->transient, 0xff, bytes);
        return WEFT_OK;
    }
    memcpy(&value, &bits, sizeof value);
    WEFT_TRY(weft_nn_open(&nn, exec, WEFT_F32, NULL));
    return nn.table->fill(&nn, recompute->transient, (double)value, (int64_t)(bytes / sizeof value));
}

weft_status weft_recompute_close(weft_recompute *recompute, const weft_exec *exec, int32_t group)
{
    WEFT_TRY(check_group(recompute, "recompute_close", group));
    if (recompute->state[group] == WEFT_RECOMPUTE_DISCARDED) return WEFT_OK;
    if (recompute->state[group] != WEFT_RECOMPUTE_OPEN)
        return weft_fail(WEFT_ERR_STATE, "recompute_close: group %d: expected open, got %s", (int)group,
                         state_name(recompute->state[group]));
    if (recompute->desc.poison && recompute->transient) WEFT_TRY(poison(recompute, exec));
    recompute->state[group] = WEFT_RECOMPUTE_DISCARDED;
    return WEFT_OK;
}

/* The args of a replay of this recompute, in the current layout. */
static weft_status take_replay(const weft_recompute *recompute, const weft_recompute_replay_args *given,
                               weft_recompute_replay_args *copy, const weft_recompute_replay_args **taken)
{
    static const weft_sizes sizes = WEFT_SIZES(weft_recompute_replay_args);
    const void *at;
    weft_clear_error();
    if (!given) return weft_fail(WEFT_ERR_ARGUMENT, "recompute_replay: args: expected a pointer, got NULL");
    WEFT_TRY(weft_take_struct("recompute_replay", "", &sizes, given, copy, &at));
    const weft_recompute_replay_args *args = *taken = at;
    WEFT_TRY(check_group(recompute, "recompute_replay", args->group));
    if (!args->layers)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute_replay: layers: expected a pointer, got NULL");
    int32_t sites = SITES * layers_of(recompute, args->group);
    if (args->num_layers != sites)
        return weft_fail(WEFT_ERR_ARGUMENT, "recompute_replay: num_layers: expected %d sites in group %d, got %d",
                         (int)sites, (int)args->group, (int)args->num_layers);
    return weft_check_replay_layers("recompute_replay", args->layers, sites);
}

/* The operator's args, with layers that know where to write: v of every site, y of all but the last. */
static weft_mhc_replay_fwd_args aim(const weft_recompute *recompute, const weft_recompute_replay_args *args)
{
    const size_t size = args->layers->struct_size;
    for (int32_t s = 0; s < args->num_layers; s++) {
        weft_mhc_replay_layer *layer = (void *)((char *)args->layers + (size_t)s * size);
        layer->v = input_at(recompute, s);
        if (s + 1 < args->num_layers)
            layer->y = streams_at(recompute, args->group, s + 1);
        else
            layer->f = layer->bias = layer->post = layer->res = layer->y = (weft_tensor){0};
    }
    return WEFT_STRUCT(weft_mhc_replay_fwd_args, .numerics = args->numerics,
                       .x = streams_at(recompute, args->group, 0), .layers = args->layers,
                       .num_layers = args->num_layers);
}

weft_status weft_recompute_replay_workspace(const weft_recompute *recompute, const weft_exec *exec,
                                            const weft_recompute_replay_args *args, size_t *bytes)
{
    weft_recompute_replay_args copy;
    WEFT_TRY(take_replay(recompute, args, &copy, &args));
    weft_mhc_replay_fwd_args replay = aim(recompute, args);
    return weft_mhc_replay_fwd_workspace(exec, &replay, bytes);
}

weft_status weft_recompute_replay(weft_recompute *recompute, const weft_exec *exec,
                                  const weft_recompute_replay_args *args)
{
    weft_recompute_replay_args copy;
    WEFT_TRY(take_replay(recompute, args, &copy, &args));
    int32_t group = args->group;
    if (recompute->state[group] == WEFT_RECOMPUTE_RESTORED) return WEFT_OK;
    if (recompute->state[group] != WEFT_RECOMPUTE_DISCARDED)
        return weft_fail(WEFT_ERR_STATE, "recompute_replay: group %d: expected discarded, got %s", (int)group,
                         state_name(recompute->state[group]));
    for (int32_t g = 0; g < recompute->groups; g++)
        if (recompute->state[g] == WEFT_RECOMPUTE_OPEN || recompute->state[g] == WEFT_RECOMPUTE_RESTORED)
            return weft_fail(WEFT_ERR_STATE, "recompute_replay: group %d: expected group %d released, got %s",
                             (int)group, (int)g, state_name(recompute->state[g]));
    weft_mhc_replay_fwd_args replay = aim(recompute, args);
    if (recompute->desc.recompute) WEFT_TRY(weft_mhc_replay_fwd(exec, &replay));
    recompute->state[group] = WEFT_RECOMPUTE_RESTORED;
    return WEFT_OK;
}

weft_status weft_recompute_release(weft_recompute *recompute, int32_t group)
{
    WEFT_TRY(check_group(recompute, "recompute_release", group));
    if (recompute->state[group] != WEFT_RECOMPUTE_RESTORED)
        return weft_fail(WEFT_ERR_STATE, "recompute_release: group %d: expected restored, got %s", (int)group,
                         state_name(recompute->state[group]));
    recompute->state[group] = WEFT_RECOMPUTE_IDLE;
    return WEFT_OK;
}
