// Sets the floating-point environment for the length of a call, so that results do not depend on what the calling
// thread did to it (torch.set_flush_denormal, fesetround).
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dtcomm::DTCOMM_ISA {

class ScopedFpEnv {
 public:
#if defined(__x86_64__)
  ScopedFpEnv() : saved_(_mm_getcsr()) {
    // Flags are not control bits: most calls find round-to-nearest with all exceptions masked and change nothing.
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~ScopedFpEnv() {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kFlags = 0x3f, kDefault = 0x1f80;
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedFpEnv() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    // Zero: round to nearest, keep subnormals, keep payloads of NaN, trap nothing.
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}) : "memory");
  }
  ~ScopedFpEnv() {
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory");
  }

 private:
  std::uint64_t saved_;
#else
  ScopedFpEnv() {}
#endif

 public:
  ScopedFpEnv(const ScopedFpEnv&) = delete;
  ScopedFpEnv& operator=(const ScopedFpEnv&) = delete;
};

}  // namespace dtcomm::DTCOMM_ISA
