#include "cuda/kernels.h"

#include <cuda_runtime.h>

#include "codec/layout.h"
#include "cuda/elements.cuh"
#include "cuda/integer.cuh"

namespace dtcomm::cuda {

namespace {

constexpr unsigned kThreads = 256;
constexpr std::size_t kMostBlocks = 1u << 20;  // of a grid: every kernel strides over what is left

unsigned grid(std::size_t work) {
  return static_cast<unsigned>(work < 1 ? 1 : work > kMostBlocks ? kMostBlocks : work);
}

__device__ std::size_t first_index() { return blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; }

__device__ std::size_t stride() { return gridDim.x * static_cast<std::size_t>(blockDim.x); }

__device__ std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

// Granules of a cast are runs of elements, so a payload is one run, `padded` elements of the wire dtype long.
__global__ void encode_cast(DType wire, const void* x, DType dtype, std::size_t numel, std::size_t padded, void* to) {
  for (std::size_t i = first_index(); i < padded; i += stride()) {
    store(wire, i < numel ? load(dtype, x, i) : 0.0f, to, i);
  }
}

__global__ void decode_cast(DType wire, const void* from, std::size_t numel, void* out, DType out_dtype) {
  for (std::size_t i = first_index(); i < numel; i += stride()) store(out_dtype, load(wire, from, i), out, i);
}

__global__ void encode_integer(Codec codec, Source source, std::size_t numel, std::uint8_t* payload) {
  const Layout layout = layout_of(codec, DType::f32);
  const IntegerRules rules = integer_rules(codec);
  const std::size_t granules = (numel + layout.granule - 1) / layout.granule;
  for (std::size_t g = blockIdx.x; g < granules; g += gridDim.x) {
    const std::size_t granule = g * layout.granule, n = smaller(layout.granule, numel - granule);
    std::uint8_t* to = payload + g * layout.bytes(layout.granule);
    for (std::size_t b = threadIdx.x / kWarp; b < layout.blocks(n); b += blockDim.x / kWarp) {
      encode_block(codec, rules, layout, source, granule, n, b, to);
    }
    const std::size_t pad = layout.used(n) + threadIdx.x;
    if (pad < layout.bytes(n)) to[pad] = 0;
  }
}

__global__ void decode_integer(Codec codec, const std::uint8_t* payload, std::size_t numel, void* out,
                               DType out_dtype) {
  const Layout layout = layout_of(codec, DType::f32);
  const std::size_t bytes = layout.bytes(layout.granule);
  for (std::size_t i = first_index(); i < numel; i += stride()) {
    const std::size_t g = i / layout.granule, granule = g * layout.granule;
    const std::size_t n = smaller(layout.granule, numel - granule);
    store(out_dtype, decode_element(codec, layout, payload + g * bytes, n, i - granule), out, i);
  }
}

const char* queued() {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

DType wire_of(const Codec& codec, DType dtype) {
  if (codec.family == Family::fp16) return DType::f16;
  return codec.family == Family::bf16 ? DType::bf16 : dtype;
}

}  // namespace

const char* encode(const Codec& codec, const void* x, DType dtype, std::size_t numel, std::uint64_t key,
                   std::uint64_t offset, std::uint8_t* payload, void* stream) {
  if (numel == 0) return nullptr;
  auto* queue = static_cast<cudaStream_t>(stream);
  const std::size_t bytes = wire_bytes(codec, numel, dtype);
  if (codec.family == Family::none) {
    const std::size_t used = numel * size_of(dtype);
    cudaMemcpyAsync(payload, x, used, cudaMemcpyDeviceToDevice, queue);
    cudaMemsetAsync(payload + used, 0, bytes - used, queue);
  } else if (codec.family == Family::integer) {
    const std::size_t granule = granule_elements(codec);
    encode_integer<<<grid((numel + granule - 1) / granule), kThreads, 0, queue>>>(codec, Source{x, dtype, key, offset},
                                                                                  numel, payload);
  } else {
    const DType wire = wire_of(codec, dtype);
    const std::size_t padded = bytes / size_of(wire);
    encode_cast<<<grid((padded + kThreads - 1) / kThreads), kThreads, 0, queue>>>(wire, x, dtype, numel, padded,
                                                                                  payload);
  }
  return queued();
}

const char* decode(const Codec& codec, const std::uint8_t* payload, std::size_t numel, DType dtype, void* out,
                   DType out_dtype, void* stream) {
  if (numel == 0) return nullptr;
  auto* queue = static_cast<cudaStream_t>(stream);
  const unsigned blocks = grid((numel + kThreads - 1) / kThreads);
  if (codec.family == Family::none && dtype == out_dtype) {
    cudaMemcpyAsync(out, payload, numel * size_of(dtype), cudaMemcpyDeviceToDevice, queue);
  } else if (codec.family == Family::integer) {
    decode_integer<<<blocks, kThreads, 0, queue>>>(codec, payload, numel, out, out_dtype);
  } else {
    decode_cast<<<blocks, kThreads, 0, queue>>>(wire_of(codec, dtype), payload, numel, out, out_dtype);
  }
  return queued();
}

}  // namespace dtcomm::cuda
