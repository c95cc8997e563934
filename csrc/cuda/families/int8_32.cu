#include "cuda/families.h"
#include "cuda/launch.cuh"

namespace dtcomm::cuda {

const char* launch(const Call& call, const Integer<8, 4, true>& family, void* stream) {
  return launch_family(call, family, stream);
}

}  // namespace dtcomm::cuda
