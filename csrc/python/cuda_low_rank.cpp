// Low-rank compression on a device. dtcomm/kernels/cuda.py checks tensors; what comes here are addresses.
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "cuda/low_rank.h"
#include "python/arguments.h"
#include "python/cuda.h"

namespace dtcomm::python {

namespace py = pybind11;

namespace {

// Where vectors lie, how many they are, of how many elements, and the key.
using Numbers = std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t, std::uint64_t>;

void orthonormalise(const std::vector<Numbers>& vectors, std::uintptr_t stream) {
  std::vector<cuda::Vectors> of;
  for (const auto& [first, count, n, key] : vectors) {
    check_aligned("vectors", first, sizeof(float));
    of.push_back({pointer<float>(first), count, n, key});
  }
  const py::gil_scoped_release release;  // a full queue blocks
  raise_if_not_queued(cuda::orthonormalise(of.data(), of.size(), pointer<void>(stream)));
}

// Where factors and their verdict lie, and how many elements they have.
using FactorNumbers = std::tuple<std::uintptr_t, std::uintptr_t, std::uint64_t, std::uint64_t, std::uintptr_t>;

void check_finite(const std::vector<FactorNumbers>& factors, std::uintptr_t stream) {
  std::vector<cuda::Factors> of;
  for (const auto& [left, right, left_size, right_size, finite] : factors) {
    check_aligned("left", left, sizeof(float));
    check_aligned("right", right, sizeof(float));
    of.push_back({pointer<float>(left), pointer<float>(right), left_size, right_size, pointer<std::uint8_t>(finite)});
  }
  const py::gil_scoped_release release;
  raise_if_not_queued(cuda::check_finite(of.data(), of.size(), pointer<void>(stream)));
}

void expand(std::uintptr_t gradient, int dtype, std::uintptr_t residual, std::uint64_t rows, std::uint64_t columns,
            std::uint32_t rank, std::uintptr_t left, std::uintptr_t right, std::uintptr_t finite,
            std::uintptr_t stream) {
  cuda::Expansion call = {};
  call.dtype = dtype_of(dtype);
  if (call.dtype != DType::f32 && call.dtype != DType::f16 && call.dtype != DType::bf16) {
    throw py::value_error("dtype: must be fp32, fp16 or bf16");
  }
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
  const py::gil_scoped_release release;
  raise_if_not_queued(cuda::expand(call, pointer<void>(stream)));
}

}  // namespace

void bind_cuda_low_rank(py::module_& module) {
  module.attr("MAX_VECTORS") = cuda::kMaxVectors;
  module.def("orthonormalise", &orthonormalise, py::arg("vectors"), py::arg("stream"),
             "Gram-Schmidt of each of `vectors` (address, count, elements, key), queued on the stream of the current "
             "device, MAX_VECTORS a kernel.");
  module.def("check_finite", &check_finite, py::arg("factors"), py::arg("stream"),
             "For each of `factors` (left, right, elements of both, bool) whether all is finite; what is not becomes "
             "zeros, as the other factor. MAX_VECTORS a kernel.");
  module.def("expand", &expand, py::arg("gradient"), py::arg("dtype"), py::arg("residual"), py::arg("rows"),
             py::arg("columns"), py::arg("rank"), py::arg("left"), py::arg("right"), py::arg("finite"),
             py::arg("stream"),
             "The gradient becomes the factors' product and the residual, where given, what that lost; where the bool "
             "at `finite`, if given, says no, the gradient becomes NaN.");
}

}  // namespace dtcomm::python
