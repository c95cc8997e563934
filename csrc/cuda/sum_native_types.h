// Sums of tensors in their own type with Family::none: f64, integers (which wrap) and bool (logical).
#pragma once

#include "codec/layout.h"
#include "cuda/kernels.h"
#include "cuda/warp.cuh"

namespace dtcomm::cuda {

// The arguments of the kernel.
struct NativeSumParams {
  const std::uint8_t* payloads[kInlinePayloads];
  const std::uint8_t* const* table;
  int count, position;
  const void* local;
  std::uint8_t* payload_out;
  void* out;
  std::size_t numel, padded;  // elements, without and with those that fill the payload's last sixteen bytes
  std::size_t divisor;
  ReduceOp op;
};

inline NativeSumParams native_sum_params(const Combine& call, const std::uint8_t* const* table) {
  NativeSumParams to = {};
  if (call.count <= kInlinePayloads) {
    for (int t = 0; t < call.count; ++t) to.payloads[t] = call.payloads[t];
  }
  to.table = table;
  to.count = call.count;
  to.position = call.position;
  to.local = call.local;
  to.payload_out = call.payload_out;
  to.out = call.out;
  to.numel = call.numel;
  to.padded = aligned(call.numel * size_of(call.dtype)) / size_of(call.dtype);
  to.divisor = call.divisor;
  to.op = call.op;
  return to;
}

// The byte of a bool; any value but zero is true.
struct Logical {
  std::uint8_t byte;
};

// The value with the bits of the one NaN that payloads hold; other types have no NaN.
DTCOMM_DEVICE double canonical_native(double value) {
  std::uint64_t bits = 0x7ff8000000000000ULL;
  double nan;
  std::memcpy(&nan, &bits, sizeof nan);
  return value == value ? value : nan;
}
template <class T>
DTCOMM_DEVICE T canonical_native(T value) {
  return value;
}

template <class T>
DTCOMM_DEVICE T join_native(ReduceOp op, T a, T b) {
  if (op == ReduceOp::sum)
    return canonical_native(static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b)));
  const bool second = op == ReduceOp::min ? b < a : b > a;
  return canonical_native(second || b != b ? b : a);
}
template <>
DTCOMM_DEVICE double join_native(ReduceOp op, double a, double b) {
  if (op == ReduceOp::sum) return canonical_native(a + b);
  const bool second = op == ReduceOp::min ? b < a : b > a;
  return canonical_native(second || b != b ? b : a);
}
template <>
DTCOMM_DEVICE Logical join_native(ReduceOp op, Logical a, Logical b) {
  const bool both = op == ReduceOp::min;
  return {static_cast<std::uint8_t>(both ? a.byte && b.byte : a.byte || b.byte)};
}

// Integer division rounds towards zero.
template <class T>
DTCOMM_DEVICE T divide_native(T a, std::size_t by) {
  return static_cast<T>(static_cast<std::int64_t>(a) / static_cast<std::int64_t>(by));
}
template <>
DTCOMM_DEVICE double divide_native(double a, std::size_t by) {
  return canonical_native(a / static_cast<double>(by));
}
template <>
DTCOMM_DEVICE Logical divide_native(Logical a, std::size_t) {
  return a;
}

// Computes element i < padded, from its first term to its outputs.
template <class T>
DTCOMM_DEVICE void combine_element(const NativeSumParams& call, std::size_t i) {
  if (i >= call.numel) {
    if (call.payload_out) reinterpret_cast<T*>(call.payload_out)[i] = T{};
    return;
  }
  T sum = {};
  bool started = false;
  for (int t = 0; t <= call.count; ++t) {
    if (t == call.position && call.local) {
      const T term = static_cast<const T*>(call.local)[i];
      sum = started ? join_native(call.op, sum, term) : term;
      started = true;
    }
    if (t < call.count) {
      const std::uint8_t* payload = call.count > kInlinePayloads ? call.table[t] : call.payloads[t];
      const T term = reinterpret_cast<const T*>(payload)[i];
      sum = started ? join_native(call.op, sum, term) : term;
      started = true;
    }
  }
  if (call.divisor != 1) sum = divide_native(sum, call.divisor);
  if (call.payload_out) reinterpret_cast<T*>(call.payload_out)[i] = sum;
  if (call.out) static_cast<T*>(call.out)[i] = sum;
}

// use(T{}) with the type of the elements.
template <class Use>
auto with_native_type(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::f64:
      return use(double{});
    case DType::i8:
      return use(std::int8_t{});
    case DType::u8:
      return use(std::uint8_t{});
    case DType::i16:
      return use(std::int16_t{});
    case DType::i32:
      return use(std::int32_t{});
    case DType::i64:
      return use(std::int64_t{});
    default:
      return use(Logical{});
  }
}

Status combine_native(const Combine& call, const std::uint8_t* const* table, void* stream);

}  // namespace dtcomm::cuda
