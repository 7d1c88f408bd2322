/* SPDX-License-Identifier: Apache-2.0
 *
 * MPI's handles are objects of the library in Open MPI, so they can be looked up by name like its functions and no header is
 * needed. */
#include "train/ranks.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int find(void *library, const char *name, void *to)
{
    void *symbol = dlsym(library, name);
    memcpy(to, &symbol, sizeof symbol);
    return symbol != NULL;
}

static int number_of(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

int ranks_open(ranks *r, char *error, size_t size)
{
    static const char *const names[] = {"libmpi.so.40", "libmpi.so", NULL};
    const char *started = getenv("OMPI_COMM_WORLD_SIZE");
    int (*init)(int *, char ***), (*get_rank)(void *, int *), (*get_size)(void *, int *);
    *r = (ranks){.count = 1, .locals = 1};
    r->started = started != NULL;
    if (!started || atoi(started) < 2) return 1;
    /* Open MPI's plugins look for its symbols among the global ones. */
    for (int i = 0; names[i] && !r->library; i++) r->library = dlopen(names[i], RTLD_NOW | RTLD_GLOBAL);
    if (!r->library) {
        snprintf(error, size, "started by mpirun, but there is no Open MPI library: %s", dlerror());
        return 0;
    }
    void *mpi = r->library;
    if (!find(mpi, "ompi_mpi_comm_world", &r->world) || !find(mpi, "ompi_mpi_float", &r->type_float) ||
        !find(mpi, "ompi_mpi_double", &r->type_double) || !find(mpi, "ompi_mpi_byte", &r->type_byte) ||
        !find(mpi, "MPI_Bcast", &r->broadcast) || !find(mpi, "ompi_mpi_op_sum", &r->sum) ||
        !find(mpi, "MPI_Allreduce", &r->allreduce) || !find(mpi, "MPI_Allgather", &r->allgather) ||
        !find(mpi, "MPI_Finalize", &r->finalize) || !find(mpi, "MPI_Abort", &r->abort) ||
        !find(mpi, "MPI_Init", &init) || !find(mpi, "MPI_Comm_rank", &get_rank) ||
        !find(mpi, "MPI_Comm_size", &get_size)) {
        snprintf(error, size, "the MPI library is not Open MPI's");
        return 0;
    }
    if (init(NULL, NULL) || get_rank(r->world, &r->rank) || get_size(r->world, &r->count)) {
        snprintf(error, size, "MPI_Init failed");
        return 0;
    }
    r->local = number_of("OMPI_COMM_WORLD_LOCAL_RANK", r->rank);
    r->locals = number_of("OMPI_COMM_WORLD_LOCAL_SIZE", r->count);
    return 1;
}

void ranks_close(ranks *r)
{
    if (r->library) r->finalize();
    r->library = NULL;
}

int ranks_sum(const ranks *r, float *values, int64_t count)
{
    void *in_place = (void *)1; /* MPI_IN_PLACE */
    for (int64_t at = 0; r->library && at < count;) {
        int part = (int)(count - at < 1 << 24 ? count - at : 1 << 24);
        if (r->allreduce(in_place, values + at, part, r->type_float, r->sum, r->world)) return 0;
        at += part;
    }
    return 1;
}

int ranks_sum_double(const ranks *r, double *values, int count)
{
    return !r->library || !r->allreduce((void *)1, values, count, r->type_double, r->sum, r->world);
}

int ranks_share(const ranks *r, void *data, int bytes)
{
    return !r->library || !r->broadcast(data, bytes, r->type_byte, 0, r->world);
}

int ranks_gather(const ranks *r, const void *mine, void *all, int bytes)
{
    if (r->library) return !r->allgather(mine, bytes, r->type_byte, all, bytes, r->type_byte, r->world);
    memcpy(all, mine, (size_t)bytes);
    return 1;
}

int ranks_all(const ranks *r, int mine)
{
    double yes = mine ? 1 : 0;
    return ranks_sum_double(r, &yes, 1) && (int)yes == r->count;
}

void ranks_abort(const ranks *r, int code)
{
    if (r->library) r->abort(r->world, code);
}
