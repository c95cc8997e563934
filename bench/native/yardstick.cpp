// A hand-written shared-memory all-reduce (fp32 sum in place, 2 to 8 ranks of one host): what the interpreter of
// programs is measured against. It knows nothing of codecs, schedules, errors or dead peers; it only has to be
// fast, correct and bit-identical on all ranks.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "passes.h"
#include "segment.h"

namespace yardstick {
namespace {

// Mirrored by bench/common/native.py.
struct Tuning {
  std::uint32_t piece_bytes;
  std::uint32_t slots;
  std::uint32_t ahead;          // pieces staged before the one being reduced; 0 waits for every piece
  std::uint32_t behind;         // pieces reduced before the one being gathered
  std::uint32_t stream_stage;   // non-temporal stores into the slots when staging
  std::uint32_t stream_slot;    // ... when the owner puts its sum into its slot
  std::uint32_t stream_result;  // ... into the user's tensor
  std::uint32_t spins;
  std::uint32_t yields;
};

enum Algorithm : int {
  kOneShot = 0,
  kTwoShot = 1,
  kDirect = 2,  // tensors that lie in the segment: each rank sums its share from and to every rank's tensor
  kCopy = 3,
  kStreamingCopy = 4,
  kUpdate = 5,
  kMemcpy = 6,
};

class Rank {
 public:
  Rank(std::byte* base, Layout layout, int rank) : base_(base), layout_(layout), rank_(rank) {}
  ~Rank() { munmap(base_, layout_.total()); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  float* tensor(int rank) const { return at(layout_.tensors() + rank * layout_.tensor_stride()); }
  std::size_t capacity() const { return layout_.tensor_bytes / sizeof(float); }
  std::size_t ring_bytes() const { return layout_.ring_bytes; }

  void barrier(const Tuning& t) {
    ++barriers_;
    flags(rank_).barrier.raise(barriers_);
    for_peers([&](int peer) { flags(peer).barrier.wait(barriers_, t.spins, t.yields); });
  }

  // Every rank reads every other's whole input. Two boxes a rank are enough: a rank that has box c+1 of all the
  // others knows that they are done with box c.
  void one_shot(float* x, std::size_t n, const Tuning& t) {
    ++boxed_;
    const int parity = boxed_ % 2;
    const float* sources[kMaxRanks];
    for (int r = 0; r < layout_.ranks; ++r) sources[r] = box(r, parity);
    copy(box(rank_, parity), x, n, t.stream_stage);
    if (t.stream_stage) _mm_sfence();
    flags(rank_).boxed.raise(boxed_);
    for_peers([&](int peer) { flags(peer).boxed.wait(boxed_, t.spins, t.yields); });
    sources[rank_] = x;
    sum(layout_.ranks, x, nullptr, sources, n, false, false);
  }

  // Piece by piece through a ring of slots: stage what others will sum; sum the own share into tensor and slot;
  // copy the others' sums from theirs. The three run `ahead` and `behind` pieces apart, so that a rank seldom
  // waits for a piece that its peer has only just begun.
  void two_shot(float* x, std::size_t n, const Tuning& t) {
    const std::size_t piece = t.piece_bytes / sizeof(float);
    const std::size_t pieces = (n + piece - 1) / piece;
    const std::size_t lag = t.ahead + t.behind;
    for (std::size_t k = 0; k < pieces + lag; ++k) {
      if (k < pieces) stage(x, n, piece, k, t);
      if (k >= t.ahead && k - t.ahead < pieces) reduce(x, n, piece, k - t.ahead, t);
      if (k >= lag) gather(x, n, piece, k - lag, t);
    }
    if (t.stream_result) _mm_sfence();
    pieces_ += static_cast<std::uint32_t>(pieces);
  }

  void direct(std::size_t n, const Tuning& t) {
    ++entered_;
    flags(rank_).entered.raise(entered_);
    for_peers([&](int peer) { flags(peer).entered.wait(entered_, t.spins, t.yields); });
    const Range share = share_of(n, rank_);
    float* tensors[kMaxRanks];
    for (int r = 0; r < layout_.ranks; ++r) tensors[r] = tensor(r) + share.begin;
    if (layout_.ranks == 2) {
      sum(2, tensors[0], tensors[1], tensors, share.size(), t.stream_result, t.stream_result);
    } else {
      // Two outputs a pass is what `sum` knows; the rest are copied while the block is in the first-level cache.
      constexpr std::size_t kBlock = 2048;
      for (std::size_t i = 0; i < share.size(); i += kBlock) {
        const std::size_t m = std::min(kBlock, share.size() - i);
        const float* sources[kMaxRanks];
        for (int r = 0; r < layout_.ranks; ++r) sources[r] = tensors[r] + i;
        sum(layout_.ranks, tensors[rank_] + i, nullptr, sources, m, false, false);
        for_peers([&](int peer) { copy(tensors[peer] + i, tensors[rank_] + i, m, t.stream_result); });
      }
    }
    if (t.stream_result) _mm_sfence();
    flags(rank_).left.raise(entered_);
    for_peers([&](int peer) { flags(peer).left.wait(entered_, t.spins, t.yields); });
  }

 private:
  struct Range {
    std::size_t begin, end;
    std::size_t size() const { return end - begin; }
  };

  float* at(std::size_t offset) const { return reinterpret_cast<float*>(base_ + offset); }
  RankFlags& flags(int rank) const { return reinterpret_cast<RankFlags*>(base_)[rank]; }
  float* box(int rank, int parity) const {
    return at(layout_.boxes() + rank * layout_.box_stride() + parity * kBoxBytes);
  }
  float* slot(int rank, std::uint32_t piece, const Tuning& t) const {
    return at(layout_.rings() + rank * layout_.ring_stride() + piece % t.slots * std::size_t{t.piece_bytes});
  }

  template <typename F>
  void for_peers(F f) const {
    for (int i = 1; i < layout_.ranks; ++i) f((rank_ + i) % layout_.ranks);
  }

  // Shares begin on cache lines, so that no two ranks write the same one.
  Range share_of(std::size_t n, int rank) const {
    const std::size_t line = 64 / sizeof(float);
    const std::size_t share = ((n + layout_.ranks - 1) / layout_.ranks + line - 1) / line * line;
    return {std::min(n, rank * share), std::min(n, (rank + 1) * share)};
  }

  void stage(const float* x, std::size_t n, std::size_t piece, std::size_t k, const Tuning& t) {
    const std::uint32_t serial = pieces_ + static_cast<std::uint32_t>(k);
    const float* from = x + k * piece;
    const std::size_t m = std::min(piece, n - k * piece);
    for_peers([&](int peer) { flags(peer).done.wait(serial + 1 - t.slots, t.spins, t.yields); });
    float* to = slot(rank_, serial, t);
    for_peers([&](int peer) {
      const Range share = share_of(m, peer);
      copy(to + share.begin, from + share.begin, share.size(), t.stream_stage);
    });
    if (t.stream_stage) _mm_sfence();
    flags(rank_).staged.raise(serial + 1);
  }

  void reduce(float* x, std::size_t n, std::size_t piece, std::size_t k, const Tuning& t) {
    const std::uint32_t serial = pieces_ + static_cast<std::uint32_t>(k);
    float* local = x + k * piece;
    const Range share = share_of(std::min(piece, n - k * piece), rank_);
    const float* sources[kMaxRanks];
    for_peers([&](int peer) {
      flags(peer).staged.wait(serial + 1, t.spins, t.yields);
      sources[peer] = slot(peer, serial, t) + share.begin;
    });
    sources[rank_] = local + share.begin;
    sum(layout_.ranks, local + share.begin, slot(rank_, serial, t) + share.begin, sources, share.size(),
        t.stream_result, t.stream_slot);
    if (t.stream_slot) _mm_sfence();
    flags(rank_).reduced.raise(serial + 1);
  }

  void gather(float* x, std::size_t n, std::size_t piece, std::size_t k, const Tuning& t) {
    const std::uint32_t serial = pieces_ + static_cast<std::uint32_t>(k);
    float* to = x + k * piece;
    const std::size_t m = std::min(piece, n - k * piece);
    for_peers([&](int peer) {
      flags(peer).reduced.wait(serial + 1, t.spins, t.yields);
      const Range share = share_of(m, peer);
      copy(to + share.begin, slot(peer, serial, t) + share.begin, share.size(), t.stream_result);
    });
    flags(rank_).done.raise(serial + 1);
  }

  std::byte* base_;
  Layout layout_;
  int rank_;
  std::uint32_t barriers_ = 0;
  std::uint32_t boxed_ = 0;
  std::uint32_t entered_ = 0;
  std::uint32_t pieces_ = 0;
};

void run(Rank& rank, int algorithm, float* x, float* y, std::size_t n, const Tuning& t) {
  switch (algorithm) {
    case kOneShot:
      return rank.one_shot(x, n, t);
    case kTwoShot:
      return rank.two_shot(x, n, t);
    case kDirect:
      return rank.direct(n, t);
    case kCopy:
      return copy(y, x, n, false);
    case kStreamingCopy:
      return copy(y, x, n, true);
    case kUpdate:
      return update(x, n);
    case kMemcpy:
      std::memcpy(y, x, n * sizeof(float));
      return;
    default:
      return;
  }
}

// Why a call cannot run, or null.
const char* refusal(const Rank& rank, int algorithm, const float* x, const float* y, std::size_t n, const Tuning& t) {
  const std::size_t bytes = n * sizeof(float);
  if (algorithm < kOneShot || algorithm > kMemcpy) return "no such algorithm";
  if (algorithm == kOneShot && bytes > kBoxBytes) return "one_shot: the message is larger than a box";
  if (algorithm == kDirect) return n <= rank.capacity() ? nullptr : "direct: the segment's tensors are too small";
  if (x == nullptr) return "x is null";
  if (algorithm == kTwoShot) {
    if (t.piece_bytes == 0 || t.piece_bytes % 64 != 0) return "piece_bytes must be a positive multiple of 64";
    if (t.ahead + t.behind >= t.slots) return "slots must exceed ahead + behind";
    if (std::size_t{t.piece_bytes} * t.slots > rank.ring_bytes()) return "the ring is too small";
  }
  const bool two_buffers = algorithm == kCopy || algorithm == kStreamingCopy || algorithm == kMemcpy;
  return two_buffers && y == nullptr ? "y is null" : nullptr;
}

}  // namespace
}  // namespace yardstick

using yardstick::Rank;
using yardstick::Tuning;

extern "C" {

// Bytes of the segment that `yardstick_open` maps.
std::size_t yardstick_bytes(int ranks, std::size_t ring_bytes, std::size_t tensor_bytes) {
  return yardstick::Layout{ranks, ring_bytes, tensor_bytes}.total();
}

// Null where the segment cannot be mapped (errno says why) or the rank count is not 2 to 8.
void* yardstick_open(const char* path, int rank, int ranks, std::size_t ring_bytes, std::size_t tensor_bytes) {
  if (ranks < 2 || ranks > yardstick::kMaxRanks || rank < 0 || rank >= ranks) return nullptr;
  const yardstick::Layout layout{ranks, ring_bytes, tensor_bytes};
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void* base = mmap(nullptr, layout.total(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return base == MAP_FAILED ? nullptr : new Rank(static_cast<std::byte*>(base), layout, rank);
}

void yardstick_close(void* handle) { delete static_cast<Rank*>(handle); }

float* yardstick_tensor(void* handle, int rank) { return static_cast<Rank*>(handle)->tensor(rank); }

void yardstick_barrier(void* handle, const Tuning* t) { static_cast<Rank*>(handle)->barrier(*t); }

// Seconds for each of `iters` calls back to back, begun together; negative where the arguments do not fit, and
// `why` then says what is wrong. `warm` untimed calls go first. x, y: n floats; y is the copies' target.
double yardstick_time(void* handle, int algorithm, float* x, float* y, std::size_t n, const Tuning* t, int warm,
                      int iters, const char** why) {
  Rank& rank = *static_cast<Rank*>(handle);
  *why = yardstick::refusal(rank, algorithm, x, y, n, *t);
  if (*why != nullptr) return -1;
  for (int i = 0; i < warm; ++i) yardstick::run(rank, algorithm, x, y, n, *t);
  rank.barrier(*t);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < iters; ++i) yardstick::run(rank, algorithm, x, y, n, *t);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  rank.barrier(*t);
  return took.count() / iters;
}

// Private memory as an allocator gives it for large blocks (small pages, zeroed), its start skewed. It has pages of its
// own: what was never written would be read from one page of zeros, which is always in the cache.
float* yardstick_allocate(std::size_t bytes, std::size_t skew) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
  void* base = mmap(nullptr, bytes + skew, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  return base == MAP_FAILED ? nullptr : reinterpret_cast<float*>(static_cast<std::byte*>(base) + skew);
}

void yardstick_free(float* x, std::size_t bytes, std::size_t skew) {
  munmap(reinterpret_cast<std::byte*>(x) - skew, bytes + skew);
}

}  // extern "C"
