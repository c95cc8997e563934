// The kernels for CPUs with AVX-512 F, BW, VL and DQ.
#include "cpu/source/combine.h"
#include "cpu/source/lossless.h"
#include "cpu/source/low_rank.h"
#include "cpu/source/reproducible.h"
#include "cpu/source/shared_randk.h"

namespace dtcomm {

// This runs on CPUs that lack the instructions this file is compiled for, so it must not use vectors.
static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels{
    "avx512",
    supported,
    avx512::combine,
    avx512::decode,
    {avx512::project_rows, avx512::project_columns, avx512::expand, avx512::orthonormalise},
    {avx512::measure_exponents, avx512::quantize_to_exponents, avx512::dequantize, avx512::audit_checksums,
     avx512::gather_values, avx512::scatter_values, avx512::restore_residual},
    {avx512::encode_lossless, avx512::decode_lossless}};

}  // namespace dtcomm
