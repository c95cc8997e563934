// Reductions of codec `none` in types that are summed in their own type: f64, integers (wrapping) and bool (logical).
#pragma once

#include "cpu/kernels.h"
#include "cpu/source/loops.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

inline double canonical_value(double value) { return value == value ? value : __builtin_nan(""); }
template <class T>
inline T canonical_value(T value) {
  return value;
}

// Wrapping sums are taken in the unsigned type: signed overflow is undefined. Division cuts towards zero.
template <class T>
struct Wrap {
  static T add(T a, T b) { return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b)); }
  static T divide(T a, std::size_t by) {
    return static_cast<T>(static_cast<std::int64_t>(a) / static_cast<std::int64_t>(by));
  }
};
template <>
struct Wrap<double> {
  static double add(double a, double b) { return a + b; }
  static double divide(double a, std::size_t by) { return a / static_cast<double>(by); }
};

template <class T, ReduceOp Op>
inline void join_native(T* sum, const Unaligned<T>* term, std::size_t n) {
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const T a = sum[i], b = term[i].value;
    if constexpr (Op == ReduceOp::sum) {
      sum[i] = canonical_value(Wrap<T>::add(a, b));
    } else if constexpr (Op == ReduceOp::min) {
      sum[i] = canonical_value(b < a || b != b ? b : a);
    } else {
      sum[i] = canonical_value(b > a || b != b ? b : a);
    }
  }
}

// A nonzero byte is true; a sum is true if any term is.
template <ReduceOp Op>
inline void join_logical(std::uint8_t* sum, const Unaligned<std::uint8_t>* term, std::size_t n) {
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const bool a = sum[i] != 0, b = term[i].value != 0;
    sum[i] = Op == ReduceOp::min ? a && b : a || b;
  }
}

template <class T, bool Logical, ReduceOp Op>
inline void combine_native_op(const Combine& call) {
  constexpr std::size_t kTile = 1024;
  T sum[kTile];
  for (std::size_t at = 0; at < call.numel; at += kTile) {
    const std::size_t n = smaller(kTile, call.numel - at);
    bool started = false;
    for (int t = 0; t <= call.count; ++t) {
      for (int turn = 0; turn < 2; ++turn) {  // local stands before payloads[position]
        const void* from = nullptr;
        if (turn == 0 && t == call.position) from = call.local;
        if (turn == 1 && t < call.count) from = call.payloads[t];
        if (!from) continue;
        const auto* term = unaligned<T>(from) + at;
        if (!started) {
          __builtin_memcpy(sum, term, n * sizeof(T));
          started = true;
        } else if constexpr (Logical) {
          join_logical<Op>(sum, term, n);
        } else {
          join_native<T, Op>(sum, term, n);
        }
      }
    }
    if constexpr (!Logical) {
      if (call.divisor != 1) {
        for (std::size_t i = 0; i < n; ++i) sum[i] = canonical_value(Wrap<T>::divide(sum[i], call.divisor));
      }
    }
    if (call.payload_out) copy(call.payload_out + at * sizeof(T), sum, n * sizeof(T), call.stream_payload);
    if (call.out) copy(unaligned<T>(call.out) + at, sum, n * sizeof(T), call.stream_out);
  }
}

template <class T, bool Logical = false>
inline void combine_native(const Combine& call) {
  switch (call.op) {
    case ReduceOp::sum:
      return combine_native_op<T, Logical, ReduceOp::sum>(call);
    case ReduceOp::min:
      return combine_native_op<T, Logical, ReduceOp::min>(call);
    case ReduceOp::max:
      return combine_native_op<T, Logical, ReduceOp::max>(call);
  }
}

inline void combine_native(const Combine& call) {
  switch (call.dtype) {
    case DType::f64:
      return combine_native<double>(call);
    case DType::i8:
      return combine_native<std::int8_t>(call);
    case DType::u8:
      return combine_native<std::uint8_t>(call);
    case DType::i16:
      return combine_native<std::int16_t>(call);
    case DType::i32:
      return combine_native<std::int32_t>(call);
    case DType::i64:
      return combine_native<std::int64_t>(call);
    default:
      return combine_native<std::uint8_t, true>(call);
  }
}

}  // namespace dtcomm::DTCOMM_ISA
