// codec/hadamard.h's transform of the block that a group of lanes holds.
#pragma once

#include "codec/hadamard.h"
#include "cuda/warp.cuh"

namespace dtcomm::cuda {

template <class Lanes>
DTCOMM_DEVICE void butterfly_stages(const Lanes& lanes, unsigned group, float (&x)[kVec8]) {
  DTCOMM_UNROLL
  for (int half = 1; half < kVec8; half *= 2) {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      if ((j & half) == 0) butterfly(x[j], x[j + half]);
    }
  }
  DTCOMM_LOOP
  for (unsigned reach = 1; reach < group; reach *= 2) {
    float other[kVec8];
    lanes.shuffle_xor_vec8(x, reach, other);
    const bool upper = (lanes.thread() & reach) != 0;
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) x[j] = upper ? other[j] - x[j] : x[j] + other[j];
  }
}

// Rotates the blocks of all lanes. `at`: the vec8's first element in its granule.
template <class Lanes>
DTCOMM_DEVICE void rotate(const Lanes& lanes, unsigned group, std::uint32_t at, float (&x)[kVec8]) {
  const float norm = rotation_norm(group * kVec8);
  const std::uint32_t first = at % (group * kVec8);
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) x[j] = rotation_in(x[j], first + static_cast<unsigned>(j), norm);
  butterfly_stages(lanes, group, x);
}

template <class Lanes>
DTCOMM_DEVICE void rotate_back(const Lanes& lanes, unsigned group, std::uint32_t at, float (&x)[kVec8]) {
  const float norm = rotation_norm(group * kVec8);
  const std::uint32_t first = at % (group * kVec8);
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) x[j] = rotation_back(x[j], norm);
  butterfly_stages(lanes, group, x);
  DTCOMM_UNROLL
  for (int j = 0; j < kVec8; ++j) x[j] = rotation_out(x[j], first + static_cast<unsigned>(j));
}

}  // namespace dtcomm::cuda
