// Bindings of the rank-local tasks before and after reproducible (`exact`) and shared-position (`randk`) sums. They
// take addresses; dtcomm/kernels/local_tasks.py checks the arguments.
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "python/arguments.h"
#include "python/bindings.h"
#include "python/local_tasks.h"
#include "python/without_gil.h"

#include "codec/reproducible.h"

namespace dtcomm::python {

namespace py = pybind11;

namespace {

constexpr std::int64_t kAuditOk = INT64_MAX;  // the verdict if every run agrees

Contribution contribution_of(std::uintptr_t local, int dtype, std::uintptr_t residual, std::size_t numel) {
  return {pointer<const void>(local), dtype_of(dtype), pointer<float>(residual), numel};
}

// Compares two copies of the checksums and exponents of a sum. Returns kAuditOk, or the first run of kAuditRun integers
// that differs: twice its number, plus one if its exponents differ and not only its checksum.
std::int64_t audit_verdict(const std::uint64_t* sums, const std::uint64_t* other_sums, const std::uint8_t* exponents,
                           const std::uint8_t* other_exponents, std::size_t numel, std::size_t block) {
  for (std::size_t run = 0; run * kAuditRun < numel; ++run) {
    const std::size_t end = std::min(numel, (run + 1) * kAuditRun);
    const std::size_t first = run * kAuditRun / block, last = (end + block - 1) / block;
    if (!std::equal(exponents + first, exponents + last, other_exponents + first))
      return static_cast<std::int64_t>(2 * run + 1);
    if (sums[run] != other_sums[run]) return static_cast<std::int64_t>(2 * run);
  }
  return kAuditOk;
}

void bind_reproducible_sum(py::module_& module) {
  module.def(
      "task_measure_exponents",
      [](const py::bytes& bytes, std::uintptr_t local, int dtype, std::uintptr_t residual, std::size_t numel,
         std::uintptr_t exponents) {
        const Codec codec = codec_of(bytes);
        const Contribution from = contribution_of(local, dtype, residual, numel);
        return NativeTask{[=](const Kernels& kernels) {
          kernels.local.measure_exponents(codec, from, pointer<std::uint8_t>(exponents));
        }};
      },
      py::arg("codec"), py::arg("local"), py::arg("dtype"), py::arg("residual"), py::arg("numel"),
      py::arg("exponents"));
  module.def(
      "task_quantize_to_exponents",
      [](const py::bytes& bytes, std::size_t ranks, std::uintptr_t local, int dtype, std::uintptr_t residual,
         std::size_t numel, std::uintptr_t exponents, std::uintptr_t codes) {
        const Codec codec = codec_of(bytes);
        const Contribution from = contribution_of(local, dtype, residual, numel);
        return NativeTask{[=](const Kernels& kernels) {
          kernels.local.quantize_to_exponents(codec, ranks, from, pointer<const std::uint8_t>(exponents),
                                              pointer<void>(codes));
        }};
      },
      py::arg("codec"), py::arg("ranks"), py::arg("local"), py::arg("dtype"), py::arg("residual"), py::arg("numel"),
      py::arg("exponents"), py::arg("codes"));
  module.def(
      "task_dequantize",
      [](const py::bytes& bytes, std::size_t ranks, std::uintptr_t codes, std::uintptr_t exponents, std::size_t numel,
         std::size_t divisor, int dtype, std::uintptr_t out, std::uintptr_t verdict) {
        const Codec codec = codec_of(bytes);
        const DType type = dtype_of(dtype);
        return NativeTask{[=](const Kernels& kernels) {
          if (verdict && *pointer<const std::int64_t>(verdict) != kAuditOk) return;
          kernels.local.dequantize(codec, ranks, pointer<const void>(codes), pointer<const std::uint8_t>(exponents),
                                   numel, divisor, type, pointer<void>(out));
        }};
      },
      py::arg("codec"), py::arg("ranks"), py::arg("codes"), py::arg("exponents"), py::arg("numel"), py::arg("divisor"),
      py::arg("dtype"), py::arg("out"), py::arg("verdict") = 0,
      "Does nothing if `verdict` is given and is not AUDIT_OK.");
  module.def(
      "task_audit_checksums",
      [](int bits, std::uintptr_t codes, std::size_t numel, std::uintptr_t sums) {
        return NativeTask{[=](const Kernels& kernels) {
          kernels.local.audit_checksums(bits, pointer<const void>(codes), numel, pointer<std::uint64_t>(sums));
        }};
      },
      py::arg("bits"), py::arg("codes"), py::arg("numel"), py::arg("sums"));
  module.def(
      "task_audit_verdict",
      [](std::uintptr_t sums, std::uintptr_t other_sums, std::uintptr_t exponents, std::uintptr_t other_exponents,
         std::size_t numel, std::size_t block, std::uintptr_t out) {
        return NativeTask{[=](const Kernels&) {
          *pointer<std::int64_t>(out) = audit_verdict(
              pointer<const std::uint64_t>(sums), pointer<const std::uint64_t>(other_sums),
              pointer<const std::uint8_t>(exponents), pointer<const std::uint8_t>(other_exponents), numel, block);
        }};
      },
      py::arg("sums"), py::arg("other_sums"), py::arg("exponents"), py::arg("other_exponents"), py::arg("numel"),
      py::arg("block"), py::arg("out"));
}

SumDigits digits_of_sum(std::size_t ranks, std::uintptr_t tops, std::uintptr_t lows) {
  return {ranks, pointer<const std::uint8_t>(tops), pointer<const std::uint8_t>(lows)};
}

void bind_rounded_sum(py::module_& module) {
  module.def(
      "task_measure_digits",
      [](std::uintptr_t local, int dtype, std::size_t numel, bool finite_only, std::uintptr_t tops,
         std::uintptr_t lows) {
        const Contribution from = contribution_of(local, dtype, 0, numel);
        return NativeTask{[=](const Kernels& kernels) {
          kernels.local.measure_digits(from, finite_only, pointer<std::uint8_t>(tops), pointer<std::uint8_t>(lows));
        }};
      },
      py::arg("local"), py::arg("dtype"), py::arg("numel"), py::arg("finite_only"), py::arg("tops"), py::arg("lows"));
  module.def(
      "task_split_digits",
      [](std::size_t ranks, std::uintptr_t tops, std::uintptr_t lows, std::uintptr_t local, int dtype,
         std::size_t numel, bool finite, std::uintptr_t digits, const std::vector<std::size_t>& offsets) {
        return NativeTask{[=](const Kernels& kernels) {
          const std::size_t part = numel / offsets.size(), blocks = part / kRoundedBlock;
          for (std::size_t i = 0; i < offsets.size(); ++i) {
            const SumDigits sum = digits_of_sum(ranks, tops + i * blocks, lows + i * blocks);
            const std::uintptr_t from = local + i * part * size_of(dtype_of(dtype));
            kernels.local.split_digits(sum, contribution_of(from, dtype, 0, part), finite,
                                       pointer<std::int32_t>(digits) + offsets[i]);
          }
        }};
      },
      py::arg("ranks"), py::arg("tops"), py::arg("lows"), py::arg("local"), py::arg("dtype"), py::arg("numel"),
      py::arg("finite"), py::arg("digits"), py::arg("offsets"),
      "Splits equal parts of the tensor, of whole blocks if there are several, each to its offset.");
  module.def(
      "task_round_digits",
      [](std::size_t ranks, std::uintptr_t tops, std::uintptr_t lows, std::uintptr_t digits, std::size_t numel,
         std::size_t divisor, int dtype, std::uintptr_t out) {
        const SumDigits sum = digits_of_sum(ranks, tops, lows);
        const DType type = dtype_of(dtype);
        return NativeTask{[=](const Kernels& kernels) {
          kernels.local.round_digits(sum, pointer<const std::int32_t>(digits), numel, divisor, type,
                                     pointer<void>(out));
        }};
      },
      py::arg("ranks"), py::arg("tops"), py::arg("lows"), py::arg("digits"), py::arg("numel"), py::arg("divisor"),
      py::arg("dtype"), py::arg("out"));
  module.def(
      "count_digits",
      [](std::size_t ranks, std::uintptr_t tops, std::uintptr_t lows, std::size_t blocks, std::size_t parts) {
        const SumDigits sum = digits_of_sum(ranks, tops, lows);
        const DigitCuts cuts(ranks);
        std::vector<std::size_t> counts(parts);
        for (std::size_t i = 0; i < parts; ++i) {
          for (std::size_t b = i * blocks / parts; b < (i + 1) * blocks / parts; ++b) {
            counts[i] += kHalfBlock * cuts.halves[span_of(sum.tops[b], sum.lows[b])];
          }
        }
        return counts;
      },
      py::arg("ranks"), py::arg("tops"), py::arg("lows"), py::arg("blocks"), py::arg("parts"),
      "Returns how many integers the digits of equal parts of the blocks are.");
}

void bind_shared_randk_sum(py::module_& module) {
  module.def(
      "task_gather_values",
      [](const py::bytes& bytes, std::uint64_t key, std::uint64_t offset, std::uintptr_t local, int dtype,
         std::uintptr_t residual, std::size_t numel, std::uintptr_t values, std::uintptr_t residual_values) {
        const Codec codec = codec_of(bytes);
        const Contribution from = contribution_of(local, dtype, residual, numel);
        return NativeTask{[=](const Kernels& kernels) {
          kernels.local.gather_values(codec, key, offset, from, pointer<float>(values),
                                      pointer<float>(residual_values));
        }};
      },
      py::arg("codec"), py::arg("key"), py::arg("offset"), py::arg("local"), py::arg("dtype"), py::arg("residual"),
      py::arg("numel"), py::arg("values"), py::arg("residual_values"));
  module.def(
      "task_scatter_values",
      [](const py::bytes& bytes, std::uint64_t key, std::uint64_t offset, bool scaled, std::uintptr_t values,
         std::size_t numel, int dtype, std::uintptr_t out) {
        const Codec codec = codec_of(bytes);
        const DType type = dtype_of(dtype);
        return NativeTask{[=](const Kernels& kernels) {
          kernels.local.scatter_values(codec, key, offset, scaled, pointer<const float>(values), numel, type,
                                       pointer<void>(out));
        }};
      },
      py::arg("codec"), py::arg("key"), py::arg("offset"), py::arg("scaled"), py::arg("values"), py::arg("numel"),
      py::arg("dtype"), py::arg("out"));
  module.def(
      "task_restore_residual",
      [](const py::bytes& bytes, std::uint64_t key, std::uint64_t offset, std::uintptr_t residual_values,
         std::size_t numel, std::uintptr_t residual) {
        const Codec codec = codec_of(bytes);
        return NativeTask{[=](const Kernels& kernels) {
          kernels.local.restore_residual(codec, key, offset, pointer<const float>(residual_values), numel,
                                         pointer<float>(residual));
        }};
      },
      py::arg("codec"), py::arg("key"), py::arg("offset"), py::arg("residual_values"), py::arg("numel"),
      py::arg("residual"));
}

}  // namespace

void bind_local_tasks(py::module_& module) {
  py::class_<NativeTask>(module, "NativeTask")
      .def(
          "run",
          [](const NativeTask& self, const char* name) {
            const Kernels& kernels = kernels_of(name);
            without_gil([&] { self.run(kernels); });
          },
          py::arg("kernel"), "Runs the task with the kernels of that name.");
  module.attr("AUDIT_OK") = kAuditOk;
  module.attr("AUDIT_RUN") = kAuditRun;
  bind_reproducible_sum(module);
  bind_rounded_sum(module);
  bind_shared_randk_sum(module);
}

}  // namespace dtcomm::python
