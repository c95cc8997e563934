#include "cuda/families.h"
#include "cuda/launch.cuh"

namespace dtcomm::cuda {

const char* launch(const Call& call, const Cast<DType::f32>& family, void* stream) {
  return launch_family(call, family, stream);
}

}  // namespace dtcomm::cuda
