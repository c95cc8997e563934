// Modified Gram-Schmidt by one thread block, with the CPU's bits (cpu/source/low_rank.h).
//
// The CPU keeps sixteen partial sums, element i in sum i mod 16, which are chains of n / 16 dependent additions. So the
// first warp only adds, from products that all other threads write to shared memory, one piece ahead of it. Subtracting
// a multiple of one vector and multiplying with the next is one pass. Elements i of all vectors belong to the same
// thread, so threads pass nothing to each other through global memory.
#pragma once

#include <cmath>

#include "codec/counter_rng.h"
#include "cuda/low_rank.h"
#include "cuda/warp.cuh"

namespace dtcomm::cuda {

constexpr unsigned kPartialSums = 16;
constexpr unsigned kProducers = kMaxBlockThreads - kWarp;  // threads that compute products
constexpr int kPerProducer = 8;                            // products of a thread at a time, so that its loads overlap
constexpr unsigned kPieceProducts = kPerProducer * kProducers;
static_assert(kPieceProducts % kPartialSums == 0);

using WarpMaxima = std::uint32_t[kMaxBlockThreads / kWarp];  // the largest magnitude of each warp

// The shared memory of the thread block.
struct GramSchmidtShared {
  float products[2][kPieceProducts];  // the piece that is being added, and the next one
  float total;
  WarpMaxima maxima[2];  // of two consecutive vectors
};

// A pass over a vector: `load` loads what an element needs, `compute` is the element's new value, and `factor` is what
// that is multiplied with for the sum. ScalePass divides by a power of two, RandomPass draws new values.
struct ScalePass {
  float by;

  DTCOMM_DEVICE void load(const float* x, std::uint64_t i, float (&in)[3]) const { in[0] = x[i]; }
  DTCOMM_DEVICE float compute(const float (&in)[3], std::uint64_t) const { return in[0] / by; }
  DTCOMM_DEVICE float factor(const float (&)[3], float value) const { return value; }
};

struct RandomPass {
  std::uint64_t key, index;

  DTCOMM_DEVICE void load(const float*, std::uint64_t, float (&)[3]) const {}
  DTCOMM_DEVICE float compute(const float (&)[3], std::uint64_t i) const {
    return uniform(make_stream(key, index + i), static_cast<std::uint32_t>(index + i)) - 0.5f;
  }
  DTCOMM_DEVICE float factor(const float (&)[3], float value) const { return value; }
};

// Adds `by` times `other`, where there is one; the factor is `next`, or the element itself where there is none.
struct SubtractPass {
  const float* other;
  float by;
  const float* next;

  DTCOMM_DEVICE void load(const float* x, std::uint64_t i, float (&in)[3]) const {
    in[0] = x[i];
    if (other) in[1] = other[i];
    if (next) in[2] = next[i];
  }
  DTCOMM_DEVICE float compute(const float (&in)[3], std::uint64_t) const { return other ? in[0] + by * in[1] : in[0]; }
  DTCOMM_DEVICE float factor(const float (&in)[3], float value) const { return next ? in[2] : value; }
};

// Computes the products of one piece, with zeros past the last element, as in the CPU's sums.
template <class Lanes, class Pass>
DTCOMM_DEVICE void produce_products(const Lanes& lanes, const Pass& pass, float* x, std::uint64_t n,
                                    std::uint64_t first, float* products) {
  const unsigned at = lanes.thread() - kWarp;
  float in[kPerProducer][3] = {};
  DTCOMM_UNROLL
  for (unsigned j = 0; j < kPerProducer; ++j) {
    const std::uint64_t i = first + at + j * kProducers;
    if (i < n) pass.load(x, i, in[j]);
  }
  DTCOMM_UNROLL
  for (unsigned j = 0; j < kPerProducer; ++j) {
    const std::uint64_t i = first + at + j * kProducers;
    float product = 0;
    if (i < n) {
      const float value = pass.compute(in[j], i);
      x[i] = value;
      product = value * pass.factor(in[j], value);
    }
    products[at + j * kProducers] = product;
  }
}

// Adds every sixteenth product to `total`.
DTCOMM_DEVICE float sum_products(float total, const float* products, std::uint64_t n) {
  const auto groups =
      static_cast<unsigned>(((n < kPieceProducts ? n : kPieceProducts) + kPartialSums - 1) / kPartialSums);
#if defined(__CUDACC__)
#pragma unroll 16
#endif
  for (unsigned i = 0; i < groups; ++i) total = total + products[i * kPartialSums];
  return total;
}

// Runs a pass over x and returns the sum of its products to all threads.
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

// use(x[i]) for the elements that belong to the thread.
template <class Lanes, class Use>
DTCOMM_DEVICE void for_thread_elements(const Lanes& lanes, float* x, std::uint64_t n, const Use& use) {
  if (lanes.thread() < kWarp) return;
  for (std::uint64_t i = lanes.thread() - kWarp; i < n; i += kProducers) use(x[i]);
}

// The largest `top` of the block's threads.
template <class Lanes>
DTCOMM_DEVICE std::uint32_t block_max(const Lanes& lanes, WarpMaxima& maxima, std::uint32_t top) {
  const auto larger = [](std::uint32_t a, std::uint32_t b) { return a > b ? a : b; };
  top = group_reduce(lanes, kWarp, top, larger);
  if (lanes.thread() % kWarp == 0) maxima[lanes.thread() / kWarp] = top;
  lanes.sync_block();
  for (const std::uint32_t maximum : maxima) top = larger(top, maximum);
  return top;
}

// Subtracts from vector k its projections on the vectors before it, twice. Returns the length of the remainder.
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

// Makes the vectors orthonormal, by a thread block of kMaxBlockThreads.
template <class Lanes>
DTCOMM_DEVICE void orthonormalize_block(const Lanes& lanes, GramSchmidtShared& shared, const Vectors& of) {
  constexpr float kDependentBelow = 0x1p-18f;  // of a vector's length: a remainder below it is rounding error
  constexpr int kAttempts = 4;
  DTCOMM_LOOP
  for (std::uint64_t k = 0; k < of.count; ++k) {
    float* x = of.first + k * of.n;
    std::uint32_t top = 0;
    for_thread_elements(lanes, x, of.n, [&](float& value) { top = magnitude(value) > top ? magnitude(value) : top; });
    top = block_max(lanes, shared.maxima[k % 2], top);
    if (top >= kInfinity32) continue;
    bool usable = false;
    // First the vector as it is, unless it is practically zero, then random vectors.
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

// Sets whether the factors are finite; if not, they become zeros. By a thread block of kMaxBlockThreads.
template <class Lanes>
DTCOMM_DEVICE void check_finite_block(const Lanes& lanes, WarpMaxima& maxima, const Factors& of) {
  const auto for_each = [&](const auto& use) {
    for (std::uint64_t i = lanes.thread(); i < of.left_size; i += kMaxBlockThreads) use(of.left[i]);
    for (std::uint64_t i = lanes.thread(); i < of.right_size; i += kMaxBlockThreads) use(of.right[i]);
  };
  std::uint32_t top = 0;
  for_each([&](float& value) { top = magnitude(value) > top ? magnitude(value) : top; });
  const bool finite = block_max(lanes, maxima, top) < kInfinity32;
  if (lanes.thread() == 0) *of.finite = finite;
  if (!finite) for_each([](float& value) { value = 0; });
}

}  // namespace dtcomm::cuda
