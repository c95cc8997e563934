#include "cuda/families.h"
#include "cuda/launch.cuh"

namespace dtcomm::cuda {

const char* launch(const Call& call, const Float8<E4m3, 0, false>& family, void* stream) {
  return launch_family(call, family, stream);
}

const char* launch(const Call& call, const Float8<E5m2, 0, false>& family, void* stream) {
  return launch_family(call, family, stream);
}

}  // namespace dtcomm::cuda
