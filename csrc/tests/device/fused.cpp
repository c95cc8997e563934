#undef _FORTIFY_SOURCE  // its longjmp refuses another stack
#include "tests/device/fused.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "cuda/fused.cuh"
#include "tests/device/cases.h"

namespace dtcomm::device_tests {

namespace {

constexpr std::size_t kGuard = 64;

// Bytes at an address aligned to 16, with guards around them.
class Bytes {
 public:
  explicit Bytes(std::size_t size) : size_(size), memory_(size + 2 * kGuard + kAlign, 0xA5) {}
  std::uint8_t* data() {
    return reinterpret_cast<std::uint8_t*>(aligned(reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard));
  }
  bool guarded() {
    for (std::size_t i = 1; i <= kGuard; ++i) {
      if (data()[-static_cast<std::ptrdiff_t>(i)] != 0xA5 || data()[size_ + i - 1] != 0xA5) return false;
    }
    return true;
  }
  std::size_t size() const { return size_; }
  bool operator==(Bytes& other) { return size_ == other.size_ && std::memcmp(data(), other.data(), size_) == 0; }

 private:
  std::size_t size_;
  std::vector<std::uint8_t> memory_;
};

struct RankMemory {
  Bytes input, output, residual, room;
  cuda::Pad pad = {};
};

std::uint64_t scatter_key(unsigned call, int rank) { return mix_key(call, static_cast<std::uint32_t>(rank), 0); }
std::uint64_t reduce_key(unsigned call, int rank) { return mix_key(call, static_cast<std::uint32_t>(rank), 1); }

// What the collective means, said with the CPU's kernels: inputs and residuals as before; the residuals are rewritten.
class Expected {
 public:
  Expected(const Collective& which, std::vector<RankMemory>& ranks, unsigned call)
      : which_(which), ranks_(ranks), call_(call), out(which.sum.numel * size_of(which.sum.dtype)) {
    for (RankMemory& each : ranks) {
      residuals.push_back(std::make_unique<Bytes>(each.residual.size()));
      std::memcpy(residuals.back()->data(), each.residual.data(), each.residual.size());
    }
    const std::size_t unit = granule_elements(which.codec), numel = which.sum.numel;
    const std::size_t granules = (numel + unit - 1) / unit, n = ranks.size();
    if (which.sum.algorithm == cuda::Algorithm::one_shot) sum_of(0, numel, -1);
    for (std::size_t c = 0; c < n && which.sum.algorithm == cuda::Algorithm::two_shot; ++c) {
      const std::size_t from = std::min(numel, granules * c / n * unit);
      const std::size_t to = std::min(numel, granules * (c + 1) / n * unit);
      if (from < to) sum_of(from, to, static_cast<int>(c));
    }
  }

 private:
  const Collective& which_;
  std::vector<RankMemory>& ranks_;
  unsigned call_;
  const Kernels& cpu_ = *find_kernels("generic");

  Combine encode(std::size_t rank, std::size_t from, std::size_t to, std::uint8_t* payload) {
    Combine call;
    call.local = ranks_[rank].input.data() + from * size_of(which_.sum.dtype);
    call.local_dtype = call.out_dtype = call.dtype = which_.sum.dtype;
    call.numel = to - from;
    call.offset = from;
    call.key = scatter_key(call_, static_cast<int>(rank));
    call.payload_out = payload;
    if (which_.residual) {
      call.residual_in = call.residual_out = reinterpret_cast<float*>(residuals[rank]->data()) + from;
    }
    return call;
  }

  // Elements from .. to, which `owner` sums up and encodes again; -1: everybody for himself.
  void sum_of(std::size_t from, std::size_t to, int owner) {
    const std::size_t bytes = wire_bytes(which_.codec, to - from, which_.sum.dtype);
    std::vector<std::unique_ptr<Bytes>> payloads;
    std::vector<const std::uint8_t*> terms;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (static_cast<int>(r) == owner) continue;
      payloads.push_back(std::make_unique<Bytes>(bytes));
      terms.push_back(payloads.back()->data());
      cpu_.combine(which_.codec, encode(r, from, to, payloads.back()->data()));
    }
    Bytes encoded(bytes);
    Combine sum;
    if (owner >= 0) {
      sum = encode(static_cast<std::size_t>(owner), from, to, encoded.data());
      sum.key = reduce_key(call_, owner);
      sum.position = owner;
    } else {
      sum.dtype = sum.out_dtype = which_.sum.dtype;
      sum.numel = to - from;
    }
    sum.payloads = terms.data();
    sum.count = static_cast<int>(terms.size());
    sum.divisor = which_.sum.divisor;
    sum.op = which_.sum.op;
    std::uint8_t* to_out = out.data() + from * size_of(which_.sum.dtype);
    if (owner < 0) sum.out = to_out;
    cpu_.combine(which_.codec, sum);
    if (owner >= 0) {
      cpu_.decode(which_.codec, encoded.data(), to - from, which_.sum.dtype, to_out, which_.sum.dtype, false);
    }
  }

 public:
  Bytes out;
  std::vector<std::unique_ptr<Bytes>> residuals;
};

// use(kernel): the body of a thread, of the family and with the counts that a launch would choose.
template <bool Feedback, class Family>
void run_block(const HostBlock& block, const cuda::AllReduce& sum, const cuda::Fused& fused, const Family& family,
               int rank, unsigned index) {
  if (sum.algorithm == cuda::Algorithm::two_shot) {
    if (sum.ranks == 8 && sum.op == ReduceOp::sum) {
      return cuda::two_shot<7, Feedback>(block, fused, family, rank, index);
    }
    return cuda::two_shot<cuda::kAnyCount, Feedback>(block, fused, family, rank, index);
  }
  if (sum.ranks == 8 && sum.op == ReduceOp::sum) {
    return cuda::one_shot<8, Feedback>(block, fused, family, rank, index);
  }
  return cuda::one_shot<cuda::kAnyCount, Feedback>(block, fused, family, rank, index);
}

void launch(Swarm& swarm, const Collective& which, const cuda::Fused& fused, std::uint64_t order, const Fault& fault,
            int absent) {
  std::vector<cuda::Shared> shared(static_cast<unsigned>(fused.ranks) * fused.blocks);
  cuda::with_family(which.codec, which.sum.dtype, [&](const auto& family) {
    if constexpr (std::decay_t<decltype(family)>::kHot) {
      swarm.run(static_cast<unsigned>(shared.size()), order, [&](unsigned at) {
        const HostBlock block{swarm, shared[at], fault};
        const auto rank = static_cast<int>(at / fused.blocks);
        if (rank == absent) return;
        which.residual ? run_block<true>(block, which.sum, fused, family, rank, at % fused.blocks)
                       : run_block<false>(block, which.sum, fused, family, rank, at % fused.blocks);
      });
    }
  });
}

std::string at_rank(const char* what, std::size_t rank, unsigned call) {
  return std::string(what) + " of rank " + std::to_string(rank) + " in call " + std::to_string(call);
}

}  // namespace

std::string differs(Swarm& swarm, const Collective& which, std::uint64_t order, const Fault& fault, int absent) {
  const cuda::AllReduce& sum = which.sum;
  cuda::Fused fused = cuda::fused_of(which.codec, sum);
  const std::size_t bytes = sum.numel * size_of(sum.dtype);
  std::vector<RankMemory> ranks;
  ranks.reserve(static_cast<std::size_t>(sum.ranks));
  for (int r = 0; r < sum.ranks; ++r) {
    ranks.push_back({Bytes(bytes), Bytes(bytes), Bytes(sum.numel * sizeof(float)), Bytes(cuda::room_bytes(fused)), {}});
    std::memset(ranks.back().residual.data(), 0, ranks.back().residual.size());
  }
  for (unsigned call = 0; call < which.calls; ++call) {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      fill(sum.dtype, which.seed + 9 * static_cast<unsigned>(r) + 1000 * call, sum.numel, ranks[r].input.data());
      const auto rank = static_cast<int>(r);
      void* out = which.in_place ? ranks[r].input.data() : ranks[r].output.data();
      float* residual = which.residual ? reinterpret_cast<float*>(ranks[r].residual.data()) : nullptr;
      fused.seats[r] =
          cuda::seat_of(which.codec, sum, rank,
                        {ranks[r].input.data(), out, residual, scatter_key(call, rank), reduce_key(call, rank)});
      fused.peers[r] = {ranks[r].room.data(), &ranks[r].pad};
    }
    Expected expected(which, ranks, call);
    launch(swarm, which, fused, order + call, fault, absent);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const auto missing = static_cast<int>(ranks[r].pad.missing) - 1;
      if (static_cast<int>(r) == absent) continue;
      if (missing != absent) return at_rank("the missing rank", r, call) + " is " + std::to_string(missing);
      if (absent >= 0) continue;
      Bytes& out = which.in_place ? ranks[r].input : ranks[r].output;
      if (!(out == expected.out)) return at_rank("the sum", r, call);
      if (which.residual && !(ranks[r].residual == *expected.residuals[r])) return at_rank("the residual", r, call);
      if (!ranks[r].room.guarded() || !out.guarded() || !ranks[r].residual.guarded()) {
        return at_rank("the memory around what is", r, call);
      }
    }
    if (absent >= 0) break;
  }
  return "";
}

std::string describe(const Collective& which) {
  const cuda::AllReduce& sum = which.sum;
  char text[300];
  std::snprintf(
      text, sizeof text,
      "%s of %zu elements, dtype %d, %d ranks, %u blocks, sections of %u granules, divisor %zu, op %d, residual "
      "%d, in place %d, seed %u: ",
      sum.algorithm == cuda::Algorithm::two_shot ? "two_shot" : "one_shot", sum.numel, static_cast<int>(sum.dtype),
      sum.ranks, sum.blocks, sum.section, sum.divisor, static_cast<int>(sum.op), which.residual, which.in_place,
      which.seed);
  return text + describe(which.codec);
}

}  // namespace dtcomm::device_tests
