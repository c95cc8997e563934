// Cases for the tests of codec kernels: calls, and memory for both sides with guards around every output.
#pragma once

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "codec/cast.h"
#include "cpu/kernels.h"

namespace dtcomm::cuda_emulated {

// Fills a tensor with numbers of one of nine kinds, which `seed` modulo nine chooses.
void fill(DType dtype, unsigned seed, std::size_t numel, std::uint8_t* to);

struct Case {
  std::size_t numel = 1;
  DType dtype = DType::f32, local_dtype = DType::f32, out_dtype = DType::f32;
  int count = 0, position = 0;
  bool local = true, residual = false, out = false, encodes = true, in_place = false;
  std::size_t divisor = 1;
  ReduceOp op = ReduceOp::sum;
  unsigned shift = 0;  // offset of tensors from an address aligned to sixteen, in elements
  unsigned seed = 0;
  bool decodes = false;  // a call of `decode`
};

// Cases for a codec: all sizes around the limits of vec8s, warps, blocks, tiles and granules.
std::vector<Case> cases(const Codec& codec);

std::string describe(const Codec& codec);
std::string describe(const Case& which);

// Everything that a call reads and writes; two objects of the same case are equal.
class Memory {
 public:
  Memory(const Codec& codec, const Case& which);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Combine call;
  const std::uint8_t* const* table() const { return payloads_.data(); }
  const char* differs(const Memory& other) const;  // names what does, or nullptr

 private:
  // Resizes `bytes` for `size` bytes between guards; returns where they begin, at `shift` from an aligned address.
  std::uint8_t* reserve(std::vector<std::uint8_t>& bytes, std::size_t size, std::size_t shift);

  std::vector<std::vector<std::uint8_t>> payload_memory_;
  std::vector<const std::uint8_t*> payloads_;
  std::vector<std::uint8_t> local_, residual_, out_, payload_;
};

}  // namespace dtcomm::cuda_emulated
