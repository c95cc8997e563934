// OCP Microscaling: 32 elements of 8 or 4 bits share a power of two.
#include "codec/mx.h"
#include "cpu/source/blocks.h"
#include "cpu/source/codec_family.h"
#include "cpu/source/integer_encode.h"
#include "cpu/source/minifloat_decode.h"
#include "cpu/source/minifloat_encode.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

constexpr std::size_t kBlock = 32;

template <class F>
inline void encode_blocks(const float* x, std::size_t blocks, const Encoding& how, std::uint8_t* fields,
                          std::uint8_t* codes) {
  Blocks at;
  measure<kBlock>(x, blocks, kBlock, at);
  std::uint32_t scales[kMostBlocks];
  for (std::size_t b = 0; b < blocks; ++b) scales[b] = mx_scale<F>(at.top[b]);
  for (std::size_t b = 0; b < blocks; ++b) at.inverse[b] = mx_inverse(scales[b]);
  for (std::size_t b = 0; b < blocks; ++b) fields[b] = static_cast<std::uint8_t>(scales[b]);
  minifloats_nearest<F, true>(x, blocks, kBlock, at.inverse, how, codes);
}

template <class F>
void encode(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  const Cut cut(plan.layout, n);
  const std::size_t done = cut.whole * kBlock;
  encode_blocks<F>(x, cut.whole, how, to, to + cut.codes);
  if (cut.rest) {
    float last[kBlock] = {};
    __builtin_memcpy(last, x + done, cut.rest * sizeof(float));
    encode_blocks<F>(last, 1, {}, to + cut.whole, to + cut.codes + done * plan.layout.code_bits / 8);
  }
  cut.pad(to);
}

template <class F, bool Stream, class Finish>
inline __attribute__((always_inline)) void decode_with(const Plan& plan, const std::uint8_t* from, std::size_t n,
                                                       float* to, const Finish& finish) {
  const Cut cut(plan.layout, n);
  float scales[kGranule / kBlock];
  for (std::size_t b = 0; b < cut.blocks; ++b) scales[b] = mx_value(from[b]);
  each_minifloat<F, kBlock, Stream>(from + cut.codes, scales, kBlock, n, to, finish);
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
  decode_with<F, false>(plan, from, n, to, added_to(sum));
}

template <class F>
void lost(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float divisor, const float* old,
          float* residual) {
  decode_with<F, false>(plan, from, n, residual, error_of(sum, divisor, old));
}

template <class F>
bool pair(const Plan& plan, const std::uint8_t* first, const std::uint8_t* second, std::size_t n, float* to,
          bool stream) {
  const Cut cut(plan.layout, n);
  const std::uint8_t* const from[2] = {first, second};
  const std::uint8_t* const codes[2] = {first + cut.codes, second + cut.codes};
  float scales[2][kMostBlocks];
  for (int j = 0; j < 2; ++j) {
    for (std::size_t b = 0; b < cut.blocks; ++b) scales[j][b] = mx_value(from[j][b]);
  }
  const auto run = stream ? add_minifloats<F, kDirect> : add_minifloats<F, false>;
  return run(codes, scales, cut.blocks, kBlock, n, to);
}

// Calls run(F{}) for the codec's elements.
template <class Run>
inline auto with_format(const Plan& plan, const Run& run) {
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

void lost_any(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float divisor,
              const float* old, float* residual) {
  with_format(plan, [&](auto form) { lost<decltype(form)>(plan, from, n, sum, divisor, old, residual); });
}

bool pair_any(const Plan& plan, const std::uint8_t* first, const std::uint8_t* second, std::size_t n, float* to,
              bool stream) {
  return with_format(plan, [&](auto form) { return pair<decltype(form)>(plan, first, second, n, to, stream); });
}

}  // namespace

const FamilyKernels kMxFamily{encode_any, decode_any, add_any, lost_any, nullptr, pair_any};

}  // namespace dtcomm::DTCOMM_ISA
