// The kernels for CPUs with AVX-512 VBMI and VBMI2 besides what those of isa_avx512.cpp need: Ice Lake, Zen 4 and later
// ones.
#include "cpu/source/kernel_table.h"

namespace dtcomm {

// This runs on CPUs that lack the instructions this file is compiled for, so it must not use vectors.
static bool supported() {
  return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

extern const Kernels kAvx512VbmiKernels;
constexpr Kernels kAvx512VbmiKernels = avx512vbmi::kernel_table("avx512vbmi", supported);

}  // namespace dtcomm
