// sign: one bit per element and the mean magnitude of its block.
#include "codec/sign.h"
#include "cpu/source/blocks.h"
#include "cpu/source/decoding_family.h"
#include "cpu/source/sign_bits.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

// `share`: the part of each block that exists.
void encode_blocks(const Codec& codec, const float* x, std::size_t blocks, float share, const EncodeArgs& args,
                   std::uint8_t* fields, std::uint8_t* codes) {
  const std::size_t block = codec.block;
  alignas(kLine) float room[kLargestBlock / 2];
  float scales[kMostBlocks];
  for (std::size_t b = 0; b < blocks; ++b) scales[b] = folded_parts(x + b * block, block, room);
  for (std::size_t b = 0; b < blocks; ++b) scales[b] = sign_scale(scales[b], share, codec.scale);
  store_fields(codec.scale, scales, blocks, fields);
  sign_bits(x, blocks * block, args, codes);
  for (std::size_t b = 0; b < blocks; ++b) {
    const bool usable = scales[b] > 0.0f;  // neither a zero block nor a NaN block
    if (!usable) __builtin_memset(codes + b * block / 8, 0, block / 8);
  }
}

struct SignKernels : DecodingFamily<SignKernels> {
  static void encode(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                     std::uint8_t* to) {
    const BlockCut cut(params.layout, n);
    const std::size_t block = params.codec.block, done = cut.whole * block;
    encode_blocks(params.codec, x, cut.whole, 1.0f, args, to, to + cut.codes);
    if (cut.rest) {
      float last[kLargestBlock];
      __builtin_memcpy(last, x + done, cut.rest * sizeof(float));
      __builtin_memset(last + cut.rest, 0, (block - cut.rest) * sizeof(float));
      encode_blocks(params.codec, last, 1, static_cast<float>(cut.rest) / static_cast<float>(block), {},
                    to + cut.whole * params.layout.field_bytes, to + cut.codes + done / 8);
    }
    cut.pad(to);
  }

  template <bool Stream, class Finish>
  static inline __attribute__((always_inline)) void decode_with(const CodecParams& params, const std::uint8_t* from,
                                                                std::size_t n, float* to, const Finish& finish) {
    const BlockCut cut(params.layout, n);
    const std::size_t block = params.codec.block;
    const std::uint8_t* codes = from + cut.codes;
    float scales[kMostBlocks];
    load_fields(params.codec.scale, from, cut.blocks, scales);
    for (std::size_t b = 0, at = 0; at < n; ++b, at += block) {
      const float scale = canonical(scales[b]);
      transform<Signs, Stream>(codes + at / 8, smaller(block, n - at), to + at,
                               [&](auto q, std::size_t i) { return finish(q * scale, at + i); });
    }
  }

  static bool add_pair(const CodecParams& params, const std::uint8_t* first, const std::uint8_t* second, std::size_t n,
                       float* to, bool stream) {
    const BlockCut cut(params.layout, n);
    float scales[kMostBlocks];
    load_fields(params.codec.scale, second, cut.blocks, scales);
    const SignRun other{second + cut.codes, scales, __builtin_ctzll(params.codec.block)};
    if (stream && kDirect) {
      decode_with<true>(params, first, n, to, plus(other));
    } else {
      decode_with<false>(params, first, n, to, plus(other));
    }
    return true;
  }
};

}  // namespace

const FamilyKernels kSignFamily{
    SignKernels::encode,  SignKernels::decode, SignKernels::add, SignKernels::encode_with_error, nullptr,
    SignKernels::add_pair};

}  // namespace dtcomm::DTCOMM_ISA
