// A fused collective as Python states it: everything but the tensors once, the tensors at each call. The emulator (_C)
// and the device (_cuda) take the same statement.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/fused/collective.h"
#include "python/arguments.h"

namespace dtcomm::python {

// Blocks, bytes of a slot, bytes of boxes.
using RoomNumbers = std::tuple<unsigned, std::uint64_t, std::uint64_t>;
// Addresses of input, output, residual, bias, addend; 0: none.
using ShareNumbers = std::array<std::uintptr_t, 5>;
// Of a rank that is here: its chunks, the boxes of all ranks, the flat instructions and the step of each.
using ProgramNumbers = std::tuple<int, std::vector<int>, std::vector<std::int64_t>, std::vector<int>>;

inline cuda::Room room_of(int ranks, const RoomNumbers& numbers) {
  cuda::Room room;
  room.ranks = ranks;
  std::tie(room.blocks, room.slot_bytes, room.box_bytes) = numbers;
  return room;
}

inline cuda::FusedCall state_fused(int collective, int algorithm, const pybind11::bytes& codec, int dtype,
                                   std::size_t numel, std::vector<std::size_t> splits, int op, std::size_t divisor,
                                   bool encodes_own, bool rounds, int ranks, int first, int here,
                                   const RoomNumbers& room, unsigned blocks, std::uint32_t section,
                                   std::uint64_t budget, const std::vector<std::uintptr_t>& memory,
                                   const std::vector<ProgramNumbers>& programs, int steps, bool keeps) {
  if (collective < 0 || collective > static_cast<int>(cuda::Collective::all_to_all)) {
    throw pybind11::value_error("collective: unknown number");
  }
  if (algorithm < 0 || algorithm > static_cast<int>(cuda::Algorithm::program)) {
    throw pybind11::value_error("algorithm: unknown number");
  }
  if (op < 0 || op > static_cast<int>(ReduceOp::max)) throw pybind11::value_error("op: unknown number");
  if (ranks < 2 || ranks > cuda::kMostRanks) throw pybind11::value_error("ranks: must be 2 to 8");
  if (memory.size() != static_cast<std::size_t>(ranks)) throw pybind11::value_error("memory: one address a rank");
  cuda::FusedCall call;
  call.collective = static_cast<cuda::Collective>(collective);
  call.algorithm = static_cast<cuda::Algorithm>(algorithm);
  call.codec = codec_of(codec);
  call.dtype = dtype_of(dtype);
  call.numel = numel;
  call.splits = std::move(splits);
  call.op = static_cast<ReduceOp>(op);
  call.divisor = divisor;
  call.encodes_own = encodes_own;
  call.rounds = rounds;
  call.ranks = ranks;
  call.first = first;
  call.here = here;
  call.room = room_of(ranks, room);
  call.blocks = blocks;
  call.section = section;
  call.budget = budget;
  for (std::size_t rank = 0; rank < memory.size(); ++rank) {
    if (memory[rank] % 16 != 0) throw pybind11::value_error("memory: must be aligned to 16");
    call.peers[rank] = cuda::peer_at(pointer<std::uint8_t>(memory[rank]));
  }
  call.steps = steps;
  call.keeps = keeps;
  for (const auto& [chunks, boxes, flat, step_of] : programs) {
    const int rank = first + static_cast<int>(call.programs.size());
    call.programs.push_back({Program::parse(rank, ranks, chunks, boxes, flat), step_of});
  }
  return call;
}

// The same with the tensors of the ranks that are here; `features` are those of a bias.
inline cuda::FusedCall with_tensors(const cuda::FusedCall& stated, const std::vector<ShareNumbers>& shares,
                                    std::size_t features) {
  if (shares.size() != static_cast<std::size_t>(stated.here)) {
    throw pybind11::value_error("shares: one for each rank that is here");
  }
  cuda::FusedCall call = stated;
  call.features = features;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    const auto& [input, output, residual, bias, addend] = shares[i];
    call.shares[i] = {pointer<const void>(input), pointer<void>(output), pointer<float>(residual),
                      pointer<const void>(bias), pointer<const void>(addend)};
  }
  return call;
}

// The class FusedCall, which both modules have; what `launch` is differs.
inline pybind11::class_<cuda::FusedCall> bind_fused_call(pybind11::module_& module) {
  namespace py = pybind11;
  return py::class_<cuda::FusedCall>(module, "FusedCall", py::module_local(),
                                     "A collective of one shape on one memory; csrc/cuda/fused.h says what fields are.")
      .def(py::init(&state_fused), py::arg("collective"), py::arg("algorithm"), py::arg("codec"), py::arg("dtype"),
           py::arg("numel"), py::arg("splits"), py::arg("op"), py::arg("divisor"), py::arg("encodes_own"),
           py::arg("rounds"), py::arg("ranks"), py::arg("first"), py::arg("here"), py::arg("room"), py::arg("blocks"),
           py::arg("section"), py::arg("budget"), py::arg("memory"),
           py::arg("programs") = std::vector<ProgramNumbers>(), py::arg("steps") = 0, py::arg("keeps") = false)
      .def("why_not", &cuda::why_not_stated,
           "Why there is no kernel for it, naming the field; empty where there is one.");
}

}  // namespace dtcomm::python
