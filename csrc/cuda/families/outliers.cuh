// codec/outliers.h for the block that a group of lanes holds.
#pragma once

#include "codec/outliers.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

// The outliers of one block, as they are sent: its smallest and its largest element, and their indices.
struct Outliers {
  float low, high;
  SpikePlaces at;  // in the block
};

// An element's rank in the order of floats, and its index in the block.
struct Ranked {
  std::int32_t order;
  std::uint32_t index_in_block;
};

template <class Lanes, class Before>
DTCOMM_DEVICE Ranked group_first(const Lanes& lanes, unsigned group, Ranked mine, const Before& before) {
  for (unsigned reach = group / 2; reach > 0; reach /= 2) {
    const Ranked other{lanes.shuffle_xor(mine.order, reach), lanes.shuffle_xor(mine.index_in_block, reach)};
    const bool earlier = other.order == mine.order && other.index_in_block < mine.index_in_block;
    if (before(other.order, mine.order) || earlier) mine = other;
  }
  return mine;
}

// Removes the outliers from a group's elements: the `live` elements of x become those that are encoded. `index` is the
// index of the vec8's first element in the caller's tensor, `first` its index in the block.
template <class Lanes>
DTCOMM_DEVICE Outliers extract_outliers(const Lanes& lanes, const Codec& codec, unsigned group, std::uint64_t key,
                                        std::uint64_t index, std::uint32_t first, int live, float (&x)[kVec8]) {
  Ranked least{0x7fffffff, 0}, most{-0x7fffffff - 1, 0};
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const std::int32_t order = spike_order(x[j]);
    const std::uint32_t index_in_block = first + static_cast<std::uint32_t>(j);
    if (j < live && order < least.order) least = {order, index_in_block};
    if (j < live && order > most.order) most = {order, index_in_block};
  }
  least = group_first(lanes, group, least, [](std::int32_t a, std::int32_t b) { return a < b; });
  most = group_first(lanes, group, most, [](std::int32_t a, std::int32_t b) { return a > b; });
  if (least.order <= kSpikeLowest || most.order >= kSpikeHighest) least.index_in_block = most.index_in_block = 0;
  Outliers outliers{float_of(kNaN32), float_of(kNaN32), {least.index_in_block, most.index_in_block}};
  const std::uint32_t index_in_block = spike_filler(outliers.at);
  std::uint32_t bits = 0;  // of the filler, in the lane that has it; +0 where the block is too short
  DTCOMM_UNROLL
  for (int j = 0; j < 3; ++j)
    bits |= first + static_cast<unsigned>(j) == index_in_block && j < live ? bits_of(x[j]) : 0;
  bits = group_reduce(lanes, group, bits, [](std::uint32_t a, std::uint32_t b) { return a | b; });
  if (least.order <= kSpikeLowest || most.order >= kSpikeHighest) return outliers;
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
  const auto value = [](std::int32_t order) {
    return float_of(static_cast<std::uint32_t>(order ^ ((order >> 31) & 0x7fffffff)));
  };
  outliers.low = spike_value(codec, value(least.order), random[0]);
  outliers.high = spike_value(codec, value(most.order), random[1]);
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
  std::uint8_t* values = granule + shape.spikes_at;
  std::uint8_t* places = values + shape.blocks * 2 * scale_bytes(codec.scale);
  store_field(codec.scale, outliers.low, values, 2 * block);
  store_field(codec.scale, outliers.high, values, 2 * block + 1);
  if (codec.block <= 256) {
    places[2 * block] = static_cast<std::uint8_t>(outliers.at.low);
    places[2 * block + 1] = static_cast<std::uint8_t>(outliers.at.high);
  } else {
    reinterpret_cast<Word16*>(places)[2 * block] = static_cast<std::uint16_t>(outliers.at.low);
    reinterpret_cast<Word16*>(places)[2 * block + 1] = static_cast<std::uint16_t>(outliers.at.high);
  }
}

DTCOMM_DEVICE Outliers load_outliers(const Codec& codec, const GranuleShape& shape, std::uint32_t block,
                                     const std::uint8_t* granule) {
  const std::uint8_t* values = granule + shape.spikes_at;
  const std::uint8_t* places = values + shape.blocks * 2 * scale_bytes(codec.scale);
  Outliers outliers{load_field(codec.scale, values, 2 * block), load_field(codec.scale, values, 2 * block + 1), {}};
  if (codec.block <= 256) {
    outliers.at = {places[2 * block], places[2 * block + 1]};
  } else {
    const auto* wide = reinterpret_cast<const Word16*>(places);
    outliers.at = {wide[2 * block], wide[2 * block + 1]};
  }
  return outliers;
}

}  // namespace dtcomm::cuda
