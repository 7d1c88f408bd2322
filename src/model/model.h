/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the model share: parameters by name, memory by site, and how a pass runs. */
#ifndef WEFT_MODEL_MODEL_H
#define WEFT_MODEL_MODEL_H

#include <weft/gdn.h>
#include <weft/model.h>
#include <weft/norm.h>

#include "core/nn.h"

enum { SITES = 2 }; /* per layer: mixer, MLP */

/* A configuration in the current layout, checked: the caller's, or a completed copy (config.c). */
weft_status config_take(const weft_model_config *given, weft_model_config *copy, const weft_model_config **taken);

/* ---- parameters (params.c) ---------------------------------------------------------------------------------------------- */

typedef enum param {
    EMBED,
    MIXER_PHI, /* phi, alpha and beta of a site follow each other, and so at the MLP's site */
    MIXER_ALPHA,
    MIXER_BETA,
    MIXER_NORM,
    QKV, /* of attention */
    QKV_BIAS,
    PROJ, /* of gdn, to GATED_NORM */
    PROJ_BIAS,
    TAPS,
    DECAY,
    STEP,
    GATED_NORM,
    OUT,
    OUT_BIAS,
    MLP_PHI,
    MLP_ALPHA,
    MLP_BETA,
    MLP_NORM,
    GATE_UP,
    GATE_UP_BIAS,
    DOWN,
    DOWN_BIAS,
    EXIT_PHI,
    EXIT_ALPHA,
    EXIT_BETA,
    NORM,
    HEAD,
    PARAM_COUNT
} param;

/* Embedding; final norm, head and loss; exit of the streams. */
static inline bool has_entry(const weft_model_config *c)
{
    return c->stage == WEFT_STAGE_WHOLE || c->stage == WEFT_STAGE_FIRST;
}

static inline bool has_exit(const weft_model_config *c)
{
    return c->stage == WEFT_STAGE_WHOLE || c->stage == WEFT_STAGE_LAST;
}

static inline bool contracts(const weft_model_config *c)
{
    return has_exit(c) || c->stage == WEFT_STAGE_BLOCK;
}

/* Does this layer of the stage mix tokens by the gated delta rule? */
enum { HYBRID_PERIOD = 4 };
static inline bool is_gdn(const weft_model_config *c, int32_t layer)
{
    bool attends = c->mixer == WEFT_MIXER_ATTENTION ||
                   (c->mixer == WEFT_MIXER_HYBRID && (c->first_layer + layer) % HYBRID_PERIOD == HYBRID_PERIOD - 1);
    return !attends;
}

/* How many of the first `layers` layers of the stage do. */
static inline int32_t count_gdn(const weft_model_config *c, int32_t layers)
{
    const int32_t end = c->first_layer + layers;
    if (c->mixer != WEFT_MIXER_HYBRID) return c->mixer == WEFT_MIXER_GDN ? layers : 0;
    return layers - (end / HYBRID_PERIOD - c->first_layer / HYBRID_PERIOD);
}

static inline bool has_gdn(const weft_model_config *c)
{
    return count_gdn(c, c->layers) > 0;
}

static inline bool attends(const weft_model_config *c)
{
    return count_gdn(c, c->layers) < c->layers;
}

/* Sizes of a gdn layer. Value heads are heads, and all heads have channels / heads channels. */
typedef struct gdn_sizes {
    int64_t heads, key_heads, dim, taps, history; /* history: slots of the convolution's state */
    int64_t keys, conv, proj; /* columns of the keys, of what passes the convolution, of the projection */
    int64_t row;              /* from row to row of the projection */
} gdn_sizes;

/* Rows of the projection begin at whole vectors of 8, so that kernels and products may read vectors. Biases are added to rows
 * that are dense. */
enum { GDN_ROW_UNIT = 8 };

static inline gdn_sizes gdn_sizes_of(const weft_model_config *c)
{
    const int64_t dim = c->channels / c->heads, key_heads = c->key_heads ? c->key_heads : c->heads / 2;
    const int64_t taps = c->conv_width ? c->conv_width : 4;
    const int64_t keys = key_heads * dim, conv = 2 * keys + c->channels;
    const int64_t proj = conv + c->channels + 2 * (int64_t)c->heads;
    return (gdn_sizes){.heads = c->heads,
                       .key_heads = key_heads,
                       .dim = dim,
                       .taps = taps,
                       .history = taps > 1 ? taps - 1 : 1,
                       .keys = keys,
                       .conv = conv,
                       .proj = proj,
                       .row = c->bias ? proj : (proj + GDN_ROW_UNIT - 1) / GDN_ROW_UNIT * GDN_ROW_UNIT};
}

/* Elements of a row of what the first map of a mixer gives. */
static inline int64_t mixer_row(const weft_model_config *c, int32_t layer)
{
    return is_gdn(c, layer) ? gdn_sizes_of(c).row : 3 * c->channels;
}

/* "layers.3.gdn" is "layers.3." and this. */
static inline const char *site_name(const weft_model_config *c, int32_t index)
{
    return index % SITES ? "mlp" : is_gdn(c, index / SITES) ? "gdn" : "attention";
}

/* Elements from the start of the array; -1 where the model, or this layer, has no such parameter. */
int64_t param_offset(const weft_model_config *config, param p, int32_t layer);
/* Shape of a parameter. */
weft_tensor param_shape(const weft_model_config *config, param p);
/* Elements of the array of all of them. */
int64_t param_elements(const weft_model_config *config);

/* Streams that pass a merge unchanged: res is absent everywhere, rows and scales of a site lack its part. */
static inline bool is_independent(const weft_model_config *c)
{
    return c->residual == WEFT_RESIDUAL_INDEPENDENT;
}

/* Is a site that of mhc_pre? */
static inline bool is_mhc(const weft_model_config *c)
{
    return c->residual == WEFT_RESIDUAL_MHC || c->residual == WEFT_RESIDUAL_MHC_SINGLE_PASS || is_independent(c);
}

/* Rows of its projection. */
static inline int64_t gates_of(const weft_model_config *c)
{
    const int64_t n = c->streams;
    return is_independent(c) ? 2 * n : n * (n + 2);
}

/* Are neighbouring sites one operator? */
static inline bool joins(const weft_model_config *c)
{
    return !c->separate && is_mhc(c);
}

/* Is the first site one operator with what makes the streams? Stages that are given streams make none. */
static inline bool joins_entry(const weft_model_config *c)
{
    return joins(c) && (has_entry(c) || c->stage == WEFT_STAGE_BLOCK);
}

/* Streams that come from another stage, or go to one. */
static inline bool hops_in(const weft_model_config *c)
{
    return c->stage == WEFT_STAGE_MIDDLE || c->stage == WEFT_STAGE_LAST;
}

static inline bool hops_out(const weft_model_config *c)
{
    return c->stage == WEFT_STAGE_FIRST || c->stage == WEFT_STAGE_MIDDLE;
}

/* Is a site fed by the coefficients of the one before it? They hop between stages along with the streams. */
static inline bool is_shifted(const weft_model_config *c)
{
    return c->residual == WEFT_RESIDUAL_MHC_SINGLE_PASS;
}

/* Activations have fewer bits than parameters: matrix products then work on a rounded copy of the weights. */
static inline bool is_narrow(const weft_model_config *c)
{
    return c->dtype != weft_nn_full(c->dtype);
}

/* A weft_recompute without memory (recompute.c): its tensors have no data, for queries. */
void recompute_shape(const weft_recompute_desc *desc, weft_recompute *recompute);

/* ---- memory (memory.c) ---------------------------------------------------------------------------------------------------- */

/* What a site leaves for backward, besides the streams that recompute keeps. Coefficients and logarithms are full (core/nn.h). */
typedef struct site_memory {
    void *h, *ms, *pre, *post, *res; /* the connection */
    void *f;                         /* the sub-layer's output, without its bias */
    void *qkv, *o, *lse;             /* attention; in a gdn layer qkv is the projection, and there is no lse */
    void *gate_up;                   /* MLP */
} site_memory;

/* What the whole model leaves: embedding's rotation table, exit, logits. */
typedef struct whole {
    void *rope, *ones, *one_hot;     /* ones: post and res of the plain residual; one_hot: pre of the first site */
    void *mix_in;                    /* pre of the first site where another stage has made it */
    void *no_streams, *no_mix;       /* zeros: x and res of a joined entry */
    void *weights;                   /* the parameters, rounded; NULL where activations are full */
    void *exit_h, *exit_ms, *z, *zn; /* learned exit; exit's output, and behind the norm */
    void *logits, *d_logits, *losses;
} whole;

typedef struct scratch {
    void *d_x;                            /* [T, n, C]: the gradient on its way back */
    void *d_y;                            /* the same, one site further on: where sites are joined */
    void *row_a, *row_b, *row_c;          /* [T, C] */
    void *wide;                           /* [T, max(mixer_row, 2F)] */
    void *act, *d_act;                    /* [T, F] */
    void *query, *key, *value, *beta, *g; /* gdn, made again in backward: what the rule reads */
    void *d_query, *d_key, *d_value, *d_beta, *d_g, *d_o;
    void *d_pre[2], *d_post[2], *d_res[2]; /* the connection, by the parity of the site */
    void *d_h, *d_ms;                      /* hc */
} scratch;

/* The streams that a joined entry adds to are zeros. All lie in the same few bytes, one after the other by NO_STREAMS_UNIT
 * elements, 16 bytes or more, so that to read them costs no memory traffic and kernels meet strides like any other. */
enum { NO_STREAMS_UNIT = 8 };
/* In elements of the full dtype. */
int64_t no_streams_count(const weft_model_config *c, int64_t tokens);

/* What a state remembers of a layer, and what the layers of attention share. */
typedef struct state_memory {
    void *taps, *rule;    /* gdn: rows in front of the convolution; [Hv, Dk, Dv], full */
    void *qkv;            /* attention: [capacity, 3C] after rotation */
    void *rope, *o, *lse; /* of the whole state, for capacity tokens */
    void *end;            /* of all of it: room for attention */
} state_memory;

/* Takes everything from an arena in a fixed order; a NULL base counts. */
void whole_take(weft_arena *arena, const weft_model_config *c, int64_t tokens, int64_t length, whole *w);
void site_take(weft_arena *arena, const weft_model_config *c, int64_t tokens, int32_t index, site_memory *s);
void scratch_take(weft_arena *arena, const weft_model_config *c, int64_t tokens, scratch *s);
/* As seen by one layer; all of it is taken. */
void state_take(weft_arena *arena, const weft_model_config *c, int64_t capacity, int32_t layer, state_memory *s);

/* ---- a pass ------------------------------------------------------------------------------------------------------------------ */

typedef struct run {
    weft_exec exec; /* with the model's workspace */
    weft_nn nn;
    weft_model *model;
    const weft_model_config *config;
    const weft_model_args *args;
    weft_model_state *state; /* of a step; NULL in other passes */
    int64_t tokens;
    whole whole;
    scratch scratch;
    size_t need; /* in a query: the largest workspace of an operator */
} run;

/* An operator: runs it, or in a query remembers the workspace it needs. */
#define RUN_OP(r, op, ...)                                                                                         \
    do {                                                                                                           \
        size_t bytes_ = 0;                                                                                         \
        if ((r)->nn.query) {                                                                                       \
            WEFT_TRY(weft_##op##_workspace(&(r)->exec, WEFT_ARGS(weft_##op##_args, __VA_ARGS__), &bytes_));        \
            if (bytes_ > (r)->need) (r)->need = bytes_;                                                            \
        } else                                                                                                     \
            WEFT_TRY(weft_##op(&(r)->exec, WEFT_ARGS(weft_##op##_args, __VA_ARGS__)));                             \
    } while (0)
/* A part of src/core/nn.h, which does the same by itself. */
#define RUN_NN(r, part, ...) WEFT_TRY((r)->nn.table->part(&(r)->nn, __VA_ARGS__))

/* A parameter or its gradient as a tensor; absent where the model has none. */
weft_tensor param_tensor(const run *r, param p, int32_t layer);
weft_grad param_grad(const run *r, param p, int32_t layer);
/* Pointers to the same, NULL where absent. */
const void *param_data(const run *r, param p, int32_t layer);
void *param_grad_data(const run *r, param p, int32_t layer);
/* A weight as matrix products take it. */
const void *param_weight(const run *r, param p, int32_t layer);

/* Kept memory of a site, 0 .. 2 layers - 1. */
site_memory site_at(const run *r, int32_t index);

static inline weft_tensor rows_of(const run *r, void *data)
{
    return weft_dense2(data, r->config->dtype, r->tokens, r->config->channels);
}

/* The connection of a site (connection.c). forward: x to v; merge: x and f to y. join: the merge of a site and the forward of
 * the next one; its y is the next one's x. */
weft_status connection_forward(run *r, int32_t index, const weft_recompute_site *at);
weft_status connection_merge(run *r, int32_t index, const weft_recompute_site *at);
weft_status connection_join(run *r, int32_t index, const weft_recompute_site *at, const weft_tensor *next_v);
/* d_x holds the gradient of y and becomes what reaches x past the sub-layer; row_a becomes d_f. */
weft_status connection_merge_bwd(run *r, int32_t index, const weft_recompute_site *at);
/* row_b holds the gradient of v; adds the rest to d_x. */
weft_status connection_backward(run *r, int32_t index, const weft_recompute_site *at);
/* Both for the sites index and index + 1: d_x holds the gradient of y without what row_b, the gradient of the next v, has to
 * add to it. */
weft_status connection_join_bwd(run *r, int32_t index, const weft_recompute_site *at);
/* expand and the forward of the first site, from rows; and the gradient of the rows. */
weft_status connection_join_entry(run *r, const weft_tensor *rows, const weft_recompute_site *at);
weft_status connection_join_entry_bwd(run *r, const weft_recompute_site *at, const weft_tensor *d_rows);
/* One group's entries for the replay. */
weft_status connection_replay(run *r, int32_t group);
/* The numerics that the operators get: a kind of connection decides how the indices of res are meant. */
weft_mhc_numerics connection_numerics(const weft_model_config *c);
weft_status exit_forward(run *r, const weft_tensor *x);
/* row_a holds the gradient of the exit's output; d_x becomes that of the streams. */
weft_status exit_backward(run *r, const weft_tensor *x);

/* Steps (state.c): what is remembered of a layer, without memory in a query; what an empty state begins with. */
state_memory state_at(const run *r, int32_t layer);
weft_status state_begin(run *r);
weft_status state_room(const run *r);
weft_status state_check(const weft_model_state *state, const weft_model *model);

/* The sub-layers (branch.c): v to f, and the gradient of f (row_a) to that of v (row_b). */
weft_status branch_forward(run *r, int32_t index, const void *v);
weft_status branch_backward(run *r, int32_t index, const void *v);

/* Rows [T, from] times a weight [to, from], plus its bias where there is one, and the gradients of all three. */
typedef struct linear {
    param weight, bias; /* PARAM_COUNT: no bias */
    int32_t layer;
    int64_t from, to;
    int32_t to_full; /* y is full */
    int64_t row;     /* of y, from row to row; 0: to. Without a bias */
} linear;
weft_status linear_forward(run *r, const linear *l, const void *x, void *y);
weft_status linear_d_input(run *r, const linear *l, const void *d_y, void *d_x);
weft_status linear_d_weight(run *r, const linear *l, const void *x, const void *d_y);

/* The same for the mixer of a gdn layer (gdn.c), its two maps given; backward leaves the gradient of the projection in
 * scratch.wide, and what its map has to do with it to the caller. */
weft_status gdn_forward(run *r, int32_t layer, const linear *in, const linear *out, const site_memory *s,
                        const void *v);
weft_status gdn_backward(run *r, int32_t layer, const linear *out, const site_memory *s);
/* Attention of a step (state.c). */
weft_status attention_step(run *r, int32_t layer, const linear *in, const linear *out, const site_memory *s,
                           const void *v);

#endif
