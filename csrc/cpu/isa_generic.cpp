// The kernels for any CPU that the compiler's default target runs on.
#include "cpu/source/combine.h"

namespace dtcomm {

extern const Kernels kGenericKernels;
const Kernels kGenericKernels{"generic", [] { return true; }, generic::combine, generic::decode};

}  // namespace dtcomm
