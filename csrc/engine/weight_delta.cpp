#include "engine/weight_delta.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "engine/crc32c.h"
#include "engine/thread_pool.h"

namespace dtcomm {
namespace {

constexpr char kMagic[4] = {'D', 'T', 'W', 'D'};
constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kCheckedHead = kDeltaHead - 4;  // the bytes before the head's checksum

std::size_t granules_of(std::size_t numel) { return numel / kDeltaGranule + (numel % kDeltaGranule != 0); }

template <class T>
void put(std::uint8_t* to, T value) {
  for (std::size_t i = 0; i < sizeof value; ++i) to[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

template <class T>
T get(const std::uint8_t* from) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof value; ++i) value = static_cast<T>(value | static_cast<T>(from[i]) << (8 * i));
  return value;
}

// The checksum of head and index together.
std::uint32_t head_checksum(const std::uint8_t* head, const std::uint8_t* index, std::size_t index_bytes) {
  std::uint8_t sums[8];
  put(sums, crc32c(head, kCheckedHead));
  put(sums + 4, crc32c(index, index_bytes));
  return crc32c(sums, sizeof sums);
}

// Calls function(run, granule, its first element, its elements) for the granules of some elements; threads claim runs.
template <class Function>
void for_granules(int threads, std::size_t first, std::size_t n, const Function& function) {
  const std::size_t runs = n / kDeltaPiece + (n % kDeltaPiece != 0), end = first + n;
  ThreadPool::instance().run(threads, runs, [&](std::size_t run) {
    const std::size_t from = first + run * kDeltaPiece, to = std::min(end, from + kDeltaPiece);
    auto each = function(from / kDeltaPiece);
    for (std::size_t at = from; at < to; at += kDeltaGranule) {
      each(at / kDeltaGranule, at, std::min(kDeltaGranule, to - at));
    }
  });
}

// Whether some elements of a tensor are a piece of it.
void check_piece(std::size_t numel, std::size_t first, std::size_t n) {
  const bool inside = first <= numel && n <= numel - first;
  if (!inside || first % kDeltaPiece != 0 || (n % kDeltaPiece != 0 && first + n != numel)) {
    throw std::invalid_argument("first, n: not a piece of the tensor");
  }
}

using Room = std::unique_ptr<std::uint32_t[]>;
Room make_room() { return Room(new std::uint32_t[kDeltaRoom]); }  // not cleared, so that unused pages stay untouched

}  // namespace

DeltaWriter::DeltaWriter(WeightKind kind, std::size_t numel)
    : kind_(kind),
      numel_(numel),
      index_(granules_of(numel) * kDeltaEntry),
      runs_(numel / kDeltaPiece + (numel % kDeltaPiece != 0)) {}

std::size_t DeltaWriter::add(const Kernels& kernels, std::size_t first, std::size_t n, const void* old,
                             const void* fresh, int threads) {
  check_piece(numel_, first, n);
  const std::size_t size = layout_of(kind_).size;
  std::atomic<std::size_t> differing = 0;
  for_granules(threads, first, n, [&](std::size_t run) {
    runs_[run].clear();
    return [&, run, room = make_room(),
            coded = std::unique_ptr<std::uint8_t[]>(
                new std::uint8_t[delta_granule_bound(kDeltaGranule, size) + kDeltaSlack])](
               std::size_t g, std::size_t at, std::size_t count) {
      const auto* const from = static_cast<const std::uint8_t*>(old) + (at - first) * size;
      const auto* const to = static_cast<const std::uint8_t*>(fresh) + (at - first) * size;
      std::size_t changed = 0;
      const std::size_t bytes = kernels.delta.encode(kind_, from, to, count, room.get(), coded.get(), &changed);
      put(index_.data() + g * kDeltaEntry, static_cast<std::uint32_t>(bytes));
      put(index_.data() + g * kDeltaEntry + 4, crc32c(coded.get(), bytes));
      runs_[run].insert(runs_[run].end(), coded.get(), coded.get() + bytes);
      differing += changed;
    };
  });
  return differing;
}

std::size_t DeltaWriter::bytes() const {
  std::size_t bytes = kDeltaHead + index_.size() + kDeltaPadding;
  for (const auto& run : runs_) bytes += run.size();
  return bytes;
}

void DeltaWriter::write(std::uint8_t* to) const {
  std::memset(to, 0, kDeltaHead);
  std::memcpy(to, kMagic, sizeof kMagic);
  to[4] = kVersion;
  to[5] = static_cast<std::uint8_t>(kind_);
  put(to + 8, std::uint64_t{numel_});
  put(to + 16, std::uint64_t{bytes()});
  put(to + kCheckedHead, head_checksum(to, index_.data(), index_.size()));
  std::copy(index_.begin(), index_.end(), to + kDeltaHead);
  std::uint8_t* at = to + kDeltaHead + index_.size();
  for (const auto& run : runs_) at = std::copy(run.begin(), run.end(), at);
  std::memset(at, 0, kDeltaPadding);
}

DeltaReader::DeltaReader(const std::uint8_t* payload, std::size_t bytes) : payload_(payload) {
  error_ = read_head(bytes);
}

std::string DeltaReader::read_head(std::size_t bytes) {
  if (bytes < kDeltaHead + kDeltaPadding) return "is shorter than its head";
  if (std::memcmp(payload_, kMagic, sizeof kMagic) != 0) return "is not a delta of weights";
  if (payload_[4] != kVersion) return "has version " + std::to_string(payload_[4]) + "; this is version 1";
  if (payload_[5] >= kWeightKinds) return "has elements of an unknown kind";
  for (const std::size_t unused : {6, 7, 24, 25, 26, 27}) {
    if (payload_[unused] != 0) return "has a head with unknown fields";
  }
  if (get<std::uint64_t>(payload_ + 16) != bytes) return "has another length than its head states";
  const auto numel = get<std::uint64_t>(payload_ + 8);
  const std::size_t granules = granules_of(numel);
  std::size_t left = bytes - kDeltaHead - kDeltaPadding;
  // Division, as the product of a hostile number may overflow.
  if (granules > left / kDeltaEntry) return "is too short for its number of elements";
  const std::uint8_t* const index = payload_ + kDeltaHead;
  if (get<std::uint32_t>(payload_ + kCheckedHead) != head_checksum(payload_, index, granules * kDeltaEntry)) {
    return "has a damaged head or index";
  }
  kind_ = static_cast<WeightKind>(payload_[5]);
  numel_ = numel;
  left -= granules * kDeltaEntry;
  std::size_t at = kDeltaHead + granules * kDeltaEntry;
  for (std::size_t g = 0; g < granules; ++g) {
    const std::size_t length = get<std::uint32_t>(index + g * kDeltaEntry);
    if (length > left) return "has an index with impossible lengths";
    if (g % (kDeltaPiece / kDeltaGranule) == 0) runs_.push_back(at);
    left -= length;
    at += length;
  }
  if (left != 0) return "goes on behind its last granule";
  const std::uint8_t* const padding = payload_ + at;
  const bool zeros = std::all_of(padding, padding + kDeltaPadding, [](std::uint8_t byte) { return byte == 0; });
  return zeros ? "" : "has a damaged end";
}

Status DeltaReader::decode(const Kernels& kernels, std::size_t first, std::size_t n, const void* old, void* out,
                           int threads, bool checked) const {
  check_piece(numel_, first, n);
  if (out && out == old && !checked) {
    const Status status = decode(kernels, first, n, old, nullptr, threads, false);
    if (!status.ok()) return status;
    checked = true;
  }
  const std::size_t size = layout_of(kind_).size;
  const std::uint8_t* const index = payload_ + kDeltaHead;
  std::mutex mutex;
  std::size_t failed = SIZE_MAX;  // the first granule with an error
  const char* reason = nullptr;
  for_granules(threads, first, n, [&](std::size_t run) {
    return [&, room = out ? make_room() : Room(), granule = payload_ + runs_[run]](std::size_t g, std::size_t at,
                                                                                   std::size_t count) mutable {
      const std::size_t length = get<std::uint32_t>(index + g * kDeltaEntry), offset = (at - first) * size;
      const auto* const from = static_cast<const std::uint8_t*>(old) + offset;
      const char* error = nullptr;
      if (!checked && crc32c(granule, length) != get<std::uint32_t>(index + g * kDeltaEntry + 4)) {
        error = "has a granule with another checksum than its index states";
      } else if (!out) {
        error = kernels.delta.check(kind_, granule, length, count, from);
      } else {
        auto* const weights = static_cast<std::uint8_t*>(out) + offset;
        if (out != old) std::memcpy(weights, from, count * size);
        error = kernels.delta.decode(kind_, granule, length, count, room.get(), weights);
      }
      if (error && !checked) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (g < failed) reason = error;
        failed = std::min(failed, g);
      }
      granule += length;
    };
  });
  return reason ? Status::error(reason + std::string(" (granule ") + std::to_string(failed) + ")") : Status();
}

}  // namespace dtcomm
