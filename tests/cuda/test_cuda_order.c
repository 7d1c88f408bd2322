/* SPDX-License-Identifier: Apache-2.0
 *
 * A call sees all that was put on its stream before it. On GPUs from compute capability 9.0 on a kernel may let the next one
 * begin while it still works; kernels of other libraries do. One that is launched so and does not wait reads what is not there
 * yet: code for older GPUs, compiled by the driver for a new one, cannot wait and must not be launched so. */
#include "support/suite.h"

#if WEFT_HAVE_CUDA

#include <cuda_runtime_api.h>

#include "check/device.h"
#include "support/device.h"

#if CUDART_VERSION >= 12080 /* code is loaded by the runtime */

/* Lets the next kernel begin, pauses, and only then copies. */
static const char late_code[] = ".version 7.8\n"
                                ".target sm_90\n"
                                ".address_size 64\n"
                                ".visible .entry late(.param .u64 to, .param .u64 from, .param .u64 words,\n"
                                "                     .param .u64 pause)\n"
                                "{\n"
                                ".reg .pred %p;\n"
                                ".reg .b32 %r<3>;\n"
                                ".reg .b64 %d<10>;\n"
                                "griddepcontrol.launch_dependents;\n"
                                "ld.param.u64 %d0, [pause];\n"
                                "mov.u64 %d1, %globaltimer;\n"
                                "PAUSE:\n"
                                "mov.u64 %d2, %globaltimer;\n"
                                "sub.u64 %d3, %d2, %d1;\n"
                                "setp.lt.u64 %p, %d3, %d0;\n"
                                "@%p bra PAUSE;\n"
                                "ld.param.u64 %d4, [to];\n"
                                "ld.param.u64 %d5, [from];\n"
                                "ld.param.u64 %d6, [words];\n"
                                "mov.u32 %r0, %tid.x;\n"
                                "mov.u32 %r1, %ntid.x;\n"
                                "cvt.u64.u32 %d7, %r0;\n"
                                "cvt.u64.u32 %d8, %r1;\n"
                                "COPY:\n"
                                "setp.ge.u64 %p, %d7, %d6;\n"
                                "@%p bra DONE;\n"
                                "mad.lo.u64 %d9, %d7, 4, %d5;\n"
                                "ld.global.u32 %r2, [%d9];\n"
                                "mad.lo.u64 %d9, %d7, 4, %d4;\n"
                                "st.global.u32 [%d9], %r2;\n"
                                "add.u64 %d7, %d7, %d8;\n"
                                "bra COPY;\n"
                                "DONE:\n"
                                "ret;\n"
                                "}\n";

enum { PAUSE_NS = 2000000, LATE_THREADS = 256 };

static void must(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    fail_msg("%s: %s", what, cudaGetErrorString(error));
}

static void good(const char *wrong)
{
    if (wrong) fail_msg("%s", wrong);
}

/* The call behind a kernel that brings its data late. NaN is what it finds until then. */
static void call_behind(cudaKernel_t late, cudaStream_t stream, problem *p, image *im)
{
    mirror *m = &im->mirror;
    void *data = device_alloc(m->bytes), *to = m->device;
    uint64_t words = m->bytes / 4, pause = PAUSE_NS;
    void *args[] = {&to, &data, &words, &pause};
    if (!data) fail_msg("not enough memory on the device");
    good(device_copy(data, m->device, m->bytes));
    good(device_fill(m->device, 0xff, m->bytes));
    good(device_wait());
    im->exec.stream = stream;
    must(cudaLaunchKernel((const void *)late, (dim3){1, 1, 1}, (dim3){LATE_THREADS, 1, 1}, args, 0, stream),
         "a kernel that is late");
    if (weft_op_call(p->op, &im->exec, im->args) != WEFT_OK)
        test_failed("%s: %s", problem_text(p), weft_last_error());
    must(cudaStreamSynchronize(stream), "the stream");
    if (!image_get(im)) test_failed("%s: %s", problem_text(p), im->wrong);
    device_free(data);
}

static void waits_for_what_is_late(void **state)
{
    (void)state;
    need_gpu();
    device_facts facts;
    if (!device_facts_of(0, &facts) || facts.major < 9) {
        fprintf(stderr, "  skipped: kernels follow one another on this GPU\n");
        skip();
    }
    cudaLibrary_t library;
    cudaKernel_t late;
    cudaStream_t stream;
    must(cudaLibraryLoadData(&library, late_code, NULL, NULL, 0, NULL, NULL, 0), "the code of a kernel");
    must(cudaLibraryGetKernel(&late, library, "late"), "a kernel");
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    for (int32_t i = 0; i < gpu_op_count(); i++)
        for (int v = 0; v < GPU_VARIANTS; v++) {
            spec s = gpu_variant(gpu_op_at(i)->name, v);
            problem *p = problem_make(&s);
            image im;
            problem_must_run(p, on_cuda(0)); /* loads its code, too: that must not take the place of waiting */
            pack want = problem_pack(p);
            problem_reset(p);
            if (problem_image(p, on_cuda(0), &im) && im.mirror.device) {
                call_behind(late, stream, p, &im);
                pack got = problem_pack(p);
                pack_expect_same(p, &got, &want, "behind a kernel that is late");
                pack_free(&got);
            }
            image_close(&im);
            pack_free(&want);
            problem_free(p);
        }
    must(cudaStreamDestroy(stream), "a stream");
    must(cudaLibraryUnload(library), "the code of a kernel");
    test_verdict();
}

#else

static void waits_for_what_is_late(void **state)
{
    (void)state;
    fprintf(stderr, "  skipped: this CUDA runtime does not load code\n");
    skip();
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(waits_for_what_is_late)};
    return suite_run("cuda_order", tests);
}

#else

int main(void)
{
    return suite_without_cuda("cuda_order");
}

#endif
