// float8: e4m3, e5m2 and e3m4 codes with a scale per block.
#include "cpu/source/minifloat_family.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

template <class E>
struct Float8Format {
  using Element = E;
  static constexpr std::size_t kMostScales = kMostBlocks, kMaxBlock = kLargestBlock;

  static std::size_t block(const CodecParams& params) { return params.codec.block; }

  static bool encode_blocks(const CodecParams& params, const float* x, std::size_t blocks, const EncodeArgs& args,
                            std::uint8_t* fields, std::uint8_t* codes, const ErrorTarget* error) {
    const std::size_t block = params.codec.block;
    float scales[kMostScales], inverse[kMostScales];
    const auto scale_four = [&](std::size_t b, const std::uint32_t top[4]) {
      const IntegerRules rules = params.rules;
#pragma GCC unroll 1
      for (std::size_t j = 0; j < 4; ++j) scales[b + j] = scale_of(rules, top[j]);
#pragma GCC unroll 1
      for (std::size_t j = 0; j < 4; ++j) inverse[b + j] = inverse_of(scales[b + j]);
    };
    // Four blocks at a time: their divisions run while the next four are read.
    std::size_t b = 0;
    for (; b + 4 <= blocks; b += 4) {
      std::uint32_t top[4];
      largest_of_four(x + b * block, block, top);
      scale_four(b, top);
    }
    if (b < blocks) {
      std::uint32_t top[4] = {};
      for (std::size_t j = b; j < blocks; ++j) top[j - b] = largest(x + j * block, block);
      scale_four(b, top);
    }
    store_fields(params.codec.scale, scales, blocks, fields);
    if (params.codec.stochastic) {
      minifloats_stochastic<E>(x, blocks, block, inverse, args.key, args.index, codes);
      return false;
    }
    return minifloats_nearest<E, false>(x, blocks, block, inverse, scales, args, codes, error);
  }

  static void load_scales(const CodecParams& params, const std::uint8_t* fields, std::size_t blocks, float* scales) {
    load_fields(params.codec.scale, fields, blocks, scales);
  }

  // The default block has a loop of its own.
  template <bool Stream, class Finish>
  static inline __attribute__((always_inline)) void for_each(const CodecParams& params, const std::uint8_t* codes,
                                                             const float* scales, std::size_t n, float* to,
                                                             const Finish& finish) {
    if (params.codec.block == 128) {
      for_each_minifloat<E, 128, Stream>(codes, scales, 128, n, to, finish);
    } else {
      for_each_minifloat<E, 0, Stream>(codes, scales, params.codec.block, n, to, finish);
    }
  }
};

struct Float8Kernels : MinifloatKernels<Float8Kernels> {
  template <class Run>
  static auto with_format(const CodecParams& params, const Run& run) {
    switch (params.codec.element) {
      case Element::e4m3:
        return run(Float8Format<E4m3>{});
      case Element::e5m2:
        return run(Float8Format<E5m2>{});
      default:
        return run(Float8Format<E3m4>{});
    }
  }
};

}  // namespace

const FamilyKernels kFloat8Family = Float8Kernels::table();

}  // namespace dtcomm::DTCOMM_ISA
