// A call as the others see it, and what memory it touches.
#include <algorithm>

#include "engine/hash.h"
#include "engine/interpreter.h"

namespace dtcomm {

std::uint64_t announce(AreaHead& own, const Call& call, std::uint64_t number) {
  std::uint64_t fingerprint = call.plan->fingerprint();
  if (call.agreed) fingerprint = mix64(fingerprint, call.agreed);
  const std::uint64_t operation = mix64(fingerprint, number) | 1;  // never the zero of an unused flag
  OpHeader& header = own.ops[number % kOpRing];
  header.number.store(0, std::memory_order_release);
  header.fingerprint.store(operation, std::memory_order_relaxed);
  header.region.store(call.region, std::memory_order_relaxed);
  header.region_id.store(call.region_id, std::memory_order_relaxed);
  header.region_offset.store(call.region_offset, std::memory_order_relaxed);
  header.address.store(call.address, std::memory_order_relaxed);
  std::string text = call.plan->text();
  if (call.agreed) text += " with number " + std::to_string(call.agreed);
  header.text[text.copy(header.text, kOpText - 1)] = 0;
  header.number.store(number, std::memory_order_release);
  return operation;
}

namespace {

struct Range {
  const std::uint8_t* begin;
  const std::uint8_t* end;
};

// What a call reads and writes, in order.
std::vector<Range> ranges_of(const Call& call) {
  const auto ranks = static_cast<std::size_t>(call.plan->program().ranks);
  const Geometry geometry = call.plan->geometry();
  const bool shards_in = geometry == Geometry::scatter || geometry == Geometry::exchange;
  const bool shards_out = geometry == Geometry::gather || geometry == Geometry::exchange;
  std::vector<Range> ranges;
  const auto add = [&](const void* data, std::size_t bytes) {
    const auto* begin = static_cast<const std::uint8_t*>(data);
    if (begin && bytes > 0) ranges.push_back({begin, begin + bytes});
  };
  for (std::size_t i = 0; i < call.segments.size(); ++i) {
    const Segment& segment = call.plan->segments()[i];
    const std::size_t numel_in = segment.numel * (shards_in ? ranks : 1);
    add(call.segments[i].in, numel_in * size_of(segment.dtype));
    add(call.segments[i].out, segment.numel * (shards_out ? ranks : 1) * size_of(segment.dtype));
    add(call.segments[i].residual, numel_in * sizeof(float));
  }
  for (const auto& [data, bytes] : call.arrival.touches) add(data, bytes);
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  return ranges;
}

}  // namespace

bool disjoint(const Call& one, const Call& other) {
  if (!one.after.empty() || !other.before.empty()) return false;  // steps touch what they like
  const std::vector<Range> a = ranges_of(one);
  const std::vector<Range> b = ranges_of(other);
  // The end of everything in `a` that begins before the range of `b` at hand, and the other way round.
  const auto apart = [](const std::vector<Range>& lower, const std::vector<Range>& upper) {
    const std::uint8_t* end = nullptr;
    std::size_t at = 0;
    for (const Range& range : upper) {
      for (; at < lower.size() && lower[at].begin <= range.begin; ++at) end = std::max(end, lower[at].end);
      if (end > range.begin) return false;
    }
    return true;
  };
  return apart(a, b) && apart(b, a);
}

}  // namespace dtcomm
