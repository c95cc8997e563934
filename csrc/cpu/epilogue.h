// What follows a summed activation: decoded, plus bias, plus a residual stream, and its RMS norm, in one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kernels.h"

namespace dtcomm {

// A run of a tensor's elements as the payload that they come in.
struct Run {
  const std::uint8_t* payload;
  std::size_t numel;
};

// The runs, joined, are `rows` rows of `features` elements. Tensors are of `dtype` (f32, f16 or bf16) and may be null
// but for `out`:
//   y        = (decoded + bias[column]) + residual, each sum in fp32
//   out      = y, rounded to `dtype` (may be the residual)
//   normed   = out * (1 / sqrt(mean of out squared + eps)) * weight[column], products in fp32, rounded once
// Squares are added in fp32 by 16 lanes, element i to lane i mod 16, lanes then in halves.
struct Epilogue {
  std::size_t features = 0;
  DType dtype = DType::f32;
  const void* bias = nullptr;
  const void* residual = nullptr;
  void* out = nullptr;
  const void* weight = nullptr;
  float eps = 0;
  void* normed = nullptr;
};

// The runs must hold whole rows together. A granule and a row at a time are decoded into scratch memory.
void epilogue(const Kernels& kernels, const Codec& codec, const std::vector<Run>& runs, const Epilogue& call);

// The same where `out` holds the sum already, told of its elements as they come in, in any order and each once: while
// they are in the cache they get bias and residual, and a row its norm with the last of them. Bytes as of `epilogue`
// with codec none. Bias and weight are read when the first element arrives.
class Following {
 public:
  Following(const Epilogue& call, std::size_t numel);
  ~Following();
  Following(const Following&) = delete;
  Following& operator=(const Following&) = delete;

  const Epilogue& call() const { return call_; }
  void arrived(const Kernels& kernels, std::size_t at, std::size_t n);

 private:
  struct State;
  Epilogue call_;
  std::vector<std::size_t> missing_;  // elements of each row, where a norm follows
  std::unique_ptr<State> state_;
};

}  // namespace dtcomm
