// The outliers (codec/outliers.h) of a granule: taken out before its blocks are encoded, put back after decoding.
#pragma once

#include "codec/outliers.h"
#include "cpu/source/blocks.h"
#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"
#include "cpu/source/loops.h"

namespace dtcomm::DTCOMM_ISA {

constexpr std::size_t kMaxOutliers = 2 * kMostBlocks;

// The outliers of a granule, two per block, in the order of the payload section.
struct GranuleOutliers {
  float values[kMaxOutliers];
  std::uint32_t positions[kMaxOutliers];
};

#if defined(__AVX2__)
// Which of 16 elements have these bits.
inline __attribute__((always_inline)) std::uint32_t equal_bits(const float* x, std::int32_t bits) {
#if defined(__AVX512F__)
  return mask_bits(_mm512_cmpeq_epi32_mask(_mm512_loadu_si512(x), _mm512_set1_epi32(bits)));
#else
  const __m256i wanted = _mm256_set1_epi32(bits);
  const auto eight = [=](const float* from) {
    const __m256i same = _mm256_cmpeq_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), wanted);
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(same)));
  };
  return eight(x) | eight(x + 8) << 8;
#endif
}

// The first of n elements, a multiple of 16, that has these bits: there is one.
inline __attribute__((always_inline)) std::uint32_t first_equal(const float* x, std::size_t n, std::int32_t bits) {
  for (std::size_t i = 0;; i += 32) {
    std::uint32_t found = equal_bits(x + i, bits);
    if (n > 16) found |= equal_bits(x + i + 16, bits) << 16;
    if (found) return static_cast<std::uint32_t>(i) + static_cast<std::uint32_t>(__builtin_ctz(found));
  }
}

#if defined(__AVX512F__)
// Extracts the outliers of blocks of 32, by whole vectors and without branches. Returns false, with nothing done, if a
// block has Inf or NaN.
inline bool extract_finite_outliers(const float* x, std::size_t blocks, const Ranges& ranges, float* rest,
                                    GranuleOutliers& outliers) {
  bool finite = true;
  std::int32_t bits[2][kMostBlocks];
  for (std::size_t b = 0; b < blocks; ++b) {
    finite &= ranges.least[b] > kLowestOrder && ranges.most[b] < kHighestOrder;
    bits[0][b] = bits_of_order(ranges.least[b]);
    bits[1][b] = bits_of_order(ranges.most[b]);
  }
  if (!finite) return false;
  for (std::size_t b = 0; b < blocks; ++b, x += 32, rest += 32) {
    const __m512i low = _mm512_loadu_si512(x), high = _mm512_loadu_si512(x + 16);
    const auto places_of = [&](std::int32_t wanted) __attribute__((always_inline)) {
      const __m512i same = _mm512_set1_epi32(wanted);
      return _cvtmask32_u32(_mm512_kunpackw(_mm512_cmpeq_epi32_mask(high, same), _mm512_cmpeq_epi32_mask(low, same)));
    };
    const std::uint32_t least = places_of(bits[0][b]), most = places_of(bits[1][b]);
    const std::uint32_t both = _blsi_u32(least) | _blsi_u32(most);  // the first place of each
    const __m512i fill = _mm512_set1_epi32(static_cast<std::int32_t>(bits_of(x[_tzcnt_u32(~both)])));
    _mm512_storeu_si512(rest, _mm512_mask_mov_epi32(low, static_cast<__mmask16>(both), fill));
    _mm512_storeu_si512(rest + 16, _mm512_mask_mov_epi32(high, static_cast<__mmask16>(both >> 16), fill));
    outliers.positions[2 * b] = _tzcnt_u32(least);
    outliers.positions[2 * b + 1] = _tzcnt_u32(most);
    outliers.values[2 * b] = float_of(static_cast<std::uint32_t>(bits[0][b]));
    outliers.values[2 * b + 1] = float_of(static_cast<std::uint32_t>(bits[1][b]));
  }
  return true;
}
#endif

// Extracts the outliers of whole blocks; `rest` gets the blocks with the outliers filled.
template <std::size_t Block>
inline void extract_block_outliers(const float* x, std::size_t blocks, std::size_t length, float* rest,
                                   GranuleOutliers& outliers) {
  const std::size_t block = Block ? Block : length;
  Ranges ranges;
  measure_orders<Block>(x, blocks, block, ranges);
#if defined(__AVX512F__)
  if (Block == 32 && extract_finite_outliers(x, blocks, ranges, rest, outliers)) return;
#endif
  for (std::size_t b = 0; b < blocks; ++b, x += block, rest += block) {
    const std::int32_t least = ranges.least[b], most = ranges.most[b];
    float* values = outliers.values + 2 * b;
    OutlierPositions at = {0, 0};
    if (least <= kLowestOrder || most >= kHighestOrder) {
      values[0] = values[1] = float_of(kNaN32);
      __builtin_memcpy(rest, x, block * sizeof(float));
    } else {
      const std::int32_t low = bits_of_order(least), high = bits_of_order(most);
      at = {first_equal(x, block, low), first_equal(x, block, high)};
      values[0] = float_of(static_cast<std::uint32_t>(low));
      values[1] = float_of(static_cast<std::uint32_t>(high));
      __builtin_memcpy(rest, x, block * sizeof(float));
      rest[at.low] = rest[at.high] = x[filler_position(at)];
    }
    outliers.positions[2 * b] = at.low;
    outliers.positions[2 * b + 1] = at.high;
  }
}
#endif

// Extracts the outliers of a granule; `rest` gets the elements to encode.
inline void extract_granule_outliers(const CodecParams& params, const float* x, std::size_t n, float* rest,
                                     GranuleOutliers& outliers) {
  const std::size_t block = params.layout.block, blocks = params.layout.blocks(n);
  std::size_t b = 0;
#if defined(__AVX2__)
  b = n / block;
  const auto extract = block == 32 ? extract_block_outliers<32> : extract_block_outliers<0>;
  extract(x, b, block, rest, outliers);
#endif
  __builtin_memcpy(rest + b * block, x + b * block, (n - b * block) * sizeof(float));
  for (; b < blocks; ++b) {
    const std::size_t length = smaller(block, n - b * block);
    const Outliers extracted = extract_outliers(rest + b * block, static_cast<std::uint32_t>(length));
    outliers.values[2 * b] = extracted.low;
    outliers.values[2 * b + 1] = extracted.high;
    outliers.positions[2 * b] = extracted.at.low;
    outliers.positions[2 * b + 1] = extracted.at.high;
  }
}

// Writes the outlier section of a granule of n elements. The values become what they decode to.
inline void store_outliers(const CodecParams& params, GranuleOutliers& outliers, std::size_t n, const EncodeArgs& args,
                           std::uint8_t* to) {
  const std::size_t block = params.layout.block, count = 2 * params.layout.blocks(n);
  float random[kMaxOutliers] = {};
  if (params.codec.stochastic && params.codec.scale != Scale::fp32) {
    const auto low = static_cast<std::uint32_t>(args.index);
    if (args.index >> 32 == (args.index + n) >> 32) {
      const Stream stream = make_stream(args.key, args.index);
      for (std::size_t i = 0; i < count; ++i) {
        random[i] = uniform(stream, low + static_cast<std::uint32_t>(i / 2 * block) + outliers.positions[i]);
      }
    } else {
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t index = args.index + i / 2 * block + outliers.positions[i];
        random[i] = uniform(make_stream(args.key, index), static_cast<std::uint32_t>(index));
      }
    }
  }
  std::uint8_t* values = to + params.layout.outliers_at(n);
  std::uint8_t* positions = to + outlier_positions_at(params.layout, n);
  const Codec codec = params.codec;
  for (std::size_t i = 0; i < count; ++i) outliers.values[i] = round_outlier(codec, outliers.values[i], random[i]);
  if (codec.scale == Scale::fp32) {
    __builtin_memcpy(values, outliers.values, count * sizeof(float));
  } else {
    auto* out = unaligned<std::uint16_t>(values);
    DTCOMM_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
      out[i].value = static_cast<std::uint16_t>(bits_of(outliers.values[i]) >> 16);
    }
  }
  if (outlier_position_bytes(params.layout) == 1) {
    DTCOMM_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) positions[i] = static_cast<std::uint8_t>(outliers.positions[i]);
  } else {
    auto* out = unaligned<std::uint16_t>(positions);
    DTCOMM_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) out[i].value = static_cast<std::uint16_t>(outliers.positions[i]);
  }
}

// Calls put(value, i) for the outliers of a granule of n elements; i is less than n for any payload.
template <class Put>
inline void for_each_outlier(const CodecParams& params, const std::uint8_t* from, std::size_t n, const Put& put) {
  const Layout& layout = params.layout;
  const std::uint8_t* values = from + layout.outliers_at(n);
  const std::uint8_t* positions = from + outlier_positions_at(layout, n);
  const std::size_t count = 2 * layout.blocks(n), block = layout.block;
  alignas(kLine) float decoded[kMaxOutliers];
  load_fields(params.codec.scale, values, count, decoded);
  for (std::size_t i = 0; i < count; ++i) decoded[i] = canonical(decoded[i]);
  const auto each = [&](const auto* at) __attribute__((always_inline)) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t position = at[i].value, index = i / 2 * block + position;
      if (position < block && index < n) put(decoded[i], index);
    }
  };
  outlier_position_bytes(layout) == 1 ? each(unaligned<std::uint8_t>(positions))
                                      : each(unaligned<std::uint16_t>(positions));
}

// Writes the granule's outliers over its decoded floats.
inline void restore_outliers(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to) {
  auto* out = unaligned<float>(to);
  for_each_outlier(params, from, n, [=](float value, std::size_t i) { out[i].value = value; });
}

}  // namespace dtcomm::DTCOMM_ISA
