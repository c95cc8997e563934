// Integer codecs: how a block of floats becomes a scale, an optional zero point and one code per element.
// docs/reference/wire-format.md derives the bounds; tests compare every kernel with an independent reference.
#pragma once

#include "codec/codec.h"
#include "codec/counter_rng.h"
#include "codec/float_bits.h"

namespace dtcomm {

// The constants of one codec, made once per call.
struct IntegerRules {
  float levels;        // the largest code
  std::uint32_t cap;   // bits of the largest scale whose product with `levels` is finite
  std::uint32_t half;  // added before the scale is cut to its type (bf16: 0x7fff and the tie bit, or 0xffff: up)
  std::uint32_t tie;   // 1 if the tie bit is added
  std::uint32_t mask;  // bits that the scale's type keeps
};

// The rules of scales that map a block's largest element to `levels`; scales are rounded up or to nearest.
DTCOMM_HD IntegerRules scale_rules(float levels, Scale type, bool up) {
  IntegerRules rules;
  rules.levels = levels;
  rules.mask = type == Scale::bf16 ? 0xffff0000U : 0xffffffffU;
  const float largest = float_of(kInfinity32 - 1);
  std::uint32_t cap = bits_of(largest / levels);
  cap -= finite(float_of(cap) * levels) ? 0 : 1;
  rules.cap = cap & rules.mask;
  rules.half = type != Scale::bf16 ? 0 : up ? 0xffff : 0x7fff;
  rules.tie = type == Scale::bf16 && !up ? 1 : 0;
  return rules;
}

// The largest code of a symmetric block comes out right when its scale is rounded to nearest. A larger top code or a
// stochastic one would be clipped where the scale is too small, so there it is rounded up.
DTCOMM_HD IntegerRules integer_rules(const Codec& codec) {
  const int steps = codec.symmetric ? (1 << (codec.bits - 1)) - 1 : (1 << codec.bits) - 1;
  return scale_rules(static_cast<float>(steps), codec.scale, codec.stochastic || !codec.symmetric);
}

// The scale of a block whose largest element (or range) has the bits `top` (sign cleared).
DTCOMM_HD float scale_of(const IntegerRules& rules, std::uint32_t top) {
  std::uint32_t bits = bits_of(float_of(top) / rules.levels);
  bits = (bits + rules.half + ((bits >> 16) & rules.tie)) & rules.mask;
  bits = bits > rules.cap ? rules.cap : bits;
  bits = bits < 0x00800000 ? 0 : bits;
  return float_of(top >= kInfinity32 ? kNaN32 : bits);
}

// The factor that turns an element into a code: 0 for zero blocks and NaN blocks, whose codes are zeros. For those the
// division is by 1. Masks are used because a condition would keep compilers from vectorizing.
DTCOMM_HD float inverse_of(float scale) {
  const std::uint32_t bits = bits_of(scale);
  const std::uint32_t usable = 0U - static_cast<std::uint32_t>(bits - 1 < kInfinity32 - 1);
  const float by = float_of((bits & usable) | (bits_of(1.0f) & ~usable));
  return float_of(bits_of(1.0f / by) & usable);
}

// The zero point: the block's minimum rounded towards -Inf to the scale's type, but never to -Inf; -0 becomes +0.
DTCOMM_HD float zero_of(const IntegerRules& rules, float lowest) {
  const std::uint32_t bits = bits_of(lowest);
  const bool away = (bits & ~rules.mask) != 0 && (bits >> 31) != 0 && (bits & rules.mask) != 0xff7f0000U;
  const std::uint32_t cut = (bits & rules.mask) + (away ? 0x10000U : 0U);
  return float_of(cut) + 0.0f;
}

// Adding and subtracting 1.5 * 2^23 rounds to an integer (ties to even); |t| is below 2^22.
constexpr float kRound = 0x1.8p23f;

// The code of an element, t = x * inverse (or (x - zero) * inverse) being finite.
DTCOMM_HD std::int32_t nearest_code(float t, float lowest, float highest) {
  t = t > lowest ? t : lowest;  // NaN becomes a number here; its block's codes are cleared afterwards
  t = t < highest ? t : highest;
  return static_cast<std::int32_t>(bits_of(t + kRound) - bits_of(kRound));
}

DTCOMM_HD std::int32_t stochastic_code(float t, float lowest, float highest, float random) {
  t = t > lowest ? t : lowest;  // NaN becomes a number here; its block's codes are cleared afterwards
  t = t < highest ? t : highest;
  const std::int32_t cut = static_cast<std::int32_t>(t);
  const std::int32_t floor = cut - (static_cast<float>(cut) > t ? 1 : 0);
  return floor + (random < t - static_cast<float>(floor) ? 1 : 0);
}

// Two's complement of `bits` bits, as an integer.
DTCOMM_HD std::int32_t signed_code(std::uint32_t code, unsigned bits) {
  const std::uint32_t sign = 1u << (bits - 1);
  return static_cast<std::int32_t>(code ^ sign) - static_cast<std::int32_t>(sign);
}

}  // namespace dtcomm
