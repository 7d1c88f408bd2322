/* SPDX-License-Identifier: Apache-2.0
 *
 * The model: memory, forward, backward. A query walks the very passes that a step runs, with the workspace of every
 * operator queried instead of the operator called, so the size and the use cannot differ. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/arrays.h"
#include "core/struct_size.h"
#include "model/model.h"

enum { BOUND = 0, FORWARD_DONE = 1, LOGITS_ONLY = 2 };

/* ---- parameters and memory of a pass --------------------------------------------------------------------------------------- */

static weft_tensor param_in(const run *r, const void *base, param p, int32_t layer)
{
    int64_t offset = param_offset(r->config, p, layer);
    if (offset < 0) return (weft_tensor){0};
    weft_tensor t = param_shape(r->config, p);
    t.data = base ? (char *)base + (size_t)offset * weft_dtype_size(t.dtype) : NULL;
    return t;
}

weft_tensor param_tensor(const run *r, param p, int32_t layer)
{
    return param_in(r, r->args->parameters, p, layer);
}

weft_grad param_grad(const run *r, param p, int32_t layer)
{
    return (weft_grad){param_in(r, r->args->gradients, p, layer), 1};
}

const void *param_data(const run *r, param p, int32_t layer)
{
    return param_tensor(r, p, layer).data;
}

void *param_grad_data(const run *r, param p, int32_t layer)
{
    return param_grad(r, p, layer).to.data;
}

const void *param_weight(const run *r, param p, int32_t layer)
{
    if (!is_narrow(r->config)) return param_data(r, p, layer);
    size_t offset = (size_t)param_offset(r->config, p, layer) * weft_dtype_size(r->config->dtype);
    return r->whole.weights ? (char *)r->whole.weights + offset : NULL;
}

/* The block: recompute | whole | sites | scratch | workspace. */
typedef struct layout {
    size_t whole, sites, layer[2], scratch, workspace; /* layer: of attention, of gdn */
} layout;

/* Bytes of what the first so many layers leave. */
static size_t layers_bytes(const layout *l, const weft_model_config *c, int32_t layers)
{
    const int32_t of_gdn = count_gdn(c, layers);
    return weft_bytes_plus(weft_bytes_times((size_t)(layers - of_gdn), l->layer[0]),
                           weft_bytes_times((size_t)of_gdn, l->layer[1]));
}

static layout lay_out(const weft_model_config *c, int64_t tokens, int64_t length, size_t recompute)
{
    weft_arena a = {0}, d = {0};
    whole w;
    site_memory s;
    scratch t;
    whole_take(&a, c, tokens, length, &w);
    scratch_take(&d, c, tokens, &t);
    layout l = {.whole = recompute};
    for (int32_t layer = 0; layer < c->layers && layer < HYBRID_PERIOD; layer++) { /* in which each kind occurs */
        weft_arena b = {0};
        for (int32_t i = 0; i < SITES; i++) site_take(&b, c, tokens, SITES * layer + i, &s);
        l.layer[is_gdn(c, layer)] = b.used;
    }
    l.sites = weft_bytes_plus(l.whole, a.used);
    l.scratch = weft_bytes_plus(l.sites, layers_bytes(&l, c, c->layers));
    l.workspace = weft_bytes_plus(l.scratch, d.used);
    return l;
}

static layout layout_of(const run *r)
{
    return lay_out(r->config, r->tokens, r->model->length, r->model->bytes.recompute.total);
}

site_memory site_at(const run *r, int32_t index)
{
    layout l = layout_of(r);
    weft_arena arena = {r->model->memory, l.sites + layers_bytes(&l, r->config, index / SITES)};
    site_memory s;
    for (int32_t i = index / SITES * SITES; i <= index; i++) site_take(&arena, r->config, r->tokens, i, &s);
    return s;
}

static weft_recompute_desc recompute_desc(const weft_model_config *c, int64_t tokens)
{
    return (weft_recompute_desc){.struct_size = sizeof(weft_recompute_desc),
                                 .layers = c->layers,
                                 .recompute = c->recompute,
                                 .group = c->group,
                                 .poison = c->poison,
                                 .tokens = tokens,
                                 .streams = c->streams,
                                 .channels = c->channels,
                                 .dtype = c->dtype};
}

/* Room of a product, which grows with the threads that there are. */
static size_t product_room(const weft_nn *nn)
{
    weft_nn ask = *nn;
    ask.query = true, ask.need = 0, ask.blas = NULL;
    (void)ask.table->matmul(&ask, &(weft_matmul){.m = 1, .n = 1, .k = 1});
    return ask.need;
}

static weft_status open_run(run *r, const char *call, const weft_exec *exec, weft_model *model,
                            const weft_model_args *args, bool query)
{
    *r = (run){.model = model, .config = &model->config, .args = args};
    WEFT_TRY(weft_take_exec(call, exec, &r->exec, &exec));
    r->exec = *exec;
    r->tokens = model->sequences * model->length;
    WEFT_TRY(weft_nn_open(&r->nn, &r->exec, model->config.dtype, args->blas));
    layout l = layout_of(r);
    weft_arena a = {model->memory, l.whole}, b = {model->memory, l.scratch};
    whole_take(&a, r->config, r->tokens, model->length, &r->whole);
    scratch_take(&b, r->config, r->tokens, &r->scratch);
    r->nn.query = query;
    r->exec.workspace = model->memory ? model->memory + l.workspace : NULL;
    r->exec.workspace_bytes = model->bytes.workspace;
    return WEFT_OK;
}

/* ---- passes ---------------------------------------------------------------------------------------------------------------------- */

static linear head_of(const run *r)
{
    return (linear){HEAD, PARAM_COUNT, 0, r->config->channels, r->config->vocab, 1, 0};
}

static weft_status copy(run *r, void *to, const void *from, int64_t streams)
{
    RUN_NN(r, copy, to, from, r->tokens * streams * r->config->channels);
    return WEFT_OK;
}

/* The same for values of the full dtype, which may be several times as wide. */
static weft_status copy_mix(run *r, void *to, const void *from)
{
    const weft_model_config *c = r->config;
    int64_t width = (int64_t)(weft_dtype_size(weft_nn_full(c->dtype)) / weft_dtype_size(c->dtype));
    RUN_NN(r, copy, to, from, r->tokens * c->streams * width);
    return WEFT_OK;
}

/* The first streams, and the input of the first sub-layer. */
static weft_status enter(run *r, const weft_recompute_site *at)
{
    const weft_model_config *c = r->config;
    const weft_tensor *x = &at->x;
    weft_tensor rows = rows_of(r, r->scratch.row_a);
    if (has_entry(c))
        RUN_NN(r, embed_fwd,
               &(weft_embed){.tokens = r->args->tokens,
                             .count = r->tokens,
                             .channels = c->channels,
                             .vocab = c->vocab,
                             .weight = param_data(r, EMBED, 0),
                             .rows = rows.data});
    else if (c->stage == WEFT_STAGE_BLOCK)
        rows.data = (void *)r->args->streams_in;
    else {
        WEFT_TRY(copy(r, x->data, r->args->streams_in, c->streams));
        if (is_shifted(c)) WEFT_TRY(copy_mix(r, r->whole.mix_in, r->args->mix_in));
        return connection_forward(r, 0, at);
    }
    if (joins_entry(c)) return connection_join_entry(r, &rows, at);
    RUN_OP(r, mhc_expand_fwd, .u = rows, .x = *x);
    return connection_forward(r, 0, at);
}

static weft_status enter_bwd(run *r, const weft_recompute_site *at)
{
    const weft_model_config *c = r->config;
    weft_tensor rows = rows_of(r, has_entry(c) ? r->scratch.row_a : r->args->d_streams_in);
    if (joins_entry(c))
        WEFT_TRY(connection_join_entry_bwd(r, at, &rows));
    else {
        WEFT_TRY(connection_backward(r, 0, at));
        if (hops_in(c)) return copy(r, r->args->d_streams_in, r->scratch.d_x, c->streams);
        RUN_OP(r, mhc_expand_bwd, .d_x = weft_dense3(r->scratch.d_x, c->dtype, r->tokens, c->streams, c->channels),
               .d_u = {rows, 0});
    }
    if (has_entry(c))
        RUN_NN(r, embed_bwd,
               &(weft_embed){.tokens = r->args->tokens,
                             .count = r->tokens,
                             .channels = c->channels,
                             .vocab = c->vocab,
                             .rows = rows.data,
                             .d_weight = param_grad_data(r, EMBED, 0)});
    return WEFT_OK;
}

static weft_status leave(run *r, const weft_tensor *x)
{
    const weft_model_config *c = r->config;
    linear head = head_of(r);
    if (hops_out(c)) {
        if (is_shifted(c)) WEFT_TRY(copy_mix(r, r->args->mix_out, site_at(r, SITES * c->layers - 1).pre));
        return copy(r, r->args->streams_out, x->data, c->streams);
    }
    WEFT_TRY(exit_forward(r, x));
    if (!has_exit(c)) return copy(r, r->args->streams_out, r->whole.z, 1);
    RUN_OP(r, rmsnorm_fwd, .eps = c->norm_eps, .u = rows_of(r, r->whole.z), .weight = param_tensor(r, NORM, 0),
           .v = rows_of(r, r->whole.zn));
    WEFT_TRY(linear_forward(r, &head, r->whole.zn, r->whole.logits));
    if (!r->nn.query && !r->args->targets) return WEFT_OK;
    RUN_NN(r, loss_fwd,
           &(weft_loss){.tokens = r->tokens,
                        .vocab = c->vocab,
                        .logits = r->whole.logits,
                        .targets = r->args->targets,
                        .losses = r->whole.losses});
    if (r->nn.query || r->args->loss) RUN_NN(r, sum, r->whole.losses, r->tokens, 0, r->args->loss);
    return WEFT_OK;
}

static weft_status leave_bwd(run *r, const weft_tensor *x)
{
    const weft_model_config *c = r->config;
    linear head = head_of(r);
    double scale = r->args->loss_scale != 0 ? r->args->loss_scale : 1 / (double)(r->tokens > 0 ? r->tokens : 1);
    if (hops_out(c)) {
        if (is_shifted(c)) WEFT_TRY(copy_mix(r, r->scratch.d_pre[(SITES * c->layers - 1) % 2], r->args->d_mix_out));
        return copy(r, r->scratch.d_x, r->args->d_streams_out, c->streams);
    }
    if (!has_exit(c)) {
        WEFT_TRY(copy(r, r->scratch.row_a, r->args->d_streams_out, 1));
        return exit_backward(r, x);
    }
    RUN_NN(r, loss_bwd,
           &(weft_loss){.tokens = r->tokens,
                        .vocab = c->vocab,
                        .logits = r->whole.logits,
                        .targets = r->args->targets,
                        .d_logits = r->whole.d_logits,
                        .scale = scale});
    WEFT_TRY(linear_d_input(r, &head, r->whole.d_logits, r->scratch.row_b));
    WEFT_TRY(linear_d_weight(r, &head, r->whole.zn, r->whole.d_logits));
    RUN_OP(r, rmsnorm_bwd, .eps = c->norm_eps, .u = rows_of(r, r->whole.z), .weight = param_tensor(r, NORM, 0),
           .d_v = rows_of(r, r->scratch.row_b), .d_u = {rows_of(r, r->scratch.row_a), 0},
           .d_weight = param_grad(r, NORM, 0));
    return exit_backward(r, x);
}

static bool ends_group(const run *r, int32_t index)
{
    return index % SITES == SITES - 1 && weft_recompute_ends_group(&r->model->recompute, index / SITES);
}

static weft_status close_group(run *r, int32_t index)
{
    weft_recompute *recompute = &r->model->recompute;
    return weft_recompute_close(recompute, &r->exec, weft_recompute_group_of(recompute, index / SITES));
}

/* From the output of a site's sub-layer to the input of the next one's, which `at` becomes. */
static weft_status go_on(run *r, int32_t index, weft_recompute_site *at)
{
    weft_recompute *recompute = &r->model->recompute;
    const bool ends = ends_group(r, index);
    weft_recompute_site next;
    if (!joins(r->config)) {
        WEFT_TRY(connection_merge(r, index, at));
        if (ends) WEFT_TRY(close_group(r, index));
        WEFT_TRY(weft_recompute_site_at(recompute, index + 1, &next));
        WEFT_TRY(connection_forward(r, index + 1, &next));
    } else if (ends) {
        /* The groups share the memory of v, and this one's streams are read until the next v is there. A replay will put that
         * where it belongs; row_a is idle in forward. */
        weft_tensor v = rows_of(r, r->scratch.row_a);
        WEFT_TRY(connection_join(r, index, at, &v));
        WEFT_TRY(close_group(r, index));
        WEFT_TRY(weft_recompute_site_at(recompute, index + 1, &next));
        next.v = v;
    } else {
        WEFT_TRY(weft_recompute_site_at(recompute, index + 1, &next));
        WEFT_TRY(connection_join(r, index, at, &next.v));
    }
    *at = next;
    return WEFT_OK;
}

static weft_status forward(run *r)
{
    const weft_model_config *c = r->config;
    weft_model *m = r->model;
    const int32_t last = SITES * c->layers - 1;
    weft_recompute_site at;
    WEFT_TRY(weft_recompute_begin(&m->recompute));
    WEFT_TRY(weft_recompute_site_at(&m->recompute, 0, &at));
    if (is_narrow(c)) RUN_NN(r, narrow, r->whole.weights, r->args->parameters, param_elements(c));
    if (r->state)
        WEFT_TRY(state_begin(r));
    else if (attends(c))
        RUN_NN(r, rope_table, r->whole.rope, m->length, c->channels / c->heads, c->rope_base);
    RUN_NN(r, fill, r->whole.ones, 1, c->streams);
    RUN_NN(r, fill, r->whole.one_hot, 0, c->streams);
    RUN_NN(r, fill, r->whole.one_hot, 1, 1);
    if (joins_entry(c)) {
        RUN_NN(r, fill, r->whole.no_streams, 0, no_streams_count(c, r->tokens));
        RUN_NN(r, fill, r->whole.no_mix, -0.0, c->streams * c->streams); /* f + -0 is f where f is -0, too */
    }
    WEFT_TRY(enter(r, &at));
    for (int32_t index = 0; index <= last; index++) {
        WEFT_TRY(branch_forward(r, index, at.v.data));
        if (index < last) WEFT_TRY(go_on(r, index, &at));
    }
    WEFT_TRY(connection_merge(r, last, &at));
    WEFT_TRY(close_group(r, last));
    return leave(r, &at.y);
}

static weft_status restore_group(run *r, int32_t index)
{
    weft_recompute *recompute = &r->model->recompute;
    const int32_t group = weft_recompute_group_of(recompute, index / SITES);
    if (group + 1 < recompute->groups) WEFT_TRY(weft_recompute_release(recompute, group + 1));
    WEFT_TRY(connection_replay(r, group));
    if (r->nn.query) recompute->state[group] = WEFT_RECOMPUTE_RESTORED; /* as if it had run */
    return WEFT_OK;
}

static weft_status backward(run *r)
{
    const weft_model_config *c = r->config;
    weft_model *m = r->model;
    const int32_t last = SITES * c->layers - 1;
    const bool joined = joins(c);
    weft_tensor x = weft_recompute_output(&m->recompute);
    weft_recompute_site at;
    WEFT_TRY(leave_bwd(r, &x));
    for (int32_t index = last; index >= 0; index--) {
        /* A join of two groups reads the streams of the first one; of the second, x alone, which is not in a group's memory. */
        if (ends_group(r, index)) WEFT_TRY(restore_group(r, index));
        WEFT_TRY(weft_recompute_site_at(&m->recompute, index, &at));
        if (joined && index < last)
            WEFT_TRY(connection_join_bwd(r, index, &at));
        else
            WEFT_TRY(connection_merge_bwd(r, index, &at));
        WEFT_TRY(branch_backward(r, index, at.v.data));
        if (!joined && index > 0) WEFT_TRY(connection_backward(r, index, &at));
    }
    WEFT_TRY(enter_bwd(r, &at));
    return weft_recompute_release(&m->recompute, 0);
}

/* ---- what a forward has left -------------------------------------------------------------------------------------------------------- */

static weft_status gain(run *r, double to[4])
{
    const weft_model_config *c = r->config;
    weft_compose maps = {.tokens = r->tokens,
                         .streams = c->streams,
                         .to = r->scratch.d_res[0],
                         .in_out = connection_numerics(c).apply == WEFT_APPLY_IN_OUT};
    if (c->residual == WEFT_RESIDUAL_PLAIN || is_independent(c)) return WEFT_OK;
    for (int32_t index = 0; index < SITES * c->layers; index++) {
        maps.res = site_at(r, index).res;
        maps.first = index == 0;
        RUN_NN(r, compose, &maps);
    }
    RUN_NN(r, gains, r->scratch.d_res[0], r->tokens, c->streams, to);
    return WEFT_OK;
}

static weft_status first_bad(run *r, char *name)
{
    const weft_model_config *c = r->config;
    weft_dtype full = weft_nn_full(c->dtype);
    int64_t bad = -1;
    for (int32_t index = 0; index < SITES * c->layers; index++) {
        site_memory s = site_at(r, index);
        const struct {
            const char *what;
            const void *data;
            weft_dtype dtype;
            int64_t count;
        } parts[] = {{"connection.res", s.res, full, s.res ? r->tokens * c->streams * c->streams : 0},
                     {"output", s.f, c->dtype, r->tokens * c->channels}};
        for (size_t i = 0; i < 2; i++) {
            RUN_NN(r, first_bad, parts[i].data, parts[i].dtype, parts[i].count, &bad);
            if (bad < 0) continue;
            snprintf(name, 64, "layers.%d.%s.%s", (int)(c->first_layer + index / SITES), site_name(c, index),
                     parts[i].what);
            return WEFT_OK;
        }
    }
    if (has_exit(c)) RUN_NN(r, first_bad, r->whole.logits, full, r->tokens * c->vocab, &bad);
    if (bad >= 0) snprintf(name, 64, "logits");
    return WEFT_OK;
}

/* ---- public ------------------------------------------------------------------------------------------------------------------------ */

static weft_status too_large(void)
{
    return weft_fail(WEFT_ERR_ARGUMENT,
                     "model: expected sizes whose memory is at most 2^62 bytes, got larger ones");
}

static weft_status shape_model(const weft_exec *exec, const weft_model_config *config, int64_t sequences,
                               int64_t length, weft_model *m)
{
    weft_model_config copy;
    WEFT_TRY(config_take(config, &copy, &config));
    if (sequences < 1 || sequences > (int64_t)1 << 24)
        return weft_fail(WEFT_ERR_ARGUMENT, "model: sequences: expected 1 to 2^24, got %lld", (long long)sequences);
    if (length < 1 || length > config->context)
        return weft_fail(WEFT_ERR_ARGUMENT, "model: length: expected 1 to the context of %lld, got %lld",
                         (long long)config->context, (long long)length);
    if (weft_times(sequences, length) > INT32_MAX)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "model: sequences * length: expected at most 2^31 - 1 tokens, got %lld * %lld",
                         (long long)sequences, (long long)length);
    *m = (weft_model){.config = *config, .sequences = sequences, .length = length};
    weft_recompute_desc desc = recompute_desc(config, sequences * length);
    WEFT_TRY(weft_recompute_query(&desc, &m->bytes.recompute));
    recompute_shape(&desc, &m->recompute);
    layout l = lay_out(config, sequences * length, length, m->bytes.recompute.total);
    if (l.workspace > WEFT_MOST_BYTES) return too_large();
    m->bytes.kept = l.scratch - l.whole;
    m->bytes.scratch = l.workspace - l.scratch;
    /* With a BLAS and without: the loop needs room to pack, and which of the two runs is not known yet. */
    weft_model_args args = {0};
    run r;
    WEFT_TRY(open_run(&r, "model", exec, m, &args, true));
    WEFT_TRY(forward(&r));
    WEFT_TRY(backward(&r));
    WEFT_TRY(gain(&r, NULL));
    WEFT_TRY(first_bad(&r, NULL));
    if (sequences == 1) { /* a step */
        weft_model_state empty = {.capacity = length};
        r.state = &empty;
        WEFT_TRY(forward(&r));
    }
    m->product_room = product_room(&r.nn);
    m->bytes.workspace = r.need > r.nn.need ? r.need : r.nn.need;
    m->bytes.total = weft_bytes_plus(l.workspace, m->bytes.workspace);
    return m->bytes.total > WEFT_MOST_BYTES ? too_large() : WEFT_OK;
}

weft_status weft_model_query(const weft_exec *exec, const weft_model_config *config, int64_t sequences,
                             int64_t length, weft_model_bytes *bytes)
{
    weft_model m;
    WEFT_TRY(shape_model(exec, config, sequences, length, &m));
    if (!bytes) return weft_fail(WEFT_ERR_ARGUMENT, "model_query: bytes: expected a pointer, got NULL");
    *bytes = m.bytes;
    return WEFT_OK;
}

weft_status weft_model_bind(const weft_exec *exec, const weft_model_config *config, int64_t sequences,
                            int64_t length, void *memory, size_t bytes, weft_model *model)
{
    weft_model m;
    WEFT_TRY(shape_model(exec, config, sequences, length, &m));
    if (!model) return weft_fail(WEFT_ERR_ARGUMENT, "model_bind: model: expected a pointer, got NULL");
    if (!memory || bytes < m.bytes.total)
        return weft_fail(WEFT_ERR_WORKSPACE, "model_bind: memory: expected at least %zu bytes, got %zu%s",
                         m.bytes.total, bytes, memory ? "" : " at NULL");
    WEFT_TRY(weft_recompute_open(&m.recompute.desc, memory, m.bytes.recompute.total, &m.recompute));
    m.memory = memory;
    *model = m;
    return WEFT_OK;
}

/* Is everything that a pass reads and writes there, aligned, and apart from the model's memory and from each other? */
static weft_status check_arrays(const run *r, const char *call, bool forward)
{
    const weft_model_config *c = r->config;
    const weft_model_args *a = r->args;
    const int64_t tokens = r->tokens, hop = tokens * c->channels * (c->stage == WEFT_STAGE_BLOCK ? 1 : c->streams);
    const size_t activation = weft_dtype_size(c->dtype), full = weft_dtype_size(weft_nn_full(c->dtype));
    const bool entry = has_entry(c), exit = has_exit(c);
    const bool mix_in = is_shifted(c) && hops_in(c), mix_out = is_shifted(c) && hops_out(c);
    const int64_t mix = tokens * c->streams;
    const struct {
        weft_array array;
        bool needed;
    } parts[] = {
        {{"parameters", a->parameters, param_elements(c), full, false, NULL}, true},
        {{"gradients", a->gradients, forward ? 0 : param_elements(c), full, true, NULL}, !forward},
        {{"tokens", a->tokens, entry ? tokens : 0, sizeof *a->tokens, false, NULL}, entry},
        {{"targets", a->targets, exit ? tokens : 0, sizeof *a->targets, false, NULL}, exit && !forward},
        {{"step", a->step, a->training && c->dropout > 0, sizeof *a->step, false, NULL}, false},
        {{"loss", a->loss, forward && exit && a->targets, sizeof *a->loss, true, NULL}, false},
        {{"streams_in", a->streams_in, forward && !entry ? hop : 0, activation, false, NULL}, forward && !entry},
        {{"streams_out", a->streams_out, forward && !exit ? hop : 0, activation, true, "streams_in"},
         forward && !exit},
        {{"d_streams_out", a->d_streams_out, forward || exit ? 0 : hop, activation, false, NULL},
         !forward && !exit},
        {{"d_streams_in", a->d_streams_in, forward || entry ? 0 : hop, activation, true, "d_streams_out"},
         !forward && !entry},
        {{"mix_in", a->mix_in, forward && mix_in ? mix : 0, full, false, NULL}, forward && mix_in},
        {{"mix_out", a->mix_out, forward && mix_out ? mix : 0, full, true, "mix_in"}, forward && mix_out},
        {{"d_mix_out", a->d_mix_out, !forward && mix_out ? mix : 0, full, false, NULL}, !forward && mix_out},
        {{"d_mix_in", a->d_mix_in, !forward && mix_in ? mix : 0, full, true, "d_mix_out"}, !forward && mix_in},
        {{"the model's memory", r->model->memory, (int64_t)r->model->bytes.total, 1, true, NULL}, true},
        {{"the state's memory", r->state ? r->state->memory : NULL, r->state ? (int64_t)r->state->bytes : 0, 1,
          true, NULL},
         r->state != NULL},
    };
    enum { COUNT = sizeof parts / sizeof *parts };
    weft_array arrays[COUNT];
    for (int i = 0; i < COUNT; i++) {
        arrays[i] = parts[i].array;
        if (parts[i].needed && !arrays[i].data)
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s: expected a pointer to %lld elements, got NULL", call,
                             arrays[i].name, (long long)arrays[i].count);
    }
    return weft_check_arrays(call, arrays, COUNT);
}

/* Tokens and targets where the host reaches them. */
static weft_status check_tokens(const run *r, const char *call)
{
    const weft_model_config *c = r->config;
    const weft_model_args *a = r->args;
    const bool targets = has_exit(c) && a->targets;
    for (int64_t t = 0; t < r->tokens && r->exec.backend != WEFT_BACKEND_CUDA; t++) {
        if (has_entry(c) && (a->tokens[t] < 0 || a->tokens[t] >= c->vocab))
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: tokens[%lld]: expected 0 to %lld, got %d", call, (long long)t,
                             (long long)c->vocab - 1, (int)a->tokens[t]);
        if (targets && (a->targets[t] < -1 || a->targets[t] >= c->vocab))
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: targets[%lld]: expected -1 to %lld, got %d", call,
                             (long long)t, (long long)c->vocab - 1, (int)a->targets[t]);
    }
    return WEFT_OK;
}

typedef enum pass { FORWARD, BACKWARD, ONE_STEP } pass;

/* A pass whose args lie in `copy` where their layout is not the current one. state: of a step. */
static weft_status enter_pass(run *r, pass which, const weft_exec *exec, weft_model *model, weft_model_state *state,
                              const weft_model_args *given, weft_model_args *copy)
{
    static const weft_sizes sizes = {offsetof(weft_model_args, mix_in), sizeof(weft_model_args), "WEFT_ARGS"};
    static const char *const calls[] = {"model_forward", "model_backward", "model_step"};
    const char *call = calls[which];
    const void *taken;
    weft_clear_error();
    if (!model || !given || !model->memory)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: expected a bound model and args, got NULL", call);
    WEFT_TRY(weft_take_struct(call, "", &sizes, given, copy, &taken));
    const weft_model_args *args = taken;
    WEFT_TRY(open_run(r, call, exec, model, args, false));
    if (!isfinite(args->loss_scale))
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: loss_scale: expected a finite number, got %g", call,
                         args->loss_scale);
    if (args->token_base < 0 || args->token_base > WEFT_MOST_TOKEN_BASE)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: token_base: expected 0 to 2^62, got %lld", call,
                         (long long)args->token_base);
    if (args->training != 0 && args->training != 1)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: training: expected 0 or 1, got %d", call, (int)args->training);
    r->state = state;
    if (product_room(&r->nn) > model->product_room)
        return weft_fail(WEFT_ERR_WORKSPACE, "%s: exec: expected no more threads than the model was bound with",
                         call);
    if (which == ONE_STEP) {
        if (args->targets || args->loss || args->training)
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s: expected %s, a step has no loss and no dropout", call,
                             args->targets ? "targets"
                             : args->loss  ? "loss"
                                           : "training",
                             args->targets || args->loss ? "NULL" : "0");
        WEFT_TRY(state_check(state, model));
        WEFT_TRY(state_room(r));
    }
    WEFT_TRY(check_arrays(r, call, which != BACKWARD));
    return check_tokens(r, call);
}

weft_status weft_model_forward(const weft_exec *exec, weft_model *model, const weft_model_args *args)
{
    run r;
    weft_model_args copy;
    WEFT_TRY(enter_pass(&r, FORWARD, exec, model, NULL, args, &copy));
    model->phase = BOUND;
    WEFT_TRY(forward(&r));
    model->phase = r.args->targets || !has_exit(r.config) ? FORWARD_DONE : LOGITS_ONLY;
    return WEFT_OK;
}

weft_status weft_model_backward(const weft_exec *exec, weft_model *model, const weft_model_args *args)
{
    run r;
    weft_model_args copy;
    WEFT_TRY(enter_pass(&r, BACKWARD, exec, model, NULL, args, &copy));
    if (model->phase != FORWARD_DONE)
        return weft_fail(WEFT_ERR_STATE, "model_backward: expected a forward with targets before it, got %s",
                         model->phase == LOGITS_ONLY ? "one without" : "none");
    model->phase = BOUND;
    return backward(&r);
}

weft_status weft_model_step(const weft_exec *exec, weft_model *model, weft_model_state *state,
                            const weft_model_args *args)
{
    run r;
    weft_model_args copy;
    if (!state || !state->memory) {
        weft_clear_error();
        return weft_fail(WEFT_ERR_ARGUMENT, "model_step: state: expected a bound state, got NULL");
    }
    WEFT_TRY(enter_pass(&r, ONE_STEP, exec, model, state, args, &copy));
    const int64_t position = state->position;
    model->phase = BOUND;
    weft_status status = forward(&r);
    state->position = status == WEFT_OK ? position + r.tokens : -1;
    if (status == WEFT_OK) model->phase = LOGITS_ONLY;
    return status;
}

weft_tensor weft_model_logits(const weft_model *model)
{
    whole w;
    if (!model || !model->memory || !has_exit(&model->config)) return (weft_tensor){0};
    weft_arena arena = {model->memory, model->bytes.recompute.total};
    int64_t tokens = model->sequences * model->length;
    whole_take(&arena, &model->config, tokens, model->length, &w);
    return weft_dense2(w.logits, weft_nn_full(model->config.dtype), tokens, model->config.vocab);
}

/* Looks at what a forward has left; the model itself stays as it is. */
static weft_status inspect(run *r, const char *call, const weft_exec *exec, const weft_model *model)
{
    static const weft_model_args none = {0};
    weft_clear_error();
    if (!model || !model->memory)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: model: expected a bound model, got NULL", call);
    return open_run(r, call, exec, (weft_model *)model, &none, false);
}

weft_status weft_model_gain(const weft_exec *exec, const weft_model *model, weft_model_gains *gains)
{
    run r;
    double to[4] = {1, 1, 1, 1};
    WEFT_TRY(inspect(&r, "model_gain", exec, model));
    if (!gains) return weft_fail(WEFT_ERR_ARGUMENT, "model_gain: gains: expected a pointer, got NULL");
    WEFT_TRY(gain(&r, to));
    *gains = (weft_model_gains){to[0], to[1], to[2], to[3]};
    return WEFT_OK;
}

weft_status weft_model_first_nonfinite(const weft_exec *exec, const weft_model *model, char name[64])
{
    run r;
    WEFT_TRY(inspect(&r, "model_first_nonfinite", exec, model));
    if (!name) return weft_fail(WEFT_ERR_ARGUMENT, "model_first_nonfinite: name: expected a pointer, got NULL");
    name[0] = 0;
    return first_bad(&r, name);
}
