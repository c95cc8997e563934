// The kernels for any CPU that the compiler's default target runs on.
#include "cpu/source/combine.h"
#include "cpu/source/lowrank.h"

namespace dtcomm {

extern const Kernels kGenericKernels;
const Kernels kGenericKernels{
    "generic",
    [] { return true; },
    generic::combine,
    generic::decode,
    {generic::project_rows, generic::project_columns, generic::expand, generic::orthonormalise}};

}  // namespace dtcomm
