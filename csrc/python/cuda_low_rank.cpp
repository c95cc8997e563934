// Low-rank compression on a device. dtcomm/kernels/cuda.py checks tensors; what comes here are addresses.
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "cuda/low_rank.h"
#include "python/arguments.h"
#include "python/cuda.h"
#include "python/without_gil.h"

namespace dtcomm::python {

namespace py = pybind11;

namespace {

// The address of the vectors, their number, their length and the key.
using Numbers = std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t, std::uint64_t>;

void orthonormalize(const std::vector<Numbers>& vectors, std::uintptr_t stream) {
  std::vector<cuda::Vectors> of;
  for (const auto& [first, count, n, key] : vectors) {
    check_aligned("vectors", first, sizeof(float));
    of.push_back({pointer<float>(first), count, n, key});
  }
  // A full queue blocks.
  without_gil([&] { raise_if_not_queued(cuda::orthonormalize(of.data(), of.size(), pointer<void>(stream))); });
}

// The addresses of both factors, their sizes in elements, and the address of the bool.
using FactorNumbers = std::tuple<std::uintptr_t, std::uintptr_t, std::uint64_t, std::uint64_t, std::uintptr_t>;

void check_finite(const std::vector<FactorNumbers>& factors, std::uintptr_t stream) {
  std::vector<cuda::Factors> of;
  for (const auto& [left, right, left_size, right_size, finite] : factors) {
    check_aligned("left", left, sizeof(float));
    check_aligned("right", right, sizeof(float));
    of.push_back({pointer<float>(left), pointer<float>(right), left_size, right_size, pointer<std::uint8_t>(finite)});
  }
  without_gil([&] { raise_if_not_queued(cuda::check_finite(of.data(), of.size(), pointer<void>(stream))); });
}

void expand(std::uintptr_t gradient, int dtype, std::uintptr_t residual, std::uint64_t rows, std::uint64_t columns,
            std::uint32_t rank, std::uintptr_t left, std::uintptr_t right, std::uintptr_t finite,
            std::uintptr_t stream) {
  cuda::Expansion call = {};
  call.dtype = dtype_of(dtype);
  check_floats("dtype", call.dtype);
  if (rank < 1 || rank > kMaxRank) throw py::value_error("rank: must be 1 to " + std::to_string(kMaxRank));
  check_aligned("gradient", gradient, size_of(call.dtype));
  check_aligned("residual", residual, sizeof(float));
  check_aligned("left", left, sizeof(float));
  check_aligned("right", right, sizeof(float));
  call.gradient = pointer<void>(gradient);
  call.residual = pointer<float>(residual);
  call.left = pointer<const float>(left);
  call.right = pointer<const float>(right);
  call.finite = pointer<const std::uint8_t>(finite);
  call.rows = rows;
  call.columns = columns;
  call.rank = rank;
  without_gil([&] { raise_if_not_queued(cuda::expand(call, pointer<void>(stream))); });
}

}  // namespace

void bind_cuda_low_rank(py::module_& module) {
  module.attr("MAX_VECTORS") = cuda::kMaxVectors;
  module.def("orthonormalize", &orthonormalize, py::arg("vectors"), py::arg("stream"),
             "Gram-Schmidt of each of `vectors` (address, count, elements, key), queued on the stream of the current "
             "device. One kernel for MAX_VECTORS matrices.");
  module.def("check_finite", &check_finite, py::arg("factors"), py::arg("stream"),
             "Sets the bool of each of `factors` (left, right, their elements, address of the bool) to whether all of "
             "them are finite; if not, both become zeros. One kernel for MAX_VECTORS matrices.");
  module.def("expand", &expand, py::arg("gradient"), py::arg("dtype"), py::arg("residual"), py::arg("rows"),
             py::arg("columns"), py::arg("rank"), py::arg("left"), py::arg("right"), py::arg("finite"),
             py::arg("stream"),
             "Overwrites the gradient with the product of the factors and the residual, if it is not 0, with the "
             "error. If `finite` is not 0 and the bool at it is false, the gradient becomes NaN.");
}

}  // namespace dtcomm::python
