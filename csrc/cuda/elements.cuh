// Elements of floating dtypes, one at a time.
#pragma once

#include "codec/cast.h"
#include "core/types.h"

namespace dtcomm::cuda {

__device__ inline float load(DType dtype, const void* from, std::size_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(from)[i];
  const std::uint16_t half = static_cast<const std::uint16_t*>(from)[i];
  return dtype == DType::f16 ? float_from_fp16(half) : float_from_bf16(half);
}

__device__ inline void store(DType dtype, float value, void* to, std::size_t i) {
  if (dtype == DType::f32) {
    static_cast<float*>(to)[i] = value;
  } else {
    static_cast<std::uint16_t*>(to)[i] = dtype == DType::f16 ? fp16_from_float(value) : bf16_from_float(value);
  }
}

}  // namespace dtcomm::cuda
