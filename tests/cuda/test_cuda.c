/* SPDX-License-Identifier: Apache-2.0
 *
 * What only a GPU can show of calls that run: capture as a graph, streams, threads, plans for other GPUs. What it refuses is
 * in test_cuda_refuse.c, long batches are in test_cuda_large.c, the comparison with the reference is in the suites of the
 * operators. */
#include "support/suite.h"

#if WEFT_HAVE_CUDA

#include <cuda_runtime_api.h>
#include <pthread.h>

#include "support/device.h"

static void must(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    fail_msg("%s: %s", what, cudaGetErrorString(error));
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
    cudaGraph_t graph = NULL;
    *r = (recording){0};
    must(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking), "a stream");
    if (!problem_image(p, on_cuda(0), &r->image)) return false;
    r->image.exec.stream = r->stream;
    must(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeGlobal), "begin of the capture");
    weft_status status = weft_op_call(p->op, &r->image.exec, r->image.args);
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
        if (!a->guard.block || (arg_is_output(a) && !arg_adds(a)) || a->elements == 0) continue;
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
        for (int v = 0; v < GPU_VARIANTS; v++) {
            spec s = gpu_variant(gpu_op_at(i)->name, v);
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
            spec s = gpu_variant(gpu_op_at((first + k / 2) % gpu_op_count())->name, k % GPU_VARIANTS);
            p[k] = problem_make(&s);
            if (!problem_image(p[k], on_cuda(0), &images[k])) ready = false;
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
        spec s = gpu_variant(gpu_op_at(i)->name, 1);
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
        spec s = gpu_variant(gpu_op_at(i)->name, 1);
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

/* exec.precision = tf32 is a permission: within its bounds, and with nothing to say but in the projection of f32 streams. */
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

/* ---- trust_pointers ---------------------------------------------------------------------------------------------------- */

/* A caller who vouches for its pointers gets the same bits, and every other check. */
static void trusted_calls_are_the_same(void **state)
{
    (void)state;
    need_gpu();
    for (int32_t i = 0; i < gpu_op_count(); i++)
        for (int v = 0; v < GPU_VARIANTS; v++) {
            spec s = gpu_variant(gpu_op_at(i)->name, v);
            weft_exec exec = on_cuda(0);
            problem *p = problem_make(&s);
            exec.trust_pointers = 1;
            pack got = run_pack(p, exec);
            expect_run(p, &got, "trust_pointers");
            pack_free(&got);
            problem_free(p);
        }
    test_verdict();
}

/* What was asked of the device before, permits for shared memory and clusters among it, holds for the contexts that come later.
 * Kernels that need such permits: the projection, and the fused kernel of a wide pre. */
static void a_reset_of_the_device(void **state)
{
    (void)state;
    need_gpu();
    static const char *const ops[] = {"mhc_project_fwd", "mhc_pre_fwd", "mhc_coef_bwd"};
    for (size_t k = 0; k < sizeof ops / sizeof *ops; k++) {
        spec s = {.op = ops[k], .tokens = 300, .streams = 4, .channels = 4096, .act = WEFT_BF16, .wide = WEFT_BF16};
        weft_mhc_preset_numerics(WEFT_PRESET_DEEPSEEK_V4, &s.numerics);
        problem *p = problem_make(&s);
        pack want = run_pack(p, on_cuda(0));
        must(cudaDeviceReset(), "reset");
        pack got = run_pack(p, on_cuda(0));
        pack_expect_same(p, &got, &want, "after a reset of the device");
        pack_free(&got);
        pack_free(&want);
        problem_free(p);
    }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(graphs), /* first: nothing has run before it */
        cmocka_unit_test(streams_at_once),
        cmocka_unit_test(many_callers),
        cmocka_unit_test(plans),
        cmocka_unit_test(projection_plans),
        cmocka_unit_test(tf32),
        cmocka_unit_test(trusted_calls_are_the_same),
        cmocka_unit_test(a_reset_of_the_device), /* last: nothing of the others is left */
    };
    return suite_run("cuda", tests);
}

#else

int main(void)
{
    return suite_without_cuda("cuda");
}

#endif
