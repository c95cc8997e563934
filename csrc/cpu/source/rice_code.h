// Rice codes of integers: the low bits of all of them as bit planes, then the rest in unary.
#pragma once

#include "cpu/source/delta_blocks.h"

namespace dtcomm::DTCOMM_ISA {

constexpr unsigned kLengthBits = 5, kLongestNumber = 17;  // of a number: its bits, behind how many they are

// --- bits, the lowest of a byte first -------------------------------------------------------------------------

// Memory that is written to is zero.
struct Writer {
  std::uint8_t* base;
  std::uint64_t at = 0;

  // The lowest `count` bits, at most 64, of a value; those above are zero or ignored.
  void put(std::uint64_t value, unsigned count) {
    if (count < 64) value &= (std::uint64_t{1} << count) - 1;
    std::uint8_t* const byte = base + (at >> 3);
    const unsigned shift = at & 7;
    auto* const word = unaligned<std::uint64_t>(byte);
    word->value |= value << shift;
    if (shift + count > 64) byte[8] = static_cast<std::uint8_t>(value >> (64 - shift));
    at += count;
  }
  void put_number(std::uint64_t value);
};

// Reads up to 9 bytes from the byte that has the first bit.
inline std::uint64_t peek(const std::uint8_t* base, std::uint64_t at) {
  const std::uint8_t* const byte = base + (at >> 3);
  const unsigned shift = at & 7;
  const std::uint64_t low = unaligned<std::uint64_t>(byte)->value >> shift;
  return low | (static_cast<std::uint64_t>(byte[8]) << 1) << (63 - shift);
}

struct Reader {
  const std::uint8_t* base;
  std::uint64_t at, end;

  // Whether there are `count` bits, at most 32; they become the value.
  bool take(unsigned count, std::uint32_t& value) {
    if (end - at < count) return false;
    value = static_cast<std::uint32_t>(peek(base, at) & ((std::uint64_t{1} << count) - 1));
    at += count;
    return true;
  }
  bool take_number(std::uint32_t& value) {
    std::uint32_t length;
    return take(kLengthBits, length) && length <= kLongestNumber && take(length, value) &&
           (length == 0 || value >> (length - 1) != 0);
  }
  bool skip(std::uint64_t count) {
    if (end - at < count) return false;
    at += count;
    return true;
  }
};

inline unsigned length_of(std::uint64_t value) {
  return value == 0 ? 0 : 64 - static_cast<unsigned>(__builtin_clzll(value));
}

inline unsigned number_bits(std::uint64_t value) { return kLengthBits + length_of(value); }

inline void Writer::put_number(std::uint64_t value) {
  put(length_of(value), kLengthBits);
  put(value, length_of(value));
}

// --- Rice codes -----------------------------------------------------------------------------------------------

struct Rice {
  unsigned parameter;
  std::uint64_t bits;  // without the parameter
};

// The parameter with the fewest bits, the smallest of equal ones, for `count` integers and `zeros` more that are zero.
// The number of bits is a convex function of the parameter, so the first minimum on the way down or up is the least.
inline Rice best_rice(const std::uint32_t* values, std::size_t count, std::size_t zeros, unsigned most) {
  const auto shifted_sum = [=](unsigned shift) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += values[i] >> shift;
    return sum;
  };
  const std::uint64_t all = count + zeros;
  const std::uint64_t total = shifted_sum(0);
  const auto bits = [&](unsigned k) { return all * (k + 1) + (k == 0 ? total : shifted_sum(k)); };
  unsigned k = all == 0 ? 0 : length_of(total / all);
  k = k > 0 ? k - 1 : 0;
  k = k > most ? most : k;
  Rice best{k, bits(k)};
  while (best.parameter > 0) {
    const std::uint64_t less = bits(best.parameter - 1);
    if (less > best.bits) break;
    best = {best.parameter - 1, less};
  }
  while (best.parameter == k && k < most) {
    const std::uint64_t more = bits(k + 1);
    if (more >= best.bits) break;
    best = {++k, more};
  }
  return best;
}

// Writes integers that are followed by zeros up to a multiple of 64.
inline void put_rice(Writer& to, const std::uint32_t* values, std::size_t count, unsigned parameter) {
  for (unsigned plane = 0; plane < parameter; ++plane) {
    for (std::size_t i = 0; i < count; i += kBlock) {
      to.put(plane_of(values + i, plane), static_cast<unsigned>(smaller(kBlock, count - i)));
    }
  }
  std::uint64_t at = to.at;
  for (std::size_t i = 0; i < count; ++i) {
    at += values[i] >> parameter;
    to.base[at >> 3] = static_cast<std::uint8_t>(to.base[at >> 3] | 1u << (at & 7));
    ++at;
  }
  to.at = at;
}

// Where integers are in a payload.
struct RiceAt {
  std::uint64_t planes, unary, end;
  std::size_t count;
  unsigned parameter;

  std::uint64_t sum(const std::uint8_t* base) const {
    std::uint64_t total = (end - unary - count) << parameter;
    for (unsigned plane = 0; plane < parameter; ++plane) {
      std::uint64_t ones = 0;
      const std::uint64_t from = planes + plane * count;
      std::size_t i = 0;
      for (; i + 64 <= count; i += 64) ones += count_bits(peek(base, from + i));
      if (i < count) ones += count_bits(peek(base, from + i) & ((std::uint64_t{1} << (count - i)) - 1));
      total += ones << plane;
    }
    return total;
  }
};

// Finds where `count` integers end. Whether they end within the payload.
inline bool take_rice(Reader& from, std::size_t count, unsigned parameter_bits, RiceAt& at) {
  std::uint32_t parameter;
  if (!from.take(parameter_bits, parameter)) return false;
  at.parameter = parameter;
  at.count = count;
  at.planes = from.at;
  if (!from.skip(std::uint64_t{parameter} * count)) return false;
  at.unary = from.at;
  std::uint64_t place = from.at;
  std::size_t left = count;
  while (left > 0) {
    if (place >= from.end) return false;
    const std::uint64_t word = peek(from.base, place);
    const unsigned ones = count_bits(word);
    if (ones >= left) {
      place += select_bit(word, static_cast<unsigned>(left - 1)) + 1;
      break;
    }
    left -= ones;
    place += 64;
  }
  if (place > from.end) return false;
  from.at = at.end = place;
  return true;
}

// Reads integers, with room for a multiple of 64.
inline void unpack(const std::uint8_t* base, const RiceAt& at, std::uint32_t* values) {
  for (std::size_t i = 0; i < at.count; i += kBlock) {
    __builtin_memset(values + i, 0, kBlock * sizeof *values);
    for (unsigned plane = 0; plane < at.parameter; ++plane) {
      add_plane(values + i, plane, peek(base, at.planes + plane * at.count + i));
    }
  }
  std::uint64_t last = at.unary;  // behind the last code
  std::size_t i = 0;
  for (std::uint64_t place = at.unary; i < at.count; place += 64) {
    for (std::uint64_t word = peek(base, place); word != 0 && i < at.count; word &= word - 1) {
      const std::uint64_t one = place + lowest_bit(word);
      values[i] |= static_cast<std::uint32_t>(one - last) << at.parameter;
      last = one + 1;
      ++i;
    }
  }
}

}  // namespace dtcomm::DTCOMM_ISA
