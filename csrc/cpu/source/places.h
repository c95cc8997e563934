// The positions of a granule of randk.
#pragma once

#include "codec/sparse.h"
#include "cpu/source/sparse_values.h"

namespace dtcomm::DTCOMM_ISA {

// Those of the first kept.count values of a granule of n elements.
inline void draw(std::uint64_t granule_key, std::size_t n, Kept& kept) {
  const Shuffle shuffle = make_shuffle(granule_key, n);
  if (n == shuffle.mask + std::size_t{1}) {  // every output is a position
    for (std::uint32_t i = 0; i < kept.count; ++i) {
      kept.position[i] = static_cast<std::uint16_t>(turned(shuffle, shuffled_once(shuffle, i)));
    }
  } else {
    for (std::uint32_t i = 0; i < kept.count; ++i) kept.position[i] = static_cast<std::uint16_t>(shuffled(shuffle, i));
  }
}

}  // namespace dtcomm::DTCOMM_ISA
