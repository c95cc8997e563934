// A plan: one program laid over the shapes of one call, without its pointers. Made once per (program, shapes,
// codecs) and reused by every call like it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "core/chunk_layout.h"
#include "core/types.h"
#include "engine/program.h"

namespace dtcomm {

// One tensor of the message. `numel` counts the whole tensor for Geometry::whole, one shard otherwise (the largest
// where an exchange has splits). What crosses hosts has the codec `between`.
struct Segment {
  std::size_t numel = 0;
  DType dtype = DType::f32;
  Codec codec;
  Codec between;

  const Codec& at(int level) const { return level == 0 ? codec : between; }
  // Elements: where the payloads of both may be cut.
  std::size_t granule() const;
};

// Where a slice lies in a box.
struct Place {
  std::size_t offset;  // bytes
  std::size_t bytes;
};

// A run of elements of one segment in one chunk of one piece: encoded on its own, at its place in the box.
struct Slice {
  std::uint32_t segment;
  std::size_t in_offset;   // elements
  std::size_t out_offset;  // elements
  std::size_t numel;
  Place inside;
  Place between;

  const Place& at(int level) const { return level == 0 ? inside : between; }
};

struct PlanOptions {
  std::size_t piece_bytes = 256 * 1024;  // of the input, over all chunks
  std::size_t slot_bytes = 512 * 1024;   // what a rank's boxes of one piece may take
  bool direct = false;                   // peers may read and write tensors that lie in shared memory
  bool pulls = false;                    // ... and pull what one rank hands on from any memory of that rank
  bool checksum = false;                 // payloads travel with their CRC32C
  std::size_t max_boxes = SIZE_MAX;      // that the communicator has flags for
  // Exchange of unequal shards: elements of each chunk of the only segment; empty where all have `numel`.
  std::vector<std::size_t> splits;
  std::string about;  // the call as JSON, for reports
};

class Plan {
 public:
  Plan(std::shared_ptr<const Program> program, Geometry geometry, ReduceOp op, bool average,
       std::vector<Segment> segments, const PlanOptions& options, std::string text);

  const Program& program() const { return *program_; }
  Geometry geometry() const { return geometry_; }
  int max_boxes() const { return program_->max_boxes(); }
  ReduceOp op() const { return op_; }
  std::size_t divisor() const { return divisor_; }
  const std::vector<Segment>& segments() const { return segments_; }
  std::size_t pieces() const { return pieces_; }
  std::size_t box_stride() const { return box_stride_; }
  std::size_t accumulator_bytes() const { return accumulator_bytes_; }
  bool direct() const { return direct_; }
  bool pulls() const { return pulls_; }
  bool checksum() const { return checksum_; }
  const std::string& text() const { return text_; }
  const std::string& about() const { return about_; }
  std::uint64_t fingerprint() const { return fingerprint_; }
  std::size_t input_bytes() const { return input_bytes_; }
  // What a rank has for the others and itself: its input, which splits make larger or smaller than another's.
  std::size_t given_bytes(int rank) const;
  // Whether what this rank writes of a chunk goes around the cache: large results that were not read just before.
  bool streams(int chunk) const {
    return large_ && (geometry_ != Geometry::whole || !program_->reads_input[static_cast<std::size_t>(chunk)]);
  }

  const Slice* begin(std::size_t piece, int chunk) const { return slices_.data() + index(piece, chunk); }
  const Slice* end(std::size_t piece, int chunk) const { return slices_.data() + index(piece, chunk, 1); }
  std::size_t payload_bytes(std::size_t piece, int chunk, int level) const;

 private:
  std::size_t index(std::size_t piece, int chunk, std::size_t next = 0) const {
    return first_[piece * static_cast<std::size_t>(program_->chunks) + static_cast<std::size_t>(chunk) + next];
  }
  void cut(std::size_t elements);
  void check(const PlanOptions& options) const;

  std::shared_ptr<const Program> program_;
  Geometry geometry_;
  ReduceOp op_;
  std::size_t divisor_;
  std::vector<Segment> segments_;
  std::vector<std::size_t> splits_;
  std::size_t pieces_ = 0;
  std::size_t box_stride_ = 0;
  std::size_t accumulator_bytes_ = 0;  // per chunk
  std::size_t input_bytes_ = 0;
  bool direct_;
  bool pulls_;
  bool checksum_;
  bool large_ = false;
  std::string text_;
  std::string about_;
  std::uint64_t fingerprint_ = 0;
  std::vector<Slice> slices_;
  std::vector<std::size_t> first_;
};

// The dtype in which an unencoded sum of `dtype` is kept between instructions.
constexpr DType accumulator_dtype(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 ? DType::f32 : dtype;
}

}  // namespace dtcomm
