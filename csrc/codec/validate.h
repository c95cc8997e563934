// Finds payloads that no encoder writes. Kernels can decode them without leaving their memory; this names the fault.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "codec/codec.h"

namespace dtcomm {

// The first granule of a payload of `numel` elements that no encoder writes, and the reason; empty if there is none.
// It checks stored positions. Values need no check, as every bit pattern is a number or NaN.
std::string why_corrupt(const Codec& codec, const std::uint8_t* payload, std::size_t numel);

}  // namespace dtcomm
