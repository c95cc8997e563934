// intv: integer codes whose width follows from the scale of their block. A thread block holds a granule.
#pragma once

#include "codec/variable.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

struct Variable {
  static constexpr bool kSpecialized = false, kHasMinMax = false, kCanRotate = false, kHasPadding = false;

  unsigned block_shift;

  struct Raw {
    Codes codes;
    unsigned width;  // at least 1: blocks without codes have codes of zero
    float step;
  };

  DTCOMM_HD unsigned group() const { return kVariableGranule / kVec8; }
  DTCOMM_DEVICE bool rotates() const { return false; }
  DTCOMM_DEVICE std::uint32_t block() const { return 1U << block_shift; }
  DTCOMM_DEVICE std::uint32_t budget(const GranuleShape& shape) const {
    return width_budget(shape.bytes, shape.blocks, block());
  }

  // The first lane of each block knows its width; the sum of those before it is where the block's codes begin.
  template <bool Whole, class Lanes>
  DTCOMM_DEVICE Raw load(const Lanes& lanes, const GranuleShape& shape, const std::uint8_t* granule,
                         std::uint32_t at) const {
    Raw raw = {};
    raw.width = 1;
    const bool exists = at < shape.stored, leads = (at & (block() - 1)) == 0;
    const auto word = static_cast<std::uint32_t>(load_bytes<kWordBytes>(granule + shape.bytes - kWordBytes));
    const std::uint32_t level = word & ((1U << kLevelBits) - 1), base = word >> kLevelBits, own = at >> block_shift;
    const std::uint32_t byte = exists ? granule[own] : 0U;
    const std::uint32_t wanted = exists ? WidthRule(block_shift).width(byte, own, level) : 0U;
    std::uint32_t total = 0;
    const std::uint32_t up_to = sum_before(lanes, leads ? wanted : 0U, total);
    const std::uint32_t before = leads ? up_to : up_to - wanted;
    if (!exists) return raw;
    const std::uint32_t width = before + wanted > budget(shape) ? 0 : wanted;  // no encoder exceeds the budget
    raw.step = variable_step(byte, base, width);
    if (width == 0) return raw;
    raw.width = width;
    raw.codes = load_codes(width, block(), at & (block() - 1), granule + shape.blocks + before * block() / 8);
    return raw;
  }

  DTCOMM_DEVICE void decode(const Raw& raw, float (&x)[kVec8]) const {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = variable_value(signed_code(code_at(raw.codes, j), raw.width), raw.step);
  }

  // The least level at which the widths do not exceed the budget. `own` is this thread's part of a sum over blocks.
  template <class Lanes, class Own>
  DTCOMM_DEVICE std::uint32_t find_level(const Lanes& lanes, std::uint32_t most, const Own& own) const {
    std::uint32_t low = 0, high = (1U << kLevelBits) - 1;
    DTCOMM_LOOP
    for (std::uint32_t round = 0; low < high; ++round) {
      const std::uint32_t middle = (low + high) / 2;
      if (lanes.block_sum(own(middle), round) <= most) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  template <bool Feedback, bool Whole, class Lanes>
  DTCOMM_DEVICE void encode(const Lanes& lanes, const KernelParams&, const GranuleShape& shape, const Vec8Position& pos,
                            int, float (&x)[kVec8], std::uint8_t* granule, float (&decoded)[kVec8]) const {
    const auto larger = [](auto a, auto b) { return a > b ? a : b; };
    const unsigned lanes_of_block = block() / kVec8;
    const std::uint32_t top = group_max_magnitude(lanes, lanes_of_block, x);
    auto highest = static_cast<std::int32_t>(bits_of(x[0]));
    DTCOMM_UNROLL
    for (int j = 1; j < kVec8; ++j) highest = larger(highest, static_cast<std::int32_t>(bits_of(x[j])));
    highest = group_reduce(lanes, lanes_of_block, highest, larger);
    const std::uint32_t base = variable_base(group_reduce(lanes, group(), variable_scale(top), larger));
    const std::uint32_t byte = variable_byte(top, highest, base);

    const WidthRule rule(block_shift);
    const std::uint32_t own = pos.at >> block_shift;
    const bool present = pos.at < shape.stored, leads = present && (pos.at & (block() - 1)) == 0;
    const std::uint32_t level = find_level(lanes, budget(shape), [&](std::uint32_t level_tried) {
      return leads ? rule.width(byte, own, level_tried) : 0;
    });
    const std::uint32_t width = present ? rule.width(byte, own, level) : 0;
    std::uint32_t total;
    const std::uint32_t sum = sum_before(lanes, leads ? width : 0, total);
    const std::uint32_t before = leads ? sum : sum - width;

    const float step = variable_step(byte, base, width);
    std::int32_t code[kVec8] = {};
    if (width != 0) {
      const float inverse = 1.0f / step, lowest = lowest_code(width);
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) code[j] = nearest_code(x[j] * inverse, lowest, -1.0f - lowest);
      store_codes(codes_of(code), width, block(), pos.at & (block() - 1),
                  granule + shape.blocks + before * block() / 8);
    }
    if (leads) granule[own] = static_cast<std::uint8_t>(byte);
    const std::uint32_t word_at = shape.bytes - static_cast<std::uint32_t>(kWordBytes);
    if (pos.at == 0) store_bytes<kWordBytes>(base << kLevelBits | level, granule + word_at);
    for (std::uint32_t i = shape.blocks + total * block() / 8 + pos.at / kVec8; i < word_at; i += group()) {
      granule[i] = 0;
    }
    if constexpr (Feedback) {
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) decoded[j] = variable_value(code[j], step);
    }
  }
};

}  // namespace dtcomm::cuda
