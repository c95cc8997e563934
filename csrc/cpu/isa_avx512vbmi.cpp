// The kernels for CPUs with AVX-512 VBMI besides what those of isa_avx512.cpp need: Ice Lake, Zen 4 and later ones.
#include "cpu/source/combine.h"
#include "cpu/source/lossless.h"
#include "cpu/source/low_rank.h"
#include "cpu/source/reproducible.h"
#include "cpu/source/shared_randk.h"

namespace dtcomm {

// This runs on CPUs that lack the instructions this file is compiled for, so it must not use vectors.
static bool supported() {
  return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}

extern const Kernels kAvx512VbmiKernels;
const Kernels kAvx512VbmiKernels{
    "avx512vbmi",
    supported,
    avx512vbmi::combine,
    avx512vbmi::decode,
    {avx512vbmi::project_rows, avx512vbmi::project_columns, avx512vbmi::expand, avx512vbmi::orthonormalise},
    {avx512vbmi::measure_exponents, avx512vbmi::quantize_to_exponents, avx512vbmi::dequantize,
     avx512vbmi::audit_checksums, avx512vbmi::gather_values, avx512vbmi::scatter_values, avx512vbmi::restore_residual},
    {avx512vbmi::encode_lossless, avx512vbmi::decode_lossless}};

}  // namespace dtcomm
