// The epilogue of a summed activation: decode, add bias, add the stream that layers add to, and take the RMS norm, in
// one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kernels.h"

namespace dtcomm {

// A run of a tensor's elements, as a payload.
struct PayloadRun {
  const std::uint8_t* payload;
  std::size_t numel;
};

// The runs, joined, are rows of `features` elements. Tensors are of `dtype` (f32, f16 or bf16); all but `out` may be
// null:
//   y        = (decoded + bias[column]) + addend, each sum in fp32
//   out      = y, rounded to `dtype` (may be the addend)
//   norm_out = out * (1 / sqrt(mean of out squared + eps)) * weight[column], products in fp32, rounded once
//   codes    = norm_out / scale, rounded to nearest even to e4m3 or int8, for each of `groups` equal parts of a row
//   scales   = the largest magnitude of the part / the largest number (448 or 127); 0 and codes 0 where that is 0; a
//              part with a non-finite element has a NaN scale, and codes NaN in e4m3, 0 in int8
// Squares are added in fp32 by 16 lanes, element i to lane i mod 16, lanes then in halves.
struct Epilogue {
  std::size_t features = 0;
  DType dtype = DType::f32;
  const void* bias = nullptr;
  const void* addend = nullptr;  // the stream that the layers of a transformer add to
  void* out = nullptr;
  const void* weight = nullptr;
  float eps = 0;
  void* norm_out = nullptr;
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;
  std::size_t groups = 1;
  bool to_int8 = false;

  bool has_norm() const { return norm_out || codes; }
};

// The runs must hold whole rows together. A granule and a row at a time are decoded into scratch memory.
void epilogue(const Kernels& kernels, const Codec& codec, const std::vector<PayloadRun>& runs, const Epilogue& call);

// The same for a sum that an operation writes to `out` piece by piece. The operation reports each element once, in any
// order, while it is in the cache: bias and addend are added then, and the norm of a row is taken with its last
// element. The bytes are those of `epilogue` with codec none. Bias and weight are read when the first element arrives.
class StreamedEpilogue {
 public:
  StreamedEpilogue(const Epilogue& call, std::size_t numel);
  ~StreamedEpilogue();
  StreamedEpilogue(const StreamedEpilogue&) = delete;
  StreamedEpilogue& operator=(const StreamedEpilogue&) = delete;

  const Epilogue& call() const { return call_; }
  void arrived(const Kernels& kernels, std::size_t at, std::size_t n);

 private:
  struct State;
  Epilogue call_;
  std::vector<std::size_t> missing_;  // elements of each row that have not arrived, if there is a norm
  std::unique_ptr<State> state_;
};

}  // namespace dtcomm
