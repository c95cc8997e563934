// codec/outliers.h for the block that a group of lanes holds.
#pragma once

#include "codec/outliers.h"
#include "cuda/families/blocks.cuh"

namespace dtcomm::cuda {

// Of one block, as they are sent.
struct Spikes {
  float low, high;
  SpikePlaces at;  // in the block
};

// An element's order and its place; the first of equals is the smaller one.
struct Ranked {
  std::int32_t order;
  std::uint32_t place;
};

template <class Lanes, class Before>
DTCOMM_DEVICE Ranked first_of_group(const Lanes& lanes, unsigned group, Ranked mine, const Before& before) {
  for (unsigned reach = group / 2; reach > 0; reach /= 2) {
    const Ranked other{lanes.swap(mine.order, reach), lanes.swap(mine.place, reach)};
    const bool earlier = other.order == mine.order && other.place < mine.place;
    if (before(other.order, mine.order) || earlier) mine = other;
  }
  return mine;
}

// The spikes of a group's octets, whose `live` elements become those that are encoded; `index` is that of the octet's
// first element in the caller's tensor, `first` its place in the block.
template <class Lanes>
DTCOMM_DEVICE Spikes take_spikes(const Lanes& lanes, const Codec& codec, unsigned group, std::uint64_t key,
                                 std::uint64_t index, std::uint32_t first, int live, float (&x)[kOctet]) {
  Ranked least{0x7fffffff, 0}, most{-0x7fffffff - 1, 0};
  DTCOMM_UNROLL
  for (int j = 0; j < kOctet; ++j) {
    const std::int32_t order = spike_order(x[j]);
    const std::uint32_t place = first + static_cast<std::uint32_t>(j);
    if (j < live && order < least.order) least = {order, place};
    if (j < live && order > most.order) most = {order, place};
  }
  least = first_of_group(lanes, group, least, [](std::int32_t a, std::int32_t b) { return a < b; });
  most = first_of_group(lanes, group, most, [](std::int32_t a, std::int32_t b) { return a > b; });
  if (least.order <= kSpikeLowest || most.order >= kSpikeHighest) least.place = most.place = 0;
  Spikes spikes{float_of(kNaN32), float_of(kNaN32), {least.place, most.place}};
  const std::uint32_t place = spike_filler(spikes.at);
  std::uint32_t bits = 0;  // of the filler, where its lane has it; +0 where the block is too short
  DTCOMM_UNROLL
  for (int j = 0; j < 3; ++j) bits |= first + static_cast<unsigned>(j) == place && j < live ? bits_of(x[j]) : 0;
  bits = over_group(lanes, group, bits, [](std::uint32_t a, std::uint32_t b) { return a | b; });
  if (least.order <= kSpikeLowest || most.order >= kSpikeHighest) return spikes;
  DTCOMM_UNROLL
  for (int j = 0; j < kOctet; ++j) {
    const std::uint32_t here = first + static_cast<std::uint32_t>(j);
    if (here == spikes.at.low || here == spikes.at.high) x[j] = float_of(bits);
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

DTCOMM_DEVICE void put_spikes(const Spikes& spikes, std::uint32_t first, float (&x)[kOctet]) {
  DTCOMM_UNROLL
  for (int j = 0; j < kOctet; ++j) {
    const std::uint32_t here = first + static_cast<std::uint32_t>(j);
    if (here == spikes.at.low) x[j] = spikes.low;
    if (here == spikes.at.high) x[j] = spikes.high;
  }
}

// Two values a block, then two places: a byte each where blocks are short, else two.
DTCOMM_DEVICE void store_spikes(const Codec& codec, const Shape& shape, std::uint32_t block, const Spikes& spikes,
                                std::uint8_t* granule) {
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

DTCOMM_DEVICE Spikes load_spikes(const Codec& codec, const Shape& shape, std::uint32_t block,
                                 const std::uint8_t* granule) {
  const std::uint8_t* values = granule + shape.spikes_at;
  const std::uint8_t* places = values + shape.blocks * 2 * scale_bytes(codec.scale);
  Spikes spikes{load_field(codec.scale, values, 2 * block), load_field(codec.scale, values, 2 * block + 1), {}};
  if (codec.block <= 256) {
    spikes.at = {places[2 * block], places[2 * block + 1]};
  } else {
    const auto* wide = reinterpret_cast<const Word16*>(places);
    spikes.at = {wide[2 * block], wide[2 * block + 1]};
  }
  return spikes;
}

}  // namespace dtcomm::cuda
