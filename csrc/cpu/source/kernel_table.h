// All kernels of an instruction set, for the tables of csrc/cpu/isa_*.cpp.
#pragma once

#include "cpu/source/combine.h"
#include "cpu/source/lossless.h"
#include "cpu/source/low_rank.h"
#include "cpu/source/rounded_sum.h"
#include "cpu/source/shared_randk.h"
#include "cpu/source/weight_delta.h"

namespace dtcomm::DTCOMM_ISA {

// Evaluated by the compiler: the CPU that the program starts on may lack the instructions of this file.
constexpr Kernels kernel_table(const char* name, bool (*supported)()) {
  return {name,
          supported,
          combine,
          decode,
          {project_rows, project_columns, expand, orthonormalize},
          {measure_exponents, quantize_to_exponents, dequantize, audit_checksums, measure_digits, split_digits,
           round_digits, gather_values, scatter_values, restore_residual},
          {encode_lossless, decode_lossless},
          {encode_delta, check_delta, decode_delta}};
}

}  // namespace dtcomm::DTCOMM_ISA
