/* SPDX-License-Identifier: Apache-2.0
 *
 * `weft info`: what this build is, what this machine gives it, which operators and presets there are. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <weft/blas.h>
#include <weft/mhc.h>
#include <weft/ops.h>

#include "check/device.h"
#include "check/parallel.h"
#include "commands.h"
#include "common/options.h"

/* The value behind "key : value" of the first processor, in `text`; "" where the system does not say. */
static void cpu_field(const char *key, char *text, size_t size)
{
    FILE *file = fopen("/proc/cpuinfo", "r");
    static char row[8192];
    text[0] = 0;
    while (file && !text[0] && fgets(row, sizeof row, file)) {
        char *colon = strchr(row, ':');
        if (strncmp(row, key, strlen(key)) || !colon) continue;
        row[strcspn(row, "\n")] = 0;
        snprintf(text, size, "%s", colon + 1 + strspn(colon + 1, " "));
    }
    if (file) fclose(file);
}

static void print_cpu(void)
{
    static const char *const wanted[] = {"f16c",     "fma",      "avx2",        "avx512f",     "avx512bw",
                                         "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_tile",
                                         "amx_bf16", "asimd",    "sve"};
    char text[4096];
    cpu_field("model name", text, sizeof text);
    printf("processor     %s\n", text[0] ? text : "unknown");
    cpu_field("flags", text, sizeof text);
    if (!text[0]) cpu_field("Features", text, sizeof text);
    printf("features     ");
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " "))
        for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
            if (!strcmp(word, wanted[i])) printf(" %s", word);
    printf("\ninstructions  %s\n", weft_isa_name(weft_cpu_isa()));
    printf("threads       %d%s\n", parallel_threads(),
#ifdef _OPENMP
           " (OpenMP)"
#else
           " (no OpenMP in this build)"
#endif
    );
}

static void print_backends(void)
{
    printf("backends     ");
    for (int b = WEFT_BACKEND_REF; b <= WEFT_BACKEND_CUDA; b++)
        printf(" %s%s", weft_backend_name((weft_backend)b),
               weft_backend_available((weft_backend)b) ? "" : " (not available)");
    printf("\n");
}

static void print_blas(void)
{
    weft_blas blas;
    int found = weft_blas_open(NULL, &blas) == WEFT_OK;
    printf("blas          %s\n", found ? blas.name : "none: training uses the built-in loop, which is slow");
    weft_blas_close(&blas);
}

static void print_gpus(void)
{
    char versions[80];
    device_facts f;
    if (!device_built()) {
        printf("cuda          not part of this build\n");
        return;
    }
    device_versions(versions, sizeof versions);
    printf("cuda          compiled for %s; %s\n", device_architectures(), versions);
    for (int i = 0; i < device_count(); i++)
        if (device_facts_of(i, &f))
            printf("gpu %-9d %s, compute capability %d.%d, %d multiprocessors, %.1f GiB, L2 %.0f MiB\n", i, f.name,
                   f.major, f.minor, f.sms, (double)f.memory * 0x1p-30, (double)f.l2 * 0x1p-20);
    if (!device_count()) printf("gpu           none on this machine\n");
}

/* One line per stem, with the directions it has. */
static void print_operators(void)
{
    printf("\noperators\n");
    for (int32_t i = 0; i < weft_op_count(); i++) {
        const char *name = weft_op_at(i)->name, *tail = strrchr(name, '_');
        int stem = (int)(tail - name);
        const char *next = i + 1 < weft_op_count() ? weft_op_at(i + 1)->name : "";
        int both = !strncmp(next, name, (size_t)stem + 1);
        printf("  %-15.*s%s%s\n", stem, name, tail + 1, both ? " bwd" : "");
        i += both;
    }
}

static void print_presets(void)
{
    static const char *const rules[] = {"log", "softmax_eps", "clamp", "add", "threshold"};
    printf(
        "\npresets              rms eps           pre eps  post  post eps  sinkhorn                     apply\n");
    for (int p = 0; p < WEFT_PRESET_COUNT; p++) {
        weft_mhc_numerics n;
        char sinkhorn[64], rms[64];
        if (weft_mhc_preset_numerics((weft_mhc_preset)p, &n) != WEFT_OK) continue;
        snprintf(rms, sizeof rms, "%.3g %s", n.rms_eps, n.rms_eps_kind == WEFT_EPS_INSIDE ? "inside" : "outside");
        const int independent = p == WEFT_PRESET_HY_V4;
        snprintf(sinkhorn, sizeof sinkhorn, "%s %.3g, %d times", rules[n.sinkhorn], n.sinkhorn_eps,
                 (int)n.sinkhorn_iters);
        printf("  %-18s %-17s %-8.3g %-5.3g %-9.3g %-28s %s\n", weft_mhc_preset_name((weft_mhc_preset)p), rms,
               n.pre_eps, n.post_mult, n.post_eps, independent ? "no residual mix" : sinkhorn,
               independent                    ? "-"
               : n.apply == WEFT_APPLY_IN_OUT ? "in_out"
                                              : "out_in");
    }
}

int command_info(int argc, char **argv)
{
    const option options[] = {{0}};
    int stop = options_parse(argc, argv, options);
    if (stop >= 0) return stop;
    printf("weft          %s\n", weft_version());
    printf("compiler      %s\n",
#if defined(__clang__)
           __VERSION__
#elif defined(__GNUC__)
           "gcc " __VERSION__
#else
           "unknown"
#endif
    );
    print_cpu();
    print_backends();
    print_gpus();
    print_blas();
    print_operators();
    print_presets();
    return EXIT_PASSED;
}
