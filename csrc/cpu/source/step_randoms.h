// The random numbers of stochastic rounding (codec/counter_rng.h) of a step's elements at once.
#pragma once

#include "codec/counter_rng.h"
#include "cpu/source/bit_planes.h"
#include "cpu/source/stores.h"

#if defined(DTCOMM_VECTORS)

namespace dtcomm::DTCOMM_ISA {

typedef std::uint32_t Randoms __attribute__((vector_size(kVector)));

// The elements of a step whose first index is a multiple of kStep differ in the lowest bits of their indices alone.
// Until the upper half of an index changes, the hash of those bits before the first product is the same in every step:
// their products are made once, and each step adds the product of the other bits.
class StepRandoms {
 public:
  explicit StepRandoms(Stream stream) : stream_(stream) {}

  __attribute__((always_inline)) void start(std::uint32_t index) {
    constexpr std::uint32_t kOwn = kStep - 1;
    if (index & kOwn) {
      for (std::uint32_t p = 0; p < kParts; ++p) {
        Randoms h = lanes_from(index + p * std::uint32_t{kLanes}) ^ stream_.before;
        h ^= h >> 16;
        products_[p] = h * kFactor;
      }
      run_ = 0;
      common_ = stream_.between;
      return;
    }
    const std::uint32_t mixed = index ^ stream_.before, upper = mixed >> 16, all = mixed ^ upper;
    if (run_ != upper + 1) {
      for (std::uint32_t p = 0; p < kParts; ++p) {
        products_[p] = (lanes_from(p * std::uint32_t{kLanes}) ^ (all & kOwn)) * kFactor;
      }
      run_ = upper + 1;
    }
    common_ = (all & ~kOwn) * kFactor + stream_.between;
  }

  // floor(2^16 uniform()) of the elements of one vector of the step: the last step of the hash leaves its upper half.
  __attribute__((always_inline)) Randoms sixteen_bits(std::size_t p) const { return hash(p) >> 16; }

  // uniform() of the same elements.
  __attribute__((always_inline)) Floats part(std::size_t p) const {
    Randoms h = hash(p);
#if defined(__AVX512F__)
    // The upper 24 bits as a number: there is an instruction for unsigned ones.
    const auto word = reinterpret_cast<__m512i>(h), lower = reinterpret_cast<__m512i>(h >> 16);
    const __m512i upper = _mm512_ternarylogic_epi32(word, lower, _mm512_set1_epi32(~0xff), 0x28);  // (1 ^ 2) & 3
    return reinterpret_cast<Floats>(_mm512_maskz_cvtepu32_ps(0xffff, upper)) * 0x1p-32f;
#else
    typedef std::int32_t Signed __attribute__((vector_size(kVector)));
    h = (h ^ h >> 16) >> 8;
    return __builtin_convertvector(reinterpret_cast<Signed>(h), Floats) * 0x1p-24f;
#endif
  }

 private:
  static constexpr std::uint32_t kFactor = 0x7feb352d, kParts = kStep / kLanes;

  __attribute__((always_inline)) Randoms hash(std::size_t p) const {
    Randoms h = products_[p] + common_;
    h ^= h >> 15;
    h *= 0x846ca68bU;
    return h;
  }

  static __attribute__((always_inline)) Randoms lanes_from(std::uint32_t first) {
    Randoms lanes;
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = first + lane;
    return lanes;
  }

  Stream stream_;
  std::uint32_t run_ = 0;  // 1 more than the upper half that the products belong to; 0: there are none
  std::uint32_t common_ = 0;
  Randoms products_[kParts] = {};
};

}  // namespace dtcomm::DTCOMM_ISA

#endif
