// Granules of deltas of weights (codec/weight_delta.h); csrc/cpu/kernels.h has the contracts.
#pragma once

#include "codec/weight_delta.h"
#include "cpu/kernels.h"

namespace dtcomm::DTCOMM_ISA {

std::size_t encode_delta(WeightKind kind, const void* old, const void* fresh, std::size_t n, std::uint32_t* room,
                         std::uint8_t* to, std::size_t* changed);
const char* check_delta(WeightKind kind, const std::uint8_t* granule, std::size_t bytes, std::size_t n,
                        const void* old);
const char* decode_delta(WeightKind kind, const std::uint8_t* granule, std::size_t bytes, std::size_t n,
                         std::uint32_t* room, void* weights);

}  // namespace dtcomm::DTCOMM_ISA
