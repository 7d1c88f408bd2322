/* SPDX-License-Identifier: Apache-2.0
 *
 * As much of MPI as examples/gdn_pieces_mpi.c uses, with Open MPI's names of the handles: for machines that have its library but
 * not its headers. */
#ifndef WEFT_TESTS_MPI_H
#define WEFT_TESTS_MPI_H

#include <stddef.h>

typedef struct ompi_communicator_t *MPI_Comm;
typedef struct ompi_datatype_t *MPI_Datatype;
typedef struct ompi_status_public_t MPI_Status;

extern struct ompi_predefined_communicator_t ompi_mpi_comm_world;
extern struct ompi_predefined_datatype_t ompi_mpi_float, ompi_mpi_int64_t;

#define MPI_COMM_WORLD ((MPI_Comm)(void *)&ompi_mpi_comm_world)
#define MPI_FLOAT ((MPI_Datatype)(void *)&ompi_mpi_float)
#define MPI_INT64_T ((MPI_Datatype)(void *)&ompi_mpi_int64_t)
#define MPI_PROC_NULL (-2)
#define MPI_STATUS_IGNORE ((MPI_Status *)NULL)

int MPI_Init(int *argc, char ***argv);
int MPI_Finalize(void);
int MPI_Abort(MPI_Comm comm, int code);
int MPI_Comm_rank(MPI_Comm comm, int *rank);
int MPI_Comm_size(MPI_Comm comm, int *size);
int MPI_Send(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm);
int MPI_Recv(void *data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Status *status);
int MPI_Sendrecv(const void *data, int count, MPI_Datatype type, int to, int tag, void *into, int most,
                 MPI_Datatype type_into, int from, int tag_from, MPI_Comm comm, MPI_Status *status);
int MPI_Allgather(const void *mine, int count, MPI_Datatype type, void *all, int each, MPI_Datatype type_each,
                  MPI_Comm comm);

#endif
