// The same bytes whatever the calling thread did to its floating-point unit (torch.set_flush_denormal, fesetround).
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dtcomm::DTCOMM_ISA {

class Environment {
 public:
#if defined(__x86_64__)
  Environment() : saved_(_mm_getcsr()) {
    // Flags are not control bits: most calls find round-to-nearest with all exceptions masked and change nothing.
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~Environment() {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kFlags = 0x3f, kDefault = 0x1f80;
  unsigned saved_;
#else
  Environment() {}
#endif

 public:
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
};

}  // namespace dtcomm::DTCOMM_ISA
