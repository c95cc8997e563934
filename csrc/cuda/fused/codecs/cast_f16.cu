#include "cuda/fused/launch.cuh"

namespace dtcomm::cuda {

const char* queue(const Fused& fused, const Cast<DType::f16>& family, void* stream) {
  return queue_family(fused, family, stream);
}

}  // namespace dtcomm::cuda
