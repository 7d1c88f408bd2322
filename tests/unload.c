/* SPDX-License-Identifier: Apache-2.0
 *
 * unload <libweft.so>: loads the library, calls it with two threads, closes it, and goes on. A program of its own, because one
 * that is linked against the library cannot close it. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <weft/mhc.h>

enum { TOKENS = 1024, STREAMS = 4, CHANNELS = 32, U = TOKENS * CHANNELS, X = U * STREAMS };
static float u[U], x[X];

static void *must_open(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) fprintf(stderr, "dlopen: %s\n", dlerror());
    return library;
}

/* 0 where the call did what it should. */
static int call(void *library)
{
    weft_status (*expand)(const weft_exec *, const weft_mhc_expand_fwd_args *);
    void *symbol = dlsym(library, "weft_mhc_expand_fwd");
    memcpy(&expand, &symbol, sizeof symbol);
    if (!symbol) return fprintf(stderr, "no weft_mhc_expand_fwd\n");
    memset(x, 0xff, sizeof x);
    const weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU, .threads = 2);
    if (expand(&exec, WEFT_ARGS(weft_mhc_expand_fwd_args, .u = weft_dense2(u, WEFT_F32, TOKENS, CHANNELS),
                                .x = weft_dense3(x, WEFT_F32, TOKENS, STREAMS, CHANNELS))) != WEFT_OK)
        return fprintf(stderr, "weft_mhc_expand_fwd failed\n");
    for (int i = 0; i < X; i++)
        if (x[i] != u[i / (STREAMS * CHANNELS) * CHANNELS + i % CHANNELS]) return fprintf(stderr, "wrong x\n");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 2) return fprintf(stderr, "usage: unload <libweft.so>\n"), 2;
    setenv("OMP_WAIT_POLICY", "active",
           1); /* idle threads of the runtime stay in its code instead of the kernel's */
    for (int i = 0; i < U; i++) u[i] = (float)i;
    for (int round = 0; round < 3; round++) {
        void *library = must_open(argv[1]);
        if (!library || call(library)) return 1;
        if (dlclose(library) != 0) return fprintf(stderr, "dlclose: %s\n", dlerror()), 1;
        void *rest = dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD);
        if (!rest) return fprintf(stderr, "the library is gone, and its threads have no code to run\n"), 1;
        dlclose(rest);
    }
    return 0;
}
