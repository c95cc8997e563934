// The kernels for CPUs with AVX2, FMA and F16C.
#include "cpu/source/kernel_table.h"

namespace dtcomm {

// This runs on CPUs that lack the instructions this file is compiled for, so it must not use vectors.
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

extern const Kernels kAvx2Kernels;
constexpr Kernels kAvx2Kernels = avx2::kernel_table("avx2", supported);

}  // namespace dtcomm
