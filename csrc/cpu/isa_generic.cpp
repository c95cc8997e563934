// The kernels for any CPU that the compiler's default target runs on.
#include "cpu/source/combine.h"
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
    {generic::measure_grid, generic::put_on_grid, generic::take_off_grid, generic::audit_codes, generic::gather_values,
     generic::scatter_values, generic::settle_owed}};

}  // namespace dtcomm
