// Element types and reduction operators, shared by every part of the native core. C++17 only: no torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtcomm {

// Element types of user tensors. The numbers enter the fingerprint that ranks compare: append only.
enum class DType : std::uint8_t {
  f32 = 0,
  f16 = 1,
  bf16 = 2,
  f64 = 3,
  i8 = 4,
  u8 = 5,
  i32 = 6,
  i64 = 7,
  i16 = 8,
  boolean = 9
};

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
      return 2;
    default:
      return 1;
  }
}

// How a collective combines elements. `avg` is a sum with a divisor.
enum class ReduceOp : std::uint8_t { sum = 0, min = 1, max = 2 };

}  // namespace dtcomm
