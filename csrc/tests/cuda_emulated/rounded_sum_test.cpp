// Tests of the device kernels of correctly rounded sums against the CPU's.
#include "tests/cuda_emulated/rounded_sum.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/vec8.cuh"

namespace dtcomm::cuda_emulated {

namespace {

using Bytes = std::vector<std::uint8_t>;
using Integers = std::vector<std::int32_t>;

enum class Kind { plain, wide, subnormal, cancelling, zeros, any_bits };
constexpr Kind kKinds[] = {Kind::plain, Kind::wide, Kind::subnormal, Kind::cancelling, Kind::zeros, Kind::any_bits};
constexpr std::size_t kParts = 3;

struct SumCase {
  Kind kind;
  DType dtype;
  std::size_t ranks, numel, shift, divisor;  // shift: of tensors, in elements
};

// Memory of a tensor at `shift` elements from an aligned address.
struct Tensor {
  alignas(16) Bytes bytes;
  std::size_t shift;

  Tensor(const SumCase& of, std::size_t numel)
      : bytes((numel + of.shift) * size_of(of.dtype) + 16, 0xa5), shift(of.shift * size_of(of.dtype)) {}
  std::uint8_t* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
    return bytes.data() + (16 - address % 16) % 16 + shift;
  }
};

Tensor contribution(const SumCase& of, std::size_t rank, std::size_t numel) {
  std::minstd_rand random(static_cast<unsigned>(of.numel * 7 + (of.kind == Kind::cancelling ? rank / 2 : rank)));
  std::minstd_rand small(static_cast<unsigned>(rank + 1));
  std::normal_distribution<float> normal;
  Tensor x(of, numel);
  for (std::size_t i = 0; i < numel; ++i) {
    float value = normal(random);
    if (of.kind == Kind::wide) value = std::ldexp(value, static_cast<int>(random() % 250) - 149);
    if (of.kind == Kind::subnormal) value *= 0x1p-140F;
    if (of.kind == Kind::cancelling) value = (rank % 2 ? -value : value) * 0x1p60F + normal(small) * 0x1p20F;
    if (of.kind == Kind::zeros && i % 96 < 64) value = i % 2 ? -0.0F : 0.0F;
    if (of.kind == Kind::any_bits) value = float_of(static_cast<std::uint32_t>(random() << 16 ^ random()));
    cuda::store_element(of.dtype, value, x.data(), i);
  }
  return x;
}

bool is_finite(const SumCase& of, Tensor& x, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    if (!finite(cuda::load_element(of.dtype, x.data(), i))) return false;
  }
  return true;
}

// Returns what differs, or nullptr. `parts` of of.numel elements, of whole blocks if there are several.
const char* differs(const SumCase& of, std::size_t parts) {
  const LocalKernels& cpu = find_kernels("generic")->local;
  const std::size_t numel = of.numel * parts, part_blocks = (of.numel + kRoundedBlock - 1) / kRoundedBlock;
  const std::size_t blocks = part_blocks * parts;
  std::vector<Tensor> inputs;
  Bytes tops(blocks), lows(blocks);
  bool all_finite = true;
  for (std::size_t rank = 0; rank < of.ranks; ++rank) {
    inputs.push_back(contribution(of, rank, numel));
    all_finite &= is_finite(of, inputs[rank], numel);
    for (const bool finite_only : {false, true}) {
      Bytes got_tops(blocks, 1), got_lows(blocks, 1), own_tops(blocks), own_lows(blocks);
      const Contribution from = {inputs[rank].data(), of.dtype, nullptr, numel};
      cpu.measure_digits(from, finite_only, own_tops.data(), own_lows.data());
      measure_emulated({inputs[rank].data(), numel, got_tops.data(), got_lows.data(), of.dtype, finite_only});
      if (got_tops != own_tops) return "tops";
      for (std::size_t b = 0; b < blocks; ++b) {
        // What is not finite has no lowest bit; the range of the others is measured again.
        if (own_tops[b] != kNaNBlock && got_lows[b] != own_lows[b]) return "lows";
        if (!finite_only) continue;
        tops[b] = std::max(tops[b], own_tops[b]);
        lows[b] = std::max(lows[b], own_lows[b]);
      }
    }
  }
  const SumDigits sum = {of.ranks, tops.data(), lows.data()};
  Integers halves(blocks + 1, -1);
  count_emulated({sum, blocks, halves.data()});
  if (halves[blocks] != -1) return "counts";
  const DigitCuts cuts(of.ranks);
  std::vector<std::int64_t> ends(blocks);
  std::vector<std::size_t> offsets;
  constexpr std::int64_t kBefore = 1000;  // half rows of other blocks
  std::size_t integers = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    if (halves[b] != cuts.halves[span_of(tops[b], lows[b])]) return "counts";
    if (b % part_blocks == 0) offsets.push_back(integers += kHalfBlock);
    ends[b] = (b ? ends[b - 1] : kBefore) + halves[b];
    integers += static_cast<std::size_t>(halves[b]) * kHalfBlock;
  }
  Integers total(integers);
  for (Tensor& x : inputs) {
    Integers expected(integers, 77), got(integers + kHalfBlock, 77);
    auto* const aligned = got.data() + (16 - reinterpret_cast<std::uintptr_t>(got.data()) % 16) % 16 / 4;
    cuda::SplitCall call = {sum, ends.data(), x.data(), of.numel, aligned, of.dtype, static_cast<unsigned>(parts), {}};
    for (std::size_t p = 0; p < parts; ++p) {
      call.offsets[p] = offsets[p];
      const SumDigits own = {of.ranks, tops.data() + p * part_blocks, lows.data() + p * part_blocks};
      const std::uint8_t* from = x.data() + p * of.numel * size_of(of.dtype);
      cpu.split_digits(own, {from, of.dtype, nullptr, of.numel}, all_finite, expected.data() + offsets[p]);
    }
    split_emulated(call, integers);
    if (!std::equal(expected.begin(), expected.end(), aligned)) return "digits";
    for (std::size_t i = 0; i < integers; ++i) total[i] += expected[i];
  }
  const std::size_t first = offsets[0], count = parts > 1 ? offsets[1] - kHalfBlock - first : integers - first;
  Integers padded(count + kHalfBlock);
  auto* const digits = padded.data() + (16 - reinterpret_cast<std::uintptr_t>(padded.data()) % 16) % 16 / 4;
  std::copy_n(total.begin() + static_cast<std::ptrdiff_t>(first), count, digits);
  Tensor expected(of, of.numel), got(of, of.numel);
  cpu.round_digits(sum, digits, of.numel, of.divisor, of.dtype, expected.data());
  round_emulated({sum, ends.data(), digits, of.numel, of.divisor, got.data(), of.dtype});
  const std::size_t size = of.numel * size_of(of.dtype) + 4;  // and what lies behind it
  return std::equal(got.data(), got.data() + size, expected.data()) ? nullptr : "sums";
}

}  // namespace

bool rounded_sum_tests() {
  long cases = 0;
  const auto same = [&](const SumCase& of, std::size_t parts) {
    ++cases;
    const char* what = differs(of, parts);
    if (!what) return true;
    std::printf("FAILED: %s of a rounded sum: kind %d, dtype %d, %zu ranks, %zu elements, %zu parts, shift %zu\n", what,
                static_cast<int>(of.kind), static_cast<int>(of.dtype), of.ranks, of.numel, parts, of.shift);
    return false;
  };
  for (const Kind kind : kKinds) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const std::size_t ranks : {1, 2, 3, 8, 64, 1000}) {
        const std::size_t most = ranks > 8 ? 100 : 1500;
        for (const std::size_t numel : {1, 7, 32, 33, 255, 256, 1027}) {
          if (numel > most) continue;
          const std::size_t divisor = numel % 2 ? ranks : 1, shift = numel % 3 == 1 ? 1 : 0;
          if (!same({kind, dtype, ranks, numel, shift, divisor}, 1)) return false;
        }
        if (ranks <= 8 && !same({kind, dtype, ranks, 288, 0, ranks}, kParts)) return false;
      }
    }
  }
  std::printf("%ld rounded sums: the same bytes\n", cases);
  return true;
}

}  // namespace dtcomm::cuda_emulated
