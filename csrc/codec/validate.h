// Validation of what comes from elsewhere: descriptions of codecs, and payloads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "core/status.h"

namespace dtcomm {

// Whether the kernels can run `codec`. Call it once on a codec that came from elsewhere.
Status check_codec(const Codec& codec);

// Whether an encoder can have written a payload of `numel` elements; the message names the first granule that none
// writes. Kernels decode such payloads without leaving their memory. Only stored positions are checked: every bit
// pattern of a value is a number or NaN.
Status check_payload(const Codec& codec, const std::uint8_t* payload, std::size_t numel);

}  // namespace dtcomm
