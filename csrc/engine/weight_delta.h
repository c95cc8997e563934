// Payloads of deltas of weights: granules (codec/weight_delta.h) behind a head and an index, coded by several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "codec/weight_delta.h"
#include "core/status.h"
#include "cpu/kernels.h"

namespace dtcomm {

constexpr std::size_t kDeltaPiece = 16 * kDeltaGranule;  // elements that a thread claims at a time

// Writes payloads. Elements are added in pieces, so that they need not be in memory at one time.
class DeltaWriter {
 public:
  DeltaWriter(WeightKind kind, std::size_t numel);
  // Codes the elements from `first` on, a multiple of kDeltaPiece: kDeltaPiece of them or a multiple, or the last ones.
  // Up to `threads` threads of the pool work on them. Returns how many differ.
  std::size_t add(const Kernels& kernels, std::size_t first, std::size_t n, const void* old, const void* fresh,
                  int threads);
  // Bytes of the payload, after all elements were added.
  std::size_t bytes() const;
  void write(std::uint8_t* to) const;

 private:
  WeightKind kind_;
  std::size_t numel_;
  std::vector<std::uint8_t> index_;
  std::vector<std::vector<std::uint8_t>> runs_;
};

// Reads a payload, which stays where it is. Elements are checked and decoded in pieces like those of DeltaWriter.
class DeltaReader {
 public:
  // Checks head and index.
  DeltaReader(const std::uint8_t* payload, std::size_t bytes);
  // Why nothing else may be called; empty if head and index are whole.
  const std::string& error() const { return error_; }
  WeightKind kind() const { return kind_; }
  std::size_t numel() const { return numel_; }
  // Checks granules against the weights at `old`, and writes the new weights to `out`, unless it is null. If there is
  // an error, `old` has not changed, and other memory at `out` may hold anything. `checked`: they were checked before
  // with the same weights, which are not checked again.
  Status decode(const Kernels& kernels, std::size_t first, std::size_t n, const void* old, void* out, int threads,
                bool checked) const;

 private:
  std::string read_head(std::size_t bytes);

  const std::uint8_t* payload_;
  std::string error_;
  WeightKind kind_ = WeightKind::bytes;
  std::size_t numel_ = 0;
  std::vector<std::size_t> runs_;  // where the granules of each piece start
};

}  // namespace dtcomm
