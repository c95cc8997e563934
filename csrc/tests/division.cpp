// The arithmetic that device kernels use in place of divisions gives the bits of the divisions.
#include <cstdio>
#include <cstdlib>

#include "cuda/families/blocks.cuh"

using namespace dtcomm;

int main() {
  // Every float from 0 to Inf below exponent 40, where results may be subnormal, and those of the next exponent: above
  // it nothing but the exponents changes.
  for (const float levels : {127.0f, 7.0f}) {
    for (std::uint32_t bits = 0; bits < 41U << 23; ++bits) {
      const float x = float_of(bits);
      if (bits_of(cuda::divide_exactly(x, levels)) == bits_of(x / levels)) continue;
      std::printf("FAILED: %a / %g\n", static_cast<double>(x), static_cast<double>(levels));
      return EXIT_FAILURE;
    }
  }
  for (std::uint32_t half = 0x0080; half < 0x7e80; ++half) {  // scales are at most the largest float / 7
    const float scale = float_of(half << 16), inverse = 1.0f / scale;
    for (std::uint32_t off = 0; off < 3; ++off) {
      if (cuda::refined_inverse(scale, float_of(bits_of(inverse) + off - 1)) == inverse) continue;
      std::printf("FAILED: 1 / %a\n", static_cast<double>(scale));
      return EXIT_FAILURE;
    }
  }
  return EXIT_SUCCESS;
}
