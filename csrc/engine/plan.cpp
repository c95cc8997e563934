#include "engine/plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "engine/hash.h"
#include "engine/shm_layout.h"

namespace dtcomm {
namespace {

constexpr std::size_t kLargePieces = 32;           // of an operation that is large: more than there are slots
constexpr std::size_t kLargestPiece = 512 * 1024;  // at least so many bytes count as a piece
// From here on an operation takes milliseconds, over which short disturbances average out, so fewer rounds tell as
// much.
constexpr std::size_t kLongBytes = std::size_t{16} << 20;
constexpr std::uint64_t kRoundsOfLong = 3;
// An operation finds in the caches what the one before it has left, which was not the same if that was another variant.
// On an Intel Xeon a single copy of 8 MiB took 1.27 ms after two operations with slots, 0.81 after three single copies.
// From here on that is a small part of an operation.
constexpr std::size_t kBeyondCaches = std::size_t{128} << 20;
// Messages in both directions find in the caches what the other direction has left there as well: there, single copies
// of 16 MiB took 2.5 ms when two had been made since the slots were used, and 1.8 from the sixth on.
constexpr std::uint64_t kRoundsOfMessages = 5, kRepeatsOfMessages = 8;

}  // namespace

std::size_t Segment::granule() const { return std::lcm(granule_elements(codec), granule_elements(between)); }

Plan::Plan(std::shared_ptr<const Program> program, Geometry geometry, ReduceOp op, bool average,
           std::vector<Segment> segments, const PlanOptions& options, std::string text)
    : program_(std::move(program)),
      geometry_(geometry),
      op_(op),
      divisor_(average ? static_cast<std::size_t>(program_->ranks) : 1),
      segments_(std::move(segments)),
      options_(options),
      text_(std::move(text)) {
  throw_if_invalid(validate(options));
  const auto ranks = static_cast<std::size_t>(program_->ranks);
  std::size_t largest = 1;
  std::size_t finest = SIZE_MAX;
  fingerprint_ = hash_bytes(static_cast<std::uint64_t>(geometry) * 257 + static_cast<std::uint64_t>(op), text_.data(),
                            text_.size());
  for (const Segment& segment : segments_) {
    largest = std::max(largest, size_of(segment.dtype));
    finest = std::min(finest, segment.granule());
    fingerprint_ = mix64(fingerprint_, segment.numel * 16 + static_cast<std::uint64_t>(segment.dtype));
    fingerprint_ = hash_bytes(fingerprint_, &segment.codec, sizeof(Codec));
    fingerprint_ = hash_bytes(fingerprint_, &segment.between, sizeof(Codec));
    const bool shards = geometry == Geometry::scatter || geometry == Geometry::exchange;
    input_bytes_ += segment.numel * size_of(segment.dtype) * (shards ? ranks : 1);
  }
  const std::vector<std::size_t>& splits = options_.splits;
  fingerprint_ = hash_bytes(fingerprint_, splits.data(), splits.size() * sizeof(std::size_t));
  const VariantSpace& space = options_.space;
  std::size_t largest_piece = kLargestPiece;
  for (const std::size_t bytes : space.piece_bytes) largest_piece = std::max(largest_piece, bytes);
  options_.space.large = input_bytes_ >= kLargePieces * largest_piece;
  // Variants of a message that does not fit into the slots are messages too.
  if (!space.size_class.empty()) options_.space.message |= options.offers;
  if (options_.space.message) {
    options_.space.rounds = kRoundsOfMessages;
    options_.space.repeats = kRepeatsOfMessages;
  } else if (input_bytes_ >= kLongBytes) {
    options_.space.rounds = kRoundsOfLong;
    if (input_bytes_ >= kBeyondCaches) options_.space.repeats = 1;
  }
  options_.space.set_key();
  if (!space.size_class.empty()) fingerprint_ = mix64(fingerprint_, space.key());
  if (segments_.empty()) {
    cut_pieces(1);
    return;
  }
  const auto chunks = static_cast<std::size_t>(program_->chunks);
  const std::size_t chunks_of_rank = geometry == Geometry::exchange ? ranks : chunks;
  std::size_t elements = std::max(finest, options_.variant.piece_bytes / largest / chunks_of_rank / finest * finest);
  for (;;) {
    cut_pieces(elements);
    if (box_stride_ * static_cast<std::size_t>(program_->max_boxes()) <= options.slot_bytes) {
      options_.offers = options.offers && pieces_ <= kSlots;
      return;
    }
    if (elements <= finest) {
      throw std::invalid_argument("algorithm: its program needs " + std::to_string(program_->max_boxes()) +
                                  " boxes of " + std::to_string(box_stride_) + " bytes, more than a slot of " +
                                  std::to_string(options.slot_bytes) + " bytes holds; use a direct algorithm");
    }
    elements = std::max(finest, elements / 2 / finest * finest);
  }
}

Status Plan::validate(const PlanOptions& options) const {
  if (may_zero_copy() && segments_.size() != 1) return Status::error("zero_copy: the call must have one tensor");
  for (const Instruction& instruction : program_->instructions) {
    if (may_single_copy() && (instruction.op == Op::reduce || instruction.op == Op::forward)) {
      return Status::error("single_copy: every receiver must get its data from the rank that owns it");
    }
  }
  if (options.offers && program_->ranks != 2) return Status::error("offers: of one rank to another");
  if (options.threads < 1) return Status::error("threads: at least 1");
  const VariantSpace& space = options.space;
  if (!space.size_class.empty() && (space.piece_bytes.empty() || space.piece_bytes.size() > VariantSpace::kPieceSizes ||
                                    space.initial >> VariantSpace::kPieceShift >= space.piece_bytes.size())) {
    return Status::error("piece_bytes: 1 to " + std::to_string(VariantSpace::kPieceSizes) + " sizes to try");
  }
  if ((space.tried & VariantSpace::kAlternative) != 0 && !options.alternative) {
    return Status::error("alternative: there is no program to try");
  }
  if (!options.splits.empty() && (geometry_ != Geometry::exchange || segments_.size() != 1 ||
                                  options.splits.size() != static_cast<std::size_t>(program_->chunks))) {
    return Status::error("splits: one for each chunk of an exchange of one tensor");
  }
  if (geometry_ == Geometry::exchange && program_->chunks != program_->ranks * program_->ranks) {
    return Status::error("program: an exchange has a chunk for each pair of ranks");
  }
  if (static_cast<std::size_t>(program_->max_boxes()) > options.max_boxes) {
    return Status::error("algorithm: its program needs " + std::to_string(program_->max_boxes()) +
                         " boxes a rank, and there are " + std::to_string(options.max_boxes) +
                         "; use a direct algorithm");
  }
  return Status();
}

// Cuts the chunks into pieces of at least `elements` elements and lays the payloads out in the boxes. Keeps the slices
// of the chunks that this rank handles, but counts pieces and bytes over all, since the ranks must agree on them.
void Plan::cut_pieces(std::size_t elements) {
  const auto chunks = static_cast<std::size_t>(program_->chunks);
  const ChunkLayout layout{geometry_, chunks, static_cast<std::size_t>(program_->ranks), &options_.splits};
  std::vector<SegmentShape> shapes;
  for (const Segment& segment : segments_) shapes.push_back({segment.numel, segment.granule()});
  // An exchange has a chunk for each pair of ranks; the one with the most elements stands for those of other ranks.
  const bool exchange = geometry_ == Geometry::exchange;
  const std::vector<std::size_t>& splits = options_.splits;
  const auto largest = static_cast<std::size_t>(std::max_element(splits.begin(), splits.end()) - splits.begin());
  std::vector<std::vector<std::vector<Slice>>> cuts;  // [kept chunk][piece]
  pieces_ = 1;  // An empty operation takes a piece, too, so that no rank gets further ahead than there are slots.
  box_stride_ = kCacheLine;
  accumulator_bytes_ = 0;
  kept_chunk_.assign(chunks, kNotKept);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    const bool kept = program_->handles_chunk[chunk];
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
      const Segment& segment = segments_[range.segment];
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

void VariantSpace::set_key() {
  key_ = hash_bytes(std::uint64_t{large} << 63 | rounds << 56 | repeats << 48 | std::uint64_t{tried} << 32 | initial,
                    size_class.data(), size_class.size());
  key_ = hash_bytes(key_, piece_bytes.data(), piece_bytes.size() * sizeof(std::size_t));
}

std::shared_ptr<const Plan> Plan::with_variant(unsigned variant, bool trial) const {
  if (!trial && variants_.size() > 1) {
    variants_.erase(
        std::remove_if(variants_.begin(), variants_.end(), [&](const auto& other) { return other.first != variant; }),
        variants_.end());
  }
  if (variant == options_.space.initial) return nullptr;
  for (const auto& [number, plan] : variants_) {
    if (number == variant) return plan;
  }
  PlanOptions options = options_;
  options.variant = options_.space.at(variant);
  const auto& program = options.variant.alternative ? options_.alternative : program_;
  auto plan = std::make_shared<const Plan>(program, geometry_, op_, divisor_ > 1, segments_, options, text_);
  variants_.emplace_back(variant, plan);
  return plan;
}

std::size_t Plan::memory_bytes() const {
  return slices_.capacity() * sizeof(Slice) + first_slice_.capacity() * sizeof(std::size_t) +
         kept_chunk_.size() * sizeof(std::uint32_t) + options_.splits.size() * sizeof(std::size_t) +
         program_->instructions.size() * sizeof(Instruction);
}

std::size_t Plan::input_bytes_of(int rank) const {
  const std::vector<std::size_t>& splits = options_.splits;
  if (splits.empty()) return input_bytes_;
  const auto ranks = static_cast<std::size_t>(program_->ranks);
  const auto first = splits.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(rank) * ranks);
  return std::accumulate(first, first + static_cast<std::ptrdiff_t>(ranks), std::size_t{0}) *
         size_of(segments_[0].dtype);
}

std::size_t Plan::payload_bytes(std::size_t piece, int chunk, int level) const {
  const Slice* last = end(piece, chunk);
  return last == begin(piece, chunk) ? 0 : last[-1].at(level).offset + last[-1].at(level).bytes;
}

}  // namespace dtcomm
