// mx (OCP Microscaling): 32 elements of 8 or 4 bits share a power of two.
#include "codec/mx.h"
#include "cpu/source/minifloat_family.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

constexpr std::size_t kBlock = 32;
static_assert(most_blocks(Family::mx, kBlock) == kGranule / kBlock, "a granule has as many scales");

template <class E>
struct MxFormat {
  using Element = E;
  static constexpr std::size_t kMostScales = kGranule / kBlock, kMaxBlock = kBlock;

  static constexpr std::size_t block(const CodecParams&) { return kBlock; }

  static bool encode_blocks(const CodecParams&, const float* x, std::size_t blocks, const EncodeArgs& args,
                            std::uint8_t* fields, std::uint8_t* codes, const ErrorTarget* error) {
    Blocks at;
    measure<kBlock>(x, blocks, kBlock, at);
    std::uint32_t scales[kMostScales];
    for (std::size_t b = 0; b < blocks; ++b) scales[b] = mx_scale<E>(at.top[b]);
    for (std::size_t b = 0; b < blocks; ++b) at.inverse[b] = mx_inverse(scales[b]);
    for (std::size_t b = 0; b < blocks; ++b) fields[b] = static_cast<std::uint8_t>(scales[b]);
    for (std::size_t b = 0; b < blocks; ++b) at.scale[b] = mx_value(scales[b]);
    return minifloats_nearest<E, true>(x, blocks, kBlock, at.inverse, at.scale, args, codes, error);
  }

  static void load_scales(const CodecParams&, const std::uint8_t* fields, std::size_t blocks, float* scales) {
    for (std::size_t b = 0; b < blocks; ++b) scales[b] = mx_value(fields[b]);
  }

  template <bool Stream, class Finish>
  static inline __attribute__((always_inline)) void for_each(const CodecParams&, const std::uint8_t* codes,
                                                             const float* scales, std::size_t n, float* to,
                                                             const Finish& finish) {
    for_each_minifloat<E, kBlock, Stream>(codes, scales, kBlock, n, to, finish);
  }
};

struct MxKernels : MinifloatKernels<MxKernels> {
  template <class Run>
  static auto with_format(const CodecParams& params, const Run& run) {
    switch (params.codec.element) {
      case Element::e4m3:
        return run(MxFormat<E4m3>{});
      case Element::e5m2:
        return run(MxFormat<E5m2>{});
      default:
        return run(MxFormat<E2m1>{});
    }
  }
};

}  // namespace

const FamilyKernels kMxFamily = MxKernels::table();

}  // namespace dtcomm::DTCOMM_ISA
