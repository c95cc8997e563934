// The kernels for CPUs with AVX2, FMA and F16C.
#include "cpu/source/combine.h"
#include "cpu/source/lowrank.h"

namespace dtcomm {

// Runs on CPUs that lack what this file is compiled for: nothing in it may use a vector.
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels{"avx2",
                           supported,
                           avx2::combine,
                           avx2::decode,
                           {avx2::project_rows, avx2::project_columns, avx2::expand, avx2::orthonormalise}};

}  // namespace dtcomm
