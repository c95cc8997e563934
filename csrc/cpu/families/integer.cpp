// int2 to int8: integer codes with a scale per block.
#include "cpu/source/codec_family.h"
#include "cpu/source/integer_decode.h"
#include "cpu/source/integer_encode.h"
#include "cpu/source/outliers.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

void encode(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args, std::uint8_t* to) {
  alignas(kLine) float without_outliers[kLargestBlock];
  if (params.codec.spikes) {
    __builtin_memcpy(without_outliers, x, n * sizeof(float));
    encode_outliers(params, without_outliers, n, args, to);
    x = without_outliers;
  }
  encode_integer<false>(params.codec, params.rules, params.layout, x, n, args, to, {});
}

void encode_with_error(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                       std::uint8_t* to, const ErrorTarget& error) {
  encode_integer<true>(params.codec, params.rules, params.layout, x, n, args, to, error);
}

void decode(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
  if (params.codec.spikes) {
    // Outliers cannot be written over streamed stores, so those go through a buffer.
    alignas(kLine) float floats[kLargestBlock];
    float* const room = stream ? floats : to;
    decode_integer<false>(params.codec, params.layout, from, n, room);
    restore_outliers(params, from, n, room);
    if (stream) stream_copy(to, floats, n * sizeof(float));
    return;
  }
  if (stream && kDirect) {
    decode_integer<true>(params.codec, params.layout, from, n, to);
  } else {
    decode_integer<false>(params.codec, params.layout, from, n, to);
  }
}

void add(const CodecParams& params, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  if (params.codec.spikes) {
    const OutlierSums sums(params, from, n, sum);
    add_integer(params.codec, params.layout, from, n, sum, to);
    sums.add(params, from, n, to);
    return;
  }
  add_integer(params.codec, params.layout, from, n, sum, to);
}

#if defined(__AVX512F__)
bool add_pair(const CodecParams& params, const std::uint8_t* first, const std::uint8_t* second, std::size_t n,
              float* to, bool stream) {
  const auto run = params.codec.symmetric ? stream ? add_pair_integer<true, true> : add_pair_integer<true, false>
                   : stream               ? add_pair_integer<false, true>
                                          : add_pair_integer<false, false>;
  run(params.codec, params.layout, first, second, n, to);
  return true;
}
#else
constexpr auto add_pair = nullptr;
#endif

}  // namespace

const FamilyKernels kIntegerFamily{encode, decode, add, encode_with_error, nullptr, add_pair};

}  // namespace dtcomm::DTCOMM_ISA
