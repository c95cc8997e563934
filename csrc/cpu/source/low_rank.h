// The passes of PowerSGD over one matrix. Gradient plus residual is read once per pass, and every sum has one fixed
// order, so that all ranks and all instruction sets compute the same bits.
#pragma once

#include "codec/counter_rng.h"
#include "cpu/kernels.h"
#include "cpu/source/cast.h"
#include "cpu/source/fp_env.h"
#include "cpu/source/loops.h"

namespace dtcomm::DTCOMM_ISA {

// Sixteen sums side by side, whatever the width of this machine's vectors.
constexpr std::size_t kWide = 16;
typedef float Wide __attribute__((vector_size(kWide * sizeof(float))));
typedef float LooseWide __attribute__((vector_size(kWide * sizeof(float)), aligned(1), may_alias));
constexpr std::size_t kStrip = 2048;  // columns at a time: a strip of the matrix and of the factors stays in cache

// The sum of all lanes: adds the upper half to the lower half until one lane is left.
inline float fold(const Wide& sums) {
  float lanes[kWide];
  __builtin_memcpy(lanes, &sums, sizeof lanes);
  for (std::size_t half = kWide / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// sums += a * b, element i to lane i mod 16; `n` is a multiple of 16 but for a matrix's last strip. Wide goes by
// reference: not every instruction set has registers to return it in.
inline void add_products(Wide& sums, const float* a, const float* b, std::size_t n) {
  std::size_t i = 0;
  Wide total = sums;
  for (; i + kWide <= n; i += kWide) {
    total = total + *reinterpret_cast<const LooseWide*>(a + i) * *reinterpret_cast<const LooseWide*>(b + i);
  }
  if (i < n) {
    Wide x{}, y{};
    __builtin_memcpy(&x, a + i, (n - i) * sizeof(float));
    __builtin_memcpy(&y, b + i, (n - i) * sizeof(float));
    total = total + x * y;
  }
  sums = total;
}

inline float dot(const float* a, const float* b, std::size_t n) {
  Wide sums{};
  add_products(sums, a, b, n);
  return fold(sums);
}

// sum[i] += by * x[i]
inline void add_multiple(float* __restrict__ sum, float by, const float* __restrict__ x, std::size_t n) {
  auto* to = unaligned<float>(sum);
  const auto* from = unaligned<float>(x);
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) to[i].value = to[i].value + by * from[i].value;
}

// Rows whose products are added to the sums of columns at once, one after the other: the sums are read and written
// once.
constexpr std::size_t kRows = 4;
constexpr std::size_t kShortStrip = 1024;  // of so many rows

// sum[i] += by[0] * x[0][i], and so on
inline void add_multiples(float* __restrict__ sum, const float* by, const float* const* x, std::size_t n) {
  static_assert(kRows == 4);
  auto* to = unaligned<float>(sum);
  const auto *a = unaligned<float>(x[0]), *b = unaligned<float>(x[1]), *c = unaligned<float>(x[2]),
             *d = unaligned<float>(x[3]);
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    to[i].value = (((to[i].value + by[0] * a[i].value) + by[1] * b[i].value) + by[2] * c[i].value) + by[3] * d[i].value;
  }
}

// The same for rows of gradient + residual, `stride` apart, that are read only once.
inline void add_multiples_of_sums(float* __restrict__ sum, const float* by, const float* gradient,
                                  const float* residual, std::size_t stride, std::size_t n) {
  static_assert(kRows == 4);
  auto* to = unaligned<float>(sum);
  const auto *a = unaligned<float>(gradient), *e = unaligned<float>(residual);
  const auto *b = a + stride, *c = b + stride, *d = c + stride;
  const auto *f = e + stride, *g = f + stride, *h = g + stride;
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    float total = to[i].value + by[0] * (a[i].value + e[i].value);
    total = total + by[1] * (b[i].value + f[i].value);
    total = total + by[2] * (c[i].value + g[i].value);
    to[i].value = total + by[3] * (d[i].value + h[i].value);
  }
}

// sums += (a + b) * c, element i to lane i mod 16; `n` is a multiple of 16.
inline void add_products_of_sums(Wide& sums, const float* a, const float* b, const float* c, std::size_t n) {
  Wide total = sums;
  for (std::size_t i = 0; i < n; i += kWide) {
    const Wide term = *reinterpret_cast<const LooseWide*>(a + i) + *reinterpret_cast<const LooseWide*>(b + i);
    total = total + term * *reinterpret_cast<const LooseWide*>(c + i);
  }
  sums = total;
}

// gradient + residual of columns [column, column + n) of a row: in place where that is fp32 alone, else in `scratch`.
inline const float* strip_of(const Matrix& matrix, std::size_t row, std::size_t column, std::size_t n, float* scratch) {
  const std::size_t at = row * matrix.columns + column;
  const void* gradient = static_cast<const std::uint8_t*>(matrix.gradient) + at * size_of(matrix.dtype);
  const float* floats = widen(matrix.dtype, gradient, n, scratch);
  if (!matrix.residual) return floats;
  const auto* x = unaligned<float>(floats);
  const auto* y = unaligned<float>(matrix.residual + at);
  auto* to = unaligned<float>(scratch);
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) to[i].value = x[i].value + y[i].value;
  return scratch;
}

// Whether gradient + residual is read only once, for one vector: then it is not stored in scratch memory.
inline bool is_read_once(const Matrix& matrix) {
  return matrix.rank == 1 && matrix.residual && matrix.dtype == DType::f32;
}

inline void project_rows(const Matrix& matrix, const float* right, float* left) {
  const ScopedFpEnv environment;
  alignas(kLine) float scratch[kStrip];
  Wide sums[kMaxRank];
  const std::size_t direct = is_read_once(matrix) ? matrix.columns / kWide * kWide : 0;
  for (std::size_t row = 0; row < matrix.rows; ++row) {
    for (std::size_t k = 0; k < matrix.rank; ++k) sums[k] = Wide{};
    if (direct) {
      const std::size_t at = row * matrix.columns;
      add_products_of_sums(sums[0], static_cast<const float*>(matrix.gradient) + at, matrix.residual + at, right,
                           direct);
    }
    for (std::size_t column = direct; column < matrix.columns; column += kStrip) {
      const std::size_t n = smaller(kStrip, matrix.columns - column);
      const float* strip = strip_of(matrix, row, column, n, scratch);
      for (std::size_t k = 0; k < matrix.rank; ++k) {
        add_products(sums[k], strip, right + k * matrix.columns + column, n);
      }
    }
    for (std::size_t k = 0; k < matrix.rank; ++k) left[k * matrix.rows + row] = fold(sums[k]);
  }
}

inline void project_columns(const Matrix& matrix, const float* left, float* right) {
  const ScopedFpEnv environment;
  alignas(kLine) float scratch[kRows][kShortStrip];
  __builtin_memset(right, 0, matrix.rank * matrix.columns * sizeof(float));
  const bool direct = is_read_once(matrix);
  for (std::size_t column = 0; column < matrix.columns; column += kShortStrip) {
    const std::size_t n = smaller(kShortStrip, matrix.columns - column);
    std::size_t row = 0;
    for (; row + kRows <= matrix.rows; row += kRows) {
      if (direct) {
        const std::size_t at = row * matrix.columns + column;
        add_multiples_of_sums(right + column, left + row, static_cast<const float*>(matrix.gradient) + at,
                              matrix.residual + at, matrix.columns, n);
        continue;
      }
      const float* strips[kRows];
      for (std::size_t i = 0; i < kRows; ++i) strips[i] = strip_of(matrix, row + i, column, n, scratch[i]);
      for (std::size_t k = 0; k < matrix.rank; ++k) {
        add_multiples(right + k * matrix.columns + column, left + k * matrix.rows + row, strips, n);
      }
    }
    for (; row < matrix.rows; ++row) {
      const float* strip = strip_of(matrix, row, column, n, scratch[0]);
      for (std::size_t k = 0; k < matrix.rank; ++k) {
        add_multiple(right + k * matrix.columns + column, left[k * matrix.rows + row], strip, n);
      }
    }
  }
}

inline void expand(const Matrix& matrix, const float* left, const float* right, void* out, float* residual) {
  const ScopedFpEnv environment;
  alignas(kLine) float scratch[kStrip], product[kStrip];
  for (std::size_t row = 0; row < matrix.rows; ++row) {
    for (std::size_t column = 0; column < matrix.columns; column += kStrip) {
      const std::size_t n = smaller(kStrip, matrix.columns - column), at = row * matrix.columns + column;
      const auto* first = unaligned<float>(right + column);
      const float by = left[row];
      DTCOMM_INDEPENDENT
      for (std::size_t i = 0; i < n; ++i) product[i] = by * first[i].value;
      for (std::size_t k = 1; k < matrix.rank; ++k) {
        add_multiple(product, left[k * matrix.rows + row], right + k * matrix.columns + column, n);
      }
      if (residual) {
        const auto* x = unaligned<float>(strip_of(matrix, row, column, n, scratch));
        auto* write_error = unaligned<float>(residual + at);
        DTCOMM_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) write_error[i].value = x[i].value - product[i];
      }
      narrow(matrix.dtype, product, n, static_cast<std::uint8_t*>(out) + at * size_of(matrix.dtype));
    }
  }
}

inline float norm_of(const float* x, std::size_t n) { return __builtin_sqrtf(dot(x, x, n)); }

// Makes x orthogonal to the `count` orthonormal vectors before it, twice: that removes rounding errors.
inline void take_away(const float* before, std::size_t count, float* x, std::size_t n) {
  for (int pass = 0; pass < 2; ++pass) {
    for (std::size_t k = 0; k < count; ++k) {
      add_multiple(x, -dot(x, before + k * n, n), before + k * n, n);
    }
  }
}

inline void scale_to(float* x, std::size_t n, float by) {
  DTCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) x[i] = x[i] / by;
}

inline void orthonormalize(float* vectors, std::size_t count, std::size_t n, std::uint64_t key) {
  const ScopedFpEnv environment;
  constexpr float kRounding = 0x1p-18f;  // what is left of a vector is rounding if it is shorter than this part of it
  for (std::size_t k = 0; k < count; ++k) {
    float* x = vectors + k * n;
    // Powers of two apart from length 1, squares would leave fp32's range.
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < n; ++i) top = magnitude(x[i]) > top ? magnitude(x[i]) : top;
    if (top >= kInfinity32) continue;  // NaN and Inf must reach all ranks
    bool usable = top >= 0x00800000;
    if (usable) {
      scale_to(x, n, float_of(top & 0x7f800000));
      const float before = norm_of(x, n);
      take_away(vectors, k, x, n);
      const float after = norm_of(x, n);
      usable = after > before * kRounding;
      if (usable) scale_to(x, n, after);
    }
    // A missing direction is replaced by a random one: a zero vector would stay zero for ever.
    for (int attempt = 0; !usable && attempt < 4; ++attempt) {
      const std::uint64_t index = (k * 4 + static_cast<std::uint64_t>(attempt)) * n;
      for (std::size_t i = 0; i < n; ++i) {
        x[i] = uniform(make_stream(key, index + i), static_cast<std::uint32_t>(index + i)) - 0.5f;
      }
      const float before = norm_of(x, n);
      take_away(vectors, k, x, n);
      const float after = norm_of(x, n);
      usable = after > before * kRounding;
      if (usable) scale_to(x, n, after);
    }
    if (!usable) __builtin_memset(x, 0, n * sizeof(float));  // more vectors than dimensions
  }
}

}  // namespace dtcomm::DTCOMM_ISA
