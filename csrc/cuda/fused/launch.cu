#include "cuda/fused/plan.h"
#include "cuda/fused/queue.h"

namespace dtcomm::cuda {

std::string launch(const FusedCall& call, void* stream) {
  if (std::string reason = why_not(call); !reason.empty()) return reason;
  const Fused fused = plan_fused(call);
  if (fused.sections == 0) return "";
  const char* error = with_fused_family(
      call.codec, call.dtype, [&](const auto& family) -> const char* { return queue(fused, family, stream); });
  return error ? std::string("CUDA: ") + error : "";
}

}  // namespace dtcomm::cuda
