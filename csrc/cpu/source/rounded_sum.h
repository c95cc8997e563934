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

// Calls use(x, elements, index) for the blocks of a contribution; x has kRoundedBlock elements, zeros behind the last.
// Elements that are not finite become zeros unless `finite`.
template <class Use>
inline void each_rounded_block(const Contribution& from, bool finite, const Use& use) {
  alignas(kLine) float scratch[kSpan], last[kRoundedBlock];
  each_span(from, [&](const float* x, std::size_t at, std::size_t n) {
    if (!finite) {
      const auto* in = unaligned<float>(x);
      for (std::size_t i = 0; i < n; ++i) scratch[i] = magnitude(in[i].value) < kInfinity32 ? in[i].value : 0.0F;
      x = scratch;
    }
    std::size_t i = 0;
    for (; i + kRoundedBlock <= n; i += kRoundedBlock) use(x + i, (at + i) / kRoundedBlock);
    if (i == n) return;
    __builtin_memset(last, 0, sizeof last);
    __builtin_memcpy(last, unaligned<float>(x) + i, (n - i) * sizeof(float));
    use(static_cast<const float*>(last), (at + i) / kRoundedBlock);
  });
}

// The largest magnitude of a block, and a bound of the position of its lowest bit: that of the smallest magnitude's
// last bit, above which there are as many zeros as all elements have at their end. Elements that are not finite count
// as zeros with `finite_only`; else they make the block one of kNaNBlock.
inline void measure_digits(const Contribution& from, bool finite_only, std::uint8_t* tops, std::uint8_t* lows) {
  const ScopedFpEnv environment;
  each_rounded_block(from, !finite_only, [&](const float* x, std::size_t b) {
    const auto* in = unaligned<std::uint32_t>(x);
    std::uint32_t top = 0, smallest = 0xffffffff, fractions = 0;
    DTCOMM_INDEPENDENT
    for (std::size_t j = 0; j < kRoundedBlock; ++j) {
      const std::uint32_t size = in[j].value & 0x7fffffff, before = size - 1;  // of zeros it is the largest
      top = size > top ? size : top;
      smallest = before < smallest ? before : smallest;
      fractions |= size;
    }
    tops[b] = exponent_of(top);
    lows[b] = low_of(top, smallest + 1, fractions);
  });
}

// The digits of a block; returns what is behind them. In fp32 and in fp64 all steps are exact: a product with a power
// of two, the part of a float before the point, and what is behind it.
inline std::int32_t* put_digits(const float* x, int halves, int position, int bits, std::int32_t* to) {
  const int whole = halves / 2, above = halves % 2 ? whole * bits : (whole - 1) * bits;
  std::int32_t* const half = to + whole * kRoundedBlock;
  if (halves == 0) return to;
#if defined(DTCOMM_VECTORS)
  if (fits_fp32(position) && fits_fp32(position + above) && fits_fp32(above)) {
    typedef std::int32_t Lanes __attribute__((vector_size(sizeof(Floats))));
    constexpr std::size_t count = kRoundedBlock / kLanes;
    const auto by = static_cast<float>(power_of_two(-position - above)), base = static_cast<float>(power_of_two(bits));
    Floats rest[count];
    Integers digits[count];
    for (std::size_t i = 0; i < count; ++i) rest[i] = load(x + i * kLanes) * by;
    const auto take = [&] {
      for (std::size_t i = 0; i < count; ++i) {
        digits[i] = integers_toward_zero(rest[i]);
        rest[i] = (rest[i] - floats_of_integers(digits[i])) * base;
      }
    };
    if (halves % 2) {
      take();
      for (std::size_t i = 0; i < count / 2; ++i) {
        const Lanes high = reinterpret_cast<Lanes>(digits[i + count / 2]) << 16;
        store_integers(reinterpret_cast<Integers>(reinterpret_cast<Lanes>(digits[i]) + high), half + i * kLanes);
      }
    }
    for (int k = whole; k-- > 0;) {
      take();
      for (std::size_t i = 0; i < count; ++i) store_integers(digits[i], to + k * kRoundedBlock + i * kLanes);
    }
    return to + halves * kHalfBlock;
  }
#endif
  const auto* in = unaligned<float>(x);
  const double by = power_of_two(-position - above), base = power_of_two(bits);
  double rest[kRoundedBlock];
  for (std::size_t j = 0; j < kRoundedBlock; ++j) rest[j] = static_cast<double>(in[j].value) * by;
  const auto take = [&](std::int32_t* row) {
    for (std::size_t j = 0; j < kRoundedBlock; ++j) {
      row[j] = static_cast<std::int32_t>(rest[j]);
      rest[j] = (rest[j] - row[j]) * base;
    }
  };
  if (halves % 2) {
    std::int32_t row[kRoundedBlock];
    take(row);
    for (std::size_t j = 0; j < kHalfBlock; ++j) half[j] = row[j] + row[j + kHalfBlock] * 0x10000;
  }
  for (int k = whole; k-- > 0;) take(to + k * kRoundedBlock);
  return to + halves * kHalfBlock;
}

inline void split_digits(const SumDigits& sum, const Contribution& from, bool finite, std::int32_t* digits) {
  const ScopedFpEnv environment;
  const DigitCuts cuts(sum.ranks);
  each_rounded_block(from, finite, [&](const float* x, std::size_t b) {
    const int halves = cuts.halves[span_of(sum.tops[b], sum.lows[b])];
    digits = put_digits(x, halves, position_of(sum.lows[b]), cuts.bits, digits);
  });
}

// The 16-bit digits of half a row.
inline void unpack_half(const std::int32_t* half, std::int32_t* to) {
  for (std::size_t j = 0; j < kHalfBlock; ++j) {
    const std::int32_t low = static_cast<std::int16_t>(half[j]);
    to[j] = low;
    to[j + kHalfBlock] = (half[j] - low) >> 16;
  }
}

// A sum of `top` and `Lower` rows below it, of at most 53 binary digits, which fp64 holds: divided and rounded to fp32.
// For `Narrower` types its last bit is set if one behind it is (round to odd); the results are normal numbers.
template <int Lower, bool Divide, bool Narrower>
inline void round_rows(const std::int32_t* top, const std::int32_t* from, double base, double unit, double divisor,
                       float* to) {
  auto* out = unaligned<float>(to);
  DTCOMM_INDEPENDENT
  for (std::size_t j = 0; j < kRoundedBlock; ++j) {
    double sum = top[j];
    if (Lower > 1) sum = sum * base + from[kRoundedBlock + j];
    if (Lower > 0) sum = sum * base + from[j];
    sum *= unit;
    if (Divide) sum /= divisor;
    if (Narrower) {
      const auto value = __builtin_bit_cast(std::uint64_t, sum), rest = value & 0x1fffffff;
      sum = __builtin_bit_cast(double, (value - rest) | (rest ? 0x20000000U : 0U));
    }
    out[j].value = static_cast<float>(sum);
  }
}

// The elements of a block, divided and rounded to fp32; to odd where `narrower` types follow.
struct BlockRounding {
  int bits, room;  // of a digit; for the sum
  std::size_t divisor;
  bool narrower;

  void operator()(const std::int32_t* from, int span, int halves, int position, float* to) const {
    const int lower = (halves - 1) / 2;
    const bool normal = !narrower || fits_fp32(position - headroom(divisor));
    if (span + room > 53 || lower > 2 || !normal) return round_any(from, halves, position, to);
    std::int32_t high[kRoundedBlock];
    const std::int32_t* top = from + lower * kRoundedBlock;
    if (halves % 2) {
      unpack_half(top, high);
      top = high;
    }
    // A power of two divides the unit, which is exact, and not every element.
    const bool divide = (divisor & (divisor - 1)) != 0;
    const double by = static_cast<double>(divisor), unit = power_of_two(position) / (divide ? 1.0 : by);
    with_rows(lower, [&](auto rows) {
      const auto round = divide     ? narrower ? round_rows<rows(), true, true> : round_rows<rows(), true, false>
                         : narrower ? round_rows<rows(), false, true>
                                    : round_rows<rows(), false, false>;
      round(top, from, power_of_two(bits), unit, by, to);
    });
  }

 private:
  template <int N>
  struct Rows {
    constexpr int operator()() const { return N; }
  };

  template <class Use>
  static void with_rows(int rows, const Use& use) {
    rows == 0 ? use(Rows<0>()) : rows == 1 ? use(Rows<1>()) : use(Rows<2>());
  }

  void round_any(const std::int32_t* from, int halves, int position, float* to) const {
    const auto whole = static_cast<std::size_t>(halves / 2);
    std::int64_t digits[kMostDigits];
    std::int32_t high[kRoundedBlock];
    if (halves % 2) unpack_half(from + whole * kRoundedBlock, high);
    for (std::size_t j = 0; j < kRoundedBlock; ++j) {
      for (std::size_t k = 0; k < whole; ++k) digits[k] = from[k * kRoundedBlock + j];
      if (halves % 2) digits[whole] = high[j];
      const double value = value_of_digits(digits, whole + halves % 2, bits, position, divisor);
      unaligned<float>(to)[j].value = narrower ? round_to_odd(value) : static_cast<float>(value);
    }
  }
};

inline void round_digits(const SumDigits& sum, const std::int32_t* digits, std::size_t numel, std::size_t divisor,
                         DType dtype, void* out) {
  const ScopedFpEnv environment;
  const DigitCuts cuts(sum.ranks);
  const BlockRounding round_block{cuts.bits, headroom(sum.ranks), divisor, dtype != DType::f32};
  alignas(kLine) float scratch[kSpan];
  for (std::size_t at = 0; at < numel; at += kSpan) {
    const std::size_t n = smaller(kSpan, numel - at);
    auto* const to = static_cast<std::uint8_t*>(out) + at * size_of(dtype);
    // Blocks are written whole, so a span with an incomplete one goes through the scratch memory, which has room.
    const bool direct = dtype == DType::f32 && n % kRoundedBlock == 0;
    float* const floats = direct ? reinterpret_cast<float*>(to) : scratch;
    for (std::size_t i = 0; i < n; i += kRoundedBlock) {
      const std::size_t b = (at + i) / kRoundedBlock;
      const int span = span_of(sum.tops[b], sum.lows[b]), halves = cuts.halves[span];
      if (halves == 0) {
        __builtin_memset(floats + i, 0, kRoundedBlock * sizeof(float));
      } else {
        round_block(digits, span, halves, position_of(sum.lows[b]), floats + i);
      }
      digits += halves * kHalfBlock;
    }
    if (!direct) narrow(dtype, scratch, n, to);
  }
}

}  // namespace dtcomm::DTCOMM_ISA
