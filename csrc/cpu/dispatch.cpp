#include <cstring>

#include "cpu/kernels.h"

namespace dtcomm {

extern const Kernels kGenericKernels;
#if defined(DTCOMM_GENERIC_ONLY)
#elif defined(__x86_64__)
extern const Kernels kAvx512VbmiKernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

const Kernels* const* all_kernels() {
  static const Kernels* const kAll[] = {
#if defined(DTCOMM_GENERIC_ONLY)
#elif defined(__x86_64__)
      &kAvx512VbmiKernels, &kAvx512Kernels, &kAvx2Kernels,
#elif defined(__aarch64__)
      &kNeonKernels,
#endif
      &kGenericKernels, nullptr};
  return kAll;
}

const Kernels* find_kernels(const char* name) {
  for (const Kernels* const* kernels = all_kernels(); *kernels; ++kernels) {
    if (std::strcmp((*kernels)->name, name) == 0) return (*kernels)->supported() ? *kernels : nullptr;
  }
  return nullptr;
}

const Kernels& best_kernels() {
  const Kernels* const* kernels = all_kernels();
  while (!(*kernels)->supported()) ++kernels;  // the last one always is
  return **kernels;
}

}  // namespace dtcomm
