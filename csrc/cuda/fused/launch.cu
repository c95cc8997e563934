#include "cuda/fused/launch_table.h"
#include "cuda/fused/plan.h"

namespace dtcomm::cuda {

std::string launch(const FusedCall& call, void* stream) {
  if (std::string reason = why_not(call); !reason.empty()) return reason;
  const char* error = with_fused_family(call.codec, call.dtype, [&](const auto& family) -> const char* {
    if (call.algorithm == Algorithm::program) {
      for (const Step& step : plan_steps(call)) {
        if (const char* refused = queue(step, family, stream)) return refused;
      }
      return nullptr;
    }
    const Fused fused = plan_fused(call);
    return fused.sections == 0 ? nullptr : queue(fused, family, stream);
  });
  return error ? std::string("CUDA: ") + error : "";
}

}  // namespace dtcomm::cuda
