/* SPDX-License-Identifier: Apache-2.0
 *
 * One site of an mHC model on a GPU, forward and backward, in plain C with the CUDA runtime; site_cpu.c explains the site. What
 * differs: tensors and the workspace are device memory, calls go to a stream and return before the work is done, and streams are
 * bf16, which the fused kernels take. The sub-layer is the identity, so that the program needs no kernel of its own.
 *
 * The same calls then run on the CPU backend, and the results are held against each other.
 *
 *     cc site_cuda.c $(pkg-config --cflags --libs weft) -I/usr/local/cuda/include -L/usr/local/cuda/lib64 -lcudart -lm */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <weft/mhc.h>

enum { T = 512, N = 4, C = 256, GATES = N * (N + 2) };

/* Everything of one site, in one block of memory: on the host, or in the same layout on the GPU. */
typedef struct site {
    uint16_t *x, *d_y, *y, *d_x; /* bf16 [T, N, C] */
    uint16_t *u, *v, *d_v;       /* bf16 [T, C] */
    float *phi, *alpha, *beta, *sub_weight;
    float *h, *ms, *pre, *post, *res, *d_post, *d_res;
    float *d_phi, *d_alpha, *d_beta, *d_sub_weight;
} site;

static void must(weft_status status)
{
    if (status == WEFT_OK) return;
    fprintf(stderr, "%s: %s\n", weft_status_name(status), weft_last_error());
    exit(1);
}

static void must_cuda(cudaError_t error)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    exit(1);
}

static void *take(char *base, size_t *used, size_t bytes)
{
    void *at = base ? base + *used : NULL; /* without a base it counts */
    *used += (bytes + 255) / 256 * 256;
    return at;
}

/* The bytes of a site. */
static size_t lay_out(site *s, char *base)
{
    size_t used = 0;
    uint16_t **const narrow[] = {&s->x, &s->d_y, &s->y, &s->d_x, &s->u, &s->v, &s->d_v};
    const struct {
        float **to;
        size_t count;
    } full[] = {{&s->phi, GATES * N * C}, {&s->alpha, 3},      {&s->beta, GATES},      {&s->sub_weight, C},
                {&s->h, T * GATES},       {&s->ms, T},         {&s->pre, T * N},       {&s->post, T * N},
                {&s->res, T * N * N},     {&s->d_post, T * N}, {&s->d_res, T * N * N}, {&s->d_phi, GATES * N * C},
                {&s->d_alpha, 3},         {&s->d_beta, GATES}, {&s->d_sub_weight, C}};
    for (size_t i = 0; i < sizeof narrow / sizeof *narrow; i++)
        *narrow[i] = take(base, &used, (i < 4 ? N : 1) * T * C * sizeof(uint16_t));
    for (size_t i = 0; i < sizeof full / sizeof *full; i++)
        *full[i].to = take(base, &used, full[i].count * sizeof(float));
    return used;
}

/* The site's four calls; or, where the exec has no workspace yet, how large it must be. */
static void run(weft_exec *exec, const site *s)
{
    weft_mhc_numerics numerics;
    must(weft_mhc_preset_numerics(WEFT_PRESET_DEEPSEEK_V4, &numerics));
    const weft_tensor x = weft_dense3(s->x, WEFT_BF16, T, N, C), u = weft_dense2(s->u, WEFT_BF16, T, C),
                      v = weft_dense2(s->v, WEFT_BF16, T, C), phi = weft_dense3(s->phi, WEFT_F32, GATES, N, C),
                      alpha = weft_dense1(s->alpha, WEFT_F32, 3), beta = weft_dense1(s->beta, WEFT_F32, GATES),
                      sub_weight = weft_dense1(s->sub_weight, WEFT_F32, C),
                      h = weft_dense2(s->h, WEFT_F32, T, GATES), ms = weft_dense1(s->ms, WEFT_F32, T),
                      post = weft_dense2(s->post, WEFT_F32, T, N), res = weft_dense3(s->res, WEFT_F32, T, N, N),
                      d_x = weft_dense3(s->d_x, WEFT_BF16, T, N, C), d_v = weft_dense2(s->d_v, WEFT_BF16, T, C),
                      d_post = weft_dense2(s->d_post, WEFT_F32, T, N),
                      d_res = weft_dense3(s->d_res, WEFT_F32, T, N, N);
    const weft_mhc_pre_fwd_args *pre_fwd =
        WEFT_ARGS(weft_mhc_pre_fwd_args, .numerics = numerics, .sub_eps = 1e-6, .x = x, .phi = phi, .alpha = alpha,
                  .beta = beta, .sub_weight = sub_weight, .h = h, .ms = ms,
                  .pre = weft_dense2(s->pre, WEFT_F32, T, N), .post = post, .res = res, .u = u, .v = v);
    const weft_mhc_post_fwd_args *post_fwd =
        WEFT_ARGS(weft_mhc_post_fwd_args, .numerics = numerics, .x = x, .f = v, .post = post, .res = res,
                  .y = weft_dense3(s->y, WEFT_BF16, T, N, C));
    const weft_mhc_post_bwd_args *post_bwd =
        WEFT_ARGS(weft_mhc_post_bwd_args, .numerics = numerics, .x = x, .f = v, .post = post, .res = res,
                  .d_y = weft_dense3(s->d_y, WEFT_BF16, T, N, C), .d_x = {d_x, 0}, .d_f = {d_v, 0},
                  .d_post = {d_post, 0}, .d_res = {d_res, 0});
    const weft_mhc_pre_bwd_args *pre_bwd = WEFT_ARGS(
        weft_mhc_pre_bwd_args, .numerics = numerics, .sub_eps = 1e-6, .x = x, .phi = phi, .sub_weight = sub_weight,
        .alpha = alpha, .beta = beta, .h = h, .ms = ms, .d_v = d_v, .d_post = d_post, .d_res = d_res,
        .d_x = {d_x, 1} /* added */, .d_phi = {weft_dense3(s->d_phi, WEFT_F32, GATES, N, C), 0},
        .d_alpha = {weft_dense1(s->d_alpha, WEFT_F32, 3), 0},
        .d_beta = {weft_dense1(s->d_beta, WEFT_F32, GATES), 0},
        .d_sub_weight = {weft_dense1(s->d_sub_weight, WEFT_F32, C), 0});
    if (!exec->workspace) {
        size_t bytes[4];
        must(weft_mhc_pre_fwd_workspace(exec, pre_fwd, &bytes[0]));
        must(weft_mhc_post_fwd_workspace(exec, post_fwd, &bytes[1]));
        must(weft_mhc_post_bwd_workspace(exec, post_bwd, &bytes[2]));
        must(weft_mhc_pre_bwd_workspace(exec, pre_bwd, &bytes[3]));
        for (int i = 0; i < 4; i++)
            if (bytes[i] > exec->workspace_bytes) exec->workspace_bytes = bytes[i];
        return;
    }
    must(weft_mhc_pre_fwd(exec, pre_fwd));
    must(weft_mhc_post_fwd(exec, post_fwd));
    must(weft_mhc_post_bwd(exec, post_bwd));
    must(weft_mhc_pre_bwd(exec, pre_bwd));
}

static float uniform(void) /* -1 to 1 */
{
    return 2 * (float)rand() / (float)RAND_MAX - 1;
}

static uint16_t narrow_of(float value) /* the upper half of its bits: rounded to zero */
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static double value_of(const void *data, int is_narrow, size_t i)
{
    float value;
    uint32_t bits;
    if (!is_narrow) return (double)((const float *)data)[i];
    bits = (uint32_t)((const uint16_t *)data)[i] << 16;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Where two sums round to neighbouring numbers of bf16, 2^-8 apart, what follows from them differs as well. */
static int agrees(const char *name, const void *gpu, const void *cpu, int is_narrow, size_t count)
{
    double largest = 0, error = 0;
    for (size_t i = 0; i < count; i++) {
        double a = value_of(gpu, is_narrow, i), b = value_of(cpu, is_narrow, i);
        largest = fmax(largest, fabs(b));
        if (!(fabs(a - b) <= error)) error = fabs(a - b); /* NaN stays */
    }
    int ok = error <= ldexp(largest, -6);
    printf("%-6s largest %.4g, GPU and CPU at most %.2g apart%s\n", name, largest, error, ok ? "" : "  <- too far");
    return ok;
}

int main(void)
{
    int devices = 0;
    cudaError_t found = cudaGetDeviceCount(&devices);
    if (found != cudaSuccess || devices == 0 || !weft_backend_available(WEFT_BACKEND_CUDA)) {
        printf("no GPU that can run this: %s\n", found != cudaSuccess ? cudaGetErrorString(found)
                                                 : devices == 0       ? "none was found"
                                                                      : "the library has no CUDA backend for it");
        return 0;
    }
    site host, device, wanted;
    const size_t bytes = lay_out(&host, NULL);
    char *on_host = calloc(1, bytes), *on_cpu = calloc(1, bytes), *on_device;
    cudaStream_t stream;
    must_cuda(cudaSetDevice(0));
    must_cuda(cudaMalloc((void **)&on_device, bytes));
    must_cuda(cudaStreamCreate(&stream));
    if (!on_host || !on_cpu) return 1;
    lay_out(&host, on_host);
    lay_out(&wanted, on_cpu);
    lay_out(&device, on_device);
    for (int i = 0; i < T * N * C; i++) host.x[i] = narrow_of(uniform()), host.d_y[i] = narrow_of(uniform());
    for (int i = 0; i < GATES * N * C; i++) host.phi[i] = uniform() / 16;
    for (int i = 0; i < GATES; i++) host.beta[i] = uniform();
    for (int i = 0; i < C; i++) host.sub_weight[i] = 1;
    for (int i = 0; i < 3; i++) host.alpha[i] = 0.3f;
    memcpy(on_cpu, on_host, bytes);

    weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CUDA, .device = 0, .stream = stream);
    run(&exec, &device);
    must_cuda(cudaMalloc(&exec.workspace, exec.workspace_bytes + 1)); /* never NULL */
    must_cuda(cudaMemcpyAsync(on_device, on_host, bytes, cudaMemcpyHostToDevice, stream));
    run(&exec, &device);
    must_cuda(cudaMemcpyAsync(on_host, on_device, bytes, cudaMemcpyDeviceToHost, stream));
    must_cuda(cudaStreamSynchronize(stream));

    weft_exec cpu = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);
    run(&cpu, &wanted);
    cpu.workspace = malloc(cpu.workspace_bytes + 1);
    run(&cpu, &wanted);

    int ok = agrees("y", host.y, wanted.y, 1, T * N * C) & agrees("d_x", host.d_x, wanted.d_x, 1, T * N * C) &
             agrees("d_phi", host.d_phi, wanted.d_phi, 0, GATES * N * C) &
             agrees("d_beta", host.d_beta, wanted.d_beta, 0, GATES);
    must_cuda(cudaFree(exec.workspace));
    must_cuda(cudaFree(on_device));
    must_cuda(cudaStreamDestroy(stream));
    free(cpu.workspace), free(on_host), free(on_cpu);
    return ok ? 0 : 1;
}
