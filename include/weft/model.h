/* SPDX-License-Identifier: Apache-2.0
 *
 * A decoder-only transformer whose residual connection is chosen by name: one stream, or several with hyper-connections.
 *
 *     e = embed[token];   x_0 = expand(e)
 *     site s:   (pre, post, res) = connection_s(x_s);  v = rmsnorm(sum_i pre[i] x_s[i]);  f = F_s(v)
 *               x_{s+1}[o] = dropout(post[o] (f + bias)) + sum_i W(i,o) x_s[i]
 *     logits = head rmsnorm(exit(x_last))
 *
 * With mhc, mhc_single_pass and independent neighbouring sites are one operator, mhc_boundary, and so are the entry and the first
 * site: the streams are read and written once between two sub-layers. Losses and activations have the bits of site by site;
 * gradients of the streams are rounded once less on their way, which changes no bit where they are f32 on cpu.
 *
 * F mixes tokens at even sites and is a SwiGLU MLP at odd ones. What mixes tokens is causal attention with rotary positions, or a
 * Gated DeltaNet layer (weft/gdn.h): proj v, gdn_pre, gdn_rule, gdn_norm with the gate z, and the map out. Equations and gradients of
 * the parts that are not operators: docs/reference/math.md, [T1] to [T6].
 *
 * The model owns no memory. Parameters are one array, described tensor by tensor by weft_model_param; gradients and the
 * state of an optimiser have the same layout. What a step needs is one block whose exact size weft_model_query tells.
 * Forward and backward are two calls; results depend neither on the number of threads nor on recompute.
 *
 * Backends: cpu in f32; cuda in f32, or in bf16 with parameters and gradients in f32; ref in f64. On cuda everything that the
 * args point to is in device memory, calls are asynchronous, and tokens are not looked at before they are used. */
#ifndef WEFT_MODEL_H
#define WEFT_MODEL_H

#include <weft/blas.h>
#include <weft/mhc.h>
#include <weft/recompute.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what a model is -------------------------------------------------------------------------------------------------- */

typedef enum weft_residual {
    WEFT_RESIDUAL_PLAIN = 0,       /* "residual": one stream, x + f */
    WEFT_RESIDUAL_HC,              /* "hc": unconstrained, alpha tanh(theta norm(x_i)) + beta per stream */
    WEFT_RESIDUAL_MHC,             /* "mhc": doubly stochastic residual mix */
    WEFT_RESIDUAL_MHC_SINGLE_PASS, /* "mhc_single_pass": a site is fed by the pre that the site before it predicted */
    WEFT_RESIDUAL_INDEPENDENT, /* "independent": as mhc without a residual mix, streams pass every merge unchanged */
    WEFT_RESIDUAL_COUNT
} weft_residual;

typedef enum weft_exit {
    WEFT_EXIT_MEAN = 0, /* mean of the streams */
    WEFT_EXIT_LEARNED,  /* mhc_head with parameters of its own */
    WEFT_EXIT_MIX,      /* the pre that the last site predicted: mhc_single_pass, and nothing else, ends this way */
    WEFT_EXIT_COUNT
} weft_exit;

/* First values of the mix of mhc, mhc_single_pass and independent: those of beta, which alpha, about 0.01, hardly moves. hc has
 * those of its paper, which are like the second. */
typedef enum weft_first_mix {
    /* "uniform": beta is 0. pre is 1/2, post 1, and all of res 1/n: streams are mixed at once */
    WEFT_FIRST_MIX_UNIFORM = 0,
    /* "identity": res is nearly the identity, post 1; pre of site s has the stream s mod n for the most part, and its sum is 1 */
    WEFT_FIRST_MIX_IDENTITY,
    WEFT_FIRST_MIX_COUNT
} weft_first_mix;

/* What mixes tokens. A hybrid has three gdn layers for one of attention: every fourth layer, counted in the whole model, is the
 * attention one. gdn layers have no positions. */
typedef enum weft_mixer {
    WEFT_MIXER_ATTENTION = 0, /* "attention" */
    WEFT_MIXER_GDN,           /* "gdn": no layer of attention */
    WEFT_MIXER_HYBRID,        /* "hybrid": at least four layers, where the part is a whole model or a block */
    WEFT_MIXER_COUNT
} weft_mixer;

/* Which part of a model: all of it, a stage of a pipeline, or the block alone for callers with their own embedding and
 * head. A part has its parameters under the names they have in the whole. Between stages go streams [T, n, C], and their
 * gradients back: T n C elements a hop; with mhc_single_pass also the pre [T, n] that the last site predicted for the next
 * stage's first one. A block takes rows [T, C] and gives rows. No recompute group crosses a stage. A
 * middle stage of one layer is a transformer layer by itself. */
typedef enum weft_stage {
    WEFT_STAGE_WHOLE = 0,
    WEFT_STAGE_FIRST,  /* embedding, expand, layers */
    WEFT_STAGE_MIDDLE, /* layers */
    WEFT_STAGE_LAST,   /* layers, exit, norm, head, loss */
    WEFT_STAGE_BLOCK,  /* expand, layers, exit */
    WEFT_STAGE_COUNT
} weft_stage;

/* Set struct_size and call weft_model_defaults, or fill every field. */
typedef struct weft_model_config {
    size_t struct_size;
    weft_dtype dtype; /* of activations: f32 on cpu, f32 or bf16 on cuda, f64 on ref */
    weft_residual residual;
    weft_exit exit;
    int32_t streams;       /* 1 with WEFT_RESIDUAL_PLAIN */
    int32_t layers, heads; /* layers of this stage */
    int32_t first_layer;   /* number of the first of them in the whole model */
    weft_stage stage;
    int64_t vocab, channels, hidden;  /* hidden: width of the MLP */
    int64_t context;                  /* longest sequence */
    int32_t bias;                     /* 1: biases on all linear maps of the layers */
    int32_t recompute, group, poison; /* as in weft_recompute_desc */
    double dropout;                   /* on the branch, in training; mask per stream */
    uint64_t dropout_seed;
    double norm_eps, rope_base, init_alpha; /* init_alpha: first value of a connection's alpha */
    weft_mhc_numerics numerics;             /* mhc, mhc_single_pass, independent; hc takes rms_eps */
    weft_first_mix first_mix;               /* mhc, mhc_single_pass, independent; uniform with the others */
    int32_t separate; /* 1: these three run site by site as well, for measurements and tests */
    /* gdn layers have `heads` value heads of channels / heads, and key heads of the same size. With attention the two are 0. */
    weft_mixer mixer;
    int32_t key_heads;  /* divides heads; 0: half of them, which makes a layer as large as one of attention */
    int32_t conv_width; /* taps of the convolution, 1 to 8; 0: 4 */
    int32_t reserved;   /* zero */
} weft_model_config;

/* A small model of this kind, in as many bytes as config->struct_size says; fields can be changed afterwards:
 *     weft_model_config config = {.struct_size = sizeof config};
 *     weft_model_defaults(WEFT_RESIDUAL_MHC, &config); */
WEFT_API weft_status weft_model_defaults(weft_residual residual, weft_model_config *config);
/* The first thing that is wrong with it, in words. */
WEFT_API weft_status weft_model_check(const weft_model_config *config);

WEFT_API const char *weft_residual_name(weft_residual residual); /* NULL out of range */
WEFT_API weft_residual weft_residual_find(const char *name);     /* WEFT_RESIDUAL_COUNT where there is none */
WEFT_API const char *weft_exit_name(weft_exit exit);
WEFT_API weft_exit weft_exit_find(const char *name);
WEFT_API const char *weft_first_mix_name(weft_first_mix mix);
WEFT_API weft_first_mix weft_first_mix_find(const char *name);
WEFT_API const char *weft_mixer_name(weft_mixer mixer);
WEFT_API weft_mixer weft_mixer_find(const char *name);

/* ---- parameters ------------------------------------------------------------------------------------------------------- */

typedef enum weft_init {
    WEFT_INIT_ZEROS = 0,
    WEFT_INIT_ONES,
    WEFT_INIT_ALPHA,    /* config.init_alpha */
    WEFT_INIT_NORMAL,   /* standard deviation 0.02 */
    WEFT_INIT_RESIDUAL, /* the same by sqrt(2 layers): what writes to the residual streams */
    WEFT_INIT_XAVIER,   /* uniform within sqrt(6 / (rows + columns)) */
    WEFT_INIT_HC,    /* pre: stream s mod n; post: 1; res: identity. The plain residual, to first order in alpha */
    WEFT_INIT_MIX,   /* config.first_mix where it is not uniform */
    WEFT_INIT_TAPS,  /* uniform within 1/sqrt(columns) */
    WEFT_INIT_DECAY, /* logarithm of a number that is uniform between 1 and 16 */
    WEFT_INIT_STEP   /* softplus of it is between 0.001 and 0.1, uniform on a logarithmic scale */
} weft_init;

typedef struct weft_model_param {
    char name[64]; /* "layers.0.attention.qkv.weight"; "layers.0.gdn.proj.weight" in a layer of gdn */
    int32_t ndim;
    int64_t shape[2];
    int64_t offset, count; /* elements, in the array of all parameters */
    int32_t layer;         /* of this stage; -1 outside the layers */
    int32_t matrix;        /* 1: a weight of a linear map: decayed, and Muon's where it has two dimensions */
    weft_init init;
    uint64_t reserved[4];
} weft_model_param;

/* How many tensors and how many elements their array has. Tensors begin at multiples of 16 elements; what lies between them
 * is zero and stays zero. */
WEFT_API weft_status weft_model_param_count(const weft_model_config *config, int32_t *tensors, int64_t *elements);
WEFT_API weft_status weft_model_param_at(const weft_model_config *config, int32_t index, weft_model_param *param);
/* Fills an array in host memory. Parameters, and so gradients, are f64 where config.dtype is, else f32. The same seed gives
 * the same numbers. */
WEFT_API weft_status weft_model_init(const weft_model_config *config, uint64_t seed, void *parameters);

/* ---- steps ------------------------------------------------------------------------------------------------------------ */

typedef struct weft_model_bytes {
    weft_recompute_bytes recompute; /* streams and sub-layer inputs */
    size_t kept;      /* from forward to backward: coefficients, sub-layer outputs, attention, gates, logits */
    size_t scratch;   /* within a pass */
    size_t workspace; /* of the operators */
    size_t total;     /* to ask for */
    size_t reserved[4];
} weft_model_bytes;

/* A model bound to memory, for batches of one shape. Read-only except for the functions below. config lies in front
 * of the reserved bytes, so that it can grow too. */
typedef struct weft_model {
    int64_t sequences, length;
    char *memory;
    weft_model_bytes bytes;
    weft_recompute recompute;
    int32_t phase;
    weft_model_config config;
    size_t product_room; /* bytes of the workspace that a product takes with the threads bound for */
    uint64_t reserved[28];
} weft_model;

WEFT_API weft_status weft_model_query(const weft_exec *exec, const weft_model_config *config, int64_t sequences,
                                      int64_t length, weft_model_bytes *bytes);
/* sequences * length is at most 2^31 - 1. memory: bytes.total of the backend's, aligned to 64 bytes. Passes run with the exec that
 * the model was bound with; one with more threads is refused, since products take memory for each thread. */
WEFT_API weft_status weft_model_bind(const weft_exec *exec, const weft_model_config *config, int64_t sequences,
                                     int64_t length, void *memory, size_t bytes, weft_model *model);

/* Both passes take the same struct. exec.workspace is not used: it is part of the model's memory. Arrays are aligned to their
 * elements and share no byte with the model's memory; what a pass writes shares none with anything else (WEFT_ERR_OVERLAP), but
 * streams_out may be streams_in, and d_streams_in d_streams_out. */
typedef struct weft_model_args {
    size_t struct_size;
    const weft_blas *blas; /* NULL: the backend's own loop */
    const void *parameters;
    void *gradients;       /* backward: added to */
    const int32_t *tokens; /* [sequences, length], 0 .. vocab-1; where there is an embedding */
    const int32_t
        *targets;     /* the same shape; -1: does not count. NULL in forward: logits only. Where there is a head */
    int32_t training; /* 1: dropout */
    const uint64_t *step; /* of dropout, read when the pass runs; NULL = 0 */
    int64_t token_base;   /* global index of token 0, for micro-batches and ranks: 0 to 2^62 */
    double loss_scale;    /* of the gradient; 0: 1/tokens, the gradient of the mean loss */
    double *loss; /* out, optional, in the backend's memory: sum over the tokens that count, of -log p(target) */
    /* What a part gets and gives where it has no embedding or no head: streams, or the rows of a block. In forward the
     * first two, in backward the last two. */
    const void *streams_in;
    void *streams_out;
    const void *d_streams_out;
    void *d_streams_in;
    /* The same for pre between stages of mhc_single_pass, in the dtype of parameters. mix_out may be mix_in, and d_mix_in
     * d_mix_out. */
    const void *mix_in;
    void *mix_out;
    const void *d_mix_out;
    void *d_mix_in;
} weft_model_args;

WEFT_API weft_status weft_model_forward(const weft_exec *exec, weft_model *model, const weft_model_args *args);
WEFT_API weft_status weft_model_backward(const weft_exec *exec, weft_model *model, const weft_model_args *args);
/* [sequences * length, vocab] of the last forward, f32 beside bf16; absent where a stage has no head. Backward may overwrite
 * it. */
WEFT_API weft_tensor weft_model_logits(const weft_model *model);

/* What a model remembers of one sequence between calls, in the caller's memory: for a gdn layer the last rows in front of its
 * convolution and the matrices of the rule, whose size is constant, and for a layer of attention the projections of up to
 * `capacity` tokens. Read-only except for the functions below. */
typedef struct weft_model_state {
    int64_t capacity; /* 0 where no layer attends */
    int64_t position; /* tokens so far; -1 after a step that failed on its way */
    char *memory;
    size_t bytes;
    weft_model_config config;
    uint64_t reserved[8];
} weft_model_state;

/* capacity: 1 to the context; where no layer attends it is not looked at, and a sequence has no longest length. */
WEFT_API weft_status weft_model_state_query(const weft_exec *exec, const weft_model_config *config,
                                            int64_t capacity, size_t *bytes);
/* A state of no tokens; memory is as for weft_model_bind, and bytes what the query says. A step with more threads than `exec` has
 * here is refused where a layer attends. A sequence is begun anew by binding again. */
WEFT_API weft_status weft_model_state_bind(const weft_exec *exec, const weft_model_config *config, int64_t capacity,
                                           void *memory, size_t bytes, weft_model_state *state);
/* Forward over the next tokens of the state's sequence, as many as the model's length; the model is bound with one sequence.
 * Results are those of a forward over the whole sequence, rounded on other ways: products of fewer rows, and on cuda the
 * rule token after token where forward has chunks. There is no loss and no dropout: targets and loss are NULL, training is 0. */
WEFT_API weft_status weft_model_step(const weft_exec *exec, weft_model *model, weft_model_state *state,
                                     const weft_model_args *args);

/* The residual mix of a site of the last forward, in the backend's memory: [tokens, n, n], f32 beside bf16. Sites are numbered
 * through the layers of the stage, mixer and MLP in turn, from 0 to 2 layers - 1. The indices are those of
 * config.numerics.apply; in hc, [i, o]. Absent for the plain residual, for independent, and for another site. */
WEFT_API weft_tensor weft_model_mix(const weft_model *model, int32_t site);

/* The composite residual map W_last ... W_1 of the last forward, token by token: how much a signal can grow on its way
 * (largest absolute row sum) and a gradient on its way back (largest absolute column sum), averaged and at their largest
 * over the tokens. All 1 for the plain residual and for independent. Frozen. */
typedef struct weft_model_gains {
    double row_mean, row_max, column_mean, column_max;
} weft_model_gains;
WEFT_API weft_status weft_model_gain(const weft_exec *exec, const weft_model *model, weft_model_gains *gains);

/* The first value of the last forward that is not finite: "layers.3.mlp.output", or "" where all are. */
WEFT_API weft_status weft_model_first_nonfinite(const weft_exec *exec, const weft_model *model, char name[64]);

#ifdef __cplusplus
}
#endif
#endif
