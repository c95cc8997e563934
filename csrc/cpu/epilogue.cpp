#include "cpu/epilogue.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/scalar.h"

namespace dtcomm {

namespace {

constexpr std::size_t kLanes = 16;

// Elements of a tensor as fp32 and back, by the kernels' own casts.
class Cast {
 public:
  Cast(const Kernels& kernels, DType dtype) : kernels_(kernels), dtype_(dtype) {}

  void widen(const void* from, std::size_t at, std::size_t n, float* to) const {
    const auto* bytes = static_cast<const std::uint8_t*>(from) + at * size_of(dtype_);
    if (dtype_ == DType::f32) {
      std::memcpy(to, bytes, n * sizeof(float));
    } else {
      kernels_.decode(Codec{}, bytes, n, dtype_, to, DType::f32, false);
    }
  }

  void narrow(const float* from, std::size_t n, void* to, std::size_t at) const {
    auto* bytes = static_cast<std::uint8_t*>(to) + at * size_of(dtype_);
    if (dtype_ == DType::f32) {
      std::memcpy(bytes, from, n * sizeof(float));
      return;
    }
    Combine call;
    call.local = from;
    call.local_dtype = DType::f32;
    call.numel = n;
    call.out = bytes;
    call.dtype = call.out_dtype = dtype_;
    kernels_.combine(Codec{}, call);
  }

 private:
  const Kernels& kernels_;
  DType dtype_;
};

float sum_of_squares(const float* x, std::size_t n) {
  float lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) lanes[j] += x[i + j] * x[i + j];
  }
  for (std::size_t j = 0; i + j < n; ++j) lanes[j] += x[i + j] * x[i + j];
  for (std::size_t half = kLanes / 2; half != 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

// The runs as one stream of decoded elements.
class Stream {
 public:
  Stream(const Kernels& kernels, const Codec& codec, DType dtype, const std::vector<Run>& runs)
      : kernels_(kernels),
        codec_(codec),
        dtype_(dtype),
        // An uncompressed payload may be cut anywhere: long pieces cost no more and save calls.
        granule_(std::max<std::size_t>(granule_elements(codec), codec.family == Family::none ? 1024 : 1)),
        bytes_(wire_bytes(codec, granule_, dtype)),
        runs_(runs),
        scratch_(granule_) {}

  void read(float* to, std::size_t n) {
    while (n != 0) {
      if (used_ == held_) fill();
      const std::size_t take = std::min(n, held_ - used_);
      std::memcpy(to, scratch_.data() + used_, take * sizeof(float));
      used_ += take;
      to += take;
      n -= take;
    }
  }

 private:
  void fill() {
    while (done_ == runs_[run_].numel) {
      ++run_;
      done_ = 0;
    }
    const Run& run = runs_[run_];
    held_ = std::min(granule_, run.numel - done_);
    used_ = 0;
    kernels_.decode(codec_, run.payload + done_ / granule_ * bytes_, held_, dtype_, scratch_.data(), DType::f32, false);
    done_ += held_;
  }

  const Kernels& kernels_;
  const Codec& codec_;
  DType dtype_;
  std::size_t granule_, bytes_;
  const std::vector<Run>& runs_;
  std::vector<float> scratch_;
  std::size_t run_ = 0, done_ = 0;   // which run, and how much of it is decoded
  std::size_t held_ = 0, used_ = 0;  // of the scratch memory
};

}  // namespace

void epilogue(const Kernels& kernels, const Codec& codec, const std::vector<Run>& runs, const Epilogue& call) {
  std::size_t numel = 0;
  for (const Run& run : runs) numel += run.numel;
  const std::size_t features = call.features, rows = features ? numel / features : 0;
  const Cast cast(kernels, call.dtype);
  Stream decoded(kernels, codec, call.dtype, runs);
  std::vector<float> row(features), other(features), bias, weight;
  if (call.bias) {
    bias.resize(features);
    cast.widen(call.bias, 0, features, bias.data());
  }
  if (call.weight) {
    weight.resize(features);
    cast.widen(call.weight, 0, features, weight.data());
  }
  for (std::size_t at = 0; at < rows * features; at += features) {
    decoded.read(row.data(), features);
    if (call.bias) {
      for (std::size_t i = 0; i < features; ++i) row[i] += bias[i];
    }
    if (call.residual) {
      cast.widen(call.residual, at, features, other.data());
      for (std::size_t i = 0; i < features; ++i) row[i] += other[i];
    }
    if (call.bias || call.residual) {
      for (float& x : row) x = canonical(x);
    }
    cast.narrow(row.data(), features, call.out, at);
    if (!call.normed) continue;
    if (call.dtype != DType::f32) cast.widen(call.out, at, features, row.data());
    const float mean = sum_of_squares(row.data(), features) / static_cast<float>(features);
    const float scale = 1.0f / std::sqrt(mean + call.eps);
    for (std::size_t i = 0; i < features; ++i) row[i] *= scale;
    if (call.weight) {
      for (std::size_t i = 0; i < features; ++i) row[i] *= weight[i];
    }
    cast.narrow(row.data(), features, call.normed, at);
  }
}

}  // namespace dtcomm
