// exact: integers with a power of two per block. This encodes one rank's tensor alone, with no room for other ranks.
#include "cpu/source/reproducible.h"
#include "cpu/source/blocks.h"
#include "cpu/source/codec_family.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

// Encodes a granule; calls done(at, count, exponent) behind each block, of `count` elements from element `at` on.
template <class Done>
void encode_blocks(const CodecParams& params, const float* x, std::size_t n, std::uint8_t* to, const Done& done) {
  const BlockCut cut(params.layout, n);
  const int bits = params.codec.bits, digits = digits_of(bits, 1);
  const std::size_t block = params.codec.block;
  Blocks blocks;
  block == 32 ? measure<32>(x, cut.whole, block, blocks) : measure<0>(x, cut.whole, block, blocks);
  if (cut.rest) blocks.top[cut.whole] = largest(x + cut.whole * block, cut.rest);
  for (std::size_t b = 0, at = 0; at < n; ++b, at += block) {
    const std::size_t count = smaller(block, n - at);
    to[b] = exponent_of(blocks.top[b]);
    put_codes(bits, x + at, count, to[b], digits, to + cut.codes + at * static_cast<std::size_t>(bits) / 8);
    done(at, count, to[b]);
  }
  const std::size_t written = cut.codes + n * static_cast<std::size_t>(bits) / 8;
  __builtin_memset(to + written, 0, cut.bytes - written);
}

void encode(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs&, std::uint8_t* to) {
  encode_blocks(params, x, n, to, [](std::size_t, std::size_t, std::uint8_t) {});
}

void encode_with_error(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs&, std::uint8_t* to,
                       const ErrorTarget& error) {
  const BlockCut cut(params.layout, n);
  const int bits = params.codec.bits, digits = digits_of(bits, 1);
  alignas(kLine) float term[kLargestBlock];
  encode_blocks(params, x, n, to, [&](std::size_t at, std::size_t count, std::uint8_t exponent) {
    const std::uint8_t* const codes = to + cut.codes + at * static_cast<std::size_t>(bits) / 8;
    get_codes(bits, codes, count, exponent, digits, 1.0, term);
    transform<Fp32>(term, count, error.residual + at, error_of(x + at, error.divisor, error.old + at));
  });
}

void decode(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to, bool) {
  const BlockCut cut(params.layout, n);
  const int bits = params.codec.bits, digits = digits_of(bits, 1);
  const std::size_t block = params.codec.block;
  for (std::size_t b = 0, at = 0; at < n; ++b, at += block) {
    const std::uint8_t* const codes = from + cut.codes + at * static_cast<std::size_t>(bits) / 8;
    get_codes(bits, codes, smaller(block, n - at), from[b], digits, 1.0, to + at);
  }
}

void add(const CodecParams& params, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  alignas(kLine) float term[kLargestBlock];
  decode(params, from, n, term, false);
  join(ReduceOp::sum, to, sum, term, n);
}

}  // namespace

const FamilyKernels kExactFamily{encode, decode, add, encode_with_error};

}  // namespace dtcomm::DTCOMM_ISA
