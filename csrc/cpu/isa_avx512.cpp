// The kernels for CPUs with AVX-512 F, BW, VL and DQ.
#include "cpu/source/kernel_table.h"

namespace dtcomm {

// This runs on CPUs that lack the instructions this file is compiled for, so it must not use vectors.
static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

extern const Kernels kAvx512Kernels;
constexpr Kernels kAvx512Kernels = avx512::kernel_table("avx512", supported);

}  // namespace dtcomm
