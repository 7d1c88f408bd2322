/* SPDX-License-Identifier: Apache-2.0
 *
 * What calls on a GPU ask for and refuse: memory of the wrong side, other devices, workspaces, errors of the device. */
#include "support/suite.h"

#if WEFT_HAVE_CUDA

#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check/device.h"
#include "support/chain.h"
#include "support/device.h"

/* ---- operators without kernels ------------------------------------------------------------------------------- */

static void expect_unsupported(weft_status status, const char *op, const char *what)
{
    const char *text = weft_last_error();
    if (status != WEFT_ERR_UNSUPPORTED || !strstr(text, op) || !strstr(text, "cuda"))
        test_failed("%s: %s: got \"%s\" (%s)", op, what, weft_status_name(status), text);
}

/* The call and its workspace query return an error with a message. The pointers are the host's; trust_pointers is set, so that they
 * are not rejected first. */
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
        exec.trust_pointers = 1;
        expect_unsupported(p->workspace(&exec, p->args, &bytes), s.op, "the question for its workspace");
        expect_unsupported(p->call(&exec, p->args), s.op, "the call");
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
    assert_int_equal(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0), cudaSuccess);
    if (pageable) {
        fprintf(stderr, "  skipped: this GPU reads the host's memory\n");
        skip();
    }
    for (int32_t i = 0; i < gpu_op_count(); i++) {
        spec s = gpu_variant(gpu_op_at(i)->name, 0);
        problem *p = problem_make(&s);
        image *im = calloc(1, sizeof *im);
        if (problem_image(p, on_cuda(0), im)) {
            for (int k = 0; k < p->num_args; k++) {
                const arg *a = &p->arg[k];
                if (!a->guard.block || a->elements == 0) continue;
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

static void trusted_calls_are_checked(void **state)
{
    (void)state;
    need_gpu();
    spec s = gpu_variant("mhc_aggregate_fwd", 0);
    weft_exec exec = on_cuda(0);
    problem *p = problem_make(&s);
    image im = {0};
    exec.trust_pointers = 1;
    if (problem_image(p, exec, &im)) {
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
            spec s = gpu_variant(gpu_op_at(i)->name, 0);
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

/* Without a workspace, or with one byte too few: refused, and nothing is written. At addresses that a fused kernel takes, a forward
 * site needs none (below); at odd ones it does. */
static void small_workspaces_are_refused(void **state)
{
    int tried = 0;
    (void)state;
    need_gpu();
    for (int32_t i = 0; i < 2 * gpu_op_count(); i++) {
        spec s = gpu_variant(gpu_op_at(i / 2)->name, 1);
        s.misalign = i % 2;
        problem *p = problem_make(&s);
        image *im = calloc(1, sizeof *im);
        const char *path = "";
        bool needs = problem_image(p, on_cuda(0), im) && im->exec.workspace_bytes;
        if (needs) weft_op_path(p->op, &im->exec, im->args, &path);
        if (strstr(s.op, "_fwd") && path_is_fused(path)) needs = false;
        if (needs) {
            tried++;
            im->exec.workspace_bytes--;
            if (weft_op_call(p->op, &im->exec, im->args) != WEFT_ERR_WORKSPACE)
                test_failed("%s: a workspace that is too small: %s", p->op->name, weft_last_error());
            im->exec.workspace = NULL, im->exec.workspace_bytes = 0;
            if (weft_op_call(p->op, &im->exec, im->args) != WEFT_ERR_WORKSPACE)
                test_failed("%s: no workspace: %s", p->op->name, weft_last_error());
            if (!image_get(im)) test_failed("%s", im->wrong);
            if (!problem_untouched(p)) test_failed("%s: refused, but something was written", problem_text(p));
        }
        image_close(im);
        free(im);
        problem_free(p);
    }
    if (!tried) test_failed("no operator asks for a workspace");
    test_verdict();
}

/* The fused path needs none where phi is as it wants it; addresses that rule it out need some, and the query, which knows no
 * addresses, counts on them. */
static void fused_forward_needs_no_workspace(void **state)
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
        problem *p = problem_make(&s);
        image *im = calloc(1, sizeof *im);
        const char *path = "";
        if (problem_image(p, on_cuda(0), im)) {
            const weft_exec with = im->exec;
            if (!with.workspace_bytes) test_failed("%s: the query asks for nothing", problem_text(p));
            im->exec.workspace = NULL, im->exec.workspace_bytes = 0;
            weft_op_path(p->op, &im->exec, im->args, &path);
            const bool fused = path_is_fused(path);
            const weft_status status = weft_op_call(p->op, &im->exec, im->args);
            if (fused && s.misalign) test_failed("%s: %s at odd addresses", problem_text(p), path);
            if (status != (fused ? WEFT_OK : WEFT_ERR_WORKSPACE))
                test_failed("%s: %s, without a workspace: %s", problem_text(p), path, weft_last_error());
            im->exec = with;
            if (!image_get(im)) test_failed("%s", im->wrong);
        }
        image_close(im);
        free(im);
        problem_free(p);
    }
    test_verdict();
}

/* The workspace over any tensor, for calls that need one: also where an operator looks after its room by itself. */
static void *data_of(const image *im, const arg *a)
{
    const char *base = a->layer < 0 ? im->args : (const char *)&im->layers[a->layer];
    return ((const weft_tensor *)(const void *)(base + a->info->offset))->data;
}

/* The error is about the workspace and names a tensor that begins in it: behind the one that it was put over lie others. */
static bool names_what_it_covers(const problem *p, const image *im)
{
    const char *begin = im->exec.workspace, *with = strstr(weft_last_error(), "shared with ");
    const size_t length = with ? strlen(with) : 0;
    bool named = false;
    for (int i = 0; i < p->num_args && with; i++) {
        const char *data = data_of(im, &p->arg[i]), *name = p->arg[i].name;
        const char *end = with + length - strlen(name);
        named |=
            !strcmp(end, name) && strchr(" .", end[-1]) && data >= begin && data < begin + im->exec.workspace_bytes;
    }
    return named && strstr(weft_last_error(), "exec.workspace") != NULL;
}

static void workspaces_over_tensors_are_refused(void **state)
{
    (void)state;
    need_gpu();
    for (int32_t k = 0; k < GPU_VARIANTS * weft_op_count(); k++) {
        const weft_op_info *op = weft_op_at(k / GPU_VARIANTS);
        const spec s = gpu_variant(op->name, k % GPU_VARIANTS);
        if (!weft_op_has(op, WEFT_BACKEND_CUDA)) continue;
        problem *p = problem_make(&s);
        image *im = calloc(1, sizeof *im);
        if (problem_image(p, on_cuda(0), im)) {
            const weft_exec with = im->exec;
            im->exec.workspace = NULL;
            bool needed = weft_op_call(op, &im->exec, im->args) == WEFT_ERR_WORKSPACE;
            for (int i = 0; i < p->num_args && needed; i++) {
                const arg *a = &p->arg[i];
                im->exec.workspace = data_of(im, a);
                if (!im->exec.workspace) continue;
                if (weft_op_call(op, &im->exec, im->args) != WEFT_ERR_OVERLAP || !names_what_it_covers(p, im))
                    test_failed("%s: the workspace over %s: %s", problem_text(p), a->name, weft_last_error());
            }
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
        execl("/proc/self/exe", "test_cuda_refuse", (char *)NULL);
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
        cmocka_unit_test(host_memory_is_refused),
        cmocka_unit_test(trusted_calls_are_checked),
        cmocka_unit_test(other_devices_are_refused),
        cmocka_unit_test(small_workspaces_are_refused),
        cmocka_unit_test(fused_forward_needs_no_workspace),
        cmocka_unit_test(workspaces_are_bounded),
        cmocka_unit_test(workspaces_over_tensors_are_refused),
        cmocka_unit_test(an_error_that_stays),
    };
    return suite_run("cuda_refuse", tests);
}

#else

int main(void)
{
    return suite_without_cuda("cuda_refuse");
}

#endif
