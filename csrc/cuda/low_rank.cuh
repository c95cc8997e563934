// Modified Gram-Schmidt by one thread block, with the CPU's bits (cpu/source/low_rank.h).
//
// There every sum goes to sixteen sums side by side, element i to sum i mod 16, which is a chain of n / 16 additions
// that nobody can shorten. So the first warp does nothing but add, from products that all other threads lay out in
// shared memory, a piece ahead of it. Taking away a multiple of one vector and multiplying with the next is one pass.
// Elements i of all vectors are one thread's throughout, so global memory passes nothing between threads.
#pragma once

#include <cmath>

#include "codec/counter_rng.h"
#include "cuda/low_rank.h"
#include "cuda/warp.cuh"

namespace dtcomm::cuda {

constexpr unsigned kPartialSums = 16;
constexpr unsigned kProducers = kMaxBlockThreads - kWarp;  // threads that make products
constexpr int kPerProducer = 8;  // of each at a time, so that its loads are on their way together
constexpr unsigned kPieceProducts = kPerProducer * kProducers;
static_assert(kPieceProducts % kPartialSums == 0);

using WarpMaxima = std::uint32_t[kMaxBlockThreads / kWarp];  // the largest magnitudes that warps have seen

// What the thread block shares.
struct GramSchmidtShared {
  float products[2][kPieceProducts];  // a piece that is added up, and the next one
  float total;
  WarpMaxima maxima[2];  // of two vectors that follow each other
};

// What an element of the vector becomes in a pass, and what it is multiplied with then: `read` loads, and nothing else
// does, `made` computes.
struct ScalePass {
  float by;

  DTCOMM_DEVICE void read(const float* x, std::uint64_t i, float (&in)[3]) const { in[0] = x[i]; }
  DTCOMM_DEVICE float made(const float (&in)[3], std::uint64_t) const { return in[0] / by; }
  DTCOMM_DEVICE float with(const float (&)[3], float value) const { return value; }
};

struct RandomPass {
  std::uint64_t key, index;

  DTCOMM_DEVICE void read(const float*, std::uint64_t, float (&)[3]) const {}
  DTCOMM_DEVICE float made(const float (&)[3], std::uint64_t i) const {
    return uniform(make_stream(key, index + i), static_cast<std::uint32_t>(index + i)) - 0.5f;
  }
  DTCOMM_DEVICE float with(const float (&)[3], float value) const { return value; }
};

// Plus `by` times `other`, where there is one; with `next`, or where there is none with itself.
struct SubtractPass {
  const float* other;
  float by;
  const float* next;

  DTCOMM_DEVICE void read(const float* x, std::uint64_t i, float (&in)[3]) const {
    in[0] = x[i];
    if (other) in[1] = other[i];
    if (next) in[2] = next[i];
  }
  DTCOMM_DEVICE float made(const float (&in)[3], std::uint64_t) const { return other ? in[0] + by * in[1] : in[0]; }
  DTCOMM_DEVICE float with(const float (&in)[3], float value) const { return next ? in[2] : value; }
};

// The products of one piece, with zeros behind the last element, as the CPU's sums have them.
template <class Lanes, class Pass>
DTCOMM_DEVICE void produce_products(const Lanes& lanes, const Pass& pass, float* x, std::uint64_t n,
                                    std::uint64_t first, float* products) {
  const unsigned at = lanes.thread() - kWarp;
  float in[kPerProducer][3] = {};
  DTCOMM_UNROLL
  for (unsigned j = 0; j < kPerProducer; ++j) {
    const std::uint64_t i = first + at + j * kProducers;
    if (i < n) pass.read(x, i, in[j]);
  }
  DTCOMM_UNROLL
  for (unsigned j = 0; j < kPerProducer; ++j) {
    const std::uint64_t i = first + at + j * kProducers;
    float product = 0;
    if (i < n) {
      const float value = pass.made(in[j], i);
      x[i] = value;
      product = value * pass.with(in[j], value);
    }
    products[at + j * kProducers] = product;
  }
}

// total, and then every sixteenth of the products.
DTCOMM_DEVICE float sum_products(float total, const float* products, std::uint64_t n) {
  const auto groups =
      static_cast<unsigned>(((n < kPieceProducts ? n : kPieceProducts) + kPartialSums - 1) / kPartialSums);
#if defined(__CUDACC__)
#pragma unroll 16
#endif
  for (unsigned i = 0; i < groups; ++i) total = total + products[i * kPartialSums];
  return total;
}

// A pass over x and the sum of its products, which all threads get.
template <class Lanes, class Pass>
DTCOMM_DEVICE float run_pass(const Lanes& lanes, GramSchmidtShared& shared, const Pass& pass, float* x,
                             std::uint64_t n) {
  const bool adds = lanes.thread() < kWarp;
  float total = 0;
  if (!adds) produce_products(lanes, pass, x, n, 0, shared.products[0]);
  lanes.sync_block();
  DTCOMM_LOOP
  for (std::uint64_t first = 0, side = 0; first < n; first += kPieceProducts, side ^= 1) {
    const std::uint64_t next = first + kPieceProducts;
    if (adds) {
      total = sum_products(total, shared.products[side] + lanes.thread() % kPartialSums, n - first);
      if (next >= n) {
        total = group_reduce(lanes, kPartialSums, total, [](float a, float b) { return a + b; });
        if (lanes.thread() == 0) shared.total = total;
      }
    } else if (next < n) {
      produce_products(lanes, pass, x, n, next, shared.products[side ^ 1]);
    }
    lanes.sync_block();
  }
  return shared.total;
}

// use(x[i]) for the elements that are the thread's.
template <class Lanes, class Use>
DTCOMM_DEVICE void for_thread_elements(const Lanes& lanes, float* x, std::uint64_t n, const Use& use) {
  if (lanes.thread() < kWarp) return;
  for (std::uint64_t i = lanes.thread() - kWarp; i < n; i += kProducers) use(x[i]);
}

// The largest of what the threads of the block bring.
template <class Lanes>
DTCOMM_DEVICE std::uint32_t largest(const Lanes& lanes, WarpMaxima& maxima, std::uint32_t top) {
  const auto larger = [](std::uint32_t a, std::uint32_t b) { return a > b ? a : b; };
  top = group_reduce(lanes, kWarp, top, larger);
  if (lanes.thread() % kWarp == 0) maxima[lanes.thread() / kWarp] = top;
  lanes.sync_block();
  for (const std::uint32_t each : maxima) top = larger(top, each);
  return top;
}

// Vector k apart from those before it, twice over: the length of what is left.
template <class Lanes>
DTCOMM_DEVICE float subtract_projections(const Lanes& lanes, GramSchmidtShared& shared, const Vectors& of,
                                         std::uint64_t k) {
  float* x = of.first + k * of.n;
  SubtractPass pass = {nullptr, 0, nullptr};
  float sum = 0;
  DTCOMM_LOOP
  for (std::uint64_t step = 0; step <= 2 * k; ++step) {
    pass.next = step == 2 * k ? nullptr : of.first + (step < k ? step : step - k) * of.n;
    sum = run_pass(lanes, shared, pass, x, of.n);
    pass = {pass.next, -sum, nullptr};
  }
  return std::sqrt(sum);
}

// By a thread block of kMaxBlockThreads.
template <class Lanes>
DTCOMM_DEVICE void orthonormalise_block(const Lanes& lanes, GramSchmidtShared& shared, const Vectors& of) {
  constexpr float kDependentBelow = 0x1p-18f;  // of a vector's length, when what is left of it is rounding
  constexpr int kAttempts = 4;
  DTCOMM_LOOP
  for (std::uint64_t k = 0; k < of.count; ++k) {
    float* x = of.first + k * of.n;
    std::uint32_t top = 0;
    for_thread_elements(lanes, x, of.n, [&](float& value) { top = magnitude(value) > top ? magnitude(value) : top; });
    top = largest(lanes, shared.maxima[k % 2], top);
    if (top >= kInfinity32) continue;
    bool usable = false;
    // First as it is, unless it is as good as zero, then as it is drawn.
    DTCOMM_LOOP
    for (int attempt = top < 0x00800000 ? 0 : -1; !usable && attempt < kAttempts; ++attempt) {
      const std::uint64_t index = (k * kAttempts + static_cast<std::uint64_t>(attempt)) * of.n;
      const float sum = attempt < 0 ? run_pass(lanes, shared, ScalePass{float_of(top & 0x7f800000)}, x, of.n)
                                    : run_pass(lanes, shared, RandomPass{of.key, index}, x, of.n);
      const float before = std::sqrt(sum), after = subtract_projections(lanes, shared, of, k);
      usable = after > before * kDependentBelow;
      if (usable) for_thread_elements(lanes, x, of.n, [&](float& value) { value = value / after; });
    }
    if (!usable) for_thread_elements(lanes, x, of.n, [](float& value) { value = 0; });
  }
}

// Whether the factors are finite; else they become zeros. By a thread block of kMaxBlockThreads.
template <class Lanes>
DTCOMM_DEVICE void check_finite_block(const Lanes& lanes, WarpMaxima& maxima, const Factors& of) {
  const auto for_each = [&](const auto& use) {
    for (std::uint64_t i = lanes.thread(); i < of.left_size; i += kMaxBlockThreads) use(of.left[i]);
    for (std::uint64_t i = lanes.thread(); i < of.right_size; i += kMaxBlockThreads) use(of.right[i]);
  };
  std::uint32_t top = 0;
  for_each([&](float& value) { top = magnitude(value) > top ? magnitude(value) : top; });
  const bool finite = largest(lanes, maxima, top) < kInfinity32;
  if (lanes.thread() == 0) *of.finite = finite;
  if (!finite) for_each([](float& value) { value = 0; });
}

}  // namespace dtcomm::cuda
