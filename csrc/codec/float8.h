// float8: blocks share a scale that takes their largest magnitude to the largest number of e4m3, e5m2 or e3m4.
#pragma once

#include "codec/codec.h"
#include "codec/integer.h"
#include "codec/minifloat.h"

namespace dtcomm {

// With scales to nearest the largest element is at most 1 + 2^-8 times the largest number, which rounds to it; a
// stochastic one would be clipped there, so scales are rounded up.
DTCOMM_HD IntegerRules float8_rules(const Codec& codec) {
  const float largest = codec.element == Element::e4m3   ? E4m3::kLargest
                        : codec.element == Element::e5m2 ? E5m2::kLargest
                                                         : E3m4::kLargest;
  return scale_rules(largest, codec.scale, codec.stochastic);
}

}  // namespace dtcomm
