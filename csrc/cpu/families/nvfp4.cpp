// nvfp4: 16 elements of e2m1 share a scale of e4m3, and the blocks of a granule an fp32 scale.
#include "codec/nvfp4.h"

#include "cpu/source/blocks.h"
#include "cpu/source/decoding_family.h"
#include "cpu/source/minifloat_decode.h"
#include "cpu/source/minifloat_encode.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

constexpr std::size_t kBlock = kNvfp4Block, kBlocks = kNvfp4Granule / kBlock;
static_assert(most_blocks(Family::nvfp4, kBlock) == kBlocks, "a granule has kBlocks blocks");

// A granule's values as operands of `transform`, added to another granule's values.
struct Nvfp4Run {
  const std::uint8_t* codes;
  const float* scales;

  float at(float, std::size_t i) const { return Minifloat<E2m1>::one(codes, i) * scales[i / kBlock]; }
#if defined(DTCOMM_VECTORS)
  Floats at(Floats, std::size_t i) const { return Minifloat<E2m1>::many(codes, i) * scales[i / kBlock]; }
#endif
};

struct Nvfp4Kernels : DecodingFamily<Nvfp4Kernels> {
  // Returns whether the error was stored.
  static bool encode_granule(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                             std::uint8_t* to, const ErrorTarget* error) {
    const BlockCut cut(params.layout, n);
    const EncodeArgs plain{args.key, args.index, args.feedback};
    float last[kBlock] = {};
    __builtin_memcpy(last, x + cut.whole * kBlock, cut.rest * sizeof(float));
    std::uint32_t tops[kBlocks];
    for (std::size_t b = 0; b < cut.whole; b += kMostBlocks) {
      Blocks part;
      const std::size_t count = smaller(kMostBlocks, cut.whole - b);
      measure<kBlock>(x + b * kBlock, count, kBlock, part);
      __builtin_memcpy(tops + b, part.top, count * sizeof(tops[0]));
    }
    if (cut.rest) tops[cut.whole] = largest(last, kBlock);
    // Signed words, of which compilers vectorize the maximum.
    std::int32_t top = 0;
    for (std::size_t b = 0; b < cut.blocks; ++b) {
      const auto size = static_cast<std::int32_t>(tops[b]);
      const std::int32_t finite = size < static_cast<std::int32_t>(kInfinity32) ? size : 0;  // NaN blocks take no part
      top = finite > top ? finite : top;
    }
    const float granule = nvfp4_granule_scale(static_cast<std::uint32_t>(top)), inverse = inverse_of(granule);
    for (std::size_t b = 0; b < cut.blocks; ++b) {
      to[b] = static_cast<std::uint8_t>(nvfp4_scale_byte(tops[b], granule, inverse));
    }
    float scales[kBlocks], inverses[kBlocks];
    for (std::size_t b = 0; b < cut.blocks; ++b) scales[b] = nvfp4_block_scale(to[b], granule);
    for (std::size_t b = 0; b < cut.blocks; ++b) inverses[b] = inverse_of(scales[b]);
    std::uint8_t* const codes = to + cut.codes;
    const bool stored = minifloats_nearest<E2m1, true>(x, cut.whole, kBlock, inverses, scales, plain, codes,
                                                       cut.rest ? nullptr : error);
    if (cut.rest) {
      minifloats_nearest<E2m1, true>(last, 1, kBlock, inverses + cut.whole, scales + cut.whole, plain,
                                     codes + cut.whole * kBlock / 2, nullptr);
    }
    __builtin_memcpy(to + cut.used - sizeof granule, &granule, sizeof granule);
    cut.pad(to);
    return stored;
  }

  static void encode(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                     std::uint8_t* to) {
    encode_granule(params, x, n, args, to, nullptr);
  }

  static void encode_with_error(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                                std::uint8_t* to, const ErrorTarget& error) {
    if (encode_granule(params, x, n, args, to, &error)) return;
    decode_with<false>(params, to, n, error.residual, error_of(x, error.divisor, error.old));
  }

  // to[i] = finish(value of element i, i) for i < n.
  template <bool Stream, class Finish>
  static inline __attribute__((always_inline)) void decode_with(const CodecParams& params, const std::uint8_t* from,
                                                                std::size_t n, float* to, const Finish& finish) {
    const BlockCut cut(params.layout, n);
    float scales[kBlocks];
    load_scales(cut, from, scales);
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

  static bool add_pair(const CodecParams& params, const std::uint8_t* first, const std::uint8_t* second, std::size_t n,
                       float* to, bool stream) {
    const BlockCut cut(params.layout, n);
    float scales[kBlocks];
    load_scales(cut, second, scales);
    const Nvfp4Run other{second + cut.codes, scales};
    if (stream && kDirect) {
      decode_with<true>(params, first, n, to, plus(other));
    } else {
      decode_with<false>(params, first, n, to, plus(other));
    }
    return true;
  }

 private:
  static void load_scales(const BlockCut& cut, const std::uint8_t* from, float (&scales)[kBlocks]) {
    float granule;
    __builtin_memcpy(&granule, from + cut.used - sizeof granule, sizeof granule);
    for (std::size_t b = 0; b < cut.blocks; ++b) scales[b] = nvfp4_block_scale(from[b], granule);
  }
};

}  // namespace

const FamilyKernels kNvfp4Family = {
    Nvfp4Kernels::encode,  Nvfp4Kernels::decode, Nvfp4Kernels::add, Nvfp4Kernels::encode_with_error, nullptr,
    Nvfp4Kernels::add_pair};

}  // namespace dtcomm::DTCOMM_ISA
