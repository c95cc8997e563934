// nvfp4: 16 elements of e2m1 share a scale of e4m3, and the blocks of a granule an fp32 scale.
#include "codec/nvfp4.h"

#include "cpu/source/blocks.h"
#include "cpu/source/decoding_family.h"
#include "cpu/source/minifloat_decode.h"
#include "cpu/source/minifloat_encode.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

constexpr std::size_t kBlock = kNvfp4Block, kBlocks = kNvfp4Granule / kBlock;

// Blocks with their scales; `bytes` are the stored ones.
void encode_blocks(const float* x, std::size_t blocks, const std::uint8_t* bytes, float granule, const EncodeArgs& args,
                   std::uint8_t* codes) {
  float inverse[kMaxBlocks];
  for (std::size_t b = 0; b < blocks; ++b) inverse[b] = nvfp4_block_scale(bytes[b], granule);
  for (std::size_t b = 0; b < blocks; ++b) inverse[b] = inverse_of(inverse[b]);
  minifloats_nearest<E2m1, true>(x, blocks, kBlock, inverse, args, codes);
}

struct Nvfp4Kernels : DecodingFamily<Nvfp4Kernels> {
  static void encode(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                     std::uint8_t* to) {
    const BlockCut cut(params.layout, n);
    const EncodeArgs plain{args.key, args.index, args.feedback};
    float last[kBlock] = {};
    __builtin_memcpy(last, x + cut.whole * kBlock, cut.rest * sizeof(float));
    std::uint32_t tops[kBlocks];
    for (std::size_t b = 0; b < cut.whole; b += kMaxBlocks) {
      Blocks part;
      const std::size_t count = smaller(kMaxBlocks, cut.whole - b);
      measure<kBlock>(x + b * kBlock, count, kBlock, part);
      __builtin_memcpy(tops + b, part.top, count * sizeof(tops[0]));
    }
    if (cut.rest) tops[cut.whole] = largest(last, kBlock);
    std::uint32_t top = 0;
    for (std::size_t b = 0; b < cut.blocks; ++b) {
      const std::uint32_t size = tops[b] < kInfinity32 ? tops[b] : 0;  // NaN blocks take no part
      top = size > top ? size : top;
    }
    const float granule = nvfp4_granule_scale(top), inverse = inverse_of(granule);
    for (std::size_t b = 0; b < cut.blocks; ++b) {
      to[b] = static_cast<std::uint8_t>(nvfp4_scale_byte(tops[b], granule, inverse));
    }
    std::uint8_t* const codes = to + cut.codes;
    for (std::size_t b = 0; b < cut.whole; b += kMaxBlocks) {
      const std::size_t count = smaller(kMaxBlocks, cut.whole - b);
      encode_blocks(x + b * kBlock, count, to + b, granule, plain, codes + b * kBlock / 2);
    }
    if (cut.rest) encode_blocks(last, 1, to + cut.whole, granule, plain, codes + cut.whole * kBlock / 2);
    __builtin_memcpy(to + cut.used - sizeof granule, &granule, sizeof granule);
    cut.pad(to);
  }

  // to[i] = finish(value of element i, i) for i < n.
  template <bool Stream, class Finish>
  static inline __attribute__((always_inline)) void decode_with(const CodecParams& params, const std::uint8_t* from,
                                                                std::size_t n, float* to, const Finish& finish) {
    const BlockCut cut(params.layout, n);
    float granule, scales[kBlocks];
    __builtin_memcpy(&granule, from + cut.used - sizeof granule, sizeof granule);
    for (std::size_t b = 0; b < cut.blocks; ++b) scales[b] = nvfp4_block_scale(from[b], granule);
    const std::uint8_t* const codes = from + cut.codes;
    std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
    for (; i + kBlock <= n; i += kBlock) {
      const float scale = scales[i / kBlock];
#pragma GCC unroll 4
      for (std::size_t j = i; j < i + kBlock; j += kLanes) {
        store<Stream>(to + j, finish(Minifloat<E2m1>::many(codes, j) * scale, j));
      }
    }
#endif
    auto* out = unaligned<float>(to);
    for (; i < n; ++i) out[i].value = finish(Minifloat<E2m1>::one(codes, i) * scales[i / kBlock], i);
  }
};

}  // namespace

const FamilyKernels kNvfp4Family = {Nvfp4Kernels::encode, Nvfp4Kernels::decode, Nvfp4Kernels::add,
                                    Nvfp4Kernels::encode_with_error};

}  // namespace dtcomm::DTCOMM_ISA
