// Limits of fused CUDA collectives and the layout of the memory that peers reach. They are part of `_C`, so that ranks
// without a GPU can agree on them.
#include "python/bindings.h"
#include "python/fused_plan.h"

namespace dtcomm::python {

namespace py = pybind11;

void bind_fused(py::module_& module) {
  module.attr("MAX_RANKS") = cuda::kMaxRanks;
  module.attr("MAX_BLOCKS") = cuda::kMaxThreadBlocks;
  module.attr("MISSING_OFFSET") = cuda::kMissingOffset;
  module.attr("PAD_BYTES") = cuda::kPadBytes;
  module.def(
      "fused_bytes",
      [](int ranks, const LayoutNumbers& layout) { return cuda::memory_bytes(buffer_layout_of(ranks, layout)); },
      py::arg("ranks"), py::arg("buffer_layout"),
      "Bytes of memory that each rank must make reachable for its peers; the signal pad at its start begins as zeros.");
  module.def(
      "fusible", [](const py::bytes& codec, int dtype) { return cuda::fusible(codec_of(codec), dtype_of(dtype)); },
      py::arg("codec"), py::arg("dtype"),
      "Whether there are fused kernels that encode tensors of `dtype` with `codec`.");
}

}  // namespace dtcomm::python
