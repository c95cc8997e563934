// Tests of the device kernels of low-rank compression against the CPU's.
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/cuda_emulated/kernel_cases.h"
#include "tests/cuda_emulated/low_rank.h"

namespace dtcomm::cuda_emulated {

namespace {

using Floats = std::vector<float>;

enum class Kind { plain, zero, parallel, first_nan, last_inf, huge, tiny, mixed };
constexpr Kind kKinds[] = {Kind::plain,    Kind::zero, Kind::parallel, Kind::first_nan,
                           Kind::last_inf, Kind::huge, Kind::tiny,     Kind::mixed};

float& at(Floats& vectors, std::size_t n, std::size_t k, std::size_t i) { return vectors[k * n + i]; }

Floats vectors_of(Kind kind, std::size_t count, std::size_t n) {
  std::minstd_rand random(static_cast<unsigned>(count * 1000 + n));
  std::normal_distribution<float> normal;
  Floats vectors(count * n);
  for (float& value : vectors) value = normal(random);
  const auto scale = [&](std::size_t k, float by) {
    for (std::size_t i = 0; i < n; ++i) at(vectors, n, k, i) *= by;
  };
  for (std::size_t k = 0; k < count; ++k) {
    if (kind == Kind::zero) scale(k, 0);
    if (kind == Kind::huge) scale(k, 1e37F);
    if (kind == Kind::tiny) scale(k, k % 2 ? 1e-38F : 1e-42F);
    if (kind == Kind::parallel && k % 3) {
      for (std::size_t i = 0; i < n; ++i) at(vectors, n, k, i) = at(vectors, n, 0, i) * static_cast<float>(k);
    }
  }
  if (kind == Kind::first_nan) vectors[n / 2] = std::numeric_limits<float>::quiet_NaN();
  if (kind == Kind::last_inf) vectors.back() = -std::numeric_limits<float>::infinity();
  if (kind == Kind::mixed) {  // zero, equal to another, not a number, in between
    scale(count / 2, 0);
    for (std::size_t i = 0; i < n; ++i) at(vectors, n, count - 1, i) = at(vectors, n, 0, i);
    if (count > 2) at(vectors, n, count - 2, n - 1) = std::numeric_limits<float>::infinity();
  }
  return vectors;
}

bool same(const Floats& a, const Floats& b) { return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

// All kinds of one size in one launch.
bool orthonormalizes(const LowRank& cpu, std::size_t count, std::size_t n) {
  std::vector<Floats> emulated, expected;
  for (const Kind kind : kKinds) emulated.push_back(vectors_of(kind, count, n));
  expected = emulated;
  std::vector<cuda::Vectors> calls;
  for (Floats& vectors : emulated) calls.push_back({vectors.data(), count, n, 0x9876543210ULL + calls.size()});
  orthonormalize_emulated(calls.data(), calls.size());
  for (std::size_t i = 0; i < emulated.size(); ++i) {
    cpu.orthonormalize(expected[i].data(), count, n, calls[i].key);
    if (same(emulated[i], expected[i])) continue;
    std::printf("FAILED: orthonormalize of %zu x %zu, kind %zu\n", count, n, i);
    return false;
  }
  return true;
}

// One matrix, with a residual if `feeds`; `finite` is the flag of its factors.
bool expands(const LowRank& cpu, DType dtype, std::size_t rows, std::size_t columns, std::size_t rank, bool feeds,
             bool finite) {
  std::minstd_rand random(static_cast<unsigned>(rows * columns + rank));
  std::normal_distribution<float> normal;
  const auto drawn = [&](std::size_t n) {
    Floats values(n);
    for (float& value : values) value = normal(random);
    return values;
  };
  const Floats left = drawn(rank * rows), right = drawn(rank * columns);
  Floats residual = drawn(rows * columns), expected_residual = residual;
  const Floats before = residual;
  std::vector<std::uint8_t> gradient(rows * columns * size_of(dtype)), expected;
  fill(dtype, 0, rows * columns, gradient.data());
  expected = gradient;
  const std::uint8_t finite_flag = finite;
  cuda::Expansion call = {};
  call.gradient = gradient.data();
  call.residual = feeds ? residual.data() : nullptr;
  call.left = left.data();
  call.right = right.data();
  call.finite = &finite_flag;
  call.rows = rows;
  call.columns = columns;
  call.rank = static_cast<std::uint32_t>(rank);
  call.dtype = dtype;
  expand_emulated(call);
  if (!finite) {
    for (std::size_t i = 0; i < rows * columns; ++i) {
      float value = 0;
      std::uint16_t half = 0;
      std::memcpy(dtype == DType::f32 ? static_cast<void*>(&value) : &half, &gradient[i * size_of(dtype)],
                  size_of(dtype));
      if (dtype == DType::f16) value = float_from_fp16(half);
      if (dtype == DType::bf16) value = float_from_bf16(half);
      if (value == value) return false;
    }
    return same(residual, before);
  }
  const Matrix matrix = {expected.data(), feeds ? expected_residual.data() : nullptr, dtype, rows, columns, rank};
  cpu.expand(matrix, left.data(), right.data(), expected.data(), feeds ? expected_residual.data() : nullptr);
  return gradient == expected && same(residual, expected_residual);
}

// Factors with an element that is not finite at several places, or none, all in one launch.
bool checks_finite() {
  constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()};
  std::vector<Floats> left_factors, right_factors;
  std::vector<std::uint8_t> finite, expected;
  for (const std::size_t n : {1, 33, 700, 2000}) {
    for (const std::size_t where : {std::size_t{0}, n - 1, 3 * n, 4 * n - 1, 4 * n}) {  // of one, the other, none
      Floats left(n, 1), right(3 * n, 3e38F);
      if (where < 4 * n) (where < n ? left[where] : right[where - n]) = kBad[where % 2];
      left_factors.push_back(left);
      right_factors.push_back(right);
      expected.push_back(where == 4 * n);
    }
  }
  finite.assign(expected.size(), 9);
  std::vector<cuda::Factors> calls;
  const std::vector<Floats> initial_left = left_factors, initial_right = right_factors;
  for (std::size_t i = 0; i < left_factors.size(); ++i) {
    calls.push_back(
        {left_factors[i].data(), right_factors[i].data(), left_factors[i].size(), right_factors[i].size(), &finite[i]});
  }
  check_finite_emulated(calls.data(), calls.size());
  for (std::size_t i = 0; i < left_factors.size(); ++i) {
    const Floats zero_left(left_factors[i].size()), zero_right(right_factors[i].size());
    if (!same(left_factors[i], expected[i] ? initial_left[i] : zero_left)) return false;
    if (!same(right_factors[i], expected[i] ? initial_right[i] : zero_right)) return false;
  }
  return finite == expected;
}

}  // namespace

bool low_rank_tests() {
  const LowRank& cpu = find_kernels("generic")->low_rank;
  int calls = 1;
  if (!checks_finite()) {
    std::printf("FAILED: check_finite: a flag or the factors differ\n");
    return false;
  }
  for (const std::size_t count : {1, 2, 3, 4, 8, 32}) {
    // Less than the sums side by side, a piece of products and one more, several pieces.
    for (const std::size_t n : {1, 2, 15, 17, 100, 3840, 3841, 11600}) {
      // Of many vectors no more than are needed: every direction that is missing is drawn four times.
      if (count > 4 && n != 17 && n != 100 && n != 3841) continue;
      if (count > 8 && n == 17) continue;
      if (!orthonormalizes(cpu, count, n)) return false;
      ++calls;
    }
  }
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::size_t rank : {1, 2, 4, 8, 32}) {
      for (const auto& [rows, columns] : {std::pair<std::size_t, std::size_t>{1, 1}, {3, 5}, {8, 16}, {33, 17}}) {
        for (const int options : {0, 1, 2, 3}) {
          ++calls;
          if (expands(cpu, dtype, rows, columns, rank, options & 1, !(options & 2))) continue;
          std::printf("FAILED: expand of %zu x %zu, rank %zu, dtype %d, options %d\n", rows, columns, rank,
                      static_cast<int>(dtype), options);
          return false;
        }
      }
    }
  }
  std::printf("%d calls of low-rank kernels: the same bytes\n", calls);
  return true;
}

}  // namespace dtcomm::cuda_emulated
