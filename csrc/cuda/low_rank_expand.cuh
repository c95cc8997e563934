// The product of two factors, element by element, with the CPU's bits (cpu/source/low_rank.h).
#pragma once

#include "codec/cast.h"
#include "cuda/low_rank.h"
#include "cuda/warp.cuh"

namespace dtcomm::cuda {

constexpr unsigned kRowsPerThread = 8;  // of a column: an element of the right factor serves as many rows

template <DType dtype>
struct Element;
template <>
struct Element<DType::f32> {
  float value;
  DTCOMM_DEVICE static Element from(float x) { return {x}; }
  DTCOMM_DEVICE float to_float() const { return value; }
};
template <>
struct Element<DType::f16> {
  std::uint16_t bits;
  DTCOMM_DEVICE static Element from(float value) { return {fp16_from_float(value)}; }
  DTCOMM_DEVICE float to_float() const { return float_from_fp16(bits); }
};
template <>
struct Element<DType::bf16> {
  std::uint16_t bits;
  DTCOMM_DEVICE static Element from(float value) { return {bf16_from_float(value)}; }
  DTCOMM_DEVICE float to_float() const { return float_from_bf16(bits); }
};

// Threads that a call needs; neighbouring threads have neighbouring columns.
DTCOMM_HD std::uint64_t expansion_threads(const Expansion& call) {
  return (call.rows + kRowsPerThread - 1) / kRowsPerThread * call.columns;
}

// Computes kRowsPerThread rows of a column, by thread `index`.
template <DType dtype>
DTCOMM_DEVICE void expand_rows(const Expansion& call, std::uint64_t index) {
  const std::uint64_t column = index % call.columns, row = index / call.columns * kRowsPerThread;
  const std::uint64_t left = call.rows - row;
  const unsigned rows = left < kRowsPerThread ? static_cast<unsigned>(left) : kRowsPerThread;
  auto* gradient = static_cast<Element<dtype>*>(call.gradient) + row * call.columns + column;
  if (call.finite && !*call.finite) {
    for (unsigned j = 0; j < rows; ++j) gradient[j * call.columns] = Element<dtype>::from(float_of(kNaN32));
    return;
  }
  float product[kRowsPerThread] = {};
  DTCOMM_LOOP
  for (std::uint64_t k = 0; k < call.rank; ++k) {
    const float right = call.right[k * call.columns + column];
    const float* by = call.left + k * call.rows + row;
    DTCOMM_UNROLL
    for (unsigned j = 0; j < kRowsPerThread; ++j) {
      if (j < rows) product[j] = k == 0 ? by[j] * right : product[j] + by[j] * right;
    }
  }
  float* residual = call.residual ? call.residual + row * call.columns + column : nullptr;
  float term[kRowsPerThread] = {};
  DTCOMM_UNROLL
  for (unsigned j = 0; j < kRowsPerThread; ++j) {
    if (residual && j < rows) term[j] = gradient[j * call.columns].to_float() + residual[j * call.columns];
  }
  DTCOMM_UNROLL
  for (unsigned j = 0; j < kRowsPerThread; ++j) {
    if (j >= rows) continue;
    if (residual) residual[j * call.columns] = term[j] - product[j];
    gradient[j * call.columns] = Element<dtype>::from(product[j]);
  }
}

// use(std::integral_constant) with the call's type.
template <class Use>
auto with_float(DType dtype, const Use& use) {
  if (dtype == DType::f32) return use(std::integral_constant<DType, DType::f32>());
  if (dtype == DType::f16) return use(std::integral_constant<DType, DType::f16>());
  return use(std::integral_constant<DType, DType::bf16>());
}

}  // namespace dtcomm::cuda
