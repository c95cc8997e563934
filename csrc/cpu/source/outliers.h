// The outliers (codec/outliers.h) of a granule: taken out before its blocks are encoded, put back after decoding.
#pragma once

#include "codec/outliers.h"
#include "cpu/source/blocks.h"
#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"

namespace dtcomm::DTCOMM_ISA {

constexpr std::size_t kMaxOutliers = 2 * kGranule / kSmallestBlock;

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

// Extracts the outliers of whole blocks.
template <std::size_t Block>
inline void extract_block_outliers(float* x, std::size_t blocks, std::size_t length, GranuleOutliers& outliers) {
  const std::size_t block = Block ? Block : length;
  Ranges ranges;
  measure_orders<Block>(x, blocks, block, ranges);
  for (std::size_t b = 0; b < blocks; ++b, x += block) {
    const std::int32_t least = ranges.least[b], most = ranges.most[b];
    float* values = outliers.values + 2 * b;
    OutlierPositions at = {0, 0};
    if (least <= kLowestOrder || most >= kHighestOrder) {
      values[0] = values[1] = float_of(kNaN32);
    } else {
      const std::int32_t low = bits_of_order(least), high = bits_of_order(most);
      at = {first_equal(x, block, low), first_equal(x, block, high)};
      values[0] = float_of(static_cast<std::uint32_t>(low));
      values[1] = float_of(static_cast<std::uint32_t>(high));
      x[at.low] = x[at.high] = x[filler_position(at)];
    }
    outliers.positions[2 * b] = at.low;
    outliers.positions[2 * b + 1] = at.high;
  }
}
#endif

// Writes the outlier section of a granule whose elements are x[0, n), which become the elements to encode.
inline void encode_outliers(const CodecParams& params, float* x, std::size_t n, const EncodeArgs& args,
                            std::uint8_t* to) {
  const std::size_t block = params.layout.block, blocks = params.layout.blocks(n);
  GranuleOutliers outliers;
  std::size_t b = 0;
#if defined(__AVX2__)
  b = n / block;
  block == 32 ? extract_block_outliers<32>(x, b, block, outliers) : extract_block_outliers<0>(x, b, block, outliers);
#endif
  for (; b < blocks; ++b) {
    const std::size_t length = smaller(block, n - b * block);
    const Outliers extracted = extract_outliers(x + b * block, static_cast<std::uint32_t>(length));
    outliers.values[2 * b] = extracted.low;
    outliers.values[2 * b + 1] = extracted.high;
    outliers.positions[2 * b] = extracted.at.low;
    outliers.positions[2 * b + 1] = extracted.at.high;
  }
  const bool random = params.codec.stochastic && params.codec.scale != Scale::fp32;
  for (std::size_t i = 0; random && i < 2 * blocks; ++i) {
    const std::uint64_t index = args.index + i / 2 * block + outliers.positions[i];
    const float u = uniform(make_stream(args.key, index), static_cast<std::uint32_t>(index));
    outliers.values[i] = round_outlier(params.codec, outliers.values[i], u);
  }
  std::uint8_t* values = to + params.layout.outliers_at(n);
  std::uint8_t* positions = to + outlier_positions_at(params.layout, n);
  if (params.codec.scale == Scale::fp32) {
    __builtin_memcpy(values, outliers.values, 2 * blocks * sizeof(float));
  } else {
    for (std::size_t i = 0; i < 2 * blocks; ++i) {
      const float value = random ? outliers.values[i] : round_outlier(params.codec, outliers.values[i], 0.0f);
      unaligned<std::uint16_t>(values)[i].value = static_cast<std::uint16_t>(bits_of(value) >> 16);
    }
  }
  for (std::size_t i = 0; i < 2 * blocks; ++i) {
    if (outlier_position_bytes(params.layout) == 1) {
      positions[i] = static_cast<std::uint8_t>(outliers.positions[i]);
    } else {
      unaligned<std::uint16_t>(positions)[i].value = static_cast<std::uint16_t>(outliers.positions[i]);
    }
  }
}

// Calls put(value, i) for the outliers of a granule of n elements; i is less than n for any payload.
template <class Put>
inline void for_each_outlier(const CodecParams& params, const std::uint8_t* from, std::size_t n, const Put& put) {
  const Layout& layout = params.layout;
  const std::uint8_t* values = from + layout.outliers_at(n);
  const std::uint8_t* positions = from + outlier_positions_at(layout, n);
  const bool bytes = outlier_position_bytes(layout) == 1, narrow = params.codec.scale == Scale::bf16;
  for (std::size_t i = 0; i < 2 * layout.blocks(n); ++i) {
    const std::size_t position = bytes ? positions[i] : unaligned<std::uint16_t>(positions)[i].value;
    const std::size_t at = i / 2 * layout.block + position;
    const float value =
        narrow ? float_from_bf16(unaligned<std::uint16_t>(values)[i].value) : unaligned<float>(values)[i].value;
    if (position < layout.block && at < n) put(canonical(value), at);
  }
}

// Writes the granule's outliers over its decoded floats.
inline void restore_outliers(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to) {
  auto* out = unaligned<float>(to);
  for_each_outlier(params, from, n, [=](float value, std::size_t i) { out[i].value = value; });
}

// A sum's values at the positions of the granule's outliers, saved while the decoded floats are added to the sum.
struct OutlierSums {
  float sums[kMaxOutliers];

  OutlierSums(const CodecParams& params, const std::uint8_t* from, std::size_t n, const float* sum) {
    std::size_t count = 0;
    for_each_outlier(params, from, n, [&](float, std::size_t i) { sums[count++] = unaligned<float>(sum)[i].value; });
  }

  void add(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to) const {
    std::size_t count = 0;
    for_each_outlier(params, from, n, [&](float value, std::size_t i) {
      unaligned<float>(to)[i].value = canonical(sums[count++] + value);
    });
  }
};

}  // namespace dtcomm::DTCOMM_ISA
