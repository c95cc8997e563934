// Codec `exact`: floats to integers and back. It has the loops over one block, and the passes over tensors of a
// collective whose ranks agree on the exponents (LocalKernels in cpu/kernels.h).
#pragma once

#include "codec/reproducible.h"
#include "cpu/kernels.h"
#include "cpu/source/blocks.h"
#include "cpu/source/cast.h"
#include "cpu/source/fp_env.h"
#include "cpu/source/loops.h"
#include "cpu/source/stores.h"

namespace dtcomm::DTCOMM_ISA {

constexpr std::size_t kSpan = kLargestBlock;  // elements taken at once: whole blocks of any length

template <class Code>
inline void to_codes(const float* x, std::size_t n, std::uint8_t exponent, int digits, void* to) {
  auto* codes = unaligned<Code>(to);
  if (exponent == kNaNBlock) {
    __builtin_memset(to, 0, n * sizeof(Code));
    return;
  }
  const double per_unit = power_of_two(-unit_exponent(exponent, digits)), most = largest_integer(digits);
  const auto* in = unaligned<float>(x);
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    codes[i].value = static_cast<Code>(static_cast<std::int32_t>(to_integer(in[i].value, per_unit, most)));
  }
}

template <class Code>
inline void from_codes(const void* from, std::size_t n, std::uint8_t exponent, int digits, double divisor, float* to) {
  const auto* codes = unaligned<Code>(from);
  auto* out = unaligned<float>(to);
  if (exponent == kNaNBlock) {
    for (std::size_t i = 0; i < n; ++i) out[i].value = float_of(kNaN32);
    return;
  }
  const double unit = power_of_two(unit_exponent(exponent, digits));
  if (divisor == 1.0) {
    DTCOMM_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) {
      out[i].value = static_cast<float>(static_cast<double>(static_cast<std::int32_t>(codes[i].value)) * unit);
    }
    return;
  }
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const double sum = static_cast<double>(static_cast<std::int32_t>(codes[i].value)) * unit;
    out[i].value = static_cast<float>(sum / divisor);
  }
}

inline void put_codes(int bits, const float* x, std::size_t n, std::uint8_t exponent, int digits, void* to) {
  if (bits == 16) return to_codes<std::int16_t>(x, n, exponent, digits, to);
  to_codes<std::int32_t>(x, n, exponent, digits, to);
}

inline void get_codes(int bits, const void* from, std::size_t n, std::uint8_t exponent, int digits, double divisor,
                      float* to) {
  if (bits == 16) return from_codes<std::int16_t>(from, n, exponent, digits, divisor, to);
  from_codes<std::int32_t>(from, n, exponent, digits, divisor, to);
}

// Calls use(x, at, n) for the spans of a contribution; x is its local tensor plus its residual in fp32.
template <class Use>
inline void each_span(const Contribution& from, const Use& use) {
  alignas(kLine) float scratch[kSpan];
  for (std::size_t at = 0; at < from.numel; at += kSpan) {
    const std::size_t n = smaller(kSpan, from.numel - at);
    const auto* local = static_cast<const std::uint8_t*>(from.local) + at * size_of(from.dtype);
    const float* x = widen(from.dtype, local, n, scratch);
    if (from.residual) {
      join(ReduceOp::sum, scratch, x, from.residual + at, n);
      x = scratch;
    }
    use(x, at, n);
  }
}

inline void measure_exponents(const Codec& codec, const Contribution& from, std::uint8_t* exponents) {
  const ScopedFpEnv environment;
  each_span(from, [&](const float* x, std::size_t at, std::size_t n) {
    for (std::size_t i = 0; i < n; i += codec.block) {
      exponents[(at + i) / codec.block] = exponent_of(largest(x + i, smaller(codec.block, n - i)));
    }
  });
}

// The error of an element is a multiple of its last bit and less than two units: fp32 holds it.
inline void keep_lost(const float* x, std::size_t n, const void* codes, int bits, double unit, float* residual) {
  const auto* in = unaligned<float>(x);
  auto* to = unaligned<float>(residual);
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t code =
        bits == 16 ? unaligned<std::int16_t>(codes)[i].value : unaligned<std::int32_t>(codes)[i].value;
    to[i].value = static_cast<float>(static_cast<double>(in[i].value) - static_cast<double>(code) * unit);
  }
}

inline void quantize_to_exponents(const Codec& codec, std::size_t ranks, const Contribution& from,
                                  const std::uint8_t* exponents, void* codes) {
  const ScopedFpEnv environment;
  const int digits = digits_of(codec.bits, ranks);
  each_span(from, [&](const float* x, std::size_t at, std::size_t n) {
    for (std::size_t i = 0; i < n; i += codec.block) {
      const std::size_t count = smaller(codec.block, n - i);
      const std::uint8_t exponent = exponents[(at + i) / codec.block];
      auto* to = static_cast<std::uint8_t*>(codes) + (at + i) * codec.bits / 8;
      put_codes(codec.bits, x + i, count, exponent, digits, to);
      if (!from.residual || exponent == kNaNBlock) continue;
      keep_lost(x + i, count, to, codec.bits, power_of_two(unit_exponent(exponent, digits)), from.residual + at + i);
    }
  });
}

inline void dequantize(const Codec& codec, std::size_t ranks, const void* codes, const std::uint8_t* exponents,
                       std::size_t numel, std::size_t divisor, DType dtype, void* out) {
  const ScopedFpEnv environment;
  const int digits = digits_of(codec.bits, ranks);
  alignas(kLine) float scratch[kSpan];
  for (std::size_t at = 0; at < numel; at += kSpan) {
    const std::size_t n = smaller(kSpan, numel - at);
    for (std::size_t i = 0; i < n; i += codec.block) {
      const auto* from = static_cast<const std::uint8_t*>(codes) + (at + i) * codec.bits / 8;
      get_codes(codec.bits, from, smaller(codec.block, n - i), exponents[(at + i) / codec.block], digits,
                static_cast<double>(divisor), scratch + i);
    }
    narrow(dtype, scratch, n, static_cast<std::uint8_t*>(out) + at * size_of(dtype));
  }
}

template <class Code>
inline std::uint64_t checksum(const void* codes, std::size_t at, std::size_t n) {
  const auto* in = unaligned<Code>(static_cast<const std::uint8_t*>(codes) + at * sizeof(Code));
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto weight = audit_weight(static_cast<std::uint32_t>(at + i));
    sum += weight * static_cast<std::uint64_t>(static_cast<std::int64_t>(in[i].value));
  }
  return sum;
}

inline void audit_checksums(int bits, const void* codes, std::size_t numel, std::uint64_t* sums) {
  for (std::size_t at = 0; at < numel; at += kAuditRun) {
    const std::size_t n = smaller(kAuditRun, numel - at);
    sums[at / kAuditRun] = bits == 16 ? checksum<std::int16_t>(codes, at, n) : checksum<std::int32_t>(codes, at, n);
  }
}

}  // namespace dtcomm::DTCOMM_ISA
