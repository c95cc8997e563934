#include "engine/call.h"

#include <algorithm>
#include <string>

#include "engine/platform.h"

namespace dtcomm {

std::uint64_t announce(RegionHeader& own, const Call& call, std::uint64_t number) {
  std::uint64_t fingerprint = call.plan->fingerprint();
  if (call.agreed) fingerprint = mix64(fingerprint, call.agreed);
  const std::uint64_t operation = mix64(fingerprint, number) | 1;  // 0 is what an unused flag holds
  OpHeader& header = own.ops[number % kOpRing];
  header.number.store(0, std::memory_order_release);
  header.fingerprint.store(operation, std::memory_order_relaxed);
  header.tensor_slot.store(call.tensor_slot, std::memory_order_relaxed);
  header.tensor_id.store(call.tensor_id, std::memory_order_relaxed);
  header.tensor_offset.store(call.tensor_offset, std::memory_order_relaxed);
  header.address.store(call.address, std::memory_order_relaxed);
  std::size_t end = call.plan->text().copy(header.text, kOpText - 1);
  if (call.agreed) end += (" with number " + std::to_string(call.agreed)).copy(header.text + end, kOpText - 1 - end);
  header.text[end] = 0;
  own.waiting_for.store(-1, std::memory_order_relaxed);  // what an earlier operation waited for
  header.number.store(number, std::memory_order_release);
  return operation;
}

namespace {

struct MemoryRange {
  const std::uint8_t* begin;
  const std::uint8_t* end;
};

// The memory that a call reads and writes, sorted by address.
std::vector<MemoryRange> ranges_of(const Call& call) {
  const auto ranks = static_cast<std::size_t>(call.plan->program().ranks);
  const Geometry geometry = call.plan->geometry();
  const bool shards_in = geometry == Geometry::scatter || geometry == Geometry::exchange;
  const bool shards_out = geometry == Geometry::gather || geometry == Geometry::exchange;
  std::vector<MemoryRange> ranges;
  const auto add = [&](const void* data, std::size_t bytes) {
    const auto* begin = static_cast<const std::uint8_t*>(data);
    if (begin && bytes > 0) ranges.push_back({begin, begin + bytes});
  };
  for (std::size_t i = 0; i < call.tensors.size(); ++i) {
    const Segment& segment = call.plan->segments()[i];
    const std::size_t numel_in = segment.numel * (shards_in ? ranks : 1);
    add(call.tensors[i].in, numel_in * size_of(segment.dtype));
    add(call.tensors[i].out, segment.numel * (shards_out ? ranks : 1) * size_of(segment.dtype));
    add(call.tensors[i].residual, numel_in * sizeof(float));
  }
  for (const auto& [data, bytes] : call.epilogue.memory) add(data, bytes);
  std::sort(ranges.begin(), ranges.end(), [](const MemoryRange& a, const MemoryRange& b) { return a.begin < b.begin; });
  return ranges;
}

}  // namespace

bool touch_disjoint_memory(const Call& first, const Call& second) {
  if (!first.after.empty() || !second.before.empty()) return false;
  const std::vector<MemoryRange> a = ranges_of(first);
  const std::vector<MemoryRange> b = ranges_of(second);
  // Whether no range of `upper` overlaps a range of `lower` that begins before it: `end` is the largest end of those.
  const auto no_overlap = [](const std::vector<MemoryRange>& lower, const std::vector<MemoryRange>& upper) {
    const std::uint8_t* end = nullptr;
    std::size_t next = 0;
    for (const MemoryRange& range : upper) {
      for (; next < lower.size() && lower[next].begin <= range.begin; ++next) end = std::max(end, lower[next].end);
      if (end > range.begin) return false;
    }
    return true;
  };
  return no_overlap(a, b) && no_overlap(b, a);
}

}  // namespace dtcomm
