// A codec as the native core sees it: a frozen description of a byte layout. dtcomm/codecs has the same in Python;
// docs/reference/wire-format.md specifies the bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace dtcomm {

// The numbers are part of the op header that ranks compare: append only.
enum class Family : std::uint8_t {
  none = 0,
  fp16 = 1,
  bf16 = 2,
  integer = 3,
  float8 = 4,
  mx = 5,
  sign = 6,
  topk = 7,
  randk = 8,
  exact = 9,
  nvfp4 = 10,
  variable = 11
};
enum class Scale : std::uint8_t { bf16 = 0, fp32 = 1 };

// The format of a code, for families that have several.
enum class Element : std::uint8_t {
  none = 0,
  e4m3 = 1,  // float8, mx
  e5m2 = 2,
  e2m1 = 3,  // mx
  bf16 = 4,  // topk, randk: the type of a value
  fp16 = 5,
  fp32 = 6,
  integer = 7,  // topk, randk: values are a payload of the integer codec that the other fields describe
  e3m4 = 8      // float8
};

struct Codec {
  Family family = Family::none;
  std::uint8_t bits = 0;        // integer: 2..8; exact: 16, 32; variable: mean, 2..7
  Scale scale = Scale::bf16;    // type of each block's scale
  std::uint8_t symmetric = 1;   // integer: codes are signed and there is no zero point
  std::uint8_t stochastic = 0;  // rounding: 0 nearest (ties to even), 1 stochastic; of no cast but bf16
  std::uint8_t rotate = 0;      // 1: blocks are rotated by a Hadamard matrix with random signs
  std::uint8_t spikes = 0;      // 1: each block's smallest and largest element are stored apart
  Element element = Element::none;
  std::uint32_t block = 0;  // elements that share a scale
  std::uint32_t kept = 0;   // topk, randk: elements of a whole granule that are sent
};
static_assert(sizeof(Codec) == 16, "Codec is compared byte by byte between ranks");

// Elements of one granule: the unit at which a payload may be cut.
std::size_t granule_elements(const Codec& codec);

// Bytes of the payload of `numel` elements; only Family::none depends on `dtype`.
std::size_t wire_bytes(const Codec& codec, std::size_t numel, DType dtype);

}  // namespace dtcomm
