// lossless: the exponents of floats as codes of a few bits, everything else as it is. docs/reference/wire-format.md
// specifies the bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/granules.h"

namespace dtcomm {

constexpr std::size_t kLosslessHead = 16, kLosslessGranuleHead = 4;  // bytes of a payload's head and of a granule's
constexpr unsigned kWidestExponentCode = 4;                          // bits
constexpr unsigned kPlainExponents = 8;  // the width that stands for exponents that are stored as they are
enum class LosslessMode : std::uint8_t { verbatim = 0, coded = 1 };

// The largest payload of `numel` elements of `size` bytes.
inline std::size_t lossless_bound(std::size_t numel, std::size_t size) {
  return numel ? kLosslessHead + numel * size : 0;
}

// Bytes of a coded granule of `n` elements of `size` bytes.
inline std::size_t lossless_granule_bytes(std::size_t n, std::size_t size, unsigned width, std::size_t escapes) {
  const std::size_t exponents = width == kPlainExponents ? n : width * ((n + 7) / 8) + escapes;
  return kLosslessGranuleHead + n * (size - 1) + exponents;
}

}  // namespace dtcomm
