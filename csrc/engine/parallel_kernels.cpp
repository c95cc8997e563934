#include "engine/parallel_kernels.h"

#include <cstring>
#include <type_traits>
#include <vector>

#include "codec/layout.h"

namespace dtcomm {
namespace {

// Elements (or bytes) at whose multiples every payload may be cut: granules are powers of two, and none is larger.
constexpr std::size_t kUnit = kLargestBlock;
static_assert(kUnit % kGranule == 0 && kUnit % kSparseGranule == 0, "a unit is whole granules");

template <class Pointer>
Pointer advanced(Pointer pointer, std::size_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::uint8_t, std::uint8_t>;
  return pointer ? reinterpret_cast<Pointer>(reinterpret_cast<Byte*>(pointer) + bytes) : nullptr;
}

// The elements [begin, end) of a call; `payloads` holds the pointers of the result.
Combine part_of(const Codec& codec, const Combine& call, std::size_t begin, std::size_t end,
                std::vector<const std::uint8_t*>& payloads) {
  const std::size_t payload_at = wire_bytes(codec, begin, call.dtype);
  for (int i = 0; i < call.count; ++i) payloads.push_back(call.payloads[i] + payload_at);
  Combine part = call;
  part.payloads = payloads.data();
  part.local = advanced(call.local, begin * size_of(call.local_dtype));
  part.residual_in = advanced(call.residual_in, begin * sizeof(float));
  part.residual_out = advanced(call.residual_out, begin * sizeof(float));
  part.numel = end - begin;
  part.offset = call.offset + begin;
  part.payload_out = advanced(call.payload_out, payload_at);
  part.out = advanced(call.out, begin * size_of(call.out_dtype));
  return part;
}

}  // namespace

void parallel_combine(int threads, const Kernels& kernels, const Codec& codec, const Combine& call) {
  for_ranges(threads, call.numel, call.numel * size_of(call.dtype), kUnit, [&](std::size_t begin, std::size_t end) {
    if (end - begin == call.numel) return kernels.combine(codec, call);
    std::vector<const std::uint8_t*> payloads;
    payloads.reserve(static_cast<std::size_t>(call.count));
    kernels.combine(codec, part_of(codec, call, begin, end, payloads));
  });
}

void parallel_decode(int threads, const Kernels& kernels, const Codec& codec, const std::uint8_t* payload,
                     std::size_t numel, DType dtype, void* out, DType out_dtype, bool stream) {
  for_ranges(threads, numel, numel * size_of(dtype), kUnit, [&](std::size_t begin, std::size_t end) {
    kernels.decode(codec, payload + wire_bytes(codec, begin, dtype), end - begin, dtype,
                   advanced(out, begin * size_of(out_dtype)), out_dtype, stream);
  });
}

void parallel_copy(int threads, void* out, const void* in, std::size_t bytes) {
  for_ranges(threads, bytes, bytes, kUnit, [&](std::size_t begin, std::size_t end) {
    std::memcpy(advanced(out, begin), advanced(in, begin), end - begin);
  });
}

}  // namespace dtcomm
