// Kernels and copies on several threads of this process. A call is cut where payloads may be cut, so its result has the
// same bits as on one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"
#include "engine/thread_pool.h"

namespace dtcomm {

// A part takes at least about 3 microseconds, several times as long as it takes to share it out.
constexpr std::size_t kMinPartBytes = 32 * 1024;
// More parts than threads: one that is held up then leaves parts to the others.
constexpr std::size_t kPartsPerThread = 2;

// Calls function(begin, end) for ranges that together are [0, size). `bytes` is the work on all of them, in bytes; but
// for the last one, their ends are multiples of `unit`.
template <class Function>
void for_ranges(int threads, std::size_t size, std::size_t bytes, std::size_t unit, const Function& function) {
  std::size_t parts = 1;
  if (threads > 1) {
    const std::size_t most = bytes / kMinPartBytes, wanted = static_cast<std::size_t>(threads) * kPartsPerThread;
    parts = most < wanted ? most : wanted;
  }
  if (parts <= 1) return function(std::size_t{0}, size);
  const std::size_t units = (size + unit - 1) / unit;
  ThreadPool::instance().run(threads, parts, [&](std::size_t part) {
    const std::size_t begin = units * part / parts * unit;
    const std::size_t end = units * (part + 1) / parts * unit;
    if (begin < end) function(begin, end < size ? end : size);
  });
}

// Kernels::combine and Kernels::decode.
void parallel_combine(int threads, const Kernels& kernels, const Codec& codec, const Combine& call);
void parallel_decode(int threads, const Kernels& kernels, const Codec& codec, const std::uint8_t* payload,
                     std::size_t numel, DType dtype, void* out, DType out_dtype, bool stream);
// memcpy.
void parallel_copy(int threads, void* out, const void* in, std::size_t bytes);

}  // namespace dtcomm
