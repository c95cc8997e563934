// The steps of low-rank compression on a CUDA device that must give the same bits on all ranks (LowRank in
// cpu/kernels.h). No CUDA type appears here. All memory is the device's, aligned to its elements. Functions queue work
// on `stream` (a cudaStream_t) of the current device; they neither allocate nor wait, so a CUDA graph may capture it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"
#include "core/types.h"
#include "cpu/kernels.h"

namespace dtcomm::cuda {

// `count` contiguous vectors of n elements, and the key of the random vectors that replace dependent ones.
struct Vectors {
  float* first;
  std::uint64_t count, n, key;
};

// The most matrices that one kernel launch takes: their descriptions are kernel arguments.
constexpr std::size_t kMaxVectors = 64;

// LowRank::orthonormalize of `count` matrices, with one kernel for every kMaxVectors. An error holds CUDA's reason
// why a kernel was not queued.
Status orthonormalize(const Vectors* of, std::size_t count, void* stream);

// The factors of a matrix, their sizes in elements, and the flag that is set if all elements are finite.
struct Factors {
  float *left, *right;
  std::uint64_t left_size, right_size;
  std::uint8_t* finite;
};

// Sets the flag of each of `count` matrices; factors with an element that is not finite become zeros. One kernel for
// every kMaxVectors matrices.
Status check_finite(const Factors* of, std::size_t count, void* stream);

// The arguments of LowRank::expand, which overwrites the gradient with the product. If `finite` is not null and points
// to 0 in device memory, the gradient becomes NaN and the residual stays.
struct Expansion {
  void* gradient;
  float* residual;  // or nullptr
  const float *left, *right;
  const std::uint8_t* finite;  // or nullptr
  std::uint64_t rows, columns;
  std::uint32_t rank;
  DType dtype;  // f32, f16 or bf16
};

Status expand(const Expansion& call, void* stream);

}  // namespace dtcomm::cuda
