// Bindings of the passes of the low-rank compressor. They take addresses and release the GIL;
// dtcomm/kernels/low_rank.py checks the arguments.
#include "cpu/kernels.h"
#include "python/arguments.h"
#include "python/bindings.h"
#include "python/without_gil.h"

namespace dtcomm::python {

namespace py = pybind11;

namespace {

Matrix matrix_of(std::uintptr_t gradient, int dtype, std::uintptr_t residual, std::size_t rows, std::size_t columns,
                 std::size_t rank) {
  const DType type = dtype_of(dtype);
  if (type != DType::f32 && type != DType::f16 && type != DType::bf16) {
    throw py::value_error("dtype: must be fp32, fp16 or bf16");
  }
  if (rank < 1 || rank > kMaxRank) throw py::value_error("rank: must be 1 to 64");
  return {pointer<const void>(gradient), pointer<const float>(residual), type, rows, columns, rank};
}

// The matrix's memory, for the pass that overwrites it.
struct Outputs {
  void* gradient;
  float* residual;
};

// Binds one of the three passes over a matrix. `first` and `second` name the factors in the order of its arguments.
template <class Pass>
void bind_pass(py::module_& module, const char* name, const char* first, const char* second, const Pass& pass) {
  module.def(
      name,
      [pass](const char* kernel, std::uintptr_t gradient, int dtype, std::uintptr_t residual, std::size_t rows,
             std::size_t columns, std::size_t rank, std::uintptr_t one, std::uintptr_t two) {
        const Matrix matrix = matrix_of(gradient, dtype, residual, rows, columns, rank);
        const LowRank& passes = kernels_of(kernel).low_rank;
        const Outputs outputs{pointer<void>(gradient), pointer<float>(residual)};
        without_gil([&] { pass(passes, matrix, outputs, pointer<float>(one), pointer<float>(two)); });
      },
      py::arg("kernel"), py::arg("gradient"), py::arg("dtype"), py::arg("residual"), py::arg("rows"),
      py::arg("columns"), py::arg("rank"), py::arg(first), py::arg(second));
}

}  // namespace

void bind_low_rank(py::module_& module) {
  bind_pass(module, "project_rows", "right", "left",
            [](const LowRank& passes, const Matrix& matrix, const Outputs&, const float* right, float* left) {
              passes.project_rows(matrix, right, left);
            });
  bind_pass(module, "project_columns", "left", "right",
            [](const LowRank& passes, const Matrix& matrix, const Outputs&, const float* left, float* right) {
              passes.project_columns(matrix, left, right);
            });
  // Overwrites the gradient with the product of the factors, and the residual, if there is one, with the error.
  bind_pass(module, "expand", "left", "right",
            [](const LowRank& passes, const Matrix& matrix, const Outputs& outputs, const float* left,
               const float* right) { passes.expand(matrix, left, right, outputs.gradient, outputs.residual); });
  module.def(
      "orthonormalize",
      [](const char* kernel, std::uintptr_t vectors, std::size_t count, std::size_t n, std::uint64_t key) {
        const LowRank& passes = kernels_of(kernel).low_rank;
        without_gil([&] { passes.orthonormalize(pointer<float>(vectors), count, n, key); });
      },
      py::arg("kernel"), py::arg("vectors"), py::arg("count"), py::arg("n"), py::arg("key"));
}

}  // namespace dtcomm::python
