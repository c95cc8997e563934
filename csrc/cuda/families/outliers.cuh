// The outliers (codec/outliers.h) of the block that a group of lanes processes.
#pragma once

#include "codec/outliers.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

// An element's rank in the order of floats, and its index in the block.
struct Ranked {
  std::int32_t order;
  std::uint32_t index_in_block;
};

// The first of the group's elements in the order `before`; of equal ones, the one with the lowest index.
template <class Lanes, class Before>
DTCOMM_DEVICE Ranked group_first(const Lanes& lanes, unsigned group, Ranked first, const Before& before) {
  for (unsigned reach = group / 2; reach > 0; reach /= 2) {
    const Ranked other{lanes.shuffle_xor(first.order, reach), lanes.shuffle_xor(first.index_in_block, reach)};
    const bool earlier = other.order == first.order && other.index_in_block < first.index_in_block;
    if (before(other.order, first.order) || earlier) first = other;
  }
  return first;
}

// Removes the outliers from a group's elements: the `live` elements of x become those that are encoded. `index` is the
// index of the vec8's first element in the caller's tensor, `first` its index in the block.
template <class Lanes>
DTCOMM_DEVICE Outliers extract_outliers(const Lanes& lanes, const Codec& codec, unsigned group, std::uint64_t key,
                                        std::uint64_t index, std::uint32_t first, int live, float (&x)[kVec8]) {
  Ranked least{0x7fffffff, 0}, most{-0x7fffffff - 1, 0};
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const std::int32_t order = float_order(x[j]);
    const std::uint32_t index_in_block = first + static_cast<std::uint32_t>(j);
    if (j < live && order < least.order) least = {order, index_in_block};
    if (j < live && order > most.order) most = {order, index_in_block};
  }
  least = group_first(lanes, group, least, [](std::int32_t a, std::int32_t b) { return a < b; });
  most = group_first(lanes, group, most, [](std::int32_t a, std::int32_t b) { return a > b; });
  if (least.order <= kLowestOrder || most.order >= kHighestOrder) least.index_in_block = most.index_in_block = 0;
  Outliers outliers{float_of(kNaN32), float_of(kNaN32), {least.index_in_block, most.index_in_block}};
  const std::uint32_t index_in_block = filler_position(outliers.at);
  std::uint32_t bits = 0;  // of the filler, in the lane that has it; +0 where the block is too short
  DTCOMM_UNROLL
  for (int j = 0; j < 3; ++j)
    bits |= first + static_cast<unsigned>(j) == index_in_block && j < live ? bits_of(x[j]) : 0;
  bits = group_reduce(lanes, group, bits, [](std::uint32_t a, std::uint32_t b) { return a | b; });
  if (least.order <= kLowestOrder || most.order >= kHighestOrder) return outliers;
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const std::uint32_t element = first + static_cast<std::uint32_t>(j);
    if (element == outliers.at.low || element == outliers.at.high) x[j] = float_of(bits);
  }
  float random[2] = {};
  if (codec.stochastic && codec.scale == Scale::bf16) {
    const std::uint64_t low = index - first + outliers.at.low, high = index - first + outliers.at.high;
    random[0] = uniform(make_stream(key, low), static_cast<std::uint32_t>(low));
    random[1] = uniform(make_stream(key, high), static_cast<std::uint32_t>(high));
  }
  outliers.low = round_outlier(codec, float_from_order(least.order), random[0]);
  outliers.high = round_outlier(codec, float_from_order(most.order), random[1]);
  return outliers;
}

DTCOMM_DEVICE void restore_outliers(const Outliers& outliers, std::uint32_t first, float (&x)[kVec8]) {
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const std::uint32_t element = first + static_cast<std::uint32_t>(j);
    if (element == outliers.at.low) x[j] = outliers.low;
    if (element == outliers.at.high) x[j] = outliers.high;
  }
}

// Two values for each block, then two indices: one byte each where blocks are short, else two.
DTCOMM_DEVICE void store_outliers(const Codec& codec, const GranuleShape& shape, std::uint32_t block,
                                  const Outliers& outliers, std::uint8_t* granule) {
  std::uint8_t* values = granule + shape.outliers_at;
  std::uint8_t* positions = values + shape.blocks * 2 * scale_bytes(codec.scale);
  store_field(codec.scale, outliers.low, values, 2 * block);
  store_field(codec.scale, outliers.high, values, 2 * block + 1);
  if (codec.block <= 256) {
    positions[2 * block] = static_cast<std::uint8_t>(outliers.at.low);
    positions[2 * block + 1] = static_cast<std::uint8_t>(outliers.at.high);
  } else {
    reinterpret_cast<Word16*>(positions)[2 * block] = static_cast<std::uint16_t>(outliers.at.low);
    reinterpret_cast<Word16*>(positions)[2 * block + 1] = static_cast<std::uint16_t>(outliers.at.high);
  }
}

DTCOMM_DEVICE Outliers load_outliers(const Codec& codec, const GranuleShape& shape, std::uint32_t block,
                                     const std::uint8_t* granule) {
  const std::uint8_t* values = granule + shape.outliers_at;
  const std::uint8_t* positions = values + shape.blocks * 2 * scale_bytes(codec.scale);
  Outliers outliers{load_field(codec.scale, values, 2 * block), load_field(codec.scale, values, 2 * block + 1), {}};
  if (codec.block <= 256) {
    outliers.at = {positions[2 * block], positions[2 * block + 1]};
  } else {
    const auto* wide = reinterpret_cast<const Word16*>(positions);
    outliers.at = {wide[2 * block], wide[2 * block + 1]};
  }
  return outliers;
}

}  // namespace dtcomm::cuda
