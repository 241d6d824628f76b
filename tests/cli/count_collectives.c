/* Counts calls of MPI's collectives, and the bytes of Allreduce, between a program and its MPI library.

   Compiled by a test, linked to the library that mpi4py loads, and preloaded. Arguments pass through as machine words,
   for handles of any MPI (integers in MPICH, pointers in Open MPI), so no header of any MPI is needed: on
   x86-64 and AArch64 an integer and a pointer travel alike, and words beyond a function's own are ignored by it. */

#include <stdint.h>
#include <stdio.h>

typedef intptr_t word;

#ifdef LARGE_COUNTS /* the library has MPI 4's functions for counts beyond an int */
#define LARGE_COLLECTIVES(X) \
    X(Bcast_c) X(Reduce_c) X(Allgather_c) X(Allgatherv_c) X(Gather_c) X(Gatherv_c) X(Alltoall_c) X(Ibcast_c) X(Send_c)
#define LARGE_REDUCTIONS(X) X(Allreduce_c, int64_t) X(Iallreduce_c, int64_t)
#else
#define LARGE_COLLECTIVES(X)
#define LARGE_REDUCTIONS(X)
#endif

#define COLLECTIVES(X) \
    X(Allgather) X(Allgatherv) X(Alltoall) X(Alltoallv) X(Barrier) X(Bcast) X(Exscan) X(Gather) X(Gatherv) \
    X(Iallgather) X(Ialltoall) X(Ibarrier) X(Ibcast) X(Igather) X(Ireduce) X(Reduce) X(Reduce_scatter) \
    X(Reduce_scatter_block) X(Scan) X(Scatter) X(Scatterv) X(Send) X(Isend) X(Sendrecv) X(Put) X(Get) X(Accumulate) \
    LARGE_COLLECTIVES(X)
#define REDUCTIONS(X) X(Allreduce, int) X(Iallreduce, int) LARGE_REDUCTIONS(X)

extern int PMPI_Type_size(word datatype, int *size);

#define DEFINE(NAME) \
    static long calls_##NAME; \
    extern int PMPI_##NAME(word, word, word, word, word, word, word, word, word, word, word, word); \
    int MPI_##NAME(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k, word l) \
    { \
        calls_##NAME++; \
        return PMPI_##NAME(a, b, c, d, e, f, g, h, i, j, k, l); \
    }
COLLECTIVES(DEFINE)

#define DEFINE_REDUCTION(NAME, COUNT) \
    static long calls_##NAME; \
    static long long bytes_##NAME; \
    extern int PMPI_##NAME(word, word, COUNT, word, word, word, word); \
    int MPI_##NAME(word from, word to, COUNT count, word datatype, word op, word comm, word request) \
    { \
        int size = 0; \
        PMPI_Type_size(datatype, &size); \
        calls_##NAME++; \
        bytes_##NAME += (long long)count * size; \
        return PMPI_##NAME(from, to, count, datatype, op, comm, request); \
    }
REDUCTIONS(DEFINE_REDUCTION)

/* Write "name calls bytes" lines to a new file, and start counting anew. */
void count_collectives(const char *path)
{
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        return;
    }
#define PRINT(NAME) \
    fprintf(file, #NAME " %ld 0\n", calls_##NAME); \
    calls_##NAME = 0;
    COLLECTIVES(PRINT)
#define PRINT_REDUCTION(NAME, COUNT) \
    fprintf(file, #NAME " %ld %lld\n", calls_##NAME, bytes_##NAME); \
    calls_##NAME = bytes_##NAME = 0;
    REDUCTIONS(PRINT_REDUCTION)
    fclose(file);
}
