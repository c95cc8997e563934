#include "cuda/fused/launch_table.h"
#include "cuda/fused/plan.h"

namespace dtcomm::cuda {

Status launch(FusedPlan& plan, const LaunchTensors& tensors, void* stream) {
  return with_fused_family(plan.spec().codec, plan.spec().dtype, [&](const auto& family) -> Status {
    return plan.with_params(tensors, [&](const FusedParams& params) { return enqueue(params, family, stream); });
  });
}

}  // namespace dtcomm::cuda
