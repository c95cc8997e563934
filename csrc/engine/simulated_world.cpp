#include "engine/simulated_world.h"

#include <cstring>
#include <new>
#include <stdexcept>

#include "engine/hash.h"

namespace dtcomm {
namespace {

struct Event {
  bool done;  // a count of finished pieces, otherwise a flag
  std::size_t index;
  std::uint64_t value;
  std::uint64_t operation;
  std::uint32_t checksum;
};

struct Heap {
  explicit Heap(std::size_t bytes) : data(::operator new(bytes, std::align_val_t{kPage})) {
    std::memset(data, 0, bytes);
  }
  ~Heap() { ::operator delete(data, std::align_val_t{kPage}); }
  Heap(const Heap&) = delete;
  void* data;
};

}  // namespace

// Everything a rank publishes goes into its log; each reader sees a prefix of it, as the memory order promises.
class LocalWorld::Rank final : public Fabric {
 public:
  Rank(LocalWorld& world, const AreaLayout& layout) : world_(world), layout_(layout), area_(layout.bytes()) {
    rank = static_cast<int>(layout.rank);
    ranks = static_cast<int>(layout.ranks);
    own = view_of(area_.data, layout);
    new (own.head) AreaHead;
    for (std::size_t i = 0; i < flags(); ++i) new (own.flags + i) Flag;
  }

  // This reader's copy of what `source` has shown it so far.
  void watch(Rank& source) {
    PeerView view = source.own;
    auto& seen = seen_.emplace_back(std::make_unique<Seen>(flags()));
    if (&source != this) {
      view.flags = seen->flags.get();
      view.done = &seen->done;
    }
    peers.push_back(view);
  }

  void publish_flag(std::size_t index, std::uint64_t seq, std::uint64_t operation, std::uint32_t checksum) override {
    const bool again = own.flags[index].seq == seq;  // sent in several steps: a flip falls before the first
    own.flags[index].operation.store(operation);
    own.flags[index].checksum.store(checksum);
    own.flags[index].seq.store(seq);
    log.push_back({false, index, seq, operation, checksum});
    if (!again && world_.published_++ == world_.options_.flip) {
      std::uint8_t* slot = own.data + (index % kSlots) * own.slot_stride;
      const std::uint64_t bit = world_.random() % (machine->call().plan->box_stride() * 8);
      slot[index / kSlots * machine->call().plan->box_stride() + bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
    }
  }
  void publish_done(std::uint64_t pieces) override {
    own.head->done.store(pieces);
    log.push_back({true, 0, pieces, 0, 0});
  }
  std::uint8_t* resolve(int, std::int64_t, std::uint64_t, std::uint64_t offset, std::size_t) override {
    return reinterpret_cast<std::uint8_t*>(offset);  // one address space: the "region" is all of it
  }
  void pull(int, std::uint64_t address, std::uint8_t* out, std::size_t bytes) override {
    std::memcpy(out, reinterpret_cast<const std::uint8_t*>(address), bytes);
  }

  // Shows this reader one more event of `source`; false where it has seen all.
  bool see_next(const Rank& source) {
    Seen& seen = *seen_[static_cast<std::size_t>(source.rank)];
    if (&source == this || seen.cursor == source.log.size()) return false;
    const Event& event = source.log[seen.cursor++];
    if (event.done) {
      seen.done.store(event.value);
    } else {
      seen.flags[event.index].operation.store(event.operation);
      seen.flags[event.index].checksum.store(event.checksum);
      seen.flags[event.index].seq.store(event.value);
    }
    return true;
  }

  PeerView own;
  std::vector<Event> log;
  std::unique_ptr<Machine> machine;
  std::vector<Call> calls;
  std::size_t next_call = 0;
  std::uint64_t number = 0;
  std::uint64_t looks = 0;
  bool alive = true;
  bool blocked = false;
  LocalOutcome outcome;

 private:
  struct Seen {
    explicit Seen(std::size_t count) : flags(new Flag[count]) {}
    std::unique_ptr<Flag[]> flags;
    std::atomic<std::uint64_t> done{0};
    std::size_t cursor = 0;
  };
  std::size_t flags() const { return std::size_t{layout_.max_boxes} * kSlots; }

  LocalWorld& world_;
  AreaLayout layout_;
  Heap area_;
  std::vector<std::unique_ptr<Seen>> seen_;
};

LocalWorld::LocalWorld(const LocalOptions& options) : options_(options), state_(mix64(options.seed + 1)) {
  for (int rank = 0; rank < options.ranks; ++rank) {
    const AreaLayout layout{static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(options.ranks),
                            options.max_boxes, options.slot_bytes};
    ranks_.push_back(std::make_unique<Rank>(*this, layout));
  }
  for (auto& reader : ranks_) {
    for (auto& source : ranks_) reader->watch(*source);
  }
}

LocalWorld::~LocalWorld() = default;

std::uint64_t LocalWorld::random() { return state_ = mix64(state_); }

// Lets some of what was published be seen, or everything.
void LocalWorld::deliver(bool everything) {
  const auto threshold = static_cast<std::uint64_t>(options_.delay * 65536.0);
  for (auto& reader : ranks_) {
    for (auto& source : ranks_) {
      while ((everything || random() % 65536 >= threshold) && reader->see_next(*source)) {
      }
    }
  }
}

std::vector<LocalOutcome> LocalWorld::run(std::vector<std::vector<Call>> calls) {
  if (calls.size() != ranks_.size()) throw std::invalid_argument("calls: one list per rank");
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = *ranks_[i];
    rank.calls = std::move(calls[i]);
    rank.next_call = 0;
    rank.outcome = LocalOutcome{};
    if (!rank.alive) rank.outcome.fate = Fate::died;
  }
  const auto running = [](const Rank& rank) {
    return rank.alive && rank.outcome.fate == Fate::done && (rank.machine || rank.next_call < rank.calls.size());
  };
  bool flushed = false;  // nothing is left to be seen
  for (;;) {
    std::vector<Rank*> candidates;
    bool all_blocked = true;
    for (auto& rank : ranks_) {
      if (!running(*rank)) continue;
      candidates.push_back(rank.get());
      all_blocked = all_blocked && rank->blocked;
    }
    if (candidates.empty()) break;
    if (all_blocked) {
      if (flushed) {  // nobody will ever move again
        for (Rank* rank : candidates) {
          const int blocker = rank->machine->blocker();
          const bool dead = blocker >= 0 && !ranks_[static_cast<std::size_t>(blocker)]->alive;
          bool victim_somewhere = false;
          for (auto& other : ranks_) victim_somewhere |= !other->alive;
          bool disagree = false;
          for (auto& other : ranks_) {
            const OpHeader& header = other->own.head->ops[rank->number % kOpRing];
            disagree |= header.number == rank->number && header.fingerprint != rank->machine->operation();
          }
          rank->outcome.fate = dead || victim_somewhere ? Fate::peer_lost : disagree ? Fate::mismatch : Fate::stuck;
          rank->outcome.culprit = blocker;
          for (auto& other : ranks_) {  // whose failure this rank would read
            if (other->outcome.fate == Fate::corrupt)
              rank->outcome = {Fate::corrupt, other->outcome.culprit, rank->outcome.finished, rank->outcome.wire_bytes};
          }
        }
        break;
      }
      deliver(true);
      flushed = true;
      for (Rank* rank : candidates) rank->blocked = false;
      continue;
    }
    Rank& rank = *candidates[random() % candidates.size()];
    ++looks_;
    if (rank.rank == options_.victim && rank.looks++ >= options_.death) {
      rank.alive = false;
      rank.outcome.fate = Fate::died;
      continue;
    }
    if (!rank.machine) {
      ++rank.number;
      const Call& call = rank.calls[rank.next_call++];
      const std::uint64_t operation = announce(*rank.own.head, call, rank.number);
      rank.machine = std::make_unique<Machine>(rank, call, operation, rank.number);
    }
    const Progress progress = rank.machine->advance(1 + static_cast<int>(random() % 6));
    rank.blocked = progress == Progress::blocked;
    if (!rank.blocked) {
      flushed = false;
      for (auto& other : ranks_) other->blocked = false;
    }
    if (const Damage* damage = rank.machine->damage()) {
      rank.outcome.fate = Fate::corrupt;
      rank.outcome.culprit = damage->sender;
    } else if (rank.machine->mismatch()) {
      rank.outcome.fate = Fate::mismatch;
      rank.outcome.culprit = rank.machine->blocker();
    } else if (progress == Progress::done) {
      rank.outcome.wire_bytes += rank.machine->wire_bytes();
      ++rank.outcome.finished;
      rank.machine.reset();
    }
    deliver(false);
  }
  std::vector<LocalOutcome> outcomes;
  for (auto& rank : ranks_) outcomes.push_back(rank->outcome);
  return outcomes;
}

}  // namespace dtcomm
