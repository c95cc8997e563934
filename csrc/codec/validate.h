// Payloads that no encoder makes. The kernels take them, too, and stay within their memory; this says what is wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "codec/codec.h"

namespace dtcomm {

// Empty where the payload of `numel` elements could have been made by an encoder, otherwise the first granule that
// could not and the reason. Positions are looked at, values are not: every pattern of theirs is a number or NaN. For
// codecs without positions there is nothing to look at.
std::string why_corrupt(const Codec& codec, const std::uint8_t* payload, std::size_t numel);

}  // namespace dtcomm
