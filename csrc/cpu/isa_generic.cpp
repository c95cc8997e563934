// The kernels for any CPU that the compiler's default target runs on.
#include "cpu/source/combine.h"
#include "cpu/source/lossless.h"
#include "cpu/source/low_rank.h"
#include "cpu/source/reproducible.h"
#include "cpu/source/shared_randk.h"

namespace dtcomm {

extern const Kernels kGenericKernels;
const Kernels kGenericKernels{
    "generic",
    [] { return true; },
    generic::combine,
    generic::decode,
    {generic::project_rows, generic::project_columns, generic::expand, generic::orthonormalise},
    {generic::measure_exponents, generic::quantize_to_exponents, generic::dequantize, generic::audit_checksums,
     generic::gather_values, generic::scatter_values, generic::restore_residual},
    {generic::encode_lossless, generic::decode_lossless}};

}  // namespace dtcomm
