// The fp32 sum of uncompressed terms in one pass, which takes most of the time of an uncompressed all-reduce.
#pragma once

#include "codec/float_bits.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

constexpr int kMaxTerms = 8;

// The outputs of the sum; either may be null. A streamed output is aligned to a cache line.
struct Targets {
  float* first;
  float* second;
  bool stream_first, stream_second;
};

inline __attribute__((always_inline)) void put(float* to, Floats value, bool stream) {
  if (stream) {
    stream_store(to, value);
  } else {
    *reinterpret_cast<UnalignedFloats*>(to) = value;
  }
}

template <int Terms>
inline void sum_lines(const float* const* terms, std::size_t begin, std::size_t end, std::size_t divisor,
                      const Targets& to) {
  const float* in[Terms];
  for (int t = 0; t < Terms; ++t) in[t] = terms[t];
  const Floats by = Floats{} + static_cast<float>(divisor);
  const Floats nan = Floats{} + float_of(kNaN32);
  for (std::size_t i = begin; i < end; i += kLine / sizeof(float)) {
    for (std::size_t j = i; j < i + kLine / sizeof(float); j += kLanes) {
      Floats sum = *reinterpret_cast<const UnalignedFloats*>(in[0] + j);
      for (int t = 1; t < Terms; ++t) sum = sum + *reinterpret_cast<const UnalignedFloats*>(in[t] + j);
      if (divisor != 1) sum = sum / by;
      sum = sum == sum ? sum : nan;
      if (to.first) put(to.first + j, sum, to.stream_first);
      if (to.second) put(to.second + j, sum, to.stream_second);
    }
  }
}

inline void sum_elements(const float* const* terms, int count, std::size_t begin, std::size_t end, std::size_t divisor,
                         const Targets& to) {
  for (std::size_t i = begin; i < end; ++i) {
    float sum = unaligned<float>(terms[0])[i].value;
    for (int t = 1; t < count; ++t) sum = sum + unaligned<float>(terms[t])[i].value;
    if (divisor != 1) sum = sum / static_cast<float>(divisor);
    if (to.first) unaligned<float>(to.first)[i].value = canonical(sum);
    if (to.second) unaligned<float>(to.second)[i].value = canonical(sum);
  }
}

// `count` is 2..8. NaN is made canonical only at the end.
inline void sum_terms(const float* const* terms, int count, std::size_t n, std::size_t divisor, const Targets& to) {
  constexpr std::size_t kStep = kLine / sizeof(float);
  const float* lead = to.stream_first ? to.first : to.stream_second ? to.second : nullptr;
  const std::size_t off = reinterpret_cast<std::uintptr_t>(lead) % kLine;
  const std::size_t head = smaller(off ? (kLine - off) / sizeof(float) : 0, n);
  const std::size_t body = head + (n - head) / kStep * kStep;
  sum_elements(terms, count, 0, head, divisor, to);
  switch (count) {
    case 2:
      sum_lines<2>(terms, head, body, divisor, to);
      break;
    case 3:
      sum_lines<3>(terms, head, body, divisor, to);
      break;
    case 4:
      sum_lines<4>(terms, head, body, divisor, to);
      break;
    case 5:
      sum_lines<5>(terms, head, body, divisor, to);
      break;
    case 6:
      sum_lines<6>(terms, head, body, divisor, to);
      break;
    case 7:
      sum_lines<7>(terms, head, body, divisor, to);
      break;
    default:
      sum_lines<8>(terms, head, body, divisor, to);
      break;
  }
  sum_elements(terms, count, body, n, divisor, to);
}

// Whether both outputs can be streamed together, line by line.
inline bool streams_together(const Targets& to) {
  const auto a = reinterpret_cast<std::uintptr_t>(to.first), b = reinterpret_cast<std::uintptr_t>(to.second);
  if (to.stream_first && a % sizeof(float)) return false;
  if (to.stream_second && b % sizeof(float)) return false;
  return !(to.stream_first && to.stream_second) || a % kLine == b % kLine;
}

}  // namespace dtcomm::DTCOMM_ISA
