// A plan: one program laid out over the shapes of a call, without its pointers. It is made once for a (program, shapes,
// codecs) and used by every such call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "core/chunk_layout.h"
#include "core/status.h"
#include "core/types.h"
#include "engine/program.h"
#include "engine/shm_layout.h"

namespace dtcomm {

// One tensor of the message. `numel` counts the whole tensor for Geometry::whole and one shard otherwise (the largest
// if an exchange has splits). Payloads that cross hosts have the codec `between`.
struct Segment {
  std::size_t numel = 0;
  DType dtype = DType::f32;
  Codec codec;
  Codec between;

  const Codec& at(int level) const { return level == 0 ? codec : between; }
  // The number of elements after which the payloads of both codecs may be cut.
  std::size_t granule() const;
};

// Where the payload of a slice lies in a box, in bytes.
struct BoxSpan {
  std::size_t offset;
  std::size_t bytes;
};

// A run of elements of one segment in one chunk of one piece. It is encoded on its own, at its span of the box.
struct Slice {
  std::uint32_t segment;
  std::size_t in_offset;   // elements
  std::size_t out_offset;  // elements
  std::size_t numel;
  BoxSpan inside;
  BoxSpan between;

  const BoxSpan& at(int level) const { return level == 0 ? inside : between; }
};

// One way to carry out an operation; none changes its result.
struct Variant {
  std::size_t piece_bytes = 256 * 1024;  // of the input, over all chunks
  bool single_copy = false;              // peers copy what a rank publishes out of its private memory
  bool stream_payload = false;           // payloads are written with non-temporal stores
  bool stream_output = false;            // so are outputs, where nothing was read there just before
  bool alternative = false;              // it runs the alternative program
  bool parallel = false;                 // it uses Variants::threads threads, not one

  unsigned flags() const {
    return single_copy | stream_payload << 1 | stream_output << 2 | alternative << 3 | parallel << 4;
  }
  bool operator==(const Variant& other) const { return piece_bytes == other.piece_bytes && flags() == other.flags(); }
};

// The variant with which the operations of a plan begin, and what a Tuner tries.
struct Variants : Variant {
  int threads = 1;                       // of this rank, if the variant is parallel; ranks may differ
  bool offers = false;                   // a message of one rank to another: single copies may be offers, see offer.h
  std::string size_class;                // what operations that are tuned together have in common; empty: no trials
  Variant tries;                         // the flags of which both values are tried
  std::vector<std::size_t> piece_sizes;  // to try; piece_bytes is one of them
  // Of a stage of trials: operations, at least, and operations in a row of one candidate, of which the last is timed.
  std::uint64_t operations_of_stage = 64;
  std::uint64_t repeats = 4;

  bool operator==(const Variants& other) const;
  // Equal for plans that are tuned together: those of a size class for which the same variants are tried.
  std::uint64_t key() const { return key_; }
  void set_key();

 private:
  std::uint64_t key_ = 0;
};

// What a plan is made of.
struct PlanSpec {
  std::shared_ptr<const Program> program;
  Geometry geometry = Geometry::whole;
  ReduceOp op = ReduceOp::sum;
  bool average = false;
  std::vector<Segment> segments;
  std::string text;  // the operation, for errors; ranks that run different operations have different ones
  Variants variants;
  std::size_t slot_bytes = 512 * 1024;  // for a rank's boxes of one piece
  bool zero_copy = false;               // peers may read and write tensors that lie in shared memory
  // A program with the same results that may take less time, or null, and whether it may run by zero copy.
  std::shared_ptr<const Program> alternative;
  bool alternative_zero_copy = false;
  bool checksum = false;             // payloads carry a CRC32C
  std::size_t max_boxes = SIZE_MAX;  // for which the communicator has flags
  // An exchange of unequal shards: the elements of each chunk of the only segment. Empty if all have `numel`.
  std::vector<std::size_t> splits;
  std::string call_info;  // the call as JSON, for reports
};

class Plan {
 public:
  // Throws std::invalid_argument if the parts of the specification do not fit each other.
  explicit Plan(const PlanSpec& spec) : Plan(spec, spec.variants) {}
  Plan(PlanSpec spec, const Variant& variant);

  const Program& program() const { return *(variant_.alternative ? spec_.alternative : spec_.program); }
  Geometry geometry() const { return spec_.geometry; }
  int max_boxes() const { return program().max_boxes(); }
  ReduceOp op() const { return spec_.op; }
  std::size_t divisor() const { return divisor_; }
  const std::vector<Segment>& segments() const { return spec_.segments; }
  std::size_t pieces() const { return pieces_; }
  std::size_t box_stride() const { return box_stride_; }
  std::size_t accumulator_bytes() const { return accumulator_bytes_; }
  // Whether peers may access the tensor itself, mapped or (single_copy) by copying out of its owner's memory.
  bool zero_copy() const {
    return (variant_.alternative ? spec_.alternative_zero_copy : spec_.zero_copy) || single_copy();
  }
  bool single_copy() const { return variant_.single_copy; }
  // The same of some variant of this plan.
  bool may_zero_copy() const { return spec_.zero_copy || spec_.alternative_zero_copy || may_single_copy(); }
  bool may_single_copy() const { return single_copy() || variants().tries.single_copy; }
  // A message that fits into the slots: its sender does not wait for a receiver that comes late.
  bool offers() const { return variants().offers && pieces_ <= kSlots; }
  bool checksum() const { return spec_.checksum; }
  // The threads of this rank that work on the operation.
  int threads() const { return variant_.parallel ? variants().threads : 1; }
  bool streams_payload() const { return variant_.stream_payload; }
  const PlanSpec& spec() const { return spec_; }
  const Variants& variants() const { return spec_.variants; }
  bool has_trials() const { return !variants().size_class.empty(); }
  // This plan with another variant of its own; null if that is the one in use here. For a trial, the plans of other
  // variants are kept as well. Only the thread that starts operations may call it.
  std::shared_ptr<const Plan> with_variant(const Variant& variant, bool trial) const;
  const std::string& text() const { return spec_.text; }
  const std::string& call_info() const { return spec_.call_info; }
  std::uint64_t fingerprint() const { return fingerprint_; }
  std::size_t input_bytes() const { return input_bytes_; }
  // The size of a rank's input; with splits it differs between ranks.
  std::size_t input_bytes_of(int rank) const;
  // Whether this rank writes its output of a chunk with non-temporal stores: not where it was read just before.
  bool streams_output(int chunk) const {
    return variant_.stream_output &&
           (geometry() != Geometry::whole || !program().reads_input[static_cast<std::size_t>(chunk)]);
  }

  // The slices of a chunk that this rank's program handles.
  const Slice* begin(std::size_t piece, int chunk) const { return slices_.data() + index(piece, chunk); }
  const Slice* end(std::size_t piece, int chunk) const { return slices_.data() + index(piece, chunk, 1); }
  std::size_t payload_bytes(std::size_t piece, int chunk, int level) const;
  // The memory that the plan itself takes.
  std::size_t memory_bytes() const;

 private:
  static constexpr std::uint32_t kNotKept = UINT32_MAX;

  std::size_t index(std::size_t piece, int chunk, std::size_t next = 0) const {
    return first_slice_[piece * kept_chunks_ + kept_chunk_[static_cast<std::size_t>(chunk)] + next];
  }
  void cut_pieces(std::size_t elements);
  std::vector<std::vector<Slice>> lay_out(const std::vector<std::vector<ElementRange>>& pieces);
  Status validate() const;
  void set_fingerprint();

  PlanSpec spec_;
  Variant variant_;
  std::size_t divisor_;
  std::size_t pieces_ = 0;
  std::size_t box_stride_ = 0;
  std::size_t accumulator_bytes_ = 0;  // per chunk
  std::size_t input_bytes_ = 0;
  std::uint64_t fingerprint_ = 0;
  std::vector<Slice> slices_;              // by piece and kept chunk
  std::vector<std::size_t> first_slice_;   // [piece * kept_chunks_ + kept chunk]
  std::vector<std::uint32_t> kept_chunk_;  // by chunk: its position among those kept
  std::size_t kept_chunks_ = 0;
  mutable std::vector<std::shared_ptr<const Plan>> others_;  // plans of other variants, made so far
};

// The dtype in which a partial sum of `dtype` is kept between instructions.
constexpr DType accumulator_dtype(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 ? DType::f32 : dtype;
}

}  // namespace dtcomm
