#include "engine/plan.h"

#include <algorithm>
#include <stdexcept>

#include "engine/area.h"
#include "engine/mix.h"

namespace dtcomm {
namespace {

struct Run {
  std::uint32_t segment;
  std::size_t in_offset;
  std::size_t out_offset;
  std::size_t numel;
};

std::size_t granules(const Segment& segment) {
  const std::size_t unit = granule_elements(segment.codec);
  return (segment.numel + unit - 1) / unit;
}

// The runs of one chunk, in segment order. A segment is cut at its own granules, so which rank sums an element does
// not depend on what else is in the message.
std::vector<Run> runs_of(const std::vector<Segment>& segments, Geometry geometry, std::size_t chunk,
                         std::size_t chunks) {
  std::vector<Run> runs;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    Run run{static_cast<std::uint32_t>(i), 0, 0, segment.numel};
    if (geometry == Geometry::whole) {
      const std::size_t unit = granule_elements(segment.codec);
      const std::size_t total = granules(segment);
      const std::size_t from = std::min(segment.numel, total * chunk / chunks * unit);
      const std::size_t to = std::min(segment.numel, total * (chunk + 1) / chunks * unit);
      run = {static_cast<std::uint32_t>(i), from, from, to - from};
    } else if (geometry == Geometry::scatter) {
      run.in_offset = chunk * segment.numel;
    } else {
      run.out_offset = chunk * segment.numel;
    }
    if (run.numel > 0) runs.push_back(run);
  }
  return runs;
}

}  // namespace

Plan::Plan(std::shared_ptr<const Program> program, Geometry geometry, ReduceOp op, bool average,
           std::vector<Segment> segments, const PlanOptions& options, std::string text)
    : program_(std::move(program)),
      geometry_(geometry),
      op_(op),
      divisor_(average ? static_cast<std::size_t>(program_->ranks) : 1),
      segments_(std::move(segments)),
      direct_(options.direct),
      text_(std::move(text)) {
  std::size_t largest = 1;
  std::size_t finest = SIZE_MAX;
  fingerprint_ = hash_bytes(static_cast<std::uint64_t>(geometry) * 257 + static_cast<std::uint64_t>(op), text_.data(),
                            text_.size());
  for (const Segment& segment : segments_) {
    largest = std::max(largest, size_of(segment.dtype));
    finest = std::min(finest, granule_elements(segment.codec));
    fingerprint_ = mix64(fingerprint_, segment.numel * 16 + static_cast<std::uint64_t>(segment.dtype));
    fingerprint_ = hash_bytes(fingerprint_, &segment.codec, sizeof(Codec));
    input_bytes_ += segment.numel * size_of(segment.dtype) *
                    (geometry == Geometry::scatter ? static_cast<std::size_t>(program_->chunks) : 1);
  }
  if (segments_.empty()) return;
  const auto chunks = static_cast<std::size_t>(program_->chunks);
  // Fewer boxes than chunks never happens in a direct program; a ring needs nearly two per chunk.
  std::size_t elements = std::max(finest, options.piece_bytes / largest / chunks / finest * finest);
  for (;;) {
    cut(elements);
    if (box_stride_ * static_cast<std::size_t>(program_->max_boxes()) <= options.slot_bytes) return;
    if (elements <= finest) {
      throw std::invalid_argument("algorithm: its program needs " + std::to_string(program_->max_boxes()) +
                                  " boxes of " + std::to_string(box_stride_) + " bytes, more than a slot of " +
                                  std::to_string(options.slot_bytes) + " bytes holds; use a direct algorithm");
    }
    elements = std::max(finest, elements / 2 / finest * finest);
  }
}

// Pieces take whole granules from the front of each chunk until they have `elements` of it.
void Plan::cut(std::size_t elements) {
  const auto chunks = static_cast<std::size_t>(program_->chunks);
  std::vector<std::vector<std::vector<Slice>>> cuts(chunks);  // [chunk][piece]
  pieces_ = 0;
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    std::size_t room = 0;
    for (Run run : runs_of(segments_, geometry_, chunk, chunks)) {
      const Segment& segment = segments_[run.segment];
      const std::size_t unit = granule_elements(segment.codec);
      while (run.numel > 0) {
        if (room == 0) {
          cuts[chunk].emplace_back();
          room = elements;
        }
        const std::size_t take = std::min(run.numel, (room + unit - 1) / unit * unit);
        auto& piece = cuts[chunk].back();
        const std::size_t at = piece.empty() ? 0 : piece.back().wire_offset + piece.back().wire_bytes;
        piece.push_back(
            {run.segment, run.in_offset, run.out_offset, take, at, wire_bytes(segment.codec, take, segment.dtype)});
        run.in_offset += take;
        run.out_offset += take;
        run.numel -= take;
        room -= std::min(room, take);
      }
    }
    pieces_ = std::max(pieces_, cuts[chunk].size());
  }
  slices_.clear();
  first_.assign(1, 0);
  box_stride_ = kLine;
  accumulator_bytes_ = 0;
  for (std::size_t piece = 0; piece < pieces_; ++piece) {
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
      if (piece < cuts[chunk].size()) {
        std::size_t kept = 0;
        for (const Slice& slice : cuts[chunk][piece]) {
          slices_.push_back(slice);
          kept += AreaLayout::round_up(slice.numel * size_of(accumulator_dtype(segments_[slice.segment].dtype)), kLine);
        }
        const Slice& last = slices_.back();
        box_stride_ = std::max(box_stride_, AreaLayout::round_up(last.wire_offset + last.wire_bytes, kLine));
        accumulator_bytes_ = std::max(accumulator_bytes_, kept);
      }
      first_.push_back(slices_.size());
    }
  }
}

std::size_t Plan::payload_bytes(std::size_t piece, int chunk) const {
  const Slice* last = end(piece, chunk);
  return last == begin(piece, chunk) ? 0 : last[-1].wire_offset + last[-1].wire_bytes;
}

}  // namespace dtcomm
