// int2 to int8: integer codes with a scale per block.
#include "cpu/source/codec_family.h"
#include "cpu/source/integer_decode.h"
#include "cpu/source/integer_encode.h"
#include "cpu/source/outliers.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

void encode(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args, std::uint8_t* to) {
  alignas(kLine) float rest[kLargestBlock];
  if (params.codec.spikes) {
    GranuleOutliers outliers;
    extract_granule_outliers(params, x, n, rest, outliers);
    store_outliers(params, outliers, n, args, to);
    x = rest;
  }
  encode_integer<false>(params.codec, params.rules, params.layout, x, n, args, to, {});
}

// The errors of outliers replace those of the elements that fill their places.
void encode_outliers_with_error(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                                std::uint8_t* to, const ErrorTarget& error) {
  alignas(kLine) float rest[kLargestBlock];
  GranuleOutliers outliers;
  extract_granule_outliers(params, x, n, rest, outliers);
  const std::size_t count = 2 * params.layout.blocks(n), block = params.layout.block;
  const auto index_of = [&](std::size_t i) { return i / 2 * block + outliers.positions[i]; };
  float before[kMaxOutliers], old[kMaxOutliers];  // `error.residual` may be x or `error.old`
  __builtin_memcpy(before, outliers.values, count * sizeof(float));
  for (std::size_t i = 0; i < count; ++i) old[i] = unaligned<float>(error.old)[index_of(i)].value;
  store_outliers(params, outliers, n, args, to);
  encode_integer<true>(params.codec, params.rules, params.layout, rest, n, args, to, error);
  for (std::size_t i = 0; i < count; ++i) {
    const float lost = (before[i] - outliers.values[i]) * error.divisor;
    unaligned<float>(error.residual)[index_of(i)].value = finite_or(lost, old[i]);
  }
}

void encode_with_error(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                       std::uint8_t* to, const ErrorTarget& error) {
  if (params.codec.spikes) return encode_outliers_with_error(params, x, n, args, to, error);
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
    alignas(kLine) float floats[kLargestBlock];
    decode_integer<false>(params.codec, params.layout, from, n, floats);
    restore_outliers(params, from, n, floats);
    return join(ReduceOp::sum, to, sum, floats, n);
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
