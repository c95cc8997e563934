// Correctly rounded sums on a device. dtcomm/kernels/cuda.py checks tensors; what comes here are addresses.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/rounded_sum.h"
#include "python/arguments.h"
#include "python/cuda.h"
#include "python/without_gil.h"

namespace dtcomm::python {

namespace py = pybind11;

namespace {

DType rounded_dtype(int number, std::uintptr_t tensor) {
  const DType dtype = dtype_of(number);
  check_floats("dtype", dtype);
  check_aligned("tensor", tensor, size_of(dtype));
  return dtype;
}

SumDigits device_digits(std::size_t ranks, std::uintptr_t tops, std::uintptr_t lows) {
  return {ranks, pointer<const std::uint8_t>(tops), pointer<const std::uint8_t>(lows)};
}

constexpr std::size_t kDigitAlignment = kHalfBlock * sizeof(std::int32_t);

void split_device_digits(std::size_t ranks, std::uintptr_t tops, std::uintptr_t lows, std::uintptr_t ends,
                         std::uintptr_t from, int dtype, std::size_t numel, std::uintptr_t digits,
                         const std::vector<std::uint64_t>& offsets, std::uintptr_t stream) {
  cuda::SplitCall call = {};
  call.dtype = rounded_dtype(dtype, from);
  call.numel = numel / offsets.size();
  call.digits = pointer<std::int32_t>(digits);
  check_aligned("digits", digits, kDigitAlignment);
  const std::size_t blocks = call.numel / kRoundedBlock;  // of each of several parts
  without_gil([&] {                                       // a full queue blocks
    for (std::size_t first = 0; first < offsets.size(); first += call.parts) {
      call.parts = static_cast<unsigned>(std::min<std::size_t>(cuda::kMostParts, offsets.size() - first));
      std::copy_n(offsets.begin() + static_cast<std::ptrdiff_t>(first), call.parts, call.offsets);
      call.sum = device_digits(ranks, tops + first * blocks, lows + first * blocks);
      call.ends = pointer<const std::int64_t>(ends) + first * blocks;
      call.from = pointer<const std::uint8_t>(from) + first * call.numel * size_of(call.dtype);
      raise_if_not_queued(cuda::split_digits(call, pointer<void>(stream)));
    }
  });
}

}  // namespace

void bind_cuda_rounded_sum(py::module_& module) {
  module.def(
      "measure_digits",
      [](std::uintptr_t from, int dtype, std::size_t numel, bool finite_only, std::uintptr_t tops, std::uintptr_t lows,
         std::uintptr_t stream) {
        const cuda::MeasureCall call = {pointer<const void>(from),   numel,
                                        pointer<std::uint8_t>(tops), pointer<std::uint8_t>(lows),
                                        rounded_dtype(dtype, from),  finite_only};
        without_gil([&] { raise_if_not_queued(cuda::measure_digits(call, pointer<void>(stream))); });
      },
      py::arg("tensor"), py::arg("dtype"), py::arg("numel"), py::arg("finite_only"), py::arg("tops"), py::arg("lows"),
      py::arg("stream"), "The range of bits of each block of 32 elements, queued on the stream.");
  module.def(
      "count_digits",
      [](std::size_t ranks, std::uintptr_t tops, std::uintptr_t lows, std::size_t blocks, std::uintptr_t halves,
         std::uintptr_t stream) {
        const cuda::CountCall call = {device_digits(ranks, tops, lows), blocks, pointer<std::int32_t>(halves)};
        without_gil([&] { raise_if_not_queued(cuda::count_digits(call, pointer<void>(stream))); });
      },
      py::arg("ranks"), py::arg("tops"), py::arg("lows"), py::arg("blocks"), py::arg("halves"), py::arg("stream"),
      "How many times sixteen integers the digits of each block are, queued on the stream.");
  module.def("split_digits", &split_device_digits, py::arg("ranks"), py::arg("tops"), py::arg("lows"), py::arg("ends"),
             py::arg("tensor"), py::arg("dtype"), py::arg("numel"), py::arg("digits"), py::arg("offsets"),
             py::arg("stream"),
             "Splits equal parts of the tensor, of whole blocks if there are several, each to its offset. `ends`: the "
             "counts of all blocks up to each one. One kernel for 64 parts.");
  module.def(
      "round_digits",
      [](std::size_t ranks, std::uintptr_t tops, std::uintptr_t lows, std::uintptr_t ends, std::uintptr_t digits,
         std::size_t numel, std::size_t divisor, int dtype, std::uintptr_t out, std::uintptr_t stream) {
        check_aligned("digits", digits, kDigitAlignment);
        const cuda::RoundCall call = {device_digits(ranks, tops, lows),
                                      pointer<const std::int64_t>(ends),
                                      pointer<const std::int32_t>(digits),
                                      numel,
                                      divisor,
                                      pointer<void>(out),
                                      rounded_dtype(dtype, out)};
        without_gil([&] { raise_if_not_queued(cuda::round_digits(call, pointer<void>(stream))); });
      },
      py::arg("ranks"), py::arg("tops"), py::arg("lows"), py::arg("ends"), py::arg("digits"), py::arg("numel"),
      py::arg("divisor"), py::arg("dtype"), py::arg("out"), py::arg("stream"),
      "out = the value of the digits' sums, divided, rounded once; queued on the stream.");
}

}  // namespace dtcomm::python
