// How many elements a granule of each codec has, and what follows from these numbers. dtcomm/codecs/base.py has the
// same in Python.
#pragma once

#include <cstddef>

namespace dtcomm {

constexpr std::size_t kSmallestBlock = 16, kLargestBlock = 4096;  // elements that share a scale

constexpr std::size_t kGranule = 1024;  // of casts and of blocks; a larger block is a granule of its own
constexpr std::size_t kSparseGranule = 4096;
constexpr std::size_t kValueGranule = kGranule;  // of the kept values of a sparse granule: a payload of their own codec
constexpr std::size_t kNvfp4Block = 16, kNvfp4Granule = 4096;
constexpr unsigned kVariableGranuleShift = 12;
constexpr std::size_t kVariableGranule = std::size_t{1} << kVariableGranuleShift;
constexpr std::size_t kLosslessGranule = 4096;
constexpr std::size_t kLargestGranule = 4096;
static_assert(kLargestBlock <= kLargestGranule && kGranule <= kLargestGranule && kSparseGranule <= kLargestGranule &&
                  kNvfp4Granule <= kLargestGranule && kVariableGranule <= kLargestGranule,
              "a granule of every codec has room in buffers of kLargestGranule elements");

constexpr std::size_t kPositionBits = 12;  // of a position within a sparse granule
static_assert(kSparseGranule <= std::size_t{1} << kPositionBits, "every position has a code");

// Blocks of a granule of `kGranule` elements: the size of arrays with an element per block. layout.h's most_blocks()
// holds each family that has such arrays to it.
constexpr std::size_t kMostBlocks = kGranule / kSmallestBlock;

}  // namespace dtcomm
