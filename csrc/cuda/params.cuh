// What a launch hands to its threads: cpu/kernels.h's Combine, with all that is the same for every granule worked out.
#pragma once

#include "codec/layout.h"
#include "cpu/kernels.h"
#include "cuda/kernels.h"
#include "cuda/warp.cuh"

namespace dtcomm::cuda {

// Where the bytes of one granule lie.
struct Shape {
  std::uint32_t n;       // elements
  std::uint32_t blocks;  // of elements that share a scale
  std::uint32_t stored;  // codes, those of missing elements included
  std::uint32_t zeros_at, spikes_at, codes_at;
  std::uint32_t used, bytes;  // without and with the padding
};

DTCOMM_HD Shape shape_of(const Layout& layout, std::size_t n) {
  const auto word = [](std::size_t value) { return static_cast<std::uint32_t>(value); };
  return {word(n),
          word(layout.blocks(n)),
          word(layout.blocks(n) * layout.block),
          word(layout.zeros_at(n)),
          word(layout.spikes_at(n)),
          word(layout.codes_at(n)),
          word(layout.used(n)),
          word(layout.bytes(n))};
}

struct Call {
  const std::uint8_t* near[kNearPayloads];  // the first payloads, by value
  const std::uint8_t* const* table;         // all of them, where there are more
  int count, position;
  const void* local;
  const float* residual_in;
  float* residual_out;
  std::uint8_t* payload_out;
  void* out;
  DType local_dtype, out_dtype;
  ReduceOp op;
  bool has_local;                            // local or residual_in
  bool divides;                              // by `divisor`
  bool joins;                                // the sum is more than one term as it was
  bool canonical;                            // floats are the result of arithmetic: NaN is written as the one NaN
  bool local_wide, residual_wide, out_wide;  // aligned to sixteen bytes
  float divisor;
  std::uint32_t granule_shift;  // a granule has 1 << granule_shift elements
  std::uint64_t last;           // the last granule
  std::uint64_t granule_bytes;
  std::uint64_t key, offset;
  Shape whole, tail;  // of the granules, and of the last one

  DTCOMM_DEVICE const std::uint8_t* payload(int t) const { return count > kNearPayloads ? table[t] : near[t]; }
};

// Where in its payload a thread's octet lies.
struct Place {
  std::uint64_t first;    // element of the tensor
  std::uint64_t granule;  // its first byte in a payload
  const Shape* shape;     // of the granule
  std::uint32_t at;       // element of the granule; beyond the tensor's end, so beyond `stored`
  int present;            // how many of the eight exist
  bool whole;             // the same for all lanes of a warp: all their elements exist
};

}  // namespace dtcomm::cuda
