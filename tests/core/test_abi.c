/* SPDX-License-Identifier: Apache-2.0
 *
 * Callers that were compiled with another version of the headers. The layouts below are written out by hand, as such a
 * caller has them: a field that moves, or a struct that changes its size where it may not, fails here. */
#include <sys/mman.h>
#include <unistd.h>

#include "core/status.h"
#include "support/gpt.h"
#include "support/memory.h"
#include "support/refuse.h"
#include <weft/optim.h>

/* The rule for sizes itself, with layouts that no public struct has yet; its sentences end up here. */
static char sentence[256];
weft_status weft_fail(weft_status status, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    vsnprintf(sentence, sizeof sentence, format, ap);
    va_end(ap);
    return status;
}
#include "core/struct_size.c"

/* ---- the first layouts ------------------------------------------------------------------------------------------------ */

typedef struct first_exec {
    size_t struct_size;
    int32_t backend, device, threads, isa;
    void *stream, *workspace;
    size_t workspace_bytes;
} first_exec;

typedef struct first_tensor {
    void *data;
    int32_t dtype, ndim;
    int64_t shape[4], stride[4];
} first_tensor;

typedef struct first_grad {
    first_tensor to;
    int32_t add;
} first_grad;

typedef struct first_numerics {
    double rms_eps;
    int32_t rms_eps_kind;
    double pre_eps, post_mult;
    int32_t sinkhorn;
    double sinkhorn_eps;
    int32_t sinkhorn_iters, apply;
    uint64_t reserved[6];
} first_numerics;

typedef struct first_dropout {
    double p;
    uint64_t seed, site;
    const uint64_t *step;
    int64_t token_base;
    int32_t shared;
    uint64_t reserved[6];
} first_dropout;

typedef struct first_gdn_options {
    int32_t activation, l2norm;
    double l2_eps, q_scale, beta_scale;
    int32_t head_map, rounding, g_chunk, g_log2;
    uint64_t reserved[6];
} first_gdn_options;

typedef struct first_rmsnorm_fwd_args {
    size_t struct_size;
    double eps;
    first_tensor u, weight, v;
} first_rmsnorm_fwd_args;

typedef struct first_layer {
    size_t struct_size;
    first_dropout dropout;
    double sub_eps;
    first_tensor pre, f, bias, post, res, sub_weight, u, v, y;
} first_layer;

typedef struct first_replay_fwd_args {
    size_t struct_size;
    first_numerics numerics;
    first_tensor x;
    const void *layers;
    int32_t num_layers;
} first_replay_fwd_args;

typedef struct first_plan_desc {
    size_t struct_size;
    int32_t layers, recompute, group, poison;
    int64_t tokens, streams, channels;
    int32_t dtype;
} first_plan_desc;

typedef struct first_model_config {
    size_t struct_size;
    int32_t dtype, residual, exit, streams, layers, heads, first_layer, stage;
    int64_t vocab, channels, hidden, context;
    int32_t bias, recompute, group, poison;
    double dropout;
    uint64_t dropout_seed;
    double norm_eps, rope_base, init_alpha;
    first_numerics numerics;
} first_model_config;

typedef struct first_model_args {
    size_t struct_size;
    const void *blas, *parameters;
    void *gradients;
    const int32_t *tokens, *targets;
    int32_t training;
    const uint64_t *step;
    int64_t token_base;
    double loss_scale, *loss;
    const void *streams_in;
    void *streams_out;
    const void *d_streams_out;
    void *d_streams_in;
} first_model_args;

typedef struct first_adamw_args {
    size_t struct_size;
    void *parameter, *first, *second;
    const void *gradient;
    int64_t count, step;
    double rate, beta1, beta2, eps, decay, scale;
    const double *factor;
} first_adamw_args;

#define SAME(ours, theirs, field)                                                                                  \
    _Static_assert(offsetof(ours, field) == offsetof(theirs, field), #ours "." #field " has moved")
#define FIXED(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #ours " has another size")
#define GROWS(ours, theirs) _Static_assert(sizeof(ours) >= sizeof(theirs), #ours " has lost fields")

GROWS(weft_exec, first_exec);
SAME(weft_exec, first_exec, struct_size);
SAME(weft_exec, first_exec, backend);
SAME(weft_exec, first_exec, device);
SAME(weft_exec, first_exec, threads);
SAME(weft_exec, first_exec, isa);
SAME(weft_exec, first_exec, stream);
SAME(weft_exec, first_exec, workspace);
SAME(weft_exec, first_exec, workspace_bytes);
FIXED(weft_tensor, first_tensor);
SAME(weft_tensor, first_tensor, shape);
SAME(weft_tensor, first_tensor, stride);
FIXED(weft_grad, first_grad);
SAME(weft_grad, first_grad, add);
FIXED(weft_mhc_numerics, first_numerics);
SAME(weft_mhc_numerics, first_numerics, pre_eps);
SAME(weft_mhc_numerics, first_numerics, sinkhorn);
SAME(weft_mhc_numerics, first_numerics, apply);
FIXED(weft_dropout, first_dropout);
SAME(weft_dropout, first_dropout, step);
SAME(weft_dropout, first_dropout, shared);
FIXED(weft_gdn_options, first_gdn_options);
SAME(weft_gdn_options, first_gdn_options, head_map);
SAME(weft_gdn_options, first_gdn_options, g_log2);
GROWS(weft_rmsnorm_fwd_args, first_rmsnorm_fwd_args);
SAME(weft_rmsnorm_fwd_args, first_rmsnorm_fwd_args, v);
GROWS(weft_mhc_replay_layer, first_layer);
SAME(weft_mhc_replay_layer, first_layer, dropout);
SAME(weft_mhc_replay_layer, first_layer, sub_eps);
SAME(weft_mhc_replay_layer, first_layer, pre);
SAME(weft_mhc_replay_layer, first_layer, y);
GROWS(weft_mhc_replay_fwd_args, first_replay_fwd_args);
SAME(weft_mhc_replay_fwd_args, first_replay_fwd_args, x);
SAME(weft_mhc_replay_fwd_args, first_replay_fwd_args, num_layers);
GROWS(weft_recompute_desc, first_plan_desc);
SAME(weft_recompute_desc, first_plan_desc, dtype);
GROWS(weft_model_config, first_model_config);
SAME(weft_model_config, first_model_config, stage);
SAME(weft_model_config, first_model_config, context);
SAME(weft_model_config, first_model_config, numerics);
GROWS(weft_model_args, first_model_args);
SAME(weft_model_args, first_model_args, step);
SAME(weft_model_args, first_model_args, d_streams_in);
GROWS(weft_adamw_args, first_adamw_args);
SAME(weft_adamw_args, first_adamw_args, factor);

/* What the library fills or keeps in the caller's memory has the size that the caller knows. */
#define BYTES(type, bytes) _Static_assert(sizeof(void *) != 8 || sizeof(type) == (bytes), #type " has another size")
BYTES(weft_recompute_bytes, 64);
BYTES(weft_recompute, 464);
BYTES(weft_recompute_site, 240);
BYTES(weft_model_param, 152);
BYTES(weft_model_bytes, 128);
BYTES(weft_model, 1112);
BYTES(weft_model_gains, 32);
BYTES(weft_blas, 256);
BYTES(weft_arg_info, 56);
BYTES(weft_scalar_info, 24);

/* ---- memory that ends where a struct ends -------------------------------------------------------------------------- */

/* The page behind it cannot be read: a library that looks further than struct_size does not come back. */
typedef struct edge {
    char *pages;
    size_t page, used;
} edge;

static void *edge_put(edge *e, const void *bytes, size_t size)
{
    e->page = (size_t)sysconf(_SC_PAGESIZE);
    e->used = (size + e->page - 1) / e->page * e->page;
    void *pages = NULL;
    assert_int_equal(posix_memalign(&pages, e->page, e->used + e->page), 0);
    e->pages = pages;
    assert_int_equal(mprotect(e->pages + e->used, e->page, PROT_NONE), 0);
    return memcpy(e->pages + e->used - size, bytes, size);
}

static void edge_drop(edge *e)
{
    assert_int_equal(mprotect(e->pages + e->used, e->page, PROT_READ | PROT_WRITE), 0);
    free(e->pages);
}

static first_exec first_exec_of(const weft_exec *exec)
{
    return (first_exec){.struct_size = sizeof(first_exec),
                        .backend = (int32_t)exec->backend,
                        .threads = exec->threads,
                        .workspace = exec->workspace,
                        .workspace_bytes = exec->workspace_bytes};
}

/* A struct of this version as a later caller has it: `more` bytes longer, all zero. Free it. */
static char *longer(const void *now, size_t size, size_t more)
{
    char *bytes = calloc(1, size + more);
    assert_non_null(bytes);
    memcpy(bytes, now, size);
    size += more;
    memcpy(bytes, &size, sizeof size);
    return bytes;
}

/* ---- the rule ---------------------------------------------------------------------------------------------------------- */

typedef struct grown {
    size_t struct_size;
    int64_t first, second, third;
} grown;

static void size_rule(void **state)
{
    (void)state;
    static const weft_sizes sizes = {offsetof(grown, second), sizeof(grown), "WEFT_ARGS"};
    const grown given = {.struct_size = sizeof given, .first = 1, .second = 2, .third = 3};
    const void *taken;
    grown copy;
    edge e;
    assert_int_equal(weft_take_struct("op", "", &sizes, &given, &copy, &taken), WEFT_OK);
    assert_ptr_equal(taken, &given); /* no copy where the size is the current one */
    for (size_t size = 0; size < sizeof given + 8; size++) {
        grown older = given;
        older.struct_size = size;
        if (size == sizeof given) continue;
        bool served = size % 8 == 0 && size >= sizes.first && size < sizeof given;
        void *at = edge_put(&e, &older, size < 8 ? 8 : size < sizeof older ? size : sizeof older);
        memset(&copy, 0x5a, sizeof copy);
        sentence[0] = 0;
        weft_status got = weft_take_struct("op", "x.", &sizes, at, &copy, &taken);
        assert_int_equal(got, served ? WEFT_OK : WEFT_ERR_ARGUMENT);
        if (!served) assert_non_null(strstr(sentence, "op: x.struct_size: expected"));
        if (!served) assert_non_null(strstr(sentence, "WEFT_ARGS"));
        if (served) {
            assert_ptr_equal(taken, &copy);
            assert_int_equal(copy.struct_size, sizeof copy);
            assert_int_equal(copy.first, 1);
            assert_int_equal(copy.second, size > offsetof(grown, second) ? 2 : 0);
            assert_int_equal(copy.third, 0);
        }
        edge_drop(&e);
    }
    char *later = longer(&given, sizeof given, 24);
    assert_int_equal(weft_take_struct("op", "", &sizes, later, &copy, &taken), WEFT_OK);
    assert_int_equal(copy.struct_size, sizeof copy);
    assert_int_equal(copy.third, 3);
    later[sizeof given + 23] = 1;
    assert_int_equal(weft_take_struct("op", "", &sizes, later, &copy, &taken), WEFT_ERR_UNSUPPORTED);
    memset(later, 0xff, sizeof(size_t));
    assert_int_equal(weft_take_struct("op", "", &sizes, later, &copy, &taken), WEFT_ERR_ARGUMENT);
    free(later);
}

/* Layers smaller than the current ones, and larger: the array is stepped by what the caller has. */
static void layers_in_steps(void **state)
{
    (void)state;
    enum { COUNT = 3 };
    const size_t steps[] = {offsetof(weft_mhc_replay_layer, y), sizeof(weft_mhc_replay_layer),
                            sizeof(weft_mhc_replay_layer) + 40};
    for (int k = 0; k < 3; k++) {
        char bytes[COUNT * (sizeof(weft_mhc_replay_layer) + 40)] = {0};
        for (int l = 0; l < COUNT; l++) {
            weft_mhc_replay_layer one = {.struct_size = steps[k], .sub_eps = l + 1, .y = {.ndim = 7}};
            memcpy(bytes + (size_t)l * steps[k], &one, steps[k] < sizeof one ? steps[k] : sizeof one);
        }
        edge e;
        weft_mhc_replay_layer room;
        const weft_mhc_replay_layer *layers = edge_put(&e, bytes, COUNT * steps[k]);
        for (int l = 0; l < COUNT; l++) {
            const weft_mhc_replay_layer *at = weft_replay_layer_at(layers, l, &room);
            assert_true(at->sub_eps == l + 1);
            assert_int_equal(at->y.ndim, k ? 7 : 0);
            assert_int_equal(at == &room, k == 0);
        }
        edge_drop(&e);
    }
}

/* ---- operators ------------------------------------------------------------------------------------------------------------ */

/* One struct of a call as another version has it; the result must be that of the plain call. */
static void expect_same_result(bench *b, const weft_exec *exec, const void *args, const pack *want,
                               const char *what)
{
    problem_reset(b->p);
    memset(b->work, 0xff, b->bytes);
    if (weft_op_call(b->p->op, exec, args) != WEFT_OK)
        fail_msg("%s: %s: %s", b->p->op->name, what, weft_last_error());
    pack got = problem_pack(b->p);
    pack_expect_same(b->p, &got, want, what);
    pack_free(&got);
    problem_reset(b->p);
    memset(b->work, 0x5a, b->bytes + 1); /* as refuses() expects it */
}

static void operator_one(bench *b, weft_exec exec)
{
    problem *p = b->p;
    edge e;
    size_t bytes = 0;
    (void)exec;
    assert_int_equal(weft_op_call(p->op, &b->exec, p->args), WEFT_OK);
    pack want = problem_pack(p);
    first_exec older = first_exec_of(&b->exec);
    const void *older_exec = edge_put(&e, &older, sizeof older);
    expect_same_result(b, older_exec, p->args, &want, "an older exec");
    assert_int_equal(weft_op_workspace(p->op, older_exec, p->args, &bytes), WEFT_OK);
    assert_int_equal(bytes, b->bytes);
    edge_drop(&e);
    void *alone = edge_put(&e, p->args, p->op->args_size);
    expect_same_result(b, &b->exec, alone, &want, "args at the end of a page");
    edge_drop(&e);
    char *later = longer(&b->exec, sizeof b->exec, 16);
    expect_same_result(b, (const void *)later, p->args, &want, "a later exec");
    free(later);
    later = longer(p->args, p->op->args_size, 48);
    expect_same_result(b, &b->exec, later, &want, "later args");
    free(later);
    pack_free(&want);
    /* sizes that cannot be */
    static const size_t bad[] = {
        0,       8, sizeof(first_exec) - 8, sizeof(first_exec) - 1, sizeof(weft_exec) - 1, sizeof(weft_exec) + 1,
        SIZE_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        b->exec.struct_size = bad[i];
        refuses(b, WEFT_ERR_ARGUMENT, "exec.struct_size", "a size that no exec has");
        assert_non_null(strstr(weft_last_error(), "WEFT_EXEC"));
        query_refuses(b, WEFT_ERR_ARGUMENT, "a size that no exec has");
        restore(b, exec);
    }
    union {
        weft_exec now;
        unsigned char bytes[sizeof(weft_exec) + 16];
    } unknown = {.bytes = {0}};
    unknown.now = b->exec;
    unknown.now.struct_size = sizeof unknown;
    unknown.bytes[sizeof unknown - 1] = 1;
    assert_int_equal(weft_op_call(p->op, &unknown.now, p->args), WEFT_ERR_UNSUPPORTED);
    if (!problem_untouched(p)) test_failed("%s: refused, but something was written", p->op->name);
}

static void reserved_group(bench *b, weft_exec exec, const weft_op_info *info, char *args, const char *prefix)
{
    static const struct {
        weft_scalar_type type;
        size_t offset;
        int used; /* of the fields that were reserved first: post_eps */
    } kinds[] = {{WEFT_SCALAR_NUMERICS, offsetof(first_numerics, reserved), 1},
                 {WEFT_SCALAR_DROPOUT, offsetof(first_dropout, reserved), 0},
                 {WEFT_SCALAR_GDN, offsetof(first_gdn_options, reserved), 0}};
    for (const weft_scalar_info *s = info->scalars; s && s->name; s++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
            for (int i = kinds[k].used; kinds[k].type == s->type && i < 6; i++) {
                char name[64];
                uint64_t set = (uint64_t)1 << (i * 9);
                snprintf(name, sizeof name, "%s%s.reserved", prefix, s->name);
                memcpy(args + s->offset + kinds[k].offset + (size_t)i * 8, &set, sizeof set);
                refuses(b, WEFT_ERR_ARGUMENT, name, "a reserved field that is set");
                query_refuses(b, WEFT_ERR_ARGUMENT, "a reserved field that is set");
                restore(b, exec);
            }
}

static void reserved_one(bench *b, weft_exec exec)
{
    reserved_group(b, exec, b->p->op, b->p->args, "");
    if (strcmp(b->p->op->name, "mhc_replay_fwd") == 0)
        reserved_group(b, exec, weft_mhc_replay_layer_info(), (char *)&b->p->layers[1], "layers[1].");
}

static void replay_one(bench *b, weft_exec exec)
{
    problem *p = b->p;
    if (strcmp(p->op->name, "mhc_replay_fwd") != 0) return;
    weft_mhc_replay_fwd_args *args = p->args;
    const int32_t count = args->num_layers;
    const size_t size = sizeof(weft_mhc_replay_layer), more = size + 32;
    edge e;
    assert_int_equal(weft_op_call(p->op, &b->exec, p->args), WEFT_OK);
    pack want = problem_pack(p);
    args->layers = edge_put(&e, p->layers, (size_t)count * size);
    expect_same_result(b, &b->exec, args, &want, "layers at the end of a page");
    edge_drop(&e);
    char *later = calloc((size_t)count, more);
    for (int32_t l = 0; l < count; l++) {
        memcpy(later + (size_t)l * more, &p->layers[l], size);
        memcpy(later + (size_t)l * more, &more, sizeof more);
    }
    args->layers = edge_put(&e, later, (size_t)count * more);
    expect_same_result(b, &b->exec, args, &want, "layers of a later caller");
    char *last = (char *)args->layers + (size_t)(count - 1) * more;
    last[more - 1] = 1;
    refuses(b, WEFT_ERR_UNSUPPORTED, "layers[2].struct_size", "a layer with an unknown field set");
    edge_drop(&e);
    free(later);
    restore(b, exec);
    pack_free(&want);
    for (int l = 0; l < 2; l++) {
        p->layers[l].struct_size = 0;
        refuses(b, WEFT_ERR_ARGUMENT, l ? "layers[1].struct_size" : "layers[0].struct_size",
                "a layer without size");
        assert_non_null(strstr(weft_last_error(), l ? "like layers[0]" : "WEFT_STRUCT"));
        query_refuses(b, WEFT_ERR_ARGUMENT, "a layer without size");
        restore(b, exec);
    }
}

TEST(operators, operator_one)
TEST(reserved_fields, reserved_one)
TEST(replay, replay_one)

/* ---- the first layouts, filled in by hand ----------------------------------------------------------------------------- */

static first_tensor dense(void *data, int64_t rows, int64_t columns)
{
    return (first_tensor){
        data, WEFT_F32, columns ? 2 : 1, {rows, columns}, {columns ? columns : 1, columns ? 1 : 0}};
}

/* A program of the first release calls rmsnorm and the replay: nothing in it comes from today's headers but the functions. */
static void first_program(void **state)
{
    (void)state;
    enum { T = 3, N = 2, C = 4 };
    float u[T * C], v[T * C] = {0}, x[T * N * C], y[T * N * C] = {0}, post[T * N], res[T * N * N], f[T * C];
    for (int i = 0; i < T * C; i++) u[i] = f[i] = (float)(i + 1);
    for (int i = 0; i < T * N * C; i++) x[i] = (float)i;
    for (int i = 0; i < T * N; i++) post[i] = 1;
    for (int i = 0; i < T * N * N; i++) res[i] = i % (N * N) == 0 || i % (N * N) == 3; /* the identity */
    first_exec exec = {.struct_size = sizeof exec, .backend = 1};
    char workspace[4096];
    exec.workspace = workspace, exec.workspace_bytes = sizeof workspace;
    first_rmsnorm_fwd_args norm = {.struct_size = sizeof norm, .eps = 0, .u = dense(u, T, C), .v = dense(v, T, C)};
    const void *at = &exec;
    assert_int_equal(weft_op_call(weft_op_find("rmsnorm_fwd"), at, &norm), WEFT_OK);
    for (int t = 0; t < T; t++) {
        double squares = 0;
        for (int c = 0; c < C; c++) squares += (double)v[t * C + c] * (double)v[t * C + c];
        assert_true(squares > C - 1e-5 && squares < C + 1e-5);
    }
    first_tensor streams = {x, WEFT_F32, 3, {T, N, C}, {N * C, C, 1}}, out = streams;
    out.data = y;
    first_layer layers[2] = {{.struct_size = sizeof(first_layer), .f = dense(f, T, C), .post = dense(post, T, N)}};
    layers[0].res = (first_tensor){res, WEFT_F32, 3, {T, N, N}, {N * N, N, 1}};
    layers[1] = layers[0];
    layers[1].y = out;
    first_replay_fwd_args replay = {.struct_size = sizeof replay, .x = streams, .layers = layers, .num_layers = 2};
    if (weft_op_call(weft_op_find("mhc_replay_fwd"), at, &replay) != WEFT_OK) fail_msg("%s", weft_last_error());
    for (int i = 0; i < T * N * C; i++)
        assert_true(y[i] == x[i] + 2 * f[i / (N * C) * C + i % C]); /* twice x + f */
}

/* ---- model, recompute, optimisers ----------------------------------------------------------------------------------------------- */

static void model(void **state)
{
    (void)state;
    weft_model_config c = gpt_variant_config(&gpt_variants[5], WEFT_F32);
    gpt g;
    gpt_open(&g, &c, 2, 8, 0.1);
    const double want = gpt_step(&g);
    const size_t bytes = (size_t)g.elements * sizeof(float);
    float *gradients = must_alloc(bytes);
    memcpy(gradients, g.gradients, bytes);
    memset(g.gradients, 0, bytes);

    edge exec_edge, config_edge, args_edge;
    first_exec older = first_exec_of(&g.exec);
    first_model_config config;
    memcpy(&config, &c, sizeof config);
    config.struct_size = sizeof config;
    double loss;
    first_model_args args = {.struct_size = sizeof args,
                             .parameters = g.parameters,
                             .gradients = g.gradients,
                             .tokens = g.tokens,
                             .targets = g.targets,
                             .training = g.training,
                             .step = &g.step,
                             .loss = &loss};
    const void *exec = edge_put(&exec_edge, &older, sizeof older);
    const void *with = edge_put(&config_edge, &config, sizeof config),
               *pass = edge_put(&args_edge, &args, sizeof args);
    weft_model_bytes need;
    weft_model m;
    weft_model_gains gains;
    char name[64];
    assert_int_equal(weft_model_query(exec, with, 2, 8, &need), WEFT_OK);
    assert_int_equal(need.total, g.bytes.total);
    assert_int_equal(weft_model_bind(exec, with, 2, 8, g.memory, need.total, &m), WEFT_OK);
    assert_int_equal(weft_model_forward(exec, &m, pass), WEFT_OK);
    assert_true(loss / 16 == want);
    assert_int_equal(weft_model_gain(exec, &m, &gains), WEFT_OK);
    assert_int_equal(weft_model_first_nonfinite(exec, &m, name), WEFT_OK);
    assert_int_equal(weft_model_backward(exec, &m, pass), WEFT_OK);
    assert_memory_equal(g.gradients, gradients, bytes);
    edge_drop(&exec_edge);
    edge_drop(&config_edge);
    edge_drop(&args_edge);

    /* later structs, and sizes that cannot be */
    char *later_config = longer(&c, sizeof c, 24), *later_exec = longer(&g.exec, sizeof g.exec, 24);
    assert_int_equal(weft_model_check((const void *)later_config), WEFT_OK);
    assert_int_equal(
        weft_model_bind((const void *)later_exec, (const void *)later_config, 2, 8, g.memory, need.total, &m),
        WEFT_OK);
    assert_int_equal(m.config.struct_size, sizeof m.config);
    later_config[sizeof c] = 1;
    assert_int_equal(weft_model_check((const void *)later_config), WEFT_ERR_UNSUPPORTED);
    later_exec[sizeof g.exec] = 1;
    assert_int_equal(weft_model_query((const void *)later_exec, &c, 2, 8, &need), WEFT_ERR_UNSUPPORTED);
    /* defaults fill what the caller has */
    assert_int_equal(weft_model_defaults(WEFT_RESIDUAL_HC, (void *)later_config), WEFT_OK);
    for (size_t i = sizeof c; i < sizeof c + 24; i++) assert_int_equal(later_config[i], 0);
    assert_int_equal(weft_model_check((const void *)later_config), WEFT_OK);
    free(later_config);
    free(later_exec);
    weft_model_config none = {0};
    assert_int_equal(weft_model_defaults(WEFT_RESIDUAL_HC, &none), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "config.struct_size"));
    assert_int_equal(none.layers, 0);
    weft_exec sizeless = {.backend = WEFT_BACKEND_CPU};
    assert_int_equal(weft_model_query(&sizeless, &c, 2, 8, &need), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "WEFT_EXEC"));
    c.numerics.reserved[3] = 1;
    assert_int_equal(weft_model_check(&c), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "reserved"));
    free(gradients);
    gpt_close(&g);
}

static void recompute(void **state)
{
    (void)state;
    first_plan_desc d = {.struct_size = sizeof d,
                         .layers = 2,
                         .recompute = 1,
                         .group = 1,
                         .tokens = 4,
                         .streams = 2,
                         .channels = 8,
                         .dtype = WEFT_F32};
    edge e;
    const void *desc = edge_put(&e, &d, sizeof d);
    weft_recompute_bytes bytes;
    weft_recompute recompute;
    weft_recompute_site at;
    assert_int_equal(weft_recompute_query(desc, &bytes), WEFT_OK);
    char *memory = must_alloc(bytes.total);
    memset(memory, 0, bytes.total);
    assert_int_equal(weft_recompute_open(desc, memory, bytes.total, &recompute), WEFT_OK);
    edge_drop(&e);
    char *later = longer(&recompute.desc, sizeof recompute.desc, 8);
    assert_int_equal(weft_recompute_query((const void *)later, &bytes), WEFT_OK);
    later[sizeof recompute.desc] = 1;
    assert_int_equal(weft_recompute_query((const void *)later, &bytes), WEFT_ERR_UNSUPPORTED);
    free(later);

    /* a replay whose layers are those of a later caller, on the exec of an older one */
    const size_t size = sizeof(weft_mhc_replay_layer) + 16;
    float f[4 * 8] = {0}, ones[4 * 2], res[4 * 2 * 2] = {0};
    for (int i = 0; i < 8; i++) ones[i] = 1;
    char layers[2 * (sizeof(weft_mhc_replay_layer) + 16)] = {0};
    for (size_t l = 0; l < 2; l++) {
        weft_mhc_replay_layer one = {.struct_size = size,
                                     .pre = weft_dense2(ones, WEFT_F32, 4, 2),
                                     .f = weft_dense2(f, WEFT_F32, 4, 8),
                                     .post = weft_dense2(ones, WEFT_F32, 4, 2),
                                     .res = weft_dense3(res, WEFT_F32, 4, 2, 2)};
        memcpy(layers + l * size, &one, sizeof one);
    }
    first_exec exec = {.struct_size = sizeof exec, .backend = 1};
    char workspace[8192];
    exec.workspace = workspace, exec.workspace_bytes = sizeof workspace;
    const void *on = edge_put(&e, &exec, sizeof exec);
    weft_recompute_replay_args args = {.struct_size = sizeof args, .layers = (void *)layers, .num_layers = 2};
    size_t need;
    assert_int_equal(weft_recompute_begin(&recompute), WEFT_OK);
    assert_int_equal(weft_recompute_site_at(&recompute, 0, &at), WEFT_OK);
    assert_int_equal(weft_recompute_close(&recompute, on, 0), WEFT_OK);
    assert_int_equal(weft_recompute_replay_workspace(&recompute, on, &args, &need), WEFT_OK);
    assert_in_range(need, 1, sizeof workspace);
    layers[2 * size - 1] = 1;
    assert_int_equal(weft_recompute_replay(&recompute, on, &args), WEFT_ERR_UNSUPPORTED);
    layers[2 * size - 1] = 0;
    if (weft_recompute_replay(&recompute, on, &args) != WEFT_OK) fail_msg("%s", weft_last_error());
    edge_drop(&e);
    free(memory);
}

static void optimisers(void **state)
{
    (void)state;
    enum { COUNT = 5 };
    float p[COUNT] = {1, 1, 1, 1, 1}, q[COUNT] = {1, 1, 1, 1, 1}, m[2 * COUNT] = {0}, n[2 * COUNT] = {0},
          g[COUNT] = {1, 2, 3, 4, 5};
    first_exec older = {.struct_size = sizeof older, .backend = 2};
    first_adamw_args a = {.struct_size = sizeof a,
                          .parameter = p,
                          .first = m,
                          .second = m + COUNT,
                          .gradient = g,
                          .count = COUNT,
                          .step = 1,
                          .rate = 0.1,
                          .beta1 = 0.9,
                          .beta2 = 0.99,
                          .eps = 1e-8,
                          .scale = 1};
    edge e, f;
    const void *exec = edge_put(&e, &older, sizeof older), *args = edge_put(&f, &a, sizeof a);
    assert_int_equal(weft_adamw(exec, args), WEFT_OK);
    edge_drop(&f);
    weft_adamw_args now = {0};
    memcpy(&now, &a, sizeof a);
    now.struct_size = sizeof now, now.parameter = q, now.first = n, now.second = n + COUNT;
    char *later = longer(&now, sizeof now, 8);
    assert_int_equal(weft_adamw(WEFT_EXEC(.backend = WEFT_BACKEND_CPU), (const void *)later), WEFT_OK);
    assert_memory_equal(p, q, sizeof p);
    later[sizeof now] = 1;
    assert_int_equal(weft_adamw(exec, (const void *)later), WEFT_ERR_UNSUPPORTED);
    free(later);
    double sum = 0, squares[1] = {9}, norm, factor;
    char workspace[4096];
    size_t need;
    assert_int_equal(weft_sum_squares_workspace(exec, COUNT, &need), WEFT_OK);
    edge_drop(&e);
    older.workspace = workspace, older.workspace_bytes = sizeof workspace;
    exec = edge_put(&e, &older, sizeof older);
    assert_in_range(need, 0, sizeof workspace);
    assert_int_equal(weft_sum_squares(exec, g, COUNT, &sum), WEFT_OK);
    assert_true(sum == 55);
    assert_int_equal(weft_clip(exec, WEFT_ARGS(weft_clip_args, .sums = squares, .count = 1, .largest = 1,
                                               .norm = &norm, .factor = &factor)),
                     WEFT_OK);
    assert_true(norm == 3);
    float matrix[6] = {1, 2, 3, 4, 5, 6}, moment[6] = {0};
    weft_muon_args muon = {.struct_size = sizeof muon,
                           .parameter = matrix,
                           .moment = moment,
                           .gradient = g,
                           .rows = 1,
                           .columns = 5,
                           .rate = 0.1,
                           .scale = 1};
    later = longer(&muon, sizeof muon, 8);
    assert_int_equal(weft_muon_workspace(exec, (const void *)later, &need), WEFT_OK);
    char *room = must_alloc(need);
    edge_drop(&e);
    older.workspace = room, older.workspace_bytes = need;
    exec = edge_put(&e, &older, sizeof older);
    assert_int_equal(weft_muon(exec, (const void *)later), WEFT_OK);
    edge_drop(&e);
    free(room);
    free(later);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(size_rule),       cmocka_unit_test(layers_in_steps), cmocka_unit_test(operators),
        cmocka_unit_test(reserved_fields), cmocka_unit_test(replay),          cmocka_unit_test(first_program),
        cmocka_unit_test(model),           cmocka_unit_test(recompute),       cmocka_unit_test(optimisers),
    };
    return suite_run("abi", tests);
}
