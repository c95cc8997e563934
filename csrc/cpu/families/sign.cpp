// One bit an element and the mean magnitude of its block.
#include "codec/sign.h"
#include "cpu/source/family.h"
#include "cpu/source/integer_encode.h"
#include "cpu/source/sign_bits.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

// `share`: the part of each block that is there.
void encode_blocks(const Codec& codec, const float* x, std::size_t blocks, float share, std::uint8_t* fields,
                   std::uint8_t* codes) {
  const std::size_t block = codec.block;
  alignas(kLine) float room[kLargestBlock / 2];
  float scales[kMostBlocks];
  for (std::size_t b = 0; b < blocks; ++b) scales[b] = folded_parts(x + b * block, block, room);
  for (std::size_t b = 0; b < blocks; ++b) scales[b] = sign_scale(scales[b], share, codec.scale);
  store_fields(codec.scale, scales, blocks, fields);
  sign_bits(x, blocks * block, codes);
  for (std::size_t b = 0; b < blocks; ++b) {
    const bool usable = scales[b] > 0.0f;  // neither a zero block nor a NaN block
    if (!usable) __builtin_memset(codes + b * block / 8, 0, block / 8);
  }
}

void encode(const Plan& plan, const float* x, std::size_t n, const Encoding&, std::uint8_t* to) {
  const Layout& layout = plan.layout;
  const std::size_t block = plan.codec.block, whole = n / block, rest = n % block;
  std::uint8_t* codes = to + layout.codes_at(n);
  encode_blocks(plan.codec, x, whole, 1.0f, to, codes);
  if (rest) {
    float last[kLargestBlock];
    __builtin_memcpy(last, x + whole * block, rest * sizeof(float));
    __builtin_memset(last + rest, 0, (block - rest) * sizeof(float));
    encode_blocks(plan.codec, last, 1, static_cast<float>(rest) / static_cast<float>(block),
                  to + whole * layout.field_bytes, codes + whole * block / 8);
  }
  __builtin_memset(to + layout.used(n), 0, layout.bytes(n) - layout.used(n));
}

template <bool Stream, class Finish>
inline void decode_with(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, const Finish& finish) {
  const std::size_t block = plan.codec.block;
  const std::uint8_t* codes = from + plan.layout.codes_at(n);
  float scales[kMostBlocks];
  load_fields(plan.codec.scale, from, plan.layout.blocks(n), scales);
  for (std::size_t at = 0; at < n; at += block) {
    const float scale = canonical(scales[at / block]);
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
  const Run run{sum};
  decode_with<false>(plan, from, n, to, [run](auto value, std::size_t i) { return settled(run.at(value, i) + value); });
}

}  // namespace

const FamilyKernels kSignFamily{encode, decode, add};

}  // namespace dtcomm::DTCOMM_ISA
