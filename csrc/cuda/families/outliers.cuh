// codec/outliers.h for the block that a group of lanes holds.
#pragma once

#include "codec/outliers.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

// Of one block, as they are sent.
struct Outliers {
  float low, high;
  SpikePlaces at;  // in the block
};

// An element's order and its place; the first of equals is the smaller one.
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

// The spikes of a group's octets, whose `live` elements become those that are encoded; `index` is that of the octet's
// first element in the caller's tensor, `first` its place in the block.
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
  Outliers spikes{float_of(kNaN32), float_of(kNaN32), {least.index_in_block, most.index_in_block}};
  const std::uint32_t index_in_block = spike_filler(spikes.at);
  std::uint32_t bits = 0;  // of the filler, where its lane has it; +0 where the block is too short
  DTCOMM_UNROLL
  for (int j = 0; j < 3; ++j)
    bits |= first + static_cast<unsigned>(j) == index_in_block && j < live ? bits_of(x[j]) : 0;
  bits = group_reduce(lanes, group, bits, [](std::uint32_t a, std::uint32_t b) { return a | b; });
  if (least.order <= kSpikeLowest || most.order >= kSpikeHighest) return spikes;
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const std::uint32_t local_ranks = first + static_cast<std::uint32_t>(j);
    if (local_ranks == spikes.at.low || local_ranks == spikes.at.high) x[j] = float_of(bits);
  }
  float random[2] = {};
  if (codec.stochastic && codec.scale == Scale::bf16) {
    const std::uint64_t low = index - first + spikes.at.low, high = index - first + spikes.at.high;
    random[0] = uniform(make_stream(key, low), static_cast<std::uint32_t>(low));
    random[1] = uniform(make_stream(key, high), static_cast<std::uint32_t>(high));
  }
  const auto value = [](std::int32_t order) {
    return float_of(static_cast<std::uint32_t>(order ^ ((order >> 31) & 0x7fffffff)));
  };
  spikes.low = spike_value(codec, value(least.order), random[0]);
  spikes.high = spike_value(codec, value(most.order), random[1]);
  return spikes;
}

DTCOMM_DEVICE void restore_outliers(const Outliers& spikes, std::uint32_t first, float (&x)[kVec8]) {
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) {
    const std::uint32_t local_ranks = first + static_cast<std::uint32_t>(j);
    if (local_ranks == spikes.at.low) x[j] = spikes.low;
    if (local_ranks == spikes.at.high) x[j] = spikes.high;
  }
}

// Two values a block, then two places: a byte each where blocks are short, else two.
DTCOMM_DEVICE void store_outliers(const Codec& codec, const GranuleShape& shape, std::uint32_t block,
                                  const Outliers& spikes, std::uint8_t* granule) {
  std::uint8_t* values = granule + shape.spikes_at;
  std::uint8_t* places = values + shape.blocks * 2 * scale_bytes(codec.scale);
  store_field(codec.scale, spikes.low, values, 2 * block);
  store_field(codec.scale, spikes.high, values, 2 * block + 1);
  if (codec.block <= 256) {
    places[2 * block] = static_cast<std::uint8_t>(spikes.at.low);
    places[2 * block + 1] = static_cast<std::uint8_t>(spikes.at.high);
  } else {
    reinterpret_cast<Word16*>(places)[2 * block] = static_cast<std::uint16_t>(spikes.at.low);
    reinterpret_cast<Word16*>(places)[2 * block + 1] = static_cast<std::uint16_t>(spikes.at.high);
  }
}

DTCOMM_DEVICE Outliers load_outliers(const Codec& codec, const GranuleShape& shape, std::uint32_t block,
                                     const std::uint8_t* granule) {
  const std::uint8_t* values = granule + shape.spikes_at;
  const std::uint8_t* places = values + shape.blocks * 2 * scale_bytes(codec.scale);
  Outliers spikes{load_field(codec.scale, values, 2 * block), load_field(codec.scale, values, 2 * block + 1), {}};
  if (codec.block <= 256) {
    spikes.at = {places[2 * block], places[2 * block + 1]};
  } else {
    const auto* wide = reinterpret_cast<const Word16*>(places);
    spikes.at = {wide[2 * block], wide[2 * block + 1]};
  }
  return spikes;
}

}  // namespace dtcomm::cuda
