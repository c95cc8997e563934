// intv: integer codes whose width follows from the scale of their block. Blocks of all widths take the same
// instructions, as branches on widths are mispredicted: each block is packed to planes of 8, 4, 2 and 1 bits, and a
// plane that its codes lack is overwritten by the next one.
#include "codec/variable.h"

#include "cpu/source/bit_planes.h"
#include "cpu/source/decoding_family.h"
#include "cpu/source/integer_encode.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

constexpr std::size_t kMostVariableBlocks = Ranges::kMost;
#if !defined(DTCOMM_VECTORS)
constexpr std::size_t kStep = kGroup;
#endif
constexpr std::size_t kBlocksBehind = (kStep + kSmallestBlock - 1) / kSmallestBlock;  // that the last step may reach
// Packing and unpacking a block of so many elements, at least a row, reach so many bytes: planes of 8, 4, 2 and 1 bits.
constexpr std::size_t reach_of(std::size_t block) { return (block > kStep ? block : kStep) * 15 / 8; }

// Where the parts of a granule lie.
struct VariableCut {
  std::size_t block, blocks, bytes;
  unsigned shift;
  std::uint32_t budget;
  WidthRule rule;

  VariableCut(const Layout& layout, std::size_t n)
      : block(layout.block),
        blocks(layout.blocks(n)),
        bytes(layout.bytes(n)),
        shift(layout.block_shift),
        budget(width_budget(bytes, blocks, block)),
        rule(layout.block_shift) {}
};

#if defined(DTCOMM_VECTORS)
// What the codes of a width need, as bytes four times: their limits and the masks of their planes.
struct WidthBytes {
  std::uint32_t lowest, highest, masks[4];
};

constexpr WidthBytes width_bytes(unsigned width) {
  const unsigned half = width ? 1u << (width - 1) : 0;
  WidthBytes bytes{byte_four_times(256 - half), byte_four_times(width ? half - 1 : 0), {}};
  for (unsigned i = 0; i < 4; ++i) bytes.masks[i] = plane_mask(width, 8 >> i);
  return bytes;
}

constexpr WidthBytes kWidthBytes[kWidestCode + 1] = {width_bytes(0), width_bytes(1), width_bytes(2),
                                                     width_bytes(3), width_bytes(4), width_bytes(5),
                                                     width_bytes(6), width_bytes(7), width_bytes(8)};
#endif

// The sum of the widths at a level; `keys` are 0 for blocks without codes.
inline std::uint32_t widths_at(const std::uint16_t* keys, std::size_t blocks, unsigned octave_shift,
                               std::uint16_t level) {
  std::uint16_t sum = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::uint16_t key = keys[b] > level ? keys[b] : level;
    const auto bits = static_cast<std::uint16_t>(static_cast<std::uint16_t>(key - level) >> octave_shift);
    sum = static_cast<std::uint16_t>(sum + (bits > kWidestCode ? kWidestCode : bits));
  }
  return sum;
}

// The least level at which the widths do not exceed the budget.
inline std::uint32_t find_level(const VariableCut& cut, const std::uint8_t* bytes) {
  std::uint16_t keys[kMostVariableBlocks];
  for (std::size_t b = 0; b < cut.blocks; ++b) {
    const std::uint32_t field = bytes[b] & (kFlipped - 1), key = cut.rule.key(field, static_cast<std::uint32_t>(b));
    keys[b] = static_cast<std::uint16_t>(field == kZeroField || field == kNaNField ? 0 : key);
  }
  std::uint32_t low = 0, high = (1U << kLevelBits) - 1;
  while (low < high) {
    const std::uint32_t middle = (low + high) / 2;
    const unsigned octave = kScaleMantissa + cut.rule.shift;
    if (widths_at(keys, cut.blocks, octave, static_cast<std::uint16_t>(middle)) <= cut.budget) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Codes of all elements, missing ones of the last block included; `inverse` has zeros behind the last block. Vectors
// leave codes that are not clamped: pack_block() does that, with fewer instructions.
inline void make_codes(const VariableCut& cut, const float* x, std::size_t n, const float* inverse,
                       [[maybe_unused]] const std::uint8_t* widths, std::uint8_t* codes) {
  std::size_t i = 0;
#if defined(DTCOMM_VECTORS)
  float last[kStep] = {};
  for (; i < n; i += kStep) {
    const float* from = x + i;
    if (i + kStep > n) {
      __builtin_memcpy(last, from, (n - i) * sizeof(float));
      from = last;
    }
    const Step step = packed_step<true>([&](std::size_t p) __attribute__((always_inline)) {
      return to_nearest(load(from + p * kLanes) * inverse[(i + p * kLanes) >> cut.shift]);
    });
    __builtin_memcpy(codes + i, &step, sizeof step);
  }
#else
  const auto* in = unaligned<float>(x);
  for (std::size_t b = 0; b < cut.blocks; ++b) {
    const float lowest = lowest_code(widths[b]);
    for (const std::size_t end = smaller(i + cut.block, n); i < end; ++i) {
      codes[i] = static_cast<std::uint8_t>(nearest_code(in[i].value * inverse[b], lowest, -1.0f - lowest));
    }
  }
#endif
  const std::size_t count = cut.blocks << cut.shift;
  if (i < count) __builtin_memset(codes + i, 0, count - i);
}

#if defined(DTCOMM_VECTORS)
// Writes the plane of `Unit` bits and returns where the next one begins.
template <unsigned Unit, class Load>
inline __attribute__((always_inline)) std::uint8_t* pack_plane(const Load& row, std::size_t block, unsigned bits,
                                                               std::uint8_t* to) {
  for (std::size_t i = 0; i < block; i += kRowCodes) pack_row<Unit>(row(i), plane_low(bits, Unit), to + i * Unit / 8);
  return to + (bits & Unit) * (block / 8);
}
#endif

// Writes width * block / 8 bytes that count, and others behind them.
inline __attribute__((always_inline)) void pack_block(const std::uint8_t* codes, std::size_t block, unsigned width,
                                                      std::uint8_t* to) {
#if defined(DTCOMM_VECTORS)
  const Row lowest = row_of(kWidthBytes[width].lowest), highest = row_of(kWidthBytes[width].highest);
  const auto row = [&](std::size_t i)
                       __attribute__((always_inline)) { return clamped(load_row(codes + i), lowest, highest); };
  to = pack_plane<8>(row, block, width, to);
  to = pack_plane<4>(row, block, width, to);
  to = pack_plane<2>(row, block, width, to);
  pack_plane<1>(row, block, width, to);
#else
  for (std::size_t i = 0; i < block; i += kGroup) {
    store_group(load_bytes<kGroup>(codes + i), width, block, i / kGroup, to);
  }
#endif
}

// The inverse, which may read more.
inline __attribute__((always_inline)) void unpack_block(const std::uint8_t* from, std::size_t block, unsigned width,
                                                        std::uint8_t* codes) {
#if defined(DTCOMM_VECTORS)
  const std::uint32_t* const masks = kWidthBytes[width].masks;
  const std::uint8_t* const two = from + plane_at(width, 2, block);
  const std::uint8_t* const one = from + plane_at(width, 1, block);
  for (std::size_t i = 0; i < block; i += kRowCodes) {
    const Row eights = unpack_row<8>(from + i, 0, row_of(masks[0]));
    const Row fours = unpack_row<4>(from + i / 2, 0, row_of(masks[1]));
    const Row twos = unpack_row<2>(two + i / 4, plane_low(width, 2), row_of(masks[2]));
    const Row ones = unpack_row<1>(one + i / 8, plane_low(width, 1), row_of(masks[3]));
    const Row all = join_rows(join_rows(eights, fours), join_rows(twos, ones));
    store_row(extend_sign(all, row_of(kWidthBytes[width].lowest)), codes + i);
  }
#else
  for (std::size_t i = 0; i < block; i += kGroup) {
    store_bytes<kGroup>(load_group(from, width, block, i / kGroup), codes + i);
  }
  const unsigned sign = width ? 1u << (width - 1) : 0;
  for (std::size_t i = 0; i < block; ++i) codes[i] = static_cast<std::uint8_t>((codes[i] ^ sign) - sign);
#endif
}

// run(block length), which compilers know for the default.
template <class Run>
inline __attribute__((always_inline)) void with_block(std::size_t block, const Run& run) {
  constexpr std::size_t kDefault = 32;
  if (block == kDefault) return run(std::integral_constant<std::size_t, kDefault>{});
  run(block);
}

// The codes of a granule as bytes, and the steps of its blocks: an operand of `transform`.
struct VariableRun {
  const std::uint8_t* codes;
  const float* steps;
  unsigned shift;

  template <class Number>
  Number times_step(Number code, std::size_t i) const {
    return code * steps[i >> shift] + 0.0f;  // as variable_value()
  }
  float at(float, std::size_t i) const { return times_step(Codes<std::int8_t>::one(codes, i), i); }
#if defined(DTCOMM_VECTORS)
  Floats at(Floats, std::size_t i) const { return times_step(many<Codes<std::int8_t>>(codes, i), i); }
#endif
};

struct VariableKernels : DecodingFamily<VariableKernels> {
  static void encode(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                     std::uint8_t* to) {
    const VariableCut cut(params.layout, n);
    Ranges ranges;
    measure_orders(x, n, cut.block, ranges);
    std::uint32_t largest = 0;
    for (std::size_t b = 0; b < cut.blocks; ++b) {
      const std::int32_t below = ~ranges.least[b], above = ranges.most[b];  // magnitudes, unless negative
      ranges.least[b] = above > below ? above : below;
      const std::uint32_t scale = variable_scale(static_cast<std::uint32_t>(ranges.least[b]));
      largest = scale > largest ? scale : largest;
    }
    const std::uint32_t base = variable_base(largest);
    for (std::size_t b = 0; b < cut.blocks; ++b) {
      const auto top = static_cast<std::uint32_t>(ranges.least[b]);
      to[b] = static_cast<std::uint8_t>(variable_byte(top, ranges.most[b], base));
    }
    const std::uint32_t level = find_level(cut, to);

    std::uint8_t widths[kMostVariableBlocks];
    float inverse[kMostVariableBlocks + kBlocksBehind];
    for (std::size_t b = 0; b < cut.blocks; ++b) {
      widths[b] = static_cast<std::uint8_t>(cut.rule.width(to[b], static_cast<std::uint32_t>(b), level));
    }
    for (std::size_t b = 0; b < cut.blocks; ++b) {
      const float by = 1.0f / variable_step(to[b], base, widths[b]);
      inverse[b] = float_of(bits_of(by) & (0U - static_cast<std::uint32_t>(widths[b] != 0)));
    }
    for (std::size_t b = cut.blocks; b < cut.blocks + kBlocksBehind; ++b) inverse[b] = 0.0f;

    std::uint8_t codes[kVariableGranule + kStep], room[reach_of(kLargestBlock)];
    make_codes(cut, x, n, inverse, widths, codes);
    std::uint8_t *planes = to + cut.blocks, *const end = to + cut.bytes;
    with_block(cut.block, [&](auto block) __attribute__((always_inline)) {
      for (std::size_t b = 0; b < cut.blocks; ++b) {
        prefetch_next(args, b * 64);  // in the first blocks, whatever their length
        const std::size_t used = widths[b] * (block / 8);
        const bool inside = planes + reach_of(block) <= end;
        pack_block(codes + b * block, block, widths[b], inside ? planes : room);
        if (!inside) __builtin_memcpy(planes, room, used);
        planes += used;
      }
    });
    std::uint8_t* const word_at = end - kWordBytes;
    __builtin_memset(planes, 0, static_cast<std::size_t>(word_at - planes));
    store_bytes<kWordBytes>(base << kLevelBits | level, word_at);
  }

  // A granule's codes, in room of kVariableGranule + kStep bytes, and steps.
  static void unpack(const VariableCut& cut, const std::uint8_t* from, std::uint8_t* codes, float* steps) {
    const auto word = static_cast<std::uint32_t>(load_bytes<kWordBytes>(from + cut.bytes - kWordBytes));
    const std::uint32_t level = word & ((1U << kLevelBits) - 1), base = word >> kLevelBits;
    std::uint8_t widths[kMostVariableBlocks];
    std::uint32_t sum = 0;
    for (std::size_t b = 0; b < cut.blocks; ++b) {
      const std::uint32_t width = cut.rule.width(from[b], static_cast<std::uint32_t>(b), level);
      sum += width;
      widths[b] = static_cast<std::uint8_t>(width);
    }
    if (sum > cut.budget) {  // never written by an encoder: the blocks beyond the budget have no codes
      sum = 0;
      for (std::size_t b = 0; b < cut.blocks; ++b) {
        sum += widths[b];
        if (sum > cut.budget) widths[b] = 0;
      }
    }
    for (std::size_t b = 0; b < cut.blocks; ++b) steps[b] = variable_step(from[b], base, widths[b]);
    std::uint8_t room[reach_of(kLargestBlock)];
    const std::uint8_t *planes = from + cut.blocks, *const end = from + cut.bytes;
    with_block(cut.block, [&](auto block) __attribute__((always_inline)) {
      for (std::size_t b = 0; b < cut.blocks; ++b) {
        const auto left = static_cast<std::size_t>(end - planes);
        if (left < reach_of(block)) __builtin_memcpy(room, planes, left);
        unpack_block(left < reach_of(block) ? room : planes, block, widths[b], codes + b * block);
        planes += widths[b] * (block / 8);
      }
    });
  }

  template <bool Stream, class Finish>
  static inline __attribute__((always_inline)) void decode_with(const CodecParams& params, const std::uint8_t* from,
                                                                std::size_t n, float* to, const Finish& finish) {
    const VariableCut cut(params.layout, n);
    std::uint8_t codes[kVariableGranule + kStep];
    float steps[kMostVariableBlocks];
    unpack(cut, from, codes, steps);
    const VariableRun run{codes, steps, cut.shift};
    transform<Codes<std::int8_t>, Stream>(codes, n, to,
                                          [&](auto code, std::size_t i) { return finish(run.times_step(code, i), i); });
  }

  static bool add_pair(const CodecParams& params, const std::uint8_t* first, const std::uint8_t* second, std::size_t n,
                       float* to, bool stream) {
    const VariableCut cut(params.layout, n);
    std::uint8_t codes[kVariableGranule + kStep];
    float steps[kMostVariableBlocks];
    unpack(cut, second, codes, steps);
    const VariableRun other{codes, steps, cut.shift};
    if (stream && kDirect) {
      decode_with<true>(params, first, n, to, plus(other));
    } else {
      decode_with<false>(params, first, n, to, plus(other));
    }
    return true;
  }
};

}  // namespace

const FamilyKernels kVariableFamily{VariableKernels::encode,
                                    VariableKernels::decode,
                                    VariableKernels::add,
                                    VariableKernels::encode_with_error,
                                    nullptr,
                                    VariableKernels::add_pair};

}  // namespace dtcomm::DTCOMM_ISA
