#include "cuda/fused/launch.cuh"

namespace dtcomm::cuda {

const char* queue(const Fused& fused, const Cast<DType::bf16>& family, void* stream) {
  return queue_family(fused, family, stream);
}

const char* queue(const Step& step, const Cast<DType::bf16>& family, void* stream) {
  return queue_family(step, family, stream);
}

}  // namespace dtcomm::cuda
