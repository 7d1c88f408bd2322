/* SPDX-License-Identifier: Apache-2.0
 *
 * One site of an mHC model on the CPU, forward and backward: streams in front of a sub-layer, streams behind it.
 *
 *     v, post, res = mhc_pre(x)      gates and mixes from the streams, the sub-layer's input collapsed and normalised
 *     f = v * v                      stands for attention or an MLP
 *     y = mhc_post(x, f)             the output spread over the streams, which res mixes
 *     loss = sum of y * weight
 *
 * The gradients are then held against finite differences of the loss.
 *
 *     cc site_cpu.c $(pkg-config --cflags --libs weft) -lm && ./a.out */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <weft/mhc.h>

enum { T = 32, N = 4, C = 32, GATES = N * (N + 2) };

static float x[T * N * C], phi[GATES * N * C], alpha[3], beta[GATES], sub_weight[C], weight[T * N * C];
static float h[T * GATES], ms[T], pre[T * N], post[T * N], res[T * N * N], u[T * C], v[T * C], f[T * C],
    y[T * N * C];
static float d_x[T * N * C], d_phi[GATES * N * C], d_alpha[3], d_beta[GATES], d_sub_weight[C];
static float d_f[T * C], d_v[T * C], d_post[T * N], d_res[T * N * N];
static weft_exec exec;
static weft_mhc_numerics numerics;

static void must(weft_status status)
{
    if (status == WEFT_OK) return;
    fprintf(stderr, "%s: %s\n", weft_status_name(status), weft_last_error());
    exit(1);
}

/* The library allocates nothing: the caller has a workspace, which all calls on one thread can share. */
static void reserve(size_t bytes)
{
    if (bytes <= exec.workspace_bytes) return;
    free(exec.workspace);
    exec.workspace = malloc(bytes);
    exec.workspace_bytes = bytes;
    if (!exec.workspace) exit(1);
}

static weft_tensor streams(float *data)
{
    return weft_dense3(data, WEFT_F32, T, N, C);
}

static weft_tensor rows(float *data, int64_t columns)
{
    return weft_dense2(data, WEFT_F32, T, columns);
}

static weft_tensor mix(float *data)
{
    return weft_dense3(data, WEFT_F32, T, N, N);
}

static double forward(void)
{
    size_t bytes;
    double loss = 0;
    const weft_mhc_pre_fwd_args *in =
        WEFT_ARGS(weft_mhc_pre_fwd_args, .numerics = numerics, .sub_eps = 1e-6, .x = streams(x),
                  .phi = weft_dense3(phi, WEFT_F32, GATES, N, C), .alpha = weft_dense1(alpha, WEFT_F32, 3),
                  .beta = weft_dense1(beta, WEFT_F32, GATES), .sub_weight = weft_dense1(sub_weight, WEFT_F32, C),
                  .h = rows(h, GATES), .ms = weft_dense1(ms, WEFT_F32, T), .pre = rows(pre, N),
                  .post = rows(post, N), .res = mix(res), .u = rows(u, C), .v = rows(v, C));
    must(weft_mhc_pre_fwd_workspace(&exec, in, &bytes));
    reserve(bytes);
    must(weft_mhc_pre_fwd(&exec, in));
    for (int i = 0; i < T * C; i++) f[i] = v[i] * v[i];
    const weft_mhc_post_fwd_args *out =
        WEFT_ARGS(weft_mhc_post_fwd_args, .numerics = numerics, .x = streams(x), .f = rows(f, C),
                  .post = rows(post, N), .res = mix(res), .y = streams(y));
    must(weft_mhc_post_fwd_workspace(&exec, out, &bytes));
    reserve(bytes);
    must(weft_mhc_post_fwd(&exec, out));
    for (int i = 0; i < T * N * C; i++) loss += (double)weight[i] * (double)y[i];
    return loss;
}

/* After forward, whose h and ms it takes; everything else it needs is x and the parameters. */
static void backward(void)
{
    size_t bytes;
    const weft_mhc_post_bwd_args *out =
        WEFT_ARGS(weft_mhc_post_bwd_args, .numerics = numerics, .x = streams(x), .f = rows(f, C),
                  .post = rows(post, N), .res = mix(res), .d_y = streams(weight), /* of the loss by y */
                  .d_x = {streams(d_x), 0}, .d_f = {rows(d_f, C), 0}, .d_post = {rows(d_post, N), 0},
                  .d_res = {mix(d_res), 0});
    must(weft_mhc_post_bwd_workspace(&exec, out, &bytes));
    reserve(bytes);
    must(weft_mhc_post_bwd(&exec, out));
    for (int i = 0; i < T * C; i++) d_v[i] = 2 * v[i] * d_f[i];
    const weft_mhc_pre_bwd_args *in = WEFT_ARGS(
        weft_mhc_pre_bwd_args, .numerics = numerics, .sub_eps = 1e-6, .x = streams(x),
        .phi = weft_dense3(phi, WEFT_F32, GATES, N, C), .sub_weight = weft_dense1(sub_weight, WEFT_F32, C),
        .alpha = weft_dense1(alpha, WEFT_F32, 3), .beta = weft_dense1(beta, WEFT_F32, GATES), .h = rows(h, GATES),
        .ms = weft_dense1(ms, WEFT_F32, T), .d_v = rows(d_v, C), .d_post = rows(d_post, N), .d_res = mix(d_res),
        .d_x = {streams(d_x), 1}, /* 1: added to what came past the sub-layer */
        .d_phi = {weft_dense3(d_phi, WEFT_F32, GATES, N, C), 0}, .d_alpha = {weft_dense1(d_alpha, WEFT_F32, 3), 0},
        .d_beta = {weft_dense1(d_beta, WEFT_F32, GATES), 0},
        .d_sub_weight = {weft_dense1(d_sub_weight, WEFT_F32, C), 0});
    must(weft_mhc_pre_bwd_workspace(&exec, in, &bytes));
    reserve(bytes);
    must(weft_mhc_pre_bwd(&exec, in));
}

static float uniform(void) /* -1 to 1 */
{
    return 2 * (float)rand() / (float)RAND_MAX - 1;
}

/* The derivative in a random direction. Its size is that of the gradient by sqrt(count); the curvature of a step and the rounding
 * of f32 leave less than a hundredth of that between the two, and a gradient that lacks a part is off by more. */
static int agrees(const char *name, float *values, const float *gradient, int count)
{
    static float before[T * N * C], direction[T * N * C];
    double size = 0, length = 0, expected = 0, loss[2];
    for (int i = 0; i < count; i++) {
        direction[i] = uniform();
        length += (double)direction[i] * (double)direction[i];
        size += (double)gradient[i] * (double)gradient[i];
        expected += (double)gradient[i] * (double)direction[i];
    }
    expected /= sqrt(length);
    memcpy(before, values, (size_t)count * sizeof *values);
    for (int side = 0; side < 2; side++) {
        const double step = (side ? 1e-2 : -1e-2) / sqrt(length);
        for (int i = 0; i < count; i++) values[i] = (float)((double)before[i] + step * (double)direction[i]);
        loss[side] = forward();
    }
    memcpy(values, before, (size_t)count * sizeof *values);
    double difference = (loss[1] - loss[0]) / 2e-2;
    int ok = fabs(difference - expected) <= 1e-2 * sqrt(size / count);
    printf("%-10s gradient %.6g, finite difference %.6g%s\n", name, expected, difference,
           ok ? "" : "  <- they differ");
    return ok;
}

int main(void)
{
    exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);
    must(weft_mhc_preset_numerics(WEFT_PRESET_DEEPSEEK_V4, &numerics));
    for (int i = 0; i < T * N * C; i++) x[i] = uniform(), weight[i] = uniform();
    for (int i = 0; i < GATES * N * C; i++) phi[i] = uniform();
    for (int i = 0; i < GATES; i++) beta[i] = uniform();
    for (int i = 0; i < C; i++) sub_weight[i] = 1;
    for (int i = 0; i < 3; i++) alpha[i] = 0.3f;
    printf("loss %.6g\n", forward());
    backward();
    int ok = agrees("x", x, d_x, T * N * C) & agrees("phi", phi, d_phi, GATES * N * C) &
             agrees("alpha", alpha, d_alpha, 3) & agrees("beta", beta, d_beta, GATES) &
             agrees("sub_weight", sub_weight, d_sub_weight, C);
    free(exec.workspace);
    return ok ? 0 : 1;
}
