#include "cuda/families.h"
#include "cuda/launch.cuh"

namespace dtcomm::cuda {

const char* launch(const Call& call, const Mx<E4m3>& family, void* stream) {
  return launch_family(call, family, stream);
}

const char* launch(const Call& call, const Mx<E5m2>& family, void* stream) {
  return launch_family(call, family, stream);
}

const char* launch(const Call& call, const Mx<E2m1>& family, void* stream) {
  return launch_family(call, family, stream);
}

}  // namespace dtcomm::cuda
