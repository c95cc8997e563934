// What the device's source is tried with: codecs, calls, and memory for both sides with guards around every output.
#pragma once

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "codec/cast.h"
#include "cpu/kernels.h"

namespace dtcomm::cuda_emulated {

// Every family with options such that the kernels of each kind are met.
std::vector<Codec> codecs();

// Numbers of all kinds that `seed` decides: one of nine kinds by its remainder.
void fill(DType dtype, unsigned seed, std::size_t numel, std::uint8_t* to);

struct Case {
  std::size_t numel = 1;
  DType dtype = DType::f32, local_dtype = DType::f32, out_dtype = DType::f32;
  int count = 0, position = 0;
  bool local = true, residual = false, out = false, encodes = true, in_place = false;
  std::size_t divisor = 1;
  ReduceOp op = ReduceOp::sum;
  unsigned shift = 0;  // bytes by which tensors are off sixteen, in elements
  unsigned seed = 0;
  bool decodes = false;  // the verb `decode`
};

// Calls worth trying with a codec: all sizes around the limits of octets, warps, blocks, tiles and granules.
std::vector<Case> cases(const Codec& codec);

std::string describe(const Codec& codec);
std::string describe(const Case& which);

// Everything that one call reads and writes; two of the same case are equal.
class Memory {
 public:
  Memory(const Codec& codec, const Case& which);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Combine call;
  const std::uint8_t* const* table() const { return payloads_.data(); }
  const char* differs(const Memory& other) const;  // names what does, or nullptr

 private:
  std::uint8_t* room(std::vector<std::uint8_t>& bytes, std::size_t size, std::size_t shift);

  std::vector<std::vector<std::uint8_t>> made_;
  std::vector<const std::uint8_t*> payloads_;
  std::vector<std::uint8_t> local_, residual_, out_, payload_;
};

}  // namespace dtcomm::cuda_emulated
