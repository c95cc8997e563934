/* One rank of MPI_Allreduce (fp32 sum in place) that waits, blocked in a read, for what to measure next.
 *
 * argv[1] is a folder of named pipes: rank r reads lines "numel warm iters" from in.r and answers each with the
 * seconds a call on out.r; numel 0 ends it. Waiting in MPI itself would keep a core busy while others measure. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

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

static void reduce(float* x, int numel, int calls) {
  for (int i = 0; i < calls; ++i) {
    MPI_Allreduce(MPI_IN_PLACE, x, numel, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (argc != 2) {
    fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  FILE* in = pipe_of(argv[1], "in", rank, "r");
  FILE* out = pipe_of(argv[1], "out", rank, "w");

  float* x = NULL;
  int room = 0, numel, warm, iters;
  while (fscanf(in, "%d %d %d", &numel, &warm, &iters) == 3 && numel > 0) {
    if (numel > room) {
      free(x);
      x = malloc(sizeof(float) * (size_t)numel);
      if (x == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
      room = numel;
    }
    for (int i = 0; i < numel; ++i) x[i] = (float)(rank + 1);
    /* The last of these also starts the ranks together. */
    reduce(x, numel, warm);
    const double start = MPI_Wtime();
    reduce(x, numel, iters);
    fprintf(out, "%.9g\n", (MPI_Wtime() - start) / iters);
    fflush(out);
  }
  free(x);
  MPI_Finalize();
  return 0;
}
