// Passes over memory that the yardstick is made of: copy, sum of n arrays to one or two places, in-place update.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace yardstick {

#if defined(__AVX512F__)
using Vector = __m512;
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
inline void stream(float* p, Vector v) { _mm512_stream_ps(p, v); }
#else
using Vector = __m256;
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
inline void stream(float* p, Vector v) { _mm256_stream_ps(p, v); }
#endif
constexpr std::size_t kWidth = sizeof(Vector) / sizeof(float);

inline bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % sizeof(Vector) == 0; }

template <bool kStream>
inline void put(float* p, Vector v) {
  if constexpr (kStream) {
    stream(p, v);
  } else {
    store(p, v);
  }
}

template <bool kStream>
void copy_as(float* dst, const float* src, std::size_t n) {
  std::size_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    const Vector a = load(src + i), b = load(src + i + kWidth), c = load(src + i + 2 * kWidth),
                 d = load(src + i + 3 * kWidth);
    put<kStream>(dst + i, a);
    put<kStream>(dst + i + kWidth, b);
    put<kStream>(dst + i + 2 * kWidth, c);
    put<kStream>(dst + i + 3 * kWidth, d);
  }
  for (; i < n; ++i) dst[i] = src[i];
}

inline void copy(float* dst, const float* src, std::size_t n, bool streaming) {
  if (streaming && aligned(dst)) {
    copy_as<true>(dst, src, n);
  } else {
    copy_as<false>(dst, src, n);
  }
}

// out <- src[0] + src[1] + ... in that order; also <- the same, where not null.
template <int kRanks, bool kStreamOut, bool kStreamAlso, bool kAlso>
void sum_as(float* out, float* also, const float* const* src, std::size_t n) {
  std::size_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    Vector a = load(src[0] + i), b = load(src[0] + i + kWidth);
    for (int r = 1; r < kRanks; ++r) {
      a = add(a, load(src[r] + i));
      b = add(b, load(src[r] + i + kWidth));
    }
    put<kStreamOut>(out + i, a);
    put<kStreamOut>(out + i + kWidth, b);
    if constexpr (kAlso) {
      put<kStreamAlso>(also + i, a);
      put<kStreamAlso>(also + i + kWidth, b);
    }
  }
  for (; i < n; ++i) {
    float s = src[0][i];
    for (int r = 1; r < kRanks; ++r) s += src[r][i];
    out[i] = s;
    if constexpr (kAlso) also[i] = s;
  }
}

template <int kRanks>
void sum_of(float* out, float* also, const float* const* src, std::size_t n, bool stream_out, bool stream_also) {
  stream_out = stream_out && aligned(out);
  stream_also = stream_also && aligned(also);
  if (also == nullptr) {
    stream_out ? sum_as<kRanks, true, false, false>(out, also, src, n)
               : sum_as<kRanks, false, false, false>(out, also, src, n);
  } else if (stream_out) {
    stream_also ? sum_as<kRanks, true, true, true>(out, also, src, n)
                : sum_as<kRanks, true, false, true>(out, also, src, n);
  } else {
    stream_also ? sum_as<kRanks, false, true, true>(out, also, src, n)
                : sum_as<kRanks, false, false, true>(out, also, src, n);
  }
}

inline void sum(int ranks, float* out, float* also, const float* const* src, std::size_t n, bool stream_out,
                bool stream_also) {
  switch (ranks) {
    case 2:
      return sum_of<2>(out, also, src, n, stream_out, stream_also);
    case 3:
      return sum_of<3>(out, also, src, n, stream_out, stream_also);
    case 4:
      return sum_of<4>(out, also, src, n, stream_out, stream_also);
    case 5:
      return sum_of<5>(out, also, src, n, stream_out, stream_also);
    case 6:
      return sum_of<6>(out, also, src, n, stream_out, stream_also);
    case 7:
      return sum_of<7>(out, also, src, n, stream_out, stream_also);
    default:
      return sum_of<8>(out, also, src, n, stream_out, stream_also);
  }
}

// Reads and writes every line where it lies, which moves no line that it does not need.
inline void update(float* x, std::size_t n) {
  const Vector zero{};
  std::size_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(x + i, add(load(x + i), zero));
  for (; i < n; ++i) x[i] += 0.0F;
}

}  // namespace yardstick
