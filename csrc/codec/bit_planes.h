// Bit planes: codes of 2 to 8 bits are cut into planes of 8, 4, 2 and 1 bits, the low bits first (7 = 4 + 2 + 1), so
// that no code straddles bytes. A plane is a bit string: element i has its bits i * unit .. i * unit + unit - 1.
//
// Functions work on groups of eight codes, held as the eight bytes of a word (code j is byte j). A group fills whole
// bytes of every plane, so different threads may write different groups.
#pragma once

#include <cstddef>

#include "codec/float_bits.h"

namespace dtcomm {

constexpr std::size_t kGroup = 8;

// Whether codes of `bits` bits have the plane of `unit` bits: whether that binary digit of `bits` is set.
DTCOMM_HD constexpr bool has_plane(unsigned bits, unsigned unit) { return (bits & unit) != 0; }

// The first bit of a code that the plane holds: planes of larger units hold the lower bits.
DTCOMM_HD constexpr unsigned plane_low(unsigned bits, unsigned unit) { return bits & ~(2 * unit - 1); }

// Where a plane begins, in bytes, behind the first one; `count`, of codes, is a multiple of 16.
DTCOMM_HD std::size_t plane_at(unsigned bits, unsigned unit, std::size_t count) {
  return count / 8 * plane_low(bits, unit);
}

// The lowest `digits` bits of every `period` bits.
constexpr std::uint64_t repeated_mask(unsigned digits, unsigned period) {
  std::uint64_t mask = 0;
  for (unsigned at = 0; at < 64; at += period) mask |= ((std::uint64_t{1} << digits) - 1) << at;
  return mask;
}

// Packs the low `Unit` bits of eight bytes back to back.
template <unsigned Unit>
DTCOMM_HD std::uint64_t gather_bits(std::uint64_t group) {
  static_assert(Unit == 1 || Unit == 2 || Unit == 4, "units of planes; a plane of 8 needs no packing");
  constexpr unsigned kGap = 8 - Unit;
  constexpr std::uint64_t kOne = repeated_mask(Unit, 8), kTwo = repeated_mask(2 * Unit, 16),
                          kFour = repeated_mask(4 * Unit, 32);
  group &= kOne;
  group = (group | group >> kGap) & kTwo;
  group = (group | group >> 2 * kGap) & kFour;
  return (group | group >> 4 * kGap) & ((std::uint64_t{1} << 8 * Unit) - 1);
}

// The inverse; only the low 8 * Unit bits of `packed` may be set.
template <unsigned Unit>
DTCOMM_HD std::uint64_t spread_bits(std::uint64_t packed) {
  static_assert(Unit == 1 || Unit == 2 || Unit == 4, "units of planes; a plane of 8 needs no packing");
  constexpr unsigned kGap = 8 - Unit;
  constexpr std::uint64_t kOne = repeated_mask(Unit, 8), kTwo = repeated_mask(2 * Unit, 16),
                          kFour = repeated_mask(4 * Unit, 32);
  packed = (packed | packed << 4 * kGap) & kFour;
  packed = (packed | packed << 2 * kGap) & kTwo;
  return (packed | packed << kGap) & kOne;
}

// Loads `Bytes` bytes into the low end of a word, little endian.
template <unsigned Bytes>
DTCOMM_HD std::uint64_t load_bytes(const std::uint8_t* from) {
  std::uint64_t word = 0;
  for (unsigned i = 0; i < Bytes; ++i) word |= static_cast<std::uint64_t>(from[i]) << 8 * i;
  return word;
}

template <unsigned Bytes>
DTCOMM_HD void store_bytes(std::uint64_t word, std::uint8_t* to) {
  for (unsigned i = 0; i < Bytes; ++i) to[i] = static_cast<std::uint8_t>(word >> 8 * i);
}

// Stores group `group` of `count` codes whose planes begin at `planes`. Bits of a byte beyond `bits` are ignored.
DTCOMM_HD void store_group(std::uint64_t codes, unsigned bits, std::size_t count, std::size_t group,
                           std::uint8_t* planes) {
  if (has_plane(bits, 8)) return store_bytes<8>(codes, planes + 8 * group);
  if (has_plane(bits, 4)) store_bytes<4>(gather_bits<4>(codes), planes + 4 * group);
  if (has_plane(bits, 2)) {
    store_bytes<2>(gather_bits<2>(codes >> plane_low(bits, 2)), planes + plane_at(bits, 2, count) + 2 * group);
  }
  if (has_plane(bits, 1)) {
    store_bytes<1>(gather_bits<1>(codes >> plane_low(bits, 1)), planes + plane_at(bits, 1, count) + group);
  }
}

// Loads a group as unsigned codes.
DTCOMM_HD std::uint64_t load_group(const std::uint8_t* planes, unsigned bits, std::size_t count, std::size_t group) {
  if (has_plane(bits, 8)) return load_bytes<8>(planes + 8 * group);
  std::uint64_t codes = 0;
  if (has_plane(bits, 4)) codes = spread_bits<4>(load_bytes<4>(planes + 4 * group));
  if (has_plane(bits, 2)) {
    const std::uint8_t* plane = planes + plane_at(bits, 2, count);
    codes |= spread_bits<2>(load_bytes<2>(plane + 2 * group)) << plane_low(bits, 2);
  }
  if (has_plane(bits, 1)) {
    codes |= spread_bits<1>(planes[plane_at(bits, 1, count) + group]) << plane_low(bits, 1);
  }
  return codes;
}

// Loads code `i` alone, unsigned.
DTCOMM_HD std::uint32_t load_code(const std::uint8_t* planes, unsigned bits, std::size_t count, std::size_t i) {
  std::uint32_t code = 0;
  for (unsigned unit = 8; unit > 0; unit /= 2) {
    if (!has_plane(bits, unit)) continue;
    const std::size_t at = i * unit;
    const std::uint32_t raw = static_cast<std::uint32_t>(planes[plane_at(bits, unit, count) + at / 8]) >> at % 8;
    code |= (raw & ((1u << unit) - 1)) << plane_low(bits, unit);
  }
  return code;
}

}  // namespace dtcomm
