// e4m3 and e5m2 with a scale per block.
#include "cpu/source/family.h"
#include "cpu/source/integer_encode.h"
#include "cpu/source/minifloat_decode.h"
#include "cpu/source/minifloat_encode.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

template <class F>
void encode_blocks(const Plan& plan, const float* x, std::size_t blocks, std::uint64_t key, std::uint64_t index,
                   std::uint8_t* fields, std::uint8_t* codes) {
  const std::size_t block = plan.codec.block;
  Blocks at;
  measure<0>(x, blocks, block, at);
  for (std::size_t b = 0; b < blocks; ++b) at.scale[b] = scale_of(plan.rules, at.top[b]);
  for (std::size_t b = 0; b < blocks; ++b) at.inverse[b] = inverse_of(at.scale[b]);
  store_fields(plan.codec.scale, at.scale, blocks, fields);
  if (plan.codec.stochastic) {
    minifloats_stochastic<F>(x, blocks, block, at.inverse, key, index, codes);
  } else {
    minifloats_nearest<F, false>(x, blocks, block, at.inverse, codes);
  }
  for (std::size_t b = 0; b < blocks; ++b) {  // zero blocks may have signs, NaN blocks anything
    if (at.inverse[b] == 0.0f) __builtin_memset(codes + b * block, 0, block);
  }
}

template <class F>
void encode(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  const Layout& layout = plan.layout;
  const std::size_t block = plan.codec.block, whole = n / block, rest = n % block;
  std::uint8_t* codes = to + layout.codes_at(n);
  encode_blocks<F>(plan, x, whole, how.key, how.index, to, codes);
  if (rest) {
    float last[kLargestBlock];
    __builtin_memcpy(last, x + whole * block, rest * sizeof(float));
    __builtin_memset(last + rest, 0, (block - rest) * sizeof(float));
    encode_blocks<F>(plan, last, 1, how.key, how.index + whole * block, to + whole * layout.field_bytes,
                     codes + whole * block);
  }
  __builtin_memset(to + layout.used(n), 0, layout.bytes(n) - layout.used(n));
}

template <class F, bool Stream, class Finish>
inline void decode_with(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, const Finish& finish) {
  float scales[kMostBlocks];
  load_fields(plan.codec.scale, from, plan.layout.blocks(n), scales);
  each_minifloat<F, Stream>(from + plan.layout.codes_at(n), scales, plan.codec.block, n, to, finish);
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

}  // namespace

const FamilyKernels kFloat8Family{encode_any, decode_any, add_any};

}  // namespace dtcomm::DTCOMM_ISA
