// What a family of codecs gives to the loops of combine.h: three functions over one granule. Each family is compiled
// on its own, once per instruction set (csrc/cpu/families); a call through a pointer costs nothing beside a granule.
#pragma once

#include "codec/float8.h"
#include "codec/integer.h"
#include "codec/layout.h"
#include "cpu/kernels.h"

namespace dtcomm::DTCOMM_ISA {

struct Plan;

// What an encoding depends on besides its floats.
struct Encoding {
  std::uint64_t key;
  std::uint64_t index;  // of the granule's first element in the caller's tensor
  bool feedback;        // the error goes to a residual: an encoding that is unbiased need not be
};

// All memory may be unaligned, except that a streamed `to` is aligned to a line. 1 <= n <= layout.granule.
struct FamilyKernels {
  // Writes layout.bytes(n) bytes, the padding included.
  void (*encode)(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to);
  // Writes n floats; `stream` is a hint.
  void (*decode)(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, bool stream);
  // to = sum + the decoded floats, NaN canonical; `to` may be `sum`.
  void (*add)(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to);
};

extern const FamilyKernels kIntegerFamily;
extern const FamilyKernels kFloat8Family;
extern const FamilyKernels kMxFamily;
extern const FamilyKernels kSignFamily;

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
