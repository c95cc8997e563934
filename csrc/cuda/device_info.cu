#include "cuda/device_info.h"

#include <cuda_runtime_api.h>

namespace dtcomm::cuda {

Platform platform() {
  Platform result;
  cudaDriverGetVersion(&result.driver);
  cudaRuntimeGetVersion(&result.runtime);
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    result.error = cudaGetErrorString(status);
    (void)cudaGetLastError();  // or the next, unrelated call would report it
    return result;
  }
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) continue;
    result.devices.push_back({index, properties.name, properties.major, properties.minor, properties.totalGlobalMem,
                              properties.multiProcessorCount});
  }
  return result;
}

}  // namespace dtcomm::cuda
