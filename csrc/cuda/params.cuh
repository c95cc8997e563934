// KernelParams: the arguments of a codec kernel. It is cpu/kernels.h's Combine with everything computed that is the
// same for all granules.
#pragma once

#include "codec/layout.h"
#include "cpu/kernels.h"
#include "cuda/kernels.h"
#include "cuda/warp.cuh"

namespace dtcomm::cuda {

// Where the parts of one granule's payload lie.
struct GranuleShape {
  std::uint32_t n;       // elements
  std::uint32_t blocks;  // of elements that share a scale
  std::uint32_t stored;  // codes, including those of missing elements in the last block
  std::uint32_t zeros_at, outliers_at, codes_at;
  std::uint32_t used, bytes;  // bytes without and with the padding
};

DTCOMM_HD GranuleShape granule_shape_of(const Layout& layout, std::size_t n) {
  const auto word = [](std::size_t value) { return static_cast<std::uint32_t>(value); };
  return {word(n),
          word(layout.blocks(n)),
          word(layout.blocks(n) * layout.block),
          word(layout.zeros_at(n)),
          word(layout.outliers_at(n)),
          word(layout.codes_at(n)),
          word(layout.used(n)),
          word(layout.bytes(n))};
}

struct KernelParams {
  const std::uint8_t* payloads[kInlinePayloads];  // the payloads, up to kInlinePayloads
  const std::uint8_t* const* table;               // their addresses in device memory, where there are more
  int count, position;
  const void* local;
  const float* residual_in;
  float* residual_out;
  std::uint8_t* payload_out;
  void* out;
  DType local_dtype, out_dtype;
  ReduceOp op;
  bool has_local;      // local or residual_in
  bool divides;        // by `divisor`
  bool is_computed;    // the result of arithmetic: several terms, a division or a residual
  bool canonical_nan;  // NaNs are written as the canonical NaN
  bool local_aligned, residual_aligned, out_aligned;  // aligned to sixteen bytes
  float divisor;
  std::uint32_t granule_shift;  // a granule has 1 << granule_shift elements
  std::uint64_t last;           // index of the last granule
  std::uint64_t granule_bytes;
  std::uint64_t key, offset;
  GranuleShape whole, tail;  // of the granules, and of the last one

  DTCOMM_DEVICE const std::uint8_t* payload(int t) const { return count > kInlinePayloads ? table[t] : payloads[t]; }
};

// Calls, or copies, of one launch. Together with a family they fit the 32,764 bytes that arguments of a kernel may
// take.
constexpr unsigned kMaxGroup = 64;

template <class Item>
struct Group {
  unsigned size;
  unsigned first_tile[kMaxGroup + 1];  // the thread block with which each item begins; behind the last, their number
  Item items[kMaxGroup];

  // The item that thread block `tile` works on.
  DTCOMM_DEVICE unsigned item_of(unsigned tile) const {
    unsigned item = 0;
    if (size == 1) return item;  // a call alone
    for (unsigned half = kMaxGroup / 2; half > 0; half /= 2) {
      if (item + half < size && first_tile[item + half] <= tile) item += half;
    }
    return item;
  }
};

using CallGroup = Group<KernelParams>;
static_assert(sizeof(CallGroup) <= 30000, "the arguments of a kernel");

// Where the eight elements of a thread lie, in the tensor and in a payload.
struct Vec8Position {
  std::uint64_t first;        // index of the first element in the tensor
  std::uint64_t granule;      // offset of their granule in a payload, in bytes
  const GranuleShape* shape;  // of the granule
  std::uint32_t at;           // index of the first element in the granule; at least `stored` where it is past the end
  int present;                // how many of the eight elements exist
  bool whole;                 // all elements of the warp exist; the same for all its lanes
};

}  // namespace dtcomm::cuda
