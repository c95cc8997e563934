// The table of CPU kernels: what the engine and the bindings call, one table per instruction set, all built from
// one source and giving the same bytes (DESIGN: bit-exact). Every function makes ONE pass over memory, touches
// nothing outside the ranges it is given and accepts pointers of any alignment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "core/types.h"

namespace dtcomm {

// One call of `combine`:
//   sum  = the fp32 sum, in rank order, of the decoded payloads with `local` (+ residual) standing before
//          payloads[position]; starts from its first term. Integers and f64 (Family::none) use their own type.
//   sum /= divisor                                   where divisor != 1
//   payload_out, if given:  the encoding of sum, and then
//          residual_out = (sum - decoded) * divisor  where given; a block with a non-finite element leaves it as it was
//          out          = decoded                    where given, in `dtype`
//   otherwise:              out = sum in `dtype`; residual_out, where given, becomes 0 (nothing was lost)
// With count == 0 this is `encode`; with payload_out == nullptr it is `reduce`; with both it is `reduce_encode`.
struct Combine {
  const std::uint8_t* const* payloads = nullptr;  // `count` payloads of `numel` elements each, in rank order
  int count = 0;
  int position = 0;                // 0..count; where `local` stands in the order
  const void* local = nullptr;     // `numel` elements of `local_dtype`, or nullptr
  DType local_dtype = DType::f32;  // the tensor's dtype, or f32 for an accumulator
  const float* residual_in =
      nullptr;  // added to local (local may be nullptr: then it stands alone); may alias residual_out
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
  bool stream_payload = false;   // write payload_out / out with non-temporal stores: a hint, never
  bool stream_out = false;       //   a change of bytes; the callee fences before it returns
};

// One matrix for the low-rank compressor, row by row: what is compressed is gradient + residual.
constexpr std::size_t kMostRank = 64;
struct Matrix {
  const void* gradient;   // rows x columns of `dtype`: f32, f16 or bf16
  const float* residual;  // as many, or nullptr
  DType dtype;
  std::size_t rows, columns;
  std::size_t rank;  // 1..kMostRank
};

// The passes of PowerSGD (Vogels et al. 2019). Factors are `rank` vectors one after the other: `left` of as many
// elements as the matrix has rows, `right` of as many as it has columns.
struct LowRank {
  // left[k][i] = sum over j of matrix[i][j] * right[k][j]
  void (*project_rows)(const Matrix& matrix, const float* right, float* left);
  // right[k][j] = sum over i of matrix[i][j] * left[k][i]
  void (*project_columns)(const Matrix& matrix, const float* left, float* right);
  // out = the product of the factors, in the matrix's dtype (out may be its gradient); residual, where given, becomes
  // the matrix minus the fp32 product (it may be the matrix's residual).
  void (*expand)(const Matrix& matrix, const float* left, const float* right, void* out, float* residual);
  // `count` vectors of n elements: modified Gram-Schmidt in order, twice. A vector that depends on those before it is
  // replaced by a random one, or by zeros where there is no other direction; vectors with NaN or Inf stay.
  void (*orthonormalise)(float* vectors, std::size_t count, std::size_t n, std::uint64_t key);
};

// What a rank adds to a sum, in fp32: `numel` elements of `dtype` (f32, f16 or bf16) and, where given, a residual.
struct Contribution {
  const void* local;
  DType dtype;
  float* residual;
  std::size_t numel;
};

// What ranks do on their own before and after a sum whose terms they bring to common ground first.
//
// exact (codec/reproducible.h): `exponents` are one per block, `codes` integers of codec.bits with room for `ranks`
// ranks. randk: the values of a tensor are those that each of its granules keeps, in order, at positions that come from
// `key` and the index of the granule's first element in the caller's tensor, `offset` being that of element 0.
struct Common {
  void (*measure)(const Codec& codec, const Contribution& from, std::uint8_t* exponents);
  // The residual, where given, becomes what the integers lose; in NaN blocks, whose integers are 0, it stays.
  void (*put)(const Codec& codec, std::size_t ranks, const Contribution& from, const std::uint8_t* exponents,
              void* codes);
  // out = codes * unit / divisor, rounded to fp32, then to `dtype`.
  void (*take)(const Codec& codec, std::size_t ranks, const void* codes, const std::uint8_t* exponents,
               std::size_t numel, std::size_t divisor, DType dtype, void* out);
  // One checksum for each kAuditRun integers; those of a sum of integers are the sums of theirs.
  void (*audit)(int bits, const void* codes, std::size_t numel, std::uint64_t* sums);
  // Values of the local tensor; `owed` becomes the residual's, where there is one, and what is not among the values
  // is added to the residual. In a granule that is not finite all values are NaN and the residual stays.
  void (*gather)(const Codec& codec, std::uint64_t key, std::uint64_t offset, const Contribution& from, float* values,
                 float* owed);
  // out = the values, times randk_factor where `scaled`, at their positions and zeros elsewhere; NaN in granules whose
  // first value is NaN.
  void (*scatter)(const Codec& codec, std::uint64_t key, std::uint64_t offset, bool scaled, const float* values,
                  std::size_t numel, DType dtype, void* out);
  // The residual's elements at the positions become `owed`.
  void (*settle)(const Codec& codec, std::uint64_t key, std::uint64_t offset, const float* owed, std::size_t numel,
                 float* residual);
};

struct Kernels {
  const char* name;     // "generic", "avx2", "avx512"
  bool (*supported)();  // by this CPU
  void (*combine)(const Codec& codec, const Combine& call);
  // out[0, numel) = the decoded payload, in out_dtype; `dtype` is the tensor's (wire dtype of Family::none).
  void (*decode)(const Codec& codec, const std::uint8_t* payload, std::size_t numel, DType dtype, void* out,
                 DType out_dtype, bool stream);
  LowRank low_rank;
  Common common;
};

// All builds, best first; null-terminated. Entries may be unsupported by this CPU.
const Kernels* const* all_kernels();

// The best supported one. Which one runs by default is chosen in Python (DTCOMM_KERNEL, dtcomm.kernels.use) and
// handed down; nullptr where no supported kernel has that name.
const Kernels* find_kernels(const char* name);
const Kernels& best_kernels();

}  // namespace dtcomm
