/* SPDX-License-Identifier: Apache-2.0
 *
 * What only a GPU can show: capture as a graph, streams, memory of the wrong side, errors of the device. Long batches are in
 * test_cuda_large.c, the comparison with the reference is in the suites of the operators. */
#include "support/suite.h"

#if WEFT_HAVE_CUDA

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device.h"
#include "support/device.h"

static void must(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    fail_msg("%s: %s", what, cudaGetErrorString(error));
}

/* Wide rows take the fast kernels, odd ones the general ones. */
static spec variant(const char *op, int v)
{
    static uint64_t step = 5;
    spec s = {.op = op,
              .tokens = v == 1 ? 70 : 37,
              .streams = v == 2 ? 3 : 4,
              .channels = v == 2   ? 50
                          : v == 1 ? 1024
                                   : 256,
              .act = v == 2   ? WEFT_F16
                     : v == 1 ? WEFT_BF16
                              : WEFT_F32,
              .stream_layout = (layout)(v == 1)};
    s.wide = v ? s.act : WEFT_F32;
    s.param_layout = s.stream_layout;
    s.dropout = (weft_dropout){.p = 0.25, .seed = 8, .site = 3, .step = &step, .token_base = 40};
    return s;
}

static pack run_pack(problem *p, weft_exec exec)
{
    problem_must_run(p, exec);
    return problem_pack(p);
}

static void expect_run(problem *p, const pack *got, const char *what)
{
    pack want = run_pack(p, on_cuda(0));
    pack_expect_same(p, got, &want, what);
    pack_free(&want);
}

/* ---- graphs -------------------------------------------------------------------------------------------------- */

typedef struct recording {
    cudaStream_t stream;
    cudaGraphExec_t graph;
    image image;
} recording;

/* The call, as a graph; false where that went wrong. */
static bool record(recording *r, problem *p)
{
    image_range around[MAX_ARGS];
    int count = problem_ranges(p, around);
    weft_exec exec = on_cuda(0);
    cudaGraph_t graph = NULL;
    *r = (recording){0};
    must(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking), "a stream");
    weft_status status = image_open(&r->image, p->op, &exec, p->args, around, count);
    if (status != WEFT_OK || r->image.wrong[0]) {
        test_failed("%s: %s", problem_text(p), status != WEFT_OK ? weft_last_error() : r->image.wrong);
        return false;
    }
    r->image.exec.stream = r->stream;
    must(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeGlobal), "begin of the capture");
    status = weft_op_call(p->op, &r->image.exec, r->image.args);
    cudaError_t end = cudaStreamEndCapture(r->stream, &graph);
    if (status != WEFT_OK)
        test_failed("%s: captured: %s", problem_text(p), weft_last_error());
    else if (end != cudaSuccess)
        test_failed("%s: the capture ended with: %s", problem_text(p), cudaGetErrorString(end));
    (void)cudaGetLastError();
    if (status == WEFT_OK && end == cudaSuccess) {
        must(cudaGraphInstantiateWithFlags(&r->graph, graph, 0), "a graph");
        must(cudaGraphDestroy(graph), "a graph");
    }
    return r->graph != NULL;
}

static void erase(recording *r)
{
    if (r->graph) must(cudaGraphExecDestroy(r->graph), "a graph");
    must(cudaStreamDestroy(r->stream), "a stream");
    image_close(&r->image);
}

/* Other values in the same places, and another step of the dropout. */
static void change(problem *p, uint64_t *step)
{
    problem_reset(p);
    *step += ((uint64_t)1 << 33) + 1;
    for (int i = 0; i < p->num_args; i++) {
        arg *a = &p->arg[i];
        if (!a->block || (arg_is_output(a) && !arg_adds(a)) || a->elements == 0) continue;
        double *values = arg_values(a), first = values[0];
        for (int64_t k = 0; k + 1 < a->elements; k++) values[k] = values[k + 1];
        values[a->elements - 1] = first;
        arg_fill(a, values);
        free(values);
    }
    problem_seal(p);
}

/* Captured before anything ran eagerly: nothing may need a first call outside. Replayed, then replayed on changed data. */
static void graphs(void **state)
{
    (void)state;
    need_gpu();
    for (int32_t i = 0; i < gpu_op_count(); i++)
        for (int v = 0; v < 3; v++) {
            spec s = variant(gpu_op_at(i)->name, v);
            uint64_t step = 77;
            s.dropout.step = &step;
            problem *p = problem_make(&s);
            recording r;
            if (record(&r, p))
                for (int round = 0; round < 3; round++) {
                    if (round == 2) change(p, &step);
                    problem_reset(p);
                    if (!image_put(&r.image)) test_failed("%s: %s", problem_text(p), r.image.wrong);
                    must(cudaGraphLaunch(r.graph, r.stream), "a replay");
                    if (!image_get(&r.image)) test_failed("%s: replayed: %s", problem_text(p), r.image.wrong);
                    pack got = problem_pack(p);
                    expect_run(p, &got, round == 2 ? "replayed with other data" : "replayed");
                    pack_free(&got);
                }
            erase(&r);
            problem_free(p);
        }
    test_verdict();
}

/* An operator that has no kernels yet is refused in words, by the call and by the question for its workspace. */
static void operators_without_kernels_say_so(void **state)
{
    (void)state;
    need_gpu();
    for (int32_t i = 0; i < weft_op_count(); i++) {
        if (weft_op_has(weft_op_at(i), WEFT_BACKEND_CUDA)) continue;
        spec s = {.op = weft_op_at(i)->name, .tokens = 2, .streams = 2, .channels = 8};
        problem *p = problem_make(&s);
        weft_exec exec = on_cuda(0);
        size_t bytes = 0;
        if (p->workspace(&exec, p->args, &bytes) != WEFT_ERR_UNSUPPORTED || !strstr(weft_last_error(), s.op) ||
            !strstr(weft_last_error(), "cuda"))
            test_failed("%s: %s", s.op, weft_last_error());
        problem_free(p);
    }
    test_verdict();
}

/* ---- streams ------------------------------------------------------------------------------------------------- */

enum { STREAMS = 8 };

static void streams_at_once(void **state)
{
    (void)state;
    need_gpu();
    image *images = calloc(STREAMS, sizeof *images);
    cudaStream_t stream[STREAMS];
    for (int k = 0; k < STREAMS; k++) must(cudaStreamCreateWithFlags(&stream[k], cudaStreamNonBlocking), "stream");
    for (int32_t first = 0; first < gpu_op_count(); first += STREAMS / 2) {
        problem *p[STREAMS];
        bool ready = true;
        for (int k = 0; k < STREAMS; k++) {
            /* every operator on two streams */
            spec s = variant(gpu_op_at((first + k / 2) % gpu_op_count())->name, k % 3);
            image_range around[MAX_ARGS];
            weft_exec exec = on_cuda(0);
            p[k] = problem_make(&s);
            weft_status status =
                image_open(&images[k], p[k]->op, &exec, p[k]->args, around, problem_ranges(p[k], around));
            if (status != WEFT_OK || images[k].wrong[0]) {
                test_failed("%s: %s", problem_text(p[k]), status != WEFT_OK ? weft_last_error() : images[k].wrong);
                ready = false;
            }
            images[k].exec.stream = stream[k];
        }
        for (int round = 0; round < 3 && ready; round++) {
            for (int k = 0; k < STREAMS; k++)
                if (!image_put(&images[k])) test_failed("%s", images[k].wrong);
            for (int k = 0; k < STREAMS; k++)
                if (weft_op_call(p[k]->op, &images[k].exec, images[k].args) != WEFT_OK)
                    test_failed("%s", weft_last_error());
            for (int k = 0; k < STREAMS; k++) {
                if (!image_get(&images[k])) test_failed("%s: %s", problem_text(p[k]), images[k].wrong);
                pack got = problem_pack(p[k]);
                expect_run(p[k], &got, "beside other streams");
                pack_free(&got);
                problem_reset(p[k]);
            }
        }
        for (int k = 0; k < STREAMS; k++) {
            image_close(&images[k]);
            problem_free(p[k]);
        }
    }
    for (int k = 0; k < STREAMS; k++) must(cudaStreamDestroy(stream[k]), "stream");
    free(images);
    test_verdict();
}

typedef struct caller {
    pthread_t thread;
    int number;
    bool failed;
} caller;

enum { CALLERS = 4 };
static pack expected[64];

static void *call_all(void *arg_)
{
    caller *c = arg_;
    cudaStream_t stream;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
        c->failed = true;
        return NULL;
    }
    for (int32_t k = 0; k < gpu_op_count(); k++) {
        int32_t i = (k + c->number * 7) % gpu_op_count();
        spec s = variant(gpu_op_at(i)->name, 1);
        problem *p = problem_make(&s);
        weft_exec exec = on_cuda(0);
        exec.stream = stream;
        pack got = run_pack(p, exec);
        pack_expect_same(p, &got, &expected[i], "called from several threads");
        pack_free(&got);
        problem_free(p);
    }
    (void)cudaStreamDestroy(stream);
    return NULL;
}

static void many_callers(void **state)
{
    (void)state;
    need_gpu();
    caller callers[CALLERS] = {{0}};
    for (int32_t i = 0; i < gpu_op_count(); i++) {
        spec s = variant(gpu_op_at(i)->name, 1);
        problem *p = problem_make(&s);
        expected[i] = run_pack(p, on_cuda(0));
        problem_free(p);
    }
    for (int i = 0; i < CALLERS; i++) {
        callers[i].number = i;
        if (pthread_create(&callers[i].thread, NULL, call_all, &callers[i]) != 0) fail_msg("no thread");
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i].thread, NULL);
        if (callers[i].failed) test_failed("caller %d got no stream", i);
    }
    for (int32_t i = 0; i < gpu_op_count(); i++) pack_free(&expected[i]);
    test_verdict();
}

/* ---- plans --------------------------------------------------------------------------------------------------- */

/* How a call is cut depends on the multiprocessors planned for, its results do not. */
static void plans(void **state)
{
    (void)state;
    need_gpu();
    static const int multiprocessors[] = {1, 2, 7, 64, 132, 200, 4096};
    for (int32_t i = 0; i < gpu_op_count(); i++)
        for (int v = 0; v < 4; v++) {
            spec s = {.op = gpu_op_at(i)->name,
                      .tokens = v == 2 ? 5 : 700,
                      .streams = v == 3 ? 8 : 4,
                      .channels = v == 2 ? 7168 : 256,
                      .act = v == 3 ? WEFT_F32 : WEFT_BF16,
                      .stream_layout = (layout)(v == 1),
                      .param_layout = (layout)(v == 1)};
            s.wide = s.act;
            if (test_quick() && v) continue;
            problem *p = problem_make(&s);
            pack want = run_pack(p, on_cuda(0));
            for (size_t k = 0; k < sizeof multiprocessors / sizeof *multiprocessors; k++) {
                pack got = run_pack(p, on_cuda(multiprocessors[k]));
                pack_expect_same(p, &got, &want, "planned for another number of multiprocessors");
                pack_free(&got);
            }
            pack_free(&want);
            problem_free(p);
        }
    test_verdict();
}

/* Every tile of tokens that the projection has, with tokens and columns left over at the end. */
static void projection_plans(void **state)
{
    (void)state;
    need_gpu();
    static const char *const ops[] = {"mhc_project_fwd", "mhc_head_fwd"};
    static const int64_t tokens[] = {577, 261, 700}, channels[] = {1024, 250, 2048};
    static const int multiprocessors[] = {1, 2, 3, 7, 64, 200};
    for (int v = 0; v < 12; v++) {
        if (test_quick() && v % 4) continue;
        spec s = {.op = ops[v % 2],
                  .tokens = tokens[v / 4],
                  .streams = 4,
                  .channels = channels[v / 4],
                  .act = v / 2 % 2 ? WEFT_F16 : WEFT_BF16};
        s.wide = s.act;
        problem *p = problem_make(&s);
        pack want = run_pack(p, on_cuda(0));
        for (size_t k = 0; k < sizeof multiprocessors / sizeof *multiprocessors; k++) {
            pack got = run_pack(p, on_cuda(multiprocessors[k]));
            pack_expect_same(p, &got, &want, "planned for another number of multiprocessors");
            pack_free(&got);
        }
        pack_free(&want);
        problem_free(p);
    }
    test_verdict();
}

/* ---- precision ----------------------------------------------------------------------------------------------- */

/* exec.precision = tf32 loses bits where it says so, and only in the projection of f32 streams. */
static void tf32(void **state)
{
    (void)state;
    need_gpu();
    for (int32_t i = 0; i < gpu_op_count(); i++)
        for (int v = 0; v < 4; v++) {
            spec s = {.op = gpu_op_at(i)->name,
                      .tokens = v & 1 ? 65 : 33,
                      .streams = 4,
                      .channels = v & 1 ? 512 : 130,
                      .act = v < 3 ? WEFT_F32 : WEFT_BF16};
            weft_exec exec = on_cuda(0);
            exec.precision = WEFT_PRECISION_TF32;
            problem *p = problem_make(&s);
            grid_compare_expectation(p, exec);
            if (s.act != WEFT_F32 || !problem_arg(p, "phi")) {
                pack got = problem_pack(p);
                expect_run(p, &got, "tf32 where it has no say");
                pack_free(&got);
            }
            problem_free(p);
        }
    test_verdict();
}

/* ---- bad input ----------------------------------------------------------------------------------------------- */

static void expect_refused(const problem *p, image *im, const char *name, const char *what)
{
    weft_status status = weft_op_call(p->op, &im->exec, im->args);
    const char *text = weft_last_error();
    if (status != WEFT_ERR_ARGUMENT)
        test_failed("%s: %s is %s: got \"%s\" (%s)", p->op->name, name, what, weft_status_name(status), text);
    else if (!strstr(text, p->op->name) || !strstr(text, name) || !strstr(text, "got"))
        test_failed("%s: %s is %s: message \"%s\"", p->op->name, name, what, text);
    cudaError_t left = cudaGetLastError();
    if (left != cudaSuccess)
        test_failed("%s: %s is %s: left behind: %s", p->op->name, name, what, cudaGetErrorName(left));
}

static weft_tensor *image_tensor(image *im, const arg *a)
{
    char *base = a->layer < 0 ? im->args : (char *)&im->layers[a->layer];
    return (weft_tensor *)(void *)(base + a->info->offset);
}

static void host_memory_is_refused(void **state)
{
    (void)state;
    need_gpu();
    int pageable = 0;
    must(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0), "an attribute");
    if (pageable) {
        fprintf(stderr, "  skipped: this GPU reads the host's memory\n");
        skip();
    }
    for (int32_t i = 0; i < gpu_op_count(); i++) {
        spec s = variant(gpu_op_at(i)->name, 0);
        image_range around[MAX_ARGS];
        weft_exec exec = on_cuda(0);
        problem *p = problem_make(&s);
        image *im = calloc(1, sizeof *im);
        if (image_open(im, p->op, &exec, p->args, around, problem_ranges(p, around)) != WEFT_OK || im->wrong[0]) {
            test_failed("%s: %s %s", problem_text(p), weft_last_error(), im->wrong);
        } else {
            for (int k = 0; k < p->num_args; k++) {
                const arg *a = &p->arg[k];
                if (!a->block || a->elements == 0) continue;
                weft_tensor *t = image_tensor(im, a);
                void *keep = t->data;
                t->data = a->view->data;
                expect_refused(p, im, a->name, "host memory");
                t->data = keep;
            }
            if (im->exec.workspace_bytes) {
                void *keep = im->exec.workspace;
                im->exec.workspace = malloc(im->exec.workspace_bytes);
                expect_refused(p, im, "exec.workspace", "host memory");
                free(im->exec.workspace);
                im->exec.workspace = keep;
            }
            if (!image_get(im)) test_failed("%s", im->wrong);
            if (!problem_untouched(p)) test_failed("%s: refused, but something was written", problem_text(p));
        }
        image_close(im);
        free(im);
        problem_free(p);
    }
    test_verdict();
}

/* A caller who vouches for its pointers gets the same bits, and every other check. */
static void vouched_calls_are_the_same(void **state)
{
    (void)state;
    need_gpu();
    for (int32_t i = 0; i < gpu_op_count(); i++)
        for (int v = 0; v < 3; v++) {
            spec s = variant(gpu_op_at(i)->name, v);
            weft_exec exec = on_cuda(0);
            problem *p = problem_make(&s);
            exec.vouched = 1;
            pack got = run_pack(p, exec);
            expect_run(p, &got, "vouched");
            pack_free(&got);
            problem_free(p);
        }
    test_verdict();
}

static void vouched_calls_are_checked(void **state)
{
    (void)state;
    need_gpu();
    spec s = variant("mhc_aggregate_fwd", 0);
    image_range around[MAX_ARGS];
    weft_exec exec = on_cuda(0);
    problem *p = problem_make(&s);
    image im = {0};
    exec.vouched = 1;
    if (image_open(&im, p->op, &exec, p->args, around, problem_ranges(p, around)) != WEFT_OK || im.wrong[0])
        test_failed("%s: %s %s", problem_text(p), weft_last_error(), im.wrong);
    else {
        weft_mhc_aggregate_fwd_args *a = im.args;
        void *keep = a->pre.data;
        a->pre.data = NULL;
        expect_refused(p, &im, "pre", "no memory");
        a->pre.data = keep;
        if (!image_get(&im)) test_failed("%s", im.wrong);
        if (!problem_untouched(p)) test_failed("%s: refused, but something was written", problem_text(p));
    }
    image_close(&im);
    problem_free(p);
    test_verdict();
}

static void other_devices_are_refused(void **state)
{
    (void)state;
    need_gpu();
    const int ordinals[] = {device_count(), 99, -1, INT32_MAX, INT32_MIN};
    for (int32_t i = 0; i < gpu_op_count(); i++)
        for (int k = 0; k < 5; k++) {
            spec s = variant(gpu_op_at(i)->name, 0);
            problem *p = problem_make(&s);
            weft_exec exec = on_cuda(0);
            size_t bytes = 0;
            exec.device = ordinals[k];
            if (p->call(&exec, p->args) != WEFT_ERR_ARGUMENT || !strstr(weft_last_error(), "exec.device"))
                test_failed("%s: device %d: %s", p->op->name, ordinals[k], weft_last_error());
            if (p->workspace(&exec, p->args, &bytes) != WEFT_ERR_ARGUMENT)
                test_failed("%s_workspace: device %d: %s", p->op->name, ordinals[k], weft_last_error());
            problem_free(p);
        }
    test_verdict();
}

/* Workspace of single operators at four streams: at most 32 MiB and 256 bytes a token. A query looks at no data. */
static void expect_room(const char *op, const void *args, int64_t tokens, int64_t channels)
{
    weft_exec exec = on_cuda(0);
    size_t bytes = 0, most = ((size_t)32 << 20) + 256 * (size_t)tokens;
    if (weft_op_workspace(weft_op_find(op), &exec, args, &bytes) != WEFT_OK)
        fail_msg("%s: %s", op, weft_last_error());
    if (bytes > most)
        test_failed("%s: %lld tokens of %lld channels ask for %zu bytes of workspace, more than %zu", op,
                    (long long)tokens, (long long)channels, bytes, most);
}

static void workspaces_are_bounded(void **state)
{
    (void)state;
    need_gpu();
    static const int64_t shapes[][2] = {{1, 4096},     {128, 4096},   {2048, 12288},  {8192, 4096},   {8192, 16384},
                                        {32768, 4096}, {32768, 7168}, {262144, 2048}, {262144, 16384}};
    enum { n = 4, rows = 24 };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int64_t t = shapes[i][0], c = shapes[i][1];
        const weft_tensor x = weft_dense3(NULL, WEFT_BF16, t, n, c), u = weft_dense2(NULL, WEFT_BF16, t, c);
        const weft_tensor phi = weft_dense3(NULL, WEFT_F32, rows, n, c), h = weft_dense2(NULL, WEFT_F32, t, rows);
        const weft_tensor ms = weft_dense1(NULL, WEFT_F32, t), gate = weft_dense2(NULL, WEFT_F32, t, n);
        const weft_tensor res = weft_dense3(NULL, WEFT_F32, t, n, n), wide = weft_dense1(NULL, WEFT_F32, c);
        const weft_tensor gain = weft_dense2(NULL, WEFT_F32, n, c), alpha = weft_dense1(NULL, WEFT_F32, 3),
                          beta = weft_dense1(NULL, WEFT_F32, rows);
        weft_mhc_numerics q;
        assert_int_equal(weft_mhc_preset_numerics(WEFT_PRESET_DEEPSEEK_V4, &q), WEFT_OK);
        expect_room("mhc_project_fwd",
                    WEFT_ARGS(weft_mhc_project_fwd_args, .x = x, .phi = phi, .norm_weight = gain, .h = h, .ms = ms),
                    t, c);
        expect_room("mhc_project_bwd",
                    WEFT_ARGS(weft_mhc_project_bwd_args, .x = x, .phi = phi, .norm_weight = gain, .d_h = h,
                              .d_ms = ms, .d_x = {x, 0}, .d_phi = {phi, 0}, .d_norm_weight = {gain, 0}),
                    t, c);
        expect_room("mhc_coef_bwd",
                    WEFT_ARGS(weft_mhc_coef_bwd_args, .numerics = q, .h = h, .ms = ms, .alpha = alpha, .beta = beta,
                              .d_pre = gate, .d_post = gate, .d_res = res, .d_h = {h, 0}, .d_ms = {ms, 0},
                              .d_alpha = {alpha, 0}, .d_beta = {beta, 0}),
                    t, c);
        expect_room("mhc_post_bwd",
                    WEFT_ARGS(weft_mhc_post_bwd_args, .numerics = q, .x = x, .f = u, .bias = wide, .post = gate,
                              .res = res, .d_y = x, .d_x = {x, 0}, .d_f = {u, 0}, .d_bias = {wide, 0},
                              .d_post = {gate, 0}, .d_res = {res, 0}),
                    t, c);
        expect_room("mhc_aggregate_bwd",
                    WEFT_ARGS(weft_mhc_aggregate_bwd_args, .x = x, .pre = gate, .d_u = u, .d_x = {x, 0},
                              .d_pre = {gate, 0}),
                    t, c);
        expect_room("rmsnorm_bwd",
                    WEFT_ARGS(weft_rmsnorm_bwd_args, .eps = 1e-6, .u = u, .weight = wide, .d_v = u, .d_u = {u, 0},
                              .d_weight = {wide, 0}),
                    t, c);
    }
    test_verdict();
}

/* Without a workspace, or with one byte too few: refused, and nothing is written. */
static void small_workspaces_are_refused(void **state)
{
    (void)state;
    need_gpu();
    for (int32_t i = 0; i < gpu_op_count(); i++) {
        spec s = variant(gpu_op_at(i)->name, 1);
        image_range around[MAX_ARGS];
        weft_exec exec = on_cuda(0);
        problem *p = problem_make(&s);
        image *im = calloc(1, sizeof *im);
        weft_status status = image_open(im, p->op, &exec, p->args, around, problem_ranges(p, around));
        if (status == WEFT_OK && !im->wrong[0] && im->exec.workspace_bytes) {
            im->exec.workspace_bytes--;
            if (weft_op_call(p->op, &im->exec, im->args) != WEFT_ERR_WORKSPACE)
                test_failed("%s: a workspace that is too small: %s", p->op->name, weft_last_error());
            if (!image_get(im)) test_failed("%s", im->wrong);
            if (!problem_untouched(p)) test_failed("%s: refused, but something was written", problem_text(p));
        }
        image_close(im);
        free(im);
        problem_free(p);
    }
    test_verdict();
}

/* One pass over a site needs none where phi is as it wants it; addresses that rule the pass out need some, and the query,
 * which knows no addresses, counts on them. */
static void one_pass_needs_no_workspace(void **state)
{
    static const char *const ops[] = {"mhc_pre_fwd", "mhc_boundary_fwd", "mhc_head_fwd"};
    (void)state;
    need_gpu();
    for (int i = 0; i < 6; i++) {
        const spec s = {.op = ops[i / 2],
                        .tokens = 37,
                        .streams = 4,
                        .channels = 256,
                        .act = WEFT_BF16,
                        .wide = WEFT_BF16,
                        .misalign = i % 2,
                        .absent = " norm_weight "};
        image_range around[MAX_ARGS];
        weft_exec exec = on_cuda(0);
        problem *p = problem_make(&s);
        image *im = calloc(1, sizeof *im);
        const char *plan = "";
        if (image_open(im, p->op, &exec, p->args, around, problem_ranges(p, around)) != WEFT_OK || im->wrong[0]) {
            test_failed("%s: %s %s", problem_text(p), weft_last_error(), im->wrong);
        } else {
            const weft_exec with = im->exec;
            if (!with.workspace_bytes) test_failed("%s: the query asks for nothing", problem_text(p));
            im->exec.workspace = NULL, im->exec.workspace_bytes = 0;
            weft_op_plan(p->op, &im->exec, im->args, &plan);
            const bool single = strstr(plan, "a single pass") != NULL;
            const weft_status status = weft_op_call(p->op, &im->exec, im->args);
            if (single && s.misalign) test_failed("%s: %s at odd addresses", problem_text(p), plan);
            if (status != (single ? WEFT_OK : WEFT_ERR_WORKSPACE))
                test_failed("%s: %s, without a workspace: %s", problem_text(p), plan, weft_last_error());
            im->exec = with;
            if (!image_get(im)) test_failed("%s", im->wrong);
        }
        image_close(im);
        free(im);
        problem_free(p);
    }
    test_verdict();
}

/* ---- an error that stays --------------------------------------------------------------------------------------- */

/* A fault ruins a process's device for good, so this runs in one of its own: a row far outside of all memory, which no
 * check can see, then a call that is in order. */
static int after_a_fault(void)
{
    char *memory = device_alloc(1 << 20);
    weft_exec exec = on_cuda(0);
    if (!memory) return 10;
    weft_tensor x = weft_dense3(memory, WEFT_F32, 2, 4, 64), u = weft_dense2(memory + (1 << 19), WEFT_F32, 2, 64);
    u.stride[0] = (int64_t)1 << 40;
    if (weft_mhc_expand_fwd(&exec, WEFT_ARGS(weft_mhc_expand_fwd_args, .u = u, .x = x)) != WEFT_OK) return 11;
    if (!device_wait()) return 12;
    u.stride[0] = 64;
    if (weft_mhc_expand_fwd(&exec, WEFT_ARGS(weft_mhc_expand_fwd_args, .u = u, .x = x)) != WEFT_ERR_DEVICE)
        return 13;
    fprintf(stderr, "  after a fault: %s\n", weft_last_error());
    return strstr(weft_last_error(), "mhc_expand_fwd") && strstr(weft_last_error(), "CUDA") ? 0 : 14;
}

static void an_error_that_stays(void **state)
{
    (void)state;
    need_gpu();
    static const char *const reasons[] = {"no memory on the device", "the faulty call was refused",
                                          "the faulty call did not fault", "the next call is no device error",
                                          "the sentence does not say what happened"};
    int code = 0;
    pid_t child = fork();
    if (child == 0) {
        setenv("WEFT_TEST_FAULT", "1", 1);
        execl("/proc/self/exe", "test_cuda", (char *)NULL);
        _exit(99);
    }
    if (child < 0 || waitpid(child, &code, 0) != child) fail_msg("no child process");
    code = WIFEXITED(code) ? WEXITSTATUS(code) : -1;
    if (code) fail_msg("code %d: %s", code, code >= 10 && code < 15 ? reasons[code - 10] : "the child failed");
}

int main(void)
{
    if (getenv("WEFT_TEST_FAULT")) return after_a_fault();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operators_without_kernels_say_so),
        cmocka_unit_test(graphs), /* first: nothing has run before it */
        cmocka_unit_test(streams_at_once),
        cmocka_unit_test(many_callers),
        cmocka_unit_test(plans),
        cmocka_unit_test(projection_plans),
        cmocka_unit_test(tf32),
        cmocka_unit_test(host_memory_is_refused),
        cmocka_unit_test(vouched_calls_are_the_same),
        cmocka_unit_test(vouched_calls_are_checked),
        cmocka_unit_test(other_devices_are_refused),
        cmocka_unit_test(small_workspaces_are_refused),
        cmocka_unit_test(one_pass_needs_no_workspace),
        cmocka_unit_test(workspaces_are_bounded),
        cmocka_unit_test(an_error_that_stays),
    };
    return suite_run("cuda", tests);
}

#else

int main(void)
{
    return suite_without_cuda("cuda");
}

#endif
