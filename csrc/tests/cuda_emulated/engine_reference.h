// The expected results of a fused collective: those of the engine for the same program and data.
#pragma once

#include <cstring>
#include <vector>

#include "codec/layout.h"
#include "cpu/kernels.h"
#include "tests/cuda_emulated/fused_check.h"

namespace dtcomm::cuda_emulated {

// Bytes at an address aligned to 16, with guards around them.
class Bytes {
 public:
  explicit Bytes(std::size_t size = 0) : size_(size), memory_(size + 2 * kGuard + kAlign, 0xA5) {}
  std::uint8_t* data() {
    return reinterpret_cast<std::uint8_t*>(aligned(reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard));
  }
  bool guarded() {
    for (std::size_t i = 1; i <= kGuard; ++i) {
      if (data()[-static_cast<std::ptrdiff_t>(i)] != 0xA5 || data()[size_ + i - 1] != 0xA5) return false;
    }
    return true;
  }
  std::size_t size() const { return size_; }
  bool operator==(Bytes& other) { return size_ == other.size_ && std::memcmp(data(), other.data(), size_) == 0; }

 private:
  static constexpr std::size_t kGuard = 64;
  std::size_t size_;
  std::vector<std::uint8_t> memory_;
};

// The tensors of one rank.
struct Tensors {
  Bytes input, output, residual, addend;
};

// Elements of a rank's input and output.
std::size_t input_numel(const cuda::FusedSpec& call, int rank);
std::size_t output_numel(const cuda::FusedSpec& call, int rank);

// Computes outputs and new residuals from inputs and residuals.
void run_on_engine(const Programs& programs, const Scenario& scenario, std::vector<Tensors>& ranks);

// The same with the CPU's kernels, for an all-reduce with an epilogue or with encoded contributions of the owners.
void run_on_kernels(const Scenario& scenario, std::vector<Tensors>& ranks, const std::uint8_t* bias);

}  // namespace dtcomm::cuda_emulated
