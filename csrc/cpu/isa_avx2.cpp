// The kernels for CPUs with AVX2, FMA and F16C.
#include "cpu/source/combine.h"
#include "cpu/source/lossless.h"
#include "cpu/source/low_rank.h"
#include "cpu/source/reproducible.h"
#include "cpu/source/shared_randk.h"

namespace dtcomm {

// This runs on CPUs that lack the instructions this file is compiled for, so it must not use vectors.
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels{"avx2",
                           supported,
                           avx2::combine,
                           avx2::decode,
                           {avx2::project_rows, avx2::project_columns, avx2::expand, avx2::orthonormalise},
                           {avx2::measure_exponents, avx2::quantize_to_exponents, avx2::dequantize,
                            avx2::audit_checksums, avx2::gather_values, avx2::scatter_values, avx2::restore_residual},
                           {avx2::encode_lossless, avx2::decode_lossless}};

}  // namespace dtcomm
