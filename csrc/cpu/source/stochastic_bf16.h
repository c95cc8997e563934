// Narrowing a run of floats to bf16 with stochastic rounding.
#pragma once

#include "codec/cast.h"
#include "codec/counter_rng.h"
#include "cpu/source/loops.h"
#include "cpu/source/step_randoms.h"

namespace dtcomm::DTCOMM_ISA {

// stochastic_bf16 (codec/cast.h) of `n` elements; `index` is the index of the first in the caller's tensor.
inline void stochastic_bf16_from_floats(const float* from, std::size_t n, std::uint64_t key, std::uint64_t index,
                                        void* to) {
  const auto* in = unaligned<float>(from);
  auto* out = unaligned<std::uint16_t>(to);
  const bool one_stream = index >> 32 == (index + n) >> 32;
  const Stream stream = make_stream(key, index);
  const auto low = static_cast<std::uint32_t>(index);
  std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
  typedef std::uint16_t Halves __attribute__((vector_size(kVector / 2)));
  StepRandoms randoms(stream);
  for (; one_stream && i + kStep <= n; i += kStep) {
    randoms.start(low + static_cast<std::uint32_t>(i));
#pragma GCC unroll 4
    for (std::size_t p = 0; p < kStep / kLanes; ++p) {
      const auto bits = reinterpret_cast<Randoms>(load(from + i + p * kLanes));
      const Randoms rounded = (bits + randoms.sixteen_bits(p)) >> 16;
      const Randoms nan = Randoms{} + std::uint32_t{kNaNBf16};
      const Randoms words = (bits & 0x7fffffffU) > kInfinity32 ? nan : rounded;
      const Halves halves = __builtin_convertvector(words, Halves);
      __builtin_memcpy(out + i + p * kLanes, &halves, sizeof halves);
    }
  }
#endif
  if (one_stream) {
    DTCOMM_INDEPENDENT
    for (std::size_t j = i; j < n; ++j) {
      out[j].value = stochastic_bf16(in[j].value, uniform(stream, low + static_cast<std::uint32_t>(j)));
    }
    return;
  }
  for (; i < n; ++i) {
    const float random = uniform(make_stream(key, index + i), low + static_cast<std::uint32_t>(i));
    out[i].value = stochastic_bf16(in[i].value, random);
  }
}

}  // namespace dtcomm::DTCOMM_ISA
