// Spikes (codec/spikes.h) of a granule: taken out before the blocks are encoded, put back after they are decoded.
#pragma once

#include "codec/spikes.h"
#include "cpu/source/cast.h"
#include "cpu/source/family.h"

namespace dtcomm::DTCOMM_ISA {

constexpr std::size_t kMostSpikes = 2 * kGranule / kSmallestBlock;

// Two of each block, in the order of the section.
struct Spikes {
  float values[kMostSpikes];
  std::uint32_t places[kMostSpikes];
};

#if defined(__AVX2__)
// The smallest and the largest in spike_order of n elements, a multiple of 16.
struct Range {
  std::int32_t least, most;
};

inline __attribute__((always_inline)) Range range_of(__m256i low, __m256i high) {
  // The largest by way of ~x, whose order is the opposite: both are looked for at once.
  const __m256i flipped = _mm256_xor_si256(high, _mm256_set1_epi32(-1));
  const __m256i both =
      _mm256_min_epi32(_mm256_permute2x128_si256(low, flipped, 0x20), _mm256_permute2x128_si256(low, flipped, 0x31));
  const __m256i pairs = _mm256_min_epi32(both, _mm256_shuffle_epi32(both, 0x4e));
  const __m256i one = _mm256_min_epi32(pairs, _mm256_shuffle_epi32(pairs, 0xb1));
  return {_mm256_extract_epi32(one, 0), ~_mm256_extract_epi32(one, 4)};
}

inline Range range_of(const float* x, std::size_t n) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  __m256i low = mask, high = _mm256_set1_epi32(INT32_MIN);
  for (std::size_t i = 0; i < n; i += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    const __m256i order = _mm256_xor_si256(bits, _mm256_and_si256(_mm256_srai_epi32(bits, 31), mask));
    low = _mm256_min_epi32(low, order);
    high = _mm256_max_epi32(high, order);
  }
  return range_of(low, high);
}

// Which of 16 elements have these bits.
inline __attribute__((always_inline)) std::uint32_t equal_bits(const float* x, std::int32_t bits) {
#if defined(__AVX512F__)
  return _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(x), _mm512_set1_epi32(bits));
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

// take_spikes of a whole block.
inline bool take_block(float* x, std::size_t n, SpikePlaces& at, float& low, float& high) {
  const Range range = range_of(x, n);
  if (range.least <= kSpikeLowest || range.most >= kSpikeHighest) {
    at = {0, 0};
    low = high = float_of(kNaN32);
    return false;
  }
  const std::int32_t bits[2] = {range.least ^ ((range.least >> 31) & 0x7fffffff),
                                range.most ^ ((range.most >> 31) & 0x7fffffff)};
  at = {first_equal(x, n, bits[0]), first_equal(x, n, bits[1])};
  low = float_of(static_cast<std::uint32_t>(bits[0]));
  high = float_of(static_cast<std::uint32_t>(bits[1]));
  const float filler = x[spike_filler(at)];
  x[at.low] = x[at.high] = filler;
  return true;
}
#else
inline bool take_block(float* x, std::size_t n, SpikePlaces& at, float& low, float& high) {
  return take_spikes(x, static_cast<std::uint32_t>(n), at, low, high);
}
#endif

// The spikes' section of a granule whose elements are x[0, n); these become the elements that are encoded.
inline void take_spikes(const Plan& plan, float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  const std::size_t block = plan.layout.block, blocks = plan.layout.blocks(n);
  Spikes spikes;
  for (std::size_t b = 0; b < blocks; ++b) {
    float* in = x + b * block;
    const std::size_t length = smaller(block, n - b * block);
    SpikePlaces at;
    float* value = spikes.values + 2 * b;
    if (length == block) {
      take_block(in, block, at, value[0], value[1]);
    } else {
      take_spikes(in, static_cast<std::uint32_t>(length), at, value[0], value[1]);
    }
    spikes.places[2 * b] = at.low;
    spikes.places[2 * b + 1] = at.high;
  }
  const bool random = plan.codec.stochastic && plan.codec.scale != Scale::fp32;
  for (std::size_t i = 0; random && i < 2 * blocks; ++i) {
    const std::uint64_t index = how.index + i / 2 * block + spikes.places[i];
    const float u = uniform(make_stream(how.key, index), static_cast<std::uint32_t>(index));
    spikes.values[i] = spike_value(plan.codec, spikes.values[i], u);
  }
  std::uint8_t* values = to + plan.layout.spikes_at(n);
  std::uint8_t* places = to + spike_places_at(plan.layout, n);
  if (plan.codec.scale == Scale::fp32) {
    __builtin_memcpy(values, spikes.values, 2 * blocks * sizeof(float));
  } else {
    for (std::size_t i = 0; i < 2 * blocks; ++i) {
      const float value = random ? spikes.values[i] : spike_value(plan.codec, spikes.values[i], 0.0f);
      cells<std::uint16_t>(values)[i].value = static_cast<std::uint16_t>(bits_of(value) >> 16);
    }
  }
  for (std::size_t i = 0; i < 2 * blocks; ++i) {
    if (spike_place_bytes(plan.layout) == 1) {
      places[i] = static_cast<std::uint8_t>(spikes.places[i]);
    } else {
      cells<std::uint16_t>(places)[i].value = static_cast<std::uint16_t>(spikes.places[i]);
    }
  }
}

// put(value, i) for the spikes of a granule of n elements; i is less than n whatever the payload says.
template <class Put>
inline void each_spike(const Plan& plan, const std::uint8_t* from, std::size_t n, const Put& put) {
  const Layout& layout = plan.layout;
  const std::uint8_t* values = from + layout.spikes_at(n);
  const std::uint8_t* places = from + spike_places_at(layout, n);
  const bool bytes = spike_place_bytes(layout) == 1, narrow = plan.codec.scale == Scale::bf16;
  for (std::size_t i = 0; i < 2 * layout.blocks(n); ++i) {
    const std::size_t place = bytes ? places[i] : cells<std::uint16_t>(places)[i].value;
    const std::size_t at = i / 2 * layout.block + place;
    const float value = narrow ? float_from_bf16(cells<std::uint16_t>(values)[i].value) : cells<float>(values)[i].value;
    if (place < layout.block && at < n) put(canonical(value), at);
  }
}

// The granule's spikes over its decoded floats.
inline void put_spikes(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to) {
  auto* out = cells<float>(to);
  each_spike(plan, from, n, [=](float value, std::size_t i) { out[i].value = value; });
}

// What a sum is at the granule's spikes, kept while the decoded floats are added to it.
struct SpikeSums {
  float sums[kMostSpikes];

  SpikeSums(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum) {
    std::size_t count = 0;
    each_spike(plan, from, n, [&](float, std::size_t i) { sums[count++] = cells<float>(sum)[i].value; });
  }

  void add(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to) const {
    std::size_t count = 0;
    each_spike(plan, from, n,
               [&](float value, std::size_t i) { cells<float>(to)[i].value = canonical(sums[count++] + value); });
  }
};

}  // namespace dtcomm::DTCOMM_ISA
