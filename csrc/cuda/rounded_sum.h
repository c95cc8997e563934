// The steps of correctly rounded sums on a CUDA device (LocalKernels in cpu/kernels.h): the same bytes. No CUDA type
// appears here. All memory is the device's. Functions queue work on `stream` (a cudaStream_t) of the current device;
// they neither allocate nor wait.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/reproducible.h"
#include "core/status.h"
#include "core/types.h"

namespace dtcomm::cuda {

// The range of bits of each block of a tensor of fp32, fp16 or bf16.
struct MeasureCall {
  const void* from;
  std::uint64_t numel;
  std::uint8_t *tops, *lows;
  DType dtype;
  bool finite_only;
};

// Half rows of digits that each block takes.
struct CountCall {
  SumDigits sum;
  std::uint64_t blocks;
  std::int32_t* halves;
};

constexpr unsigned kMostParts = 64;  // of one launch; their offsets are kernel arguments

// Equal parts of a tensor, of whole blocks if there are several. Those of part i go to digits + offsets[i], which is
// aligned to kHalfBlock integers. ends[b]: half rows of all blocks up to b, from any block before the first one on.
struct SplitCall {
  SumDigits sum;
  const std::int64_t* ends;
  const void* from;
  std::uint64_t numel;  // of a part
  std::int32_t* digits;
  DType dtype;
  unsigned parts;
  std::uint64_t offsets[kMostParts];
};

struct RoundCall {
  SumDigits sum;
  const std::int64_t* ends;
  const std::int32_t* digits;
  std::uint64_t numel, divisor;
  void* out;
  DType dtype;
};

Status measure_digits(const MeasureCall& call, void* stream);
Status count_digits(const CountCall& call, void* stream);
Status split_digits(const SplitCall& call, void* stream);
Status round_digits(const RoundCall& call, void* stream);

}  // namespace dtcomm::cuda
