// What low-rank compression's device kernels are tried with.
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

enum class Kind { plain, zero, alike, first_nan, last_inf, huge, tiny, mixed };
constexpr Kind kKinds[] = {Kind::plain,    Kind::zero, Kind::alike, Kind::first_nan,
                           Kind::last_inf, Kind::huge, Kind::tiny,  Kind::mixed};

float& at(Floats& vectors, std::size_t n, std::size_t k, std::size_t i) { return vectors[k * n + i]; }

Floats vectors_of(Kind kind, std::size_t count, std::size_t n) {
  std::minstd_rand random(static_cast<unsigned>(count * 1000 + n));
  std::normal_distribution<float> normal;
  Floats made(count * n);
  for (float& each : made) each = normal(random);
  const auto scale = [&](std::size_t k, float by) {
    for (std::size_t i = 0; i < n; ++i) at(made, n, k, i) *= by;
  };
  for (std::size_t k = 0; k < count; ++k) {
    if (kind == Kind::zero) scale(k, 0);
    if (kind == Kind::huge) scale(k, 1e37F);
    if (kind == Kind::tiny) scale(k, k % 2 ? 1e-38F : 1e-42F);
    if (kind == Kind::alike && k % 3) {
      for (std::size_t i = 0; i < n; ++i) at(made, n, k, i) = at(made, n, 0, i) * static_cast<float>(k);
    }
  }
  if (kind == Kind::first_nan) made[n / 2] = std::numeric_limits<float>::quiet_NaN();
  if (kind == Kind::last_inf) made.back() = -std::numeric_limits<float>::infinity();
  if (kind == Kind::mixed) {  // zero, equal to another, not a number, in between
    scale(count / 2, 0);
    for (std::size_t i = 0; i < n; ++i) at(made, n, count - 1, i) = at(made, n, 0, i);
    if (count > 2) at(made, n, count - 2, n - 1) = std::numeric_limits<float>::infinity();
  }
  return made;
}

bool same(const Floats& a, const Floats& b) { return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

// All kinds of one size in one launch.
bool orthonormalises(const LowRank& cpu, std::size_t count, std::size_t n) {
  std::vector<Floats> ours, theirs;
  for (const Kind kind : kKinds) ours.push_back(vectors_of(kind, count, n));
  theirs = ours;
  std::vector<cuda::Vectors> calls;
  for (Floats& each : ours) calls.push_back({each.data(), count, n, 0x9876543210ULL + calls.size()});
  orthonormalise_emulated(calls.data(), calls.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    cpu.orthonormalise(theirs[i].data(), count, n, calls[i].key);
    if (same(ours[i], theirs[i])) continue;
    std::printf("FAILED: orthonormalise of %zu x %zu, kind %zu\n", count, n, i);
    return false;
  }
  return true;
}

// Rows, columns and whether there is a residual; `says_no`: what the device finds of the factors.
bool expands(const LowRank& cpu, DType dtype, std::size_t rows, std::size_t columns, std::size_t rank, bool feeds,
             bool says_no) {
  std::minstd_rand random(static_cast<unsigned>(rows * columns + rank));
  std::normal_distribution<float> normal;
  const auto drawn = [&](std::size_t n) {
    Floats made(n);
    for (float& each : made) each = normal(random);
    return made;
  };
  const Floats left = drawn(rank * rows), right = drawn(rank * columns);
  Floats ours = drawn(rows * columns), theirs = ours;
  const Floats before = ours;
  std::vector<std::uint8_t> gradient(rows * columns * size_of(dtype)), expected;
  fill(dtype, 0, rows * columns, gradient.data());
  expected = gradient;
  const std::uint8_t finite = !says_no;
  cuda::Expansion call = {};
  call.gradient = gradient.data();
  call.residual = feeds ? ours.data() : nullptr;
  call.left = left.data();
  call.right = right.data();
  call.finite = &finite;
  call.rows = rows;
  call.columns = columns;
  call.rank = static_cast<std::uint32_t>(rank);
  call.dtype = dtype;
  expand_emulated(call);
  if (says_no) {
    for (std::size_t i = 0; i < rows * columns; ++i) {
      float held = 0;
      std::uint16_t half = 0;
      std::memcpy(dtype == DType::f32 ? static_cast<void*>(&held) : &half, &gradient[i * size_of(dtype)],
                  size_of(dtype));
      if (dtype == DType::f16) held = float_from_fp16(half);
      if (dtype == DType::bf16) held = float_from_bf16(half);
      if (held == held) return false;
    }
    return same(ours, before);
  }
  const Matrix matrix = {expected.data(), feeds ? theirs.data() : nullptr, dtype, rows, columns, rank};
  cpu.expand(matrix, left.data(), right.data(), expected.data(), feeds ? theirs.data() : nullptr);
  return gradient == expected && same(ours, theirs);
}

// Factors with an element that is not finite here and there, or none, all in one launch.
bool judges() {
  constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()};
  std::vector<Floats> lefts, rights;
  std::vector<std::uint8_t> finite, expected;
  for (const std::size_t n : {1, 33, 700, 2000}) {
    for (const std::size_t where : {std::size_t{0}, n - 1, 3 * n, 4 * n - 1, 4 * n}) {  // of one, the other, none
      Floats left(n, 1), right(3 * n, 3e38F);
      if (where < 4 * n) (where < n ? left[where] : right[where - n]) = kBad[where % 2];
      lefts.push_back(left);
      rights.push_back(right);
      expected.push_back(where == 4 * n);
    }
  }
  finite.assign(expected.size(), 9);
  std::vector<cuda::Factors> calls;
  const std::vector<Floats> old_lefts = lefts, old_rights = rights;
  for (std::size_t i = 0; i < lefts.size(); ++i) {
    calls.push_back({lefts[i].data(), rights[i].data(), lefts[i].size(), rights[i].size(), &finite[i]});
  }
  check_finite_emulated(calls.data(), calls.size());
  for (std::size_t i = 0; i < lefts.size(); ++i) {
    const Floats left(lefts[i].size()), right(rights[i].size());
    if (!same(lefts[i], expected[i] ? old_lefts[i] : left)) return false;
    if (!same(rights[i], expected[i] ? old_rights[i] : right)) return false;
  }
  return finite == expected;
}

}  // namespace

bool low_rank_tests() {
  const LowRank& cpu = find_kernels("generic")->low_rank;
  int calls = 1;
  if (!judges()) {
    std::printf("FAILED: which factors are finite, or what becomes of the others\n");
    return false;
  }
  for (const std::size_t count : {1, 2, 3, 4, 8, 32}) {
    // Less than the sums side by side, a piece of products and one more, several pieces.
    for (const std::size_t n : {1, 2, 15, 17, 100, 3840, 3841, 11600}) {
      // Of many vectors no more than are needed: every direction that is missing is drawn four times.
      if (count > 4 && n != 17 && n != 100 && n != 3841) continue;
      if (count > 8 && n == 17) continue;
      if (!orthonormalises(cpu, count, n)) return false;
      ++calls;
    }
  }
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::size_t rank : {1, 2, 4, 8, 32}) {
      for (const auto& [rows, columns] : {std::pair<std::size_t, std::size_t>{1, 1}, {3, 5}, {8, 16}, {33, 17}}) {
        for (const int options : {0, 1, 2, 3}) {
          ++calls;
          if (expands(cpu, dtype, rows, columns, rank, options & 1, options & 2)) continue;
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
