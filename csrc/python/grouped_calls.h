// GroupedCalls: calls of one codec's kernels that do not depend on each other, prepared once for a layout of memory and
// run on the tensors of many operations.
#pragma once

#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "codec/counter_rng.h"
#include "python/arguments.h"

namespace dtcomm::python {

class GroupedCalls {
 public:
  // Memory of a call: a number among the addresses of a run, and a distance in bytes.
  using Place = std::pair<std::size_t, std::uint64_t>;
  using MaybePlace = std::optional<Place>;
  // The fields of dtcomm.kernels.calls.GroupedCall, in order.
  using Fields = std::tuple<std::size_t, std::vector<Place>, int, MaybePlace, int, MaybePlace, MaybePlace, std::size_t,
                            int, std::uint32_t, std::uint64_t, MaybePlace, MaybePlace, int>;

  // `rank` and the call's payload id make the key of the random numbers, together with the seed of a run.
  GroupedCalls(const pybind11::bytes& codec, int dtype, const std::vector<Fields>& calls, std::uint32_t rank)
      : codec_(codec_of(codec)), rank_(rank) {
    std::size_t payloads = 0;
    for (const Fields& fields : calls) payloads += std::get<1>(fields).size();
    addresses_.resize(payloads);
    std::size_t at = 0;
    for (const Fields& fields : calls) {
      const auto& [numel, terms, position, local, local_dtype, residual_in, residual_out, divisor, op, payload_id,
                   offset, payload_out, out, out_dtype] = fields;
      // Stands for the address of a local tensor where there is one, which combine_call asks for.
      const std::uintptr_t present = local || residual_in ? kAlign : 0;
      Combine call = combine_call(std::vector<std::uintptr_t>(terms.size()), position, present, local_dtype, 0, 0,
                                  numel, divisor, op, 0, offset, 0, 0, dtype, out_dtype);
      call.payloads = addresses_.data() + at;
      at += terms.size();
      for (const MaybePlace& place : {local, residual_in, residual_out, payload_out, out}) require(place);
      for (const Place& place : terms) require(place);
      calls_.push_back(call);
      places_.push_back({terms, local, residual_in, residual_out, payload_out, out, payload_id});
    }
  }
  GroupedCalls(const GroupedCalls&) = delete;
  GroupedCalls& operator=(const GroupedCalls&) = delete;

  const Codec& codec() const { return codec_; }

  // The calls on the memory at these addresses (0: none), without those that have nothing to do. They refer to memory
  // of this object, which the next call of `resolve` overwrites.
  std::vector<Combine> resolve(const std::vector<std::uintptr_t>& addresses, std::uint64_t seed) {
    if (addresses.size() < least_addresses_) throw pybind11::value_error("addresses: fewer than the calls refer to");
    const auto find = [&](const MaybePlace& place) -> std::uintptr_t {
      return place && addresses[place->first] ? addresses[place->first] + place->second : 0;
    };
    std::vector<Combine> resolved;
    resolved.reserve(calls_.size());
    std::size_t at = 0;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      const Places& places = places_[i];
      for (const Place& place : places.terms) addresses_[at++] = pointer<const std::uint8_t>(find(place));
      Combine call = calls_[i];
      call.local = pointer<const void>(find(places.local));
      call.residual_in = pointer<const float>(find(places.residual_in));
      call.residual_out = pointer<float>(find(places.residual_out));
      call.payload_out = pointer<std::uint8_t>(find(places.payload_out));
      call.out = pointer<void>(find(places.out));
      call.key = mix_key(seed, rank_, places.payload_id);
      const bool copies_to_itself = call.count == 0 && call.out == call.local && !call.residual_in && !call.payload_out;
      if (call.payload_out || call.residual_out || (call.out && !copies_to_itself)) resolved.push_back(call);
    }
    return resolved;
  }

 private:
  struct Places {
    std::vector<Place> terms;
    MaybePlace local, residual_in, residual_out, payload_out, out;
    std::uint32_t payload_id;
  };

  void require(const MaybePlace& place) {
    if (place && place->first >= least_addresses_) least_addresses_ = place->first + 1;
  }

  Codec codec_;
  std::uint32_t rank_;
  std::vector<Combine> calls_;
  std::vector<Places> places_;
  std::vector<const std::uint8_t*> addresses_;  // of the payloads of all calls
  std::size_t least_addresses_ = 0;
};

// The class without a way to run it, which differs between modules.
inline pybind11::class_<GroupedCalls> bind_grouped_calls(pybind11::module_& module) {
  namespace py = pybind11;
  return py::class_<GroupedCalls>(module, "GroupedCalls", py::module_local(),
                                  "Calls of a codec's kernels that do not depend on each other.")
      .def(py::init<const py::bytes&, int, const std::vector<GroupedCalls::Fields>&, std::uint32_t>(), py::arg("codec"),
           py::arg("dtype"), py::arg("calls"), py::arg("rank"),
           "`calls`: tuples of dtcomm.kernels.calls.GroupedCall's fields, with dtypes and operations as numbers.");
}

}  // namespace dtcomm::python
