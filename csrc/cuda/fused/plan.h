// FusedPlan: a fused collective that has been validated once, with the parameters of its kernel launches. Host code,
// for launches on a device and in the emulator.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/chunk_layout.h"
#include "cuda/fused/program_step.cuh"
#include "cuda/make_params.h"

namespace dtcomm::cuda {

class FusedPlan {
 public:
  // Throws std::invalid_argument, naming the field, where there is no kernel for the specification.
  explicit FusedPlan(FusedSpec spec);

  const FusedSpec& spec() const { return spec_; }

  // Whether the collective can run with these tensors.
  Status check(const LaunchTensors& tensors) const;

  // Calls use(params) with the FusedParams or StepParams of each kernel, in order and with the addresses of these
  // tensors, until one returns an error, which is returned. `use` must copy what it keeps: the next call changes the
  // parameters. check() must have been OK.
  template <class Use>
  Status for_each_kernel(const LaunchTensors& tensors, const Use& use) {
    const std::lock_guard lock(mutex_);
    const Prepared& prepared = prepare(tensors);
    for (const FusedParams& params : prepared.fused) {
      if (Status status = use(params); !status.ok()) return status;
    }
    for (const StepParams& params : prepared.steps) {
      if (Status status = use(params); !status.ok()) return status;
    }
    return Status();
  }

 private:
  // The parameters for one choice of the optional tensors, which decides what kernels do.
  struct Prepared {
    std::uint64_t present;           // a bit for each tensor of each rank
    std::vector<FusedParams> fused;  // at most one
    std::vector<StepParams> steps;   // of a program
  };

  const Prepared& prepare(const LaunchTensors& tensors);

  FusedSpec spec_;
  bool reads_input_[kMaxRanks] = {}, writes_output_[kMaxRanks] = {};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Prepared>> prepared_;
};

// --- parts of a plan (plan.cpp, program_plan.cpp) ---

// The parameters of a direct algorithm, and those of a program's launches, for tensors that are present as these are.
FusedParams make_fused_params(const FusedSpec& spec, const LaunchTensors& tensors);
std::vector<StepParams> make_step_params(const FusedSpec& spec, const LaunchTensors& tensors);
Status check_programs(const FusedSpec& spec);
// How the chunks of a collective's programs lie in the caller's tensors.
inline Geometry geometry_of(Collective collective) {
  switch (collective) {
    case Collective::reduce_scatter:
      return Geometry::scatter;
    case Collective::all_gather:
      return Geometry::gather;
    case Collective::all_to_all:
      return Geometry::exchange;
    default:
      return Geometry::whole;
  }
}

// Whether some local rank sums, and whether the i-th of them reads its input.
bool has_sums(const FusedSpec& spec);
bool reads_input(const FusedSpec& spec, int i);

// The parameters of a kernel over a whole tensor of a rank, of which every task of a program takes a part.
KernelParams whole_tensor_params(const FusedSpec& spec, const RankTensors& tensors);

// Granules of a chunk that a block takes at a time.
std::uint32_t section_granules(const FusedSpec& spec, const Layout& layout);

// use(family) with the family of a fusible codec.
template <class Use>
auto with_fused_family(const Codec& codec, DType dtype, const Use& use) {
  using Result = decltype(use(Cast<DType::f32>()));
  return with_family(codec, dtype, [&](const auto& family) -> Result {
    if constexpr (std::decay_t<decltype(family)>::kSpecialized) return use(family);
    return Result();
  });
}

}  // namespace dtcomm::cuda
