// Option spikes=1: each block's smallest and largest element are sent apart, in the scale's type and with their
// positions, so that the codes cover the range of the others (docs/reference/wire-format.md names the source).
#pragma once

#include "codec/codec.h"
#include "codec/counter_rng.h"
#include "codec/float_bits.h"
#include "codec/layout.h"

namespace dtcomm {

// Floats as integers of the same order, -0 before +0. Finite ones lie strictly between the two limits.
DTCOMM_HD std::int32_t float_order(float value) {
  const auto bits = static_cast<std::int32_t>(bits_of(value));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
// The inverse: the bits of the float with this order.
DTCOMM_HD std::int32_t bits_of_order(std::int32_t order) { return order ^ ((order >> 31) & 0x7fffffff); }
DTCOMM_HD float float_from_order(std::int32_t order) {
  return float_of(static_cast<std::uint32_t>(bits_of_order(order)));
}
constexpr std::int32_t kHighestOrder = 0x7f800000, kLowestOrder = -0x7f800001;

// The positions of a block's outliers within it: the first of its smallest elements and the first of its largest.
struct OutlierPositions {
  std::uint32_t low, high;
};

struct Outliers {
  float low, high;
  OutlierPositions at;
};

// The index of the block's first element that is neither outlier, which fills both positions: at most 2, and possibly
// outside a very short block.
DTCOMM_HD std::uint32_t filler_position(OutlierPositions at) {
  const std::uint32_t first = static_cast<std::uint32_t>(at.low == 0) | static_cast<std::uint32_t>(at.high == 0);
  return first + (first & (static_cast<std::uint32_t>(at.low == 1) | static_cast<std::uint32_t>(at.high == 1)));
}

// Extracts the outliers of a block of n >= 1 elements and fills their positions, which gives the block that is encoded.
// A block with a NaN stays as it is; its outliers are NaN at position 0.
DTCOMM_HD Outliers extract_outliers(float* x, std::uint32_t n) {
  OutlierPositions at = {0, 0};
  std::int32_t least = float_order(x[0]), most = least;
  for (std::uint32_t i = 1; i < n; ++i) {
    const std::int32_t order = float_order(x[i]);
    at.low = order < least ? i : at.low;
    at.high = order > most ? i : at.high;
    least = order < least ? order : least;
    most = order > most ? order : most;
  }
  if (least <= kLowestOrder || most >= kHighestOrder) return {float_of(kNaN32), float_of(kNaN32), {0, 0}};
  const Outliers outliers = {x[at.low], x[at.high], at};
  const std::uint32_t filler = filler_position(at);
  x[at.low] = x[at.high] = filler < n ? x[filler] : 0.0f;
  return outliers;
}

// An outlier in the scale's type, as fp32: rounded as codes are, with the random number of its element, but never to
// Inf.
DTCOMM_HD float round_outlier(const Codec& codec, float value, float random) {
  const std::uint32_t bits = bits_of(value);
  if (codec.scale == Scale::fp32 || !finite(value)) return value;
  const std::uint32_t nearest = 0x7fff + ((bits >> 16) & 1);
  const std::uint32_t half = codec.stochastic ? static_cast<std::uint32_t>(random * 65536.0f) : nearest;
  const std::uint32_t cut = (bits + half) & 0xffff0000U;
  return float_of((cut & 0x7fffffff) < kInfinity32 ? cut : cut - 0x10000U);
}

// The section in a granule of `n` elements: two values per block from layout.outliers_at(n) on, then two positions per
// block.
DTCOMM_HD std::size_t outlier_position_bytes(const Layout& layout) { return layout.block <= 256 ? 1 : 2; }
DTCOMM_HD std::size_t outlier_positions_at(const Layout& layout, std::size_t n) {
  return layout.outliers_at(n) + layout.blocks(n) * 2 * layout.field_bytes;
}

}  // namespace dtcomm
