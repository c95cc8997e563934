// Integer codes with a scale and optionally a zero point and outliers for each block.
#pragma once

#include <type_traits>

#include "cuda/families/blocks.cuh"
#include "cuda/families/outliers.cuh"

namespace dtcomm::cuda {

// The options of a family's codecs. plain: symmetric, rounded to nearest, no other option. spikes: the same with
// outliers. any: all options, which are tested at run time.
enum class IntegerOptions : unsigned { any = 0, plain = 1, spikes = 2 };

// Bits and Group are 0 where the compiler does not know them.
template <int Bits, unsigned Group, IntegerOptions Options>
struct Integer : Blocks<Group> {
  static constexpr bool kAny = Options == IntegerOptions::any, kPlain = Options == IntegerOptions::plain;
  static constexpr bool kSpecialized = !kAny, kHasMinMax = false, kCanRotate = kAny, kHasPadding = true;
  using Blocks<Group>::codec;
  using Blocks<Group>::rules;
  using Blocks<Group>::group;
  using Blocks<Group>::block_elements;
  using Blocks<Group>::block_of;

  struct PlainRaw {
    Codes codes;  // of four bits where the compiler knows it: all in the first word, as they lie in the payload
    float scale;
  };
  struct SpikesRaw : PlainRaw {
    Outliers outliers;
    std::uint32_t first;  // index of the vec8's first element in its block
  };
  struct AnyRaw : SpikesRaw {
    float zero;
  };
  using Raw = std::conditional_t<kPlain, PlainRaw, std::conditional_t<kAny, AnyRaw, SpikesRaw>>;

  // Whether the options are those that combine_granule knows.
  static constexpr int kVecs = kPlain && Group ? kGranule / (kWarp * kVec8) : 1;
  DTCOMM_DEVICE bool is_default() const { return codec.scale == Scale::bf16; }

  DTCOMM_DEVICE unsigned bits() const { return Bits ? Bits : codec.bits; }
  DTCOMM_DEVICE bool symmetric() const { return !kAny || codec.symmetric; }
  DTCOMM_DEVICE bool rotates() const { return kAny && codec.rotate; }
  DTCOMM_DEVICE bool spikes() const { return kAny ? codec.spikes != 0 : !kPlain; }
  // The codec, with the values that the compiler knows.
  DTCOMM_DEVICE Codec known_codec() const {
    Codec known = codec;
    if constexpr (!kAny) {
      known.stochastic = 0;
      known.block = block_elements();
    }
    return known;
  }

  template <bool Whole, class Lanes>
  DTCOMM_DEVICE Raw load(const Lanes&, const GranuleShape& shape, const std::uint8_t* granule, std::uint32_t at) const {
    Raw raw = {};
    if (!Whole && at >= shape.stored) return raw;
    const std::uint8_t* section = granule + shape.codes_at;
    if constexpr (Bits == 4) {
      raw.codes.word[0] = static_cast<std::uint32_t>(load_bytes<4, Whole>(section + at / 2));
    } else {
      raw.codes = load_codes<Whole>(bits(), shape.stored, at, section);
    }
    raw.scale = load_field(codec.scale, granule, block_of(at));
    if constexpr (kAny) {
      if (!codec.symmetric) raw.zero = load_field(codec.scale, granule + shape.zeros_at, block_of(at));
    }
    if constexpr (!kPlain) {
      if (spikes()) raw.outliers = load_outliers(known_codec(), shape, block_of(at), granule);
      raw.first = at % block_elements();
    }
    return raw;
  }

  DTCOMM_DEVICE float value(float q, float scale, float zero) const {
    return symmetric() ? q * scale : zero + q * scale;
  }

  DTCOMM_DEVICE void decode(const Raw& raw, float (&x)[kVec8]) const {
    // A signed code of b bits, its highest bit flipped, is the code plus 2^(b-1).
    const std::uint32_t half = symmetric() ? 1U << (bits() - 1) : 0;
    constexpr std::uint32_t kEach = Bits == 4 ? 0x11111111U : 0x01010101U;
    const std::uint32_t low = raw.codes.word[0] ^ half * kEach, high = raw.codes.word[1] ^ half * kEach;
    const Codes codes = Bits == 4 ? split_nibbles(low) : Codes{{low, high}};
    float zero = 0.0f;
    if constexpr (kAny) zero = raw.zero;
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      const int place = Bits == 4 ? nibble_place(j) : j;
      x[j] = value(float_of_byte(codes, place, static_cast<float>(half)), raw.scale, zero);
    }
    if constexpr (!kPlain) {
      if (spikes()) restore_outliers(raw.outliers, raw.first, x);
    }
  }

  // The zero point; `top` becomes the range above it.
  template <class Lanes>
  DTCOMM_DEVICE float measure_range(const Lanes& lanes, const float (&x)[kVec8], int live, std::uint32_t& top) const {
    std::int32_t low = 0x7fffffff, high = -0x7fffffff - 1;
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      const std::int32_t order = float_order(x[j]);
      low = j < live && order < low ? order : low;
      high = j < live && order > high ? order : high;
    }
    low = group_reduce(lanes, group(), low, [](std::int32_t a, std::int32_t b) { return a < b ? a : b; });
    high = group_reduce(lanes, group(), high, [](std::int32_t a, std::int32_t b) { return a > b ? a : b; });
    if (top >= kInfinity32) return 0.0f;
    const float zero = zero_of(rules, float_from_order(low));
    top = magnitude(float_from_order(high) - zero);
    return top >= kInfinity32 ? 0.0f : zero;
  }

  // The vec8 at element `at` of a whole granule, with the default options: the same bytes as encode() writes.
  template <class Lanes>
  DTCOMM_DEVICE void encode_default(const Lanes& lanes, std::uint32_t at, const float (&x)[kVec8],
                                    std::uint8_t* granule) const {
    constexpr float kLevels = (1 << (Bits - 1)) - 1;
    const std::uint32_t top = group_max_magnitude(lanes, group(), x);
    std::uint32_t scale = bits_of(divide_exactly(float_of(top), kLevels));
    scale = (scale + 0x7fff + (scale >> 16 & 1)) & 0xffff0000U;
    scale = scale > rules.cap ? rules.cap : scale;
    const bool bad = top >= kInfinity32, usable = !bad && scale >= 0x00800000;
    const float inverse = usable ? inverse_of_bf16(float_of(scale)) : 0.0f;
    std::int32_t q[kVec8];
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      const float t = fminf(fmaxf(x[j] * inverse, -kLevels), kLevels);
      q[j] = static_cast<std::int32_t>(bits_of(t + kRound));  // its lowest byte is the code
    }
    Codes codes = codes_of(q);
    codes.word[0] = bad ? 0 : codes.word[0];
    codes.word[1] = bad ? 0 : codes.word[1];
    constexpr std::uint32_t kCodesAt = kGranule / (Group * kVec8) * 2;
    store_codes<true>(codes, Bits, kGranule, at, granule + kCodesAt);
    if (this->leads(at)) store_field(Scale::bf16, float_of(bad ? kNaN32 : usable ? scale : 0), granule, block_of(at));
  }

  // N neighbouring elements of a whole granule, with the default options.
  template <int N>
  struct Row {
    std::uint64_t codes;
    float scale;

    // The codes as numbers.
    DTCOMM_DEVICE void numbers(float (&x)[N]) const {
      constexpr std::uint32_t kHalf = 1U << (Bits - 1);
      Codes bytes = {};
      DTCOMM_UNROLL
      for (int k = 0; k < N / 4; ++k) {
        bytes.word[k] = unpack_codes<Bits>(static_cast<std::uint32_t>(codes >> k * 4 * Bits)) ^ kHalf * 0x01010101U;
      }
      DTCOMM_UNROLL
      for (int j = 0; j < N; ++j) x[j] = float_of_byte(bytes, j, static_cast<float>(kHalf));
    }
  };
  // Those at element `at` of the first row, in row `row` of kWarp * N elements, whose distance is a constant.
  template <int N>
  DTCOMM_DEVICE Row<N> load_row(std::uint32_t row, std::uint32_t at, const std::uint8_t* granule) const {
    constexpr std::uint32_t kBlock = Group * kVec8, kElements = kWarp * N, kCodesAt = kGranule / kBlock * 2;
    static_assert(kElements % kBlock == 0, "a row has whole blocks");
    const std::uint8_t* codes = granule + kCodesAt + at * Bits / 8 + row * (kElements * Bits / 8);
    const std::uint8_t* fields = granule + at / kBlock * 2;
    return {load_bytes<Bits * N / 8, true>(codes), load_field(Scale::bf16, fields, row * (kElements / kBlock))};
  }
  // `Finite`: the scale is; no other product is NaN.
  template <bool Finite>
  DTCOMM_DEVICE Quad decode_row(const Row<4>& row) const {
    float x[4];
    row.numbers(x);
    DTCOMM_UNROLL
    for (int j = 0; j < 4; ++j) x[j] = Finite ? x[j] * row.scale : canonical(x[j] * row.scale);
    return {{bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])}};
  }
  // Adds the row's values to sums. The products are exact, so that one rounding is that of the sum, if they are finite.
  template <bool First>
  DTCOMM_DEVICE void add_row(const Row<kVec8>& row, float (&sum)[kVec8]) const {
    float x[kVec8];
    row.numbers(x);
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) sum[j] = First ? x[j] * row.scale : fmaf(x[j], row.scale, sum[j]);
  }

  template <bool Feedback, bool Whole, class Lanes>
  DTCOMM_DEVICE void encode(const Lanes& lanes, const KernelParams& params, const GranuleShape& shape,
                            const Vec8Position& pos, int live, float (&x)[kVec8], std::uint8_t* granule,
                            float (&decoded)[kVec8]) const {
    const std::uint64_t index = params.offset + pos.first;
    const std::uint32_t first = pos.at % block_elements();
    Outliers outliers = {};
    float zero = 0.0f;
    if constexpr (!kPlain) {
      if (spikes()) {
        outliers = extract_outliers(lanes, known_codec(), group(), params.key, index, first, live, x);
      }
    }
    std::uint32_t top = group_max_magnitude(lanes, group(), x);
    if (!symmetric()) zero = measure_range(lanes, x, live, top);
    const float scale = scale_of(rules, top), inverse = inverse_of(scale);
    const float lowest = symmetric() ? -rules.levels : 0.0f;
    std::int32_t q[kVec8];
    if (kAny && codec.stochastic) {
      float random[kVec8];
      uniform_vec8(params.key, index, random);
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) {
        q[j] = stochastic_code((x[j] - zero) * inverse, lowest, rules.levels, random[j]);
      }
    } else {
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) {
        q[j] = nearest_code(!kAny ? x[j] * inverse : (x[j] - zero) * inverse, lowest, rules.levels);
      }
    }
    // The codes of NaN blocks are cleared, and those of missing elements, which only zero points make different from 0.
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) {
      if (top >= kInfinity32 || (kAny && j >= live)) q[j] = 0;
    }
    if (Whole || pos.at < shape.stored) {
      store_codes<Whole>(codes_of(q), bits(), shape.stored, pos.at, granule + shape.codes_at);
      if (first == 0) {
        const std::uint32_t block = block_of(pos.at);
        store_field(codec.scale, scale, granule, block);
        if (!symmetric()) store_field(codec.scale, zero, granule + shape.zeros_at, block);
        if constexpr (!kPlain) {
          if (spikes()) store_outliers(known_codec(), shape, block, outliers, granule);
        }
      }
    }
    if constexpr (Feedback) {
      DTCOMM_UNROLL
      for (int j = 0; j < kVec8; ++j) decoded[j] = value(static_cast<float>(q[j]), scale, zero);
      if constexpr (!kPlain) {
        if (spikes()) restore_outliers(outliers, first, decoded);
      }
    }
  }
};

using AnyInteger = Integer<0, 0, IntegerOptions::any>;

}  // namespace dtcomm::cuda
