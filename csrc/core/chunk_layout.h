// Chunk layout: where the chunks of a schedule lie in the caller's tensors, and how they are cut into pieces.
//
// The engine (engine/plan.cpp), the fused CUDA programs (cuda/fused) and the Python executor (through the binding
// `chunk_layout`) all cut by these functions, so an element is encoded with the same neighbours everywhere.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dtcomm {

// How chunks lie in the caller's tensors. The numbers are part of the Python binding: append only.
enum class Geometry : std::uint8_t {
  whole = 0,     // input and output alike: each segment is cut at its own granules into `chunks` (all_reduce, ...)
  scatter = 1,   // input holds one shard per chunk, output one shard (reduce_scatter, scatter)
  gather = 2,    // input is one shard, output holds one per chunk (all_gather, gather)
  exchange = 3,  // input holds one shard per receiver, output one per sender; chunk = sender * ranks + receiver
};

// One tensor of a message. `numel` counts the whole tensor for Geometry::whole and one shard otherwise; `granule` is
// the number of elements after which a payload may be cut.
struct SegmentShape {
  std::size_t numel = 0;
  std::size_t granule = 1;
};

// A run of consecutive elements of one segment: offsets into the caller's input and output, all in elements.
struct ElementRange {
  std::uint32_t segment = 0;
  std::size_t in_offset = 0;
  std::size_t out_offset = 0;
  std::size_t numel = 0;
};

// The dimensions of a layout. `splits` holds the elements of each chunk of an exchange of unequal shards (one
// segment) and is empty where all shards have `numel` elements.
struct ChunkLayout {
  Geometry geometry = Geometry::whole;
  std::size_t chunks = 1;
  std::size_t ranks = 1;
  const std::vector<std::size_t>* splits = nullptr;
};

// Where `chunk` lies in the tensor of one segment; the result's `segment` is 0. A segment is cut at its own granules,
// so which rank sums an element does not depend on what else is in the message.
inline ElementRange chunk_range(const ChunkLayout& layout, const SegmentShape& segment, std::size_t chunk) {
  const std::size_t numel = segment.numel;
  switch (layout.geometry) {
    case Geometry::scatter:
      return {0, chunk * numel, 0, numel};
    case Geometry::gather:
      return {0, 0, chunk * numel, numel};
    case Geometry::exchange: {
      const std::size_t ranks = layout.ranks, src = chunk / ranks, dst = chunk % ranks;
      if (!layout.splits || layout.splits->empty()) return {0, dst * numel, src * numel, numel};
      const std::vector<std::size_t>& splits = *layout.splits;
      ElementRange range{0, 0, 0, splits[chunk]};
      for (std::size_t to = 0; to < dst; ++to) range.in_offset += splits[src * ranks + to];
      for (std::size_t from = 0; from < src; ++from) range.out_offset += splits[from * ranks + dst];
      return range;
    }
    case Geometry::whole:
      break;
  }
  const std::size_t granules = (numel + segment.granule - 1) / segment.granule;
  const std::size_t from = std::min(numel, granules * chunk / layout.chunks * segment.granule);
  const std::size_t to = std::min(numel, granules * (chunk + 1) / layout.chunks * segment.granule);
  return {0, from, from, to - from};
}

// The pieces of one chunk: consecutive runs of elements, in segment order. Every piece takes whole granules from the
// front of what is left until it has at least `elements` of the chunk, or until the chunk ends.
inline std::vector<std::vector<ElementRange>> cut_chunk(const ChunkLayout& layout,
                                                        const std::vector<SegmentShape>& segments, std::size_t chunk,
                                                        std::size_t elements) {
  std::vector<std::vector<ElementRange>> pieces;
  std::size_t free = 0;  // elements that the last piece still takes
  for (std::size_t i = 0; i < segments.size(); ++i) {
    ElementRange rest = chunk_range(layout, segments[i], chunk);
    const std::size_t unit = segments[i].granule;
    while (rest.numel > 0) {
      if (free == 0) {
        pieces.emplace_back();
        free = elements;
      }
      const std::size_t count = std::min(rest.numel, (free + unit - 1) / unit * unit);
      pieces.back().push_back({static_cast<std::uint32_t>(i), rest.in_offset, rest.out_offset, count});
      rest.in_offset += count;
      rest.out_offset += count;
      rest.numel -= count;
      free -= std::min(free, count);
    }
  }
  return pieces;
}

}  // namespace dtcomm
