#include "engine/plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "engine/hash.h"
#include "engine/shm_layout.h"

namespace dtcomm {
namespace {

// What a rank reads and writes of so many bytes, with its peers doing the same, does not stay in the last cache.
constexpr std::size_t kLargeBytes = 16 * 1024 * 1024;

}  // namespace

std::size_t Segment::granule() const { return std::lcm(granule_elements(codec), granule_elements(between)); }

Plan::Plan(std::shared_ptr<const Program> program, Geometry geometry, ReduceOp op, bool average,
           std::vector<Segment> segments, const PlanOptions& options, std::string text)
    : program_(std::move(program)),
      geometry_(geometry),
      op_(op),
      divisor_(average ? static_cast<std::size_t>(program_->ranks) : 1),
      segments_(std::move(segments)),
      splits_(options.splits),
      direct_(options.direct || options.pulls),
      pulls_(options.pulls),
      checksum_(options.checksum),
      text_(std::move(text)),
      about_(options.about) {
  check(options);
  const auto ranks = static_cast<std::size_t>(program_->ranks);
  std::size_t largest = 1;
  std::size_t finest = SIZE_MAX;
  std::size_t output_bytes = 0;
  const bool gathers = geometry == Geometry::gather || geometry == Geometry::exchange;
  fingerprint_ = hash_bytes(static_cast<std::uint64_t>(geometry) * 257 + static_cast<std::uint64_t>(op), text_.data(),
                            text_.size());
  for (const Segment& segment : segments_) {
    largest = std::max(largest, size_of(segment.dtype));
    finest = std::min(finest, segment.granule());
    fingerprint_ = mix64(fingerprint_, segment.numel * 16 + static_cast<std::uint64_t>(segment.dtype));
    fingerprint_ = hash_bytes(fingerprint_, &segment.codec, sizeof(Codec));
    fingerprint_ = hash_bytes(fingerprint_, &segment.between, sizeof(Codec));
    const bool shards = geometry == Geometry::scatter || geometry == Geometry::exchange;
    output_bytes += segment.numel * size_of(segment.dtype) * (gathers ? ranks : 1);
    input_bytes_ += segment.numel * size_of(segment.dtype) * (shards ? ranks : 1);
  }
  fingerprint_ = hash_bytes(fingerprint_, splits_.data(), splits_.size() * sizeof(std::size_t));
  if (segments_.empty()) {
    cut(1);
    return;
  }
  const bool reads =
      std::find(program_->reads_input.begin(), program_->reads_input.end(), true) != program_->reads_input.end();
  const bool writes = !program_->outputs.empty();
  const bool apart = geometry != Geometry::whole;
  large_ = writes && output_bytes + (reads && apart ? input_bytes_ : 0) >= kLargeBytes;
  const auto chunks = static_cast<std::size_t>(program_->chunks);
  // Fewer boxes than chunks never happens in a direct program; a ring needs nearly two per chunk.
  const std::size_t held = geometry == Geometry::exchange ? ranks : chunks;  // by one rank
  std::size_t elements = std::max(finest, options.piece_bytes / largest / held / finest * finest);
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

void Plan::check(const PlanOptions& options) const {
  if (direct_ && segments_.size() != 1) throw std::invalid_argument("direct: the call must have one tensor");
  for (const Instruction& instruction : program_->instructions) {
    if (pulls_ && (instruction.op == Op::reduce || instruction.op == Op::forward)) {
      throw std::invalid_argument("pulls: only what its owner hands to all that get it can be pulled");
    }
  }
  if (!splits_.empty() && (geometry_ != Geometry::exchange || segments_.size() != 1 ||
                           splits_.size() != static_cast<std::size_t>(program_->chunks))) {
    throw std::invalid_argument("splits: one for each chunk of an exchange of one tensor");
  }
  if (geometry_ == Geometry::exchange && program_->chunks != program_->ranks * program_->ranks) {
    throw std::invalid_argument("program: an exchange has a chunk for each pair of ranks");
  }
  if (static_cast<std::size_t>(program_->max_boxes()) > options.max_boxes) {
    throw std::invalid_argument("algorithm: its program needs " + std::to_string(program_->max_boxes()) +
                                " boxes a rank, and there are " + std::to_string(options.max_boxes) +
                                "; use a direct algorithm");
  }
}

// Pieces take whole granules from the front of each chunk until they have `elements` of it.
void Plan::cut(std::size_t elements) {
  const auto chunks = static_cast<std::size_t>(program_->chunks);
  const ChunkLayout layout{geometry_, chunks, static_cast<std::size_t>(program_->ranks), &splits_};
  std::vector<SegmentShape> shapes;
  for (const Segment& segment : segments_) shapes.push_back({segment.numel, segment.granule()});
  std::vector<std::vector<std::vector<ElementRange>>> cuts;  // [chunk][piece]
  pieces_ = 0;
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    cuts.push_back(cut_chunk(layout, shapes, chunk, elements));
    pieces_ = std::max(pieces_, cuts.back().size());
  }
  // Also what moves nothing takes a piece: nobody may be further ahead than there are slots.
  pieces_ = std::max<std::size_t>(pieces_, 1);
  slices_.clear();
  first_.assign(1, 0);
  box_stride_ = kLine;
  accumulator_bytes_ = 0;
  for (std::size_t piece = 0; piece < pieces_; ++piece) {
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
      if (piece < cuts[chunk].size()) {
        std::size_t sum_bytes = 0;
        Place inside{0, 0}, between{0, 0};  // of the slice before
        for (const ElementRange& range : cuts[chunk][piece]) {
          const Segment& segment = segments_[range.segment];
          inside = {inside.offset + inside.bytes, wire_bytes(segment.codec, range.numel, segment.dtype)};
          between = {between.offset + between.bytes, wire_bytes(segment.between, range.numel, segment.dtype)};
          slices_.push_back({range.segment, range.in_offset, range.out_offset, range.numel, inside, between});
          sum_bytes += AreaLayout::round_up(range.numel * size_of(accumulator_dtype(segment.dtype)), kLine);
        }
        for (const Place& last : {slices_.back().inside, slices_.back().between}) {
          box_stride_ = std::max(box_stride_, AreaLayout::round_up(last.offset + last.bytes, kLine));
        }
        accumulator_bytes_ = std::max(accumulator_bytes_, sum_bytes);
      }
      first_.push_back(slices_.size());
    }
  }
}

std::size_t Plan::given_bytes(int rank) const {
  if (splits_.empty()) return input_bytes_;
  const auto ranks = static_cast<std::size_t>(program_->ranks);
  const auto first = splits_.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(rank) * ranks);
  return std::accumulate(first, first + static_cast<std::ptrdiff_t>(ranks), std::size_t{0}) *
         size_of(segments_[0].dtype);
}

std::size_t Plan::payload_bytes(std::size_t piece, int chunk, int level) const {
  const Slice* last = end(piece, chunk);
  return last == begin(piece, chunk) ? 0 : last[-1].at(level).offset + last[-1].at(level).bytes;
}

}  // namespace dtcomm
