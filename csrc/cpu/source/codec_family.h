// The function table of a codec family, and what a call passes to it. combine.h loops over granules and calls these
// functions for each. A family is compiled on its own, once per instruction set (csrc/cpu/families); the cost of a call
// through a pointer is negligible beside a granule.
#pragma once

#include "codec/float8.h"
#include "codec/integer.h"
#include "codec/layout.h"
#include "cpu/kernels.h"

namespace dtcomm::DTCOMM_ISA {

struct CodecParams;

// Memory that the next granule will be read from: a family that works long on one granule prefetches the next.
struct PrefetchRange {
  const std::uint8_t* memory = nullptr;
  std::size_t element = 0;  // bytes
  std::size_t count = 0;    // elements
};

// Prefetches 64 elements from element `at` on. It is always inlined and has no loop: compilers treat a function or a
// loop that only prefetches as having no effect and remove it. Level: 3 for the first cache, 2 for the second.
template <int Level>
inline __attribute__((always_inline)) void prefetch(const PrefetchRange& ahead, std::size_t at) {
  if (at >= ahead.count) return;
  const std::uint8_t* const from = ahead.memory + at * ahead.element;
  __builtin_prefetch(from, 0, Level);
  __builtin_prefetch(from + 16 * ahead.element, 0, Level);
  __builtin_prefetch(from + 32 * ahead.element, 0, Level);
  __builtin_prefetch(from + 48 * ahead.element, 0, Level);
}

// The arguments of an encoding besides its floats.
struct EncodeArgs {
  std::uint64_t key;
  std::uint64_t index;       // of the granule's first element in the caller's tensor
  bool feedback;             // the error goes to a residual, so the encoding need not be unbiased (randk)
  PrefetchRange local = {};  // of the next granule, if there is one
  PrefetchRange residual = {};
};

// Prefetches 64 elements of both terms of the next granule.
inline __attribute__((always_inline)) void prefetch_next(const EncodeArgs& args, std::size_t at) {
  prefetch<3>(args.local, at);
  prefetch<3>(args.residual, at);
}

// Where an encoding leaves its error: residual = (x - the decoded floats) * divisor where that is finite, else `old`,
// element by element. `residual` may be `old` or x.
struct ErrorTarget {
  float divisor;
  const float* old;
  float* residual;
};

// What an encoding does with its error: nothing, or it stores it, knowing that it is finite or not.
enum class Feedback { none, finite, checked };

// All memory may be unaligned, except that a streamed `to` is aligned to a line. 1 <= n <= layout.granule.
struct FamilyKernels {
  // Writes layout.bytes(n) bytes, padding included.
  void (*encode)(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args, std::uint8_t* to);
  // Writes n floats; `stream` is a hint.
  void (*decode)(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to, bool stream);
  // to = sum + the decoded floats, NaN canonical; `to` may be `sum`.
  void (*add)(const CodecParams& params, const std::uint8_t* from, std::size_t n, const float* sum, float* to);

  // Optional shortcuts. nullptr: combine.h decodes the granule and works on the floats.

  // The same as `encode`, and the error of the encoding. Not called for codecs that rotate.
  void (*encode_with_error)(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                            std::uint8_t* to, const ErrorTarget& error) = nullptr;
  // Encodes local + residual and leaves the error in the residual. Returns false, with nothing done, if it cannot.
  bool (*encode_with_feedback)(const CodecParams& params, const void* local, DType dtype, std::size_t n,
                               float* residual, const EncodeArgs& args, std::uint8_t* to) = nullptr;
  // to = the sum of two granules, NaN canonical; `stream` is a hint. Returns false, with nothing done, if it cannot.
  bool (*add_pair)(const CodecParams& params, const std::uint8_t* first, const std::uint8_t* second, std::size_t n,
                   float* to, bool stream) = nullptr;
};

extern const FamilyKernels kIntegerFamily;
extern const FamilyKernels kFloat8Family;
extern const FamilyKernels kMxFamily;
extern const FamilyKernels kNvfp4Family;
extern const FamilyKernels kVariableFamily;
extern const FamilyKernels kSignFamily;
extern const FamilyKernels kTopkFamily;
extern const FamilyKernels kRandkFamily;
extern const FamilyKernels kExactFamily;

// The table of a family; nullptr for casts, which cast.h does inline. A number that is no family ends the process: as a
// cast it would be written past the end of its payload.
inline const FamilyKernels* family_kernels(Family family) {
  switch (family) {
    case Family::integer:
      return &kIntegerFamily;
    case Family::float8:
      return &kFloat8Family;
    case Family::mx:
      return &kMxFamily;
    case Family::nvfp4:
      return &kNvfp4Family;
    case Family::variable:
      return &kVariableFamily;
    case Family::sign:
      return &kSignFamily;
    case Family::topk:
      return &kTopkFamily;
    case Family::randk:
      return &kRandkFamily;
    case Family::exact:
      return &kExactFamily;
    case Family::none:
    case Family::fp16:
    case Family::bf16:
      return nullptr;
  }
  __builtin_trap();
}

// A codec with what is the same for all granules of a call.
struct CodecParams {
  Codec codec;
  Layout layout;
  IntegerRules rules;           // Family::integer, Family::float8
  DType wire;                   // casts: type of an element in the payload
  const FamilyKernels* family;  // nullptr: a cast

  CodecParams(const Codec& which, DType dtype)
      : codec(which), layout(layout_of(which, dtype)), rules(), wire(dtype), family(family_kernels(which.family)) {
    if (which.family == Family::fp16) wire = DType::f16;
    if (which.family == Family::bf16) wire = DType::bf16;
    if (which.family == Family::integer) rules = integer_rules(which);
    if (which.family == Family::float8) rules = float8_rules(which);
  }

  // The floats that a family encodes of a granule of n elements: rotated blocks are always whole.
  std::size_t floats(std::size_t n) const { return codec.rotate ? layout.blocks(n) * layout.block : n; }
};

}  // namespace dtcomm::DTCOMM_ISA
