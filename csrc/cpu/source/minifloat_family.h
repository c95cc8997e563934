// The kernels of families whose granules are block scales followed by small floats: float8 and mx.
#pragma once

#include "cpu/source/blocks.h"
#include "cpu/source/decoding_family.h"
#include "cpu/source/minifloat_decode.h"
#include "cpu/source/minifloat_encode.h"

namespace dtcomm::DTCOMM_ISA {

// One family with one element format. `Format` provides:
//   Element                                          the format of a code: E4m3, E5m2 or E2m1
//   kMostScales, kMaxBlock                           scales of a granule, elements of a block, at most
//   block(params)                                    elements of a block
//   encode_blocks(params, x, blocks, args, fields, codes, error)
//       whole blocks into scales and codes; whether the error was stored, for which `error` is a target or nullptr
//   load_scales(params, fields, blocks, scales)      the scales as fp32
//   for_each<Stream>(params, codes, scales, n, to, finish)   to[i] = finish(value i, i)
template <class Format>
struct MinifloatFamily : DecodingFamily<MinifloatFamily<Format>> {
  using Element = typename Format::Element;

  // Returns whether the error was stored.
  static bool encode_granule(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                             std::uint8_t* to, const ErrorTarget* error) {
    const BlockCut cut(params.layout, n);
    const std::size_t block = Format::block(params), done = cut.whole * block;
    const bool stored =
        Format::encode_blocks(params, x, cut.whole, args, to, to + cut.codes, cut.rest ? nullptr : error);
    if (cut.rest) {
      float last[Format::kMaxBlock];
      __builtin_memcpy(last, x + done, cut.rest * sizeof(float));
      __builtin_memset(last + cut.rest, 0, (block - cut.rest) * sizeof(float));
      Format::encode_blocks(params, last, 1, {args.key, args.index + done, args.feedback},
                            to + cut.whole * params.layout.field_bytes,
                            to + cut.codes + done * params.layout.code_bits / 8, nullptr);
    }
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

  template <bool Stream, class Finish>
  static inline __attribute__((always_inline)) void decode_with(const CodecParams& params, const std::uint8_t* from,
                                                                std::size_t n, float* to, const Finish& finish) {
    const BlockCut cut(params.layout, n);
    float scales[Format::kMostScales];
    Format::load_scales(params, from, cut.blocks, scales);
    Format::template for_each<Stream>(params, from + cut.codes, scales, n, to, finish);
  }

  static bool add_pair(const CodecParams& params, const std::uint8_t* first, const std::uint8_t* second, std::size_t n,
                       float* to, bool stream) {
    const BlockCut cut(params.layout, n);
    const std::uint8_t* const codes[2] = {first + cut.codes, second + cut.codes};
    float scales[2][kMostBlocks];
    Format::load_scales(params, first, cut.blocks, scales[0]);
    Format::load_scales(params, second, cut.blocks, scales[1]);
    const auto run = stream ? add_minifloats<Element, kDirect> : add_minifloats<Element, false>;
    return run(codes, scales, cut.blocks, Format::block(params), n, to);
  }
};

// The function table of a family. `Derived::with_format(params, run)` calls run(Format{}) for the codec's format.
template <class Derived>
struct MinifloatKernels {
  static void encode(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                     std::uint8_t* to) {
    Derived::with_format(params,
                         [&](auto format) { MinifloatFamily<decltype(format)>::encode(params, x, n, args, to); });
  }

  static void decode(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
    Derived::with_format(params,
                         [&](auto format) { MinifloatFamily<decltype(format)>::decode(params, from, n, to, stream); });
  }

  static void add(const CodecParams& params, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
    Derived::with_format(params,
                         [&](auto format) { MinifloatFamily<decltype(format)>::add(params, from, n, sum, to); });
  }

  static void encode_with_error(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                                std::uint8_t* to, const ErrorTarget& error) {
    Derived::with_format(params, [&](auto format) {
      MinifloatFamily<decltype(format)>::encode_with_error(params, x, n, args, to, error);
    });
  }

  static bool add_pair(const CodecParams& params, const std::uint8_t* first, const std::uint8_t* second, std::size_t n,
                       float* to, bool stream) {
    return Derived::with_format(params, [&](auto format) {
      return MinifloatFamily<decltype(format)>::add_pair(params, first, second, n, to, stream);
    });
  }

  static constexpr FamilyKernels table() { return {encode, decode, add, encode_with_error, nullptr, add_pair}; }
};

}  // namespace dtcomm::DTCOMM_ISA
