// FusedPlan: a fused collective that has been validated once, with the parameters of its kernel launches. Host code,
// for launches on a device and in the emulator.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/fused/pipeline.cuh"
#include "cuda/make_params.h"

namespace dtcomm::cuda {

class FusedPlan {
 public:
  // Throws std::invalid_argument, naming the field, where there is no kernel for the specification.
  explicit FusedPlan(FusedSpec spec);

  const FusedSpec& spec() const { return spec_; }

  // Whether the collective can run with these tensors.
  Status check(const LaunchTensors& tensors) const;

  // Calls use(params) with the parameters of the kernel and the addresses of these tensors, and returns its status; not
  // if there is nothing to do. `use` must copy what it keeps: the next call changes the parameters. check() must have
  // been OK.
  template <class Use>
  Status with_params(const LaunchTensors& tensors, const Use& use) {
    const std::lock_guard lock(mutex_);
    const FusedParams& params = prepare(tensors);
    return params.sections ? use(params) : Status();
  }

 private:
  // The parameters for one choice of the optional tensors, which decides what kernels do.
  struct Prepared {
    std::uint64_t present;  // a bit for each tensor of each rank
    FusedParams params;
  };

  const FusedParams& prepare(const LaunchTensors& tensors);

  FusedSpec spec_;
  bool reads_input_[kMaxRanks] = {}, writes_output_[kMaxRanks] = {};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Prepared>> prepared_;
};

// use(family) with the family of a fusible codec; else Result(). The kernels take long to compile, so one serves blocks
// of every length that a warp holds.
template <class Use>
auto with_fused_family(const Codec& codec, DType dtype, const Use& use) {
  using Result = decltype(use(Cast<DType::f32>()));
  if (codec.stochastic) return Result();  // there are no random numbers in fused kernels
  if (is_cast(codec)) {
    const DType wire = wire_of(codec, dtype);
    if (wire == DType::f32) return use(Cast<DType::f32>());
    // Elements of other types are only moved, which any kernel does.
    return wire == DType::f16 ? use(Cast<DType::f16>()) : use(Cast<DType::bf16>());
  }
  if (codec.family == Family::float8 && codec.element == Element::e4m3 && fits_warp(codec)) {
    return use(blocks_of<Float8<E4m3, 0, true>>(codec, float8_rules(codec)));
  }
  if (codec.family == Family::integer && is_plain(codec) && fits_warp(codec)) {
    const IntegerRules rules = integer_rules(codec);
    if (codec.bits == 8) return use(blocks_of<Integer<8, 0, IntegerOptions::plain>>(codec, rules));
    if (codec.bits == 4) return use(blocks_of<Integer<4, 0, IntegerOptions::plain>>(codec, rules));
  }
  return Result();
}

}  // namespace dtcomm::cuda
