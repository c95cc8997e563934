// The steps of low-rank compression (cpu/kernels.h's LowRank) whose bits ranks have to share, on a CUDA device. No CUDA
// type appears here. All memory is the device's, aligned to its elements. Work is queued on `stream` (a cudaStream_t)
// of the current device: nothing is allocated, nothing waits, and a CUDA graph may capture it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"
#include "core/types.h"
#include "cpu/kernels.h"

namespace dtcomm::cuda {

// `count` vectors of n elements, one after the other, and what is drawn where directions are missing.
struct Vectors {
  float* first;
  std::uint64_t count, n, key;
};

// So count, or factors of so count matrices, travel as the arguments of one kernel.
constexpr std::size_t kMaxVectors = 64;

// LowRank::orthonormalise for each of `count`: a kernel for every kMaxVectors of them. An error holds CUDA's reason
// why a kernel was not queued.
Status orthonormalise(const Vectors* of, std::size_t count, void* stream);

// The factors of a matrix, whose elements are so count, and the bool that says whether all of them are finite.
struct Factors {
  float *left, *right;
  std::uint64_t left_size, right_size;
  std::uint8_t* finite;
};

// Sets `finite` of each of `count`; factors of which some element is not finite become zeros. A kernel for every
// kMaxVectors.
Status check_finite(const Factors* of, std::size_t count, void* stream);

// The arguments of LowRank::expand; the gradient becomes the product. `finite`, where given, is a bool on the device:
// where it says no the gradient becomes NaN and the residual stays.
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
