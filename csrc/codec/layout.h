// Where the bytes of a payload lie. A payload is granules back to back; a granule is fields of one value per block
// (scales, then zero points), then the codes, then zeros up to 16 bytes. The last granule is cut to whole blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "codec/scalar.h"
#include "core/types.h"

namespace dtcomm {

constexpr std::size_t kGranule = 1024;
constexpr std::size_t kAlign = 16;
constexpr std::size_t kSmallestBlock = 16, kLargestBlock = 4096;

struct Layout {
  std::size_t granule;      // elements
  std::size_t block;        // elements that share a scale; 1 where there is no scale
  std::size_t field_bytes;  // of one scale or zero point
  std::size_t fields;       // values per block: 0 casts, 1 symmetric, 2 asymmetric
  std::size_t code_bits;

  DTCOMM_HD std::size_t blocks(std::size_t elements) const { return (elements + block - 1) / block; }
  DTCOMM_HD std::size_t zeros_at(std::size_t elements) const { return blocks(elements) * field_bytes; }
  DTCOMM_HD std::size_t codes_at(std::size_t elements) const { return blocks(elements) * field_bytes * fields; }
  DTCOMM_HD std::size_t used(std::size_t elements) const {
    return codes_at(elements) + (blocks(elements) * block * code_bits + 7) / 8;
  }
  // Bytes of a granule that holds `elements` elements.
  DTCOMM_HD std::size_t bytes(std::size_t elements) const { return (used(elements) + kAlign - 1) / kAlign * kAlign; }
};

DTCOMM_HD Layout layout_of(const Codec& codec, DType dtype) {
  switch (codec.family) {
    case Family::integer:
      return {codec.block > kGranule ? codec.block : kGranule, codec.block,
              codec.scale == Scale::bf16 ? std::size_t{2} : std::size_t{4},
              codec.symmetric ? std::size_t{1} : std::size_t{2}, codec.bits};
    case Family::none:
      return {kGranule, 1, 0, 0, 8 * size_of(dtype)};
    default:
      return {kGranule, 1, 0, 0, 16};
  }
}

// The default codecs' full granules as structs: the wire format, byte for byte.
struct HalfGranule {
  std::uint16_t codes[kGranule];
};
static_assert(sizeof(HalfGranule) == 2048 && sizeof(HalfGranule) % kAlign == 0, "fp16 and bf16");

struct Int8Granule {
  std::uint16_t scales[kGranule / 32];
  std::int8_t codes[kGranule];
};
static_assert(sizeof(Int8Granule) == 1088 && sizeof(Int8Granule) % kAlign == 0, "int8:block=32,scale=bf16");
static_assert(offsetof(Int8Granule, codes) == 64, "codes follow the scales");

struct Int8AsymmetricGranule {
  float scales[kGranule / 64];
  float zeros[kGranule / 64];
  std::uint8_t codes[kGranule];
};
static_assert(sizeof(Int8AsymmetricGranule) == 1152, "int8:block=64,scale=fp32,symmetric=false");
static_assert(offsetof(Int8AsymmetricGranule, zeros) == 64, "zero points follow the scales");
static_assert(offsetof(Int8AsymmetricGranule, codes) == 128, "codes follow the zero points");

}  // namespace dtcomm
