// The layout of a payload: granules back to back. A granule of a dense codec holds one value per block (scales, then
// zero points), then the outliers of each block, then the codes, then what the granule has once, then zeros up to a
// multiple of 16 bytes. The last granule is cut to whole blocks. A granule of a sparse codec holds a head, the values
// of the kept elements (a payload of their own codec, without its last padding) and their positions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "codec/float_bits.h"
#include "codec/granules.h"
#include "core/types.h"

namespace dtcomm {

constexpr std::size_t kAlign = 16;
constexpr std::size_t kRandkHead = 8;  // the key that the positions come from

constexpr DTCOMM_HD std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

struct Layout {
  std::size_t granule;      // elements
  std::size_t block;        // elements that share a scale, a power of two; 1 if there is no scale
  unsigned block_shift;     // its logarithm: a division would take a good part of a granule's time
  std::size_t field_bytes;  // of one scale or zero point
  std::size_t fields;       // values per block: 0 casts, 1 symmetric, 2 asymmetric
  std::size_t code_bits;
  std::size_t outlier_bytes;  // per block: two values and two positions, or 0
  std::size_t kept;           // of a whole granule; 0: dense, and the rest is 0 too
  std::size_t head;           // bytes before the values
  std::size_t position_bits;  // 12: a list of positions; 1: a bitmap of the granule; 0: they come from the head
  std::size_t trailer;        // bytes behind the codes of a dense granule: its own scale

  constexpr DTCOMM_HD std::size_t blocks(std::size_t elements) const { return (elements + block - 1) >> block_shift; }
  constexpr DTCOMM_HD std::size_t zeros_at(std::size_t elements) const { return blocks(elements) * field_bytes; }
  constexpr DTCOMM_HD std::size_t outliers_at(std::size_t elements) const {
    return blocks(elements) * field_bytes * fields;
  }
  constexpr DTCOMM_HD std::size_t codes_at(std::size_t elements) const {
    return blocks(elements) * (field_bytes * fields + outlier_bytes);
  }
  constexpr DTCOMM_HD std::size_t dense(std::size_t elements) const {
    return codes_at(elements) + (blocks(elements) * block * code_bits + 7) / 8;
  }

  // Sparse codecs, of a granule of `elements` >= 1 elements: how many are kept, and the bytes of their values.
  constexpr DTCOMM_HD std::size_t kept_of(std::size_t elements) const {
    return (kept * elements + kSparseGranule - 1) / kSparseGranule;
  }
  constexpr DTCOMM_HD std::size_t values(std::size_t elements) const {
    const std::size_t count = kept_of(elements), whole = (count - 1) / kValueGranule;
    return whole * aligned(dense(kValueGranule)) + dense(count - whole * kValueGranule);
  }
  constexpr DTCOMM_HD std::size_t positions(std::size_t elements) const {
    return ((position_bits == 1 ? elements : kept_of(elements) * position_bits) + 7) / 8;
  }

  // Bytes of a granule that holds `elements` elements, without and with the padding.
  constexpr DTCOMM_HD std::size_t used(std::size_t elements) const {
    return kept ? head + values(elements) + positions(elements) : dense(elements) + trailer;
  }
  constexpr DTCOMM_HD std::size_t bytes(std::size_t elements) const { return aligned(used(elements)); }
};

// The codec of a sparse codec's values.
constexpr DTCOMM_HD Codec values_of(const Codec& codec) {
  Codec values;
  values.block = 0;
  if (codec.element == Element::integer) {
    values = codec;
    values.family = Family::integer;
    values.element = Element::none;
    values.kept = 0;
  } else {
    values.family = codec.element == Element::bf16   ? Family::bf16
                    : codec.element == Element::fp16 ? Family::fp16
                                                     : Family::none;
  }
  return values;
}

constexpr DTCOMM_HD std::size_t scale_bytes(Scale scale) { return scale == Scale::bf16 ? 2 : 4; }

constexpr DTCOMM_HD Layout cast_layout(std::size_t bits) { return {kGranule, 1, 0, 0, 0, bits, 0, 0, 0, 0, 0}; }

constexpr DTCOMM_HD Layout block_layout(const Codec& codec, std::size_t field_bytes, std::size_t fields,
                                        std::size_t bits) {
  const std::size_t positions = codec.block <= 256 ? 2 : 4;
  unsigned shift = 0;
  while (codec.block >> shift > 1) ++shift;
  const std::size_t granule = codec.block > kGranule ? codec.block : kGranule;
  const std::size_t outlier_bytes = codec.spikes ? 2 * field_bytes + positions : 0;
  return {granule, codec.block, shift, field_bytes, fields, bits, outlier_bytes, 0, 0, 0, 0};
}

constexpr DTCOMM_HD Layout integer_layout(const Codec& codec) {
  return block_layout(codec, scale_bytes(codec.scale), codec.symmetric ? 1 : 2, codec.bits);
}

constexpr DTCOMM_HD Layout nvfp4_layout(const Codec& codec) {
  Layout layout = block_layout(codec, 1, 1, 4);
  layout.granule = kNvfp4Granule;
  layout.trailer = sizeof(float);
  return layout;
}

// The codes have `bits` bits in the mean. What the granule has once lies at their end, and in the padding.
constexpr DTCOMM_HD Layout variable_layout(const Codec& codec) {
  Layout layout = block_layout(codec, 1, 1, codec.bits);
  layout.granule = kVariableGranule;
  return layout;
}

constexpr DTCOMM_HD Layout sparse_layout(const Codec& codec) {
  Layout layout =
      codec.element == Element::integer ? integer_layout(codec) : cast_layout(codec.element == Element::fp32 ? 32 : 16);
  layout.granule = kSparseGranule;
  layout.kept = codec.kept;
  if (codec.family == Family::randk) {
    layout.head = kRandkHead;
  } else {
    layout.position_bits = codec.kept * kPositionBits > kSparseGranule ? 1 : kPositionBits;
  }
  return layout;
}

constexpr DTCOMM_HD Layout layout_of(const Codec& codec, DType dtype) {
  switch (codec.family) {
    case Family::integer:
      return integer_layout(codec);
    case Family::float8:
      return block_layout(codec, scale_bytes(codec.scale), 1, 8);
    case Family::mx:
      return block_layout(codec, 1, 1, codec.element == Element::e2m1 ? 4 : 8);
    case Family::nvfp4:
      return nvfp4_layout(codec);
    case Family::variable:
      return variable_layout(codec);
    case Family::sign:
      return block_layout(codec, scale_bytes(codec.scale), 1, 1);
    case Family::exact:
      return block_layout(codec, 1, 1, codec.bits);
    case Family::topk:
    case Family::randk:
      return sparse_layout(codec);
    case Family::none:
      return cast_layout(8 * size_of(dtype));
    case Family::fp16:
    case Family::bf16:
      return cast_layout(16);
  }
  return {};  // no family: check_codec refuses the number
}

// The most blocks of a whole granule of a family, over its widths of codes and its blocks from `smallest` on.
constexpr std::size_t most_blocks(Family family, std::size_t smallest = kSmallestBlock) {
  std::size_t most = 0;
  for (unsigned bits = 1; bits <= 8; ++bits) {
    for (std::size_t block = smallest; block <= kLargestBlock; block *= 2) {
      Codec codec;
      codec.family = family;
      codec.bits = static_cast<std::uint8_t>(bits);
      codec.block = static_cast<std::uint32_t>(block);
      const Layout layout = layout_of(codec, DType::f32);
      const std::size_t blocks = layout.blocks(layout.granule);
      most = blocks > most ? blocks : most;
    }
  }
  return most;
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

struct Int7Granule {
  std::uint16_t scales[kGranule / 32];
  std::uint8_t fours[kGranule / 2];  // two codes' lower four bits a byte
  std::uint8_t twos[kGranule / 4];
  std::uint8_t ones[kGranule / 8];
};
static_assert(sizeof(Int7Granule) == 960 && sizeof(Int7Granule) % kAlign == 0, "int7:block=32,scale=bf16");

struct Int8AsymmetricGranule {
  float scales[kGranule / 64];
  float zeros[kGranule / 64];
  std::uint8_t codes[kGranule];
};
static_assert(sizeof(Int8AsymmetricGranule) == 1152, "int8:block=64,scale=fp32,symmetric=false");
static_assert(offsetof(Int8AsymmetricGranule, zeros) == 64, "zero points follow the scales");
static_assert(offsetof(Int8AsymmetricGranule, codes) == 128, "codes follow the zero points");

}  // namespace dtcomm
