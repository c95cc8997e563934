// intv: integer codes of 0 to 8 bits; the width of a block follows from its scale and a level of its granule.
#pragma once

#include "codec/codec.h"
#include "codec/integer.h"
#include "codec/layout.h"

// The functions of blocks have no branches, so that compilers vectorize loops over them.

namespace dtcomm {

// A block's byte: its field, the place of its scale above the base of the granule, and the sign of its step.
constexpr std::uint32_t kZeroField = 0, kNaNField = 127, kFlipped = 128;
// A scale is a float of four significant bits, the upper twelve bits of an fp32.
constexpr unsigned kScaleShift = 20, kScaleMantissa = 3;
constexpr std::uint32_t kSmallestScale = 0x48, kLargestScale = 0x7f7, kScaleOfInfinity = 0x7f8;
constexpr unsigned kWidestCode = 8;
// What a granule has once, in its last bytes: its level and, above it, its base.
constexpr std::size_t kWordBytes = 4;
constexpr unsigned kLevelBits = 16;

// The scale of a block whose largest magnitude has the bits `top`: rounded up, at most the largest one; 0 if the block
// is one of zeros or of NaN.
DTCOMM_HD std::uint32_t variable_scale(std::uint32_t top) {
  const std::uint32_t up = (top + ((1U << kScaleShift) - 1)) >> kScaleShift;
  const std::uint32_t scale = up > kLargestScale ? kLargestScale : up;
  return scale & (0U - static_cast<std::uint32_t>((top < kInfinity32) & (scale >= kSmallestScale)));
}

// The base of a granule whose largest scale is `largest`.
DTCOMM_HD std::uint32_t variable_base(std::uint32_t largest) {
  return largest > kNaNField - 1 ? largest - (kNaNField - 1) : 0;
}

// The byte of a block. `most` is the largest of its elements' bits as signed integers: the largest magnitude becomes
// the code -2^(w-1), for which the step has the opposite sign.
DTCOMM_HD std::uint32_t variable_byte(std::uint32_t top, std::int32_t most, std::uint32_t base) {
  const std::uint32_t scale = variable_scale(top), flipped = static_cast<std::uint32_t>(most) == top ? kFlipped : 0;
  const std::uint32_t byte = scale <= base ? kZeroField : (scale - base) | flipped;
  return top >= kInfinity32 ? kNaNField : byte;
}

// The rule that gives the blocks of a granule their widths.
struct WidthRule {
  unsigned shift;  // the logarithm of the blocks of a whole granule

  DTCOMM_HD explicit WidthRule(unsigned block_shift) : shift(kVariableGranuleShift - block_shift) {}

  // One more bit for each time that the scale doubles. No two blocks have the same key, so that a step of the level
  // changes the width of one block at most, by one.
  DTCOMM_HD std::uint32_t key(std::uint32_t field, std::uint32_t block) const {
    return (field << shift | block) + (kWidestCode << (kScaleMantissa + shift));
  }
  DTCOMM_HD std::uint32_t width(std::uint32_t byte, std::uint32_t block, std::uint32_t level) const {
    const std::uint32_t field = byte & (kFlipped - 1), of = key(field, block);
    const std::uint32_t bits = (of > level ? of - level : 0) >> (kScaleMantissa + shift);
    const std::uint32_t width = bits > kWidestCode ? kWidestCode : bits;
    return (field == kZeroField) | (field == kNaNField) ? 0 : width;
  }
};

// The sum of the widths that a granule of so many bytes and blocks has room for.
DTCOMM_HD std::uint32_t width_budget(std::size_t bytes, std::size_t blocks, std::size_t block) {
  return static_cast<std::uint32_t>((bytes - blocks - kWordBytes) * 8 / block);
}

// The distance of two values of a block, 2^(1-w) times its scale with the opposite of the sign of its largest element;
// NaN for NaN blocks and 0 for those without codes.
DTCOMM_HD float variable_step(std::uint32_t byte, std::uint32_t base, std::uint32_t width) {
  const std::uint32_t field = byte & (kFlipped - 1), scale = field + base;
  const float step = float_of(scale << kScaleShift) * float_of((128 - width) << 23);
  const std::uint32_t bits = bits_of(step) ^ (byte & kFlipped) << 24;
  // Masks, as compilers move the product behind a condition.
  const std::uint32_t some = 0U - static_cast<std::uint32_t>(width != 0);
  const bool is_nan = (field == kNaNField) | ((field != kZeroField) & (scale >= kScaleOfInfinity));
  const std::uint32_t nan = 0U - static_cast<std::uint32_t>(is_nan);
  return float_of((kNaN32 & nan) | (bits & some & ~nan));
}

// Of codes of so many bits.
DTCOMM_HD float lowest_code(std::uint32_t width) { return -static_cast<float>(1 << width) / 2; }

// The sum turns a negative zero into zero.
DTCOMM_HD float variable_value(std::int32_t code, float step) { return static_cast<float>(code) * step + 0.0f; }

}  // namespace dtcomm
