/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads a BLAS on first use. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <weft/blas.h>

#include "core/backend.h"
#include "core/struct_size.h"

/* A function from a library: dlsym returns an object pointer, which C does not convert. */
static int find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

weft_status weft_blas_open(const char *path, weft_blas *blas)
{
    static const char *const known[] = {"libopenblas.so.0", "libopenblas.so", "libcblas.so.3", "libblas.so.3",
                                        NULL};
    const char *const asked[] = {path, NULL};
    weft_clear_error();
    if (!blas) return weft_fail(WEFT_ERR_ARGUMENT, "blas_open: blas: expected a pointer, got NULL");
    *blas = (weft_blas){0};
    for (const char *const *name = path ? asked : known; *name; name++) {
        char *(*config)(void);
        void (*set_threads)(int);
        void *library = dlopen(*name, RTLD_NOW | RTLD_LOCAL);
        if (!library) continue;
        if (!find(library, "cblas_sgemm", &blas->sgemm) || !find(library, "cblas_dgemm", &blas->dgemm)) {
            dlclose(library);
            continue;
        }
        if (find(library, "openblas_set_num_threads", &set_threads)) set_threads(1);
        blas->library = library;
        snprintf(blas->name, sizeof blas->name, "%s%s%s", *name,
                 find(library, "openblas_get_config", &config) ? ", " : "",
                 find(library, "openblas_get_config", &config) ? config() : "");
        blas->name[strcspn(blas->name, "\n")] = 0;
        return WEFT_OK;
    }
    *blas = (weft_blas){0};
    return weft_fail(WEFT_ERR_UNSUPPORTED,
                     "blas_open: expected a library with cblas_sgemm and cblas_dgemm, got none%s%s",
                     path ? " in " : " (Debian: libopenblas0)", path ? path : "");
}

weft_status weft_blas_open_for(const weft_exec *exec, const char *path, weft_blas *blas)
{
    weft_exec copy;
    weft_clear_error();
    WEFT_TRY(weft_take_exec("blas_open", exec, &copy, &exec));
    const weft_backend_table *backend = weft_backend_of(exec->backend);
    if (backend && !backend->blas_open) return weft_blas_open(path, blas);
    if (!blas) return weft_fail(WEFT_ERR_ARGUMENT, "blas_open: blas: expected a pointer, got NULL");
    *blas = (weft_blas){0};
    if (!backend)
        return weft_fail(WEFT_ERR_UNSUPPORTED, "blas_open: exec.backend: expected a backend of this build, got %s",
                         weft_backend_name(exec->backend));
    return backend->blas_open(exec, path, blas);
}

void weft_blas_close(weft_blas *blas)
{
    if (blas && blas->device) ((weft_blas_device *)blas->device)->close(blas);
    if (blas && blas->library) dlclose(blas->library);
    if (blas) *blas = (weft_blas){0};
}
