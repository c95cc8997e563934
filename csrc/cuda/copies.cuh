// Copies of bytes: payloads of codec none that are a tensor's own bytes, and their decoding. Many in one launch.
#pragma once

#include <cstddef>

#include "cuda/make_params.h"
#include "cuda/vec8.cuh"

namespace dtcomm::cuda {

constexpr unsigned kCopyBytes = 16;  // of a thread

struct Copy {
  const std::uint8_t* from;
  std::uint8_t* to;
  std::uint64_t bytes, padded;  // zeros fill the rest up to `padded`
  unsigned unit;                // bytes of an access; addresses and `bytes` are multiples
};

template <class Word>
DTCOMM_DEVICE void copy_words(const Copy& copy, std::uint64_t at) {
  DTCOMM_UNROLL
  for (unsigned i = 0; i < kCopyBytes; i += sizeof(Word)) {
    if (at + i >= copy.padded) return;
    const bool present = at + i < copy.bytes;
    *reinterpret_cast<Word*>(copy.to + at + i) = present ? *reinterpret_cast<const Word*>(copy.from + at + i) : Word(0);
  }
}

// The part of a thread, which begins at byte `at`.
DTCOMM_DEVICE void copy_part(const Copy& copy, std::uint64_t at) {
  if (at >= copy.padded) return;
  if (copy.unit == kCopyBytes) {
    store_quad(load_quad(copy.from + at), copy.to + at);
  } else if (copy.unit == 4) {
    copy_words<Word32>(copy, at);
  } else if (copy.unit == 2) {
    copy_words<Word16>(copy, at);
  } else {
    copy_words<std::uint8_t>(copy, at);
  }
}

inline unsigned tiles(const Copy& copy, unsigned threads) {
  return static_cast<unsigned>((copy.padded + threads * kCopyBytes - 1) / (threads * kCopyBytes));
}

// use(copy) for each copy that a call of `single_verbatim_term` `from` takes.
template <class Use>
void for_each_copy(const Combine& call, const void* from, const Use& use) {
  const std::uint64_t bytes = call.numel * size_of(call.dtype);
  const auto add = [&](void* to, std::uint64_t padded) {
    if (!to || to == from) return;
    const auto addresses = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) | bytes;
    unsigned unit = kCopyBytes;
    while (addresses % unit) unit /= 2;
    use(Copy{static_cast<const std::uint8_t*>(from), static_cast<std::uint8_t*>(to), bytes, padded,
             unit == 8 ? 4 : unit});
  };
  add(call.payload_out, (bytes + kAlign - 1) / kAlign * kAlign);
  add(call.out, bytes);
}

}  // namespace dtcomm::cuda
