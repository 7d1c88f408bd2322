/* SPDX-License-Identifier: Apache-2.0
 *
 * The functions are declared as the library's ABI has them, so that building needs no headers of it. */
#include "train/nccl.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { TYPE_FLOAT = 7, OP_SUM = 0 };

typedef struct unique_id {
    char bytes[128];
} unique_id;

static int find(void *library, const char *name, void *to)
{
    void *symbol = dlsym(library, name);
    memcpy(to, &symbol, sizeof symbol);
    return symbol != NULL;
}

int nccl_open(nccl *n, const ranks *all, char *why, size_t size)
{
    int (*get_id)(unique_id *) = NULL, (*init)(void **, int, unique_id, int) = NULL;
    unique_id id = {{0}};
    *n = (nccl){.library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)};
    int ok = n->library && find(n->library, "ncclGetUniqueId", &get_id) &&
             find(n->library, "ncclCommInitRank", &init) && find(n->library, "ncclAllReduce", &n->allreduce) &&
             find(n->library, "ncclCommDestroy", &n->destroy);
    if (!ranks_all(all, ok)) {
        snprintf(why, size, "there is no libnccl.so.2");
        nccl_close(n);
        return 0;
    }
    if (all->rank == 0) ok = !get_id(&id);
    /* NCCL waits for all processes: none begins where one cannot. */
    ok = ranks_all(all, ok) && ranks_share(all, &id, sizeof id) && !init(&n->comm, all->count, id, all->rank);
    if (ranks_all(all, ok)) return 1;
    snprintf(why, size, "NCCL does not connect the processes");
    nccl_close(n);
    return 0;
}

void nccl_close(nccl *n)
{
    if (n->comm) n->destroy(n->comm);
    if (n->library) dlclose(n->library);
    *n = (nccl){0};
}

int nccl_sum(const nccl *n, float *values, int64_t count, void *stream)
{
    return !n->allreduce(values, values, (size_t)count, TYPE_FLOAT, OP_SUM, n->comm, stream);
}
