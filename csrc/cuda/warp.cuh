// WarpLanes and BlockLanes: the threads of a block as the codecs see them. Each thread holds eight neighbouring
// elements (a "vec8") in registers, and threads exchange values. Everything in csrc/cuda but the launches is a template
// over such a class, so that csrc/emulator can run the same source on a CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/float_bits.h"

#if defined(__CUDACC__)
#define DTCOMM_DEVICE __device__ __forceinline__
#define DTCOMM_NOINLINE __device__ __noinline__
#define DTCOMM_UNROLL _Pragma("unroll")
#define DTCOMM_LOOP _Pragma("unroll 1")
#else
#define DTCOMM_DEVICE inline
#define DTCOMM_NOINLINE inline
#define DTCOMM_UNROLL
#define DTCOMM_LOOP
#endif

namespace dtcomm::cuda {

constexpr unsigned kWarp = 32;
constexpr int kVec8 = 8;
constexpr unsigned kMaxBlockThreads = 512;  // of a thread block: the largest block or sparse granule, 4096 elements

#if defined(__CUDACC__)

// Lanes that exchange values only within their warp.
struct WarpLanes {
  __device__ __forceinline__ unsigned thread() const { return threadIdx.x; }
  __device__ __forceinline__ unsigned threads() const { return blockDim.x; }

  // The value of thread ^ reach, reach < 32. All threads of the block must call it.
  template <class T>
  __device__ __forceinline__ T shuffle_xor(T value, unsigned reach) const {
    return __shfl_xor_sync(0xffffffffU, value, reach);
  }
  // The vec8 of thread ^ reach.
  __device__ __forceinline__ void shuffle_xor_vec8(const float (&x)[kVec8], unsigned reach,
                                                   float (&other)[kVec8]) const {
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) other[j] = shuffle_xor(x[j], reach);
  }
  // The sum over the warp.
  __device__ __forceinline__ std::uint32_t warp_sum(std::uint32_t value) const {
    return __reduce_add_sync(0xffffffffU, value);
  }
  // Orders the memory accesses of the warp's lanes before it before those after it. An exchange of values does not.
  __device__ __forceinline__ void sync_warp() const { __syncwarp(); }
  // The same for all threads of the block.
  __device__ __forceinline__ void sync_block() const { __syncthreads(); }
};

#endif

constexpr unsigned kBlockScratchWords =
    kVec8 * kMaxBlockThreads + 2 * kWarp;  // words of shared memory that BlockLanes need

// Lanes that exchange values within groups of up to a thread block: beyond a warp, values go through shared memory.
template <class Warp>
struct BlockLanes : Warp {
  std::uint32_t* scratch;

  DTCOMM_DEVICE BlockLanes(const Warp& warp, std::uint32_t* shared) : Warp(warp), scratch(shared) {}

  // The sum over the thread block, of kMaxBlockThreads threads; `round` counts consecutive calls. It uses words of its
  // own, and consecutive rounds use different ones, so that a thread that is ahead does not overwrite what others read.
  DTCOMM_DEVICE std::uint32_t block_sum(std::uint32_t value, std::uint32_t round) const {
    std::uint32_t* sums = scratch + kVec8 * kMaxBlockThreads + round % 2 * kWarp;
    const unsigned lane = this->thread() % kWarp;
    value = this->warp_sum(value);
    if (lane == 0) sums[this->thread() / kWarp] = value;
    this->sync_block();
    return this->warp_sum(lane < kMaxBlockThreads / kWarp ? sums[lane] : 0);
  }

  DTCOMM_DEVICE std::uint32_t shuffle_xor_block(std::uint32_t value, unsigned reach) const {
    scratch[this->thread()] = value;
    this->sync_block();
    const std::uint32_t other = scratch[this->thread() ^ reach];
    this->sync_block();
    return other;
  }
  DTCOMM_DEVICE std::uint32_t shuffle_xor(std::uint32_t value, unsigned reach) const {
    return reach < kWarp ? Warp::shuffle_xor(value, reach) : shuffle_xor_block(value, reach);
  }
  DTCOMM_DEVICE std::int32_t shuffle_xor(std::int32_t value, unsigned reach) const {
    return static_cast<std::int32_t>(shuffle_xor(static_cast<std::uint32_t>(value), reach));
  }
  DTCOMM_DEVICE float shuffle_xor(float value, unsigned reach) const {
    return float_of(shuffle_xor(bits_of(value), reach));
  }
  DTCOMM_DEVICE void shuffle_xor_vec8(const float (&x)[kVec8], unsigned reach, float (&other)[kVec8]) const {
    if (reach < kWarp) return Warp::shuffle_xor_vec8(x, reach, other);
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) scratch[j * kMaxBlockThreads + this->thread()] = bits_of(x[j]);
    this->sync_block();
    DTCOMM_UNROLL
    for (int j = 0; j < kVec8; ++j) other[j] = float_of(scratch[j * kMaxBlockThreads + (this->thread() ^ reach)]);
    this->sync_block();
  }
};

// Reduces a value of each lane of a group (a power of two) with `join`: halves are folded onto halves, the far ones
// first.
template <class Lanes, class T, class Join>
DTCOMM_DEVICE T group_reduce(const Lanes& lanes, unsigned group, T value, const Join& join) {
  for (unsigned reach = group / 2; reach > 0; reach /= 2) value = join(value, lanes.shuffle_xor(value, reach));
  return value;
}

// The sum of `value` over the threads before this one, of kMaxBlockThreads; `total` becomes the sum over all threads.
template <class Lanes>
DTCOMM_DEVICE std::uint32_t sum_before(const Lanes& lanes, std::uint32_t value, std::uint32_t& total) {
  std::uint32_t before = 0;
  total = value;
  for (unsigned reach = 1; reach < kMaxBlockThreads; reach *= 2) {
    const std::uint32_t other = lanes.shuffle_xor(total, reach);
    before += lanes.thread() & reach ? other : 0;
    total += other;
  }
  return before;
}

}  // namespace dtcomm::cuda
