// Codec `exact`: blocks of integers with a common power of two. Integers with the same exponents add up without loss,
// in any order, as long as there is room for the carries; so ranks agree on the exponents first.
// docs/guides/reproducible-sums.md explains the arithmetic. It is done in fp64, where the product of a float and a
// power of two, and rounding it to an integer, are exact.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/counter_rng.h"
#include "codec/float_bits.h"

namespace dtcomm {

constexpr std::uint8_t kNaNBlock = 255;

// The bits that each integer leaves free so that a sum over `ranks` ranks does not overflow: log2, rounded up.
DTCOMM_HD int headroom(std::size_t ranks) {
  int bits = 0;
  while ((std::size_t{1} << bits) < ranks) ++bits;
  return bits;
}

// The bits of an integer's magnitude.
DTCOMM_HD int digits_of(int bits, std::size_t ranks) { return bits - 1 - headroom(ranks); }

// The exponent of a block whose largest magnitude has the bits `top`: every element is below 2^(exponent - 126).
DTCOMM_HD std::uint8_t exponent_of(std::uint32_t top) {
  if (top >= kInfinity32) return kNaNBlock;
  const std::uint32_t exponent = top >> 23;
  return static_cast<std::uint8_t>(exponent == 0 && top != 0 ? 1 : exponent);
}

DTCOMM_HD double power_of_two(int exponent) {
  const std::uint64_t bits = static_cast<std::uint64_t>(exponent + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The exponent of the block's unit: integer 1 stands for 2 to the power of the result.
DTCOMM_HD int unit_exponent(std::uint8_t exponent, int digits) { return exponent - 126 - digits; }

// The largest integer of `digits` bits.
DTCOMM_HD double largest_integer(int digits) { return power_of_two(digits) - 1.0; }

// x / unit rounded to the nearest integer, ties to even, and clamped to +-`most`; for NaN an arbitrary integer. Adding
// and subtracting 1.5 * 2^52 rounds.
DTCOMM_HD double to_integer(float x, double per_unit, double most) {
  double t = static_cast<double>(x) * per_unit;
  t = t > -most ? t : -most;
  t = t < most ? t : most;
  return (t + 0x1.8p52) - 0x1.8p52;
}

// The weight of element `index` of a tensor in the checksum of its run: odd, so that any change of one integer shows.
constexpr std::size_t kAuditRun = 4096;  // elements that share a checksum
DTCOMM_HD std::uint64_t audit_weight(std::uint32_t index) { return static_cast<std::uint64_t>(mix32(index)) << 1 | 1U; }

// Correctly rounded sums (`exact:rounded=true`). The elements of a block of kRoundedBlock, of all ranks, are integers
// of at most `span` binary digits times 2^low, the position below which no bit is set in any of them. They are cut into
// digits whose sums leave room for the carries: 32-bit integers, and above them one 16-bit integer if that suffices. A
// block takes `whole` rows of 32-bit integers, lowest first, and then half a row: its word i holds the 16-bit integers
// of elements i and i + 16, as the integer low + high * 2^16, which adds up as both do.
constexpr std::size_t kRoundedBlock = 32, kHalfBlock = kRoundedBlock / 2;
constexpr int kLowestPosition = -149;  // of the last bit of the smallest fp32 number
constexpr int kMostSpan = 280;         // more than all finite numbers have

struct SumDigits {
  std::size_t ranks;
  const std::uint8_t* tops;  // for each block its exponent_of, of finite elements
  const std::uint8_t* lows;  // for each block low_code of its lowest bit, 0 where all elements are zeros
};

// A byte that is larger for lower bits, so that ranks agree on a maximum: it says the position, rounded down to an odd
// number (kLowestPosition is odd).
DTCOMM_HD std::uint8_t low_code(int position) {
  return static_cast<std::uint8_t>(255 - (position - kLowestPosition) / 2);
}
DTCOMM_HD int position_of(std::uint8_t low) { return low == 0 ? 0 : (255 - low) * 2 + kLowestPosition; }

// The byte of a block from its largest and smallest magnitude but 0, and all of them or-ed.
DTCOMM_HD std::uint8_t low_of(std::uint32_t top, std::uint32_t smallest, std::uint32_t any) {
  if (top == 0) return 0;
#if defined(__CUDA_ARCH__)
  const int zeros = __ffs(static_cast<int>(any | 0x800000)) - 1;
#else
  const int zeros = __builtin_ctz(any | 0x800000);
#endif
  const std::uint32_t exponent = smallest >> 23;
  return low_code(kLowestPosition + static_cast<int>(exponent == 0 ? 0 : exponent - 1) + zeros);
}

// The binary digits of a block's elements.
DTCOMM_HD int span_of(std::uint8_t top, std::uint8_t low) { return low == 0 ? 0 : top - 126 - position_of(low); }

// How a block of a span is cut, in half rows: two for each row of 32-bit digits, and one for the 16-bit integers. Their
// digits have `bits` and `half` bits.
DTCOMM_HD unsigned halves_of(int span, int bits, int half) {
  const int rest = span % bits;
  return static_cast<unsigned>(2 * (span / bits) + (rest > 0) + (rest > half));
}

// The same for all spans.
struct DigitCuts {
  int bits;  // of a 32-bit digit
  std::uint8_t halves[kMostSpan];

  explicit DigitCuts(std::size_t ranks) : bits(digits_of(32, ranks)) {
    const int half = digits_of(16, ranks);
    for (int span = 0; span < kMostSpan; ++span) halves[span] = static_cast<std::uint8_t>(halves_of(span, bits, half));
  }
};

// The float nearest to `value`, whose last bit is set if that is not equal to it (round to odd): rounding it to fewer
// bits gives what rounding `value` gives.
DTCOMM_HD float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto again = static_cast<double>(nearest);
  std::uint32_t bits = bits_of(nearest);
  if (again == value || (bits & 1U) || value != value) return nearest;
  const double size = value < 0 ? -value : value, got = again < 0 ? -again : again;
  return float_of(got > size ? bits - 1 : bits + 1);
}

constexpr std::size_t kMostDigits = 80;  // (277 bits + carries) / 4 bits, the fewest that a digit has

// sums[0] + sums[1] * 2^bits + ..., divided, to 53 significant bits, the last of which is set if others were dropped.
// `sums` has room for count + 1 digits, and is overwritten.
DTCOMM_HD double value_of_digits(std::int64_t* sums, std::size_t count, int bits, int position, std::uint64_t divisor) {
  const auto carry_all = [&] {
    std::int64_t carry = 0;
    for (std::size_t k = 0; k < count; ++k) {
      const std::int64_t digit = sums[k] + carry;
      carry = digit >> bits;
      sums[k] = digit - carry * (std::int64_t{1} << bits);
    }
    return carry;
  };
  std::int64_t top = carry_all();
  const bool negative = top < 0;
  if (negative) {  // of the normalized digits all but the last carry are positive
    sums[count] = top;
    for (std::size_t k = 0; k <= count; ++k) sums[k] = -sums[k];
    const std::int64_t last = sums[count];
    top = last + carry_all();
  }
  sums[count] = top;
  std::uint64_t rest = 0;
  for (std::size_t k = count + 1; k-- > 0;) {
    const std::uint64_t digit = (rest << bits) + static_cast<std::uint64_t>(sums[k]);
    sums[k] = static_cast<std::int64_t>(digit / divisor);
    rest = digit % divisor;
  }
  std::uint64_t value = 0;
  std::size_t k = count + 1;
  while (k > 0 && value < (std::uint64_t{1} << 32)) value = (value << bits) + static_cast<std::uint64_t>(sums[--k]);
  for (; rest != 0 && value < (std::uint64_t{1} << 32); position -= bits) {  // digits behind the point of the quotient
    value = (value << bits) + (rest << bits) / divisor;
    rest = (rest << bits) % divisor;
  }
  bool dropped = rest != 0;
  for (std::size_t i = 0; i < k; ++i) dropped |= sums[i] != 0;
  int exponent = position + static_cast<int>(k) * bits;
  for (; value >= (std::uint64_t{1} << 53); ++exponent) {
    dropped |= value & 1;
    value >>= 1;
  }
  const double result = static_cast<double>(value | static_cast<std::uint64_t>(dropped)) * power_of_two(exponent);
  return negative ? -result : result;
}

}  // namespace dtcomm
