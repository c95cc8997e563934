// exact: integers with a power of two per block. This encodes one rank's tensor alone, with no room for other ranks.
#include "cpu/source/reproducible.h"
#include "cpu/source/blocks.h"
#include "cpu/source/codec_family.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

void encode(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs&, std::uint8_t* to) {
  const BlockCut cut(params.layout, n);
  const int bits = params.codec.bits, digits = digits_of(bits, 1);
  const std::size_t block = params.codec.block;
  for (std::size_t b = 0, at = 0; at < n; ++b, at += block) {
    const std::size_t count = smaller(block, n - at);
    to[b] = exponent_of(largest(x + at, count));
    put_codes(bits, x + at, count, to[b], digits, to + cut.codes + at * static_cast<std::size_t>(bits) / 8);
  }
  const std::size_t written = cut.codes + n * static_cast<std::size_t>(bits) / 8;
  __builtin_memset(to + written, 0, cut.bytes - written);
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

const FamilyKernels kExactFamily{encode, decode, add};

}  // namespace dtcomm::DTCOMM_ISA
