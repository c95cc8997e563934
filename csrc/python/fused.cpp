// What `_C` knows of fused CUDA collectives: limits, and the layout of the memory that peers reach. Available without a
// GPU, so that ranks can agree on them.
#include "python/bindings.h"
#include "python/fused_plan.h"

namespace dtcomm::python {

namespace py = pybind11;

void bind_fused(py::module_& module) {
  module.attr("MOST_RANKS") = cuda::kMostRanks;
  module.attr("MOST_BLOCKS") = cuda::kMostBlocks;
  module.attr("MISSING_OFFSET") = cuda::kMissingOffset;
  module.attr("PAD_BYTES") = cuda::kPadBytes;
  module.def(
      "fused_bytes", [](int ranks, const RoomNumbers& room) { return cuda::memory_bytes(room_of(ranks, room)); },
      py::arg("ranks"), py::arg("room"),
      "Bytes of memory that each rank must make reachable for its peers; the signal pad at its start begins as zeros.");
  module.def(
      "fusible", [](const py::bytes& codec, int dtype) { return cuda::fusible(codec_of(codec), dtype_of(dtype)); },
      py::arg("codec"), py::arg("dtype"),
      "Whether there are fused kernels that encode tensors of `dtype` with `codec`.");
}

}  // namespace dtcomm::python
