// The threads of a thread block as the codecs see them: each holds eight elements ("an octet") in registers, and
// neighbours exchange values. Everything in csrc/cuda but the launches is written over a class of this shape, so
// that csrc/tests/device can run the same source on a CPU, its threads as fibers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/float_bits.h"

#if defined(__CUDACC__)
#define DTCOMM_DEVICE __device__ __forceinline__
#define DTCOMM_UNROLL _Pragma("unroll")
#define DTCOMM_LOOP _Pragma("unroll 1")
#else
#define DTCOMM_DEVICE inline
#define DTCOMM_UNROLL
#define DTCOMM_LOOP
#endif

namespace dtcomm::cuda {

constexpr unsigned kWarp = 32;
constexpr int kOctet = 8;
constexpr unsigned kMostThreads = 512;  // of a thread block: the largest block or sparse granule, 4096 elements

#if defined(__CUDACC__)

// Groups of lanes that never leave their warp.
struct WarpLanes {
  __device__ __forceinline__ unsigned thread() const { return threadIdx.x; }
  __device__ __forceinline__ unsigned threads() const { return blockDim.x; }

  // The value of thread ^ reach, reach < 32. All threads of the block call it together.
  template <class T>
  __device__ __forceinline__ T swap(T value, unsigned reach) const {
    return __shfl_xor_sync(0xffffffffU, value, reach);
  }
  // The octet of thread ^ reach.
  __device__ __forceinline__ void swap_octet(const float (&x)[kOctet], unsigned reach, float (&other)[kOctet]) const {
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) other[j] = swap(x[j], reach);
  }
  // The sum over the warp.
  __device__ __forceinline__ std::uint32_t fold(std::uint32_t value) const {
    return __reduce_add_sync(0xffffffffU, value);
  }
  // What lanes of the warp have read and written before, others read and write after. Values that are exchanged are no
  // such point: that they have come says nothing of memory.
  __device__ __forceinline__ void together() const { __syncwarp(); }
  // The same for the thread block.
  __device__ __forceinline__ void barrier() const { __syncthreads(); }
};

#endif

constexpr unsigned kRoom = kOctet * kMostThreads + 2 * kWarp;  // words of shared memory that BlockLanes need

// Groups as large as the thread block: beyond a warp values go through shared memory.
template <class Warp>
struct BlockLanes : Warp {
  std::uint32_t* room;

  DTCOMM_DEVICE BlockLanes(const Warp& warp, std::uint32_t* shared) : Warp(warp), room(shared) {}

  // The sum over the thread block, of kMostThreads threads; `round` counts the calls that follow one another.
  // In words of its own, and of two rounds that follow each other in different ones: whoever goes on first does not
  // write what others still read.
  DTCOMM_DEVICE std::uint32_t sum(std::uint32_t value, std::uint32_t round) const {
    std::uint32_t* sums = room + kOctet * kMostThreads + round % 2 * kWarp;
    const unsigned lane = this->thread() % kWarp;
    value = this->fold(value);
    if (lane == 0) sums[this->thread() / kWarp] = value;
    this->barrier();
    return this->fold(lane < kMostThreads / kWarp ? sums[lane] : 0);
  }

  DTCOMM_DEVICE std::uint32_t far(std::uint32_t value, unsigned reach) const {
    room[this->thread()] = value;
    this->barrier();
    const std::uint32_t other = room[this->thread() ^ reach];
    this->barrier();
    return other;
  }
  DTCOMM_DEVICE std::uint32_t swap(std::uint32_t value, unsigned reach) const {
    return reach < kWarp ? Warp::swap(value, reach) : far(value, reach);
  }
  DTCOMM_DEVICE std::int32_t swap(std::int32_t value, unsigned reach) const {
    return static_cast<std::int32_t>(swap(static_cast<std::uint32_t>(value), reach));
  }
  DTCOMM_DEVICE float swap(float value, unsigned reach) const { return float_of(swap(bits_of(value), reach)); }
  DTCOMM_DEVICE void swap_octet(const float (&x)[kOctet], unsigned reach, float (&other)[kOctet]) const {
    if (reach < kWarp) return Warp::swap_octet(x, reach, other);
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) room[j * kMostThreads + this->thread()] = bits_of(x[j]);
    this->barrier();
    DTCOMM_UNROLL
    for (int j = 0; j < kOctet; ++j) other[j] = float_of(room[j * kMostThreads + (this->thread() ^ reach)]);
    this->barrier();
  }
};

// `join` of a value of each of a group's lanes (a power of two), halves folded onto halves, the far ones first.
template <class Lanes, class T, class Join>
DTCOMM_DEVICE T over_group(const Lanes& lanes, unsigned group, T value, const Join& join) {
  for (unsigned reach = group / 2; reach > 0; reach /= 2) value = join(value, lanes.swap(value, reach));
  return value;
}

}  // namespace dtcomm::cuda
