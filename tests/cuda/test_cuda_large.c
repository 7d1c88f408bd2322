/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that only a GPU has the memory and the time for: 300000 tokens, more than 2^32 elements. Slices of the result must
 * have the bits of the same tokens alone. */
#include "support/suite.h"

#if WEFT_HAVE_CUDA

#include "check/device.h"
#include "support/device.h"

static const weft_dtype acts[] = {WEFT_F32, WEFT_BF16, WEFT_F16};

/* A period that no power of two is a multiple of: an index that wraps around finds other values. */
enum { PERIOD = 67, SLICE = 5 };

typedef struct crowd {
    problem *p; /* PERIOD tokens in host memory */
    int64_t tokens;
    void *args;
    void *memory[MAX_ARGS], *slice[MAX_ARGS];
} crowd;

static size_t row_bytes(const arg *a)
{
    return (size_t)a->view->stride[0] * weft_dtype_size(a->view->dtype);
}

static weft_tensor *tensor_in(void *args, const arg *a)
{
    return (weft_tensor *)(void *)((char *)args + a->info->offset);
}

static const char *crowd_make(crowd *c, const spec *s, int64_t tokens)
{
    spec small = *s;
    small.tokens = PERIOD;
    *c = (crowd){.p = problem_make(&small), .tokens = tokens};
    c->args = malloc(c->p->op->args_size);
    memcpy(c->args, c->p->args, c->p->op->args_size);
    const char *wrong = NULL;
    for (int i = 0; i < c->p->num_args && !wrong; i++) {
        const arg *a = &c->p->arg[i];
        if (!a->guard.block) continue;
        size_t period =
            arg_by_token(a) ? PERIOD * row_bytes(a) : (size_t)a->elements * weft_dtype_size(a->view->dtype);
        size_t all = arg_by_token(a) ? (size_t)tokens * row_bytes(a) : period;
        if (!(c->memory[i] = device_alloc(all)) || !(c->slice[i] = device_alloc(period)))
            return "not enough memory on the device";
        wrong = fill_periods(c->memory[i], a->view->data, period, all);
        if (!wrong) wrong = device_put(c->slice[i], a->view->data, period);
        tensor_in(c->args, a)->data = c->memory[i];
        if (arg_by_token(a)) tensor_in(c->args, a)->shape[0] = tokens;
    }
    return wrong;
}

static void crowd_free(crowd *c)
{
    for (int i = 0; i < c->p->num_args; i++) {
        device_free(c->memory[i]);
        device_free(c->slice[i]);
    }
    free(c->args);
    problem_free(c->p);
}

static bool crowd_call(const crowd *c, const void *args)
{
    weft_exec exec = on_cuda(0);
    weft_status status = weft_op_workspace(c->p->op, &exec, args, &exec.workspace_bytes);
    exec.workspace = device_alloc(exec.workspace_bytes);
    if (status == WEFT_OK && exec.workspace) status = weft_op_call(c->p->op, &exec, args);
    const char *wrong = exec.workspace ? device_wait() : "not enough memory for the workspace";
    device_free(exec.workspace);
    if (status != WEFT_OK || wrong)
        test_failed("%s with %lld tokens: %s", c->p->op->name, (long long)c->tokens,
                    status != WEFT_OK ? weft_last_error() : wrong);
    return status == WEFT_OK && !wrong;
}

/* Tokens from `first` on by themselves. */
static void crowd_slice(crowd *c, int64_t first)
{
    void *keep = c->p->args, *args = malloc(c->p->op->args_size);
    memcpy(args, c->args, c->p->op->args_size);
    for (int i = 0; i < c->p->num_args; i++) {
        const arg *a = &c->p->arg[i];
        if (!a->guard.block) continue;
        weft_tensor *t = tensor_in(args, a);
        if (arg_by_token(a)) t->shape[0] = SLICE;
        if (arg_is_output(a))
            t->data = c->slice[i];
        else if (arg_by_token(a))
            t->data = (char *)t->data + (size_t)first * row_bytes(a);
    }
    c->p->args = args;
    fields_token_base(c->p, c->p->spec.dropout.token_base + first);
    c->p->args = keep;
    if (crowd_call(c, args))
        for (int i = 0; i < c->p->num_args; i++) {
            const arg *a = &c->p->arg[i];
            if (!a->guard.block || !arg_is_output(a) || !arg_by_token(a)) continue;
            size_t bytes = SLICE * row_bytes(a), size = weft_dtype_size(a->view->dtype);
            char *want = malloc(bytes), *got = malloc(bytes);
            const char *wrong = device_get(want, c->slice[i], bytes);
            if (!wrong) wrong = device_get(got, (char *)c->memory[i] + (size_t)first * row_bytes(a), bytes);
            if (wrong) test_failed("%s", wrong);
            for (size_t k = 0; k < bytes && !wrong; k += size) {
                double g = value_load(got + k, a->view->dtype), w = value_load(want + k, a->view->dtype);
                if (memcmp(got + k, want + k, size) == 0 || (isnan(g) && isnan(w))) continue;
                test_failed("%s: token %lld of %lld: %s: got %.9g, want %.9g as by itself", c->p->op->name,
                            (long long)(first + (int64_t)(k / row_bytes(a))), (long long)c->tokens, a->name, g, w);
                break;
            }
            for (size_t k = 0; k < bytes && !wrong; k += size)
                if (isnan(value_load(want + k, a->view->dtype))) {
                    test_failed("%s: %s was not written", c->p->op->name, a->name);
                    break;
                }
            free(want), free(got);
        }
    free(args);
}

static void crowd_check(const spec *s, int64_t tokens)
{
    crowd c;
    const char *wrong = crowd_make(&c, s, tokens);
    int64_t row = s->streams * s->channels;
    const int64_t firsts[] = {0,
                              tokens / 2,
                              (((int64_t)1 << 31) + row - 1) / row,
                              (((int64_t)1 << 32) + row - 1) / row,
                              (((int64_t)1 << 32) / 2 + row - 1) / row - 2, /* bytes of 16-bit elements */
                              65535,
                              262143,
                              tokens - SLICE};
    if (wrong) {
        fprintf(stderr, "  %s with %lld tokens of %lld channels: skipped, %s\n", s->op, (long long)tokens,
                (long long)s->channels, wrong);
    } else if (crowd_call(&c, c.args)) {
        for (size_t k = 0; k < sizeof firsts / sizeof *firsts; k++)
            if (firsts[k] + SLICE <= tokens) crowd_slice(&c, firsts[k]);
    }
    crowd_free(&c);
}

static void many_tokens(void **state)
{
    (void)state;
    need_gpu();
    for (int32_t i = 0; i < gpu_op_count(); i++)
        for (int v = 0; v < 2; v++) {
            spec s = {.op = gpu_op_at(i)->name, .streams = v ? 3 : 4, .channels = v ? 5 : 64, .act = acts[v]};
            s.wide = s.act;
            s.dropout = (weft_dropout){.p = 0.1, .seed = 3, .token_base = 9};
            if (strcmp(s.op, "mhc_replay_fwd") == 0) continue; /* a chain of the others */
            if (strncmp(s.op, "gdn", 3) == 0) continue;        /* test_cuda_gdn.c */
            crowd_check(&s, 300000);
        }
    test_verdict();
}

/* More elements than 32 bits count, in every tensor with streams. */
static void many_elements(void **state)
{
    (void)state;
    need_gpu();
    static const struct {
        const char *op;
        int64_t channels;
    } ops[] = {{"mhc_aggregate_fwd", 4096}, {"mhc_aggregate_bwd", 4096}, {"mhc_post_fwd", 4096},
               {"mhc_post_bwd", 4096},      {"mhc_expand_fwd", 4096},    {"mhc_expand_bwd", 4096},
               {"mhc_contract_fwd", 4096},  {"mhc_contract_bwd", 4096},  {"mhc_project_fwd", 4096},
               {"mhc_project_bwd", 4096},   {"mhc_head_fwd", 4096},      {"mhc_head_bwd", 4096},
               {"mhc_pre_fwd", 4096},       {"mhc_pre_bwd", 4096},       {"mhc_boundary_fwd", 4096},
               {"mhc_boundary_bwd", 4096},  {"mhc_boundary_fwd", 7168},  {"mhc_boundary_bwd", 7168},
               {"rmsnorm_fwd", 16384},      {"rmsnorm_bwd", 16384}};
    if (test_quick()) {
        fprintf(stderr, "  skipped: WEFT_TEST_QUICK\n");
        skip();
    }
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        for (int v = 0; v < 2; v++) {
            spec s = {
                .op = ops[i].op, .streams = 4, .channels = ops[i].channels, .act = WEFT_BF16, .wide = WEFT_BF16};
            s.stream_layout = s.param_layout = (layout)v;
            /* beyond 2^32 elements, either way, and not beyond the device's memory */
            crowd_check(&s, s.channels == 7168 ? 160000 : 300000);
        }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_tokens),
        cmocka_unit_test(many_elements),
    };
    return suite_run("cuda_large", tests);
}

#else

int main(void)
{
    return suite_without_cuda("cuda_large");
}

#endif
