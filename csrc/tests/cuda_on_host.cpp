// The CUDA codecs' blocks on the CPU, a thread per lane of a warp: machines without a GPU see at once when csrc/cuda
// and csrc/cpu no longer make the same bytes. What only a device can show (launches, streams) is tests/cuda's part.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define __device__

namespace {

constexpr unsigned kLanes = 32;

struct ThreadIndex {
  unsigned x;
};
thread_local ThreadIndex threadIdx;

// All lanes meet here, as often as they like.
class Barrier {
 public:
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned round = round_;
    if (++arrived_ == kLanes) {
      arrived_ = 0;
      ++round_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return round != round_; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  unsigned arrived_ = 0, round_ = 0;
} barrier;

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned reach) {
  static T lanes[kLanes];
  lanes[threadIdx.x] = value;
  barrier.wait();
  const T other = lanes[threadIdx.x ^ reach];
  barrier.wait();
  return other;
}

}  // namespace

using std::max;

#include "cpu/kernels.h"
#include "cuda/integer.cuh"

namespace {

using namespace dtcomm;

// Ordinary numbers with the awkward ones strewn in: tiny, huge, subnormal, a zero block, Inf, NaN, -0.
std::vector<std::uint8_t> hostile(std::size_t numel, DType dtype) {
  std::mt19937 random(static_cast<unsigned>(numel));
  std::normal_distribution<float> normal;
  std::vector<std::uint8_t> bytes(numel * sizeof(float));
  for (std::size_t i = 0; i < numel; ++i) {
    float value = normal(random);
    if (i % 7 == 0) value *= 1e-30f;
    if (i % 97 == 3) value = 1e30f;
    if (i % 89 == 5) value = 1e-42f;
    if (i % 1000 >= 128 && i % 1000 < 256) value = 0.0f;
    if (i % 333 == 9) value = -0.0f;
    if (i == 300) value = INFINITY;
    if (i == 700) value = NAN;
    cuda::store(dtype, value, bytes.data(), i);
  }
  return bytes;
}

std::vector<std::uint8_t> encode_on_lanes(const Codec& codec, const cuda::Source& source, std::size_t numel) {
  const Layout layout = layout_of(codec, DType::f32);
  const IntegerRules rules = integer_rules(codec);
  std::vector<std::uint8_t> payload(wire_bytes(codec, numel, DType::f32), 0);
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    lanes.emplace_back([&, lane] {
      threadIdx.x = lane;
      std::uint8_t* to = payload.data();
      for (std::size_t at = 0; at < numel; at += layout.granule, to += layout.bytes(layout.granule)) {
        const std::size_t n = std::min(layout.granule, numel - at);
        for (std::size_t b = 0; b < layout.blocks(n); ++b) {
          cuda::encode_block(codec, rules, layout, source, at, n, b, to);
        }
      }
    });
  }
  for (std::thread& lane : lanes) lane.join();
  return payload;
}

bool same_as_the_cpu(const Codec& codec, DType dtype, std::size_t numel) {
  const std::vector<std::uint8_t> x = hostile(numel, dtype);
  const std::uint64_t key = 1234567, offset = (1ULL << 32) - 50;  // the counter's high half changes on the way
  const std::vector<std::uint8_t> payload = encode_on_lanes(codec, {x.data(), dtype, key, offset}, numel);

  const Kernels& kernels = *find_kernels("generic");
  std::vector<std::uint8_t> expected(payload.size(), 0xAA);
  Combine call;
  call.local = x.data();
  call.local_dtype = call.dtype = call.out_dtype = dtype;
  call.numel = numel;
  call.key = key;
  call.offset = offset;
  call.payload_out = expected.data();
  kernels.combine(codec, call);
  if (payload != expected) return false;

  std::vector<float> decoded(numel), wanted(numel);
  kernels.decode(codec, payload.data(), numel, dtype, wanted.data(), DType::f32, false);
  const Layout layout = layout_of(codec, DType::f32);
  for (std::size_t i = 0; i < numel; ++i) {
    const std::size_t g = i / layout.granule, n = std::min(layout.granule, numel - g * layout.granule);
    const std::uint8_t* from = payload.data() + g * layout.bytes(layout.granule);
    decoded[i] = cuda::decode_element(codec, layout, from, n, i % layout.granule);
  }
  return std::memcmp(decoded.data(), wanted.data(), numel * sizeof(float)) == 0;
}

}  // namespace

int main() {
  int cases = 0;
  for (int options = 0; options < 8; ++options) {
    for (const std::uint32_t block : {16U, 32U, 4096U}) {
      for (const std::size_t numel : {std::size_t{1}, std::size_t{33}, std::size_t{1025}}) {
        Codec codec;
        codec.family = Family::integer;
        codec.bits = 8;
        codec.block = block;
        codec.symmetric = options & 1;
        codec.stochastic = options >> 1 & 1;
        codec.scale = static_cast<Scale>(options >> 2 & 1);
        // f32, f16 and bf16 in turn, for every size as for every block.
        const DType dtype = static_cast<DType>((options + cases++) % 3);
        if (!same_as_the_cpu(codec, dtype, numel)) {
          std::printf("FAILED: symmetric %d stochastic %d scale %d block %u dtype %d numel %zu\n", codec.symmetric,
                      codec.stochastic, static_cast<int>(codec.scale), block, static_cast<int>(dtype), numel);
          return EXIT_FAILURE;
        }
      }
    }
  }
  std::printf("%d cases: the same bytes\n", cases);
  return EXIT_SUCCESS;
}
