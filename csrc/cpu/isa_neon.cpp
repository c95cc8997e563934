// The kernels for aarch64 CPUs, all of which have NEON. The generic kernels are compiled for NEON too; these use its
// instructions where compilers do not find them.
#include "cpu/source/kernel_table.h"

namespace dtcomm {

extern const Kernels kNeonKernels;
constexpr Kernels kNeonKernels = neon::kernel_table("neon", [] { return true; });

}  // namespace dtcomm
