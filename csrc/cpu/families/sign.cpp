// One bit an element and the mean magnitude of its block.
#include "codec/sign.h"
#include "cpu/source/blocks.h"
#include "cpu/source/codec_family.h"
#include "cpu/source/integer_encode.h"
#include "cpu/source/sign_bits.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

// `share`: the part of each block that is there.
void encode_blocks(const Codec& codec, const float* x, std::size_t blocks, float share, const Encoding& how,
                   std::uint8_t* fields, std::uint8_t* codes) {
  const std::size_t block = codec.block;
  alignas(kLine) float room[kLargestBlock / 2];
  float scales[kMostBlocks];
  for (std::size_t b = 0; b < blocks; ++b) scales[b] = folded_parts(x + b * block, block, room);
  for (std::size_t b = 0; b < blocks; ++b) scales[b] = sign_scale(scales[b], share, codec.scale);
  store_fields(codec.scale, scales, blocks, fields);
  sign_bits(x, blocks * block, how, codes);
  for (std::size_t b = 0; b < blocks; ++b) {
    const bool usable = scales[b] > 0.0f;  // neither a zero block nor a NaN block
    if (!usable) __builtin_memset(codes + b * block / 8, 0, block / 8);
  }
}

void encode(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  const Cut cut(plan.layout, n);
  const std::size_t block = plan.codec.block, done = cut.whole * block;
  encode_blocks(plan.codec, x, cut.whole, 1.0f, how, to, to + cut.codes);
  if (cut.rest) {
    float last[kLargestBlock];
    __builtin_memcpy(last, x + done, cut.rest * sizeof(float));
    __builtin_memset(last + cut.rest, 0, (block - cut.rest) * sizeof(float));
    encode_blocks(plan.codec, last, 1, static_cast<float>(cut.rest) / static_cast<float>(block), {},
                  to + cut.whole * plan.layout.field_bytes, to + cut.codes + done / 8);
  }
  cut.pad(to);
}

template <bool Stream, class Finish>
inline __attribute__((always_inline)) void decode_with(const Plan& plan, const std::uint8_t* from, std::size_t n,
                                                       float* to, const Finish& finish) {
  const Cut cut(plan.layout, n);
  const std::size_t block = plan.codec.block;
  const std::uint8_t* codes = from + cut.codes;
  float scales[kMostBlocks];
  load_fields(plan.codec.scale, from, cut.blocks, scales);
  for (std::size_t b = 0, at = 0; at < n; ++b, at += block) {
    const float scale = canonical(scales[b]);
    each<Signs, Stream>(codes + at / 8, smaller(block, n - at), to + at,
                        [&](auto q, std::size_t i) { return finish(q * scale, at + i); });
  }
}

void decode(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
  const auto same = [](auto value, std::size_t) { return value; };
  if (stream && kDirect) {
    decode_with<true>(plan, from, n, to, same);
  } else {
    decode_with<false>(plan, from, n, to, same);
  }
}

void add(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  decode_with<false>(plan, from, n, to, added_to(sum));
}

void lost(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float divisor, const float* old,
          float* residual) {
  decode_with<false>(plan, from, n, residual, error_of(sum, divisor, old));
}

bool pair(const Plan& plan, const std::uint8_t* first, const std::uint8_t* second, std::size_t n, float* to,
          bool stream) {
  const Cut cut(plan.layout, n);
  float scales[kMostBlocks];
  load_fields(plan.codec.scale, second, cut.blocks, scales);
  const SignRun other{second + cut.codes, scales, __builtin_ctzll(plan.codec.block)};
  if (stream && kDirect) {
    decode_with<true>(plan, first, n, to, plus(other));
  } else {
    decode_with<false>(plan, first, n, to, plus(other));
  }
  return true;
}

}  // namespace

const FamilyKernels kSignFamily{encode, decode, add, lost, nullptr, pair};

}  // namespace dtcomm::DTCOMM_ISA
