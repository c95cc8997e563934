#include "cpu/epilogue.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/float_bits.h"
#include "codec/minifloat.h"

namespace dtcomm {

namespace {

constexpr std::size_t kLanes = 16;

// Reads elements of a tensor as fp32 and writes them back, with the casts of the kernels.
class Cast {
 public:
  Cast(const Kernels& kernels, DType dtype) : kernels_(kernels), dtype_(dtype) {}

  // The elements as fp32: their own memory if they are fp32, else `scratch`.
  const float* view(const void* from, std::size_t at, std::size_t n, float* scratch) const {
    const auto* bytes = static_cast<const std::uint8_t*>(from) + at * size_of(dtype_);
    if (dtype_ == DType::f32) return reinterpret_cast<const float*>(bytes);
    kernels_.decode(Codec{}, bytes, n, dtype_, scratch, DType::f32, false);
    return scratch;
  }

  void narrow(const float* from, std::size_t n, void* to, std::size_t at) const {
    auto* bytes = static_cast<std::uint8_t*>(to) + at * size_of(dtype_);
    if (dtype_ == DType::f32) {
      if (static_cast<const void*>(from) != bytes) std::memcpy(bytes, from, n * sizeof(float));
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

std::uint8_t nearest_int8(float t) {
  const float clipped = std::min(std::max(t, -127.0f), 127.0f);
  const float large = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even
  return static_cast<std::uint8_t>(static_cast<std::int8_t>((clipped + large) - large));
}

// The codes of `n` elements that share a scale; returns the scale.
float quantize(const float* x, std::size_t n, bool to_int8, std::uint8_t* codes) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(x[i]));
  if (largest >= kInfinity32) {
    std::memset(codes, to_int8 ? 0 : E4m3::kTop + 1, n);
    return float_of(kNaN32);
  }
  const float scale = float_of(largest) / (to_int8 ? 127.0f : E4m3::kLargest);
  if (scale == 0.0f) {
    std::memset(codes, 0, n);
  } else if (to_int8) {
    for (std::size_t i = 0; i < n; ++i) codes[i] = nearest_int8(x[i] / scale);
  } else {
    for (std::size_t i = 0; i < n; ++i) codes[i] = static_cast<std::uint8_t>(nearest_minifloat<E4m3>(x[i] / scale));
  }
  return scale;
}

// The runs as one stream of decoded elements.
class DecodedRuns {
 public:
  DecodedRuns(const Kernels& kernels, const Codec& codec, DType dtype, const std::vector<PayloadRun>& runs)
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
    const PayloadRun& run = runs_[run_];
    held_ = std::min(granule_, run.numel - done_);
    used_ = 0;
    kernels_.decode(codec_, run.payload + done_ / granule_ * bytes_, held_, dtype_, scratch_.data(), DType::f32, false);
    done_ += held_;
  }

  const Kernels& kernels_;
  const Codec& codec_;
  DType dtype_;
  std::size_t granule_, bytes_;
  const std::vector<PayloadRun>& runs_;
  std::vector<float> scratch_;
  std::size_t run_ = 0, done_ = 0;   // which run, and how much of it is decoded
  std::size_t held_ = 0, used_ = 0;  // of the scratch memory
};

// The arithmetic on a row or a part of one.
class Rows {
 public:
  Rows(const Kernels& kernels, const Epilogue& call)
      : call_(call), cast_(kernels, call.dtype), scratch_(call.features), other_(call.features) {
    if (call.bias) bias_ = widened(call.bias);
    if (call.weight) weight_ = widened(call.weight);
    if (call.codes && !call.norm_out) norm_.resize(call.features * size_of(call.dtype));
  }

  // To `n` sums in `row`, which are those at `at` of the tensor, and into `out`, where they may lie.
  void add(float* row, std::size_t at, std::size_t n) const {
    const float* const bias = call_.bias ? bias_.data() + at % call_.features : nullptr;
    const float* const addend = call_.addend ? cast_.view(call_.addend, at, n, other_.data()) : nullptr;
    if (bias && addend) {
      for (std::size_t i = 0; i < n; ++i) row[i] = canonical((row[i] + bias[i]) + addend[i]);
    } else if (const float* const term = bias ? bias : addend) {
      for (std::size_t i = 0; i < n; ++i) row[i] = canonical(row[i] + term[i]);
    }
    cast_.narrow(row, n, call_.out, at);
  }

  // Takes the norm of the row that starts at element `at` of `out`.
  void norm(std::size_t at) const {
    const std::size_t features = call_.features;
    const float* const row = cast_.view(call_.out, at, features, scratch_.data());
    const float mean = sum_of_squares(row, features) / static_cast<float>(features);
    const float scale = 1.0f / std::sqrt(mean + call_.eps);
    float* const to = other_.data();
    for (std::size_t i = 0; i < features; ++i) to[i] = row[i] * scale;
    if (call_.weight) {
      for (std::size_t i = 0; i < features; ++i) to[i] *= weight_[i];
    }
    void* const norm = call_.norm_out ? call_.norm_out : norm_.data();
    const std::size_t norm_at = call_.norm_out ? at : 0;
    cast_.narrow(to, features, norm, norm_at);
    if (!call_.codes) return;
    const float* const rounded = cast_.view(norm, norm_at, features, to);
    const std::size_t groups = call_.groups, size = features / groups;
    for (std::size_t group = 0; group < groups; ++group) {
      const std::size_t first = group * size;
      call_.scales[at / features * groups + group] =
          quantize(rounded + first, size, call_.to_int8, call_.codes + at + first);
    }
  }

  // The sums at `at` of `out`, to be written.
  float* sums(std::size_t at, std::size_t n) const {
    if (call_.dtype == DType::f32) return static_cast<float*>(call_.out) + at;
    cast_.view(call_.out, at, n, scratch_.data());
    return scratch_.data();
  }

 private:
  std::vector<float> widened(const void* from) const {
    std::vector<float> to(call_.features);
    const float* const view = cast_.view(from, 0, call_.features, to.data());
    return view == to.data() ? to : std::vector<float>(view, view + call_.features);
  }

  const Epilogue& call_;
  Cast cast_;
  mutable std::vector<float> scratch_, other_;
  mutable std::vector<std::uint8_t> norm_;  // a row of the norm where only its codes are wanted
  std::vector<float> bias_, weight_;
};

}  // namespace

void epilogue(const Kernels& kernels, const Codec& codec, const std::vector<PayloadRun>& runs, const Epilogue& call) {
  std::size_t numel = 0;
  for (const PayloadRun& run : runs) numel += run.numel;
  const std::size_t features = call.features, rows = features ? numel / features : 0;
  DecodedRuns decoded(kernels, codec, call.dtype, runs);
  const Rows each(kernels, call);
  std::vector<float> row(features);
  for (std::size_t at = 0; at < rows * features; at += features) {
    decoded.read(row.data(), features);
    each.add(row.data(), at, features);
    if (call.has_norm()) each.norm(at);
  }
}

struct StreamedEpilogue::State {
  State(const Kernels& kernels, const Epilogue& call) : rows(kernels, call) {}
  Rows rows;
};

StreamedEpilogue::StreamedEpilogue(const Epilogue& call, std::size_t numel)
    : call_(call), missing_(call.has_norm() && call.features ? numel / call.features : 0, call.features) {}

StreamedEpilogue::~StreamedEpilogue() = default;

void StreamedEpilogue::arrived(const Kernels& kernels, std::size_t at, std::size_t n) {
  if (!state_) state_ = std::make_unique<State>(kernels, call_);
  const std::size_t features = call_.features;
  while (n != 0) {
    const std::size_t row = at / features, take = std::min(n, features - at % features);
    if (call_.bias || call_.addend) state_->rows.add(state_->rows.sums(at, take), at, take);
    if (call_.has_norm()) {
      missing_[row] -= take;
      if (missing_[row] == 0) {
        state_->rows.norm(row * features);
        missing_[row] = features;
      }
    }
    at += take;
    n -= take;
  }
}

}  // namespace dtcomm
