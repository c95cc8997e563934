// OCP Microscaling: 32 elements of 8 or 4 bits share a power of two.
#include "codec/mx.h"
#include "cpu/source/family.h"
#include "cpu/source/integer_encode.h"
#include "cpu/source/minifloat_decode.h"
#include "cpu/source/minifloat_encode.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

constexpr std::size_t kBlock = 32;

// Two codes a byte; `n` is even.
inline void pack_nibbles(const std::uint8_t* codes, std::size_t n, std::uint8_t* to) {
  const auto* pairs = cells<std::uint16_t>(codes);
  for (std::size_t i = 0; i < n / 2; ++i) to[i] = static_cast<std::uint8_t>(pairs[i].value | pairs[i].value >> 4);
}

template <class F>
void encode_blocks(const float* x, std::size_t blocks, std::uint8_t* fields, std::uint8_t* codes) {
  Blocks at;
  measure<kBlock>(x, blocks, kBlock, at);
  for (std::size_t b = 0; b < blocks; ++b) at.inverse[b] = mx_inverse(mx_scale<F>(at.top[b]));
  for (std::size_t b = 0; b < blocks; ++b) fields[b] = static_cast<std::uint8_t>(mx_scale<F>(at.top[b]));
  constexpr bool kNibbles = F::kSign == 3;
  std::uint8_t bytes[kGranule];
  std::uint8_t* const made = kNibbles ? bytes : codes;
  minifloats_nearest<F, true>(x, blocks, kBlock, at.inverse, made);
  for (std::size_t b = 0; b < blocks; ++b) {  // zero blocks may have signs, NaN blocks anything
    if (at.inverse[b] == 0.0f) __builtin_memset(made + b * kBlock, 0, kBlock);
  }
  if (kNibbles) pack_nibbles(bytes, blocks * kBlock, codes);
}

template <class F>
void encode(const Plan& plan, const float* x, std::size_t n, const Encoding&, std::uint8_t* to) {
  const Layout& layout = plan.layout;
  const std::size_t whole = n / kBlock, rest = n % kBlock;
  std::uint8_t* codes = to + layout.codes_at(n);
  encode_blocks<F>(x, whole, to, codes);
  if (rest) {
    float last[kBlock] = {};
    __builtin_memcpy(last, x + whole * kBlock, rest * sizeof(float));
    encode_blocks<F>(last, 1, to + whole, codes + whole * kBlock * layout.code_bits / 8);
  }
  __builtin_memset(to + layout.used(n), 0, layout.bytes(n) - layout.used(n));
}

template <class F, bool Stream, class Finish>
inline void decode_with(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, const Finish& finish) {
  float scales[kGranule / kBlock];
  const std::size_t blocks = plan.layout.blocks(n);
  for (std::size_t b = 0; b < blocks; ++b) scales[b] = mx_value(from[b]);
  each_minifloat<F, Stream>(from + plan.layout.codes_at(n), scales, kBlock, n, to, finish);
}

template <class F>
void decode(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
  const auto same = [](auto value, std::size_t) { return value; };
  if (stream && kDirect) {
    decode_with<F, true>(plan, from, n, to, same);
  } else {
    decode_with<F, false>(plan, from, n, to, same);
  }
}

template <class F>
void add(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  const Run run{sum};
  decode_with<F, false>(plan, from, n, to,
                        [run](auto value, std::size_t i) { return settled(run.at(value, i) + value); });
}

// Calls run(F{}) for the codec's elements.
template <class Run>
inline void with_format(const Plan& plan, const Run& run) {
  switch (plan.codec.element) {
    case Element::e4m3:
      return run(E4m3{});
    case Element::e5m2:
      return run(E5m2{});
    default:
      return run(E2m1{});
  }
}

void encode_any(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  with_format(plan, [&](auto form) { encode<decltype(form)>(plan, x, n, how, to); });
}

void decode_any(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
  with_format(plan, [&](auto form) { decode<decltype(form)>(plan, from, n, to, stream); });
}

void add_any(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  with_format(plan, [&](auto form) { add<decltype(form)>(plan, from, n, sum, to); });
}

}  // namespace

const FamilyKernels kMxFamily{encode_any, decode_any, add_any};

}  // namespace dtcomm::DTCOMM_ISA
