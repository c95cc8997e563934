/* One rank of an MPI program that waits, blocked in a read, for what to measure next.
 *
 * argv[1] is a folder of named pipes: rank r reads lines "collective numel type op root warm iters each" from in.r
 * and answers each with a line on out.r: the seconds a call, or with each = 1 the seconds of every call. numel counts
 * one shard where there are shards; numel < 0 ends it. Waiting in MPI itself would keep a core busy while others
 * measure. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  const char* name;
  MPI_Datatype type;
  int size;
} Type;

static FILE* pipe_of(const char* folder, const char* name, int rank, const char* mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.%d", folder, name, rank);
  FILE* file = fopen(path, mode);
  if (file == NULL) {
    perror(path);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return file;
}

/* "pingpong": ranks 2k and 2k + 1 send each other a message by turns; a call is the way there and back. */
static void pingpong(char* out, char* in, int n, MPI_Datatype type, int rank, int ranks) {
  const int peer = rank ^ 1;
  if (peer >= ranks) return;
  if (rank % 2 == 0) {
    MPI_Send(in, n, type, peer, 0, MPI_COMM_WORLD);
    MPI_Recv(out, n, type, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  } else {
    MPI_Recv(out, n, type, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Send(in, n, type, peer, 0, MPI_COMM_WORLD);
  }
}

static int run(const char* what, char* out, char* in, int n, MPI_Datatype type, MPI_Op op, int root, int rank,
               int ranks) {
  const MPI_Comm all = MPI_COMM_WORLD;
  if (!strcmp(what, "all_reduce")) {
    MPI_Allreduce(MPI_IN_PLACE, out, n, type, op, all);
  } else if (!strcmp(what, "reduce_scatter")) {
    MPI_Reduce_scatter_block(in, out, n, type, op, all);
  } else if (!strcmp(what, "all_gather")) {
    MPI_Allgather(in, n, type, out, n, type, all);
  } else if (!strcmp(what, "broadcast")) {
    MPI_Bcast(out, n, type, root, all);
  } else if (!strcmp(what, "reduce")) {
    MPI_Reduce(rank == root ? MPI_IN_PLACE : out, out, n, type, op, root, all);
  } else if (!strcmp(what, "gather")) {
    MPI_Gather(in, n, type, out, n, type, root, all);
  } else if (!strcmp(what, "scatter")) {
    MPI_Scatter(in, n, type, out, n, type, root, all);
  } else if (!strcmp(what, "all_to_all")) {
    MPI_Alltoall(in, n, type, out, n, type, all);
  } else if (!strcmp(what, "sendrecv")) { /* every rank to the next */
    MPI_Sendrecv(in, n, type, (rank + 1) % ranks, 0, out, n, type, (rank + ranks - 1) % ranks, 0, all,
                 MPI_STATUS_IGNORE);
  } else if (!strcmp(what, "pingpong")) {
    pingpong(out, in, n, type, rank, ranks);
  } else {
    return 0;
  }
  return 1;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc != 2) {
    fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  FILE* in = pipe_of(argv[1], "in", rank, "r");
  FILE* out = pipe_of(argv[1], "out", rank, "w");
  const Type types[] = {{"float", MPI_FLOAT, 4},  {"double", MPI_DOUBLE, 8},   {"int32", MPI_INT32_T, 4},
                        {"int64", MPI_INT64_T, 8}, {"uint8", MPI_UINT8_T, 1}, {"int8", MPI_INT8_T, 1}};

  char *x = NULL, *y = NULL;
  double* times = NULL;
  size_t room = 0;
  char what[32], type_name[16], op_name[16];
  int numel, root, warm, iters, each;
  while (fscanf(in, "%31s %d %15s %15s %d %d %d %d", what, &numel, type_name, op_name, &root, &warm, &iters, &each) ==
             8 &&
         numel >= 0) {
    const Type* type = NULL;
    for (size_t i = 0; i < sizeof types / sizeof *types; ++i) {
      if (!strcmp(types[i].name, type_name)) type = types + i;
    }
    if (type == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
    const MPI_Op op = !strcmp(op_name, "max") ? MPI_MAX : !strcmp(op_name, "min") ? MPI_MIN : MPI_SUM;
    const size_t bytes = (size_t)numel * (size_t)ranks * (size_t)type->size + 1;
    if (bytes > room) {
      free(x);
      free(y);
      x = malloc(bytes);
      y = malloc(bytes);
      if (x == NULL || y == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
      room = bytes;
    }
    memset(x, 0, bytes);
    memset(y, 0, bytes);
    times = realloc(times, sizeof(double) * (size_t)(iters + 1));
    for (int i = 0; i < warm; ++i) {
      if (!run(what, x, y, numel, type->type, op, root, rank, ranks)) MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    run(what, x, y, numel, type->type, op, root, rank, ranks); /* this one starts the ranks together */
    times[0] = MPI_Wtime();
    for (int i = 1; i <= iters; ++i) {
      run(what, x, y, numel, type->type, op, root, rank, ranks);
      if (each || i == iters) times[i] = MPI_Wtime();
    }
    if (each) {
      for (int i = 1; i <= iters; ++i) fprintf(out, "%.9g%c", times[i] - times[i - 1], i == iters ? '\n' : ' ');
    } else {
      fprintf(out, "%.9g\n", (times[iters] - times[0]) / iters);
    }
    fflush(out);
  }
  free(x);
  free(y);
  free(times);
  MPI_Finalize();
  return 0;
}
