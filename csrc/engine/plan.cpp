#include "engine/plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "engine/platform.h"
#include "engine/shm_layout.h"

namespace dtcomm {
namespace {

// From here on an operation takes milliseconds, over which short disturbances average out, so fewer trials tell as
// much.
constexpr std::size_t kLongBytes = std::size_t{16} << 20;
constexpr std::uint64_t kOperationsOfLong = 12;
// The first operation of a candidate finds in the caches what the candidate before it has left. On an Intel Xeon a
// single copy of 8 MiB took 1.27 ms after two operations with slots, and 0.81 ms after three single copies. From here
// on that is a small part of an operation.
constexpr std::size_t kBeyondCaches = std::size_t{128} << 20;
// Messages in both directions also find what the other direction has left there: single copies of 16 MiB took 2.5 ms
// when two had been made since the slots were used, and 1.8 ms from the sixth on.
constexpr std::uint64_t kRepeatsOfMessages = 8;

}  // namespace

std::size_t Segment::granule() const { return std::lcm(granule_elements(codec), granule_elements(between)); }

bool Variants::operator==(const Variants& other) const {
  return Variant::operator==(other) && threads == other.threads && offers == other.offers &&
         size_class == other.size_class && tries == other.tries && piece_sizes == other.piece_sizes;
}

void Variants::set_key() {
  key_ = hash_bytes(mix64(piece_bytes, flags() | tries.flags() << 8 | operations_of_stage << 16 | repeats << 32),
                    size_class.data(), size_class.size());
  key_ = hash_bytes(key_, piece_sizes.data(), piece_sizes.size() * sizeof(std::size_t));
}

Plan::Plan(PlanSpec spec, const Variant& variant)
    : spec_(std::move(spec)),
      variant_(variant),
      divisor_(spec_.average ? static_cast<std::size_t>(spec_.program->ranks) : 1) {
  throw_if_invalid(validate());
  const bool shards = geometry() == Geometry::scatter || geometry() == Geometry::exchange;
  const auto ranks = static_cast<std::size_t>(program().ranks);
  std::size_t largest = 1;
  std::size_t finest = SIZE_MAX;
  for (const Segment& segment : segments()) {
    largest = std::max(largest, size_of(segment.dtype));
    finest = std::min(finest, segment.granule());
    input_bytes_ += segment.numel * size_of(segment.dtype) * (shards ? ranks : 1);
  }
  Variants& variants = spec_.variants;
  if (variants.offers) {
    variants.repeats = kRepeatsOfMessages;
  } else if (input_bytes_ >= kLongBytes) {
    variants.operations_of_stage = kOperationsOfLong;
    if (input_bytes_ >= kBeyondCaches) variants.repeats = 1;
  }
  variants.set_key();
  set_fingerprint();
  if (segments().empty()) {
    cut_pieces(1);
    return;
  }
  const auto chunks = static_cast<std::size_t>(program().chunks);
  const std::size_t chunks_of_rank = geometry() == Geometry::exchange ? ranks : chunks;
  std::size_t elements = std::max(finest, variant_.piece_bytes / largest / chunks_of_rank / finest * finest);
  for (;;) {
    cut_pieces(elements);
    if (box_stride_ * static_cast<std::size_t>(max_boxes()) <= spec_.slot_bytes) return;
    if (elements <= finest) {
      throw std::invalid_argument("algorithm: its program needs " + std::to_string(max_boxes()) + " boxes of " +
                                  std::to_string(box_stride_) + " bytes, more than a slot of " +
                                  std::to_string(spec_.slot_bytes) + " bytes holds; use a direct algorithm");
    }
    elements = std::max(finest, elements / 2 / finest * finest);
  }
}

// What has to be equal on all ranks, the choices among variants included.
void Plan::set_fingerprint() {
  fingerprint_ = hash_bytes(static_cast<std::uint64_t>(geometry()) * 257 + static_cast<std::uint64_t>(op()),
                            text().data(), text().size());
  for (const Segment& segment : segments()) {
    fingerprint_ = mix64(fingerprint_, segment.numel * 16 + static_cast<std::uint64_t>(segment.dtype));
    fingerprint_ = hash_bytes(fingerprint_, &segment.codec, sizeof(Codec));
    fingerprint_ = hash_bytes(fingerprint_, &segment.between, sizeof(Codec));
  }
  fingerprint_ = hash_bytes(fingerprint_, spec_.splits.data(), spec_.splits.size() * sizeof(std::size_t));
  if (has_trials()) fingerprint_ = mix64(fingerprint_, variants().key());
}

Status Plan::validate() const {
  const Variants& variants = spec_.variants;
  if (variants.tries.alternative && !spec_.alternative) return Status::error("alternative: there is no program to try");
  if (may_zero_copy() && segments().size() != 1) return Status::error("zero_copy: the call must have one tensor");
  for (const Instruction& instruction : program().instructions) {
    if (may_single_copy() && (instruction.op == Op::reduce || instruction.op == Op::forward)) {
      return Status::error("single_copy: every receiver must get its data from the rank that owns it");
    }
  }
  if (variants.offers && program().ranks != 2) return Status::error("offers: of one rank to another");
  if (variants.threads < 1) return Status::error("threads: at least 1");
  const std::vector<std::size_t>& sizes = variants.piece_sizes;
  if (has_trials() &&
      (sizes.size() > kCandidates || std::find(sizes.begin(), sizes.end(), variants.piece_bytes) == sizes.end())) {
    return Status::error("piece_sizes: at most " + std::to_string(kCandidates) + ", and piece_bytes is one of them");
  }
  const auto chunks = static_cast<std::size_t>(program().chunks);
  if (!spec_.splits.empty() &&
      (geometry() != Geometry::exchange || segments().size() != 1 || spec_.splits.size() != chunks)) {
    return Status::error("splits: one for each chunk of an exchange of one tensor");
  }
  if (geometry() == Geometry::exchange && program().chunks != program().ranks * program().ranks) {
    return Status::error("program: an exchange has a chunk for each pair of ranks");
  }
  if (static_cast<std::size_t>(max_boxes()) > spec_.max_boxes) {
    return Status::error("algorithm: its program needs " + std::to_string(max_boxes()) +
                         " boxes a rank, and there are " + std::to_string(spec_.max_boxes) +
                         "; use a direct algorithm");
  }
  return Status();
}

// Cuts the chunks into pieces of at least `elements` elements and lays the payloads out in the boxes. Keeps the slices
// of the chunks that this rank handles, but counts pieces and bytes over all, since the ranks must agree on them.
void Plan::cut_pieces(std::size_t elements) {
  const auto chunks = static_cast<std::size_t>(program().chunks);
  const ChunkLayout layout{geometry(), chunks, static_cast<std::size_t>(program().ranks), &spec_.splits};
  std::vector<SegmentShape> shapes;
  for (const Segment& segment : segments()) shapes.push_back({segment.numel, segment.granule()});
  // An exchange has a chunk for each pair of ranks; the one with the most elements stands for those of other ranks.
  const bool exchange = geometry() == Geometry::exchange;
  const std::vector<std::size_t>& splits = spec_.splits;
  const auto largest = static_cast<std::size_t>(std::max_element(splits.begin(), splits.end()) - splits.begin());
  std::vector<std::vector<std::vector<Slice>>> cuts;  // [kept chunk][piece]
  pieces_ = 1;  // An empty operation takes a piece, too, so that no rank gets further ahead than there are slots.
  box_stride_ = kCacheLine;
  accumulator_bytes_ = 0;
  kept_chunk_.assign(chunks, kNotKept);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    const bool kept = program().handles_chunk[chunk];
    if (!kept && exchange && chunk != largest) continue;
    std::vector<std::vector<Slice>> pieces = lay_out(cut_chunk(layout, shapes, chunk, elements));
    pieces_ = std::max(pieces_, pieces.size());
    if (!kept) continue;
    kept_chunk_[chunk] = static_cast<std::uint32_t>(cuts.size());
    cuts.push_back(std::move(pieces));
  }
  kept_chunks_ = cuts.size();
  slices_.clear();
  first_slice_.assign(1, 0);
  for (std::size_t piece = 0; piece < pieces_; ++piece) {
    for (const auto& pieces : cuts) {
      if (piece < pieces.size()) slices_.insert(slices_.end(), pieces[piece].begin(), pieces[piece].end());
      first_slice_.push_back(slices_.size());
    }
  }
  slices_.shrink_to_fit();
}

// Places the payloads of the pieces of a chunk one behind the other, and counts the bytes of the largest piece.
std::vector<std::vector<Slice>> Plan::lay_out(const std::vector<std::vector<ElementRange>>& pieces) {
  std::vector<std::vector<Slice>> result;
  for (const auto& ranges : pieces) {
    std::vector<Slice> slices;
    std::size_t sum_bytes = 0;
    BoxSpan inside{0, 0}, between{0, 0};  // of the slice before
    for (const ElementRange& range : ranges) {
      const Segment& segment = segments()[range.segment];
      inside = {inside.offset + inside.bytes, wire_bytes(segment.codec, range.numel, segment.dtype)};
      between = {between.offset + between.bytes, wire_bytes(segment.between, range.numel, segment.dtype)};
      slices.push_back({range.segment, range.in_offset, range.out_offset, range.numel, inside, between});
      sum_bytes += round_up(range.numel * size_of(accumulator_dtype(segment.dtype)), kCacheLine);
    }
    for (const BoxSpan& last : {inside, between}) {
      box_stride_ = std::max(box_stride_, round_up(last.offset + last.bytes, kCacheLine));
    }
    accumulator_bytes_ = std::max(accumulator_bytes_, sum_bytes);
    result.push_back(std::move(slices));
  }
  return result;
}

std::shared_ptr<const Plan> Plan::with_variant(const Variant& variant, bool trial) const {
  const auto is_other = [&](const auto& plan) { return !(plan->variant_ == variant); };
  if (!trial && others_.size() > 1) {
    others_.erase(std::remove_if(others_.begin(), others_.end(), is_other), others_.end());
  }
  if (variant == variant_) return nullptr;
  const auto found = std::find_if_not(others_.begin(), others_.end(), is_other);
  if (found != others_.end()) return *found;
  others_.push_back(std::make_shared<const Plan>(spec_, variant));
  return others_.back();
}

std::size_t Plan::memory_bytes() const {
  return slices_.capacity() * sizeof(Slice) + first_slice_.capacity() * sizeof(std::size_t) +
         kept_chunk_.size() * sizeof(std::uint32_t) + spec_.splits.size() * sizeof(std::size_t) +
         program().instructions.size() * sizeof(Instruction);
}

std::size_t Plan::input_bytes_of(int rank) const {
  const std::vector<std::size_t>& splits = spec_.splits;
  if (splits.empty()) return input_bytes_;
  const auto ranks = static_cast<std::size_t>(program().ranks);
  const auto first = splits.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(rank) * ranks);
  return std::accumulate(first, first + static_cast<std::ptrdiff_t>(ranks), std::size_t{0}) *
         size_of(segments()[0].dtype);
}

std::size_t Plan::payload_bytes(std::size_t piece, int chunk, int level) const {
  const Slice* last = end(piece, chunk);
  return last == begin(piece, chunk) ? 0 : last[-1].at(level).offset + last[-1].at(level).bytes;
}

}  // namespace dtcomm
