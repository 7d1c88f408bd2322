/* SPDX-License-Identifier: Apache-2.0
 *
 * `weft bench`: time of each operator beside the machine's copy bandwidth, measured in the same run. A result is
 * checked before it is timed, on the same buffers. Bytes are the sizes of the tensors of the call, each once. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/bandwidth.h"
#include "bench/bench.h"
#include "check/compare.h"
#include "check/element.h"
#include "check/expect.h"
#include "check/parallel.h"
#include "check/run.h"
#include "commands.h"
#include "common/options.h"

/* What a plain layer does without; their cost is small beside the rest. */
static const char *const without[] = {"bias",   "norm_weight",   "pre_in",   "sub_weight",   "v", "d_v",
                                      "d_bias", "d_norm_weight", "d_pre_in", "d_sub_weight", NULL};
static const char *const gdn_without[] = {"bias",    "d_bias",        "state",       "final_state", "state_index",
                                          "d_state", "d_final_state", "token_state", NULL};

static int is_gdn(const weft_op_info *op)
{
    return !strncmp(op->name, "gdn", 3);
}

static int is_rule(const weft_op_info *op)
{
    return !strncmp(op->name, "gdn_rule", 8);
}

static int is_step(const weft_op_info *op)
{
    return !strncmp(op->name, "gdn", 3) && !strcmp(strrchr(op->name, '_'), "_step");
}

/* One sequence of all tokens, or several; heads of 128, query and key repeated before the rule, a gate of its own. Where
 * the shape is not one of decoding, its tokens are those of up to 256 requests. */
static problem_spec spec_of(const bench *b, const weft_op_info *op)
{
    problem_spec s = b->spec;
    int step = is_step(op);
    if (!is_gdn(op)) return s;
    s.batch = step ? (b->decoding || s.tokens < 256 ? s.tokens : 256) : 1;
    s.steps = step ? 1 : s.tokens;
    s.packed = !step && b->sequences > 0;
    s.even = is_rule(op); /* the time of the rule is that of the longest */
    s.sequences = s.packed ? b->sequences : s.batch;
    s.key_heads = b->key_heads;
    s.value_heads = b->value_heads;
    s.key_dim = s.value_dim = s.channels = 128;
    s.width = 4;
    s.history = 3;
    s.repeat = !is_rule(op);
    s.gdn = weft_gdn_defaults();
    s.without = gdn_without;
    if (!strcmp(op->name, "gdn_rule_step")) s.wide = WEFT_F32; /* the states */
    return s;
}

enum { CHECKED_TOKENS = 33, MAX_TIMES = 2000 };

/* ---- one operator -------------------------------------------------------------------------------------------- */

/* The first tokens of the call against the expectation. */
static const char *check_first_tokens(bench *b, problem *p, char *text, size_t size)
{
    expectation e;
    const char *wrong;
    int64_t tokens = p->spec.tokens < CHECKED_TOKENS ? p->spec.tokens : CHECKED_TOKENS;
    problem_slice(p, tokens);
    expect_begin(&e, &b->exec, p->op, p->args);
    wrong = run_call(&b->exec, p->op, p->args);
    if (!wrong && !expect_finish(&e)) wrong = e.scope.problem;
    for (int i = 0; !wrong && i < e.num_results; i++) {
        comparison c = compare(e.result[i].tensor, e.result[i].want, e.result[i].bound);
        if (c.failed) {
            snprintf(text, size, "wrong result: %s: %lld of %lld elements, got %.9g, want %.9g, bound %.3g",
                     e.result[i].name, (long long)c.failed, (long long)c.count, c.got, c.want, c.bound);
            wrong = text;
        }
    }
    if (wrong && wrong != text) {
        snprintf(text, size, "%s", wrong);
        wrong = text;
    }
    expect_end(&e);
    problem_slice(p, p->spec.tokens);
    return wrong;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double bench_median(double *times, int count)
{
    qsort(times, (size_t)count, sizeof times[0], by_value);
    return count % 2 ? times[count / 2] : (times[count / 2 - 1] + times[count / 2]) / 2;
}

/* Median of at least five runs that take b->seconds together; slow operators get by with fewer. */
static const char *measure(bench *b, problem *p, timing *t)
{
    static double times[MAX_TIMES];
    weft_exec exec = b->exec;
    int count = 0;
    if (weft_op_workspace(p->op, &exec, p->args, &exec.workspace_bytes) != WEFT_OK) return weft_last_error();
    exec.workspace = aligned_alloc(64, (exec.workspace_bytes + 64) / 64 * 64);
    if (!exec.workspace) return "not enough memory for the workspace";
    const char *wrong = NULL;
    double total = 0, enough = b->seconds, patience = 3 * b->seconds;
    for (int warm = 0; !wrong; warm = 1) {
        double start = bandwidth_clock();
        if (weft_op_call(p->op, &exec, p->args) != WEFT_OK) wrong = weft_last_error();
        double time = bandwidth_clock() - start;
        /* The first run pays for page faults; where one run is all the patience there is, it has to do. */
        if (!warm && time < patience) continue;
        times[count++] = time;
        total += time;
        if (count == MAX_TIMES || (total >= enough && count >= 5) || total >= patience) break;
    }
    free(exec.workspace);
    if (wrong) return wrong;
    t->seconds = bench_median(times, count);
    t->best = times[0];
    return NULL;
}

/* A system that promises more memory than it has would stop the program half-way: better to say so before. */
static int fits(const bench *b, const problem *p)
{
    double bytes = 0, machine = INFINITY;
#ifdef _SC_PHYS_PAGES
    machine = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
#endif
    if (b->memory.device) machine = (double)b->gpu.memory;
    for (int i = 0; i < p->num_args; i++) bytes += (double)problem_bytes(&p->arg[i]);
    return bytes < 0.9 * machine;
}

static const char *give_memory(bench *b, problem *p, timing *t)
{
    const char *wrong = NULL;
    pool_begin(&b->memory);
    if (!fits(b, p)) return "not enough memory";
    for (int i = 0; i < p->num_args && !wrong; i++) {
        problem_arg *arg = &p->arg[i];
        size_t bytes = problem_bytes(arg);
        int input = arg->info->kind == WEFT_ARG_IN, fresh;
        arg->tensor->data =
            pool_take(&b->memory, bytes, arg->tensor->dtype, input && problem_is_normal(p, arg), &fresh);
        if (!arg->tensor->data) return "not enough memory";
        if (fresh && (input || arg->add) && b->memory.device) wrong = bench_device_fill(p, arg);
        if (fresh && (input || arg->add) && !b->memory.device) problem_fill(p, arg);
        t->bytes +=
            (double)tensor_count(arg->tensor) * (double)weft_dtype_size(arg->tensor->dtype) * (arg->add ? 2 : 1);
    }
    return wrong;
}

static const char *run_on_host(bench *b, problem *p, timing *t)
{
    const char *wrong = run_prepare(&b->exec, p->op, p->args, run_call);
    if (!wrong) wrong = check_first_tokens(b, p, t->problem, sizeof t->problem);
    return wrong ? wrong : measure(b, p, t);
}

static timing run_operator(bench *b, const weft_op_info *op)
{
    timing t = {0};
    problem p;
    problem_spec spec = spec_of(b, op);
    if (!problem_make(&p, op, &spec)) {
        snprintf(t.problem, sizeof t.problem, "not enough memory");
        return t;
    }
    const char *wrong = give_memory(b, &p, &t);
    if (!wrong && weft_op_path(op, &b->exec, p.args, &t.path) != WEFT_OK) wrong = weft_last_error();
    if (!wrong) wrong = b->memory.device ? bench_device_run(b, &p, &t) : run_on_host(b, &p, &t);
    if (wrong && wrong != t.problem) snprintf(t.problem, sizeof t.problem, "%s", wrong);
    problem_free(&p);
    return t;
}

/* ---- what is measured ---------------------------------------------------------------------------------------- */

typedef struct gdn_shape {
    int64_t tokens[2]; /* on a GPU, on the CPU */
    int64_t key_heads, value_heads, sequences;
    int decoding;
} gdn_shape;

/* Models of 16/32 and 16/64 heads and a rank of eight of the latter, dense and packed; decoding. */
static const gdn_shape gdn_shapes[] = {
    {{16384, 2048}, 16, 32, 0, 0}, {{16384, 2048}, 16, 32, 8, 0}, {{32768, 4096}, 16, 32, 0, 0},
    {{32768, 4096}, 16, 32, 8, 0}, {{16384, 2048}, 16, 64, 0, 0}, {{16384, 2048}, 16, 64, 8, 0},
    {{32768, 4096}, 16, 64, 0, 0}, {{32768, 4096}, 16, 64, 8, 0}, {{16384, 2048}, 2, 8, 0, 0},
    {{16384, 2048}, 2, 8, 8, 0},   {{1, 1}, 16, 32, 0, 1},        {{64, 64}, 16, 32, 0, 1},
    {{512, 256}, 16, 32, 0, 1},
};
/* Long and short chains of chunks, few heads and many; decoding. */
static const gdn_shape rule_shapes[] = {
    {{8192, 1024}, 16, 32, 0, 0}, {{32768, 2048}, 16, 32, 0, 0}, {{32768, 2048}, 16, 32, 4, 0},
    {{8192, 1024}, 16, 32, 8, 0}, {{8192, 1024}, 16, 64, 0, 0},  {{32768, 2048}, 2, 8, 0, 0},
    {{1, 1}, 16, 32, 0, 1},       {{64, 16}, 16, 32, 0, 1},      {{512, 64}, 16, 32, 0, 1},
};

/* Lists of shapes and operators that are reported together. */
typedef struct suite {
    const char *ops; /* stems, each between spaces; NULL: all */
    weft_mhc_preset preset;
    int count;
    const int64_t (*shape)[2]; /* tokens, channels */
    const gdn_shape *gdn;      /* its shapes are these instead */
    int64_t backward_from;     /* tokens; with fewer only forward is measured */
} suite;

/* The table of TransformerEngine's pull request: batch x sequence x channels, and its own numerics. */
static const int64_t te_shapes[][2] = {
    {1 * 2048, 12288}, {1 * 4096, 6656}, {1 * 4096, 8192}, {1 * 8192, 4096}, {1 * 8192, 8192},
    {1 * 8192, 16384}, {2 * 4096, 5120}, {3 * 8192, 2048}, {4 * 2048, 4096}, {4 * 4096, 4096},
    {4 * 8192, 4096},  {4 * 8192, 7168}, {8 * 2048, 2560},
};
/* Decoding and short prompts: latency. */
static const int64_t small_shapes[][2] = {
    {1, 4096},   {8, 4096},   {32, 4096}, {128, 4096}, {512, 4096}, {1, 5120},   {8, 5120},   {32, 5120},
    {128, 5120}, {512, 5120}, {1, 7168},  {8, 7168},   {32, 7168},  {128, 7168}, {512, 7168},
};

/* Operators that stand for a chain: training, then decoding and a short prompt. */
static const int64_t fused_shapes[][2] = {
    {4 * 8192, 4096}, {4 * 8192, 7168}, {1 * 8192, 4096}, {8 * 2048, 2560}, {1, 5120}, {16, 5120}, {128, 5120},
};

static const suite suites[] = {
    {0},
    {" mhc_project mhc_coef mhc_scale mhc_sinkhorn mhc_aggregate mhc_post mhc_pre mhc_boundary ",
     WEFT_PRESET_TRANSFORMER_ENGINE, sizeof te_shapes / sizeof te_shapes[0], te_shapes, NULL, 0},
    {" mhc_project mhc_coef mhc_aggregate mhc_post mhc_expand mhc_contract ", WEFT_PRESET_DEEPSEEK_V4,
     sizeof small_shapes / sizeof small_shapes[0], small_shapes, NULL, 0},
    {" gdn_pre gdn_norm ", WEFT_PRESET_DEEPSEEK_V4, sizeof gdn_shapes / sizeof gdn_shapes[0], NULL, gdn_shapes, 0},
    {" mhc_boundary mhc_pre mhc_head ", WEFT_PRESET_DEEPSEEK_V4, sizeof fused_shapes / sizeof fused_shapes[0],
     fused_shapes, NULL, 512},
    {" gdn_rule ", WEFT_PRESET_DEEPSEEK_V4, sizeof rule_shapes / sizeof rule_shapes[0], NULL, rule_shapes, 0},
};

static int stem_of(const weft_op_info *op)
{
    return (int)(strrchr(op->name, '_') - op->name);
}

/* Offsets are nothing to it: the rows of the packed shapes would be those of the dense ones once more. */
static int knows_sequences(const weft_op_info *op)
{
    for (int32_t i = 0; i < op->num_args; i++)
        if (op->args[i].dim[0] == WEFT_DIM_OFFSETS) return 1;
    return 0;
}

/* An operator selected by name is measured whether the suite has it or not. */
static int is_measured(const bench *b, const suite *s, const char *filter, const weft_op_info *op)
{
    char key[64];
    if (!weft_op_has(op, b->exec.backend)) return 0;
    if (s->gdn && is_gdn(op) && is_step(op) != b->decoding) return 0;
    if (s->gdn && is_gdn(op) && b->sequences && !knows_sequences(op)) return 0;
    if (filter || !s->ops) return run_selected(filter, op);
    snprintf(key, sizeof key, " %.*s ", stem_of(op), op->name);
    if (b->spec.tokens < s->backward_from && !strcmp(op->name + stem_of(op), "_bwd")) return 0;
    return strstr(s->ops, key) != NULL;
}

/* ---- report -------------------------------------------------------------------------------------------------- */

static void print_timing(const bench *b, const weft_op_info *op, const timing *t)
{
    const problem_spec *s = &b->spec;
    int stem = stem_of(op), gpu = b->memory.device;
    const char *pass = op->name + stem + 1;
    double rate = t->bytes / t->seconds, matrices = (double)s->tokens / t->seconds / b->threads;
    int sinkhorn = !strncmp(op->name, "mhc_sinkhorn", 12) && !gpu;
    if (!b->json) {
        printf("%-15.*s %s %12.1f %9.2f %9.2f", stem, op->name, pass, t->seconds * 1e6, rate * 1e-9,
               b->copy > 0 ? rate / b->copy : 0);
        if (sinkhorn) printf("   %.1f million matrices per second and core", matrices * 1e-6);
        if (t->sustained > 1.02 * t->seconds) printf("   %.1f in the long run", t->sustained * 1e6);
        printf("\n");
        return;
    }
    printf("{\"op\": \"%.*s\", \"pass\": \"%s\", \"backend\": \"%s\", \"isa\": \"%s\", \"tokens\": %lld, "
           "\"channels\": %lld, "
           "\"streams\": %lld, \"dtype\": \"%s\", \"layout\": \"%s\", \"preset\": \"%s\", \"threads\": %d, "
           "\"us\": %.2f, \"us_min\": %.2f, \"gbps\": %.3f, "
           "\"of_copy\": %.4f, \"copy_gbps\": %.3f, \"bytes\": %.0f",
           stem, op->name, pass, weft_backend_name(b->exec.backend), b->isa, (long long)s->tokens,
           (long long)s->channels, (long long)s->streams, weft_dtype_name(s->act), s->swapped ? "cn" : "nc",
           b->preset, b->threads, t->seconds * 1e6, t->best * 1e6, rate * 1e-9, b->copy > 0 ? rate / b->copy : 0,
           b->copy * 1e-9, t->bytes);
    if (sinkhorn) printf(", \"matrices_per_s_core\": %.0f", matrices);
    if (t->sustained > 0) printf(", \"us_sustained\": %.2f", t->sustained * 1e6);
    if (is_gdn(op))
        printf(", \"key_heads\": %lld, \"value_heads\": %lld, \"packed\": %lld", (long long)b->key_heads,
               (long long)b->value_heads, (long long)b->sequences);
    if (gpu) printf(", \"gpu\": \"%s\", \"cache\": \"%s\", \"path\": \"%s\"", b->gpu.name, t->cache, t->path);
    printf("}\n");
}

static int run_shape(bench *b, const suite *s, const char *filter)
{
    int total = 0, done = 0, code = EXIT_PASSED, show = isatty(STDERR_FILENO);
    for (int32_t i = 0; i < weft_op_count(); i++) total += is_measured(b, s, filter, weft_op_at(i));
    for (int32_t i = 0; i < weft_op_count(); i++)
        if (filter && run_selected(filter, weft_op_at(i)) && !weft_op_has(weft_op_at(i), b->exec.backend))
            fprintf(stderr, "weft bench: %s: skipped, backend %s has no kernels for it yet\n", weft_op_at(i)->name,
                    weft_backend_name(b->exec.backend));
    if (!b->json && s->gdn) {
        printf("\ntokens %lld%s, heads %lld/%lld of 128, %s", (long long)b->spec.tokens,
               b->decoding ? " of as many requests" : "", (long long)b->key_heads, (long long)b->value_heads,
               weft_dtype_name(b->spec.act));
        if (b->sequences) printf(", packed, %lld sequences", (long long)b->sequences);
        printf("\n\n");
        printf("operator        pass           us      GB/s   of copy\n");
    } else if (!b->json) {
        printf("\ntokens %lld, channels %lld, streams %lld, %s, layout %s, preset %s\n\n",
               (long long)b->spec.tokens, (long long)b->spec.channels, (long long)b->spec.streams,
               weft_dtype_name(b->spec.act), b->spec.swapped ? "(C,n)" : "(n,C)", b->preset);
        printf("operator        pass           us      GB/s   of copy\n");
    }
    for (int32_t i = 0; i < weft_op_count(); i++) {
        const weft_op_info *op = weft_op_at(i);
        if (!is_measured(b, s, filter, op)) continue;
        if (show) fprintf(stderr, "\r[%d/%d] %-20s\r", ++done, total, op->name);
        timing t = run_operator(b, op);
        if (show) fprintf(stderr, "\r%-40s\r", "");
        if (t.problem[0]) {
            fprintf(stderr, "weft bench: %s: %s\n", op->name, t.problem);
            code = EXIT_FAILED;
        } else {
            print_timing(b, op, &t);
        }
        fflush(stdout);
    }
    pool_free(&b->memory);
    return code;
}

static int run_all(bench *b, const suite *s, const char *filter)
{
    int code = EXIT_PASSED;
    if (isatty(STDERR_FILENO)) fprintf(stderr, "copy bandwidth ...\r");
    b->copy = b->memory.device ? bench_device_copy(b) : bandwidth_copy(b->threads);
    if (!b->json && b->memory.device)
        printf("weft %s, backend %s, %s, copy bandwidth %.1f GB/s\n", weft_version(),
               weft_backend_name(b->exec.backend), b->gpu.name, b->copy * 1e-9);
    else if (!b->json)
        printf("weft %s, backend %s, %s, %d threads, copy bandwidth %.2f GB/s\n", weft_version(),
               weft_backend_name(b->exec.backend), b->isa, b->threads, b->copy * 1e-9);
    if (!s->count) return run_shape(b, s, filter);
    for (int i = 0; i < s->count; i++) {
        if (s->gdn) {
            const gdn_shape *g = &s->gdn[i];
            b->spec.tokens = g->tokens[b->memory.device ? 0 : 1];
            b->key_heads = g->key_heads;
            b->value_heads = g->value_heads;
            b->sequences = g->sequences;
            b->decoding = g->decoding;
        } else {
            b->spec.tokens = s->shape[i][0];
            b->spec.channels = s->shape[i][1];
        }
        int one = run_shape(b, s, filter);
        if (one > code) code = one;
    }
    return code;
}

static const char *operator_name(int i)
{
    return i < weft_op_count() ? weft_op_at(i)->name : NULL;
}

static const char *preset_name_at(int i)
{
    return i < WEFT_PRESET_COUNT ? weft_mhc_preset_name((weft_mhc_preset)i) : NULL;
}

int command_bench(int argc, char **argv)
{
    static const char *const backends[] = {"ref", "cpu", "cuda", NULL}, *const dtypes[] = {"bf16", "f32", "f16",
                                                                                           NULL};
    static const char *const layouts[] = {"nc", "cn", NULL};
    static const char *const isas[] = {"best", "base", "avx2", "avx512", "amx", NULL};
    static const weft_dtype dtype_of[] = {WEFT_BF16, WEFT_F32, WEFT_F16};
    static const char *const suite_names[] = {"none", "te", "small", "gdn", "fused", "rule", NULL};
    int backend = 1, dtype = 0, layout = 0, isa = 0, json = 0, chosen_suite = 0;
    int64_t tokens = 16384, channels = 2048, streams = 4, threads = 0;
    double seconds = 0.5;
    const char *op = NULL, *preset_name = NULL;
    const option options[] = {
        {.name = "op",
         .kind = OPTION_TEXT,
         .to = &op,
         .value = "NAME",
         .help = "one operator: mhc_post, or mhc_post_fwd for one pass; otherwise all, or those of the suite"},
        {.name = "backend", .kind = OPTION_CHOICE, .to = &backend, .choices = backends, .help = "what computes"},
        {.name = "tokens",
         .kind = OPTION_INT,
         .to = &tokens,
         .value = "T",
         .min = 1,
         .max = (int64_t)1 << 40,
         .help = "rows of a call"},
        {.name = "channels",
         .kind = OPTION_INT,
         .to = &channels,
         .value = "C",
         .min = 1,
         .max = (int64_t)1 << 24,
         .help = "width of a stream"},
        {.name = "streams",
         .kind = OPTION_INT,
         .to = &streams,
         .value = "n",
         .min = 1,
         .max = WEFT_MAX_STREAMS,
         .help = "residual streams"},
        {.name = "dtype",
         .kind = OPTION_CHOICE,
         .to = &dtype,
         .choices = dtypes,
         .help = "of activations; coefficients and parameters are f32"},
        {.name = "layout",
         .kind = OPTION_CHOICE,
         .to = &layout,
         .choices = layouts,
         .help = "nc: channels innermost; cn: streams innermost"},
        {.name = "suite",
         .kind = OPTION_CHOICE,
         .to = &chosen_suite,
         .choices = suite_names,
         .help = "a list of shapes and operators: te (thirteen training shapes), small (1 to 512 tokens), "
                 "gdn (heads 16/32, 16/64 and 2/8, dense, packed and decoding), "
                 "fused (boundary, pre and head, training and 1 to 128 tokens), "
                 "rule (the gated delta rule, 8192 and 32768 tokens)"},
        {.name = "preset",
         .kind = OPTION_TEXT,
         .to = &preset_name,
         .value = "NAME",
         .help = "whose numerics; otherwise deepseek_v4, and transformer_engine in the suite te"},
        {.name = "threads",
         .kind = OPTION_INT,
         .to = &threads,
         .value = "N",
         .max = 4096,
         .help = "0 for OpenMP's default; cuda: multiprocessors to plan for, 0 for all"},
        {.name = "isa",
         .kind = OPTION_CHOICE,
         .to = &isa,
         .choices = isas,
         .help = "highest instruction set to use"},
        {.name = "json", .kind = OPTION_FLAG, .to = &json, .help = "one JSON object a line instead of a table"},
        {.name = "seconds",
         .kind = OPTION_REAL,
         .to = &seconds,
         .value = "S",
         .help = "time for one operator, about 0.5"},
        {0},
    };
    int stop = options_parse(argc, argv, options);
    if (stop >= 0) return stop;

    int known = op == NULL;
    for (int32_t i = 0; i < weft_op_count(); i++) known |= run_selected(op, weft_op_at(i));
    if (!known) return options_reject("bench", "op", op, operator_name);
    if ((double)tokens * (double)channels * (double)streams > 0x1p50) {
        fprintf(stderr,
                "weft bench: --tokens, --channels, --streams: expected a product of at most 2^50, got %.3g\n",
                (double)tokens * (double)channels * (double)streams);
        return EXIT_UNUSABLE;
    }
    weft_backend chosen = (weft_backend)(backend + WEFT_BACKEND_REF);
    if (!weft_backend_available(chosen)) {
        fprintf(stderr,
                "weft bench: --backend: expected one that weft info lists, got %s, which is not available %s\n",
                backends[backend],
                chosen == WEFT_BACKEND_CUDA && !device_built() ? "in this build" : "on this machine");
        return EXIT_UNUSABLE;
    }
    const suite *s = &suites[chosen_suite];
    weft_mhc_preset preset = preset_name ? weft_mhc_preset_find(preset_name)
                             : s->count  ? s->preset
                                         : WEFT_PRESET_DEEPSEEK_V4;
    if (preset == WEFT_PRESET_COUNT) return options_reject("bench", "preset", preset_name, preset_name_at);
    if (isa > (int)weft_cpu_isa()) {
        fprintf(stderr, "weft bench: --isa: expected at most %s on this machine and build, got %s\n",
                weft_isa_name(weft_cpu_isa()), isas[isa]);
        return EXIT_UNUSABLE;
    }

    const int independent = preset == WEFT_PRESET_HY_V4;
    bench b = {.exec = WEFT_STRUCT(weft_exec, .backend = chosen),
               .spec = {.tokens = tokens,
                        .channels = channels,
                        .streams = streams,
                        .rows = 2 * streams + (independent ? 0 : streams * streams),
                        .independent = independent,
                        .act = dtype_of[dtype],
                        .wide = dtype_of[dtype],
                        .coef = WEFT_F32,
                        .param = WEFT_F32,
                        .swapped = layout,
                        .without = without,
                        .layers = 4,
                        .seed = 1},
               .key_heads = 16,
               .value_heads = 32,
               .seconds = seconds,
               .json = json,
               .threads = 1,
               .isa = "none",
               .preset = weft_mhc_preset_name(preset),
               .memory = {.device = chosen == WEFT_BACKEND_CUDA}};
    weft_mhc_preset_numerics(preset, &b.spec.numerics);
    if (chosen == WEFT_BACKEND_CPU) {
        b.exec.isa = (weft_isa)isa;
        b.exec.threads = (int32_t)threads;
        b.threads = threads ? (int)threads : parallel_threads();
        b.isa = weft_isa_name(isa ? (weft_isa)isa : weft_cpu_isa());
    }
    if (chosen == WEFT_BACKEND_CUDA) {
        b.exec.threads = (int32_t)threads;
        const char *wrong = bench_device_open(&b);
        if (wrong) {
            fprintf(stderr, "weft bench: %s\n", wrong);
            return EXIT_UNUSABLE;
        }
        b.threads = threads ? (int)threads : b.gpu.sms;
    }
    int code = run_all(&b, s, op);
    if (chosen == WEFT_BACKEND_CUDA) bench_device_close(&b);
    return code;
}
