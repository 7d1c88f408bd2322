/* SPDX-License-Identifier: Apache-2.0
 *
 * The parameters of a model as one table: name, shape, first value, and which models have it. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/arrays.h"
#include "core/philox.h"
#include "model/model.h"

/* Sizes by name. */
typedef enum size {
    NONE,
    ONE,
    SCALES,
    STREAMS,
    GATES,
    CONNECTION_ROWS,
    STREAM_ROW,
    CHANNELS,
    QKV_ROWS,
    PROJ_ROWS,
    CONV_CHANNELS,
    WIDTH,
    HEADS,
    HEAD_DIM,
    HIDDEN,
    HIDDEN2,
    VOCAB
} size;

typedef enum need { ALWAYS, IF_BIAS, IF_STREAMS, IF_LEARNED, IF_ENTRY, IF_EXIT } need;

/* Where a parameter is: outside the layers, in each of them at the site of the mixer or of the MLP, or in those with one mixer. */
typedef enum place { OUTSIDE, AT_MIXER, AT_ATTENTION, AT_GDN, AT_MLP } place;

typedef struct row {
    const char *name; /* behind "layers.0.<site>." where it is in a layer */
    size dim[2];
    weft_init init;
    need need;
    place place;
    bool matrix;
} row;

#define CONNECTION(at, site)                                                                                       \
    [at##_PHI] = {"connection.phi", {CONNECTION_ROWS, STREAM_ROW}, WEFT_INIT_XAVIER, IF_STREAMS, site, 1},         \
    [at##_ALPHA] = {"connection.alpha", {SCALES}, WEFT_INIT_ALPHA, IF_STREAMS, site, 0},                           \
    [at##_BETA] = {"connection.beta", {GATES}, WEFT_INIT_HC, IF_STREAMS, site, 0}

static const row rows[PARAM_COUNT] = {
    [EMBED] = {"embed.weight", {VOCAB, CHANNELS}, WEFT_INIT_NORMAL, IF_ENTRY, OUTSIDE, 0},
    CONNECTION(MIXER, AT_MIXER),
    [MIXER_NORM] = {"norm.weight", {CHANNELS}, WEFT_INIT_ONES, ALWAYS, AT_MIXER, 0},
    [QKV] = {"qkv.weight", {QKV_ROWS, CHANNELS}, WEFT_INIT_NORMAL, ALWAYS, AT_ATTENTION, 1},
    [QKV_BIAS] = {"qkv.bias", {QKV_ROWS}, WEFT_INIT_ZEROS, IF_BIAS, AT_ATTENTION, 0},
    [PROJ] = {"proj.weight", {PROJ_ROWS, CHANNELS}, WEFT_INIT_NORMAL, ALWAYS, AT_GDN, 1},
    [PROJ_BIAS] = {"proj.bias", {PROJ_ROWS}, WEFT_INIT_ZEROS, IF_BIAS, AT_GDN, 0},
    [TAPS] = {"conv.weight", {CONV_CHANNELS, WIDTH}, WEFT_INIT_TAPS, ALWAYS, AT_GDN, 0},
    [DECAY] = {"a_log", {HEADS}, WEFT_INIT_DECAY, ALWAYS, AT_GDN, 0},
    [STEP] = {"dt_bias", {HEADS}, WEFT_INIT_STEP, ALWAYS, AT_GDN, 0},
    [GATED_NORM] = {"gated_norm.weight", {HEAD_DIM}, WEFT_INIT_ONES, ALWAYS, AT_GDN, 0},
    [OUT] = {"out.weight", {CHANNELS, CHANNELS}, WEFT_INIT_RESIDUAL, ALWAYS, AT_MIXER, 1},
    [OUT_BIAS] = {"out.bias", {CHANNELS}, WEFT_INIT_ZEROS, IF_BIAS, AT_MIXER, 0},
    CONNECTION(MLP, AT_MLP),
    [MLP_NORM] = {"norm.weight", {CHANNELS}, WEFT_INIT_ONES, ALWAYS, AT_MLP, 0},
    [GATE_UP] = {"gate_up.weight", {HIDDEN2, CHANNELS}, WEFT_INIT_NORMAL, ALWAYS, AT_MLP, 1},
    [GATE_UP_BIAS] = {"gate_up.bias", {HIDDEN2}, WEFT_INIT_ZEROS, IF_BIAS, AT_MLP, 0},
    [DOWN] = {"down.weight", {CHANNELS, HIDDEN}, WEFT_INIT_RESIDUAL, ALWAYS, AT_MLP, 1},
    [DOWN_BIAS] = {"down.bias", {CHANNELS}, WEFT_INIT_ZEROS, IF_BIAS, AT_MLP, 0},
    [EXIT_PHI] = {"exit.phi", {STREAMS, STREAM_ROW}, WEFT_INIT_XAVIER, IF_LEARNED, OUTSIDE, 1},
    [EXIT_ALPHA] = {"exit.alpha", {ONE}, WEFT_INIT_ONES, IF_LEARNED, OUTSIDE, 0},
    [EXIT_BETA] = {"exit.beta", {STREAMS}, WEFT_INIT_ZEROS, IF_LEARNED, OUTSIDE, 0},
    [NORM] = {"norm.weight", {CHANNELS}, WEFT_INIT_ONES, IF_EXIT, OUTSIDE, 0},
    [HEAD] = {"head.weight", {VOCAB, CHANNELS}, WEFT_INIT_NORMAL, IF_EXIT, OUTSIDE, 0},
};

static int64_t size_of_name(const weft_model_config *c, size s)
{
    int64_t n = c->streams;
    bool hc = c->residual == WEFT_RESIDUAL_HC; /* one row per stream's norm instead of one for all streams */
    switch (s) {
    case NONE: return 1;
    case ONE: return 1;
    case SCALES: return is_independent(c) ? 2 : 3;
    case STREAMS: return n;
    case GATES: return gates_of(c);
    case CONNECTION_ROWS: return hc ? n + 2 : gates_of(c);
    case STREAM_ROW: return hc ? c->channels : n * c->channels;
    case CHANNELS: return c->channels;
    case QKV_ROWS: return 3 * c->channels;
    case PROJ_ROWS: return gdn_sizes_of(c).proj;
    case CONV_CHANNELS: return gdn_sizes_of(c).conv;
    case WIDTH: return gdn_sizes_of(c).taps;
    case HEADS: return c->heads;
    case HEAD_DIM: return c->channels / c->heads;
    case HIDDEN: return c->hidden;
    case HIDDEN2: return 2 * c->hidden;
    case VOCAB: return c->vocab;
    }
    return 0;
}

static bool is_layered(param p)
{
    return rows[p].place != OUTSIDE;
}

static bool has_need(const weft_model_config *c, param p)
{
    switch (rows[p].need) {
    case ALWAYS: return true;
    case IF_BIAS: return c->bias != 0;
    case IF_STREAMS: return c->residual != WEFT_RESIDUAL_PLAIN;
    case IF_LEARNED: return c->exit == WEFT_EXIT_LEARNED && contracts(c);
    case IF_ENTRY: return has_entry(c);
    case IF_EXIT: return has_exit(c);
    }
    return false;
}

/* In a layer, or outside of them. */
static bool has(const weft_model_config *c, param p, int32_t layer)
{
    if (rows[p].place == AT_ATTENTION && is_gdn(c, layer)) return false;
    if (rows[p].place == AT_GDN && !is_gdn(c, layer)) return false;
    return has_need(c, p);
}

static int64_t elements(const weft_model_config *c, param p)
{
    /* The learned exit's phi spans all streams, whatever the kind of connection. */
    if (p == EXIT_PHI) return (int64_t)c->streams * c->streams * c->channels;
    return size_of_name(c, rows[p].dim[0]) * size_of_name(c, rows[p].dim[1]);
}

static int64_t padded(const weft_model_config *c, param p, int32_t layer)
{
    return has(c, p, layer) ? (elements(c, p) + 15) / 16 * 16 : 0;
}

/* Elements of the first so many layers. Those of one kind are of one size. */
static int64_t layers_elements(const weft_model_config *c, int32_t layers)
{
    const int32_t of_gdn = count_gdn(c, layers);
    int32_t counts[2] = {layers - of_gdn, of_gdn};
    int64_t total = 0;
    for (int32_t layer = 0; layer < layers && (counts[0] || counts[1]); layer++) {
        int32_t *count = &counts[is_gdn(c, layer)]; /* the first of its kind stands for all */
        for (int q = 0; q < PARAM_COUNT && *count; q++)
            if (is_layered((param)q)) total += *count * padded(c, (param)q, layer);
        *count = 0;
    }
    return total;
}

int64_t param_offset(const weft_model_config *c, param p, int32_t layer)
{
    int64_t offset = 0;
    if (!has(c, p, layer)) return -1;
    /* Layered parameters are neighbours in the list. */
    for (int q = 0; q < (int)p; q++)
        if (is_layered((param)q) == is_layered(p)) offset += padded(c, (param)q, layer);
    if (is_layered(p)) return offset + padded(c, EMBED, 0) + layers_elements(c, layer);
    return p == EMBED ? 0 : offset + layers_elements(c, c->layers);
}

weft_tensor param_shape(const weft_model_config *c, param p)
{
    int64_t a = size_of_name(c, rows[p].dim[0]);
    weft_dtype dtype = weft_nn_full(c->dtype);
    if (rows[p].dim[1] == NONE) return weft_dense1(NULL, dtype, a);
    return weft_dense2(NULL, dtype, a, elements(c, p) / a);
}

int64_t param_elements(const weft_model_config *c)
{
    int64_t total = layers_elements(c, c->layers);
    for (int p = 0; p < PARAM_COUNT; p++)
        if (!is_layered((param)p)) total += padded(c, (param)p, 0);
    return total;
}

weft_status weft_model_param_count(const weft_model_config *config, int32_t *tensors, int64_t *total)
{
    weft_model_config copy;
    WEFT_TRY(config_take(config, &copy, &config));
    int32_t count = 0;
    const int32_t of_gdn = count_gdn(config, config->layers);
    const int32_t layers[] = {[OUTSIDE] = 1,
                              [AT_MIXER] = config->layers,
                              [AT_ATTENTION] = config->layers - of_gdn,
                              [AT_GDN] = of_gdn,
                              [AT_MLP] = config->layers};
    for (int p = 0; p < PARAM_COUNT; p++)
        if (has_need(config, (param)p)) count += layers[rows[p].place];
    if (tensors) *tensors = count;
    if (total) *total = param_elements(config);
    return WEFT_OK;
}

/* In the order of the array: what is before the layers, layer after layer, what is behind. */
static bool find(const weft_model_config *c, int32_t index, param *found, int32_t *layer)
{
    for (int p = 0; p < PARAM_COUNT;) {
        if (!is_layered((param)p)) {
            if (has(c, (param)p, 0) && index-- == 0) {
                *found = (param)p;
                *layer = -1;
                return true;
            }
            p++;
            continue;
        }
        int end = p;
        while (end < PARAM_COUNT && is_layered((param)end)) end++;
        for (*layer = 0; *layer < c->layers; (*layer)++)
            for (int q = p; q < end; q++)
                if (has(c, (param)q, *layer) && index-- == 0) {
                    *found = (param)q;
                    return true;
                }
        p = end;
    }
    return false;
}

weft_status weft_model_param_at(const weft_model_config *config, int32_t index, weft_model_param *to)
{
    param p;
    int32_t layer;
    weft_model_config copy;
    WEFT_TRY(config_take(config, &copy, &config));
    if (!to) return weft_fail(WEFT_ERR_ARGUMENT, "model_param_at: param: expected a pointer, got NULL");
    if (index < 0 || !find(config, index, &p, &layer))
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "model_param_at: index: expected less than the number of tensors, got %d", (int)index);
    weft_tensor shape = param_shape(config, p);
    *to = (weft_model_param){.ndim = shape.ndim,
                             .shape = {shape.shape[0], shape.ndim > 1 ? shape.shape[1] : 1},
                             .offset = param_offset(config, p, layer > 0 ? layer : 0),
                             .count = elements(config, p),
                             .layer = layer,
                             .matrix = rows[p].matrix,
                             .init = rows[p].init};
    if (to->init == WEFT_INIT_HC && config->residual != WEFT_RESIDUAL_HC)
        to->init = config->first_mix ? WEFT_INIT_MIX : WEFT_INIT_ZEROS;
    if (to->init == WEFT_INIT_XAVIER && config->residual == WEFT_RESIDUAL_HC && p != EXIT_PHI)
        to->init = WEFT_INIT_ZEROS;
    if (layer < 0)
        snprintf(to->name, sizeof to->name, "%s", rows[p].name);
    else
        snprintf(to->name, sizeof to->name, "layers.%d.%s.%s", (int)(config->first_layer + layer),
                 site_name(config, SITES * layer + (rows[p].place == AT_MLP)), rows[p].name);
    return WEFT_OK;
}

/* ---- first values ------------------------------------------------------------------------------------------------------- */

/* Two uniform numbers in (0, 1) for element i of tensor `index`. */
static void draw(uint64_t seed, int32_t index, int64_t i, double u[2])
{
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, out[4];
    uint32_t counter[4] = {(uint32_t)i, (uint32_t)((uint64_t)i >> 32), (uint32_t)index, 0x696e6974u};
    weft_philox(out, counter, key);
    for (int k = 0; k < 2; k++) u[k] = ((double)out[k] + 0.5) * 0x1p-32;
}

static double hc_beta(const weft_model_config *c, int32_t index, int64_t i)
{
    int64_t n = c->streams;
    if (i < n) return i == index % n;
    if (i < 2 * n) return 1;
    return (i - 2 * n) / n == (i - 2 * n) % n;
}

/* The first mix "identity". With four streams 95 % of each stay where they are. pre leaves rest / n to each of the other streams and
 * has the sum 1, so that equal streams give the sub-layer what a plain residual does. */
static double mhc_beta(const weft_model_config *c, int32_t index, int64_t i)
{
    const double diagonal = 4, rest = 1.0 / 16;
    const int64_t n = c->streams;
    if (i < n) {
        double pre = i == index % n ? 1 - (double)(n - 1) * rest / (double)n : rest / (double)n;
        return n == 1 ? 0 : log(pre / (1 - pre));
    }
    if (i < 2 * n) return 0;
    return (i - 2 * n) / n == (i - 2 * n) % n ? diagonal : 0;
}

static double first_value(const weft_model_config *c, const weft_model_param *p, uint64_t seed, int32_t index,
                          int64_t i)
{
    double u[2], pi = 3.14159265358979323846;
    switch (p->init) {
    case WEFT_INIT_ZEROS: return 0;
    case WEFT_INIT_ONES: return 1;
    case WEFT_INIT_ALPHA: return c->init_alpha;
    case WEFT_INIT_HC:
    case WEFT_INIT_MIX: {
        int32_t site = SITES * (c->first_layer + p->layer) + (strstr(p->name, ".mlp.") != NULL);
        if (p->init == WEFT_INIT_HC) return hc_beta(c, site, i);
        return mhc_beta(c, is_shifted(c) ? site + 1 : site, i); /* shifted: it is the next site's */
    }
    case WEFT_INIT_XAVIER:
        draw(seed, index, i, u);
        return (2 * u[0] - 1) * sqrt(6.0 / (double)(p->shape[0] + p->shape[1]));
    case WEFT_INIT_TAPS: draw(seed, index, i, u); return (2 * u[0] - 1) / sqrt((double)p->shape[1]);
    case WEFT_INIT_DECAY: draw(seed, index, i, u); return log(1 + 15 * u[0]);
    case WEFT_INIT_STEP: {
        draw(seed, index, i, u);
        const double step = exp(log(0.001) + u[0] * log(100));
        return step + log(-expm1(-step)); /* softplus backwards */
    }
    case WEFT_INIT_NORMAL:
    case WEFT_INIT_RESIDUAL:
        draw(seed, index, i, u);
        return sqrt(-2 * log(u[0])) * cos(2 * pi * u[1]) * 0.02 /
               (p->init == WEFT_INIT_RESIDUAL ? sqrt(2.0 * c->layers) : 1);
    }
    return 0;
}

weft_status weft_model_init(const weft_model_config *config, uint64_t seed, void *parameters)
{
    int32_t tensors;
    int64_t total;
    weft_model_config copy;
    WEFT_TRY(config_take(config, &copy, &config));
    WEFT_TRY(weft_model_param_count(config, &tensors, &total));
    const size_t element = weft_dtype_size(weft_nn_full(config->dtype));
    if (!parameters) return weft_fail(WEFT_ERR_ARGUMENT, "model_init: parameters: expected a pointer, got NULL");
    WEFT_TRY(
        weft_check_arrays("model_init", &(weft_array){"parameters", parameters, total, element, true, NULL}, 1));
    memset(parameters, 0, (size_t)total * element);
    for (int32_t index = 0; index < tensors; index++) {
        weft_model_param p;
        WEFT_TRY(weft_model_param_at(config, index, &p));
        for (int64_t i = 0; i < p.count; i++) {
            double value = first_value(config, &p, seed, index, i);
            if (config->dtype == WEFT_F64)
                ((double *)parameters)[p.offset + i] = value;
            else
                ((float *)parameters)[p.offset + i] = (float)value;
        }
    }
    return WEFT_OK;
}
