// Integer codes with a scale per block.
#include "cpu/source/codec_family.h"
#include "cpu/source/integer_decode.h"
#include "cpu/source/integer_encode.h"
#include "cpu/source/outliers.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

void encode(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  alignas(kLine) float filled[kLargestBlock];
  if (plan.codec.spikes) {
    __builtin_memcpy(filled, x, n * sizeof(float));
    take_spikes(plan, filled, n, how, to);
    x = filled;
  }
  if (plan.codec.block == 32) {
    encode_integer<32>(plan.codec, plan.rules, plan.layout, x, n, how, to);
  } else {
    encode_integer<0>(plan.codec, plan.rules, plan.layout, x, n, how, to);
  }
}

void decode(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
  if (plan.codec.spikes) {
    // Nothing can be put back where a streamed store has gone.
    alignas(kLine) float floats[kLargestBlock];
    float* const room = stream ? floats : to;
    decode_integer<false>(plan.codec, plan.layout, from, n, room);
    put_spikes(plan, from, n, room);
    if (stream) stream_copy(to, floats, n * sizeof(float));
    return;
  }
  if (stream && kDirect) {
    decode_integer<true>(plan.codec, plan.layout, from, n, to);
  } else {
    decode_integer<false>(plan.codec, plan.layout, from, n, to);
  }
}

void add(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  if (plan.codec.spikes) {
    const SpikeSums sums(plan, from, n, sum);
    add_integer(plan.codec, plan.layout, from, n, sum, to);
    sums.add(plan, from, n, to);
    return;
  }
  add_integer(plan.codec, plan.layout, from, n, sum, to);
}

void lost(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float divisor, const float* old,
          float* residual) {
  lost_integer(plan.codec, plan.layout, from, n, sum, divisor, old, residual);
}

#if defined(__AVX512F__)
bool pair(const Plan& plan, const std::uint8_t* first, const std::uint8_t* second, std::size_t n, float* to,
          bool stream) {
  const auto run = plan.codec.symmetric ? stream ? pair_integer<true, true> : pair_integer<true, false>
                   : stream             ? pair_integer<false, true>
                                        : pair_integer<false, false>;
  run(plan.codec, plan.layout, first, second, n, to);
  return true;
}
#else
constexpr auto pair = nullptr;
#endif

}  // namespace

const FamilyKernels kIntegerFamily{encode, decode, add, lost, nullptr, pair};

}  // namespace dtcomm::DTCOMM_ISA
