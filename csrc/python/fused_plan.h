// The class FusedPlan of the modules `_cuda` and `_emulator`: a fused collective, planned once. Its method `launch`
// takes the addresses of a call's tensors and differs between the two.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/fused/plan.h"
#include "python/arguments.h"

namespace dtcomm::python {

// A PeerBufferLayout: blocks, bytes of a slot.
using LayoutNumbers = std::tuple<unsigned, std::uint64_t>;
// The addresses of a rank's input, output, residual, bias and addend; 0: none.
using TensorAddresses = std::array<std::uintptr_t, 5>;

inline cuda::PeerBufferLayout buffer_layout_of(int ranks, const LayoutNumbers& numbers) {
  cuda::PeerBufferLayout layout;
  layout.ranks = ranks;
  std::tie(layout.blocks, layout.slot_bytes) = numbers;
  return layout;
}

inline std::unique_ptr<cuda::FusedPlan> make_fused_plan(int collective, int algorithm, const pybind11::bytes& codec,
                                                        int dtype, std::size_t numel, std::vector<std::size_t> splits,
                                                        int op, std::size_t divisor, bool encodes_own, bool rounds_sum,
                                                        int ranks, int first_rank, int local_ranks,
                                                        const LayoutNumbers& buffer_layout, unsigned blocks,
                                                        std::uint32_t section, std::uint64_t timeout_ns,
                                                        const std::vector<std::uintptr_t>& memory) {
  if (collective < 0 || collective > static_cast<int>(cuda::Collective::all_to_all)) {
    throw pybind11::value_error("collective: unknown number");
  }
  if (algorithm < 0 || algorithm > static_cast<int>(cuda::Algorithm::one_shot)) {
    throw pybind11::value_error("algorithm: unknown number");
  }
  if (op < 0 || op > static_cast<int>(ReduceOp::max)) throw pybind11::value_error("op: unknown number");
  if (ranks < 2 || ranks > cuda::kMaxRanks) throw pybind11::value_error("ranks: must be 2 to 8");
  if (memory.size() != static_cast<std::size_t>(ranks)) throw pybind11::value_error("memory: one address a rank");
  cuda::FusedSpec spec;
  spec.collective = static_cast<cuda::Collective>(collective);
  spec.algorithm = static_cast<cuda::Algorithm>(algorithm);
  spec.codec = codec_of(codec);
  spec.dtype = dtype_of(dtype);
  spec.numel = numel;
  spec.splits = std::move(splits);
  spec.op = static_cast<ReduceOp>(op);
  spec.divisor = divisor;
  spec.encodes_own = encodes_own;
  spec.rounds_sum = rounds_sum;
  spec.ranks = ranks;
  spec.first_rank = first_rank;
  spec.local_ranks = local_ranks;
  spec.buffer_layout = buffer_layout_of(ranks, buffer_layout);
  spec.blocks = blocks;
  spec.section = section;
  spec.timeout_ns = timeout_ns;
  for (std::size_t rank = 0; rank < memory.size(); ++rank) {
    if (memory[rank] % 16 != 0) throw pybind11::value_error("memory: must be aligned to 16");
    spec.peers[rank] = cuda::peer_at(pointer<std::uint8_t>(memory[rank]));
  }
  return std::make_unique<cuda::FusedPlan>(std::move(spec));
}

// The tensors of a launch. Raises ValueError where the plan cannot run with them.
inline cuda::LaunchTensors launch_tensors(const cuda::FusedPlan& plan, const std::vector<TensorAddresses>& addresses,
                                          std::size_t features) {
  if (addresses.size() != static_cast<std::size_t>(plan.spec().local_ranks)) {
    throw pybind11::value_error("tensors: the addresses of each local rank");
  }
  cuda::LaunchTensors tensors;
  tensors.features = features;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const auto& [input, output, residual, bias, addend] = addresses[i];
    tensors.ranks[i] = {pointer<const void>(input), pointer<void>(output), pointer<float>(residual),
                        pointer<const void>(bias), pointer<const void>(addend)};
  }
  raise_if_invalid(plan.check(tensors));
  return tensors;
}

inline pybind11::class_<cuda::FusedPlan> bind_fused_plan(pybind11::module_& module) {
  namespace py = pybind11;
  return py::class_<cuda::FusedPlan>(
             module, "FusedPlan", py::module_local(),
             "A collective of one shape on one memory, validated and planned once. csrc/cuda/fused/collective.h "
             "describes the fields. Raises ValueError, naming the field, where there is no kernel for it.")
      .def(py::init(&make_fused_plan), py::arg("collective"), py::arg("algorithm"), py::arg("codec"), py::arg("dtype"),
           py::arg("numel"), py::arg("splits"), py::arg("op"), py::arg("divisor"), py::arg("encodes_own"),
           py::arg("rounds_sum"), py::arg("ranks"), py::arg("first_rank"), py::arg("local_ranks"),
           py::arg("buffer_layout"), py::arg("blocks"), py::arg("section"), py::arg("timeout_ns"), py::arg("memory"));
}

}  // namespace dtcomm::python
