// e4m3 and e5m2 with a scale per block.
#include "cpu/source/blocks.h"
#include "cpu/source/codec_family.h"
#include "cpu/source/integer_encode.h"
#include "cpu/source/minifloat_decode.h"
#include "cpu/source/minifloat_encode.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

template <class F>
inline void encode_blocks(const Plan& plan, const float* x, std::size_t blocks, const Encoding& how,
                          std::uint8_t* fields, std::uint8_t* codes) {
  const std::size_t block = plan.codec.block;
  float scales[kMostBlocks], inverse[kMostBlocks];
  const auto scale_some = [&](std::size_t b, const std::uint32_t top[4]) {
    const IntegerRules rules = plan.rules;
#pragma GCC unroll 1
    for (std::size_t j = 0; j < 4; ++j) scales[b + j] = scale_of(rules, top[j]);
#pragma GCC unroll 1
    for (std::size_t j = 0; j < 4; ++j) inverse[b + j] = inverse_of(scales[b + j]);
  };
  // Four at a time: their divisions go on while the next four are read.
  std::size_t b = 0;
  for (; b + 4 <= blocks; b += 4) {
    std::uint32_t top[4];
    largest_of_four(x + b * block, block, top);
    scale_some(b, top);
  }
  if (b < blocks) {
    std::uint32_t top[4] = {};
    for (std::size_t j = b; j < blocks; ++j) top[j - b] = largest(x + j * block, block);
    scale_some(b, top);
  }
  store_fields(plan.codec.scale, scales, blocks, fields);
  if (plan.codec.stochastic) {
    minifloats_stochastic<F>(x, blocks, block, inverse, how.key, how.index, codes);
  } else {
    minifloats_nearest<F, false>(x, blocks, block, inverse, how, codes);
  }
}

template <class F>
void encode(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  const Cut cut(plan.layout, n);
  const std::size_t block = plan.codec.block, done = cut.whole * block;
  encode_blocks<F>(plan, x, cut.whole, how, to, to + cut.codes);
  if (cut.rest) {
    float last[kLargestBlock];
    __builtin_memcpy(last, x + done, cut.rest * sizeof(float));
    __builtin_memset(last + cut.rest, 0, (block - cut.rest) * sizeof(float));
    encode_blocks<F>(plan, last, 1, {how.key, how.index + done, how.feedback}, to + cut.whole * plan.layout.field_bytes,
                     to + cut.codes + done);
  }
  cut.pad(to);
}

template <class F, bool Stream, class Finish>
inline __attribute__((always_inline)) void decode_with(const Plan& plan, const std::uint8_t* from, std::size_t n,
                                                       float* to, const Finish& finish) {
  const Cut cut(plan.layout, n);
  float scales[kMostBlocks];
  load_fields(plan.codec.scale, from, cut.blocks, scales);
  if (plan.codec.block == 128) {
    each_minifloat<F, 128, Stream>(from + cut.codes, scales, 128, n, to, finish);
  } else {
    each_minifloat<F, 0, Stream>(from + cut.codes, scales, plan.codec.block, n, to, finish);
  }
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
  for (int j = 0; j < 2; ++j) load_fields(plan.codec.scale, from[j], cut.blocks, scales[j]);
  const auto run = stream ? add_minifloats<F, kDirect> : add_minifloats<F, false>;
  return run(codes, scales, cut.blocks, plan.codec.block, n, to);
}

bool is_e4m3(const Plan& plan) { return plan.codec.element == Element::e4m3; }

void encode_any(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  is_e4m3(plan) ? encode<E4m3>(plan, x, n, how, to) : encode<E5m2>(plan, x, n, how, to);
}

void decode_any(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
  is_e4m3(plan) ? decode<E4m3>(plan, from, n, to, stream) : decode<E5m2>(plan, from, n, to, stream);
}

void add_any(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  is_e4m3(plan) ? add<E4m3>(plan, from, n, sum, to) : add<E5m2>(plan, from, n, sum, to);
}

void lost_any(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float divisor,
              const float* old, float* residual) {
  const auto run = is_e4m3(plan) ? lost<E4m3> : lost<E5m2>;
  run(plan, from, n, sum, divisor, old, residual);
}

bool pair_any(const Plan& plan, const std::uint8_t* first, const std::uint8_t* second, std::size_t n, float* to,
              bool stream) {
  return is_e4m3(plan) ? pair<E4m3>(plan, first, second, n, to, stream)
                       : pair<E5m2>(plan, first, second, n, to, stream);
}

}  // namespace

const FamilyKernels kFloat8Family{encode_any, decode_any, add_any, lost_any, nullptr, pair_any};

}  // namespace dtcomm::DTCOMM_ISA
