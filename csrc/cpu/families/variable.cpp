// intv: integer codes whose width follows from the scale of their block.
#include "codec/variable.h"

#include "cpu/source/bit_planes.h"
#include "cpu/source/blocks.h"
#include "cpu/source/cast.h"
#include "cpu/source/codec_family.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

constexpr std::size_t kMostVariableBlocks = kVariableGranule / kSmallestBlock;
static_assert(most_blocks(Family::variable) == kMostVariableBlocks, "the smallest blocks are the most");
#if !defined(DTCOMM_VECTORS)
constexpr std::size_t kStep = kGroup;
#endif
constexpr std::size_t kCodesRoom = kLargestBlock;  // a step at least

// Where the parts of a granule lie.
struct VariableCut {
  std::size_t block, blocks, bytes;
  std::uint32_t budget;
  WidthRule rule;

  VariableCut(const Layout& layout, std::size_t n)
      : block(layout.block),
        blocks(layout.blocks(n)),
        bytes(layout.bytes(n)),
        budget(width_budget(bytes, blocks, block)),
        rule(layout.block_shift) {}
};

// The largest magnitudes of blocks, and their largest elements as signed integers.
struct Tops {
  std::int32_t top[kMostVariableBlocks], most[kMostVariableBlocks];
};

inline void measure_block(const float* x, std::size_t n, std::int32_t& top, std::int32_t& most) {
  const auto* in = unaligned<std::int32_t>(x);
  std::int32_t size = 0, highest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t bits = in[i].value, magnitude = bits & 0x7fffffff;
    size = magnitude > size ? magnitude : size;
    highest = bits > highest ? bits : highest;
  }
  top = size;
  most = highest;
}

// The sum of the widths at a level; `keys` are 0 for blocks without codes.
inline std::uint32_t widths_at(const std::uint32_t* keys, std::size_t blocks, unsigned octave_shift,
                               std::uint32_t level) {
  std::uint32_t sum = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::int32_t above = static_cast<std::int32_t>(keys[b]) - static_cast<std::int32_t>(level);
    const std::int32_t bits = (above > 0 ? above : 0) >> octave_shift;
    sum += static_cast<std::uint32_t>(bits > static_cast<std::int32_t>(kWidestCode) ? kWidestCode : bits);
  }
  return sum;
}

// The least level at which the widths do not exceed the budget.
inline std::uint32_t find_level(const VariableCut& cut, const std::uint8_t* bytes) {
  std::uint32_t keys[kMostVariableBlocks];
  for (std::size_t b = 0; b < cut.blocks; ++b) {
    const std::uint32_t field = bytes[b] & (kFlipped - 1);
    keys[b] = field == kZeroField || field == kNaNField ? 0 : cut.rule.key(field, static_cast<std::uint32_t>(b));
  }
  std::uint32_t low = 0, high = (1U << kLevelBits) - 1;
  while (low < high) {
    const std::uint32_t middle = (low + high) / 2;
    if (widths_at(keys, cut.blocks, kScaleMantissa + cut.rule.shift, middle) <= cut.budget) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Stores the codes of a block, bytes of which the lower `bits` bits count; `codes` has a whole step.
inline void store_codes(const std::uint8_t* codes, unsigned bits, std::size_t block, std::uint8_t* planes) {
#if defined(DTCOMM_VECTORS)
  Step step;
  if (block >= kStep) {
    for (std::size_t i = 0; i < block; i += kStep) {
      __builtin_memcpy(&step, codes + i, sizeof step);
      store_planes(step, bits, block, i, planes);
    }
    return;
  }
  // Planes are written in the order of their addresses, so that each replaces what the last one wrote beyond its end.
  std::uint8_t room[2 * kStep];
  __builtin_memcpy(&step, codes, sizeof step);
  store_planes(step, bits, block, 0, room);
  __builtin_memcpy(planes, room, block * bits / 8);
#else
  for (std::size_t i = 0; i < block; i += kGroup) {
    store_group(load_bytes<kGroup>(codes + i), bits, block, i / kGroup, planes);
  }
#endif
}

inline void load_codes(const std::uint8_t* planes, unsigned bits, std::size_t block, std::uint8_t* codes) {
#if defined(DTCOMM_VECTORS)
  Step step;
  if (block >= kStep) {
    for (std::size_t i = 0; i < block; i += kStep) {
      step = extend_sign(load_planes(planes, bits, block, i), bits);
      __builtin_memcpy(codes + i, &step, sizeof step);
    }
    return;
  }
  std::uint8_t room[2 * kStep] = {};
  __builtin_memcpy(room, planes, block * bits / 8);
  step = extend_sign(load_planes(room, bits, block, 0), bits);
  __builtin_memcpy(codes, &step, sizeof step);
#else
  for (std::size_t i = 0; i < block; i += kGroup) {
    store_bytes<kGroup>(load_group(planes, bits, block, i / kGroup), codes + i);
  }
  for (std::size_t i = 0; i < block; ++i) {
    codes[i] = static_cast<std::uint8_t>(signed_code(codes[i], bits));
  }
#endif
}

void encode(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs&, std::uint8_t* to) {
  const VariableCut cut(params.layout, n);
  Tops tops;
  for (std::size_t b = 0, at = 0; b < cut.blocks; ++b, at += cut.block) {
    measure_block(x + at, smaller(cut.block, n - at), tops.top[b], tops.most[b]);
  }
  std::uint32_t largest = 0;
  for (std::size_t b = 0; b < cut.blocks; ++b) {
    const std::uint32_t scale = variable_scale(static_cast<std::uint32_t>(tops.top[b]));
    largest = scale > largest ? scale : largest;
  }
  const std::uint32_t base = variable_base(largest);
  for (std::size_t b = 0; b < cut.blocks; ++b) {
    to[b] = static_cast<std::uint8_t>(variable_byte(static_cast<std::uint32_t>(tops.top[b]), tops.most[b], base));
  }
  const std::uint32_t level = find_level(cut, to);
  std::uint8_t* planes = to + cut.blocks;
  std::uint8_t codes[kCodesRoom];
  for (std::size_t b = 0; b < cut.blocks; ++b) {
    const std::uint32_t width = cut.rule.width(to[b], static_cast<std::uint32_t>(b), level);
    if (width == 0) continue;
    const float inverse = 1.0f / variable_step(to[b], base, width), lowest = lowest_code(width);
    const std::size_t at = b * cut.block, count = smaller(cut.block, n - at);
    const auto* in = unaligned<float>(x + at);
    for (std::size_t i = 0; i < count; ++i) {
      codes[i] = static_cast<std::uint8_t>(nearest_code(in[i].value * inverse, lowest, -1.0f - lowest));
    }
    for (std::size_t i = count; i < cut.block || i < kStep; ++i) codes[i] = 0;
    store_codes(codes, width, cut.block, planes);
    planes += cut.block * width / 8;
  }
  std::uint8_t* const word_at = to + cut.bytes - kWordBytes;
  __builtin_memset(planes, 0, static_cast<std::size_t>(word_at - planes));
  store_bytes<kWordBytes>(base << kLevelBits | level, word_at);
}

// Calls run(b, step, width, planes) for the blocks of a granule.
template <class Run>
inline void each_block(const VariableCut& cut, const std::uint8_t* from, const Run& run) {
  const auto word = static_cast<std::uint32_t>(load_bytes<kWordBytes>(from + cut.bytes - kWordBytes));
  const std::uint32_t level = word & ((1U << kLevelBits) - 1), base = word >> kLevelBits;
  const std::uint8_t* planes = from + cut.blocks;
  for (std::size_t b = 0, sum = 0; b < cut.blocks; ++b) {
    std::uint32_t width = cut.rule.width(from[b], static_cast<std::uint32_t>(b), level);
    sum += width;
    if (sum > cut.budget) width = 0;  // no encoder exceeds the budget
    run(b, variable_step(from[b], base, width), width, planes);
    planes += cut.block * width / 8;
  }
}

void decode(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to, bool) {
  const VariableCut cut(params.layout, n);
  std::uint8_t codes[kCodesRoom];
  each_block(cut, from, [&](std::size_t b, float step, std::uint32_t width, const std::uint8_t* planes) {
    const std::size_t at = b * cut.block, count = smaller(cut.block, n - at);
    auto* out = unaligned<float>(to + at);
    if (width == 0 || !finite(step)) {
      for (std::size_t i = 0; i < count; ++i) out[i].value = step;
      return;
    }
    load_codes(planes, width, cut.block, codes);
    DTCOMM_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
      out[i].value = variable_value(static_cast<std::int8_t>(codes[i]), step);
    }
  });
}

void add(const CodecParams& params, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  alignas(kLine) float term[kVariableGranule];
  decode(params, from, n, term, false);
  join(ReduceOp::sum, to, sum, term, n);
}

}  // namespace

const FamilyKernels kVariableFamily{encode, decode, add};

}  // namespace dtcomm::DTCOMM_ISA
