// The kernels for aarch64 CPUs, all of which have NEON. The generic kernels are compiled for NEON too; these use its
// instructions where compilers do not find them.
#include "cpu/source/combine.h"
#include "cpu/source/lossless.h"
#include "cpu/source/low_rank.h"
#include "cpu/source/reproducible.h"
#include "cpu/source/shared_randk.h"

namespace dtcomm {

extern const Kernels kNeonKernels;
const Kernels kNeonKernels{"neon",
                           [] { return true; },
                           neon::combine,
                           neon::decode,
                           {neon::project_rows, neon::project_columns, neon::expand, neon::orthonormalise},
                           {neon::measure_exponents, neon::quantize_to_exponents, neon::dequantize,
                            neon::audit_checksums, neon::gather_values, neon::scatter_values, neon::restore_residual},
                           {neon::encode_lossless, neon::decode_lossless}};

}  // namespace dtcomm
