// The kernels of a codec family that follow from its encode() and decode_with().
#pragma once

#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"

namespace dtcomm::DTCOMM_ISA {

// `Family` provides
//   encode(params, x, n, args, to)
//   decode_with<Stream>(params, from, n, to, finish)    to[i] = finish(value of element i, i) for i < n
template <class Family>
struct DecodingFamily {
  static void decode(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
    const auto same = [](auto value, std::size_t) { return value; };
    if (stream && kDirect) {
      Family::template decode_with<true>(params, from, n, to, same);
    } else {
      Family::template decode_with<false>(params, from, n, to, same);
    }
  }

  static void add(const CodecParams& params, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
    Family::template decode_with<false>(params, from, n, to, added_to(sum));
  }

  static void encode_with_error(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                                std::uint8_t* to, const ErrorTarget& error) {
    Family::encode(params, x, n, args, to);
    Family::template decode_with<false>(params, to, n, error.residual, error_of(x, error.divisor, error.old));
  }
};

}  // namespace dtcomm::DTCOMM_ISA
