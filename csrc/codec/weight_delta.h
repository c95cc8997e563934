// Deltas of weights: the bytes that turn one version of a tensor into the next, bit for bit.
// docs/reference/weights-format.md specifies them.
//
// A payload is a head, an index with one entry for each granule, the granules, and padding. The bytes of a granule
// depend on nothing but its own elements, so granules are encoded and decoded by several threads, and each can be read
// alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtcomm {

constexpr std::size_t kDeltaGranule = 65536;  // elements
constexpr std::size_t kDeltaHead = 32, kDeltaEntry = 8;
constexpr std::size_t kDeltaPadding = 16;  // zeros at the end, so that a reader may load whole words
constexpr unsigned kDeltaClasses = 16;     // the most classes of a granule

// What the elements are. The numbers are part of the payload: append only.
enum class WeightKind : std::uint8_t { bytes = 0, bf16 = 1, f16 = 2, f32 = 3, e4m3 = 4, e5m2 = 5 };
constexpr unsigned kWeightKinds = 6;

struct WeightLayout {
  unsigned size;           // bytes of an element
  unsigned mantissa_bits;  // below the exponent, which is below the sign; 0: there is no exponent
};

constexpr WeightLayout layout_of(WeightKind kind) {
  constexpr WeightLayout kLayouts[kWeightKinds] = {{1, 0}, {2, 7}, {2, 10}, {4, 23}, {1, 3}, {1, 2}};
  return kLayouts[static_cast<unsigned>(kind)];
}

// How the elements of a class of a granule are coded. The numbers are part of the payload.
enum class DeltaMode : std::uint8_t {
  same = 0,    // none changed
  steps = 1,   // which changed, and by how many units in the last place, most of them by one
  values = 2,  // which changed, and the differences as plain integers
  dense = 3,   // the differences of all elements
};

// The largest encoding of a granule of `n` elements of `size` bytes.
constexpr std::size_t delta_granule_bound(std::size_t n, std::size_t size) { return 1 + n * size; }

// Bytes that an encoder may write, and leave undefined, behind the bytes of a granule.
constexpr std::size_t kDeltaSlack = 16;

// Room that encoders and decoders of granules need. It is large, and most of it is not touched if little changed.
constexpr std::size_t kDeltaList = kDeltaGranule + 64;
constexpr std::size_t kDeltaRoom = (2 * (kDeltaClasses + 1) + 4) * kDeltaList;  // words of 32 bits

}  // namespace dtcomm
