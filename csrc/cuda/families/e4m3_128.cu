#include "cuda/families.h"
#include "cuda/launch.cuh"

namespace dtcomm::cuda {

const char* launch(const Call& call, const Float8<E4m3, 16, true>& family, void* stream) {
  return launch_family(call, family, stream);
}

}  // namespace dtcomm::cuda
