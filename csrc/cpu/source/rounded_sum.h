// Correctly rounded sums (`exact:rounded=true`): floats to digits of integers, and sums of digits to floats. It has the
// passes over tensors of a collective whose ranks agree on the range of bits of each block (LocalKernels).
#pragma once

#include "codec/reproducible.h"
#include "cpu/kernels.h"
#include "cpu/source/reproducible.h"

namespace dtcomm::DTCOMM_ISA {

#if defined(__AVX512F__)
inline __attribute__((always_inline)) Integers integers_toward_zero(Floats t) {
  return _mm512_maskz_cvttps_epi32(0xffff, reinterpret_cast<__m512>(t));
}
#elif defined(__AVX2__)
inline __attribute__((always_inline)) Integers integers_toward_zero(Floats t) {
  return _mm256_cvttps_epi32(reinterpret_cast<__m256>(t));
}
#elif defined(DTCOMM_NEON)
inline __attribute__((always_inline)) Integers integers_toward_zero(Floats t) { return vcvtq_s32_f32(t); }
#endif

// The largest magnitude of a block, and a bound of the position of its lowest bit: that of the smallest magnitude's
// last bit, above which there are as many zeros as all elements have at their end. Elements that are not finite count
// as zeros with `finite_only`; else they make the block one of kNaNBlock.
inline void measure_digits(const Contribution& from, std::size_t block, bool finite_only, std::uint8_t* tops,
                           std::uint8_t* lows) {
  const ScopedFpEnv environment;
  const std::uint32_t limit = finite_only ? kInfinity32 : 0xffffffff;
  each_span(from, [&](const float* x, std::size_t at, std::size_t n) {
    for (std::size_t i = 0; i < n; i += block) {
      const std::size_t count = smaller(block, n - i);
      const auto* in = unaligned<std::uint32_t>(x + i);
      std::uint32_t top = 0, smallest = 0xffffffff, fractions = 0;
      DTCOMM_INDEPENDENT
      for (std::size_t j = 0; j < count; ++j) {
        const std::uint32_t bits = in[j].value & 0x7fffffff;
        const std::uint32_t size = bits < limit ? bits : 0;
        const std::uint32_t before = size - 1;  // zeros are the largest
        top = size > top ? size : top;
        smallest = before < smallest ? before : smallest;
        fractions |= size;
      }
      tops[(at + i) / block] = exponent_of(top);
      lows[(at + i) / block] = low_of(top, smallest + 1, fractions);
    }
  });
}

// x of a block of class BlockClass::narrow or BlockClass::middle: digits of `bits` bits, and what is above them, if
// there is room for it.
inline void put_two_digits(const float* x, std::size_t n, int position, int bits, std::int32_t* first,
                           std::int16_t* second) {
  const auto* in = unaligned<float>(x);
  std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
  // Exact in fp32: a product with a power of two, the part of a float before the point, and what is behind it.
  if (fits_fp32(position) && fits_fp32(position + bits)) {
    const auto per_second = static_cast<float>(power_of_two(-position - bits));
    const auto base = static_cast<float>(power_of_two(bits)), per_first = static_cast<float>(power_of_two(-position));
    for (; i + kLanes <= n; i += kLanes) {
      if (second == nullptr) {
        store_integers(integers_toward_zero(load(x + i) * per_first), first + i);
        continue;
      }
      const Floats scaled = load(x + i) * per_second;
      const Integers above = integers_toward_zero(scaled);
      store_integers(above, second + i);
      store_integers(integers_toward_zero((scaled - floats_of_integers(above)) * base), first + i);
    }
  }
#endif
  const double per_unit = power_of_two(-position);
  for (; i < n; ++i) {
    const auto value = static_cast<std::int64_t>(static_cast<double>(in[i].value) * per_unit);
    const std::int64_t above = value / (std::int64_t{1} << bits);  // toward zero; 0 if there is no second digit
    first[i] = static_cast<std::int32_t>(value - above * (std::int64_t{1} << bits));
    if (second) second[i] = static_cast<std::int16_t>(above);
  }
}

// `planes` integers of each element, plane after plane; the first of them in `first`, the others in `wide`.
inline void put_digits(const float* x, std::size_t n, int position, int bits, std::size_t planes, std::size_t block,
                       std::int32_t* first, std::int32_t* wide) {
  const auto* in = unaligned<float>(x);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t size = magnitude(in[i].value), exponent = size >> 23;
    const std::uint32_t mantissa = (size & 0x7fffff) | (exponent ? 0x800000 : 0);
    const int shift = static_cast<int>(exponent ? exponent : 1) - 150 - position;
    const bool negative = bits_of(in[i].value) >> 31;
    for (std::size_t k = 0; k < planes; ++k) {
      const auto digit = static_cast<std::int32_t>(
          size < kInfinity32 ? digits_at(mantissa, shift, static_cast<int>(k) * bits, bits) : 0);
      (k == 0 ? first[i] : wide[(k - 1) * block + i]) = negative ? -digit : digit;
    }
  }
}

// Elements that are not finite become zeros.
inline const float* finite_only(const float* x, std::size_t n, float* scratch) {
  const auto* in = unaligned<float>(x);
  for (std::size_t i = 0; i < n; ++i) scratch[i] = magnitude(in[i].value) < kInfinity32 ? in[i].value : 0.0F;
  return scratch;
}

inline void split_digits(const SumDigits& sum, const Contribution& from, bool finite, std::int32_t* first,
                         std::int16_t* middle, std::int32_t* wide) {
  const ScopedFpEnv environment;
  const int bits = digits_of(32, sum.ranks);
  alignas(kLine) float scratch[kSpan];
  each_span(from, [&](const float* x, std::size_t at, std::size_t n) {
    if (!finite) x = finite_only(x, n, scratch);
    for (std::size_t i = 0; i < n; i += sum.block) {
      const std::size_t count = smaller(sum.block, n - i), b = (at + i) / sum.block;
      const int position = position_of(sum.lows[b]);
      switch (class_of(span_of(sum.tops[b], sum.lows[b]), sum.ranks)) {
        case BlockClass::narrow:
          put_two_digits(x + i, count, position, bits, first + at + i, nullptr);
          break;
        case BlockClass::middle:
          put_two_digits(x + i, count, position, bits, first + at + i, middle);
          __builtin_memset(middle + count, 0, (sum.block - count) * sizeof *middle);
          middle += sum.block;
          break;
        case BlockClass::wide:
          if (count < sum.block) __builtin_memset(wide, 0, sum.wide * sum.block * sizeof *wide);
          put_digits(x + i, count, position, bits, 1 + sum.wide, sum.block, first + at + i, wide);
          wide += sum.wide * sum.block;
      }
    }
  });
}

// Rounds the exact value of a sum of up to 53 binary digits, divided, to fp32; to odd where `narrower` types follow.
inline void round_two_digits(const std::int32_t* first, const std::int16_t* second, std::size_t n, int position,
                             int bits, double divisor, bool narrower, float* to) {
  const double unit = power_of_two(position), base = power_of_two(bits);
  const auto round_all = [&](const auto& value_of) {
    if (narrower) {
      for (std::size_t i = 0; i < n; ++i) to[i] = round_to_odd(value_of(i));
      return;
    }
    DTCOMM_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<float>(value_of(i));
  };
  const auto narrow_sum = [=](std::size_t i) { return static_cast<double>(first[i]) * unit; };
  const auto sum = [=](std::size_t i) {
    return (static_cast<double>(first[i]) + static_cast<double>(second[i]) * base) * unit;
  };
  if (divisor != 1.0) {
    if (second) return round_all([=](std::size_t i) { return sum(i) / divisor; });
    return round_all([=](std::size_t i) { return narrow_sum(i) / divisor; });
  }
  second ? round_all(sum) : round_all(narrow_sum);
}

inline void round_digits(const SumDigits& sum, const std::int32_t* first, const std::int16_t* middle,
                         const std::int32_t* wide, std::size_t numel, std::size_t divisor, DType dtype, void* out) {
  const ScopedFpEnv environment;
  const int bits = digits_of(32, sum.ranks);
  const bool narrower = dtype != DType::f32;
  alignas(kLine) float scratch[kSpan];
  std::int64_t digits[kMostDigits];
  for (std::size_t at = 0; at < numel; at += kSpan) {
    const std::size_t n = smaller(kSpan, numel - at);
    for (std::size_t i = 0; i < n; i += sum.block) {
      const std::size_t count = smaller(sum.block, n - i), b = (at + i) / sum.block;
      const int position = position_of(sum.lows[b]);
      const std::int32_t* const low = first + at + i;
      switch (class_of(span_of(sum.tops[b], sum.lows[b]), sum.ranks)) {
        case BlockClass::narrow:
          round_two_digits(low, nullptr, count, position, bits, static_cast<double>(divisor), narrower, scratch + i);
          break;
        case BlockClass::middle:
          round_two_digits(low, middle, count, position, bits, static_cast<double>(divisor), narrower, scratch + i);
          middle += sum.block;
          break;
        case BlockClass::wide:
          for (std::size_t j = 0; j < count; ++j) {
            digits[0] = low[j];
            for (std::size_t k = 0; k < sum.wide; ++k) digits[k + 1] = wide[k * sum.block + j];
            const double value = value_of_digits(digits, 1 + sum.wide, bits, position, divisor);
            scratch[i + j] = narrower ? round_to_odd(value) : static_cast<float>(value);
          }
          wide += sum.wide * sum.block;
      }
    }
    narrow(dtype, scratch, n, static_cast<std::uint8_t*>(out) + at * size_of(dtype));
  }
}

}  // namespace dtcomm::DTCOMM_ISA
