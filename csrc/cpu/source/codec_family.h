// What a family of codecs gives to the loops of combine.h: three functions over one granule. Each family is compiled
// on its own, once per instruction set (csrc/cpu/families); a call through a pointer costs nothing beside a granule.
#pragma once

#include "codec/float8.h"
#include "codec/integer.h"
#include "codec/layout.h"
#include "cpu/kernels.h"

namespace dtcomm::DTCOMM_ISA {

struct Plan;

// What a term of the next granule will be read from: who works long on one granule asks for the next meanwhile.
struct Ahead {
  const std::uint8_t* memory = nullptr;
  std::size_t element = 0;  // bytes
  std::size_t count = 0;    // elements
};

// Asks for 64 elements, from element `at` on. Always in line and without a loop: compilers take a function or a loop
// that does nothing but ask for one without effect, and leave it out.
// Level: 3 for the first cache, 2 for the second.
template <int Level>
inline __attribute__((always_inline)) void fetch(const Ahead& ahead, std::size_t at) {
  if (at >= ahead.count) return;
  const std::uint8_t* const from = ahead.memory + at * ahead.element;
  __builtin_prefetch(from, 0, Level);
  __builtin_prefetch(from + 16 * ahead.element, 0, Level);
  __builtin_prefetch(from + 32 * ahead.element, 0, Level);
  __builtin_prefetch(from + 48 * ahead.element, 0, Level);
}

// What an encoding depends on besides its floats.
struct Encoding {
  std::uint64_t key;
  std::uint64_t index;  // of the granule's first element in the caller's tensor
  bool feedback;        // the error goes to a residual: an encoding that is unbiased need not be
  Ahead local = {};     // of the next granule, as far as there are any
  Ahead residual = {};
};

// Asks for 64 elements of both terms: what is measured next.
inline __attribute__((always_inline)) void fetch_next(const Encoding& how, std::size_t at) {
  fetch<3>(how.local, at);
  fetch<3>(how.residual, at);
}

// All memory may be unaligned, except that a streamed `to` is aligned to a line. 1 <= n <= layout.granule.
struct FamilyKernels {
  // Writes layout.bytes(n) bytes, the padding included.
  void (*encode)(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to);
  // Writes n floats; `stream` is a hint.
  void (*decode)(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, bool stream);
  // to = sum + the decoded floats, NaN canonical; `to` may be `sum`.
  void (*add)(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to);
  // residual = (sum - the decoded floats) * divisor where that is finite, elsewhere as `old`; `from` encodes `sum`.
  // `residual` may be `old`. nullptr: by way of the decoded floats, as where a codec rotates or keeps spikes.
  void (*lost)(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float divisor,
               const float* old, float* residual) = nullptr;
  // Encodes local + residual and leaves the error in the residual, in one go; false where it cannot, with nothing done.
  bool (*owe)(const Plan& plan, const void* local, DType dtype, std::size_t n, float* residual, const Encoding& how,
              std::uint8_t* to) = nullptr;
  // to = the sum of two granules, NaN canonical; `stream` is a hint. false where it cannot, with nothing done, and
  // nullptr: one after the other, as above.
  bool (*pair)(const Plan& plan, const std::uint8_t* first, const std::uint8_t* second, std::size_t n, float* to,
               bool stream) = nullptr;
};

extern const FamilyKernels kIntegerFamily;
extern const FamilyKernels kFloat8Family;
extern const FamilyKernels kMxFamily;
extern const FamilyKernels kSignFamily;
extern const FamilyKernels kTopkFamily;
extern const FamilyKernels kRandkFamily;
extern const FamilyKernels kExactFamily;

// nullptr: a cast, which cast.h does in line.
inline const FamilyKernels* family_kernels(Family family) {
  switch (family) {
    case Family::integer:
      return &kIntegerFamily;
    case Family::float8:
      return &kFloat8Family;
    case Family::mx:
      return &kMxFamily;
    case Family::sign:
      return &kSignFamily;
    case Family::topk:
      return &kTopkFamily;
    case Family::randk:
      return &kRandkFamily;
    case Family::exact:
      return &kExactFamily;
    default:
      return nullptr;
  }
}

// A codec with everything that is the same for all granules of a call.
struct Plan {
  Codec codec;
  Layout layout;
  IntegerRules rules;           // Family::integer, Family::float8
  DType wire;                   // casts: type of an element in the payload
  const FamilyKernels* family;  // nullptr: a cast

  Plan(const Codec& which, DType dtype)
      : codec(which), layout(layout_of(which, dtype)), rules(), wire(dtype), family(family_kernels(which.family)) {
    if (which.family == Family::fp16) wire = DType::f16;
    if (which.family == Family::bf16) wire = DType::bf16;
    if (which.family == Family::integer) rules = integer_rules(which);
    if (which.family == Family::float8) rules = float8_rules(which);
  }

  // What the families are handed of a granule of n elements: rotated blocks are whole, and the bytes the same.
  std::size_t floats(std::size_t n) const { return codec.rotate ? layout.blocks(n) * layout.block : n; }
};

}  // namespace dtcomm::DTCOMM_ISA
