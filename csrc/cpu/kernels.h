// The table of CPU kernels, which the engine and the bindings call: one table per instruction set, all built from one
// source and giving the same bytes. Every function makes ONE pass over memory, touches nothing outside its arguments'
// ranges and accepts pointers of any alignment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "codec/weight_delta.h"
#include "core/types.h"

namespace dtcomm {

struct SumDigits;  // codec/reproducible.h

// The arguments of `combine`:
//   sum  = the fp32 sum, in rank order, of the decoded payloads, with `local` (+ residual) before payloads[position].
//          It starts from its first term. Integers and f64 (Family::none) are summed in their own type.
//   sum /= divisor                                   if divisor != 1
//   with payload_out: payload_out = the encoding of sum, and then
//          residual_out = (sum - decoded) * divisor  if given; in a block with a non-finite element it stays
//          out          = decoded                    if given, in `out_dtype`
//   without:               out = sum in `out_dtype`; residual_out, if given, becomes 0 (nothing was lost)
// With count == 0 this is `encode`, with payload_out == nullptr `reduce`, with both `reduce_encode`.
struct Combine {
  const std::uint8_t* const* payloads = nullptr;  // `count` payloads of `numel` elements each, in rank order
  int count = 0;
  int position = 0;                // 0..count: `local` stands before payloads[position]
  const void* local = nullptr;     // `numel` elements of `local_dtype`, or nullptr
  DType local_dtype = DType::f32;  // the tensor's dtype, or f32 for an accumulator
  // Added to `local`; without a local tensor it is a term of its own. May alias residual_out.
  const float* residual_in = nullptr;
  float* residual_out = nullptr;
  std::size_t numel = 0;
  std::size_t divisor = 1;
  ReduceOp op = ReduceOp::sum;  // min and max: Family::none, fp16, bf16; NaN wins
  std::uint64_t key = 0;        // stochastic rounding: mixed from (seed, rank, step)
  std::uint64_t offset = 0;     // index of the first element in the caller's tensor: the counter
  std::uint8_t* payload_out = nullptr;
  void* out = nullptr;           // may equal local
  DType dtype = DType::f32;      // of the tensor: wire dtype of Family::none, dtype of `out`
  DType out_dtype = DType::f32;  // dtype, or f32 for an accumulator
  // Write payload_out / out with non-temporal stores: a hint that never changes bytes. The callee fences.
  bool stream_payload = false;
  bool stream_out = false;
};

// A matrix of the low-rank compressor, row by row. The matrix that is compressed is gradient + residual.
constexpr std::size_t kMaxRank = 64;
struct Matrix {
  const void* gradient;   // rows x columns of `dtype`: f32, f16 or bf16
  const float* residual;  // as many, or nullptr
  DType dtype;
  std::size_t rows, columns;
  std::size_t rank;  // 1..kMaxRank
};

// The passes of PowerSGD (Vogels et al. 2019). A factor is `rank` vectors one after the other; those of `left` have as
// many elements as the matrix has rows, those of `right` as many as it has columns.
struct LowRank {
  // left[k][i] = sum over j of matrix[i][j] * right[k][j]
  void (*project_rows)(const Matrix& matrix, const float* right, float* left);
  // right[k][j] = sum over i of matrix[i][j] * left[k][i]
  void (*project_columns)(const Matrix& matrix, const float* left, float* right);
  // out = the product of the factors, in the matrix's dtype (out may be its gradient). residual, if given, becomes
  // the matrix minus the fp32 product (it may be the matrix's residual).
  void (*expand)(const Matrix& matrix, const float* left, const float* right, void* out, float* residual);
  // Modified Gram-Schmidt, twice, on `count` vectors of n elements in order. A vector that depends on those before it
  // is replaced by a random one, or by zeros if there is no other direction. Vectors with NaN or Inf stay.
  void (*orthonormalize)(float* vectors, std::size_t count, std::size_t n, std::uint64_t key);
};

// What a rank contributes to a sum, in fp32: `numel` elements of `dtype` (f32, f16 or bf16) plus a residual, if given.
struct Contribution {
  const void* local;
  DType dtype;
  float* residual;
  std::size_t numel;
};

// Rank-local work before and after a sum in a representation that the ranks agree on.
//
// exact (codec/reproducible.h): `exponents` has one element per block; `codes` are integers of codec.bits bits with
// room for a sum over `ranks` ranks.
// randk with shared positions: the values of a tensor are the elements that its granules keep, in order. The positions
// of a granule are drawn from `key` and the index of its first element in the caller's tensor; `offset` is the index
// of element 0.
struct LocalKernels {
  void (*measure_exponents)(const Codec& codec, const Contribution& from, std::uint8_t* exponents);
  // The residual, if given, becomes the quantization error. In NaN blocks the integers are 0 and the residual stays.
  void (*quantize_to_exponents)(const Codec& codec, std::size_t ranks, const Contribution& from,
                                const std::uint8_t* exponents, void* codes);
  // out = codes * unit / divisor, rounded to fp32, then to `dtype`.
  void (*dequantize)(const Codec& codec, std::size_t ranks, const void* codes, const std::uint8_t* exponents,
                     std::size_t numel, std::size_t divisor, DType dtype, void* out);
  // One checksum per kAuditRun integers. The checksums of a sum are the sums of the checksums.
  void (*audit_checksums)(int bits, const void* codes, std::size_t numel, std::uint64_t* sums);
  // Correctly rounded sums: `tops` and `lows` have one byte per block.
  void (*measure_digits)(const Contribution& from, bool finite_only, std::uint8_t* tops, std::uint8_t* lows);
  // The digits of all blocks, one behind the other. Without `finite`, elements that are not finite are zeros.
  void (*split_digits)(const SumDigits& sum, const Contribution& from, bool finite, std::int32_t* digits);
  // out = the sum that the digits are, divided, rounded once to `dtype`.
  void (*round_digits)(const SumDigits& sum, const std::int32_t* digits, std::size_t numel, std::size_t divisor,
                       DType dtype, void* out);
  // values = the kept elements of the local tensor. With a residual, value_residual = the residual at their positions,
  // and the local tensor is added to the residual. In a granule that is not finite all values are NaN and the residual
  // stays.
  void (*gather_values)(const Codec& codec, std::uint64_t key, std::uint64_t offset, const Contribution& from,
                        float* values, float* value_residual);
  // out = the values, times randk_factor if `scaled`, at their positions, and zeros elsewhere. A granule whose first
  // value is NaN becomes NaN.
  void (*scatter_values)(const Codec& codec, std::uint64_t key, std::uint64_t offset, bool scaled, const float* values,
                         std::size_t numel, DType dtype, void* out);
  // residual = value_residual at the positions of the values.
  void (*restore_residual)(const Codec& codec, std::uint64_t key, std::uint64_t offset, const float* value_residual,
                           std::size_t numel, float* residual);
};

// The codec `lossless`, of elements of 2 bytes (bf16) or 4 (fp32). The bytes of its payloads depend on the data.
struct LosslessKernels {
  // Writes the payload and returns its bytes: at most lossless_bound (codec/lossless.h), for which there is memory.
  std::size_t (*encode)(const void* x, std::size_t numel, std::size_t size, std::uint8_t* payload);
  // Returns nullptr, or what is wrong with the payload; then `out` holds anything.
  const char* (*decode)(const std::uint8_t* payload, std::size_t bytes, std::size_t numel, std::size_t size, void* out);
};

// Granules of deltas of weights (codec/weight_delta.h), of at most kDeltaGranule elements. `room` has kDeltaRoom words.
struct DeltaKernels {
  // Writes what turns `old` into `fresh` and returns its bytes: none if they are equal, at most delta_granule_bound.
  // The kDeltaSlack bytes behind the bound are written, too. `changed` becomes the number of elements that differ.
  std::size_t (*encode)(WeightKind kind, const void* old, const void* fresh, std::size_t n, std::uint32_t* room,
                        std::uint8_t* to, std::size_t* changed);
  // Returns nullptr, or what is wrong with a granule, or with `old`. kDeltaPadding bytes behind the granule can be
  // read.
  const char* (*check)(WeightKind kind, const std::uint8_t* granule, std::size_t bytes, std::size_t n, const void* old);
  // Changes the weights in place. Returns what `check` returns for them; if that is an error, they may hold anything.
  const char* (*decode)(WeightKind kind, const std::uint8_t* granule, std::size_t bytes, std::size_t n,
                        std::uint32_t* room, void* weights);
};

struct Kernels {
  const char* name;     // "generic", "avx2", "avx512", "avx512vbmi", "neon"
  bool (*supported)();  // whether this CPU has the instructions
  void (*combine)(const Codec& codec, const Combine& call);
  // out[0, numel) = the decoded payload, in out_dtype; `dtype` is the tensor's (wire dtype of Family::none).
  void (*decode)(const Codec& codec, const std::uint8_t* payload, std::size_t numel, DType dtype, void* out,
                 DType out_dtype, bool stream);
  LowRank low_rank;
  LocalKernels local;
  LosslessKernels lossless;
  DeltaKernels delta;
};

// All tables, best first; null-terminated. This CPU may not support some of them.
const Kernels* const* all_kernels();

// The table called `name`; nullptr if no supported table has that name. Python chooses the default (DTCOMM_KERNEL,
// dtcomm.kernels.use) and passes its name.
const Kernels* find_kernels(const char* name);

// The best supported table.
const Kernels& best_kernels();

}  // namespace dtcomm
