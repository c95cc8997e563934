// The kernels for CPUs with AVX-512 F, BW, VL and DQ.
#include "cpu/source/combine.h"
#include "cpu/source/low_rank.h"
#include "cpu/source/reproducible.h"
#include "cpu/source/shared_randk.h"

namespace dtcomm {

// Runs on CPUs that lack what this file is compiled for: nothing in it may use a vector.
static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels{"avx512",
                             supported,
                             avx512::combine,
                             avx512::decode,
                             {avx512::project_rows, avx512::project_columns, avx512::expand, avx512::orthonormalise},
                             {avx512::measure_grid, avx512::put_on_grid, avx512::take_off_grid, avx512::audit_codes,
                              avx512::gather_values, avx512::scatter_values, avx512::settle_owed}};

}  // namespace dtcomm
